"""What the backend did with a compiled model: each chain, kept or left to Inductor, with both times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from onepass._conv_gradients import format_named
from onepass._description import describe

if TYPE_CHECKING:  # imports Dynamo
    from onepass.compiling.policy import Decision


@dataclasses.dataclass(frozen=True)
class Chain:
    """A chain of a compiled graph; where it is kept, with the block that runs."""

    name: str
    block: str
    sizes: tuple[Any, ...]
    kept: bool
    runs: str  # the block of this library's operator, empty where Inductor has it all
    milliseconds: float  # by this library's kernels: measured of kept chains on a GPU, else predicted
    inductor_milliseconds: float  # by Inductor, likewise
    gradients: bool
    reason: str  # why it is not kept

    def __str__(self) -> str:
        text = "kept" if self.kept else f"left to Inductor: {self.reason}"
        if self.kept and self.runs != self.block:
            text = f"kept after PyTorch's convolution: {self.runs}"
        step = "a step" if self.gradients else "forward"
        costs = f"{self.milliseconds:.3f} ms here, {self.inductor_milliseconds:.3f} ms by Inductor, {step}"
        return f"{self.name}: {self.block} @ {'x'.join(map(str, self.sizes))}: {text} ({costs})"


@dataclasses.dataclass(frozen=True)
class CompiledReport:
    """All chains of all graphs that were compiled of a model, oldest first."""

    chains: tuple[Chain, ...]
    layouts: tuple[str, ...]  # of blocks with convolutions, one for each graph that has any

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        chains = [dataclasses.asdict(chain) | {"sizes": list(map(str, chain.sizes))} for chain in self.chains]
        return {"chains": chains, "layouts": list(self.layouts)}

    def __str__(self) -> str:
        kept = sum(chain.kept for chain in self.chains)
        lines = [f"{kept} of {len(self.chains)} chains kept, the others left to Inductor"]
        if self.layouts:
            lines[0] += f"; layout {', '.join(dict.fromkeys(self.layouts))}"
        return "\n".join([*lines, *(f"  {chain}" for chain in self.chains)])


def original_of(model: Any) -> Any:
    """What torch.compile was called with; None where the model is not compiled."""
    if isinstance(model, torch.nn.Module):
        return model._modules.get("_orig_mod")
    return getattr(model, "_torchdynamo_orig_callable", None)


def report(model: Any) -> CompiledReport:
    """Of a compiled model or function that has run."""
    from onepass.compiling import record

    compilations = record.compilations_of(original_of(model))
    plans = [compilation.plan for compilation in compilations]
    chains = tuple(_chain(decision) for plan in plans for decision in plan.decisions)
    return CompiledReport(chains, tuple(plan.layout for plan in plans if plan.layout is not None))


def _chain(decision: Decision) -> Chain:
    segment, kept = decision.segment, decision.kept
    runs = "" if kept is None else kept.block
    sizes = tuple(segment.input.shape)
    milliseconds = (1e3 * decision.ours, 1e3 * decision.inductor)
    name = segment.where or "a function"
    return Chain(
        name, segment.block, sizes, kept is not None, runs, *milliseconds, segment.trains, decision.reason
    )


def explain(model: Any, explain_block: Callable[..., str]) -> str:
    """Each chain as the report has it, followed by the plan of the block that runs."""
    from onepass.compiling import record

    parts = []
    for compilation in record.compilations_of(original_of(model)):
        for decision in compilation.plan.decisions:
            chain = _chain(decision)
            parts.append(f"{chain}\n")
            if chain.kept and all(isinstance(size, int) for size in chain.sizes):
                parts.append(_plan(decision, chain, compilation.plan.layout, explain_block))
    return "\n".join(parts) or "nothing was compiled yet: call the model first\n"


def _plan(decision: Decision, chain: Chain, layout: str | None, explain_block: Callable[..., str]) -> str:
    input = decision.segment.input
    sizes: Any = chain.sizes
    if chain.runs != chain.block:
        sizes = describe(chain.block).conv_output_shape(sizes)
    format = format_named(layout or "nchw", len(sizes))
    return explain_block(chain.runs, sizes, dtype=input.dtype, layout=format, device=input.device)
