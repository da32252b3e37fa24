"""Seconds of a chain: by this library's kernels, and by Inductor's.

Inductor's are those of PyTorch's convolution and of its own loops. Loops are bytes over measured rates. On a
GPU what runs by itself is a part: its time is the measured one where there is one, else predicted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from onepass import _numerics
from onepass._cpu import CALL, on_core
from onepass._description import Conv, Description, Mean, Norm, Pointwise, describe
from onepass.compiling import parts
from onepass.compiling.parts import Given, Part

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
    input: Given
    parameters: tuple[Given, ...]
    convolved: torch.dtype  # of what the convolution gives: autocast may lower it; else the input's
    out_dtype: torch.dtype
    words: tuple[str, str] | None  # of the numerics, forward and backward; None where it cannot run whole
    tail_words: tuple[str, str]
    device: str
    threads: int
    wanted: tuple[bool, ...]  # gradients of the input and of each parameter; empty without training
    fused_input: bool  # Inductor would compute the input in the same loop
    fused_users: bool  # Inductor would compute what reads the result in the same loop

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the input."""
        return self.input.sizes

    @property
    def mode(self) -> str:
        """Element type and numerics, as in a problem string."""
        return _numerics.mode_of(self.input.dtype, (self.words or self.tail_words)[0])


@dataclasses.dataclass(frozen=True)
class Way:
    """How a chain can run: the seconds, infinite where it is not possible, and the parts that they are of."""

    seconds: float
    parts: tuple[Part, ...] = ()


_NONE = Way(math.inf)


@dataclasses.dataclass(frozen=True)
class Costs:
    """The ways to run a chain in one layout."""

    whole: Way  # one operator, convolution and all
    tail: Way  # PyTorch's convolution, then one operator; of a chain without a convolution, `whole`
    inductor: Way  # all of it left to Inductor


def costs(
    question: Question, layout: str, known: Mapping[Part, float] | None = None, hope: float = 1.0
) -> Costs:
    """All ways, forward and wanted gradients together.

    Args:
        question: The chain.
        layout: "nchw" or "nhwc".
        known: Measured seconds.
        hope: The share of its predicted seconds that a part of this library's is taken to need where it was
            not measured.
    """
    with _disable_current_modes():  # those of a compiler at work
        if question.device == "cpu":
            return _costs_on_cpu(question, layout)
        return _Gpu(question, layout, known or {}, hope).costs()


@functools.lru_cache(maxsize=8192)
def _costs_on_cpu(question: Question, layout: str) -> Costs:
    description, device = describe(question.block), _Cpu(question)
    between = _between(question, device.bytes_per_second)
    if description.conv is None:
        ours = Way(device.ours(question.block, question.sizes, question.wanted, layout) + between)
        return Costs(ours, ours, Way(device.loops(description, question.sizes, question.wanted, layout)))
    conv = device.convolution(description.conv, layout)
    whole = Way(device.whole(layout) + between)
    if description.after_conv is None:
        return Costs(whole, _NONE, Way(conv))
    sizes = tuple(description.conv_output_shape(question.sizes))
    wanted = _tail_wanted(description, question.wanted)
    tail = Way(conv + device.ours(description.tail, sizes, wanted, layout) + between)
    loops = device.loops(description.after_conv, sizes, wanted, layout)
    return Costs(whole, tail, Way(conv + loops))


def adds_bias(question: Question) -> bool:
    """Whether an operator that follows PyTorch's convolution adds its bias.

    Inductor takes biases out of cuDNN's convolutions and adds them in the loop that follows. The operator is
    no loop: a bias would cost a pass over the tensor.
    """
    conv = describe(question.block).conv
    return question.device != "cpu" and conv is not None and conv.bias


def tail_of(question: Question) -> str:
    """The block of the operator that follows PyTorch's convolution."""
    tail = describe(question.block).tail
    return f"channel_add | {tail}" if adds_bias(question) else tail


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


def _between(question: Question, bytes_per_second: float) -> float:
    """Seconds of writing the result and reading it again, where Inductor would not: loops read it."""
    elements = math.prod(describe(question.block).output_shape(question.sizes))
    moved = 2 * elements * question.out_dtype.itemsize
    return moved / bytes_per_second if question.fused_users else 0.0


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
        seconds = CALL + operators.predicted_seconds(question.block, question.sizes, *how)
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
        traffic = self.question.input.dtype.itemsize * moved / self.bytes_per_second
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
    """A GPU, or the typical GPU of a named architecture."""

    def __init__(self, question: Question, layout: str, known: Mapping[Part, float], hope: float) -> None:
        self.question, self.layout, self.known = question, layout, known
        self.hope = hope
        self.bytes_per_second = torch.ops.onepass.cuda_bytes_per_second(question.device)

    def costs(self) -> Costs:
        question = self.question
        description = describe(question.block)
        between = _between(question, self.bytes_per_second)
        whole = _NONE if question.words is None else self._way(between, self._whole(question.words))
        if description.conv is None:
            loops = self._loops(description, question.input, question.wanted)
            return Costs(whole, whole, self._way(-self._joined(loops), loops))
        conv = self._convolution(description.conv)
        if description.after_conv is None:
            return Costs(whole, _NONE, self._way(0.0, conv))
        given = Given(tuple(description.conv_output_shape(question.sizes)), question.convolved)
        wanted = _tail_wanted(description, question.wanted)
        tail = self._way(between, conv, self._tail(given))
        loops = self._loops(description.after_conv, given, wanted)
        return Costs(whole, tail, self._way(0.0, conv, loops))

    def _way(self, seconds: float, *used: Part) -> Way:
        for part in used:
            seconds += self.known[part] if part in self.known else self._predicted(part)
        return Way(seconds, used)

    def _predicted(self, part: Part) -> float:
        return parts.predicted(part) * (self.hope if part.by == "onepass" else 1.0)

    def _whole(self, words: tuple[str, str]) -> Part:
        question = self.question
        tensors = (question.input, question.parameters, question.out_dtype, question.wanted)
        return Part(question.block, "onepass", words, *tensors, self.layout, question.device)

    def _convolution(self, conv: Conv) -> Part:
        """PyTorch's, without its bias: Inductor takes that out."""
        question = self.question
        text = conv.text.removesuffix(")") + ",bias=false)" if conv.bias else conv.text
        weight = Given(question.parameters[0].sizes, question.convolved)
        tensors = (Given(question.sizes, question.convolved), (weight,), question.convolved)
        words = question.words or question.tail_words
        return Part(text, "pytorch", words, *tensors, question.wanted[:2], self.layout, question.device)

    def _tail(self, given: Given) -> Part:
        question = self.question
        wanted = (any(question.wanted[:2]), *question.wanted[2:]) if question.wanted else ()
        tensors = (given, question.parameters[1:], question.out_dtype, wanted)
        text = tail_of(question)
        return Part(text, "onepass", question.tail_words, *tensors, self.layout, question.device)

    def _loops(self, description: Description, input: Given, wanted: tuple[bool, ...]) -> Part:
        """Of all but a convolution."""
        question = self.question
        count = len(description.parameters)
        parameters = question.parameters[len(question.parameters) - count :]
        tensors = (input, parameters, question.out_dtype, wanted)
        return Part(description.text, "inductor", ("", ""), *tensors, self.layout, question.device)

    def _joined(self, loops: Part) -> float:
        """Seconds that Inductor saves where it computes the input in the same loop."""
        if not self.question.fused_input:
            return 0.0
        once = parts.loop_passes(describe(loops.block), loops.input.sizes) == 1
        return (2 if once else 1) * parts.moving_seconds(loops)
