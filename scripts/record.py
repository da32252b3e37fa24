#!/usr/bin/env python3
"""Records what this machine runs and how fast into results/, and writes the README's table from there.

    scripts/record.py run [--build build/release] [--threads 1 2]   the test suite and the benchmark
    scripts/record.py suite [--build build/release] [--only cpu_test] the test suite alone, written as it goes
    scripts/record.py models [--threads 2] [--seconds 10]           five real models, with and without onepass
    scripts/record.py table                                         the table, from all recorded results

models runs in a Python that has the package, PyTorch and python/tests/requirements-models.txt.
"""

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
WORKLOADS = ROOT / "bench" / "workloads.txt"


def cpu_model() -> str:
    """The processor's name, as lscpu gives it."""
    text = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"^Model name:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def source_hash() -> str:
    """Of everything that decides how the CPU strategies compute; the lines of the lists that name a GPU's
    strategies do not.
    """
    digest = hashlib.sha256()
    for folder in ("include", "src/block", "src/plan", "src/cpu"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file():
                content = path.read_bytes()
                if path.name == "table.cc":
                    content = b"".join(line for line in content.splitlines(True) if b"cuda_" not in line)
                digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + content)
    return digest.hexdigest()[:16]


def run_tests(binary: pathlib.Path) -> dict:
    """A test binary's counts and the SIMD targets its tests went through."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        command = [str(binary), f"--gtest_output=json:{report}"]
        code = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode
        data = json.loads(report.read_text())
    cases = [case for group in data["testsuites"] for case in group["testsuite"]]
    targets = sorted({t for case in cases for t in case.get("targets", "").split()})
    print(
        f"{binary.name}: {data['tests']} tests, {data['failures']} failures {' '.join(targets)}", flush=True
    )
    return {"tests": data["tests"], "failures": data["failures"], "exit": code, "targets": targets}


def test_binaries(build: pathlib.Path) -> list:
    """All but gpu_test, which scripts/gpu_test.py runs, and results_test, about what is committed."""
    found = sorted((build / "tests").glob("*_test"))
    return [binary for binary in found if binary.name not in ("gpu_test", "results_test")]


def workload_names() -> dict:
    """Problem text -> the name in the comment above it."""
    names, name = {}, ""
    for line in WORKLOADS.read_text().splitlines():
        if line.startswith("#"):
            name = line.lstrip("# ")
        elif line.strip():
            names[line.strip()] = name
    return names


def run_bench(build: pathlib.Path, threads: int) -> list:
    """The benchmark of bench/workloads.txt."""
    command = [str(build / "onepass"), "bench", "--file", str(WORKLOADS), "--threads", str(threads), "--json"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if output.returncode != 0:
        sys.exit(f"record: {' '.join(command)} failed: {output.stderr.strip()}")
    return json.loads(output.stdout)


def result_path(out: str | None) -> pathlib.Path:
    """Where this machine's results are kept."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{platform.machine()}-{cpu_model()}".lower()).strip("-")
    RESULTS.mkdir(exist_ok=True)
    return pathlib.Path(out) if out else RESULTS / f"{name}.json"


def recorded(path: pathlib.Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def record(arguments: argparse.Namespace) -> None:
    build = pathlib.Path(arguments.build).resolve()
    model = cpu_model()
    path = result_path(arguments.out)
    result = recorded(path) | {
        "machine": {"model": model, "architecture": platform.machine(), "cores": os.cpu_count()},
        "date": datetime.date.today().isoformat(),
        "source_hash": source_hash(),
        "suite_date": datetime.date.today().isoformat(),
        "suite_source_hash": source_hash(),
        "suite": {binary.name: run_tests(binary) for binary in test_binaries(build)},
        "bench": {str(threads): run_bench(build, threads) for threads in arguments.threads},
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    if any(entry["failures"] or entry["exit"] for entry in result["suite"].values()):
        sys.exit("record: the suite failed")


def record_suite(arguments: argparse.Namespace) -> None:
    """The tests again where the times of earlier sources stay."""
    build = pathlib.Path(arguments.build).resolve()
    path = result_path(arguments.out)
    suite = {}
    chosen = [build / "tests" / name for name in arguments.only or ()]
    for binary in chosen or test_binaries(build):
        suite[binary.name] = run_tests(binary)
        own = {
            "suite_date": datetime.date.today().isoformat(),
            "suite_source_hash": source_hash(),
            "suite": suite,
        }
        path.write_text(json.dumps(recorded(path) | own, indent=1) + "\n")
    if not suite or any(entry["failures"] or entry["exit"] for entry in suite.values()):
        sys.exit("record: the suite failed")


def time_model(real, seconds: float) -> dict:
    """One model in evaluation mode, as it is and fused: compared, then timed interleaved."""
    import copy

    import torch

    from onepass import fuse, report
    from onepass.optimizing import measure

    torch.manual_seed(0)
    model = real.build().eval()
    fused = fuse(copy.deepcopy(model))
    inputs = real.timed_inputs()
    with torch.no_grad():
        expected, actual = (real.output(variant(*inputs)) for variant in (model, fused))
        off = ((actual - expected).abs().max() / expected.abs().max()).item()
        calls = {"eager": lambda: model(*inputs), "onepass": lambda: fused(*inputs)}
        timings = measure.interleaved(calls, torch.device("cpu"), seconds, lambda _: None)
    speed_up = timings["eager"].median / timings["onepass"].median
    print(f"{real.name}: {speed_up:.2f}x, off by {off:.1e} of the largest value", flush=True)
    if not off < 1e-3:
        sys.exit(f"record: {real.name} fused is off by {off:.1e} of its largest value")
    return {
        "model": real.name,
        "inputs": ["x".join(map(str, x.shape)) for x in inputs],
        "blocks": len(report(fused).fused),
        "off": off,
        "seconds": {name: vars(timing) for name, timing in timings.items()},
        "speed_up": speed_up,
    }


def record_models(arguments: argparse.Namespace) -> None:
    """Forward of the real models of python/tests/real_models.py."""
    sys.path.insert(0, str(ROOT / "python" / "tests"))
    import torch
    from real_models import MODELS

    torch.set_num_threads(arguments.threads)
    path = result_path(arguments.out)
    chosen = [real for real in MODELS if not arguments.only or arguments.only in real.name]
    models = {
        "date": datetime.date.today().isoformat(),
        "source_hash": source_hash(),
        "torch": torch.__version__,
        "threads": arguments.threads,
        "rows": [time_model(real, arguments.seconds) for real in chosen],
    }
    path.write_text(json.dumps(recorded(path) | {"models": models}, indent=1) + "\n")
    print(f"wrote {path}")


def models_table(models: dict) -> list:
    lines = [
        "",
        f"Real models with random weights, forward, {models['threads']} threads, "
        f"PyTorch {models['torch']}, {models['date']}:",
        "",
        "| model | input | eager, ms (10% to 90%) | onepass, ms (10% to 90%) | times as fast |",
        "| --- | --- | --- | --- | --- |",
    ]
    for entry in models["rows"]:
        times = [
            f"{t['median'] * 1e3:.0f} ({t['p10'] * 1e3:.0f} to {t['p90'] * 1e3:.0f})"
            for t in (entry["seconds"]["eager"], entry["seconds"]["onepass"])
        ]
        lines.append(
            f"| {entry['model']} | {entry['inputs'][0]} | {times[0]} | {times[1]} | {entry['speed_up']:.2f} |"
        )
    return lines


def row(entry: dict, name: str) -> str:
    seconds = entry["seconds"]
    gflops = f"{entry['gflops']:.1f} ({entry['gflops_share']:.0%})" if entry["gflops"] else ""
    spread = f"{seconds['median'] * 1e3:.1f} ({seconds['p10'] * 1e3:.1f} to {seconds['p90'] * 1e3:.1f})"
    problem = entry["problem"].replace("|", "\\|")
    return f"| {name} | `{problem}` | {spread} | {gflops} | {entry['times_floor']:.2f} |"


def machine_table(result: dict) -> list:
    names = {re.sub(r"\s+", "", text): name for text, name in workload_names().items()}
    lines = []
    targets = sorted({t for entry in result["suite"].values() for t in entry["targets"]})
    tests = sum(entry["tests"] for entry in result["suite"].values())
    failures = sum(entry["failures"] for entry in result["suite"].values())
    machine = result["machine"]
    now = source_hash()
    tested, measured = (
        ", earlier sources than these" if found != now else ""
        for found in (result.get("suite_source_hash", result["source_hash"]), result["source_hash"])
    )
    lines.append(
        f"**{machine['model']}** ({machine['architecture']}): "
        f"{tests} tests on {', '.join(targets)}, {failures} "
        f"failures ({result.get('suite_date', result['date'])}{tested}); times of {result['date']}{measured}."
    )
    for threads, entries in result["bench"].items():
        peak = entries[0]["peaks"]["gflops"]
        pages = ", large tensors in huge pages" if entries[0].get("pages") == "huge" else ""
        lines += [
            "",
            f"{threads} thread{'s' if threads != '1' else ''}, measured peak {peak:.0f} GFLOP/s{pages}:",
            "",
            "| | problem | ms, median (10% to 90%) | GFLOP/s (share of peak) | times the floor* |",
            "| --- | --- | --- | --- | --- |",
        ]
        for entry in entries:
            key = re.sub(r"\s+", "", entry["problem"].removesuffix(" f32"))
            lines.append(row(entry, names.get(key, "")))
    return lines + (models_table(result["models"]) if "models" in result else [])


GPU_GROUPS = {
    "tail": "forward of the tail alone",
    "tail_backward": "its gradients",
    "block": "whole block",
    "training": "training step",
}


def gpu_tests(tests: dict) -> str:
    """How many tests of a GPU passed, what failed, and how many its time did not reach."""
    suites = [suite for suite in tests.values() if isinstance(suite, dict) and "not_run" in suite]
    failed = [name for suite in suites for name in suite["failures"]]
    waiting = sum(len(suite["not_run"]) for suite in suites)
    skipped = {name: why for suite in suites for name, why in suite.get("skipped", {}).items()}
    passed = sum(suite["tests"] for suite in suites) - len(failed) - waiting - len(skipped)
    words = f"Of its tests {passed} passed, {len(failed)} failed"
    words += f" ({', '.join(failed)})" if failed else ""
    words += f", {waiting} were not reached in its time (`tests/gpu/known_failures.txt`)" if waiting else ""
    words += f", {len(skipped)} skipped ({', '.join(sorted(set(skipped.values())))})" if skipped else ""
    return words + "."


def gpu_table(result: dict) -> list:
    """What a GPU of results/ has measured: tails and their gradients, whole blocks, training steps."""
    benchmarks = result["benchmarks"]
    lost = [entry["group"] for entry in benchmarks["entries"] if "error" in entry]
    kinds = ", ".join(name for group, name in GPU_GROUPS.items() if group in lost)
    words = f" {len(lost)} of its measurements failed ({kinds})." if lost else ""
    lines = [
        f"**{result['device']['name']}**, {benchmarks['date']}, PyTorch {benchmarks['torch']}, CUDA events, "
        f"cold L2. {gpu_tests(result['tests'])}{words}",
        "",
        "| | | ms, median (10% to 90%) | times as fast as eager | as torch.compile | times the floor** |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for entry in benchmarks["entries"]:
        seconds = entry.get("seconds", {})
        if entry["layout"] != "contiguous" or "compile" not in seconds:
            continue
        if entry["group"] not in GPU_GROUPS:
            continue
        ours = seconds["onepass"]
        spread = f"{ours['median'] * 1e3:.3f} ({ours['p10'] * 1e3:.3f} to {ours['p90'] * 1e3:.3f})"
        ratios = [f"{seconds[rival]['median'] / ours['median']:.2f}" for rival in ("eager", "compile")]
        floor = f"{ours['median'] / entry['floor_seconds']:.2f}" if "floor_seconds" in entry else ""
        precision = ", TF32 off" if entry.get("precision") == "ieee" else ""
        precision += ", fast" if entry.get("numerics") == "fast" else ""
        batch = f", batch {entry['batch']}" if entry.get("batch") else ""
        lines.append(
            f"| {entry['workload']} {entry['dtype']}{precision}{batch} | {GPU_GROUPS[entry['group']]} "
            f"| {spread} | {ratios[0]} | {ratios[1]} | {floor} |"
        )
    return [*lines, *gpu_sweeps(benchmarks["entries"])]


SWEEPS = {
    "thin": "Thin convolutions",
    "layer": "Layers of real models",
    "grouped": "Convolutions in groups",
}


def gpu_sweeps(entries: list) -> list:
    """How the blocks of a sweep compare with the best of their rivals, a line a sweep."""
    ratios: dict = {}
    for entry in entries:
        seconds = {name: timing["median"] for name, timing in entry.get("seconds", {}).items()}
        if entry["group"] in SWEEPS and seconds:
            best = min(other for name, other in seconds.items() if name != "onepass")
            ratios.setdefault((entry["group"], entry["dtype"]), []).append(best / seconds["onepass"])
    return [
        line
        for (group, dtype), found in ratios.items()
        for line in (
            "",
            f"{SWEEPS[group]}, {dtype}, forward, {len(found)} of them, against the best of eager, channels "
            f"last and torch.compile with cudnn.benchmark: {statistics.geometric_mean(found):.2f} "
            f"times as fast in the geometric mean, {min(found):.2f} to {max(found):.2f}.",
        )
    ]


def table(_: argparse.Namespace) -> None:
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        if "suite" in result:
            lines += [*machine_table(result), ""]
        elif "benchmarks" in result:
            lines += [*gpu_table(result), ""]
    lines.append(
        "\\* the time to write the output and evaluate each activation once, measured in the same run. "
        "`make bench` measures again and rewrites this table.  \n"
        "\\*\\* reading and writing the tensors once, "
        "measured in the same run. `make bench-gpu` measures on a GPU."
    )
    readme = ROOT / "README.md"
    begin, end = "<!-- results:begin -->", "<!-- results:end -->"
    text = readme.read_text()
    head, rest = text.split(begin)
    readme.write_text(head + begin + "\n" + "\n".join(lines) + "\n" + end + rest.split(end)[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run")
    run.add_argument("--build", default=str(ROOT / "build" / "release"))
    run.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    run.add_argument("--out")
    run.set_defaults(call=record)
    suite = commands.add_parser("suite")
    suite.add_argument("--build", default=str(ROOT / "build" / "release"))
    suite.add_argument("--only", nargs="+", help="names of test binaries")
    suite.add_argument("--out")
    suite.set_defaults(call=record_suite)
    models = commands.add_parser("models")
    models.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    models.add_argument("--seconds", type=float, default=10.0)
    models.add_argument("--only", help="part of a model's name")
    models.add_argument("--out")
    models.set_defaults(call=record_models)
    commands.add_parser("table").set_defaults(call=table)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
