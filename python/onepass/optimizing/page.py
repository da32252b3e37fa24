"""The report: one self-contained HTML page without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from onepass.optimizing import chart, text
from onepass.optimizing.chart import Bar
from onepass.optimizing.study import FRESH_INPUTS, FusedBlock, Row, StepStudy, Study
from onepass.optimizing.variants import EAGER, ONEPASS, is_ours
from onepass.optimizing.verify import Check

_STYLE = """
:root { --ink: #1c2430; --soft: #5b6675; --line: #dfe4ea; --paper: #ffffff; --band: #f5f7f9; --bar: #b4bfcc;
        --accent: #0b7a5f; --bad: #b3261e; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --soft: #9aa7b5; --line: #303946; --paper: #12171e; --band: #1a212b; --bar: #4b5868;
          --accent: #3ecfa6; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 2.5rem 1.5rem 4rem;
       background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .25rem; padding-top: 1.25rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
p { margin: .25rem 0 .75rem; }
.soft { color: var(--soft); font-size: .9rem; }
.bad { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); }
th, td { padding: .4rem .75rem .4rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
td:last-child, th:last-child { padding-left: .5rem; padding-right: 0; }
tr.accent td { color: var(--accent); font-weight: 600; }
tr.wrong td { color: var(--bad); }
code, pre { font: .85rem/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
pre { background: var(--band); padding: .75rem 1rem; border-radius: 6px; overflow-x: auto; margin: .5rem 0; }
summary { cursor: pointer; color: var(--soft); font-size: .9rem; }
.chart { width: 100%; height: auto; max-width: 56rem; display: block; margin-bottom: 1rem; }
.chart text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink);
              dominant-baseline: central; }
.chart .label { text-anchor: end; }
.chart .note, .chart .none { fill: var(--soft); }
.chart .bar { fill: var(--bar); }
.chart .accent { fill: var(--accent); }
.chart .whisker { stroke: var(--ink); stroke-width: 1.5; fill: none; }
"""


def render(studies: Sequence[Study], machine: Mapping[str, str], command: str, memory_method: str) -> str:
    """The page for all files of one run."""
    names = ", ".join(study.name for study in studies)
    sections = "".join(map(_section, studies))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>onepass: {escape(names)}</title><style>{_STYLE}</style></head><body>"
        f"{_summary(studies)}{sections}{_methods(machine, command, memory_method)}</body></html>\n"
    )


def _summary(studies: Sequence[Study]) -> str:
    wrong = [study.name for study in studies if study.wrong]
    verdict = (
        f'<p class="bad">Wrong: {escape(", ".join(wrong))}.</p>' if wrong else "<p>Every result is right.</p>"
    )
    head = (
        "",
        "input",
        "step",
        "eager, ms",
        "PyTorch's best, ms",
        "onepass, ms",
        "speed to eager",
        "to best",
    )
    rows = [(_summary_cells(study, step), "") for study in studies for step in study.steps]
    return f"<h1>onepass report</h1>{verdict}{_table(head, rows, numeric=(3, 4, 5, 6, 7))}"


def _summary_cells(study: Study, step: StepStudy) -> tuple[str, ...]:
    ours, best = step.ours(), step.best_pytorch()
    return (
        study.name,
        ", ".join(study.inputs),
        step.name,
        text.median(step.row(EAGER).timing),
        f"{text.median(best.timing)} ({best.variant})" if best else "",
        f"{text.median(ours.timing)}{_suffix(ours)}" if ours.timing else "none",
        text.times(step.speed_up(ours)),
        text.times(step.speed_up_of_best()),
    )


def _suffix(ours: Row) -> str:
    return "" if ours.variant == ONEPASS else f" ({ours.variant})"


def _section(study: Study) -> str:
    where = f"<code>{escape(study.path)}</code>, input {escape(', '.join(study.inputs))}"
    head = f'<h2>{escape(study.name)}</h2><p class="soft">{where}</p>'
    return head + "".join(map(_step, study.steps)) + _blocks(study)


# --- One step --------------------------------------------------------------------------------------


def _step(step: StepStudy) -> str:
    name = step.name.capitalize()
    times = chart.bars(f"{name}, ms", [_time_bar(row) for row in step.rows])
    memory = chart.bars(f"{name}, peak MiB", [_memory_bar(row) for row in step.rows])
    return (
        f"<h3>{name}: time, ms</h3>{times}{_results(step)}<h3>{name}: peak memory, MiB</h3>{memory}"
        f"<h3>{name}: errors</h3>{_errors(step)}"
    )


def _time_bar(row: Row) -> Bar:
    accent = is_ours(row.variant)
    if row.timing is None:
        return Bar(row.variant, text.verdict(row), accent=accent)
    timing = row.timing
    values = (timing.median * 1e3, timing.p10 * 1e3, timing.p90 * 1e3)
    return Bar(row.variant, text.milliseconds(timing), *values, accent=accent)


def _memory_bar(row: Row) -> Bar:
    accent = is_ours(row.variant)
    if row.peak_bytes is None:
        return Bar(row.variant, "not measured", accent=accent)
    return Bar(row.variant, text.mebibytes(row.peak_bytes), row.peak_bytes / 2**20, accent=accent)


def _results(step: StepStudy) -> str:
    head = ("", "ms, median (10% to 90%)", "repeats", "speed", "first call, s", "peak MiB", "result")
    rows = [(_result_cells(step, row), _row_class(row)) for row in step.rows]
    return _table(head, rows, numeric=(1, 2, 3, 4, 5))


def _result_cells(step: StepStudy, row: Row) -> tuple[str, ...]:
    first = "" if row.first_call_seconds is None else f"{row.first_call_seconds:.2f}"
    repeats = str(row.timing.repeats) if row.timing else ""
    speed = text.times(step.speed_up(row))
    peak = text.mebibytes(row.peak_bytes)
    return row.variant, text.milliseconds(row.timing), repeats, speed, first, peak, text.verdict(row)


def _row_class(row: Row) -> str:
    return "" if not is_ours(row.variant) else "wrong" if row.wrong else "accent"


def _errors(step: StepStudy) -> str:
    head = ("tensor", "variant", "error against fp64", "PyTorch's own", "ratio", "difference to PyTorch")
    gradients = any(check.is_gradient for row in step.rows for check in row.checks)
    columns = len(head) + gradients
    rows = [
        (_error_cells(row, check)[:columns], _row_class(row))
        for row in step.rows
        for check in row.checks
        if not check.fault and (row.variant == ONEPASS or not check.is_gradient)
    ]
    rule = (
        f"Asked of onepass, on {FRESH_INPUTS} sets of new inputs: {step.rule}. PyTorch's own variants are "
        f"timed where close: within 10x eager's error or {10 * step.rule.tolerance:g} of the largest."
    )
    kinks = (
        " A gradient jumps where an activation has a kink: a jump that noise of rounding size in the inputs "
        "causes in fp64 is allowed, and listed where it was needed."
    )
    note = f'<p class="soft">{escape(rule + kinks * gradients)}</p>'
    return note + _table((*head, "kink")[:columns], rows, numeric=range(2, columns))


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


def _blocks(study: Study) -> str:
    fused = "".join(map(_block, study.fused)) or "<p>Nothing.</p>"
    skipped = _table(("not fused", "why"), [(entry, "") for entry in study.skipped]) if study.skipped else ""
    return f"<h3>What was fused</h3>{fused}{skipped}"


def _block(block: FusedBlock) -> str:
    modules = ", ".join(block.modules) or block.name
    chosen = escape(block.chosen.removeprefix("* "))
    plan = f"<details><summary>plan: {chosen}</summary><pre>{escape(block.plan)}</pre></details>"
    return f'<p class="soft">{escape(modules)}</p><pre>{escape(block.block)}</pre>{plan}'


def _methods(machine: Mapping[str, str], command: str, memory_method: str) -> str:
    facts = _table((), [((name, value), "") for name, value in machine.items()])
    return (
        f"<h2>Machine and method</h2>{facts}"
        '<p class="soft">All variants run in one process on the same inputs, warmed up, one call of each a '
        "round in random order; times are medians with their 10% and 90% quantiles, and none is given for a "
        f"result that does not match. Memory is {escape(memory_method)}, the result included. On a GPU the "
        "L2 cache is overwritten before each call, and <em>bench</em> is torch.backends.cudnn.benchmark.</p>"
        f"<pre>{escape(command)}</pre>"
    )


def _table(
    head: Sequence[str], rows: Iterable[tuple[Sequence[str], str]], numeric: Sequence[int] = ()
) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = (' class="number"' if i in numeric else "" for i in range(len(values)))
        return "".join(f"<{tag}{kind}>{escape(v)}</{tag}>" for kind, v in zip(kinds, values, strict=True))

    top = f"<thead><tr>{cells('th', head)}</tr></thead>" if head else ""
    body = "".join(f'<tr class="{kind}">{cells("td", values)}</tr>' for values, kind in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'
