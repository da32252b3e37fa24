"""Whole networks of results/<GPU>.json as a table of docs/results.md, and in a sentence of the README."""

from __future__ import annotations

import statistics
from typing import Any

Rows = dict[str, dict[str, Any]]


def _measured(models: dict[str, Any]) -> Rows:
    return {key: row for key, row in models["rows"].items() if "speedup" in row}


def _has_best_settings(rows: Rows) -> bool:
    return all(row["cudnn_benchmark"] for row in rows.values())


def _time(row: dict[str, Any], way: str) -> str:
    median, low, high = row["ways"][way]["ms"]
    short = way.removeprefix("onepass").removeprefix("compile").removeprefix("eager").strip(", ")
    return f"{median:.2f} ({low:.2f} to {high:.2f})" + f", {short}" * bool(short)


def _memory(row: dict[str, Any], way: str) -> str:
    return f"{row['ways'][way]['peak_bytes'] / 2**20:.0f}"


def _eager(row: dict[str, Any]) -> str:
    """Of its fastest layout; it may lack memory in both."""
    own = [name for name, way in row["ways"].items() if name.startswith("eager") and "ms" in way]
    return _time(row, min(own, key=lambda name: row["ways"][name]["ms"][0])) if own else "failed"


def _cells(key: str, row: dict[str, Any]) -> list[str]:
    ours, theirs = row["best"], row["best_of_compile"]
    chains = row["ways"][ours]["chains"]
    right = "" if row["right"] else " (wrong)"
    return [
        key + "*" * (not row["cudnn_benchmark"]),
        _eager(row),
        _time(row, theirs),
        _time(row, ours),
        f"{row['speedup']:.2f}{right}",
        f"{chains['kept']} of {chains['found']}",
        f"{_memory(row, theirs)} / {_memory(row, ours)}",
    ]


HEAD = [
    "network",
    "eager, ms (10% to 90%)",
    "`torch.compile`, ms",
    '`backend="onepass"`, ms',
    "times as fast",
    "chains kept",
    "peak MiB, both",
]


def _builds(rows: Rows, older: bool) -> str:
    """Which libraries the rows were measured with: they are refreshed some at a time."""
    count = len({row["hash"] for row in rows.values()})
    several = f" Measured with {count} builds of the library." * (count > 1)
    return several + " The device code has changed since." * older


def section(result: dict[str, Any], table: Any) -> list[str]:
    """The best way of each side: either layout, with or without a CUDA graph."""
    models = result["models"]
    rows = _measured(models)
    older = models["device_code_hash"] != result["benchmarks"]["device_code_hash"]
    others = "" if _has_best_settings(rows) else " (*: with what cuDNN names first, not the fastest)"
    return [
        "",
        '### Whole networks by `torch.compile(backend="onepass")`',
        f"The fastest of both layouts, with and without CUDA graphs, with cudnn.benchmark{others}; "
        f"{models['date']} (`make bench-models`). Random weights, sizes as their users run them."
        + _builds(rows, older),
        *table(HEAD, [_cells(key, row) for key, row in rows.items()])[:-1],
    ]


def sentences(models: dict[str, Any]) -> list[str]:
    """For the README: none unless the rivals had their best settings."""
    rows = _measured(models)
    if not rows or not _has_best_settings(rows):
        return []
    ratios = [row["speedup"] for row in rows.values()]
    kinds = sorted({"forward" if key.endswith("forward") else "training" for key in rows})
    return [
        f'Whole networks by `torch.compile(model, backend="onepass")`, times as fast as the best '
        f"`torch.compile`, {len(rows)} cases ({', '.join(kinds)}): geometric mean "
        f"{statistics.geometric_mean(ratios):.2f}, worst {min(ratios):.2f}, best {max(ratios):.2f}.  "
    ]
