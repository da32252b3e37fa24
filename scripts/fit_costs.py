#!/usr/bin/env python3
"""Fits the costs of rows to the sweep (src/cuda/costs/fitted.inc), and trees to PyTorch's convolutions
(costs/convolution_*.inc).

    .venv/bin/python scripts/fit_costs.py [results/nvidia-h200.json] [--dry]

A row's formula gets one factor for each element size: the median of measured over predicted time, drawn
towards 1 where few problems have measured it. The sweep's predictions hold the factors of the table it ran
with, so new factors multiply those. The data are "sweep" of the results.
The trees are fitted to "convolutions" of the results, and judged by problems that they did not see. Tables
begin with the GPU, its driver and the versions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import re
import statistics
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
COSTS = ROOT / "src" / "cuda" / "costs"
TABLE = COSTS / "fitted.inc"
sys.path.append(str(ROOT / "bench" / "sweep"))

from sweep_problems import draw  # noqa: E402

PASSES = ("forward", "input", "weight")  # of a convolution
DOUBTS = 3  # a factor of so many problems is half of what they say, in logarithms
LEAST_PROBLEMS = 10  # of a factor in the table: fewer may turn a choice by chance
LEAST_SECONDS = 8e-6  # shorter ones are launches

Key = tuple[str, int]  # a row, bytes of an element


@dataclasses.dataclass(frozen=True)
class Fit:
    """What a cost is multiplied by, and how far it is off then."""

    factor: float
    problems: int
    before: float  # the typical factor between prediction and measurement, at least 1
    typical: float  # the same, after the fit
    rarely: float  # exceeded by one of ten


def samples(sweep: dict) -> Iterator[tuple[Key, float, float]]:
    """Keys with predicted and measured seconds."""
    for entry in sweep["entries"]:
        problem = draw(entry["seed"], entry["number"])
        if "error" in entry or problem.key() != entry["key"]:
            continue
        for name, row in entry.get("rows", {}).items():
            if "seconds" in row:
                yield (name, problem.element_bytes), row["predicted"], row["seconds"]


def fit(ratios: list[float]) -> Fit:
    """Of measured over predicted times."""
    logs = [math.log(ratio) for ratio in ratios]
    centre = statistics.median(logs) * len(logs) / (len(logs) + DOUBTS)
    off = sorted(abs(log - centre) for log in logs)
    before = statistics.median(abs(log) for log in logs)
    return Fit(
        math.exp(centre),
        len(logs),
        math.exp(before),
        math.exp(statistics.median(off)),
        math.exp(off[min(len(off) - 1, int(0.9 * len(off)))]),
    )


def fits(sweep: dict) -> dict[Key, Fit]:
    """One for each key that was measured."""
    ratios: dict[Key, list[float]] = {}
    for key, predicted, measured in samples(sweep):
        if min(predicted, measured) >= LEAST_SECONDS:
            ratios.setdefault(key, []).append(measured / predicted)
    return {key: fit(found) for key, found in sorted(ratios.items())}


def known() -> dict[Key, float]:
    """The factors that the sweep ran with."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    found = (re.match(r'\{"(\w+)", (\d), ([0-9.e+-]+),', line) for line in lines)
    return {(m[1], int(m[2])): float(m[3]) for m in found if m}


def provenance(result: dict, part: str) -> str:
    """The head of a table."""
    of, device = result[part], result["device"]["description"].split(" from ")[0]
    return f"// {device}; {of['date']}, PyTorch {of['torch']}, cuDNN {of['cudnn']}"


def table(result: dict, found: dict[Key, Fit], before: dict[Key, float]) -> str:
    """The file."""
    lines = [
        "// Written by scripts/fit_costs.py: do not edit. A row, bytes of an element, factor on the cost,",
        "// problems, typical and rare distance of predictions.",
        provenance(result, "sweep"),
    ]
    for name, size in sorted(found.keys() | before.keys()):
        own, old = found.get((name, size)), before.get((name, size), 1.0)
        if own is not None:
            factor = old * own.factor
            figures = f"{factor:.3f}, {own.problems}, {own.typical:.2f}, {own.rarely:.2f}"
            lines.append(f'{{"{name}", {size}, {figures}}},')
    return "\n".join(lines) + "\n"


def fit_rows(result: dict, dry: bool) -> None:
    """Factors of rows."""
    found = fits(result["sweep"])
    for (name, size), own in found.items():
        print(
            f"{name:28} {size} bytes: {own.factor:5.2f} of {own.problems:3} problems, "
            f"off by {own.before:.2f} before, {own.typical:.2f} after, {own.rarely:.2f} rarely"
        )
    if not dry:
        many = {key: own for key, own in found.items() if own.problems >= LEAST_PROBLEMS}
        TABLE.write_text(table(result, many, known()))
        print(f"wrote {TABLE.relative_to(ROOT)}")


def fit_convolutions(result: dict, dry: bool) -> None:
    """Trees for each pass."""
    import fit_trees

    for name in PASSES:
        data = fit_trees.data_of(result["convolutions"]["entries"], name)
        for of, errors in fit_trees.cross_validated(data).items():
            print(f"{name:8} {of:6}: {errors.problems} problems, {errors}")
        if not dry:
            lines = [
                "// Written by scripts/fit_costs.py: do not edit. Features, thresholds and leaves of a tree.",
                provenance(result, "convolutions"),
                *(tree.text() for tree in fit_trees.fit(data.features, data.targets)),
            ]
            path = COSTS / f"convolution_{name}.inc"
            path.write_text("\n".join(lines) + "\n")
            print(f"wrote {path.relative_to(ROOT)}")


def main() -> None:
    """Prints the fits, and writes the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="?", default=str(ROOT / "results" / "nvidia-h200.json"))
    parser.add_argument("--dry", action="store_true", help="print alone")
    options = parser.parse_args()
    result = json.loads(pathlib.Path(options.results).read_text())
    if "sweep" in result:
        fit_rows(result, options.dry)
    if "convolutions" in result:
        fit_convolutions(result, options.dry)


if __name__ == "__main__":
    main()
