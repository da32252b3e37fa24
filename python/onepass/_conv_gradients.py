"""The gradients of a convolution by PyTorch, and the memory format of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onepass._description import Conv
from onepass._eager import padded


def memory_format(*tensors: Tensor) -> torch.memory_format:
    """Channels last where one of the tensors is, by PyTorch's rule for strides (c10/core/MemoryFormat.h)."""
    for tensor in tensors:
        found = format_of(tensor.shape, tensor.stride())
        if found != torch.contiguous_format:
            return found
    return torch.contiguous_format


def format_of(sizes: Sequence[Any], strides: Sequence[Any]) -> torch.memory_format:
    """The same of sizes and strides."""
    if not _is_channels_last(sizes, strides):
        return torch.contiguous_format
    return torch.channels_last if len(sizes) == 4 else torch.channels_last_3d


def format_named(layout: str, dimensions: int) -> torch.memory_format:
    """Of "nchw" or "nhwc", for a tensor of so many dimensions."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    plain = torch.contiguous_format
    return formats.get(dimensions, plain) if layout == "nhwc" else plain


def _is_channels_last(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    if len(sizes) not in (4, 5) or strides[1] == 0:
        return False
    least: Any = 0
    for d in (1, *range(len(sizes) - 1, 1, -1), 0):
        if strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * sizes[d] if d > 0 and sizes[d] > 1 else strides[d]
    return True


def _dense(weight: Tensor) -> Tensor:
    """The weight in one of PyTorch's formats: for others 2.11 gives wrong gradients on aarch64."""
    if weight.is_contiguous():
        return weight
    return weight.contiguous(memory_format=memory_format(weight))


def conv_gradients_by_torch(
    conv: Conv, output_gradient: Tensor, input: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of input, weight and, where the convolution has one, bias; None where not wanted."""
    uneven = conv.padding_before != conv.padding_after
    sizes = input.shape[2:]
    input, padding = padded(conv, input)
    input_gradient, weight_gradient, _ = torch.ops.aten.convolution_backward.default(
        output_gradient,
        input,
        _dense(weight),
        None,
        conv.stride,
        padding,
        conv.dilation,
        conv.transposed,
        conv.output_padding,
        conv.groups,
        (wanted[0], wanted[1], False),
    )
    if uneven and input_gradient is not None:
        for d, size in enumerate(sizes):
            input_gradient = input_gradient.narrow(d + 2, conv.padding_before[d], size)
    space = (0, *range(2, output_gradient.dim()))
    bias_gradients = (output_gradient.sum(space) if want else None for want in wanted[2:])
    return input_gradient, weight_gradient, *bias_gradients


def has_input_gradient(conv: Conv) -> bool:
    """Whether a convolution of the library gives it: up to 16 times as fast as PyTorch's on Neoverse-V1."""
    even = conv.padding_before == conv.padding_after
    # Output padding of a stride and more reaches beyond what a plain convolution of the gradient sees.
    seen = all(padding < stride for padding, stride in zip(conv.output_padding, conv.stride))
    return even and seen
