"""One model file studied: every variant verified on new inputs, then measured side by side."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onepass._command_line import describe
from onepass.optimizing import blocks, measure, steps, variants, verify
from onepass.optimizing.blocks import Coverage, FusedBlock, KeptChain
from onepass.optimizing.measure import Timing
from onepass.optimizing.model_file import Arguments, ModelFile
from onepass.optimizing.steps import Step
from onepass.optimizing.variants import BACKEND, BENCH, EAGER, FUSE, Variant
from onepass.optimizing.verify import Check, Rule
from onepass.report import report

FRESH_INPUTS = 3
WIN = 1.02  # as fast as PyTorch's best, within what runs differ by

Progress = Callable[[str, float], None]  # what is being done, and how far the step is, 0 to 1
Results = dict[tuple[str, bool], Tensor]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked for."""

    device: torch.device
    batch: int | None
    conv: str
    train: bool
    seconds: float


@dataclasses.dataclass
class Row:
    """One variant in one step. A variant that could not run has a reason, a wrong one no time."""

    variant: str
    reason: str = ""
    wrong: str = ""
    keeps_rule: bool = False  # as onepass must; PyTorch's own variants need only be close
    checks: list[Check] = dataclasses.field(default_factory=list)
    first_call_seconds: float | None = None
    timing: Timing | None = None
    peak_bytes: int | None = None
    idle: str = ""  # why nothing of onepass runs in a variant of its own, whose time then is PyTorch's


def _seconds(row: Row) -> float:
    return row.timing.median if row.timing else math.inf


@dataclasses.dataclass
class StepStudy:
    """All variants in one step."""

    name: str
    rule: Rule
    rows: list[Row]

    def row(self, variant: str) -> Row:
        """The row of a variant."""
        return next(row for row in self.rows if row.variant == variant)

    def speed_up(self, row: Row) -> float | None:
        """How many times as fast as eager."""
        eager = self.row(EAGER).timing
        return eager.median / row.timing.median if eager and row.timing else None

    def speed_up_of_best(self) -> float | None:
        """How many times as fast onepass is as the fastest of PyTorch's own variants."""
        return self.speed_to_best(self.ours())

    def speed_to_best(self, row: Row) -> float | None:
        """How many times as fast as the fastest of PyTorch's own variants."""
        best = self.best_pytorch()
        return best.timing.median / row.timing.median if best and row.timing else None

    def ours(self) -> Row:
        """The fastest of onepass's variants, of those that run its kernels if any does."""
        timed = [row for row in self.rows if variants.is_ours(row.variant) and row.timing]
        return min(timed, key=lambda row: (row.idle, row.timing.median), default=self.row(FUSE))

    def best_pytorch(self) -> Row | None:
        """The fastest of PyTorch's own variants."""
        timed = [row for row in self.rows if not variants.is_ours(row.variant) and row.timing]
        return min(timed, key=lambda row: row.timing.median, default=None)

    def wins(self, row: Row) -> bool:
        """Whether the row is onepass and faster than all of PyTorch's own."""
        speed = self.speed_to_best(row) if variants.is_ours(row.variant) and not row.idle else None
        return speed is not None and speed >= WIN

    def shown(self) -> list[Row]:
        """The rows, of each variant with and without cuDNN's benchmark the faster one."""
        kept: dict[str, Row] = {}
        for row in self.rows:
            base = row.variant.removesuffix(BENCH)
            other = kept.get(base)
            if other is None or _seconds(row) < _seconds(other):
                kept[base] = row
        return list(kept.values())

    def unsteady(self) -> list[Row]:
        """The rows whose repeats still spread widely when measured again."""
        return [row for row in self.rows if row.timing and row.timing.is_wide]


@dataclasses.dataclass
class Study:
    """Everything that was found about one file."""

    name: str
    path: str
    inputs: list[str]
    steps: list[StepStudy]
    fused: list[FusedBlock]
    skipped: list[tuple[str, str]]
    coverage: Coverage
    chains: list[KeptChain]  # of the backend; empty where it could not compile

    @property
    def wrong(self) -> list[str]:
        """Why onepass is wrong; empty where it is right. The backend may miss a compiler."""
        fused = [step.row(FUSE) for step in self.steps]
        others = [row for step in self.steps for row in step.rows if variants.is_ours(row.variant)]
        reasons = [row.wrong or row.reason for row in fused]
        return [reason for reason in (*reasons, *(row.wrong for row in others)) if reason]


def study(file: ModelFile, options: Options, progress: Progress) -> Study:
    """Builds, verifies and measures; raises BadModelFile where the original cannot run."""
    return _Session(file, options, progress).run()


class _Session:
    """The variants of one file with the inputs they share."""

    def __init__(self, file: ModelFile, options: Options, progress: Progress) -> None:
        self.file = file
        self.options = options
        self.progress = progress
        progress("building", 0.0)
        self.original = file.build(options.device)
        self.inputs = [
            file.inputs(options.device, seed, options.batch) for seed in range(1, FRESH_INPUTS + 1)
        ]
        self.variants: dict[str, Variant] = {}
        self.reasons: dict[str, str] = {}
        for name, make in variants.makers(self._build, self.inputs[0], options.conv, options.device):
            self._make(name, make)
        exact = self._build().double()
        self.exact = Variant("fp64", exact, exact)

    def run(self) -> Study:
        """The study of every step asked for."""
        steps = [
            _study_step(self, Step(train)) for train in ((False, True) if self.options.train else (False,))
        ]
        fused = self._fused()
        found = report(self.variants[FUSE].model if FUSE in self.variants else self.original)
        skipped = [(entry.name, entry.reason) for entry in found.skipped]
        skipped += [(fallback.name, str(fallback)) for fallback in found.fallbacks]
        shapes = [_describe_input(x) for x in self.inputs[0].leaves]
        chains = blocks.kept_chains(self.variants[BACKEND]) if BACKEND in self.variants else []
        covered = blocks.coverage(self.original, fused)
        _mark_idle([row for step in steps for row in step.rows], fused, chains)
        return Study(self.file.name, self.file.path, shapes, steps, fused, skipped, covered, chains)

    def _fused(self) -> list[FusedBlock]:
        variant = self.variants.get(FUSE)
        return blocks.fused_blocks(variant, self.inputs[0]) if variant else []

    def _build(self) -> nn.Module:
        model = self.file.build(self.options.device)
        model.load_state_dict(self.original.state_dict())  # for constructors that no seed controls
        return model

    def _make(self, name: str, make: Callable[[], Variant]) -> None:
        self.reasons[name] = ""
        try:
            self.variants[name] = make()
        except Exception as error:
            self.reasons[name] = describe(error)


def _mark_idle(rows: list[Row], fused: list[FusedBlock], chains: list[KeptChain]) -> None:
    kept = any(chain.kept for chain in chains)
    for row in rows:
        if row.variant.startswith(FUSE) and not fused:
            row.idle = "nothing was fused: this is eager"
        elif row.variant.startswith(BACKEND) and not kept:
            row.idle = "no chain was kept: this is torch.compile"


def _describe_input(x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    return f"{'x'.join(map(str, x.shape)) or 'scalar'} {str(x.dtype).removeprefix('torch.')}"


# --- One step: verify, measure, verify what was measured -------------------------------------------


class _Judge:
    """What one set of inputs gives in PyTorch and in double precision."""

    def __init__(self, session: _Session, step: Step, inputs: Arguments) -> None:
        self.step = step
        self.inputs = inputs
        self.exact_variant = session.exact
        eager, run = session.variants[EAGER], session.file.run
        self.directions = run(lambda: _directions(eager, inputs))
        self.torch = run(lambda: _results(eager, step, inputs, self.directions))
        self.exact = run(lambda: self._exactly(0.0))

    def checks(self, results: Results, rule: Rule) -> list[Check]:
        """Compares every output and gradient."""
        missing = [name for name, is_gradient in self.torch if (name, is_gradient) not in results]
        if missing:
            return [Check(missing[0], False, 0.0, 0.0, 0.0, 0.0, False, True, fault="there is none")]
        checks = [
            verify.compare(*key, results[key], self.torch[key], self.exact[key], rule) for key in self.torch
        ]
        if not any(check.is_gradient and check.wrong(rule) for check in checks):
            return checks
        return [dataclasses.replace(check, kink=self.kinks.get(check.name, 0.0)) for check in checks]

    @functools.cached_property
    def kinks(self) -> dict[str, float]:
        """How far each gradient jumps in double precision: two more steps, taken where a gradient is off."""
        above, below = self._exactly(1.0), self._exactly(-1.0)
        gradients = [key for key in self.exact if key[1]]
        return {key[0]: verify.kink(above[key], self.exact[key], below[key]) for key in gradients}

    def _exactly(self, noise: float) -> Results:
        seeds = itertools.count()
        doubled = self.inputs.map(lambda x: _doubled(x, noise, next(seeds)))
        return _results(self.exact_variant, self.step, doubled, [d.double() for d in self.directions])


def _doubled(x: Tensor, noise: float, seed: int) -> Tensor:
    if not x.is_floating_point():
        return x
    return x.double() + noise * verify.rounding_noise(x.double(), seed) if noise else x.double()


def _study_step(session: _Session, step: Step) -> StepStudy:
    rows = {name: Row(name, reason) for name, reason in session.reasons.items()}
    for variant in (*session.variants.values(), session.exact):
        variant.call.train(step.train)
    first = _judge(session, step, 0)
    rule = verify.rule_for(next(iter(first.torch.values())).dtype, session.options.device)
    for i in range(FRESH_INPUTS):
        judge = _judge(session, step, i) if i > 0 else first
        for name, variant in session.variants.items():
            session.progress(f"{step.name}: verifying {name}, inputs {i + 1} of {FRESH_INPUTS}", 0.0)
            _verify(rows, variant, step, judge, rule)
    _measure(session, step, rows, first, rule)
    return StepStudy(step.name, rule, list(rows.values()))


def _judge(session: _Session, step: Step, i: int) -> _Judge:
    session.progress(f"{step.name}: PyTorch and fp64, inputs {i + 1} of {FRESH_INPUTS}", 0.0)
    return _Judge(session, step, session.inputs[i])


def _directions(eager: Variant, inputs: Arguments) -> list[Tensor]:
    """Random gradients of the outputs: a sum of all outputs would hide errors that cancel."""
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = steps.floating(inputs.call(eager.call))
    if not outputs:
        raise ValueError("the model returns no floating-point tensor")
    return [torch.randn_like(output) for output in outputs]


def _results(variant: Variant, step: Step, inputs: Arguments, directions: Sequence[Tensor]) -> Results:
    torch.manual_seed(0)  # the same dropout for everyone
    prepared = variant.prepare(inputs, step.train)
    outputs = step.run(variant, prepared, directions)
    return step.results(variant, prepared, outputs)


def _verify(rows: dict[str, Row], variant: Variant, step: Step, judge: _Judge, rule: Rule) -> None:
    """Adds the checks of one set of inputs, and why the variant is wrong or cannot run."""
    row = rows[variant.name]
    if row.reason:
        return
    try:
        start = time.perf_counter()
        results = _results(variant, step, judge.inputs, judge.directions)
        row.first_call_seconds = row.first_call_seconds or time.perf_counter() - start
        row.checks = _merged(row.checks, judge.checks(results, rule))
    except Exception as error:
        row.reason = describe(error)
    rival = rows.get(variants.rival_of(variant.name) or "")
    row.wrong = _why_wrong(row, rival.checks if rival else [], rule)
    row.keeps_rule = not any(check.wrong(rule) for check in row.checks)


def _merged(old: list[Check], new: list[Check]) -> list[Check]:
    return [a.merge(b) for a, b in zip(old, new, strict=True)] if old else new


def _why_wrong(row: Row, rivals: list[Check], rule: Rule) -> str:
    """onepass must keep the rule, beside Inductor in its backend; PyTorch's own must be the same model."""
    checks = row.checks
    if not variants.is_ours(row.variant):
        faults = [check.far(rule) for check in checks]
    elif len(rivals) == len(checks):
        faults = [check.beside(rival).wrong(rule) for check, rival in zip(checks, rivals, strict=True)]
    else:
        faults = [check.wrong(rule) for check in checks]
    return next((fault for fault in faults if fault), "")


def _measure(session: _Session, step: Step, rows: dict[str, Row], judge: _Judge, rule: Rule) -> None:
    """Times the variants that are right and verifies them once more: it must still hold."""
    device = session.options.device
    right = {
        name: v for name, v in session.variants.items() if not rows[name].reason and not rows[name].wrong
    }
    prepared = {name: variant.prepare(judge.inputs, step.train) for name, variant in right.items()}
    calls = {name: _timed_call(variant, step, prepared[name], judge) for name, variant in right.items()}
    timings = measure.steady(
        calls, device, session.options.seconds, lambda done: session.progress(f"{step.name}: measuring", done)
    )
    for name, variant in right.items():
        _verify(rows, variant, step, judge, rule)
        step.clear(variant, prepared[name])
        if not rows[name].reason and not rows[name].wrong:
            rows[name].timing = timings[name]
            if not variant.replays_graphs:  # a graph holds its memory before the call
                rows[name].peak_bytes = measure.peak_bytes(calls[name], device)


def _timed_call(
    variant: Variant, step: Step, prepared: Arguments, judge: _Judge
) -> Callable[[], list[Tensor]]:
    return lambda: step.run(variant, prepared, judge.directions)
