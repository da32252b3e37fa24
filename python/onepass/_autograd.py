"""What the autograd functions of all devices share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_exporting() -> bool:
    """Whether torch.export records this call: its graphs are for inference and shall hold the fused operator.

    Dynamo takes is_exporting() for true under torch.compile too, where gradients are needed.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


class _SecondGradient(torch.autograd.Function):
    """Gives on what it gets, and refuses to be differentiated: gradients of gradients are not computed."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "onepass blocks can be differentiated once: run the stages as PyTorch modules for more"
        )


def once_differentiable(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """Makes the gradients' own gradients an error; PyTorch's decorator may leave them out in silence."""

    @functools.wraps(backward)
    def guarded(ctx: Any, *output_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *output_gradients)
        with torch.no_grad():
            gradients = backward(ctx, *output_gradients)
        present = [gradient for gradient in gradients if gradient is not None]
        sources = [tensor for tensor in (*ctx.saved_tensors, *output_gradients) if tensor is not None]
        refusing = iter(_SecondGradient.apply(len(present), *present, *sources))
        return tuple(None if gradient is None else next(refusing) for gradient in gradients)

    return guarded
