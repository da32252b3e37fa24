#!/usr/bin/env python3
"""Records what this machine runs and how fast into results/, and writes the pages that show it.

    scripts/record.py run [--build build/release] [--threads 1 2]   the test suite and the benchmark
    scripts/record.py suite [--build build/release] [--only cpu_test] the test suite alone, written as it goes
    scripts/record.py models [--threads 2] [--seconds 10]           five real models, with and without onepass
    scripts/record.py compiled [--threads 1] [--seconds 10]         the same models by torch.compile
    scripts/record.py pages                                         what README.md and docs/ show of results/

models and compiled run in a Python that has the package, PyTorch and python/tests/requirements-models.txt.
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

import results_pages
from results_pages import RESULTS, ROOT, WORKLOADS


def cpu_model() -> str:
    """The processor's name, as lscpu gives it."""
    text = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"^Model name:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def source_hash() -> str:
    """A hash of the sources that decide how CPU strategies compute, without lines that name a GPU's."""
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
    """All but gpu_test, which scripts/gpu_test.py runs, and results_test, which checks what is committed."""
    found = sorted((build / "tests").glob("*_test"))
    return [binary for binary in found if binary.name not in ("gpu_test", "results_test")]


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
    """Runs the tests again and keeps the recorded times, which may be of earlier sources."""
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


def record_compiled(arguments: argparse.Namespace) -> None:
    """Forward and training step of the real models by torch.compile, each row written as it is measured."""
    sys.path.insert(0, str(ROOT / "python" / "tests"))
    import compiled_models
    import torch
    from real_models import MODELS

    torch.set_num_threads(arguments.threads)
    path = result_path(arguments.out)
    chosen = [real for real in MODELS if not arguments.only or arguments.only in real.name]
    for train in (False, True):
        for real in chosen:
            row = compiled_models.time_model(real, train, arguments.seconds)
            if not row["off"] < 1e-2:
                sys.exit(f"record: {real.name} is off by {row['off']:.1e} of its largest value")
            known = recorded(path).get("compiled", {}).get("rows", [])
            others = [other for other in known if (other["model"], other["train"]) != (real.name, train)]
            own = {
                "date": datetime.date.today().isoformat(),
                "source_hash": source_hash(),
                "torch": torch.__version__,
                "threads": arguments.threads,
                "rows": sorted([*others, row], key=lambda row: (row["train"], row["model"])),
            }
            path.write_text(json.dumps(recorded(path) | {"compiled": own}, indent=1) + "\n")
    print(f"wrote {path}")


def write_pages(_: argparse.Namespace) -> None:
    """README.md, docs/results.md and docs/speed*.svg, from all recorded results."""
    results_pages.write()


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
    compiled = commands.add_parser("compiled")
    compiled.add_argument("--threads", type=int, default=1)
    compiled.add_argument("--seconds", type=float, default=10.0)
    compiled.add_argument("--only", help="part of a model's name")
    compiled.add_argument("--out")
    compiled.set_defaults(call=record_compiled)
    commands.add_parser("pages").set_defaults(call=write_pages)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
