"""Which chains are kept as this library's operators, and in which layout, decided once for a graph."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from onepass import _cuda, _numerics
from onepass._conv_gradients import memory_format
from onepass._description import Description, Pointwise, describe
from onepass.compiling import costs
from onepass.compiling.costs import Costs, Question
from onepass.compiling.rewrite import Kept, Segment

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
KEEP = ("faster", "all", "none")
# Predictions are off, on a CPU by up to 15% for 27 of 32 convolutions and up to half for the rest: a chain
# is kept where it is clearly faster.
_MARGIN = {"cpu": 0.9, "cuda": 0.97}


@dataclasses.dataclass(frozen=True)
class Decision:
    """A chain with the seconds of both sides and what was decided."""

    segment: Segment
    kept: Kept | None
    ours: float  # predicted seconds of the best way that runs this library's kernels
    inductor: float
    reason: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """The decisions for all chains of a compilation, and the layout of blocks with convolutions."""

    decisions: tuple[Decision, ...]
    layout: str | None  # None where no block with a convolution is kept: Inductor chooses


def plan(segments: Sequence[Segment], keep: str, numerics: str | None) -> Plan:
    """Decides for all chains at once: the layout with the least seconds is that of the whole graph."""
    policy = numerics or _numerics.default()
    asked = [_Asked.of(segment, policy) for segment in segments]
    by_layout = {layout: [_decide(each, layout, keep) for each in asked] for layout in costs.LAYOUTS}
    totals = {layout: _total(found, layout) for layout, found in by_layout.items()}
    layout = min(totals, key=totals.__getitem__)
    if len(totals) > 1 and len(set(totals.values())) == 1:
        layout = _given_layout(segments)
    decisions = tuple(by_layout[layout])
    has_conv = any(d.kept and not d.kept.skipped and describe(d.segment.block).conv for d in decisions)
    return Plan(decisions, layout if has_conv else None)


def _given_layout(segments: Sequence[Segment]) -> str:
    """That of the tensors as the model is called."""
    last = [layout_of(segment.input) == "nhwc" for segment in segments]
    return "nhwc" if sum(last) * 2 > len(last) else "nchw"


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
    words: tuple[str, str] = ("", "")
    whole: bool = True  # whether a block with a convolution can run in one operator
    reason: str = ""

    @classmethod
    def of(cls, segment: Segment, policy: str) -> _Asked:
        sizes = hints(segment.input.shape)
        if sizes is None or 0 in sizes:
            return cls(segment, None, reason="its sizes are not known")
        if segment.input.device.type == "cuda":
            return cls._on_cuda(segment, policy, sizes)
        return cls(segment, _question(segment, sizes, "cpu", _DTYPES[segment.input.dtype]))

    @classmethod
    def _on_cuda(cls, segment: Segment, policy: str, sizes: tuple[int, ...]) -> _Asked:
        reason = _cuda.unavailable_reason()
        if reason is not None:
            return cls(segment, None, reason=reason)
        device = device_text(segment.input.device)
        description = describe(segment.block)
        tail = _numerics.tail_words(policy)
        mode = _numerics.mode_of(segment.input.dtype, tail)
        if description.conv is None:
            return cls(segment, _question(segment, sizes, device, mode), (tail, tail))
        words = _words(segment, description, policy) if len(segment.types) == 1 else None
        if words is None:
            return cls(segment, _question(segment, sizes, device, mode), (tail, tail), whole=False)
        mode = _numerics.mode_of(segment.input.dtype, words[0])
        return cls(segment, _question(segment, sizes, device, mode), words)


def _words(segment: Segment, description: Description, policy: str) -> tuple[str, str] | None:
    """Of a whole block, forward and backward; None where PyTorch rounds as no kernel here does.

    PyTorch is asked how it rounds a convolution of these very sizes. Symbolic sizes have no one answer: they
    get fp32, which is exact enough whatever the answer would be.
    """
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


def _question(segment: Segment, sizes: tuple[int, ...], device: str, mode: str) -> Question:
    wanted = segment.wanted if segment.trains else ()
    threads = torch.get_num_threads()
    item = segment.input.dtype.itemsize
    fused = (segment.fused_input, segment.fused_users)
    return Question(segment.block, sizes, mode, item, device, threads, wanted, *fused)


def hints(sizes: Sequence[Any]) -> tuple[int, ...] | None:
    """The sizes; symbolic ones as those that the graph was traced with, without a guard."""
    known = []
    for size in sizes:
        hint = size if isinstance(size, int) else getattr(size.node, "hint", None)
        if not isinstance(hint, int):
            return None
        known.append(hint)
    return tuple(known)


def _decide(asked: _Asked, layout: str, keep: str) -> Decision:
    segment = asked.segment
    if asked.question is None:
        return Decision(segment, None, float("inf"), 0.0, asked.reason)
    try:
        found = costs.costs(asked.question, layout)
    except (ValueError, RuntimeError) as error:  # the library refuses it
        return Decision(segment, None, float("inf"), 0.0, str(error).splitlines()[0])
    ways = {k: s for k, s in _ways(asked, found).items() if keep == "all" or _is_more_than_loops(segment, k)}
    ours = min(ways.values(), default=float("inf"))
    if keep == "none" or not ways:
        reason = 'the option "onepass.keep" is "none"' if ways else "it is loops alone, which Inductor joins"
        return Decision(segment, None, ours, found.inductor, reason)
    if keep == "faster" and not ours < found.inductor * _MARGIN[segment.input.device.type]:
        return Decision(segment, None, ours, found.inductor, "Inductor is predicted to be as fast")
    return Decision(segment, min(ways, key=ways.__getitem__), ours, found.inductor, "")


def _ways(asked: _Asked, found: Costs) -> dict[Kept, float]:
    """How the library can run the chain, with the seconds."""
    description = describe(asked.segment.block)
    ways = {}
    if description.conv is None or asked.whole:
        ways[Kept(0, *asked.words)] = found.whole
    if description.after_conv is not None:
        tail = asked.words if asked.segment.input.device.type == "cpu" else _tail_words(asked.words)
        ways[Kept(1, *tail)] = found.tail
    return {kept: seconds for kept, seconds in ways.items() if seconds < float("inf")}


def _is_more_than_loops(segment: Segment, kept: Kept) -> bool:
    """Whether the block has more than pointwise stages, which Inductor computes beside their neighbours."""
    stages = describe(segment.block).stages[kept.skipped :]
    return not all(isinstance(stage, Pointwise) for stage in stages)


def _tail_words(words: tuple[str, str]) -> tuple[str, str]:
    strict = "strict" if words[0] == "strict" else ""
    return strict, strict
