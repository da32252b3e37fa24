#!/usr/bin/env python3
"""Records what this machine runs and how fast into results/, and writes the README's table from there.

    scripts/record.py run [--build build/release] [--threads 1 2]   the test suite and the benchmark
    scripts/record.py table                                         the table, from all recorded results
"""
import argparse
import datetime
import hashlib
import json
import os
import pathlib
import platform
import re
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
    """Of everything that decides how the CPU strategies compute."""
    digest = hashlib.sha256()
    for folder in ("include", "src/block", "src/plan", "src/cpu"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file():
                digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def run_suite(build: pathlib.Path) -> dict:
    """Every test binary, with its counts and the SIMD targets its tests went through."""
    suite = {}
    for binary in sorted((build / "tests").glob("*_test")):
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder) / "report.json"
            command = [str(binary), f"--gtest_output=json:{report}"]
            code = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode
            data = json.loads(report.read_text())
        cases = [case for group in data["testsuites"] for case in group["testsuite"]]
        targets = sorted({t for case in cases for t in case.get("targets", "").split()})
        suite[binary.name] = {"tests": data["tests"], "failures": data["failures"], "exit": code, "targets": targets}
        print(f"{binary.name}: {data['tests']} tests, {data['failures']} failures {' '.join(targets)}", flush=True)
    return suite


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


def record(arguments: argparse.Namespace) -> None:
    build = pathlib.Path(arguments.build).resolve()
    model = cpu_model()
    name = re.sub(r"[^a-z0-9]+", "-", f"{platform.machine()}-{model}".lower()).strip("-")
    result = {
        "machine": {"model": model, "architecture": platform.machine(), "cores": os.cpu_count()},
        "date": datetime.date.today().isoformat(),
        "source_hash": source_hash(),
        "suite": run_suite(build),
        "bench": {str(threads): run_bench(build, threads) for threads in arguments.threads},
    }
    RESULTS.mkdir(exist_ok=True)
    path = pathlib.Path(arguments.out) if arguments.out else RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    if any(entry["failures"] or entry["exit"] for entry in result["suite"].values()):
        sys.exit("record: the suite failed")


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
    lines.append(f"**{machine['model']}** ({machine['architecture']}), {result['date']}: {tests} tests on "
                 f"{', '.join(targets)}, {failures} failures.")
    for threads, entries in result["bench"].items():
        peak = entries[0]["peaks"]["gflops"]
        lines += ["", f"{threads} thread{'s' if threads != '1' else ''}, measured peak {peak:.0f} GFLOP/s:", "",
                  "| | problem | ms, median (10% to 90%) | GFLOP/s (share of peak) | times the floor* |",
                  "| --- | --- | --- | --- | --- |"]
        for entry in entries:
            key = re.sub(r"\s+", "", entry["problem"].removesuffix(" f32"))
            lines.append(row(entry, names.get(key, "")))
    return lines


def table(_: argparse.Namespace) -> None:
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        if "suite" in result:
            lines += machine_table(result) + [""]
    lines.append("\\* the time to write the output and evaluate each activation once, measured in the same run. "
                 "`make bench` measures again and rewrites this table.")
    readme = ROOT / "README.md"
    begin, end = "<!-- results:begin -->", "<!-- results:end -->"
    text = readme.read_text()
    head, rest = text.split(begin)
    readme.write_text(head + begin + "\n" + "\n".join(lines) + "\n" + end + rest.split(end)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run")
    run.add_argument("--build", default=str(ROOT / "build" / "release"))
    run.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    run.add_argument("--out")
    run.set_defaults(call=record)
    commands.add_parser("table").set_defaults(call=table)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
