"""The test suite of a machine with a GPU, after scripts/gpu_build.sh: "tests" of results/<device>.json.

    python3 scripts/gpu_test.py [--seconds 420] [--only cpp,python] [--filter PATTERN] [--turn K]

Every test of the C++ suite, every test of python/tests_gpu and the C++ suite's small set under
compute-sanitizer are jobs, several at once: most of their time goes into compiling kernels, which leaves the
GPU idle. A test of the C++ suite compiles on all cores, behind (in the scheduler's sense) the tests of the
package, each of which is one thread for most of its time. Jobs that take all memory, or measure time, come
last, one by one. What fails is printed at once; what is missing, or did not run in time, fails. The results
are written after every job.

A run takes one part, a turn, of all pairs of a problem and a row (tests/support/lists.h). Each run takes the
turn after that of the run before, or the same one again where that failed. The results name the turns that
have passed on this device code: "turns", of "turns_in_all".
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gpu_results
from gpu_results import ROOT, SUITE

WORKER = ROOT / "scripts" / "gpu_test_worker.py"
SUITES = ("cpp", "python", "memcheck", "racecheck", "synccheck")
# All memory taken. Tensors of 2^31 elements, of which a test holds 20 GB, leave room to others.
ALONE = ("Behaviour.LackOfMemory",)
CORES = os.cpu_count() or 2
AT_ONCE = {"cpp": max(1, min(8, CORES // 2)), "python": max(1, min(8, CORES // 2))}
SECONDS_OF_A_JOB = 240  # the most
SLOW = 30.0  # what a job is taken to last where no earlier run tells
PART_ALONE = 0.25  # of the time, for the jobs that run alone: a stranger's judge is four processes
# These first, whatever they took before: many others wait for what they build, or for their kernels.
FIRST = r"^python test_export|^Small|InEveryMode$|OnCases$"


@dataclasses.dataclass
class Job:
    """Something that passes or fails, and how it did."""

    suite: str
    name: str
    alone: bool = False
    group: str = ""  # of jobs that one process runs, one after the other
    ran: bool = False
    failed: bool = False
    skipped: bool = False
    seconds: float = 0.0
    words: str = ""
    problems: int = 0  # that a random test has tried

    def title(self) -> str:
        """Its name among all jobs: that of a C++ test is its own."""
        return self.name if self.suite == "cpp" else f"{self.suite} {self.name}"

    def lane(self) -> str:
        """Which of AT_ONCE it counts for."""
        return "python" if self.suite == "python" else "cpp"

    def stop(self, timeout: float, output: str) -> None:
        """It was stopped: failed where it had all the time of a job, else it has not run."""
        self.failed, self.ran = timeout >= SECONDS_OF_A_JOB, timeout >= SECONDS_OF_A_JOB
        self.words = f"stopped after {timeout:.0f} s\n{last_lines(output)}"


def environment() -> dict[str, str]:
    """Kernels are compiled into one cache: what a process has compiled, the next one finds. Of PyTorch no
    more threads and compiling processes than the few that its small tensors and kernels need: 16 processes
    share the cores.
    """
    return {
        "ONEPASS_CACHE_DIR": str(ROOT / "build" / "gpu" / "kernel_cache"),
        "OMP_NUM_THREADS": "2",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **os.environ,
    }


def kill(process: subprocess.Popen[str]) -> None:
    """A process, begun in a session of its own, and all that it began."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(text: str, count: int = 30) -> str:
    """Of a log."""
    return "\n".join(text.splitlines()[-count:])


# --- The C++ suite, also under compute-sanitizer -----------------------------------------------------


def cpp_tests(*arguments: str) -> list[str]:
    """The names of GoogleTest's tests."""
    command = [str(SUITE), "--gtest_list_tests", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    names, group = [], ""
    for line in run.stdout.splitlines():
        if line.startswith("  "):
            names.append(group + line.split()[0])
        elif line.rstrip().endswith("."):
            group = line.strip()
    return names


def find_sanitizer() -> str | None:
    """On the path, or where a toolkit has it."""
    for path in ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"):
        if found := shutil.which(path):
            return found
    return None


def run_cpp(job: Job, timeout: float) -> None:
    """One test in a process of its own: a kernel that breaks the GPU's context breaks no other test."""
    prefix: tuple[str, ...] = ()
    if job.suite != "cpp":
        sanitizer = find_sanitizer()
        if sanitizer is None:
            job.ran, job.failed, job.words = True, True, "compute-sanitizer is not installed"
            return
        prefix = (sanitizer, "--tool", job.suite, "--error-exitcode", "9", "--launch-timeout", "60")
    prefix = ("nice", "-n", "5", *prefix)
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        command = [*prefix, str(SUITE), f"--gtest_filter={job.name}", f"--gtest_output=json:{report}"]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill(process)
            output, _ = process.communicate()
            job.stop(timeout, output)
            return
        tests = gpu_results.tests_of(json.loads(report.read_text())) if report.exists() else []
    job.ran = True
    failures = [failure["failure"] for test in tests for failure in test.get("failures", [])]
    job.problems = sum(int(test.get("problems", 0)) for test in tests)
    job.failed = process.returncode != 0 or len(tests) != 1 or bool(failures)
    if failures:
        job.words = "\n".join(failures)
    elif job.failed:
        job.words = f"ended with {process.returncode}\n{last_lines(output)}"


# --- The tests of the PyTorch package ----------------------------------------------------------------


class Worker:
    """A process that runs tests of python/tests_gpu, one after the other."""

    def __init__(self, timeout: float) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            cwd=ROOT,
            env=environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,
        )
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()
        self.answer(timeout)  # that it is there

    def read(self) -> None:
        """Hands on what the process says; nothing, when it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def answer(self, timeout: float) -> Any:
        """The next answer."""
        try:
            line = self.answers.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(self.end()) from None
        if not line:
            words = self.end()
            raise RuntimeError(f"ended with {self.process.returncode}\n{words}")
        return json.loads(line)

    def end(self) -> str:
        """Ends the process; what it printed last."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)  # one that has answered for the last time ends by itself
        kill(self.process)
        self.log.seek(0)
        return last_lines(self.log.read())

    def close(self) -> None:
        """Ends the process, which has nothing to do."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.end()

    def run(self, job: Job, timeout: float) -> None:
        """One test."""
        assert self.process.stdin is not None
        print(job.name, file=self.process.stdin, flush=True)
        found = self.answer(timeout)
        job.ran, job.failed, job.words = True, found["failures"] > 0, found["words"]
        if found["skipped"]:
            job.skipped, job.words = True, found["skipped"]


class Runner:
    """One of those that take jobs; it keeps its worker while that lives."""

    def __init__(self, end: float) -> None:
        self.end = end
        self.worker: Worker | None = None

    def run(self, job: Job) -> None:
        """Runs the job unless the time is up; says how it went."""
        left = self.end - time.monotonic()
        if left <= 1:
            return
        begin = time.monotonic()
        timeout = min(left, SECONDS_OF_A_JOB)
        if job.suite == "python":
            self.run_python(job, timeout)
        else:
            run_cpp(job, timeout)
        job.seconds = round(time.monotonic() - begin, 2)
        outcome = "passed"
        if job.failed or job.skipped or not job.ran:
            outcome = "FAILED" if job.failed else "skipped" if job.skipped else "not run"
        words = "\n    " + job.words.strip().replace("\n", "\n    ") if job.words else ""
        print(f"{outcome} {job.title()} [{job.seconds:.1f} s]{words}", flush=True)

    def run_python(self, job: Job, timeout: float) -> None:
        """By a new worker where the last one is gone."""
        end = time.monotonic() + timeout
        try:
            self.worker = self.worker or Worker(timeout)
            self.worker.run(job, max(0.1, end - time.monotonic()))
        except TimeoutError as error:
            job.stop(timeout, str(error))
            self.worker = None
        except (RuntimeError, OSError) as error:
            job.ran, job.failed, job.words, self.worker = True, True, str(error), None

    def close(self) -> None:
        """Lets the worker go."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None


class Lane:
    """Takes groups of jobs in their order, so many at a time; a group is run by one runner."""

    def __init__(self, jobs: list[Job], count: int, end: float, report: Callable[[], None]) -> None:
        self.end, self.report = end, report
        self.waiting: queue.SimpleQueue[list[Job]] = queue.SimpleQueue()
        groups: dict[str, list[Job]] = {}
        for job in jobs:
            groups.setdefault(job.group or job.title(), []).append(job)
        for group in groups.values():
            self.waiting.put(group)
        self.threads = [threading.Thread(target=self.work) for _ in range(min(count, len(groups)))]
        for thread in self.threads:
            thread.start()

    def work(self) -> None:
        """Until nothing waits."""
        runner = Runner(self.end)
        with contextlib.suppress(queue.Empty):
            while True:
                for job in self.waiting.get_nowait():
                    runner.run(job)
                    self.report()
        runner.close()

    def join(self) -> None:
        """Returns when all have run."""
        for thread in self.threads:
            thread.join()


# --- The run -----------------------------------------------------------------------------------------


def python_tests() -> Iterator[Job]:
    """The tests of the package, which say whether they want to be alone or in one process with their class:
    read, not imported, which takes PyTorch ten seconds.
    """
    for path in sorted((ROOT / "python" / "tests_gpu").glob("test_*.py")):
        for item in ast.parse(path.read_text()).body:
            if not isinstance(item, ast.ClassDef):
                continue
            own = {ast.unparse(part) for part in item.body}
            group = f"{path.stem}.{item.name}" if "together = True" in own else ""
            for method in item.body:
                if isinstance(method, ast.FunctionDef) and method.name.startswith("test_"):
                    marked = any(ast.unparse(decorator) == "alone" for decorator in method.decorator_list)
                    name = f"{path.stem}.{item.name}.{method.name}"
                    yield Job("python", name, "alone = True" in own or marked, group)


def find_jobs(chosen: list[str]) -> list[Job]:
    """Every job of these suites."""
    cpp = [Job("cpp", name, name.startswith(ALONE)) for name in cpp_tests()] if "cpp" in chosen else []
    python = list(python_tests()) if "python" in chosen else []
    sanitized = [
        Job(suite, name)
        for suite in chosen
        if suite not in ("cpp", "python")
        for name in cpp_tests("--gtest_filter=Small*")
    ]
    return [*cpp, *python, *sanitized]


def seconds_before(tests: dict[str, Any]) -> dict[str, float]:
    """What each job took in the run before: the longest begin first."""
    found: dict[str, float] = {}
    for suite in SUITES:
        taken = tests.get(suite, {}).get("test_seconds", {})
        found |= {Job(suite, name).title(): seconds for name, seconds in taken.items()}
    return found


def turn_to_take(tests: dict[str, Any], device: dict[str, str]) -> tuple[int, list[int]]:
    """The turn after that of the run before, which wrote `tests`, or the same one where that did not pass;
    and the turns that have passed on this device code and by these tests.
    """
    passed = tests.get("turns", []) if gpu_results.belongs_to(tests, device, "tests") else []
    last = tests.get("turn", -1)
    turn = last + 1 if last < 0 or tests.get("passed") else last
    return turn % int(device["turns_in_all"]), passed


def summary(suite: str, jobs: list[Job]) -> dict[str, Any]:
    """A suite's part of the results."""
    own = [job for job in jobs if job.suite == suite]
    return {
        "passed": any(not job.skipped for job in own) and all(job.ran and not job.failed for job in own),
        "tests": len(own),
        "failures": [job.name for job in own if job.failed],
        "not_run": [job.name for job in own if not job.ran],
        "skipped": {job.name: job.words for job in own if job.skipped},
        "random_problems": sum(job.problems for job in own),
        "test_seconds": {job.name: job.seconds for job in own if job.ran},
    }


@dataclasses.dataclass
class Turn:
    """The part of the lists that this run takes, of so many; those that have passed before it."""

    number: int
    in_all: int
    passed: list[int]

    def content(self, passed: bool) -> dict[str, Any]:
        """Of the results' part."""
        turns = {*self.passed, self.number} if passed else set(self.passed)
        return {"turn": self.number, "turns": sorted(turns), "turns_in_all": self.in_all}


def content_of(jobs: list[Job], seconds: float, turn: Turn) -> dict[str, Any]:
    """Of the results' part."""
    failed = [job for job in jobs if job.failed or not job.ran]
    passed = bool(jobs) and not failed
    return {
        "passed": passed,
        "seconds": round(seconds, 1),
        **turn.content(passed),
        "failures": [job.title() for job in failed],
        "words": {
            job.title(): job.words.replace(f"{ROOT}/", "")[:4000] if job.failed else "not run in time"
            for job in failed
        },
        **{suite: summary(suite, jobs) for suite in SUITES},
    }


def main() -> None:
    """Runs the jobs; only a whole run is written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--only", default=",".join(SUITES), help="suites, with commas between")
    parser.add_argument("--filter", default="", help="a regular expression of the names of the tests to run")
    parser.add_argument("--turn", type=int, help="instead of the one after the last")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := [name for name in chosen if name not in SUITES]:
        sys.exit(f"gpu_test.py: unknown suite {unknown[0]}, must be of {', '.join(SUITES)}")
    begin = time.monotonic()
    end = begin + arguments.seconds
    gpu_results.keep_bytecode()
    device = gpu_results.describe_device()
    print(device["description"], flush=True)
    recorded = gpu_results.read(device, "tests")
    number, passed = turn_to_take(recorded, device)
    turn = Turn(number if arguments.turn is None else arguments.turn, int(device["turns_in_all"]), passed)
    if not 0 <= turn.number < turn.in_all:
        sys.exit(f"gpu_test.py: turn {turn.number}, must be from 0 to {turn.in_all - 1}")
    os.environ["ONEPASS_TEST_TURN"] = str(turn.number)
    print(f"turn {turn.number} of 0 to {turn.in_all - 1}; passed before: {turn.passed}", flush=True)
    jobs = [job for job in find_jobs(chosen) if re.search(arguments.filter, job.title())]
    before = seconds_before(recorded)
    # The longest first. A group has its first one's place.
    jobs.sort(key=lambda job: (not re.search(FIRST, job.title()), -before.get(job.title(), SLOW)))
    whole, lock = chosen == list(SUITES) and not arguments.filter, threading.Lock()

    def report() -> None:
        if whole:
            with lock:
                gpu_results.write(device, "tests", content_of(jobs, time.monotonic() - begin, turn))

    alone = [job for job in jobs if job.alone]
    before_those = end - PART_ALONE * arguments.seconds * bool(alone)
    lanes = [
        Lane([job for job in jobs if not job.alone and job.lane() == lane], count, before_those, report)
        for lane, count in AT_ONCE.items()
    ]
    for lane in lanes:
        lane.join()
    Lane(alone, 1, end, report).join()
    for suite in chosen:  # where PyTorch sees no GPU, every test of the package is skipped
        own = [job for job in jobs if job.suite == suite]
        if own and all(job.skipped for job in own):
            own[0].failed = True
    report()

    failed = [job for job in jobs if job.failed or not job.ran]
    print(f"{len(jobs)} tests in {time.monotonic() - begin:.1f} s, {len(failed)} failed or not run")
    for job in failed:
        print(f"{'FAILED' if job.failed else 'not run'} {job.title()}")
    if failed or not jobs:
        sys.exit("test-gpu: failed")


if __name__ == "__main__":
    main()
