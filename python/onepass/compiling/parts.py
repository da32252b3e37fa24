"""What runs by itself in a compiled graph on a GPU, and has a time: a convolution of PyTorch's, loops of
Inductor's, or a block by one operator of this library's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch

from onepass import _numerics
from onepass._description import Description, Mean, Pointwise, describe


@dataclasses.dataclass(frozen=True)
class Given:
    """A tensor, by what its time depends on."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Part:
    """A block with its tensors: forward, and the wanted gradients where there are any."""

    block: str
    by: str  # "pytorch": a convolution alone; "inductor": no convolution; "onepass"
    words: tuple[str, str]  # of the numerics, forward and backward
    input: Given
    parameters: tuple[Given, ...]
    out_dtype: torch.dtype
    wanted: tuple[bool, ...]  # gradients of the input and of each parameter; empty without training
    layout: str
    device: str

    @property
    def has_one_type(self) -> bool:
        """Whether all tensors are of the input's type."""
        types = {given.dtype for given in (self.input, *self.parameters)}
        return types | {self.out_dtype} == {self.input.dtype}

    @property
    def modes(self) -> tuple[str, str]:
        """The element type with the words, forward and backward, as in a problem string."""
        forward, backward = (_numerics.mode_of(self.input.dtype, words) for words in self.words)
        return forward, backward


@functools.lru_cache(maxsize=8192)
def predicted(part: Part) -> float:
    """Seconds from costs; raises ValueError or RuntimeError where the library refuses the block."""
    if part.by == "inductor":
        return _loops(part)
    operators = torch.ops.onepass
    forward, backward = part.modes
    place = (part.layout, part.device)
    if part.by == "pytorch":
        seconds = operators.cuda_framework_seconds(part.block, part.input.sizes, forward, *place)
        if any(part.wanted):
            how = (part.block, part.input.sizes, backward, *place)
            seconds += operators.cuda_framework_backward_seconds(*how, part.wanted)
        return seconds
    seconds = operators.predicted_seconds(part.block, part.input.sizes, forward, *place, 1)
    if any(part.wanted):
        how = (part.block, part.input.sizes, backward, *place, 1)
        seconds += operators.predicted_backward_seconds(*how, part.wanted)
    return seconds


# Rates of Inductor's loops are shares of a large copy's (H200, PyTorch 2.11, 2026-11-17). Loops that write
# reach 0.8 to 0.9 of it, passes over a tensor for its statistics 0.35 to 0.85. Both take as long for 16 bits
# as for fp32, or up to a quarter less: elements count, not bytes.
_LAUNCH = 3e-6  # of a kernel in a stream of kernels
_LOOPS = 0.88
_STATISTICS = 0.6
_SHORT_BYTES = 3.5  # that an element of 16 bits counts for
_IN_REGISTERS = 4096  # elements of a slab that Inductor reads once: a persistent reduction


def loop_passes(description: Description, sizes: Sequence[int]) -> int:
    """How often Inductor's loops go over the tensor."""
    norm = description.norm
    if norm is None:
        return 1
    return 2 if math.prod(sizes) / (sizes[0] * norm.group_count(sizes[1])) > _IN_REGISTERS else 1


def moving_seconds(part: Part) -> float:
    """Of reading, or writing, the input's elements once in a loop."""
    item = part.input.dtype.itemsize
    size = math.prod(part.input.sizes) * (item if item > 2 else _SHORT_BYTES)
    return size / torch.ops.onepass.cuda_bytes_per_second(part.device) / _LOOPS


def _loops(part: Part) -> float:
    description = describe(part.block)
    passes = loop_passes(description, part.input.sizes)
    operands = sum(isinstance(s, Pointwise) and s.argument == "tensor" for s in description.stages)
    has_mean = isinstance(description.stages[-1], Mean)
    first, second = passes - 1, 1 + operands + (0 if has_mean else 1)  # how often the tensor is moved
    kernels = passes + int(has_mean)
    if any(part.wanted):
        first, second = first + 2 * (passes - 1), second + 3 + operands
        kernels += passes + 1
    moved = first * _LOOPS / _STATISTICS + second
    return kernels * _LAUNCH + moved * moving_seconds(part)
