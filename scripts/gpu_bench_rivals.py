"""All compilers, those of rivals and our own: they fill their caches ahead, several processes at once."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import pathlib
import queue
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from gpu_bench_cases import GRADIENTS, STARTS, Case, settings
from gpu_results import ROOT
from gpu_timing import COMPILERS, Json

LOG = ROOT / "build" / "gpu" / "rivals.log"  # what their compilers say


def prepare(asked: Connection, others: list[Connection]) -> None:
    """A process that compiles: a case and a rival are answered by the seconds of the first call, until the
    process that asks has ended (of whose other pipes this one has no need).

    What it compiles lies in the rivals' caches. They choose among kernels by time, so only one process
    at once times them.
    """
    for other in others:
        other.close()
    with open(LOG, "a") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    take_turns(os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "gpu.lock"))
    while True:
        try:
            case, rival = asked.recv()
        except EOFError:
            return
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
        asked.send(answer)


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


class Compiler:
    """A process that runs `prepare`."""

    def __init__(self, before: list[Compiler]) -> None:
        copies = multiprocessing.get_context("fork")
        self.pipe, theirs = copies.Pipe()
        self.process = copies.Process(target=prepare, args=(theirs, [self.pipe, *(c.pipe for c in before)]))
        self.process.start()
        theirs.close()  # the end of the process is then the end of what it says

    def answer(self, case: Case, rival: str) -> Json:
        """What it says; EOFError where it has ended."""
        self.pipe.send((case, rival))
        return self.pipe.recv()

    def close(self) -> None:
        """Lets the process go."""
        self.pipe.close()
        self.process.join()


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
        # Copies of this process, which has imported PyTorch and its compiler: alone each would take ten
        # seconds for it. Before there are threads, and before the GPU is touched: no copy could use it then.
        importlib.import_module("torch._inductor.compile_fx")
        gc.collect()
        gc.freeze()
        processes: list[Compiler] = []
        for _ in range(count):
            processes.append(Compiler(processes))
        threads = [threading.Thread(target=self.work, args=(p, waiting, end)) for p in processes]
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

    def work(self, compiler: Compiler, waiting: queue.SimpleQueue[tuple[Case, str]], end: float) -> None:
        """One process, until the time is up."""
        timer = threading.Timer(max(0.1, end - time.monotonic()), compiler.process.kill)
        timer.start()
        with contextlib.suppress(queue.Empty, EOFError, OSError):
            while True:
                case, rival = waiting.get_nowait()
                self.add(case, rival, compiler.answer(case, rival))
        compiler.close()
        timer.cancel()
