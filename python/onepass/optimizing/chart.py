"""Horizontal bars with their spread, as inline SVG that takes its colours from the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape

WIDTH, ROW, BAR, LABEL, NOTE = 760, 30, 18, 120, 190  # in pixels; the bars get what label and note leave


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar; without a value only its note is shown."""

    label: str
    note: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    accent: bool = False


def bars(title: str, rows: Sequence[Bar]) -> str:
    """The chart; its longest bar or whisker spans the whole width."""
    most = max((max(bar.value, bar.high or 0.0) for bar in rows if bar.value is not None), default=0.0)
    scale = (WIDTH - LABEL - NOTE) / most if most > 0 else 0.0
    height = ROW * len(rows)
    body = "".join(_row(bar, ROW * i, scale) for i, bar in enumerate(rows))
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{body}</svg>"
    )


def _row(bar: Bar, top: int, scale: float) -> str:
    middle = top + ROW / 2
    label = f'<text class="label" x="{LABEL - 10}" y="{middle}">{escape(bar.label)}</text>'
    if bar.value is None:
        return f'{label}<text class="none" x="{LABEL}" y="{middle}">{escape(_short(bar.note))}</text>'
    length = max(bar.value * scale, 1.0)
    kind = "bar accent" if bar.accent else "bar"
    place = f'x="{LABEL}" y="{middle - BAR / 2}" width="{length:.1f}" height="{BAR}"'
    rectangle = f'<rect class="{kind}" {place} rx="2"/>'
    end = LABEL + max(length, (bar.high or 0.0) * scale) + 8
    note = f'<text class="note" x="{end:.1f}" y="{middle}">{escape(bar.note)}</text>'
    return label + rectangle + _whisker(bar, middle, scale) + note


def _whisker(bar: Bar, middle: float, scale: float) -> str:
    if bar.low is None or bar.high is None:
        return ""
    low, high = LABEL + bar.low * scale, LABEL + bar.high * scale
    ends = "".join(f"M{x:.1f} {middle - 5}V{middle + 5}" for x in (low, high))
    return f'<path class="whisker" d="M{low:.1f} {middle}H{high:.1f}{ends}"/>'


def _short(note: str) -> str:
    return note if len(note) <= 90 else note[:89] + "…"
