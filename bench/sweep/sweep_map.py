"""The sweep as a section of docs/results.md and as a drawing: efficiency over two axes, a panel a group."""

from __future__ import annotations

from typing import Any

import sweep_figures
from sweep_figures import Entry, efficiency, geometric_mean

LEAST_FLOOR = 5e-6  # shorter ones show launches alone
CELL, LEFT, TOP, GAP = 26, 64, 44, 70
PANELS = {
    "block": ("Blocks, forward", "input channels of a group", "output channels of a group"),
    "block_step": ("Blocks, training step", "input channels of a group", "output channels of a group"),
    "tail": ("Tails, forward", "elements of a slab", "slabs of a sample"),
    "tail_backward": ("Tails, gradients", "elements of a slab", "slabs of a sample"),
}
BINS = {
    "channels": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512],  # each up to the next
    "slab": [32, 256, 2048, 2**14, 2**17, 2**20, 2**23],
    "slabs": [1, 4, 16, 64, 256, 1024],
}
TEXT = "#768390"  # legible on white and on black


def bin_of(value: float, edges: list[int]) -> int:
    """The place of a value among the edges."""
    return max(0, sum(value >= edge for edge in edges) - 1)


def colour(share: float) -> str:
    """From red over yellow to green: 0, 0.4 and 0.8."""
    part = min(1.0, max(0.0, share / 0.8))
    hue = 120 * part
    return f"hsl({hue:.0f},65%,45%)"


def named(edge: int) -> str:
    """A short number."""
    if edge >= 2**20:
        return f"{edge // 2**20}M"
    return f"{edge // 1024}K" if edge >= 1024 else str(edge)


def cells(entries: list[Entry], group: str) -> dict[tuple[int, int], list[float]]:
    """Efficiencies of a group, by the bins of their axes."""
    across, up = edges_of(group)
    found: dict[tuple[int, int], list[float]] = {}
    for entry in entries:
        value = efficiency(entry) if entry["group"] == group and "error" not in entry else None
        if value is None or entry["floor_seconds"] < LEAST_FLOOR or 0 in entry["axes"]:
            continue
        place = bin_of(entry["axes"][0], across), bin_of(entry["axes"][1], up)
        found.setdefault(place, []).append(value)
    return found


def edges_of(group: str) -> tuple[list[int], list[int]]:
    """Of both axes."""
    if group.startswith("tail"):
        return BINS["slab"], BINS["slabs"]
    return BINS["channels"], BINS["channels"]


def text_at(x: float, y: float, words: str, size: int = 10, anchor: str = "middle", more: str = "") -> str:
    """A line of text."""
    place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{TEXT}"{more}>{words}</text>'


def panel(entries: list[Entry], group: str, left: float, top: float) -> list[str]:
    """One group."""
    title, x_name, y_name = PANELS[group]
    across, up = edges_of(group)
    width, height = CELL * len(across), CELL * len(up)
    lines = [text_at(left + width / 2, top - 10, title, 12, more=' font-weight="600"')]
    for (x, y), values in sorted(cells(entries, group).items()):
        mean = geometric_mean(values)
        place = left + CELL * x, top + height - CELL * (y + 1)
        told = f"{x_name} from {across[x]}, {y_name} from {up[y]}: {mean:.2f} of {len(values)}"
        lines.append(
            f'<rect x="{place[0]:g}" y="{place[1]:g}" width="{CELL - 1}" height="{CELL - 1}" '
            f'fill="{colour(mean)}"><title>{told}, worst {min(values):.2f}</title></rect>'
        )
        shade = ' style="fill:#fff"'
        lines.append(text_at(place[0] + CELL / 2, place[1] + 16, f"{100 * mean:.0f}", 9, more=shade))
    for place, edge in enumerate(across):
        lines.append(text_at(left + CELL * (place + 0.5), top + height + 12, named(edge), 9))
    for place, edge in enumerate(up):
        lines.append(text_at(left - 5, top + height - CELL * (place + 0.4), named(edge), 9, "end"))
    lines.append(text_at(left + width / 2, top + height + 26, x_name))
    x, y = left - 34, top + height / 2
    lines.append(text_at(x, y, y_name, more=f' transform="rotate(-90 {x:g} {y:g})"'))
    return lines


def drawing(result: dict[str, Any]) -> str:
    """All groups: percent of the floor's speed, the geometric mean of a cell."""
    entries = result["sweep"]["entries"]
    lines, top, right = [], float(TOP + 30), 0.0
    for pair in (("block", "block_step"), ("tail", "tail_backward")):
        left = float(LEFT)
        for group in pair:
            lines += panel(entries, group, left, top)
            left += CELL * len(edges_of(group)[0]) + GAP
        right = max(right, left)
        top += CELL * max(len(edges_of(group)[1]) for group in pair) + GAP
    name = f"{result['device']['name']}, {result['sweep']['date']}"
    head = f"Percent of the floor's speed over drawn problems: {name}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{right:g}" height="{top:g}" '
            f'viewBox="0 0 {right:g} {top:g}" role="img" '
            'font-family="-apple-system,Segoe UI,Helvetica,Arial,sans-serif">',
            f"<title>{head}</title>",
            text_at(LEFT, 20, head, 13, "start", ' font-weight="600"'),
            text_at(LEFT, 36, "Geometric means of cells; floors of 5 us and more.", 11, "start"),
            *lines,
            "</svg>",
            "",
        ]
    )


# --- The section ---


def section(result: dict[str, Any], picture: str | None) -> list[str]:
    """Lines of Markdown: the table's lines, the map, the worst problems."""
    sweep = result["sweep"]
    good = [entry for entry in sweep["entries"] if "error" not in entry]
    failed = [entry for entry in sweep["entries"] if "error" in entry]
    found = sweep_figures.gpu_lines(good) if picture else sweep_figures.cpu_lines(good)
    how = f", {sweep['threads']} threads" if "threads" in sweep else ""
    lines = ["", "### The map: drawn problems", ""]
    lines.append(
        f"{len(good)} problems of {seeds_of(sweep)}{how}, PyTorch {sweep['torch']}, checked against fp64, "
        f"then timed ([how](../bench/sweep/__main__.py)). {len(failed)} failed."
    )
    if sweep.get("note"):
        lines += ["", sweep["note"]]
    lines += ["", "| | problems | mean | worst | wanted | |", "| --- | --- | --- | --- | --- | --- |"]
    for line in found:
        wanted = " / ".join(f"{limit:g}" for limit in line.wanted)
        cells_ = [line.what, str(line.count), f"{line.mean:.2f}", f"{line.worst:.2f}", wanted]
        lines.append("| " + " | ".join([*cells_, "met" if line.met else "missed"]) + " |")
    if picture:
        lines += ["", f"![Efficiency over the drawn problems]({picture})"]
    lines += ["", "The worst:", "", "| problem | ms | floor | row | why |", "| --- | --- | --- | --- | --- |"]
    for entry in sweep_figures.worst_entries(good):
        lines.append(worst_row(entry))
    lines += [f"- failed: `{entry['key']}`: {entry['error']}".replace("|", "\\|") for entry in failed]
    return lines


def seeds_of(sweep: dict[str, Any]) -> str:
    """In words."""
    seeds = [str(seed) for seed in sweep["seeds"]]
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(seeds)}"


def worst_row(entry: Entry) -> str:
    """A line of the table of the worst."""
    seconds = entry.get("gpu_seconds") or entry["call_seconds"]
    ratio = sweep_figures.speed(entry)
    share = efficiency(entry)
    of_floor = f"{100 * share:.0f}%" if share else f"{ratio:.2f} of PyTorch" if ratio else ""
    cells_ = [
        f"`{entry['key']}`",
        f"{1e3 * seconds:.3f}",
        of_floor,
        entry["row"],
        sweep_figures.reason(entry),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells_) + " |"


def picture_name(result: dict[str, Any]) -> str:
    """Of the drawing, in docs/."""
    name = "".join(c if c.isalnum() else "-" for c in result["device"]["name"].lower())
    return f"map-{name}.svg"
