"""Whole networks by torch.compile(backend="onepass") and its rivals: "models" of results/<device>.json.

    python3 scripts/bench_models.py [--packages .carry/models] [--only PATTERN] [--seconds 560] [--again]
    python3 scripts/bench_models.py --small --device cpu     a check of the script, on any machine

Eager PyTorch, torch.compile and the backend, in both layouts, the compilers with and without CUDA graphs, all
with cudnn.benchmark: time, peak memory, kernels, and the error against eager fp32. The networks come from
diffusers, monai and timm, unpacked in a folder; those of absent packages are left out, in one sentence.
Several processes compile first, into caches on disk; then rows are measured one after the other. A row is
written at once, with the hash of its library: a later run measures the missing rows and outdated ones.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib.util
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from typing import Any

import gpu_results
from gpu_results import ROOT

BEGIN = time.monotonic()
ROW = ROOT / "scripts" / "bench_models_row.py"


def environment(packages: pathlib.Path, caches: pathlib.Path) -> dict[str, str]:
    """Of the rows' processes: the packages, and caches that outlive a run."""
    paths = [str(ROOT / "python"), str(packages), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "ONEPASS_CACHE_DIR": str(caches / "onepass"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # of a process; there are many
    }


def library_hash() -> str:
    """Of the compiled library, the package and these scripts: what a row's figures depend on."""
    digest = hashlib.sha256()
    package = ROOT / "python" / "onepass"
    files = [package / "lib_onepass_torch.so", *sorted(package.rglob("*.py"))]
    for path in (*files, *sorted((ROOT / "scripts").glob("bench_models*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Results:
    """The part "models" of a file of results, written after every row."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cuda":
            self.described = gpu_results.describe_device()
            self.content = gpu_results.read(self.described, "models")
        else:
            self.path = ROOT / "build" / f"models-{platform.machine()}.json"
            self.content = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.rows: dict[str, Any] = self.content.get("rows", {})

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Keeps a row."""
        self.rows[key] = row
        if self.device == "cuda":
            gpu_results.write(self.described, "models", {"rows": self.rows})
        else:
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(json.dumps({"rows": self.rows}, indent=1) + "\n")


class Bench:
    """A run: which rows, with how much time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.environment = environment(options.packages, options.caches)
        self.hash = library_hash()
        self.results = Results(options.device)

    def left(self) -> float:
        """Seconds."""
        return self.options.seconds - (time.monotonic() - BEGIN)

    def wanted(self, keys: list[str]) -> list[str]:
        """The rows that match, less those that this library has measured."""
        found = [key for key in keys if re.search(self.options.only, key)]
        known = self.results.rows
        return [key for key in found if self.options.again or known.get(key, {}).get("hash") != self.hash]

    def run_row(self, key: str, phase: str) -> dict[str, Any]:
        """One process; its last line, or why there is none."""
        command = [sys.executable, str(ROW), key, phase, "--device", self.options.device]
        command += ["--small"] if self.options.small else []
        try:
            done = subprocess.run(
                command, env=self.environment, capture_output=True, text=True, timeout=max(self.left(), 1)
            )
        except subprocess.TimeoutExpired:
            return {"failed": "the time was up"}
        if done.returncode != 0:
            return {"failed": error_in(done.stderr)}
        return json.loads(done.stdout.splitlines()[-1])

    def compile(self, keys: list[str]) -> None:
        """All rows, several at once; what the time does not suffice for is compiled when it is measured."""
        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
            for key, result in zip(keys, pool.map(lambda key: self.run_row(key, "compile"), keys)):
                said = result.get("failed") or f"{sum(result['compile_seconds'].values()):.0f} s"
                print(f"compiled {key}: {said}", flush=True)

    def measure(self, keys: list[str]) -> bool:
        """One after the other, while there is time. Whether all were measured and are right."""
        complete = True
        for key in keys:
            if self.left() < 0:
                print(f"left for the next run: {key}")
                complete = False
                continue
            result = self.run_row(key, "measure")
            complete &= result.get("right", False)
            if "failed" not in result:
                self.results.add(key, {"hash": self.hash, "small": self.options.small, **result})
            print(f"{key}: {summary(result)}", flush=True)
        return complete


def error_in(text: str) -> str:
    """The line of a traceback that names the error, else the last."""
    lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (named or lines)[-1][:300]


def summary(result: dict[str, Any]) -> str:
    """A row in one line."""
    if "failed" in result:
        return f"failed: {result['failed']}"
    right = "" if result["right"] else " WRONG"
    times = ", ".join(
        f"{n} {w['ms'][0]:.3f}" if "ms" in w else f"{n} failed" for n, w in result["ways"].items()
    )
    return f"{result.get('speedup', 0):.2f}x of the best torch.compile{right} (ms: {times})"


def main() -> int:
    """Reads the command line; 0 where all rows were measured and are right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", type=pathlib.Path, default=ROOT / ".carry" / "models")
    parser.add_argument("--caches", type=pathlib.Path, default=ROOT / "build" / "bench_models")
    parser.add_argument("--only", default="", help="a regular expression of rows")
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--again", action="store_true", help="also rows that this library has measured")
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    for path in (ROOT / "python", options.packages):
        sys.path.insert(0, str(path))
    import bench_models_list

    networks = bench_models_list.NETWORKS
    absent = sorted({n.package for n in networks if importlib.util.find_spec(n.package) is None})
    if absent:
        print(f"networks of {', '.join(absent)} are left out: unpack their wheels into {options.packages}")
    bench = Bench(options)
    keys = bench.wanted([row.key for row in bench_models_list.rows() if row.network.package not in absent])
    bench.compile(keys)
    if options.compile_only:
        return 0
    return 0 if bench.measure(keys) else 1


if __name__ == "__main__":
    sys.exit(main())
