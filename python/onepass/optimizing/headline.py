"""The top of the report: speed against PyTorch's best, coverage and exactness, before anything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from onepass.optimizing import text
from onepass.optimizing.study import StepStudy, Study
from onepass.optimizing.tables import Markup, table

_ABOVE = ("GPU", "processor", "threads", "PyTorch", "onepass", "date")  # the rest is at the end of the page


def headline(studies: Sequence[Study], machine: Mapping[str, str], command: str) -> str:
    """Machine, date and command; three cards; one row for each step; what to know and to use."""
    where = "; ".join(f"{name} {machine[name]}" for name in _ABOVE if name in machine)
    cases = [(study, step) for study in studies for step in study.steps]
    notes = [f"{s.name}: {text.advice(s)}" for s in studies if text.advice(s)]
    notes += [f"{s.name}, {step.name}: {text.warning(step)}" for s, step in cases if text.warning(step)]
    return (
        f'<h1>onepass report</h1><p class="soft">{escape(where)}</p>'
        f'<pre class="command">{escape(command)}</pre>'
        f'<div class="cards">{_speed(cases)}{_coverage(studies)}{_exactness(studies)}</div>'
        f"{_table(cases)}"
        + "".join(f"<p><b>{escape(text.recommendation(*case))}</b></p>" for case in cases)
        + "".join(f'<p class="note-box">{escape(note)}</p>' for note in notes)
    )


def _card(value: str, words: str, kind: str = "") -> str:
    return f'<div class="card"><b class="{kind}">{escape(value)}</b><span>{escape(words)}</span></div>'


def _speed(cases: Sequence[tuple[Study, StepStudy]]) -> str:
    outcomes = [text.outcome(step) for _, step in cases]
    if len(cases) > 1:
        faster, slower = outcomes.count("faster"), outcomes.count("slower")
        kind = "faster" if faster == len(cases) else "slower" if slower else ""
        return _card(f"faster in {faster} of {len(cases)}", "than PyTorch's best variant", kind)
    speed, kind = cases[0][1].speed_up_of_best(), outcomes[0]
    if speed is None:
        return _card("no time", "onepass has no right result here", "wrong")
    if kind == "nothing fused":
        return _card("no change", "onepass runs nothing of this model", "slower")
    words = {"faster": "faster than", "even": "as fast as", "slower": "slower than"}[kind]
    best = cases[0][1].best_pytorch().variant
    return _card(text.times(speed), f"the speed of PyTorch's best ({best}): {words} it", kind)


def _coverage(studies: Sequence[Study]) -> str:
    fused = sum(study.coverage.fused for study in studies)
    layers = sum(study.coverage.layers for study in studies)
    if not any(study.fused for study in studies):
        return _card("nothing fused", f"of {layers} layers", "slower")
    count = sum(len(study.fused) for study in studies)
    blocks = "1 block" if count == 1 else f"{count} blocks"
    return _card(f"{fused} of {layers}", f"layers run fused, in {blocks}")


def _exactness(studies: Sequence[Study]) -> str:
    wrong = [study.name for study in studies if study.wrong]
    if wrong:
        return _card(f"Wrong: {', '.join(wrong)}", "a result that is wrong has no time", "wrong")
    rows = [step.ours() for study in studies for step in study.steps]
    checks = [check for row in rows if (check := text.worst_output(row))]
    if not checks:
        return _card("not compared", "no variant of onepass ran", "wrong")
    worst = max(checks, key=lambda check: check.ratio())
    words = f"the error of eager PyTorch against fp64, at most; {worst.error:.1e}"
    return _card(text.times(worst.ratio()), words + "; every result is right")


def _table(cases: Sequence[tuple[Study, StepStudy]]) -> str:
    head = ("", "speed to best", "onepass, ms", "PyTorch's best, ms", "to eager", "fused", "error to eager's")
    return table(head, [(_cells(*case), "") for case in cases], numeric=(1, 2, 3, 4, 5, 6))


def _cells(study: Study, step: StepStudy) -> tuple[str, ...]:
    ours, best = step.ours(), step.best_pytorch()
    outcome = text.outcome(step)
    speed = "none" if outcome in ("nothing fused", "no result") else text.times(step.speed_up_of_best())
    name = f"{escape(study.name)}, {escape(step.name)}<small>{escape(', '.join(study.inputs))}</small>"
    return (
        Markup(name),
        Markup(f'<b class="{outcome.replace(" ", "-")}">{speed}</b>'),
        _time("", "nothing fused") if ours.idle else _time(text.median(ours.timing), ours.variant),
        _time(text.median(best.timing), best.variant) if best else "",
        "" if ours.idle else text.times(step.speed_up(ours)),
        f"{study.coverage.fused} of {study.coverage.layers}",
        text.error(ours),
    )


def _time(milliseconds: str, variant: str) -> Markup:
    return Markup(f"{escape(milliseconds) or 'none'}<small>{escape(variant)}</small>")
