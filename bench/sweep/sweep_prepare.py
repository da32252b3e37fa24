"""What several processes do at once, before anything is timed: they compile, and check every problem."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable

import sweep_calls
import torch
from sweep_figures import Entry
from sweep_problems import Problem, draw

CLOSE = 4.0  # rows predicted to take more times the least are not timed

Task = tuple[int, int, str, str]  # seed, number, device, what


def prepare(task: Task) -> tuple[Task, Entry]:
    """Compiles what a problem needs, and checks it. Never raises."""
    seed, number, device, what = task
    problem = draw(seed, number, device)
    found: Entry = {}
    for attempt in range(3):
        try:
            with sweep_calls.settings(problem):
                found = PREPARATIONS[what](problem, device)
            break
        except torch.OutOfMemoryError as error:  # of the other processes' tensors
            found = {"error": f"OutOfMemoryError: {str(error).splitlines()[0]}"}
            time.sleep(1 + attempt)
        except Exception as error:
            words = str(error).splitlines() or [""]
            found = {"error": f"{type(error).__name__}: {words[0]}"}
            break
        finally:
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    return task, found


def check(problem: Problem, device: str) -> Entry:
    """The result, the plan, and every row with its prediction or its refusal."""
    found = sweep_calls.Subject(problem, device).check()
    found["row"], found["predicted_seconds"] = sweep_calls.plan_of(problem, device)
    if device == "cuda" and problem.group != "block_step":
        rows = sweep_calls.rows_of(problem)
        found["rows"] = {name: row for name, row in rows.items() if "predicted" in row}
        if problem.conv is not None:
            families = ("thin_", "gemm_")
            refused = {
                n: row["refusal"]
                for n, row in rows.items()
                if n.startswith(families) and n not in found["rows"]
            }
            found["refusals"] = refused
    return found


def compile_rows(problem: Problem, device: str) -> Entry:
    """The kernels of rows that will be timed."""
    for name in timed_rows(sweep_calls.rows_of(problem)):
        sweep_calls.build_row(problem, name)
    return {}


def compile_rivals(problem: Problem, device: str) -> Entry:
    """By torch.compile, in both layouts."""
    rivals = sweep_calls.Subject(problem, device).rivals(compilers=True)
    for name, model in rivals.items():
        if name.startswith("compile"):
            model.step()
    return {}


PREPARATIONS: dict[str, Callable[[Problem, str], Entry]] = {
    "check": check,
    "rows": compile_rows,
    "rivals": compile_rivals,
}


def timed_rows(rows: dict[str, Entry]) -> list[str]:
    """Those whose prediction is not hopeless."""
    taken = {name: row["predicted"] for name, row in rows.items() if "predicted" in row}
    return [name for name, seconds in taken.items() if seconds <= CLOSE * min(taken.values())]


def start_quietly() -> None:
    """Of a process that compiles: compilers' words go to a file."""
    log = open(os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "log"), "a")  # noqa: SIM115
    os.dup2(log.fileno(), sys.stderr.fileno())


def prepare_all(tasks: list[Task], end: float, processes: int) -> dict[Task, Entry]:
    """What was ready in time. Processes are copies of this one, which has not touched the GPU yet."""
    done: dict[Task, Entry] = {}
    if not tasks:
        return done
    # Alone each process would take ten seconds for it.
    importlib.import_module("torch._inductor.compile_fx")
    # Configurations that were timed while others ran are timed again by the process that measures.
    torch._inductor.config.autotune_local_cache = False
    gc.collect()
    gc.freeze()
    pool = multiprocessing.get_context("fork").Pool(processes, start_quietly)
    results = pool.imap_unordered(prepare, tasks)
    try:
        for _ in tasks:
            task, found = results.next(timeout=max(0.1, end - time.monotonic()))
            done[task] = found
    except multiprocessing.TimeoutError:
        pass
    pool.terminate()
    pool.join()
    return done
