"""All compilers, those of rivals and our own: they fill their caches ahead, several processes at once."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import itertools
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
from typing import Any

import torch
from gpu_bench_cases import GRADIENTS, STARTS, Case, settings
from gpu_results import ROOT
from gpu_timing import COMPILERS, Json

PROGRAM = pathlib.Path(__file__).with_name("gpu_bench.py")
LOG = ROOT / "build" / "gpu" / "rivals.log"  # what their compilers say


def prepare_lines() -> None:
    """A process that compiles: a case and a rival a line, answered by the seconds of the first call.

    What it compiles lies in the rivals' caches. They choose among kernels by time, so only one process
    at once times them.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    take_turns(os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "gpu.lock"))
    for line in sys.stdin:
        given = json.loads(line)
        case, rival = Case(**given["case"]), given["rival"]
        answer: Json = {}
        begin = time.perf_counter()
        try:
            with settings(case), torch.set_grad_enabled(case.group in GRADIENTS):
                started = STARTS[case.group](case, (rival,))
            if rival in started.ways:
                answer["seconds"] = time.perf_counter() - begin
            else:
                answer["error"] = str(started.first)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        started = None
        gc.collect()
        torch.cuda.empty_cache()
        print(json.dumps(answer), file=answers)


def take_turns(path: str) -> None:
    """Has the compilers' benchmarks wait for those of other processes."""
    from torch._inductor.runtime import benchmarking

    os.makedirs(os.path.dirname(path), exist_ok=True)
    one = benchmarking.benchmarker
    benchmark, within = one.benchmark, False

    def alone(*arguments: Any, **named: Any) -> Any:
        nonlocal within
        if within:
            return benchmark(*arguments, **named)
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            within = True
            try:
                return benchmark(*arguments, **named)
            finally:
                within = False

    one.benchmark = alone


class Rivals:
    """What the compilers of rivals are ready for, kept in their cache."""

    def __init__(self) -> None:
        self.path = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "rivals.json"
        found = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.seconds: dict[str, float] = found.get("seconds", {})
        self.errors: dict[str, str] = found.get("errors", {})
        self.lock = threading.Lock()

    @staticmethod
    def key(case: Case, rival: str) -> str:
        """The name of a function."""
        return f"{case.text()} against {rival}"

    def compile(self, wanted: list[Case], end: float) -> None:
        """What the cases need, several processes at once: our kernels, then the few functions of the compiler
        that takes longest.
        """
        waiting: queue.SimpleQueue[tuple[Case, str]] = queue.SimpleQueue()
        for rival, case in itertools.product(("onepass", *reversed(COMPILERS)), wanted):
            if rival in case.names():
                waiting.put((case, rival))
        count = max(1, min(14, (os.cpu_count() or 2) - 2))
        threads = [threading.Thread(target=self.work, args=(waiting, end)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def add(self, case: Case, rival: str, answer: Json) -> None:
        """Keeps an answer: also for a process that comes later."""
        with self.lock:
            if "error" in answer:
                self.errors[self.key(case, rival)] = answer["error"]
            else:
                self.seconds[self.key(case, rival)] = answer["seconds"]
            whole = self.path.with_suffix(".new")
            whole.write_text(json.dumps({"seconds": self.seconds, "errors": self.errors}))
            whole.replace(self.path)

    def ready(self, case: Case) -> tuple[str, ...]:
        """The case's rivals that can be measured."""
        return tuple(r for r in case.rivals if r not in COMPILERS or self.key(case, r) in self.seconds)

    def work(self, waiting: queue.SimpleQueue[tuple[Case, str]], end: float) -> None:
        """One process, until the time is up."""
        with open(LOG, "a") as log:
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), "--prepare"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        timer = threading.Timer(max(0.1, end - time.monotonic()), process.kill)
        timer.start()
        with contextlib.suppress(queue.Empty, OSError), process:
            assert process.stdin is not None and process.stdout is not None
            while True:
                case, rival = waiting.get_nowait()
                given = {"case": dataclasses.asdict(case), "rival": rival}
                print(json.dumps(given), file=process.stdin, flush=True)
                line = process.stdout.readline()
                if not line:
                    break
                self.add(case, rival, json.loads(line))
        timer.cancel()
