"""Floors and efficiencies of the sweep's entries, the lines of its table, its worst problems and why."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from sweep_problems import MEBI, Problem

Entry = dict[str, Any]
LEAST_FLOOR = 20e-6  # of blocks whose efficiency counts
LEAST_TAIL_BYTES = 64 * MEBI
WORST = 20
HALF = 1.88  # products of 16 bits in the time of one of TF32


@dataclasses.dataclass(frozen=True)
class Rates:
    """Of a device: those of src/cuda/costs."""

    bytes_per_second: float
    tensor_flops: float  # tf32 operations a second

    def operations(self, precision: str) -> float:
        """A second. 16 bits are 753 / 400 times as fast (H200); three products of 16 bits give fp32."""
        return self.tensor_flops * {"tf32": 1.0, "strict": HALF / 3}.get(precision, HALF)


@dataclasses.dataclass(frozen=True)
class Floor:
    """The least time: every tensor moved once, or every operation on tensor cores."""

    bytes_seconds: float
    operations_seconds: float

    @property
    def seconds(self) -> float:
        """The larger one."""
        return max(self.bytes_seconds, self.operations_seconds)

    @property
    def bound(self) -> str:
        """Which one that is."""
        return "bytes" if self.bytes_seconds >= self.operations_seconds else "operations"


def moved_bytes(problem: Problem, backward: bool) -> float:
    """Input, weights and output once; for gradients the output's is read, those of the others are written."""
    weights = problem.conv.weights(problem.rank) if problem.conv else 0
    read = math.prod(problem.shape) + weights
    elements = math.prod(problem.output()) + (2 * read if backward else read)
    return float(elements) * problem.element_bytes


def floor_of(problem: Problem, rates: Rates) -> Floor:
    """Of what the problem's GPU time is: the forward, a tail's gradients, or a block's whole step."""
    passes = {"tail_backward": (True,), "block_step": (False, True)}.get(problem.group, (False,))
    moved = sum(moved_bytes(problem, backward) for backward in passes)
    products = sum((2 if backward else 1) * problem.products() for backward in passes)
    return Floor(moved / rates.bytes_per_second, 2 * products / rates.operations(problem.precision))


# --- What an entry says ---


def efficiency(entry: Entry) -> float | None:
    """Floor over GPU time."""
    if not entry.get("gpu_seconds") or "floor_seconds" not in entry:
        return None
    return entry["floor_seconds"] / entry["gpu_seconds"]


def best_rival(entry: Entry) -> tuple[str, float] | None:
    """The fastest way of PyTorch and its seconds; of entries that were measured against all of them."""
    ways = entry.get("torch_seconds", {})
    if not ways or not entry.get("all_rivals"):
        return None
    name = min(ways, key=lambda way: ways[way])
    return name, ways[name]


def speed(entry: Entry) -> float | None:
    """How many times as fast as the best PyTorch, of calls as users make them."""
    best = best_rival(entry)
    return best[1] / entry["call_seconds"] if best and entry.get("call_seconds") else None


def choice_loss(entry: Entry) -> float | None:
    """The chosen row's time over the fastest row's; None where no rows were timed."""
    rows = {name: row["seconds"] for name, row in entry.get("rows", {}).items() if "seconds" in row}
    if len(rows) < 2:
        return None
    chosen = rows.get(entry["row"], entry.get("gpu_seconds"))
    return max(1.0, chosen / min(rows.values())) if chosen else None


def prediction_error(entry: Entry) -> float | None:
    """GPU time over its prediction."""
    if not entry.get("predicted_seconds") or not entry.get("gpu_seconds"):
        return None
    return entry["gpu_seconds"] / entry["predicted_seconds"]


def is_large(entry: Entry) -> bool:
    """Whether it counts in the table's lines of floors."""
    if entry["group"].startswith("tail"):
        return entry["tensor_bytes"] >= LEAST_TAIL_BYTES
    return entry.get("floor_seconds", 0) >= LEAST_FLOOR


# --- The lines of the table ---


@dataclasses.dataclass(frozen=True)
class Line:
    """A mean and a worst value of some entries, with what they must reach."""

    what: str
    count: int
    mean: float
    worst: float
    wanted: tuple[float, float]
    at_least: bool = True

    @property
    def met(self) -> bool:
        """Both."""
        pairs = zip((self.mean, self.worst), self.wanted)
        return all(found >= wanted if self.at_least else found <= wanted for found, wanted in pairs)

    def text(self) -> str:
        """For the log."""
        word = "met   " if self.met else "MISSED"
        mean, worst = self.wanted
        return (
            f"{word} {self.what}: {self.mean:.2f} / {self.worst:.2f} of {self.count} "
            f"(wanted {mean:g} / {worst:g})"
        )


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers."""
    return math.exp(statistics.fmean(map(math.log, values)))


Measure = Callable[[Entry], float | None]
# Group, what, measure, whether small ones count, what must be reached in tf32 and in bf16.
GPU_LINES: list[tuple[str, str, Measure, bool, dict[str, tuple[float, float]]]] = [
    ("block", "blocks, efficiency", efficiency, False, {"tf32": (0.45, 0.15), "bf16": (0.40, 0.15)}),
    ("block", "blocks, times the best PyTorch", speed, False, {"tf32": (2.2, 0.98), "bf16": (1.5, 0.98)}),
    (
        "block_step",
        "training steps, times the best PyTorch",
        speed,
        True,
        {"tf32": (1.4, 0.98), "bf16": (1.2, 0.98)},
    ),
]
TAIL_LINES = {
    "tail": ("tails forward, times the floor", {"tf32": (1.3, 1.7), "bf16": (1.35, 1.8)}),
    "tail_backward": ("tails backward, times the floor", {"tf32": (1.45, 2.0), "bf16": (1.5, 2.0)}),
}
CPU_LINES = {
    "block": ("blocks, times the best PyTorch", (2.5, 0.95)),
    "block_step": ("training steps of blocks, times the best PyTorch", (2.5, 0.95)),
    "tail": ("tails, times the best PyTorch", (1.9, 0.95)),
    "tail_backward": ("training steps of tails, times the best PyTorch", (1.7, 0.95)),
}


def values_of(entries: list[Entry], group: str, measure: Measure, precision: str = "") -> list[float]:
    """Of the entries of a group that have one."""
    own = [e for e in entries if e["group"] == group and e["precision"] == (precision or e["precision"])]
    return [value for entry in own if (value := measure(entry)) is not None]


def gpu_lines(entries: list[Entry]) -> list[Line]:
    """Those of a GPU."""
    large = [entry for entry in entries if is_large(entry)]
    lines = []
    for precision in ("tf32", "bf16"):
        for group, what, measure, small, wanted in GPU_LINES:
            values = values_of(entries if small else large, group, measure, precision)
            if values:
                mean = geometric_mean(values)
                lines.append(Line(f"{what}, {precision}", len(values), mean, min(values), wanted[precision]))
        for group, (what, limits) in TAIL_LINES.items():
            times = [1 / value for value in values_of(large, group, efficiency, precision)]
            if times:
                mean, limit = statistics.fmean(times), limits[precision]
                lines.append(Line(f"{what}, {precision}", len(times), mean, max(times), limit, False))
    losses = [loss for entry in entries if (loss := choice_loss(entry)) is not None]
    if losses:
        near = sum(loss <= 1.05 for loss in losses) / len(losses)
        what = "plan's choice: share not within 5% of the best row / times the best row at most"
        lines.append(Line(what, len(losses), 1 - near, max(losses), (0.1, 1.3), False))
    return lines


def cpu_lines(entries: list[Entry]) -> list[Line]:
    """Those of a CPU."""
    lines = []
    for group, (what, wanted) in CPU_LINES.items():
        values = values_of(entries, group, speed)
        if values:
            lines.append(Line(what, len(values), geometric_mean(values), min(values), wanted))
    return lines


# --- The worst ones ---


def worst_entries(entries: list[Entry], count: int = WORST) -> list[Entry]:
    """On a GPU by efficiency, of those that count; on a CPU by the ratio to PyTorch."""
    on_gpu = [entry for entry in entries if efficiency(entry) is not None and is_large(entry)]
    if on_gpu:
        return sorted(on_gpu, key=efficiency)[:count]  # type: ignore[arg-type]
    return sorted((e for e in entries if speed(e) is not None), key=speed)[:count]  # type: ignore[arg-type]


def reason(entry: Entry) -> str:
    """Why an entry is slow, as far as its figures say."""
    words = []
    rows = {name: row["seconds"] for name, row in entry.get("rows", {}).items() if "seconds" in row}
    if entry["row"].startswith("PyTorch"):
        refusals = entry.get("refusals", {})
        taken = [name for name in rows if name != "direct"]
        if not taken and refusals:
            words.append("no row takes it: " + "; ".join(f"{n} ({why})" for n, why in refusals.items()))
        else:
            words.append("left to PyTorch by cost")
    loss = choice_loss(entry)
    if loss is not None and loss > 1.05 and rows:
        words.append(f"{min(rows, key=lambda n: rows[n])} takes {1e3 * min(rows.values()):.3f} ms")
    error = prediction_error(entry)
    if error is not None and not 2 / 3 < error < 1.5:
        words.append(f"predicted {1e3 * entry['predicted_seconds']:.3f} ms")
    if not words:
        words.append(f"{entry['row']} itself is slow" if entry.get("floor_seconds") else entry["row"])
    return "; ".join(words)


def line_of(entry: Entry) -> str:
    """One entry in a line."""
    if "error" in entry:
        return f"FAILED {entry['key']}: {entry['error']}"
    parts = []
    if (found := efficiency(entry)) is not None:
        parts.append(f"{1e3 * entry['gpu_seconds']:.3f} ms, {found:.2f} of the floor's ({entry['bound']})")
    if entry.get("call_seconds"):
        parts.append(f"call {1e3 * entry['call_seconds']:.3f} ms")
    if (ratio := speed(entry)) is not None:
        name, seconds = best_rival(entry) or ("", 0.0)
        parts.append(f"PyTorch {1e3 * seconds:.3f} ({name}), {ratio:.2f}x")
    parts.append(entry["row"])
    return f"{entry['key']}\n    {', '.join(parts)}"
