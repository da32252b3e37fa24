"""Which convolutions of f32 tensors run as PyTorch's on x86, where those are oneDNN's: seconds of both sides,
forward and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from onepass._description import Conv, Description

# PyTorch 2.11, Xeon with AVX-512 (2 MiB of L2 a core, other work on the machine), 2026-11-19: CPU time of 829
# drawn convolutions, forward and gradients of many. Typically off by 1.2, for gradients of weights by 1.4.
# Products are those of taps inside the input, with channels that fill vectors. Each row of output positions
# reads the weights again, which takes as long as so many more of its columns.
_FLOPS, _DEPTHWISE_FLOPS = 144e9, 68e9
_ROW = 4
# An element of input and output: contiguous ones are brought into blocks of a vector's channels and back.
_CONTIGUOUS_ELEMENT, _ELEMENT, _DEPTHWISE_ELEMENT = 1.2e-9, 0.6e-9, 0.4e-9
_WEIGHT = 2e-9
# With channels last, inputs of 2 to 15 channels: 70 drawn convolutions took 2.5 times the formula in the mean
# (two threads, a Xeon of peak 154 GFLOP/s a core, 2026-11-19), the library's rows 1.5 times their prediction.
_FEW_INPUTS = 1.5
_LEAST_SUM = 4  # channels of an input that lies channels last: fewer take as long
_CALL = 30e-6
# Without AVX-512 half of the rates, for vectors of half as many lanes: an estimate.
_HALVED = torch.backends.cpu.get_cpu_capability() != "AVX512"
_LANES = 8 if _HALVED else 16

# What the library's predictions leave out, measured on the same problems: an element of a convolution's input
# and output, of a block's input, of a tail; the tail of a block counts twice, a tail alone 1.85 times.
_OWN_ELEMENT, _BLOCK_ELEMENT, _TAIL_ELEMENT = 0.45e-9, 0.25e-9, 0.2e-9
_OWN_TAIL = 1.85

# Gradients are PyTorch's from 8 channels on, without a stride. Grouped ones with channels last vary. With one
# or two taps in each dimension, at least two inputs and two outputs a group and 0.5 ms of the library's time
# PyTorch takes 0.87 of it, 2.8 times where the library takes less than 0.3 ms (1,695 measurements). With more
# taps it takes 0.4 to 2.8 (22 drawn), and depthwise ones take it five times as long.
_LEAST_CHANNELS, _GROUPED_TAPS, _GROUPED_CHANNELS, _GROUPED_SECONDS = 8, 2, 2, 0.5e-3

# Forward depthwise volumes of more taps vary: PyTorch took 1.29 times the library's time where it was
# predicted to be faster (361 of 3,875 measured), with seven taps 1.47, with five 1.26.
_DEPTHWISE_TAPS = 4  # in each dimension


def leaves_forward(
    description: Description, sizes: Sequence[int], contiguous: bool, threads: int, gradients: bool
) -> bool:
    """Whether PyTorch's convolution is predicted to be faster; with gradients the tail is apart anyway."""
    conv = description.conv
    assert conv is not None
    convolved = description.conv_output_shape(sizes)
    seconds = forward_seconds(conv, sizes, contiguous)
    if seconds is None:
        return False
    inputs, outputs = math.prod(sizes), math.prod(convolved)
    how = ("f32", "nchw" if contiguous else "nhwc", "cpu", threads)
    predicted = torch.ops.onepass.predicted_seconds
    try:
        with _disable_current_modes():  # those of a tracer at work
            if gradients:
                own = predicted(conv.text, sizes, *how) + (inputs + outputs) * _OWN_ELEMENT / threads
                return seconds / threads < own
            tail = predicted(description.tail, convolved, *how)
            own = predicted(description.text, sizes, *how) + tail + inputs * _BLOCK_ELEMENT / threads
    except (ValueError, RuntimeError):  # sizes that the block does not take: the operator says so
        return False
    return seconds / threads + _OWN_TAIL * tail + outputs * _TAIL_ELEMENT / threads < own


def leaves_gradients(
    conv: Conv, sizes: Sequence[int], contiguous: bool, threads: int, wanted: tuple[bool, bool]
) -> bool:
    """Whether PyTorch's gradients of input and weight are predicted to be faster, those that are wanted."""
    uneven = conv.padding_before != conv.padding_after
    if conv.transposed or max(conv.stride) > 1 or uneven:
        return False
    if conv.groups > 1:
        few = min(conv.in_channels, conv.out_channels) < _GROUPED_CHANNELS * conv.groups
        if contiguous or few or max(conv.kernel) > _GROUPED_TAPS:
            return False
        return _own_gradients(conv, sizes, contiguous, threads, wanted) > _GROUPED_SECONDS
    one_tap = max(conv.kernel) == 1
    if (contiguous and not one_tap) or min(conv.in_channels, conv.out_channels) < _LEAST_CHANNELS:
        return False
    elements = math.prod(sizes) + math.prod(conv.output_shape(sizes))
    theirs = (_input_seconds, _weight_seconds)
    seconds = sum(of(conv, sizes, contiguous) for of, want in zip(theirs, wanted) if want)
    own = _own_gradients(conv, sizes, contiguous, threads, wanted) * threads
    return seconds < own + sum(wanted) * elements * _OWN_ELEMENT


def _own_gradients(
    conv: Conv, sizes: Sequence[int], contiguous: bool, threads: int, wanted: tuple[bool, bool]
) -> float:
    """Predicted seconds of the library's gradients."""
    asked = [*wanted, wanted[1]] if conv.bias else list(wanted)
    layout = "nchw" if contiguous else "nhwc"
    with _disable_current_modes():
        return torch.ops.onepass.predicted_backward_seconds(
            conv.text, sizes, "f32", layout, "cpu", threads, asked
        )


def forward_seconds(conv: Conv, sizes: Sequence[int], contiguous: bool) -> float | None:
    """Of PyTorch's convolution on one core; None where its rates vary too much, or are never better."""
    if conv.transposed or conv.padding_before != conv.padding_after:
        return None
    if conv.groups > 1:
        depthwise = conv.groups == conv.in_channels == conv.out_channels
        few = conv.rank < 3 or max(conv.kernel) <= _DEPTHWISE_TAPS
        return _depthwise_seconds(conv, sizes) if depthwise and few and not contiguous else None
    if contiguous:
        inputs = conv.in_channels if _is_flat(conv) else _whole(conv.in_channels)
    else:
        inputs = max(conv.in_channels, _LEAST_SUM)
    seconds = _seconds(conv, sizes, contiguous, inputs, _whole(conv.out_channels))
    few = not contiguous and 1 < conv.in_channels < _LANES
    return _FEW_INPUTS * seconds if few else seconds


def _input_seconds(conv: Conv, sizes: Sequence[int], contiguous: bool) -> float:
    """Of the input's gradient."""
    outputs = _whole(conv.out_channels) if contiguous else conv.out_channels
    inputs = _whole(conv.in_channels)
    return _seconds(conv, sizes, contiguous, inputs, outputs)


def _weight_seconds(conv: Conv, sizes: Sequence[int], contiguous: bool) -> float:
    """Of the weight's gradient."""
    inputs = conv.in_channels if _is_flat(conv) else _whole(conv.in_channels)
    return _seconds(conv, sizes, contiguous, inputs, _whole(conv.out_channels))


def _seconds(conv: Conv, sizes: Sequence[int], contiguous: bool, inputs: int, outputs: int) -> float:
    """With so many channels in products and weights: they are filled up."""
    space, out_space = sizes[2:], conv.output_shape(sizes)[2:]
    flat = max(conv.kernel) == 1 and max(conv.stride) == 1
    columns = math.prod(out_space) if flat else out_space[-1]
    products = sizes[0] * _taps(conv, space, out_space) * inputs * outputs
    rows = 1.0 if flat else 1 + _ROW / max(columns, 1)
    if contiguous:
        elements = inputs * math.prod(space) + _whole(conv.out_channels) * math.prod(out_space)
        moved = sizes[0] * elements * _CONTIGUOUS_ELEMENT
    else:
        elements = conv.in_channels * math.prod(space) + conv.out_channels * math.prod(out_space)
        moved = sizes[0] * elements * _ELEMENT
    weights = inputs * outputs * math.prod(conv.kernel)
    return 2 * products * rows / _rate(_FLOPS) + moved + weights * _WEIGHT + _CALL


def _depthwise_seconds(conv: Conv, sizes: Sequence[int]) -> float:
    """Of one with channels last."""
    convolved = conv.output_shape(sizes)
    products = sizes[0] * _taps(conv, sizes[2:], convolved[2:]) * _whole(conv.in_channels)
    elements = math.prod(sizes) + math.prod(convolved)
    return 2 * products / _rate(_DEPTHWISE_FLOPS) + elements * _DEPTHWISE_ELEMENT + _CALL


def _taps(conv: Conv, space: Sequence[int], out_space: Sequence[int]) -> int:
    """The taps of all positions of a sample that meet the input and not its padding."""
    met = 1
    for d, (size, out_size) in enumerate(zip(space, out_space)):
        stride, before = conv.stride[d], conv.padding_before[d]
        count = 0
        for tap in range(conv.kernel[d]):
            offset = tap * conv.dilation[d] - before
            first = max(0, -(offset // stride))  # the first position that is not before the input
            count += max(0, min(out_size, (size - 1 - offset) // stride + 1) - first)
        met *= count
    return met


def _is_flat(conv: Conv) -> bool:
    """Whether oneDNN reads an input of few channels as it lies."""
    return conv.in_channels < _LANES and max(*conv.kernel, *conv.stride) > 1


def _whole(channels: int) -> int:
    """Of vectors."""
    return -(-channels // _LANES) * _LANES


def _rate(flops: float) -> float:
    return flops / 2 if _HALVED else flops
