"""Whether a fused block on the CPU runs whole, or as PyTorch's convolution and then one operator.

On a GPU the library decides that itself. The library's convolutions compute in f32: with 16-bit tensors and
many channels PyTorch's are faster, where the processor multiplies such elements itself.
"""

from __future__ import annotations

import functools
import math
import platform
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from onepass import _onednn
from onepass._conv_gradients import format_of
from onepass._description import Conv, describe

T = TypeVar("T")
_MODES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_MARGIN = 0.9  # predictions are off by so much: PyTorch's convolution runs where it is clearly faster

# Operations a second of PyTorch's convolutions on one core, by the fewer channels of a group: at least 48
# (wide), fewer (thin), and kernels of one tap. Neoverse V1, PyTorch 2.11, with other work on it, forward:
# f32 35 to 50 wide, 58 to 62 of one tap; bf16 83 to 152, 28 to 44 thin, 30 to 65; f16 50 to 86, 26 to 41,
# 25 to 60 GFLOP/s. The figures for x86 are estimates, not measured.
# Thin ones in f32 run at 1 to 40 and stay with the library: of 107 drawn blocks PyTorch's convolution was the
# faster in six, and up to ten times slower.
_ARM = {
    "f32": {"wide": 45e9, "tap": 60e9},
    "f16": {"wide": 70e9, "thin": 35e9, "tap": 45e9},
    "bf16": {"wide": 100e9, "thin": 35e9, "tap": 48e9},
}
_X86 = {
    "f16": {"wide": 100e9, "thin": 50e9, "tap": 100e9},
    "bf16": {"wide": 200e9, "thin": 50e9, "tap": 150e9},
}
_WIDE = 48
# PyTorch reorders the weights in each call: 0.9 to 1.4 ns a weight on Neoverse V1.
_REORDERED = 1e-9
# With gradients PyTorch's convolution is faster for kernels of one tap and samples of many pixels alone.
# Steps of conv2d | group_norm(8) | swish in f32, one core of Neoverse V1, ms by the library and by PyTorch's
# convolution: 256 channels, one tap, 4 samples of 14x14 8.2 and 6.5; 64 samples of 4x4 13.0 and 17.4. For 128
# channels, 3x3, 2 samples of 28x28 the library takes 22 and eager 44, in bf16 24 and 3134.
# Samples of fewer pixels stay with the library in f32, with and without gradients: of 130 blocks of 1 to 48
# pixels drawn on that core, four ran slower than eager by more than 5%.
_MANY_PIXELS = 48
CALL = 5e-6  # of an operator or a loop, on the host


def on_core(arm: T, x86: T) -> T:
    """The rates of this processor."""
    return arm if platform.machine() in ("aarch64", "arm64") else x86


Geometry = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]  # of a tensor; strides are second


def geometry_of(tensor: Tensor) -> Geometry:
    """How a tensor lies."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@functools.lru_cache(maxsize=4096)
def leaves_convolution(block: str, input: Geometry, threads: int, gradients: bool) -> bool:
    """Whether PyTorch's convolution and the rest in one operator are predicted to be faster.

    `gradients`: whether any are wanted.
    """
    sizes, strides, dtype, _ = input
    description = describe(block)
    conv, mode = description.conv, _MODES.get(dtype)
    if conv is None or mode is None or not description.tail or 0 in sizes:
        return False
    if len(sizes) != conv.rank + 2:
        return False
    contiguous = format_of(sizes, strides) == torch.contiguous_format
    convolved = description.conv_output_shape(sizes)
    if chooses_gradients(dtype):
        return _onednn.leaves_forward(description, sizes, contiguous, threads, gradients)
    seconds = _seconds(conv, mode, sizes)
    if seconds is None or (mode == "f32" and math.prod(convolved[2:]) < _MANY_PIXELS):
        return False
    if gradients:
        return mode == "f32" and _is_pointwise(conv)
    how = (mode, "nchw" if contiguous else "nhwc", "cpu", threads)
    predicted = torch.ops.onepass.predicted_seconds
    try:
        with _disable_current_modes():  # those of a tracer at work
            whole = predicted(block, sizes, *how)
            tail = predicted(description.tail, convolved, *how)
    except (ValueError, RuntimeError):  # sizes that the block does not take: the operator says so
        return False
    return (2 * CALL + seconds / threads + tail) / _MARGIN < whole + CALL


def chooses_gradients(dtype: torch.dtype) -> bool:
    """Whether forward and gradients of a convolution of this type are chosen one by one: f32 on x86."""
    return dtype is torch.float32 and on_core(False, True)


@functools.lru_cache(maxsize=4096)
def leaves_gradients(conv: str, input: Geometry, threads: int, wanted: tuple[bool, bool]) -> bool:
    """Whether PyTorch's gradients of a convolution's input and weight are predicted to be faster."""
    sizes, strides, dtype, _ = input
    description = describe(conv)
    assert description.conv is not None
    if not chooses_gradients(dtype) or 0 in sizes:
        return False
    contiguous = format_of(sizes, strides) == torch.contiguous_format
    return _onednn.leaves_gradients(description.conv, sizes, contiguous, threads, wanted)


def _is_pointwise(conv: Conv) -> bool:
    """Whether it has one tap, and many channels on both sides."""
    one_tap = max(conv.kernel) == 1 and max(conv.stride) == 1
    return one_tap and min(conv.in_channels, conv.out_channels) >= _WIDE


def _seconds(conv: Conv, mode: str, sizes: tuple[int, ...]) -> float | None:
    """Of PyTorch's convolution on one core; None where its rates vary too much."""
    rate = _rate(conv, mode)
    return None if rate is None else 2 * conv.multiply_adds(sizes) / rate + _REORDERED * conv.weights


def _rate(conv: Conv, mode: str) -> float | None:
    """Operations a second. None where they vary too much: volumes, transposed, grouped and thin f32
    convolutions.
    """
    if conv.rank == 3 or conv.transposed or conv.groups > 1:
        return None
    rates = on_core(_ARM, _X86)[mode]
    kind = "wide" if min(conv.in_channels, conv.out_channels) >= _WIDE else "thin"
    kind = "tap" if kind == "wide" and max(conv.kernel) == 1 else kind
    return rates.get(kind)
