"""Horizontal bars with their spread, as HTML that takes its colours and its width from the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar; without a value only its note is shown. `kind` is a class of the style sheet."""

    label: str
    note: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    kind: str = ""


def bars(title: str, rows: Sequence[Bar]) -> str:
    """The chart; its longest bar or whisker spans the whole width, and a value of zero has no bar."""
    most = max((max(bar.value, bar.high or 0.0) for bar in rows if bar.value is not None), default=0.0)
    body = "".join(_row(bar, most) for bar in rows)
    return f'<div class="bars" role="img" aria-label="{escape(title)}">{body}</div>'


def _row(bar: Bar, most: float) -> str:
    label = f'<span class="label">{escape(bar.label)}</span>'
    if bar.value is None:
        return f'<div class="row">{label}<span class="none">{escape(_short(bar.note))}</span></div>'
    drawn = ""
    if bar.value > 0:
        kind = f"bar {bar.kind}".rstrip()
        drawn = f'<span class="{kind}" style="width:{100 * bar.value / most:.2f}%"></span>'
    drawn += _whisker(bar, most)
    note = f'<span class="note">{escape(bar.note)}</span>'
    return f'<div class="row">{label}<span class="track">{drawn}</span>{note}</div>'


def _whisker(bar: Bar, most: float) -> str:
    if bar.low is None or bar.high is None or most <= 0:
        return ""
    low, high = 100 * bar.low / most, 100 * bar.high / most
    return f'<span class="whisker" style="left:{low:.2f}%;width:{high - low:.2f}%"></span>'


def _short(note: str) -> str:
    return note if len(note) <= 90 else note[:89] + "…"
