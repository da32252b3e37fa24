"""results/<device>.json: what a GPU has run, written in parts by gpu_test.py and gpu_bench.py."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUITE = ROOT / "build" / "gpu" / "tests" / "gpu_test"


def keep_bytecode() -> None:
    """Where PyTorch lies without its bytecode, compiling that is two thirds of each import: it is kept in
    build/gpu, for this process and all that it begins.
    """
    found = importlib.util.find_spec("torch")
    if found and found.origin and not (pathlib.Path(found.origin).parent / "__pycache__").exists():
        sys.pycache_prefix, sys.dont_write_bytecode = str(ROOT / "build" / "gpu" / "bytecode"), False
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def run_suite(
    *arguments: str, prefix: tuple[str, ...] = (), timeout: float | None = None
) -> tuple[int, dict[str, Any]]:
    """Runs the C++ suite: its exit code and GoogleTest's report, empty where the program did not end."""
    environment = {"ONEPASS_CACHE_DIR": str(ROOT / "build" / "gpu" / "kernel_cache"), **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        command = [*prefix, str(SUITE), f"--gtest_output=json:{report}", *arguments]
        try:
            code = subprocess.run(command, cwd=ROOT, env=environment, timeout=timeout).returncode
        except subprocess.TimeoutExpired:
            code = 124
        return code, json.loads(report.read_text()) if report.exists() else {}


def tests_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The tests of GoogleTest's report."""
    return [test for group in report.get("testsuites", []) for test in group["testsuite"]]


def describe_device() -> dict[str, str]:
    """The GPU's name and architecture, what the library says of it, the number of turns, and two hashes: of
    what plans do on it, and of the tests (tests/support/results_hash.h).
    """
    code, report = run_suite("--gtest_filter=Gpu.IsDescribed", "--gtest_brief=1")
    if code != 0:
        raise SystemExit("the GPU suite does not start")
    (test,) = tests_of(report)
    keys = ("device", "architecture", "description", "device_code_hash", "tests_hash", "turns_in_all")
    return {key: test[key] for key in keys}


def hashes_of(device: dict[str, str], part: str) -> dict[str, str]:
    """What a part of the results belongs to: the tests' part to the tests too."""
    names = ("device_code_hash", "tests_hash") if part == "tests" else ("device_code_hash",)
    return {name: device[name] for name in names}


def path_of(device: dict[str, str]) -> pathlib.Path:
    """Where the device's results are."""
    name = re.sub(r"[^a-z0-9]+", "-", device["device"].lower()).strip("-")
    return ROOT / "results" / f"{name}.json"


def read(device: dict[str, str], part: str) -> dict[str, Any]:
    """One part of the device's file; empty where there is none."""
    path = path_of(device)
    return json.loads(path.read_text()).get(part, {}) if path.exists() else {}


def belongs_to(content: dict[str, Any], device: dict[str, str], part: str) -> bool:
    """Whether a part was written by this device code, and by these tests where it is theirs."""
    return all(content.get(name) == value for name, value in hashes_of(device, part).items())


def write(device: dict[str, str], part: str, content: dict[str, Any]) -> pathlib.Path:
    """Replaces one part of the device's file, with today's date and what it belongs to."""
    path = path_of(device)
    result = json.loads(path.read_text()) if path.exists() else {}
    result["device"] = {
        "name": device["device"],
        "architecture": device["architecture"],
        "description": device["description"],
    }
    result[part] = {
        **hashes_of(device, part),
        "date": datetime.date.today().isoformat(),
        **content,
    }
    path.parent.mkdir(exist_ok=True)
    whole = path.with_suffix(".new")  # a run that is stopped leaves no half of a file
    whole.write_text(json.dumps(result, indent=1) + "\n")
    whole.replace(path)
    return path
