"""What the autograd functions of all devices share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass import _fallback

Run = Callable[..., Tensor]


def is_exporting() -> bool:
    """Whether torch.export records this call: its graphs shall hold the fused operator.

    Dynamo takes is_exporting() for true under torch.compile too, where gradients are needed.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


_unwrap_if_dead = torch._C._functorch.unwrap_if_dead


def applied(
    function: type[torch.autograd.Function], constants: tuple[Any, ...], tensors: tuple[Tensor, ...]
) -> Any:
    """As function.apply, which takes 4 microseconds more to look into each argument.

    Tensors that outlived a transform of torch.func stand for others: gradients are of those.
    """
    if torch.compiler.is_compiling():  # Dynamo knows `apply` alone, and in PyTorch 2.15 no tensor twice
        named = [
            tensor.view_as(tensor) if any(tensor is other for other in tensors[:i]) else tensor
            for i, tensor in enumerate(tensors)
        ]
        return function.apply(*constants, *named)
    if _fallback.transforming():
        return function.apply(*constants, *tensors)
    return super(torch.autograd.Function, function).apply(*constants, *map(_unwrap_if_dead, tensors))


def gradients_of(
    run: Run, tensors: Sequence[Tensor], wanted: Sequence[bool], output_gradient: Tensor
) -> list[Tensor | None]:
    """The gradients of what `run` computes by PyTorch's operators, differentiable where that is wanted."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # One name for each argument: the same tensor may be given twice.
        own = [tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in tensors]
        own = [
            tensor if tensor.requires_grad or not want else tensor.detach().requires_grad_()
            for tensor, want in zip(own, wanted, strict=True)
        ]
        output = run(*own)
        sources = [tensor for tensor, want in zip(own, wanted, strict=True) if want]
        found = iter(
            torch.autograd.grad(
                output, sources, output_gradient.to(output.dtype), create_graph=again, allow_unused=True
            )
        )
    return [next(found) if want else None for want in wanted]


def _is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for many, as in torch.autograd.grad(is_grads_batched=True)."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


Backward = Callable[..., tuple[Tensor | None, ...]]
Stages = tuple[str, Run, list[Tensor], int]


def differentiable_again(stages: Callable[[Any], Stages]) -> Callable[[Backward], Backward]:
    """Makes a backward of kernels one that can itself be differentiated, and run on many gradients at once.

    Then PyTorch's own operators compute the gradients. `stages(ctx)` gives the block's text, a function of
    the tensors that PyTorch runs, the tensors, and how many arguments of the forward come before them.
    """

    def guard(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def guarded(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
            if torch.compiler.is_compiling():
                return backward(ctx, output_gradient)
            batched = _is_batched(output_gradient)
            if not torch.is_grad_enabled() and not batched:
                return backward(ctx, output_gradient)
            text, run, tensors, first = stages(ctx)
            what = "many gradients at once are wanted" if batched else "gradients of gradients are wanted"
            _fallback.left(text, _fallback.STAGES, what)
            wanted = ctx.needs_input_grad[first:]
            return (*(None,) * first, *gradients_of(run, tensors, wanted, output_gradient))

        return guarded

    return guard
