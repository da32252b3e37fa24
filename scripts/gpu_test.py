"""The test suite of a machine with a GPU, after scripts/gpu_build.sh: "tests" of results/<device>.json.

The C++ suite, the tests of the PyTorch package in python/tests_gpu (by pytest, where python3 has it, else by
unittest), then compute-sanitizer on the C++ suite's small set. What is missing fails.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from typing import Any

import gpu_results
from gpu_results import ROOT

PYTHON_TESTS = ROOT / "python" / "tests_gpu"


def run_cpp() -> dict[str, Any]:
    """Every test with its seconds, and how many problems those have tried that run for a given time."""
    code, report = gpu_results.run_suite(timeout=480)
    tests = gpu_results.tests_of(report)
    names = {id(test): f"{test['classname']}.{test['name']}" for test in tests}
    return {
        "passed": code == 0 and bool(tests),
        "tests": len(tests),
        "failures": [names[id(test)] for test in tests if "failures" in test],
        "test_seconds": {names[id(test)]: float(test["time"].rstrip("s")) for test in tests},
        "random_problems": sum(int(test.get("problems", 0)) for test in tests),
    }


def run_python() -> dict[str, Any]:
    """The package's tests on CUDA tensors."""
    if not PYTHON_TESTS.is_dir():
        return {"passed": False, "reason": "python/tests_gpu is missing"}
    folders = [str(ROOT / "python"), str(ROOT / "python" / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    environment.setdefault("ONEPASS_CACHE_DIR", str(ROOT / "build" / "gpu" / "kernel_cache"))
    runner = run_pytest if importlib.util.find_spec("pytest") else run_unittest
    return {"runner": runner.__name__.removeprefix("run_"), **runner(environment)}


def run_pytest(environment: dict[str, str]) -> dict[str, Any]:
    """Counts from pytest's report. Where there is no GPU all are skipped, and that is a failure."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", str(PYTHON_TESTS)]
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        if not report.exists():
            return {"passed": False, "reason": f"pytest ended with {code}"}
        suites = ElementTree.parse(report).getroot().iter("testsuite")
        counts = {key: 0 for key in ("tests", "failures", "errors", "skipped")}
        for suite in suites:
            for key in counts:
                counts[key] += int(suite.get(key, 0))
    return {"passed": code == 0 and counts["tests"] > counts["skipped"], **counts}


def run_unittest(environment: dict[str, str]) -> dict[str, Any]:
    """Counts from unittest's last lines."""
    command = [sys.executable, "-m", "unittest", "discover", "-s", str(PYTHON_TESTS), "-t", str(PYTHON_TESTS)]
    run = subprocess.run(command, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE)
    sys.stderr.write(run.stderr)
    ran = re.search(r"^Ran (\d+) tests?", run.stderr, re.MULTILINE)
    tests = int(ran.group(1)) if ran else 0
    counts = {key: 0 for key in ("failures", "errors", "skipped")}
    last = run.stderr.splitlines()[-1] if ran else ""
    for key, count in re.findall(r"(failures|errors|skipped)=(\d+)", last):
        counts[key] = int(count)
    return {"passed": run.returncode == 0 and tests > counts["skipped"], "tests": tests, **counts}


def find_sanitizer() -> str | None:
    """On the path, or where a toolkit has it."""
    for path in ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"):
        if found := shutil.which(path):
            return found
    return None


def run_sanitizer(tool: str) -> dict[str, Any]:
    """The C++ suite's small set under one tool of compute-sanitizer."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return {"passed": False, "reason": "compute-sanitizer is not installed"}
    prefix = (sanitizer, "--tool", tool, "--error-exitcode", "9", "--launch-timeout", "60")
    code, report = gpu_results.run_suite("--gtest_filter=Small*", prefix=prefix, timeout=300)
    tests = len(gpu_results.tests_of(report))
    return {"passed": code == 0 and tests > 0, "tests": tests}


STEPS = {
    "cpp": run_cpp,
    "python": run_python,
    "memcheck": lambda: run_sanitizer("memcheck"),
    "racecheck": lambda: run_sanitizer("racecheck"),
}


def run_step(name: str) -> dict[str, Any]:
    """A step with its seconds; says how it went."""
    started = time.monotonic()
    step = STEPS[name]()
    step["seconds"] = round(time.monotonic() - started, 1)
    outcome = "passed" if step["passed"] else f"FAILED {step.get('reason', '')}"
    print(f"== {name}: {outcome} in {step['seconds']} s", flush=True)
    return step


def main() -> None:
    """Runs the steps side by side, all of them unless named; only a whole run is written."""
    chosen = sys.argv[1:] or list(STEPS)
    unknown = [name for name in chosen if name not in STEPS]
    if unknown:
        raise SystemExit(f"gpu_test.py: unknown step {unknown[0]}, must be of {', '.join(STEPS)}")
    device = gpu_results.describe_device()
    print(device["description"], flush=True)
    begin = time.monotonic()
    # Most of the time goes into compiling kernels, which leaves the GPU and some cores idle.
    with concurrent.futures.ThreadPoolExecutor(len(chosen)) as pool:
        steps = dict(zip(chosen, pool.map(run_step, chosen), strict=True))
    passed = all(step["passed"] for step in steps.values())
    if chosen == list(STEPS):
        seconds = round(time.monotonic() - begin, 1)
        failures = [*steps["cpp"]["failures"], *(n for n in STEPS if n != "cpp" and not steps[n]["passed"])]
        content = {"passed": passed, "failures": failures, "seconds": seconds, **steps}
        path = gpu_results.write(device, "tests", content)
        print(f"wrote {path} after {seconds} s")
    if not passed:
        sys.exit("test-gpu: failed")


if __name__ == "__main__":
    main()
