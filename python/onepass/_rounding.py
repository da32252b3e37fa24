"""Whether PyTorch's own convolution of given sizes rounds its operands to TF32, where that is allowed.

cuDNN decides it for every convolution by how fast it expects its kernels to be. Of 6,960 that
scripts/probe_tf32.py drew, 45% were rounded, and no property of them predicts which (docs/numerics.md). So
PyTorch is asked, once for each convolution.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from onepass import _eager
from onepass._conv_gradients import memory_format
from onepass._description import Conv


def asked(
    convolve: Callable[[Tensor, Tensor], Tensor],
    input: Tensor,
    weight: Tensor,
    transposed: bool,
    gradients: bool,
) -> list[str]:
    """How operands are rounded: in the forward pass, then for the gradients of the input and the weight.

    "fp32": not at all. "tf32": to nearest, ties to even. "tf32_away": to nearest, ties away from zero.
    "other": otherwise. `input` and `weight` are of the convolution's sizes and are overwritten. Factors that
    lie between two values of TF32 tell. All weights but those of one input channel are zero, and so is the
    output's gradient but at one position: sums of few terms keep the factor.
    """
    results = []
    for factor in (1.0, 1.0 + 2.0**-11, 1.0 + 3.0 * 2.0**-11):
        x, w = input.fill_(1.0), weight.zero_()
        (w[:1] if transposed else w[:, :1]).fill_(factor)
        with torch.no_grad():
            found = [convolve(x, w).amax()]
        if gradients:
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (x, w)]
                y = convolve(*leaves)
                direction = torch.zeros_like(y)
                centre = (0, slice(None), *(size // 2 for size in y.shape[2:]))
                direction[centre] = 1.0
                (dx,) = torch.autograd.grad(y, leaves[:1], direction, retain_graph=True)
                (dw,) = torch.autograd.grad(y, leaves[1:], direction * factor)
            found += [dx.amax(), dw.amax()]
        results.append(torch.stack(found))
    ulps = ((torch.stack(results[1:]) / results[0] - 1.0) * 2.0**11).T.tolist()
    kinds = {"fp32": (1, 3), "tf32": (0, 4), "tf32_away": (2, 4)}
    return [
        next((k for k, own in kinds.items() if all(abs(a - b) < 0.3 for a, b in zip(pair, own))), "other")
        for pair in ulps
    ]


NEVER = ("fp32", "fp32", "fp32")  # where PyTorch was not asked: this very object


def switches() -> tuple[Any, ...]:
    """PyTorch's switches that answers follow, in half a microsecond: its properties take three."""
    return (
        _precision("cuda", "conv"),
        _C._get_cudnn_benchmark(),
        _C._get_cudnn_deterministic() or _C._get_deterministic_algorithms(),
        _C._get_cudnn_enabled(),
    )


_C = torch._C
_precision = _C._get_fp32_precision_getter


def rounds(conv: Conv, input: Tensor, weight: Tensor, gradients: bool) -> tuple[str, ...]:
    """The answers for this very convolution; "fp32" where PyTorch cannot be asked (a capture, no memory)."""
    return answers(conv, tuple(input.shape), memory_format(input, weight), input.device, gradients)


def answers(
    conv: Conv, sizes: tuple[int, ...], order: torch.memory_format, device: torch.device, gradients: bool
) -> tuple[str, ...]:
    """As rounds, of an input of these sizes."""
    flags = torch.backends.cudnn
    deterministic = flags.deterministic or torch.are_deterministic_algorithms_enabled()
    key = (conv.text, sizes, order, device, gradients, flags.benchmark, deterministic, flags.enabled)
    if key not in _known:
        if 0 in sizes or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
            return NEVER
        try:
            _known[key] = _ask(conv, sizes, order, device, gradients)
        except torch.OutOfMemoryError:
            return NEVER
    return _known[key]


_known: dict[tuple[Any, ...], tuple[str, ...]] = {}


def _ask(
    conv: Conv, sizes: tuple[int, ...], order: torch.memory_format, device: torch.device, gradients: bool
) -> tuple[str, ...]:
    outer, inner = conv.out_channels, conv.in_channels // conv.groups
    if conv.transposed:
        outer, inner = conv.in_channels, conv.out_channels // conv.groups
    with _disable_current_modes():  # those of a compiler at work
        x = torch.empty(sizes, device=device, memory_format=order)
        w = torch.empty((outer, inner, *conv.kernel), device=device, memory_format=order)
        convolve = functools.partial(_eager.convolve, conv)
        return (*asked(convolve, x, w, conv.transposed, gradients), "fp32", "fp32")[:3]
