"""Predicted seconds of a chain: by this library's kernels, from its plans, and by Inductor's.

Inductor's are those of PyTorch's convolution and of its own loops: bytes and operations over measured rates.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from onepass._cpu import CALL, PACKED, on_core
from onepass._description import Conv, Description, Mean, Norm, Pointwise, describe

LAYOUTS = ("nchw", "nhwc")
_CHEAP = (
    "relu",
    "relu6",
    "leaky_relu",
    "clamp",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "mul",
    "add",
    "prelu",
)


@dataclasses.dataclass(frozen=True)
class Question:
    """A chain as a cost is asked of it: all of it hashable, sizes as they are or as Dynamo has seen them."""

    block: str
    sizes: tuple[int, ...]
    mode: str  # element type and numerics, as in a problem string
    item_bytes: int
    device: str
    threads: int
    wanted: tuple[bool, ...]  # gradients of the input and of each parameter; empty without training
    fused_input: bool  # Inductor would compute the input in the same loop
    fused_users: bool  # Inductor would compute what reads the result in the same loop


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of the ways to run a chain in one layout; infinite where a way is not possible."""

    whole: float  # one operator, convolution and all
    tail: float  # PyTorch's convolution, then one operator; of a chain without a convolution, `whole`
    inductor: float  # all of it left to Inductor


@functools.lru_cache(maxsize=8192)
def costs(question: Question, layout: str) -> Costs:
    """The seconds of all ways, forward and wanted gradients together."""
    with _disable_current_modes():  # those of a compiler at work
        return _costs(question, layout)


def _costs(question: Question, layout: str) -> Costs:
    description = describe(question.block)
    device = _Cpu(question) if question.device == "cpu" else _Gpu(question)
    between = (
        2 * _output_bytes(question, description) / device.bytes_per_second if question.fused_users else 0.0
    )
    if description.conv is None:
        ours = device.ours(question.block, question.sizes, question.wanted, layout) + between
        return Costs(ours, ours, device.loops(description, question.sizes, question.wanted, layout))
    conv = device.convolution(description.conv, layout)
    whole = device.whole(layout) + between
    if description.after_conv is None:
        return Costs(whole, math.inf, conv)
    sizes = tuple(description.conv_output_shape(question.sizes))
    wanted = _tail_wanted(description, question.wanted)
    tail = device.ours(description.tail, sizes, wanted, layout) + between
    return Costs(whole, conv + tail, conv + device.loops(description.after_conv, sizes, wanted, layout))


def bytes_per_second(device: str) -> float:
    """What a large copy moves, read and written bytes counted."""
    if device == "cpu":
        return _Cpu.BYTES_PER_SECOND
    with _disable_current_modes():
        return torch.ops.onepass.cuda_bytes_per_second(device)


def _tail_wanted(description: Description, wanted: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which gradients the tail gives: its input's where the convolution has any."""
    if not wanted:
        return ()
    count = description.conv_parameters + 1
    return any(wanted[:count]), *wanted[count:]


def _output_bytes(question: Question, description: Description) -> float:
    return math.prod(description.output_shape(question.sizes)) * question.item_bytes


# Rates of one core: operations a second of PyTorch's convolutions in channels last, as Inductor lays them
# out on a CPU, and seconds an element of Inductor's loops, beside the memory's. They are the faster ends of
# what was measured: a chain is rather left to Inductor than kept in vain.
# Neoverse V1, GFLOP/s: 1x1 43 to 54; 3x3 46 to 52, less the weights; 38 for 16 channels; 36 for 3 to 64 with
# 49 taps; 9 for 8 channels; 3 to 7 in groups of 8 channels and fewer. Volumes: 7 to 9 for 8 channels, 17 to
# 29 for 16 and 32, 35 for 64 and 128.
# ns: norms 1.4 to 2.4 in all, 3.3 in channels last with two channels a group; their gradients 6 to 9 in
# channels last, else 1.8 to 5. Swish, gelu and their gradients take 2.3 to 3 more.
# The figures for x86 are estimates from oneDNN's usual share of the peak, not measured.
_ARM = {
    **{"wide": 54e9, "thin": 36e9, "narrow": 9e9, "grouped": 7e9},
    **{"wide volume": 36e9, "volume": 25e9, "thin volume": 8e9},
    **{"cheap": 0.2e-9, "exp": 2.4e-9, "norm": 1.0e-9, "short norm": 2.4e-9},
    **{"norm backward": 1.2e-9, "norm backward, nhwc": 5.0e-9, "weight": 1.5e-9},
}
_X86 = {
    **{"wide": 100e9, "thin": 50e9, "narrow": 25e9, "grouped": 20e9},
    **{"wide volume": 80e9, "volume": 60e9, "thin volume": 30e9},
    **{"cheap": 0.15e-9, "exp": 0.5e-9, "norm": 0.4e-9, "short norm": 0.8e-9},
    **{"norm backward": 0.6e-9, "norm backward, nhwc": 1.2e-9, "weight": 0.6e-9},
}


class _Cpu:
    """Rates of one core: PyTorch's convolutions and Inductor's loops, PyTorch 2.11."""

    BYTES_PER_SECOND = 20e9

    def __init__(self, question: Question) -> None:
        self.question = question
        self.rates = on_core(_ARM, _X86)
        self.bytes_per_second = self.BYTES_PER_SECOND

    def ours(self, block: str, sizes: Sequence[int], wanted: tuple[bool, ...], layout: str) -> float:
        question, operators = self.question, torch.ops.onepass
        how = (block, sizes, question.mode, layout, "cpu", question.threads)
        seconds = CALL + operators.predicted_seconds(*how)
        if any(wanted):
            seconds += CALL + operators.predicted_backward_seconds(*how, wanted)
        return seconds

    def whole(self, layout: str) -> float:
        question, operators = self.question, torch.ops.onepass
        description = describe(question.block)
        how = (question.mode, layout, "cpu", question.threads)
        products = 1 + sum(question.wanted[:2])
        seconds = CALL + products * PACKED * description.conv.weights
        seconds += operators.predicted_seconds(question.block, question.sizes, *how)
        if not any(question.wanted):
            return seconds
        count = description.conv_parameters + 1
        if description.tail:
            sizes = description.conv_output_shape(question.sizes)
            wanted = _tail_wanted(description, question.wanted)
            seconds += operators.predicted_backward_seconds(description.tail, sizes, *how, wanted)
        conv = description.conv.text
        if any(question.wanted[:count]):
            wanted = question.wanted[:count]
            seconds += operators.predicted_backward_seconds(conv, question.sizes, *how, wanted)
        return seconds + CALL

    def convolution(self, conv: Conv, layout: str) -> float:
        operations = 2 * conv.multiply_adds(self.question.sizes)
        products = 1 + sum(self.question.wanted[:2])
        seconds = operations / self.rates[self._kind(conv)]
        if math.prod(conv.kernel) > 1:  # the weights are laid out anew in each call
            seconds += self.rates["weight"] * conv.weights
        return CALL + products * seconds / self.question.threads

    @staticmethod
    def _kind(conv: Conv) -> str:
        few, many = sorted((conv.in_channels // conv.groups, conv.out_channels // conv.groups))
        if conv.rank == 3:
            return "thin volume" if few < 16 else "volume" if few < 64 else "wide volume"
        if conv.groups > 1 and many < 16:
            return "grouped"
        return "narrow" if many < 16 else "thin" if few < 32 else "wide"

    def loops(
        self, description: Description, sizes: Sequence[int], wanted: tuple[bool, ...], layout: str
    ) -> float:
        elements = math.prod(sizes)
        trains = any(wanted)
        seconds = sum(self._per_element(stage, sizes[1], trains, layout) for stage in description.stages)
        loops = 2 if description.norm is not None else 1
        if trains:
            loops = 2 * loops + 1
        moved = loops + 1 - int(self.question.fused_input)
        traffic = self.question.item_bytes * moved / self.bytes_per_second
        return loops * CALL + elements * (seconds + traffic) / self.question.threads

    def _per_element(self, stage: object, channels: int, trains: bool, layout: str) -> float:
        """Seconds of one stage, with its derivative where gradients are wanted."""
        rates = self.rates
        if isinstance(stage, Norm):
            run = channels // stage.group_count(channels)  # contiguous in channels last
            seconds = rates["short norm" if layout == "nhwc" and 1 < run < 4 else "norm"]
            return seconds + trains * rates["norm backward" + ", nhwc" * (layout == "nhwc")]
        if isinstance(stage, Mean):
            return (1 + trains) * rates["cheap"]
        assert isinstance(stage, Pointwise)
        cheap = stage.op in _CHEAP or stage.argument != "none"
        return (1 + trains) * rates["cheap" if cheap else "exp"]


class _Gpu:
    """A GPU, or the typical GPU of a named architecture.

    Rates of Inductor's loops are shares of a large copy's (H200, PyTorch 2.11, 2026-11-17). Loops that write
    reach 0.8 to 0.9 of it, passes over a tensor for its statistics 0.35 to 0.85. Both take as long for 16
    bits as for fp32, or up to a quarter less: elements count, not bytes.
    """

    _LAUNCH = 3e-6  # of a kernel in a stream of kernels
    _LOOPS = 0.88
    _STATISTICS = 0.6
    _SHORT_BYTES = 3.5  # that an element of 16 bits counts for
    _IN_REGISTERS = 4096  # elements of a slab that Inductor reads once: a persistent reduction

    def __init__(self, question: Question) -> None:
        self.question = question
        self.bytes_per_second = torch.ops.onepass.cuda_bytes_per_second(question.device)

    def ours(self, block: str, sizes: Sequence[int], wanted: tuple[bool, ...], layout: str) -> float:
        question, operators = self.question, torch.ops.onepass
        mode = question.mode if not question.mode.startswith(("tf32", "near_f32")) else "f32"
        how = (block, sizes, mode, layout, question.device, 1)
        seconds = operators.predicted_seconds(*how)
        if any(wanted):
            seconds += operators.predicted_backward_seconds(*how, wanted)
        return seconds

    def whole(self, layout: str) -> float:
        question, operators = self.question, torch.ops.onepass
        how = (question.block, question.sizes, question.mode, layout, question.device, 1)
        seconds = operators.predicted_seconds(*how)
        if any(question.wanted):
            seconds += operators.predicted_backward_seconds(*how, question.wanted)
        return seconds

    def convolution(self, conv: Conv, layout: str) -> float:
        question, operators = self.question, torch.ops.onepass
        how = (conv.text, question.sizes, question.mode, layout, question.device)
        seconds = operators.cuda_framework_seconds(*how)
        count = 2 + int(conv.bias)
        if any(question.wanted[:count]):
            seconds += operators.cuda_framework_backward_seconds(*how, question.wanted[:count])
        return seconds

    def loops(
        self, description: Description, sizes: Sequence[int], wanted: tuple[bool, ...], layout: str
    ) -> float:
        elements, item = math.prod(sizes), self.question.item_bytes
        size = elements * (item if item > 2 else self._SHORT_BYTES)
        norm = description.norm
        operands = sum(isinstance(s, Pointwise) and s.argument == "tensor" for s in description.stages)
        has_mean = isinstance(description.stages[-1], Mean)
        slab = 0.0 if norm is None else elements / (sizes[0] * norm.group_count(sizes[1]))
        passes = 2 if slab > self._IN_REGISTERS else 1
        first, second = passes - 1, 1 + operands + (0 if has_mean else 1)  # how often the tensor is moved
        kernels = passes + int(has_mean)
        if self.question.fused_input and describe(self.question.block).conv is None:
            second -= 1 if passes == 2 else 2
        if any(wanted):
            first, second = first + 2 * (passes - 1), second + 3 + operands
            kernels += passes + 1
        moved = first / self._STATISTICS + second / self._LOOPS
        return kernels * self._LAUNCH + moved * size / self.bytes_per_second
