"""Which chains are kept as this library's operators, and in which layout, decided once for a graph."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onepass import _cuda, _numerics
from onepass._conv_gradients import memory_format
from onepass._description import Description, Pointwise, describe
from onepass.compiling import costs, measuring
from onepass.compiling.costs import Costs, Question, Way
from onepass.compiling.parts import Given, Part
from onepass.compiling.rewrite import Kept, Segment

KEEP = ("faster", "all", "none")
# Predictions are off, on a CPU by up to 15% for 27 of 32 convolutions and up to half for the rest: a chain
# is kept where it is clearly faster.
_MARGIN = {"cpu": 0.9, "cuda": 0.97}
# Where chains are timed, those that are predicted to be nearly as fast as by Inductor are timed too: the
# predictions of both sides are off by more.
_HOPE = 0.85


@dataclasses.dataclass(frozen=True)
class Decision:
    """A chain with the seconds of both sides and what was decided."""

    segment: Segment
    kept: Kept | None
    best: Way  # of those that run this library's kernels
    inductor_way: Way
    reason: str

    @property
    def ours(self) -> float:
        """Seconds of the best way that runs this library's kernels."""
        return self.best.seconds

    @property
    def inductor(self) -> float:
        """Seconds where all of it is left to Inductor."""
        return self.inductor_way.seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """The decisions for all chains of a compilation, and the layout of its convolutions."""

    decisions: tuple[Decision, ...]
    layout: str | None  # None where no kept chain depends on it: Inductor chooses


def plan(segments: Sequence[Segment], keep: str, numerics: str | None, measure: bool = False) -> Plan:
    """Decides for all chains at once: the layout with the least seconds is that of the whole graph.

    With `measure`, the parts of the best plan are timed on the GPU and the plan is made anew with their
    times, until it has timed parts alone. What is predicted to be slow is never built.
    """
    policy = numerics or _numerics.default()
    asked = [_Asked.of(segment, policy) for segment in segments]
    known: dict[Part, float] = {}
    measure = measure and keep == "faster"
    while True:
        found = _plan(asked, keep, known, _HOPE if measure else 1.0)
        new = [part for part in parts_of(found) if part not in known]
        if not new or not measure or not any(d.kept for d in found.decisions):
            return found
        known |= measuring.seconds_of(new)


def parts_of(plan: Plan) -> list[Part]:
    """What is to be timed: what kept chains run and would run by Inductor, and convolutions of the others."""
    found: dict[Part, None] = {}
    for decision in plan.decisions:
        both = (*decision.best.parts, *decision.inductor_way.parts)
        left = (part for part in decision.inductor_way.parts if part.by == "pytorch")
        found |= dict.fromkeys(both if decision.kept else left)
    return list(found)


def _plan(asked: Sequence[_Asked], keep: str, known: Mapping[Part, float], hope: float) -> Plan:
    layouts = _layouts([each.segment for each in asked])
    by_layout = {layout: [_decide(each, layout, keep, known, hope) for each in asked] for layout in layouts}
    totals = {layout: _total(found, layout) for layout, found in by_layout.items()}
    layout = min(totals, key=totals.__getitem__)  # the given one where both are as fast
    decisions = tuple(by_layout[layout])
    return Plan(decisions, layout if any(_sets_layout(d.kept, d.segment) for d in decisions) else None)


def _layouts(segments: Sequence[Segment]) -> tuple[str, ...]:
    """Those to choose from, that of the tensors as the model is called first.

    On a GPU what Inductor computes of a model in channels last stays so: another layout would be copies
    throughout.
    """
    last = [layout_of(segment.input) == "nhwc" for segment in segments]
    if sum(last) * 2 <= len(last):
        return costs.LAYOUTS
    return ("nhwc",) if segments[0].input.device.type == "cuda" else costs.LAYOUTS[::-1]


def _sets_layout(kept: Kept | None, segment: Segment) -> bool:
    """Whether a kept chain was decided for the layout of a convolution: its own, or PyTorch's before it.

    On a CPU PyTorch's have one rate, that of the layout which Inductor gives them.
    """
    if kept is None:
        return False
    return describe(kept.block).conv is not None or (
        kept.after_convolution and segment.input.device.type == "cuda"
    )


def _total(decisions: Sequence[Decision], layout: str) -> float:
    """Seconds of all chains, with the copies of what enters and leaves the graph in another layout."""
    return sum(_seconds(decision, layout) for decision in decisions)


def _seconds(decision: Decision, layout: str) -> float:
    if decision.kept is None:
        return decision.inductor
    segment, seconds = decision.segment, decision.ours
    copied = [segment.input] * segment.enters + [segment.output] * segment.leaves
    for tensor in copied:
        sizes = hints(tensor.shape)
        if sizes is not None and len(sizes) > 3 and layout_of(tensor) != layout:
            moved = 2 * math.prod(sizes) * tensor.dtype.itemsize
            seconds += moved / costs.bytes_per_second(device_text(tensor.device))
    return seconds


def layout_of(tensor: torch.Tensor) -> str:
    return "nchw" if memory_format(tensor) == torch.contiguous_format else "nhwc"


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A segment with its question, or the reason why the library cannot run it."""

    segment: Segment
    question: Question | None
    reason: str = ""

    @classmethod
    def of(cls, segment: Segment, policy: str) -> _Asked:
        reason = _cuda.unavailable_reason() if segment.input.device.type == "cuda" else None
        if reason is not None:
            return cls(segment, None, reason)
        given = [_given(tensor) for tensor in (segment.input, *segment.parameters)]
        known = [each for each in given if each is not None]
        if len(known) < len(given) or 0 in known[0].sizes:
            return cls(segment, None, "its sizes are not known")
        words: tuple[str, str] | None = ("", "")
        tail = ("", "")
        if segment.input.device.type == "cuda":
            tail = (_numerics.tail_words(policy),) * 2
            words = _words(segment, describe(segment.block), policy)
        place = (device_text(segment.input.device), torch.get_num_threads())
        types = (segment.convolved.dtype, segment.out_dtype)
        wanted = segment.wanted if segment.trains else ()
        fused = (segment.fused_input, segment.fused_users)
        tensors = (known[0], tuple(known[1:]), *types)
        return cls(segment, Question(segment.block, *tensors, words, tail, *place, wanted, *fused))


def _given(tensor: torch.Tensor) -> Given | None:
    sizes = hints(tensor.shape)
    return None if sizes is None else Given(sizes, tensor.dtype)


def _words(segment: Segment, description: Description, policy: str) -> tuple[str, str] | None:
    """Of a whole block, forward and backward; None where it mixes types, or PyTorch rounds as no kernel does.

    PyTorch is asked how it rounds a convolution of these very sizes. Symbolic sizes have no one answer: they
    get fp32, which is exact enough whatever the answer would be.
    """
    if description.conv is None:
        tail = _numerics.tail_words(policy)
        return tail, tail
    if len(segment.types) > 1:
        return None
    words = _numerics.known_words(policy, segment.input.dtype)
    if words is not None:
        return words, words
    if not all(isinstance(size, int) for size in segment.input.shape):
        return "near_f32", "near_f32"
    weight = segment.parameters[0]
    forward = _numerics.forward_words(policy, description.conv, segment.input, weight)
    if forward is None or not segment.trains:
        return None if forward is None else (forward, forward)
    wanted = segment.wanted
    return forward, _numerics.backward_words(policy, description, segment.input, weight, wanted)


def device_text(device: torch.device) -> str:
    """As problems name it; a GPU that is not there can be planned for by its architecture's name."""
    return str(device)


def hints(sizes: Sequence[Any]) -> tuple[int, ...] | None:
    """The sizes; symbolic ones as those that the graph was traced with, without a guard."""
    known = []
    for size in sizes:
        hint = size if isinstance(size, int) else getattr(size.node, "hint", None)
        if not isinstance(hint, int):
            return None
        known.append(hint)
    return tuple(known)


def _decide(asked: _Asked, layout: str, keep: str, known: Mapping[Part, float], hope: float) -> Decision:
    segment = asked.segment
    if asked.question is None:
        return Decision(segment, None, Way(math.inf), Way(0.0), asked.reason)
    try:
        found = costs.costs(asked.question, layout, known, hope)
    except (ValueError, RuntimeError) as error:  # the library refuses it
        return Decision(segment, None, Way(math.inf), Way(0.0), str(error).splitlines()[0])
    ways = {k: way for k, way in _ways(asked.question, found).items() if keep == "all" or _has_more(k)}
    kept = min(ways, key=lambda k: ways[k].seconds, default=None)
    ours, inductor = Way(math.inf) if kept is None else ways[kept], found.inductor
    if kept is None:
        return Decision(segment, None, ours, inductor, "it is loops alone, which Inductor joins")
    if keep == "none":
        return Decision(segment, None, ours, inductor, 'the option "onepass.keep" is "none"')
    if keep == "faster" and not ours.seconds < inductor.seconds * _MARGIN[segment.input.device.type]:
        return Decision(segment, None, ours, inductor, "Inductor is as fast")
    return Decision(segment, kept, ours, inductor, "")


def _ways(question: Question, found: Costs) -> dict[Kept, Way]:
    """How the library can run the chain."""
    description = describe(question.block)
    ways = {Kept(question.block, False, False, *(question.words or ("", ""))): found.whole}
    if description.after_conv is not None:
        adds_bias = costs.adds_bias(question)
        block = costs.tail_of(question)
        ways[Kept(block, True, adds_bias, *question.tail_words)] = found.tail
    return {kept: way for kept, way in ways.items() if way.seconds < math.inf}


def _has_more(kept: Kept) -> bool:
    """Whether the block has more than pointwise stages, which Inductor computes beside their neighbours."""
    return not all(isinstance(stage, Pointwise) for stage in describe(kept.block).stages)
