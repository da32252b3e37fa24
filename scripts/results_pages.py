"""What results/ says, as pages: the README's figures, docs/results.md and the bar charts docs/speed*.svg.

`scripts/record.py pages` writes them. python/tests/test_results_pages.py fails where they are stale.
"""

import json
import pathlib
import re
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "bench" / "sweep"))

import network_pages  # noqa: E402
import sweep_map  # noqa: E402

RESULTS = ROOT / "results"
WORKLOADS = ROOT / "bench" / "workloads.txt"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"

GROUPS = {
    "block": "Whole blocks, forward",
    "training": "Whole blocks, training step",
    "tail": "Tails, forward",
    "tail_backward": "Tails, gradients",
}
SWEEPS = {
    "thin": "thin convolutions",
    "layer": "layers of real models",
    "grouped": "convolutions in groups",
}
LAYOUTS = {"contiguous": "contiguous", "channels_last": "channels last"}


def workload_names() -> dict[str, str]:
    """Problem text -> the name in the comment above it."""
    names, name = {}, ""
    for line in WORKLOADS.read_text().splitlines():
        if line.startswith("#"):
            name = line.lstrip("# ")
        elif line.strip():
            names[line.strip()] = name
    return names


def results() -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def gpus(found: list[dict]) -> list[dict]:
    return [result for result in found if "benchmarks" in result]


def cpus(found: list[dict]) -> list[dict]:
    return [result for result in found if "suite" in result]


def medians(entry: dict) -> dict[str, float]:
    """Seconds of each way that an entry has measured."""
    return {name: timing["median"] for name, timing in entry.get("seconds", {}).items()}


def milliseconds(seconds: float) -> str:
    """Three digits."""
    return f"{seconds * 1e3:#.3g}".rstrip(".") if seconds < 1 else f"{seconds * 1e3:.0f}"


def spread(timing: dict) -> str:
    return (
        f"{milliseconds(timing['median'])} ({milliseconds(timing['p10'])} to {milliseconds(timing['p90'])})"
    )


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["", *("| " + " | ".join(cells) + " |" for cells in lines), ""]


# The four workloads: eager, the best PyTorch, onepass.


def is_default(entry: dict, group: str, dtype: str) -> bool:
    """Whether an entry is of this group and type, with PyTorch's default precision and the whole batch."""
    numerics = (entry.get("precision"), entry.get("numerics"), entry.get("batch"))
    return (entry["group"], entry["dtype"]) == (group, dtype) and numerics == ("tf32", "pytorch", 0)


def comparisons(entries: list[dict], group: str, dtype: str) -> dict[str, dict]:
    """For each workload the seconds of eager and onepass on contiguous tensors, and of the best PyTorch: the
    fastest way of PyTorch that was measured, in either memory format, with and without cudnn.benchmark.
    """
    found: dict[str, dict] = {}
    for entry in entries:
        seconds = medians(entry)
        if not seconds or not is_default(entry, group, dtype):
            continue
        own = found.setdefault(entry["workload"], {"best": float("inf")})
        own["best"] = min(own["best"], *(s for name, s in seconds.items() if name != "onepass"))
        if entry["layout"] == "contiguous" and not entry["cudnn_benchmark"]:
            own |= {"eager": seconds["eager"], "onepass": seconds["onepass"], "shape": entry["shape"]}
    return found


def lacks_rivals(benchmarks: dict, group: str, name: str, dtype: str) -> bool:
    """Whether the run had no time for some way of PyTorch: the best one is unknown then."""
    return any(text.startswith(f"{group} {name} {dtype} ") for text in benchmarks["left_out"])


def sweeps(entries: list[dict]) -> list[tuple[str, str, list[float]]]:
    """For each sweep and type: how many times as fast as the best rival each of its blocks is."""
    ratios: dict = {}
    for entry in entries:
        seconds = medians(entry)
        if entry["group"] in SWEEPS and seconds:
            best = min(other for name, other in seconds.items() if name != "onepass")
            ratios.setdefault((entry["group"], entry["dtype"]), []).append(best / seconds["onepass"])
    return [(SWEEPS[group], dtype, found) for (group, dtype), found in ratios.items()]


def readme_lines(found: list[dict]) -> list[str]:
    lines = []
    kinds = [(g, d) for g in ("block", "training") for d in ("fp32", "bf16")]
    for result in gpus(found):
        benchmarks = result["benchmarks"]
        columns = [comparisons(benchmarks["entries"], *kind) for kind in kinds]

        def cell(kind: tuple[str, str], name: str, own: dict, benchmarks: dict = benchmarks) -> str:
            eager, best = (f"{own[way] / own['onepass']:.1f}" for way in ("eager", "best"))
            return f"{eager} / {'–' if lacks_rivals(benchmarks, kind[0], name, kind[1]) else best}"

        words = {"block": "forward", "training": "training step"}
        head = [result["device"]["name"], *(f"{words[g]}, {d}" for g, d in kinds)]
        rows = [
            [
                f"**{name}**",
                *(cell(kind, name, c[name]) for kind, c in zip(kinds, columns, strict=True)),
            ]
            for name in columns[0]
        ]
        lines += table(head, rows)
        lines.append(
            "Times as fast as eager / as the best PyTorch: the fastest way measured, of eager and "
            "`torch.compile` in both memory formats and, for some, `max-autotune`."
            + (" –: not all of these were measured." if any("–" in "".join(row) for row in rows) else "")
        )
        head = ["times as fast as the best rival*", "blocks", "geometric mean", "worst", "best"]
        rows = [
            [
                f"{name}, {dtype}",
                str(len(r)),
                f"{statistics.geometric_mean(r):.2f}",
                f"{min(r):.2f}",
                f"{max(r):.2f}",
            ]
            for name, dtype, r in sweeps(benchmarks["entries"])
        ]
        lines += table(head, rows)
        lines.append("\\* of eager in both memory formats and `torch.compile` as tensors come.  ")
        if "models" in result:
            lines += network_pages.sentences(result["models"])
    for result in cpus(found):
        if "models" not in result:
            continue
        models = result["models"]
        names = ", ".join(f"{row['model']} {row['speed_up']:.2f}" for row in models["rows"])
        lines.append(
            f"Whole models on {models['threads']} cores of a {result['machine']['model']}, times as fast as "
            f"eager: {names}."
        )
    return lines


# docs/results.md


def gpu_tests(tests: dict) -> str:
    """How many tests of a GPU passed, what failed, and how many its time did not reach."""
    suites = [suite for suite in tests.values() if isinstance(suite, dict) and "not_run" in suite]
    failed = [name for suite in suites for name in suite["failures"]]
    waiting = sum(len(suite["not_run"]) for suite in suites)
    skipped = {name: why for suite in suites for name, why in suite.get("skipped", {}).items()}
    passed = sum(suite["tests"] for suite in suites) - len(failed) - waiting - len(skipped)
    words = f"Tests of {tests['date']}: {passed} passed, {len(failed)} failed"
    words += f" ({', '.join(failed)})" if failed else ""
    words += f", {waiting} were not reached in time" if waiting else ""
    words += f", {len(skipped)} skipped ({', '.join(sorted(set(skipped.values())))})" if skipped else ""
    return words + "."


def kernel_of(entry: dict) -> str:
    """The row of the plan that an entry ran, without its prediction."""
    plan = entry.get("plan", "").removeprefix("* ").removeprefix("-> ")
    return re.sub(r"\s+[0-9.e-]+ ms predicted.*", "", plan).strip()


def group_table(entries: list[dict], group: str) -> list[str]:
    """Every measurement of a group, a line each."""
    rows = []
    for entry in entries:
        seconds = medians(entry)
        if entry["group"] != group or not seconds:
            continue
        how = [entry["dtype"], LAYOUTS[entry["layout"]]]
        how += ["TF32 off"] if entry.get("precision") == "ieee" else []
        how += ["fast"] if entry.get("numerics") == "fast" else []
        how += [f"batch {entry['batch']}"] if entry.get("batch") else []
        how += ["cudnn.benchmark"] if entry.get("cudnn_benchmark") else []
        ours = seconds["onepass"]
        rivals = {name: s for name, s in seconds.items() if name != "onepass" and "graph" not in name}
        best = min(rivals, key=lambda name: rivals[name])
        peaks = entry.get("peak_bytes", {})
        memory = " / ".join(f"{peaks[name] / 2**20:.0f}" for name in ("onepass", "eager") if name in peaks)
        floor = f"{ours / entry['floor_seconds']:.2f}" if "floor_seconds" in entry else ""
        rows.append(
            [
                entry["workload"],
                ", ".join(how),
                spread(entry["seconds"]["onepass"]),
                f"{milliseconds(rivals['eager'])}",
                f"{milliseconds(rivals[best])} ({best})",
                f"{rivals['eager'] / ours:.2f}",
                f"{rivals[best] / ours:.2f}",
                floor,
                memory,
                kernel_of(entry),
            ]
        )
    head = ["", "", "onepass, ms (10% to 90%)", "eager", "best rival", "times eager", "times best"]
    head += ["times the floor", "peak MiB, onepass / eager", "row"]
    kept = [i for i in range(len(head)) if i < 2 or any(row[i] for row in rows)]
    return table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def gpu_page(result: dict) -> list[str]:
    benchmarks = result["benchmarks"]
    entries = benchmarks["entries"]
    lost = [f"{entry['group']} {entry['workload']}" for entry in entries if "error" in entry]
    missed = [target for target in benchmarks["targets"] if not target["met"]]
    lines = [
        f"## {result['device']['name']}",
        f"{result['device']['description'].split(' from ')[0]}.  ",
        f"{benchmarks['date']}, PyTorch {benchmarks['torch']}, cuDNN {benchmarks['cudnn']}. CUDA events, "
        f"cold L2, `{benchmarks['command']}`.  ",
        gpu_tests(result["tests"]),
        "",
    ]
    if lost:
        lines += [f"{len(lost)} measurements failed: {', '.join(lost)}.", ""]
    if missed:
        lines.append(
            f"{len(missed)} of {len(benchmarks['targets'])} targets are missed "
            "([why](../tests/gpu/known_failures.txt)):"
        )
        lines += [f"- {t['what']}: {t['value']:.2f}, wanted {t['limit']}" for t in missed]
    for group, title in GROUPS.items():
        lines += ["", f"### {title}", *group_table(entries, group)[:-1]]
    for group, title in SWEEPS.items():
        lines += ["", f"### Sweep: {title}, forward", *group_table(entries, group)[:-1]]
    lines += ["", "### The host"]
    for what, timings in benchmarks["overhead_seconds"].items():
        ours, eager = (timings[name]["median"] * 1e6 for name in ("onepass", "eager"))
        empty = f", an empty operator {timings['empty']['median'] * 1e6:.1f} us" if "empty" in timings else ""
        lines.append(
            f"- {what}, a small tensor: {ours:.0f} us a call, the same modules {eager:.0f} us{empty}"
        )
    calls = benchmarks["first_calls"]
    for cache in ("empty", "full"):
        seconds = ", ".join(f"{name} {calls[name][f'{cache}_cache_seconds'] * 1e3:.0f}" for name in calls)
        lines.append(
            f"- first call of a tail with {'an' if cache == 'empty' else 'a'} {cache} cache, ms: {seconds}"
        )
    launches = benchmarks["launches"]
    lines.append(f"- launches of a small tail: {launches['onepass']}, eager {launches['eager']}")
    if "models" in result:
        lines += network_pages.section(result, table)
    if "sweep" in result:
        lines += sweep_map.section(result, sweep_map.picture_name(result))
    return [*lines, ""]


def cpu_row(entry: dict, name: str) -> list[str]:
    seconds = {key: value * 1e3 for key, value in entry["seconds"].items()}
    gflops = f"{entry['gflops']:.1f} ({entry['gflops_share']:.0%})" if entry["gflops"] else ""
    return [
        name,
        f"`{entry['problem']}`".replace("|", "\\|"),
        f"{seconds['median']:.1f} ({seconds['p10']:.1f} to {seconds['p90']:.1f})",
        gflops,
        f"{entry['times_floor']:.2f}",
    ]


def models_table(models: dict) -> list[str]:
    rows = []
    for entry in models["rows"]:
        times = [
            f"{t['median'] * 1e3:.0f} ({t['p10'] * 1e3:.0f} to {t['p90'] * 1e3:.0f})"
            for t in (entry["seconds"]["eager"], entry["seconds"]["onepass"])
        ]
        rows.append([entry["model"], entry["inputs"][0], *times, f"{entry['speed_up']:.2f}"])
    head = ["model", "input", "eager, ms (10% to 90%)", "onepass, ms (10% to 90%)", "times as fast"]
    return [
        "",
        f"Real models with random weights, forward, {models['threads']} threads, PyTorch {models['torch']}, "
        f"{models['date']}:",
        *table(head, rows)[:-1],
    ]


def compiled_table(compiled: dict) -> list[str]:
    rows = []
    for entry in compiled["rows"]:
        times = [spread(entry["seconds"][side]) for side in ("inductor", "onepass")]
        what = "training step" if entry["train"] else "forward"
        chains = f"{entry['kept']} of {entry['found']}"
        rows.append([entry["model"], what, entry["inputs"][0], *times, f"{entry['speed_up']:.2f}", chains])
    head = ["model", "", "input", "Inductor alone, ms (10% to 90%)", 'backend="onepass", ms (10% to 90%)']
    threads = f"{compiled['threads']} thread{'s' if compiled['threads'] != 1 else ''}"
    return [
        "",
        f"The same models by `torch.compile`, processor time of {threads}, in turns, PyTorch "
        f"{compiled['torch']}, {compiled['date']} (`scripts/record.py compiled`):",
        *table([*head, "times as fast", "chains kept"], rows)[:-1],
    ]


def cpu_page(result: dict) -> list[str]:
    names = {re.sub(r"\s+", "", text): name for text, name in workload_names().items()}
    suite, machine = result["suite"].values(), result["machine"]
    targets = sorted({t for entry in suite for t in entry["targets"]})
    tests, failures = (sum(entry[what] for entry in suite) for what in ("tests", "failures"))
    lines = [
        f"## {machine['model']}, {machine['architecture']}",
        f"{tests} tests on {', '.join(targets)}, {failures} failures "
        f"({result.get('suite_date', result['date'])}). Times of {result['date']}, sources "
        f"`{result['source_hash']}`.",
    ]
    for threads, entries in result["bench"].items():
        pages = ", large tensors in huge pages" if entries[0].get("pages") == "huge" else ""
        lines += [
            "",
            f"{threads} thread{'s' if threads != '1' else ''}, measured peak "
            f"{entries[0]['peaks']['gflops']:.0f} GFLOP/s{pages}:",
        ]
        rows = [
            cpu_row(entry, names.get(re.sub(r"\s+", "", entry["problem"].removesuffix(" f32")), ""))
            for entry in entries
        ]
        head = ["", "problem", "ms, median (10% to 90%)", "GFLOP/s (share of peak)", "times the floor"]
        lines += table(head, rows)[:-1]
    lines += models_table(result["models"]) if "models" in result else []
    lines += compiled_table(result["compiled"]) if "compiled" in result else []
    lines += sweep_map.section(result, None) if "sweep" in result else []
    return [*lines, ""]


def page(found: list[dict]) -> str:
    lines = [
        "# Results",
        "<!-- Written by scripts/record.py pages from results/: do not edit. -->",
        "Generated from [results/](../results). `make bench` and `make bench-gpu` measure again.",
        "",
        "- A time is a median with its quantiles of 10% and 90%. Results are compared before they are timed.",
        "- *Times eager*, *times best*: how many times as fast as eager, as the fastest rival of the line.",
        "- *The floor* of a GPU: to read and write the tensors once, measured in the same run.",
        "- *The floor* of a CPU: to write the output and evaluate each activation once, in the same run.",
        "- s60, s19, s61 and s27 are the workloads of [examples/](../examples).",
        "",
    ]
    for result in gpus(found):
        lines += gpu_page(result)
    for result in cpus(found):
        lines += cpu_page(result)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


# docs/speed.svg

# Groups whose entries are rows of the chart. Bars are shares of eager, so that rows of any length fit.
CHART_GROUPS = ("block",)
LABELS = {"eager": "eager", "best": "best PyTorch", "onepass": "onepass"}
THEMES = {
    "speed.svg": {"text": "#1f2328", "soft": "#59636e", "line": "#d1d9e0"}
    | {"eager": "#9aa4af", "best": "#4a8fe0", "onepass": "#1a7f37"},
    "speed-dark.svg": {"text": "#f0f6fc", "soft": "#9198a1", "line": "#3d444d"}
    | {"eager": "#6e7681", "best": "#4a8fe0", "onepass": "#3fb950"},
}
WIDTH, LEFT, BAR, GAP, ROW, TOP = 880, 104, 15, 3, 90, 80
FULL = 560  # the length of eager's bar
TITLE = "One forward pass in fp32 (TF32 as PyTorch's default): share of eager's time, shorter is better"


def block_texts() -> dict[str, str]:
    """The block of each workload, without its sizes."""
    return {name: text.split("@")[0].strip() for text, name in workload_names().items()}


def svg_text(x: float, y: float, words: str, theme: dict, size: int = 12, **style: str) -> str:
    fill = theme[style.pop("fill", "text")]
    more = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in style.items())
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{more}>{words}</text>'


def chart_row(top: float, name: str, words: str, own: dict, theme: dict) -> list[str]:
    """A workload: its name and block, then a bar for each way."""
    mono = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
    lines = [
        svg_text(LEFT, top, name, theme, 13, font_weight="600"),
        svg_text(LEFT + 34, top, words, theme, 11, fill="soft", font_family=mono),
    ]
    bottom = top + 9 + len(LABELS) * (BAR + GAP)
    lines.append(f'<line x1="{LEFT}" y1="{top + 6:g}" x2="{LEFT}" y2="{bottom:g}" stroke="{theme["line"]}"/>')
    for place, way in enumerate(LABELS):
        y = top + 9 + place * (BAR + GAP)
        length = max(2.0, FULL * own[way] / own["eager"])
        value = f"{milliseconds(own[way])} ms"
        bold = {}
        if way == "onepass":
            ratios = [own[other] / own[way] for other in ("eager", "best")]
            value += f": {ratios[0]:.1f} times as fast as eager, {ratios[1]:.1f} times as the best PyTorch"
            bold = {"font_weight": "600"}
        lines += [
            svg_text(LEFT - 8, y + 11.5, LABELS[way], theme, text_anchor="end", **bold),
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{theme[way]}"/>',
            svg_text(LEFT + round(length, 1) + 6, y + 11.5, value, theme, **bold),
        ]
    return lines


def rivals_text(entries: list[dict]) -> str:
    """What the best PyTorch of the chart is the best of."""
    ways: dict[str, set[str]] = {}
    for entry in entries:
        if any(is_default(entry, group, "fp32") for group in CHART_GROUPS):
            for name in medians(entry):
                last = "channels_last" in (name, entry["layout"])
                way = {"channels_last": "eager", "compile": "torch.compile"}.get(name, name)
                ways.setdefault(way, set()).add("channels last" if last else "contiguous")
    ways.pop("onepass", None)
    both = [way for way, layouts in ways.items() if len(layouts) == 2]
    rest = [f"{way} ({', '.join(layouts)})" for way, layouts in ways.items() if len(layouts) == 1]
    return ", ".join([" and ".join(both) + " (both memory formats)", *rest])


def chart(result: dict, theme: dict) -> str:
    """Eager, the best PyTorch and onepass, as shares of eager's time."""
    benchmarks = result["benchmarks"]
    rows = [
        (name, own)
        for group in CHART_GROUPS
        for name, own in comparisons(benchmarks["entries"], group, "fp32").items()
    ]
    height = TOP + ROW * len(rows)
    texts = block_texts()
    torch = benchmarks["torch"].split("+")[0]
    notes = [
        f"{result['device']['name']}, PyTorch {torch}, {benchmarks['date']}.",
        f"Best PyTorch: the fastest of {rivals_text(benchmarks['entries'])}.",
    ]
    told = [
        f"{name}: " + ", ".join(f"{LABELS[w]} {milliseconds(own[w])} ms" for w in LABELS)
        for name, own in rows
    ]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="-apple-system,Segoe UI,Helvetica,Arial,sans-serif">',
        f"<title>{'; '.join(told)}</title>",
        svg_text(LEFT, 18, TITLE, theme, 14, font_weight="600"),
        *(svg_text(LEFT, 36 + 15 * i, note, theme, 11, fill="soft") for i, note in enumerate(notes)),
    ]
    for place, (name, own) in enumerate(rows):
        words = texts.get(name, "") + " @ " + "x".join(map(str, own["shape"]))
        lines += chart_row(TOP + place * ROW, name, words, own, theme)
    return "\n".join([*lines, "</svg>"]) + "\n"


def pages() -> dict[pathlib.Path, str]:
    """Every generated file with what results/ gives for it; of the README only what the marks enclose."""
    found = results()
    text = README.read_text()
    head, rest = text.split(BEGIN)
    figures = "\n".join([BEGIN, *readme_lines(found)]).rstrip() + "\n" + END
    written = {README: head + figures + rest.split(END)[1], PAGE: page(found)}
    for name, theme in THEMES.items():
        written[ROOT / "docs" / name] = chart(gpus(found)[0], theme)
    for result in gpus(found):
        if "sweep" in result:
            written[ROOT / "docs" / sweep_map.picture_name(result)] = sweep_map.drawing(result)
    return written


def write() -> None:
    for path, text in pages().items():
        path.write_text(text)
