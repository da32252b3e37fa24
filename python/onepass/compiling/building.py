"""Compiles the kernels of kept chains side by side, while Inductor is at work, for their first calls."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
from collections.abc import Iterator

import torch

from onepass import _numerics
from onepass._description import describe
from onepass.compiling import policy
from onepass.compiling.policy import Decision, Plan


@dataclasses.dataclass(frozen=True)
class Kernels:
    """A block whose kernels are built: the arguments of the operator that plans it."""

    block: str
    sizes: tuple[int, ...]
    mode: str
    layout: str
    device: str
    backward: bool


def kernels_of(plan: Plan) -> list[Kernels]:
    """What the kept chains of a GPU run, each once. Those of mixed types are built at their first call."""
    found: dict[Kernels, None] = {}
    for decision in plan.decisions:
        segment = decision.segment
        if decision.kept and segment.input.device.type == "cuda" and len(segment.types) == 1:
            found |= dict.fromkeys(_of(decision, plan.layout))
    return list(found)


def _of(decision: Decision, layout: str | None) -> Iterator[Kernels]:
    segment, kept = decision.segment, decision.kept
    assert kept is not None
    description, sizes = describe(segment.block), policy.hints(segment.input.shape)
    assert sizes is not None  # it was predicted
    block = segment.block
    if kept.skipped:
        block, sizes = description.tail, tuple(description.conv_output_shape(sizes))
    place = (layout or policy.layout_of(segment.input), policy.device_text(segment.input.device))
    yield Kernels(block, sizes, _numerics.mode_of(segment.input.dtype, kept.forward_words), *place, False)
    if segment.trains:
        yield Kernels(block, sizes, _numerics.mode_of(segment.input.dtype, kept.backward_words), *place, True)


@contextlib.contextmanager
def ahead(plan: Plan) -> Iterator[None]:
    """Builds in threads from here on; leaving waits for them."""
    wanted = kernels_of(plan)
    if not wanted:
        yield
        return
    with concurrent.futures.ThreadPoolExecutor(min(len(wanted), os.cpu_count() or 1)) as pool:
        for kernels in wanted:
            pool.submit(_build, kernels)
        yield


def _build(kernels: Kernels) -> None:
    """Plans the block, which puts its kernels into the cache; what fails says so again at its first call."""
    with contextlib.suppress(RuntimeError, ValueError):
        how = (kernels.block, kernels.sizes, kernels.mode, kernels.layout, kernels.device)
        torch.ops.onepass.cuda_explain(*how, "", kernels.backward)
