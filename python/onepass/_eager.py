"""A block as plain PyTorch calls: the reference of the tests, and the fallback without the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from onepass._description import Conv, Mean, Norm, Pointwise, Stage, describe

_ACTIVATIONS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "relu": lambda x, a, b: F.relu(x),
    "relu6": lambda x, a, b: F.relu6(x),
    "leaky_relu": lambda x, a, b: F.leaky_relu(x, a),
    "elu": lambda x, a, b: F.elu(x, a),
    "gelu": lambda x, a, b: F.gelu(x),
    "gelu_tanh": lambda x, a, b: F.gelu(x, approximate="tanh"),
    "swish": lambda x, a, b: F.silu(x),
    "hardswish": lambda x, a, b: F.hardswish(x),
    "hardsigmoid": lambda x, a, b: F.hardsigmoid(x),
    "sigmoid": lambda x, a, b: torch.sigmoid(x),
    "tanh": lambda x, a, b: torch.tanh(x),
    "mish": lambda x, a, b: F.mish(x),
    "softplus": lambda x, a, b: F.softplus(x),
    "clamp": lambda x, a, b: _clamp(x, a, b),
    "hardtanh": lambda x, a, b: F.hardtanh(x, a, b),
    "mul": lambda x, a, b: x * a,
    "add": lambda x, a, b: x + a,
}


def _passes_limits() -> bool:
    """Asks the formula itself: a backward pass would start threads, after which a process cannot fork."""
    with torch.inference_mode(False), torch.enable_grad(), _disable_current_modes():
        x = torch.zeros(1, device="cpu", requires_grad=True)
        return bool(x.clamp(min=0).grad_fn(torch.ones(1, device="cpu")))


# Whether the gradient of PyTorch's clamp is 1 at its limits: so in 2.11. In 2.15 it is 0, as hardtanh's is.
CLAMP_PASSES_LIMITS = _passes_limits()


def _clamp(x: Tensor, low: float, high: float) -> Tensor:
    """The language's clamp: its gradient is 1 at the limits."""
    clamped = torch.clamp(x, low, high)
    return clamped if CLAMP_PASSES_LIMITS else torch.where((x >= low) & (x <= high), x, clamped.detach())


_CONVS = {
    False: (F.conv1d, F.conv2d, F.conv3d),
    True: (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
}


def convolve(conv: Conv, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """PyTorch's own convolution."""
    function = _CONVS[conv.transposed][conv.rank - 1]
    if conv.transposed:
        padding = (conv.padding_before, conv.output_padding)
        return function(x, weight, bias, conv.stride, *padding, conv.groups, conv.dilation)
    x, padding = padded(conv, x)
    return function(x, weight, bias, conv.stride, padding, conv.dilation, conv.groups)


def padded(conv: Conv, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The input and the padding that PyTorch's convolution takes: uneven padding is part of the input."""
    if conv.padding_before == conv.padding_after:
        return x, conv.padding_before
    pairs = zip(reversed(conv.padding_before), reversed(conv.padding_after), strict=True)
    return F.pad(x, [size for pair in pairs for size in pair]), (0,) * conv.rank


def _over_space(values: Tensor, x: Tensor) -> Tensor:
    """Values per channel, or per sample and channel, in a shape that broadcasts over space."""
    return values.reshape(*values.shape, *(1,) * (x.dim() - 2))


def _pointwise(stage: Pointwise, x: Tensor, operands: Iterator[Tensor]) -> Tensor:
    if stage.argument == "none":
        return _ACTIVATIONS[stage.op](x, stage.a, stage.b)
    operand = next(operands)
    if stage.op == "prelu":
        return F.prelu(x, operand)
    if stage.argument == "channel":
        operand = _over_space(operand, x)
    return x * operand if stage.op == "channel_mul" else x + operand


def _normalise(norm: Norm, x: Tensor, parameters: Iterator[Tensor]) -> Tensor:
    weight, bias = (next(parameters), next(parameters)) if norm.affine else (None, None)
    # torch.group_norm, for F.instance_norm refuses slabs of one element, which give the bias.
    normalised = torch.group_norm(x, norm.group_count(x.shape[1]), weight, bias, norm.eps)
    # Autocast on CUDA makes the one float32 and leaves the other as it is.
    return normalised.to(x.dtype) if norm.instance else normalised


def _run_stage(stage: Stage, x: Tensor, parameters: Iterator[Tensor]) -> Tensor:
    if isinstance(stage, Conv):
        weight = next(parameters)
        return convolve(stage, x, weight, next(parameters) if stage.bias else None)
    if isinstance(stage, Norm):
        return _normalise(stage, x, parameters)
    if isinstance(stage, Mean):
        return x.mean(dim=tuple(range(2, x.dim())))
    return _pointwise(stage, x, parameters)


def run(block: str, input: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Runs the block stage by stage."""
    remaining = iter(parameters)
    x = input
    for stage in describe(block).stages:
        x = _run_stage(stage, x, remaining)
    return x
