"""The report: one self-contained HTML page without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from onepass.optimizing import chart, text, variants
from onepass.optimizing.blocks import FusedBlock, KeptChain
from onepass.optimizing.chart import Bar
from onepass.optimizing.headline import headline
from onepass.optimizing.study import FRESH_INPUTS, Row, StepStudy, Study
from onepass.optimizing.style import STYLE
from onepass.optimizing.tables import Markup, table
from onepass.optimizing.verify import Check


def render(studies: Sequence[Study], machine: Mapping[str, str], command: str, memory_method: str) -> str:
    """The page for all files of one run."""
    names = ", ".join(study.name for study in studies)
    sections = "".join(_section(study, f"model-{i}") for i, study in enumerate(studies))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>onepass: {escape(names)}</title><style>{STYLE}</style></head><body>"
        f"{headline(studies, machine, command)}{_contents(studies)}{sections}"
        f"{_methods(studies, machine, memory_method)}</body></html>\n"
    )


def _contents(studies: Sequence[Study]) -> str:
    items = []
    for i, study in enumerate(studies):
        parts = [(step.name, f"model-{i}-{_anchor(step)}") for step in study.steps]
        parts += [("what was fused", f"model-{i}-blocks")]
        links = ", ".join(f'<a href="#{place}">{escape(name)}</a>' for name, place in parts)
        items.append(f'<li><a href="#model-{i}">{escape(study.name)}</a>: {links}</li>')
    items.append('<li><a href="#method">Machine and method</a></li>')
    return f"<nav><b>Contents</b><ul>{''.join(items)}</ul></nav>"


def _anchor(step: StepStudy) -> str:
    return step.name.partition(" ")[0]


def _section(study: Study, place: str) -> str:
    where = f"<code>{escape(study.path)}</code>, input {escape(', '.join(study.inputs))}"
    head = f'<h2 id="{place}">{escape(study.name)}</h2><p class="soft">{where}</p>'
    steps = "".join(_step(study, step, place) for step in study.steps)
    return head + steps + _blocks(study, place)


# --- One step --------------------------------------------------------------------------------------


def _step(study: Study, step: StepStudy, place: str) -> str:
    name = step.name.capitalize()
    times = chart.bars(f"{name}, ms", [_time_bar(step, row) for row in step.shown()])
    memory = chart.bars(f"{name}, peak MiB", [_memory_bar(step, row) for row in step.shown()])
    return (
        f'<h3 id="{place}-{_anchor(step)}">{name}: time, ms</h3>'
        f"<p>{escape(text.recommendation(study, step))}</p>"
        f"{times}{_results(step)}<h3>{name}: peak memory, MiB</h3>{memory}"
        f"<h3>{name}: errors</h3>{_errors(step)}"
    )


def _kind(step: StepStudy, row: Row) -> str:
    """The class of a row or bar."""
    if not variants.is_ours(row.variant) or row.idle:
        return ""
    return "win" if step.wins(row) else "ours"


def _row_kind(step: StepStudy, row: Row) -> str:
    return "wrong" if variants.is_ours(row.variant) and row.wrong else _kind(step, row)


def _time_bar(step: StepStudy, row: Row) -> Bar:
    if row.timing is None:
        return Bar(row.variant, text.verdict(row))
    timing = row.timing
    values = (timing.median * 1e3, timing.p10 * 1e3, timing.p90 * 1e3)
    return Bar(row.variant, text.milliseconds(timing), *values, kind=_kind(step, row))


def _memory_bar(step: StepStudy, row: Row) -> Bar:
    if row.peak_bytes is None:
        reason = "not measured" if row.timing is None else "not measured: a CUDA graph holds its memory"
        return Bar(row.variant, reason)
    kind = "ours" if _kind(step, row) else ""
    return Bar(row.variant, text.mebibytes(row.peak_bytes), row.peak_bytes / 2**20, kind=kind)


def _results(step: StepStudy) -> str:
    head = ("", "speed to best", "ms, median (10% to 90%)", "repeats", "to eager", "first call, s", "result")
    rows = [(_result_cells(step, row), _row_kind(step, row)) for row in step.rows]
    return table(head, rows, numeric=(1, 2, 3, 4, 5))


def _result_cells(step: StepStudy, row: Row) -> tuple[str, ...]:
    return (
        row.variant,
        text.speed(step, row),
        text.milliseconds(row.timing),
        str(row.timing.repeats) if row.timing else "",
        "" if row.idle else text.times(step.speed_up(row)),
        "" if row.first_call_seconds is None else f"{row.first_call_seconds:.2f}",
        text.verdict(row),
    )


def _errors(step: StepStudy) -> str:
    head = ("tensor", "variant", "error against fp64", "PyTorch's own", "ratio", "difference to PyTorch")
    gradients = any(check.is_gradient for row in step.rows for check in row.checks)
    columns = len(head) + gradients
    rows = [
        (_error_cells(row, check)[:columns], "wrong" if _row_kind(step, row) == "wrong" else "")
        for row in step.shown()
        for check in row.checks
        if not check.fault and (variants.is_ours(row.variant) or not check.is_gradient)
    ]
    rule = (
        f"Asked of onepass, on {FRESH_INPUTS} sets of new inputs: {step.rule}. The backend may also have the "
        "errors of Inductor alone. PyTorch's own variants are timed where close: within 10x eager's error or "
        f"{10 * step.rule.tolerance:g} of the largest."
    )
    kinks = (
        " A gradient jumps where an activation has a kink: a jump that noise of rounding size in the inputs "
        "causes in fp64 is allowed, and listed where it was needed."
    )
    note = f'<p class="soft">{escape(rule + kinks * gradients)}</p>'
    return note + table((*head, "kink")[:columns], rows, numeric=range(2, columns))


def _error_cells(row: Row, check: Check) -> tuple[str, ...]:
    return (
        check.name,
        row.variant,
        f"{check.error:.1e}",
        f"{check.torch_error:.1e}",
        text.times(check.ratio()),
        f"{check.difference:.1e}",
        f"{check.kink:.1e}" if check.kink else "",
    )


# --- Blocks, machine, method -----------------------------------------------------------------------


def _blocks(study: Study, place: str) -> str:
    found = f'<h3 id="{place}-blocks">What was fused</h3><p>{escape(text.coverage(study).capitalize())}.</p>'
    if advice := text.advice(study):
        found += f'<p class="note-box">{escape(advice)}</p>'
    if study.fused:
        head = ("block", "predicted, ms", "measured, ms")
        found += table(head, [(_block_cells(block), "") for block in study.fused], numeric=(1, 2))
        found += '<p class="soft">Of one call of the library\'s kernels, each block alone.</p>'
    if study.chains:
        head = ("chain of the backend", "predicted, ms", "by Inductor, ms", "decision")
        found += "<h3>What the backend kept</h3>"
        found += table(head, [(_chain_cells(chain), "") for chain in study.chains], numeric=(1, 2))
    if study.skipped:
        found += "<h3>Not fused</h3>" + table(("module", "why"), [(entry, "") for entry in study.skipped])
    return found


def _block_cells(block: FusedBlock) -> tuple[str, ...]:
    modules = ", ".join(block.modules) or block.name
    chosen = escape(block.chosen.removeprefix("* "))
    plan = f"<details><summary>plan: {chosen}</summary><pre>{escape(block.plan)}</pre></details>"
    words = f"<small>{escape(modules)}</small><code>{escape(block.block)}</code>{plan}"
    return Markup(words), text.seconds_as_ms(block.predicted), text.seconds_as_ms(block.measured)


def _chain_cells(chain: KeptChain) -> tuple[str, ...]:
    step = ", a training step" if chain.gradients else ""
    name = Markup(f"<small>{escape(chain.name + step)}</small><code>{escape(chain.block)}</code>")
    return name, text.seconds_as_ms(chain.predicted), text.seconds_as_ms(chain.inductor), chain.decision


def _methods(studies: Sequence[Study], machine: Mapping[str, str], memory_method: str) -> str:
    facts = table((), [((name, value), "") for name, value in machine.items()])
    names = dict.fromkeys(row.variant for study in studies for step in study.steps for row in step.rows)
    recipes = table(("variant", "how it is had"), [((name, variants.recipe(name)), "") for name in names])
    return (
        f'<h2 id="method">Machine and method</h2>{facts}'
        '<p class="soft">All variants run in one process on the same inputs, warmed up, one call of each a '
        "round in random order; times are medians with their 10% and 90% quantiles, and none is given for a "
        "result that does not match. Where repeats spread widely all are measured again, and the calmer run "
        f"counts. Memory is {escape(memory_method)}, the result included. On a GPU the L2 cache is "
        "overwritten before each call; charts show a variant with cuDNN's benchmark where that is faster.</p>"
        f"{recipes}"
    )
