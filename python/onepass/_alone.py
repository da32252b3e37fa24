"""Whether a norm or a costly activation that stands alone is the library's, or stays PyTorch's."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from onepass import _cuda, _numerics
from onepass._conv_gradients import format_of
from onepass._cpu import Geometry, on_core
from onepass._description import Norm, describe

# Arm: PyTorch's norms of f32 with channels last, from so many pixels on, read rows as they lie: 0.44 to 0.6
# ns an element forward, where the library takes 0.5 to 0.67 with many channels. Their steps take 1.1 to 1.7
# ns with eight channels a slab and more, the library's 1.6 to 1.9 with many channels; with fewer a slab 2.5
# to 73. Below they take 0.6 to 9 ns forward, the library 0.5 to 0.8. Contiguous ones take 0.64 to 3.3, the
# library 0.35 to 1.3; steps 1.5 to 10 and 1.15 to 3.2. Neoverse V1, one thread, PyTorch 2.11.
_ROW_PIXELS, _ROW_CHANNELS = 1024, 128
_ROW_STEP_PIXELS, _ROW_STEP_CHANNELS, _ROW_STEP_WIDTH = 2048, 64, 8
# x86: contiguous ones take 0.25 to 0.6 ns, the library 0.3 to 0.5; with fewer pixels a channel 0.5 to 1.4 and
# 0.3 to 0.6, steps 1.2 to 5.7 and 1.0 to 2.6. With channels last they take 0.24 to 0.65 ns with wide slabs,
# where the library takes 0.3 to 0.5; else 0.4 to 33, their steps up to 80, where it takes 0.25 to 0.6 and 0.9
# to 1.5. Xeon with AVX-512, one thread, PyTorch 2.11, 56 drawn norms.
_X86_PIXELS, _X86_WIDTH = 64, 32
# x86: from so many elements on, these take PyTorch 1.2 to 3.4 ns an element and the library 0.25 to 0.5; steps
# 2.0 to 6.7 and 1.1 to 1.6. A call of either takes 5 to 11 us. Two threads of a Xeon with AVX-512, PyTorch
# 2.11. Others take PyTorch 0.7 to 1.7 times as long as the library. Arm: not measured.
_COSTLY = ("elu", "mish", "softplus", "gelu_tanh")
_COSTLY_ELEMENTS = 2**14


def is_costly(block: str) -> bool:
    """Whether a block is an activation alone that takes PyTorch long."""
    return "|" not in block and block.partition("(")[0] in _COSTLY


def is_computed(input: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether the library has kernels for tensors of these types."""
    if input.is_cuda:
        same = all(parameter.dtype is input.dtype for parameter in parameters)
        return same and _cuda.why_eager(input.dtype) is None
    return input.is_cpu and all(t.dtype is torch.float32 for t in (input, *parameters))


@functools.lru_cache(maxsize=4096)
def takes_alone(block: str, input: Geometry, gradients: bool) -> bool:
    """Whether a norm or a costly activation alone is predicted to be faster here than PyTorch's in the same
    layout.

    `gradients`: whether any are wanted.
    """
    sizes, strides, dtype, device = input
    if is_costly(block):
        return device.type == "cpu" and on_core(False, True) and math.prod(sizes) >= _COSTLY_ELEMENTS
    if 0 in sizes:
        return False
    channels, pixels = sizes[1], math.prod(sizes[2:])
    width = _width(block, channels)
    contiguous = format_of(sizes, strides) == torch.contiguous_format
    if device.type == "cuda":
        return gains_on_gpu(block, sizes, _numerics.mode_of(dtype, ""), contiguous, str(device))
    if on_core(False, True):
        return pixels < _X86_PIXELS if contiguous else width < _X86_WIDTH
    if contiguous:
        return True
    if not gradients:
        return pixels < _ROW_PIXELS or channels < _ROW_CHANNELS
    if pixels < _ROW_STEP_PIXELS or channels < _ROW_STEP_CHANNELS:
        return True
    return width < _ROW_STEP_WIDTH


# A GPU: PyTorch reads x twice, a slab by one block, and writes y; with channels last it turns x first. H200,
# PyTorch 2.11, by sizes: 5x8x1721464 in 4 groups 3.0 ms, 0.87 ns an element of a slab; channels last,
# 27x4096x32x64 2.9 ms, 87x1024x16x10 0.225, where reading and writing takes 0.43 and 0.027.
_TURNED, _READ_TWICE, _SLAB_ELEMENT = 6.0, 1.5, 0.85e-9
_GPU_LEAST = 30e-6  # the host's part of a fused call: a shorter norm of PyTorch's is bound by the host too


def gains_on_gpu(block: str, sizes: Sequence[int], mode: str, contiguous: bool, device: str) -> bool:
    """Whether a norm alone is predicted to be faster than PyTorch's on a GPU, and worth a call."""
    how = (mode, "nchw" if contiguous else "nhwc", device, 1)
    predicted = torch.ops.onepass.predicted_seconds
    try:
        with _disable_current_modes():  # those of a tracer at work
            own, copy = predicted(block, sizes, *how), predicted("relu", sizes, *how)
            launch = predicted("relu", [1, 1, 1], *how)
    except (ValueError, RuntimeError):  # sizes that the block does not take: PyTorch says so
        return False
    slab = _width(block, sizes[1]) * math.prod(sizes[2:])
    moved = (copy - launch) * (_READ_TWICE if contiguous else _TURNED)
    theirs = 2 * launch + max(moved, slab * _SLAB_ELEMENT)
    return theirs > max(1.1 * own, _GPU_LEAST)


def _width(block: str, channels: int) -> int:
    """The channels of a slab of the block's norm."""
    norm = next(stage for stage in describe(block).stages if isinstance(stage, Norm))
    return channels // norm.group_count(channels)
