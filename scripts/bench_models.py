"""Whole networks by torch.compile(backend="onepass") and its rivals: "models" of results/<device>.json.

    python3 scripts/bench_models.py [--packages .carry/models] [--only PATTERN] [--seconds 560] [--again]
    python3 scripts/bench_models.py --small --device cpu     a check of the script, on any machine

Eager PyTorch, torch.compile and the backend, in both layouts, the compilers with and without CUDA graphs, all
timed with cudnn.benchmark: time, peak memory, kernels, and the error against eager fp32. The networks come
from diffusers, monai and timm, unpacked in a folder; those of absent packages are left out, in one sentence.
Two processes a row compile and judge, many at once; then the rows are timed one after the other, the two
processes of a row in turns, with what cuDNN chooses then. A row is written at once, with the hash of its
library: a later run measures the missing rows and outdated ones.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import importlib.util
import json
import math
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import gpu_results
from gpu_results import ROOT

BEGIN = time.monotonic()
ROW = ROOT / "scripts" / "bench_models_row.py"
SIDES = ("pytorch", "onepass")

sys.path.insert(0, str(ROOT / "python"))
from onepass import _library  # noqa: E402
from onepass.optimizing.measure import timing_of  # noqa: E402


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
        # Of a process; there are many. More are for few rows of large networks.
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "1"),
    }


def library_hash() -> str:
    """Of the compiled library, the package and these scripts: what a row's figures depend on."""
    digest = hashlib.sha256(_library.content_hash().encode())
    for path in sorted((ROOT / "scripts").glob("bench_models*.py")):
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
        self.slots = concurrent.futures.ThreadPoolExecutor(options.jobs)

    def left(self) -> float:
        """Seconds."""
        return self.options.seconds - (time.monotonic() - BEGIN)

    def wanted(self, keys: list[str]) -> list[str]:
        """The rows that match, less those that this library has measured."""
        found = [key for key in keys if re.search(self.options.only, key)]
        known = self.results.rows
        return [key for key in found if self.options.again or known.get(key, {}).get("hash") != self.hash]

    def measure(self, keys: list[str]) -> bool:
        """In batches, while there is time. Whether all were measured and are right."""
        complete = True
        for first in range(0, len(keys), self.options.batch):
            batch = keys[first : first + self.options.batch]
            if self.left() < 0:
                print(f"left for the next run: {', '.join(batch)}")
                complete = False
                continue
            with contextlib.ExitStack() as stack:
                longest = sorted(batch, key=self._seconds, reverse=True)
                pairs = {key: [self._start(key, side, stack) for side in SIDES] for key in longest}
                self._wait(pairs)
                for key, pair in pairs.items():
                    complete &= self._measure(key, pair)
        return complete

    def _seconds(self, key: str) -> float:
        """That the row took to compile in an earlier run; those without one come first."""
        found = self.results.rows.get(key, {}).get("ways", {}).values()
        return sum(way.get("first_call_seconds", 0) for way in found) if found else math.inf

    def _start(self, key: str, side: str, stack: contextlib.ExitStack) -> Worker:
        options = ["--device", self.options.device, *["--small"] * self.options.small]
        return stack.enter_context(Worker([key, side, *options], self.environment, self.slots))

    def _wait(self, pairs: dict[str, list[Worker]]) -> None:
        """Until all are compiled and judged; at most for this share of the time, which the rest needs."""
        end = time.monotonic() + 0.65 * self.left()
        for key, pair in pairs.items():
            for side, worker in zip(SIDES, pair, strict=True):
                worker.judged(end - time.monotonic())
                print(f"compiled {key} by {side}: {worker.said()}", flush=True)
        # Whoever still compiles would disturb the times of the others.
        for worker in [worker for pair in pairs.values() for worker in pair if not worker.found]:
            worker.close()

    def _measure(self, key: str, pair: list[Worker]) -> bool:
        try:
            result = row_of(pair, self.options.turns, self.options.seconds_a_turn, self.left())
        except WorkerError as error:
            print(f"{key}: failed: {error}", flush=True)
            return False
        finally:
            for worker in pair:
                worker.close()
        settings = {"small": self.options.small, "cudnn_benchmark": True}
        self.results.add(key, {"hash": self.hash, **settings, **result})
        print(f"{key}: {summary(result)}", flush=True)
        return result["right"]


class WorkerError(RuntimeError):
    """A process that ended, or did not answer in time."""


class Worker:
    """A process of bench_models_row.py. It holds one of the slots from its start to its first answer."""

    def __init__(
        self, arguments: list[str], env: dict[str, str], slots: concurrent.futures.ThreadPoolExecutor
    ) -> None:
        self.command = [sys.executable, str(ROW), *arguments]
        self.env = env
        self.process: subprocess.Popen[str] | None = None
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self.first = slots.submit(self._begin)
        self.found: dict[str, Any] = {}

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self) -> str:
        self.process = subprocess.Popen(
            self.command,
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,
        )
        return self._line()

    def _line(self) -> str:
        """The next line of JSON; what libraries print is passed over."""
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return line
        if self.process.wait() == -signal.SIGKILL:
            raise WorkerError("the time was up")
        self.errors.seek(0)
        raise WorkerError(error_in(self.errors.read()))

    def judged(self, seconds: float) -> None:
        """Waits for the first answer; `found` is empty where there is none."""
        with contextlib.suppress(concurrent.futures.TimeoutError, WorkerError):
            self.found = json.loads(self.first.result(timeout=max(seconds, 1)))

    def said(self) -> str:
        """What became of it, in a few words."""
        if self.found:
            failed = [
                f"{name} failed ({way['failed']})" for name, way in self.found.items() if "failed" in way
            ]
            seconds = sum(way.get("first_call_seconds", 0) for way in self.found.values())
            return "; ".join([f"{seconds:.0f} s", *failed])
        error = self.first.exception() if self.first.done() and not self.first.cancelled() else None
        return f"failed: {error or 'the time was up'}"

    def times(self, seconds: float, limit: float) -> dict[str, list[float]]:
        """Milliseconds of its ways, as often as the seconds allow."""
        if not self.found:
            raise WorkerError(self.said())
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        timer = threading.Timer(max(limit, 1), self.process.kill)
        timer.start()
        try:
            return json.loads(self._line())
        finally:
            timer.cancel()

    def close(self) -> None:
        """Ends the process and those that it has started."""
        self.first.cancel()
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.errors.close()


def row_of(pair: list[Worker], turns: int, seconds: float, limit: float) -> dict[str, Any]:
    """A row of the results: what the two processes found, timed in turns."""
    taken: dict[str, list[float]] = {}
    for _ in range(turns):
        for worker in pair:
            for name, times in worker.times(seconds, limit).items():
                taken.setdefault(name, []).extend(times)
    found = {name: way for worker in pair for name, way in worker.found.items()}
    for name, times in taken.items():
        timing = timing_of(times)
        way = found.setdefault(name, dict(found[name.removesuffix(", graphs")]))
        way["ms"] = [round(t, 4) for t in (timing.median, timing.p10, timing.p90)]
    return {"ways": found, **verdict(found)}


def verdict(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How the backend compares with the best of torch.compile, and whether its results are as exact."""
    ours = {name: way for name, way in found.items() if name.startswith("onepass")}
    theirs = {name: way for name, way in found.items() if name not in ours}
    timed = [{n: w["ms"][0] for n, w in side.items() if "ms" in w} for side in (ours, theirs)]
    compiled = {name: ms for name, ms in timed[1].items() if name.startswith("compile")}
    worst = max((way["error"] for way in theirs.values() if "error" in way), default=0.0)
    right = all("error" in way and way["error"] <= 1.5 * worst + 1e-5 for way in ours.values())
    result: dict[str, Any] = {"right": right}
    if timed[0] and compiled:
        best, rival = min(timed[0], key=timed[0].__getitem__), min(compiled, key=compiled.__getitem__)
        result |= {"best": best, "best_of_compile": rival}
        result["speedup"] = round(compiled[rival] / timed[0][best], 3)
        result["speedup_of_all"] = round(min(timed[1].values()) / timed[0][best], 3)
    return result


def error_in(text: str) -> str:
    """The line of a traceback that names the error, else the last."""
    lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (named or lines)[-1][:300]


def summary(result: dict[str, Any]) -> str:
    """A row in one line."""
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
    parser.add_argument(
        "--jobs", type=int, default=max((os.cpu_count() or 2) - 2, 1), help="processes that compile at once"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--again", action="store_true", help="also rows that this library has measured")
    parser.add_argument("--batch", type=int, default=13, help="rows whose processes live at once")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds-a-turn", type=float, default=0.3, help="of each way")
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
    # Training rows need much memory: they are spread over the batches.
    return 0 if bench.measure(keys[::2] + keys[1::2]) else 1


if __name__ == "__main__":
    sys.exit(main())
