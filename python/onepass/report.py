"""What fuse did to a model: the chains that run as blocks, and the modules that do not, with the reasons."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from onepass import _alone, _cpu, _fallback, _library
from onepass._conv_gradients import format_of
from onepass._description import describe
from onepass._fallback import Site
from onepass._redone import explanation
from onepass._rewrite import Call
from onepass._state import Variant, root_name, skipped_reasons, state_of, why_original
from onepass._swap import settle
from onepass.block import Block
from onepass.compiling import report as compiled
from onepass.compiling.report import CompiledReport
from onepass.explain import explain


@dataclasses.dataclass(frozen=True)
class Entry:
    """A chain that is fused (block and plan) or a module that is not (reason)."""

    name: str
    block: str | None = None
    plan: str | None = None
    reason: str | None = None
    modes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Fallback:
    """Calls of a fused module, a chain of one or a Block that left the fused path for one reason."""

    name: str
    calls: int
    reason: str  # what ran instead, and why

    def __str__(self) -> str:
        return _fallback.counted(self.calls, self.reason)


@dataclasses.dataclass(frozen=True)
class Redone:
    """A layer of which a GPU computed samples again, since their values left its fast range."""

    name: str
    samples: int


@dataclasses.dataclass(frozen=True)
class Kept:
    """A layer of a frozen model: what it keeps beside its parameters, and why calls packed by themselves.

    Layers whose plans pack nothing have none.
    """

    name: str
    bytes: int
    changes: int  # of weights that were packed
    packed_by_calls: dict[str, int]  # calls by reason

    def __str__(self) -> str:
        parts = [f"{self.bytes / 1e6:.1f} MB of packed weights"]
        if self.changes:
            parts.append(f"packed anew after {self.changes} {'change' if self.changes == 1 else 'changes'}")
        for reason, calls in self.packed_by_calls.items():
            parts.append(f"{calls} {'call' if calls == 1 else 'calls'} packed them: {reason}")
        return "; ".join(parts)


@dataclasses.dataclass(frozen=True)
class Report:
    """All entries of a model, and the calls that left the fused path; prints as a table.

    Attributes:
        fused: The chains that run as blocks.
        skipped: The modules that do not, with the reasons.
        fallbacks: Calls so far that left the fused path, by module and reason, those of Blocks too.
        redone: Layers of which a GPU computed samples again.
        frozen: What the layers of a frozen model keep.

    Examples:
        >>> import onepass
        >>> from torch import nn
        >>> found = onepass.report(onepass.fuse(nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU())))
        >>> len(found.fused), found.as_dict()["fused"][0]["block"]
        (1, 'group_norm(2) | swish')
    """

    fused: list[Entry]
    skipped: list[Entry]
    fallbacks: list[Fallback] = dataclasses.field(default_factory=list)
    redone: list[Redone] = dataclasses.field(default_factory=list)
    frozen: list[Kept] = dataclasses.field(default_factory=list)
    was_fused: bool = True  # whether onepass.fuse was called for the model

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "fused": [dataclasses.asdict(entry) for entry in self.fused],
            "skipped": [{"name": entry.name, "reason": entry.reason} for entry in self.skipped],
            "fallbacks": [dataclasses.asdict(fallback) for fallback in self.fallbacks],
            "redone": [dataclasses.asdict(layer) for layer in self.redone],
            "frozen": [dataclasses.asdict(layer) for layer in self.frozen],
            "was_fused": self.was_fused,
        }

    def __str__(self) -> str:
        modules = len({module for entry in self.fused for module in entry.modules})
        blocks = "1 block" if len(self.fused) == 1 else f"{len(self.fused)} blocks"
        lines = [f"{blocks} in place of {modules} modules; {len(self.skipped)} not fused"]
        if not self.was_fused:
            lines = ["onepass.fuse was not called for this model: onepass.fuse(model) fuses it in place"]
        lines += _table([(entry.name, entry.block or "", _note(entry)) for entry in self.fused])
        if self.skipped:
            lines += ["", "not fused:"]
            lines += _table([(entry.name, entry.reason or "") for entry in self.skipped])
        if self.fallbacks:
            lines += ["", "left the fused path:"]
            lines += _table([(fallback.name, str(fallback)) for fallback in self.fallbacks])
        if self.redone:
            lines += ["", "slow:"]
            lines += _table([(layer.name, explanation(layer.samples)) for layer in self.redone])
        if self.frozen:
            lines += ["", f"frozen, {sum(layer.bytes for layer in self.frozen) / 1e6:.1f} MB:"]
            lines += _table([(layer.name, str(layer)) for layer in self.frozen])
        return "\n".join(lines)


def report(model: nn.Module) -> Report | CompiledReport:
    """What is fused in the model and which plan each block last ran, what is not and why.

    Calls inside torch.compile are not counted: its graph shows whether it holds onepass's operators. Counting
    samples that a GPU computed again waits for that GPU.

    Args:
        model: A fused model, or one compiled with backend="onepass".

    Returns:
        A Report; of a compiled model a CompiledReport, with its chains, kept or left to Inductor, and both
        predictions.

    Examples:
        >>> import onepass, torch
        >>> from torch import nn
        >>> model = onepass.fuse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()))
        >>> y = model(torch.randn(1, 3, 8, 8))
        >>> found = onepass.report(model)
        >>> found.fused[0].modules, found.skipped, found.fallbacks
        (('0', '1', '2'), [], [])
    """
    if compiled.original_of(model) is not None:
        return compiled.report(model)
    fused: list[Entry] = []
    skipped = [Entry(name, reason=reason) for name, reason in skipped_reasons.get(model, {}).items()]
    covered: set[nn.Module] = set()
    for name, module in model.named_modules():
        settle(module)
        state = state_of(module)
        if state is None or module in covered:
            continue
        reason = why_original(module, state)
        if reason is not None:
            skipped.append(
                Entry(name or root_name(model), reason=f"fused, but runs its original forward: {reason.text}")
            )
            continue
        covered.update(module.get_submodule(path) for path in state.inlined)
        variants = [
            variant for variant in state.variants if variant.why_not(module) is None
        ] or state.variants
        fused += _entries(name or "", variants, root_name(model))
    fallbacks = [found for name, module in model.named_modules() for found in _fallbacks(name, module, model)]
    return Report(fused, skipped, fallbacks, _redone(model), _frozen(model), _was_fused(model))


def _was_fused(model: nn.Module) -> bool:
    """Whether fuse was called for the model, for one that holds it or for a part of it."""
    if any(state_of(module) is not None for module in model.modules()):
        return True
    return any(model is module for root in list(skipped_reasons) for module in root.modules())


def _redone(model: nn.Module) -> list[Redone]:
    samples: dict[str, int] = {}
    for layer, site in _layers(model):
        samples[layer] = samples.get(layer, 0) + site.samples(wait=True)
    return [Redone(layer, count) for layer, count in samples.items() if count > 0]


def _frozen(model: nn.Module) -> list[Kept]:
    kept: dict[str, Kept] = {}
    for layer, site in _layers(model):
        if (own := site.frozen) is None or not (own.bytes or own.changes or own.reasons):
            continue
        before = kept.get(layer, Kept(layer, 0, 0, {}))
        reasons = Counter(before.packed_by_calls) + Counter(own.reasons)
        kept[layer] = Kept(layer, before.bytes + own.bytes, before.changes + own.changes, dict(reasons))
    return list(kept.values())


def _layers(model: nn.Module) -> Iterator[tuple[str, Site]]:
    """Every place that runs a block, by the name of its first module."""
    for name, module in model.named_modules():
        if isinstance(module, Block) and module._site:
            yield name or module.text, module._site
        state = state_of(module)
        yield from ((call.site.layer, call.site) for call in (state.calls if state else ()))


def _entries(name: str, variants: list[Variant], root_name: str) -> list[Entry]:
    """One entry for each chain, with the modes in which it runs."""
    found: dict[tuple[str, tuple[str, ...]], list[tuple[str, Call]]] = {}
    ran = {variant.pattern for variant in variants if any(call.input for call in variant.calls)}
    for variant in variants:
        if ran and variant.pattern not in ran:
            continue
        for call in variant.calls:
            mode = "train" if variant.training else "eval"
            found.setdefault((call.key, call.modules), []).append((mode, call))
    entries = []
    for (_, modules), calls in found.items():
        modes = tuple(dict.fromkeys(mode for mode, _ in calls))
        call = next((call for _, call in calls if call.input is not None), calls[0][1])
        full = tuple(_join(name, module) for module in modules)
        where = full[0] if full else name or root_name
        entries.append(Entry(where, call.block, _plan(call), None, modes, full))
    return entries


def _fallbacks(name: str, module: nn.Module, model: nn.Module) -> Iterator[Fallback]:
    """Those of the module's own calls, then those of its chains, named as their entries are."""
    name = name or root_name(model)
    if isinstance(module, Block):
        yield from (Fallback(name, calls, reason) for reason, calls in module.fallbacks.items())
    state = state_of(module)
    if state is None:
        return
    counts: Counter[tuple[str, str]] = Counter()
    sites = [(name, state.site)]
    for call in state.calls:
        where = _join("" if module is model else name, call.modules[0]) if call.modules else name
        sites.append((where, call.site))
    for where, site in sites:
        counts.update({(where, reason): calls for reason, calls in dict(site.counts).items()})
    yield from (Fallback(where, calls, reason) for (where, reason), calls in counts.items())


def _join(name: str, path: str) -> str:
    return f"{name}.{path}" if name else path


def _plan(call: Call) -> str | None:
    """The strategy chosen for what the call last ran on."""
    if call.input is None or not _library.available():
        return None
    sizes, strides, dtype, device = call.input
    layout = format_of(sizes, strides)
    try:
        how = {"dtype": dtype, "layout": layout, "device": device, "numerics": call.site.numerics}
        threads = torch.get_num_threads()
        if call.alone and not _alone.takes_alone(call.block, call.input, False):
            return f"-> PyTorch's own {'activation' if _alone.is_costly(call.block) else 'norm'}"
        if device.type == "cpu" and _cpu.leaves_convolution(call.block, call.input, threads, False):
            description = describe(call.block)
            tail = explain(description.tail, description.conv_output_shape(sizes), **how)
            return f"-> PyTorch's own convolution, then {_chosen(tail).removeprefix('* ')}"
        text = explain(call.block, sizes, **how)
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error).splitlines()[0]
    chosen = _chosen(text)
    apart = "-> PyTorch's own convolution"
    return f"{apart} and batch norm" if call.bare and chosen.startswith(apart) else chosen


def _chosen(explanation: str) -> str:
    """The row of an explanation that is marked as chosen, and those whose kernels do not compile."""
    lines = [line.strip() for line in explanation.splitlines() if line.strip()]
    chosen = next((line for line in lines if line.startswith(("*", "->", "eager:"))), lines[-1])
    rows = [line.partition(" no: kernel ") for line in lines]
    unbuilt = [f"{row.strip()} is left out: kernel {why}" for row, _, why in rows if " compile" in why]
    return "; ".join((chosen, *unbuilt))


def _note(entry: Entry) -> str:
    only = f"{entry.modes[0]} only" if len(entry.modes) == 1 else ""
    return "; ".join(text for text in (entry.plan or "", only) if text)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
