"""The map: problems drawn at random, each checked, timed and compared with its floor and with PyTorch.

    python3 bench/sweep [--device cuda] [--seed 1] [--count 200] [--seconds 200] [--only PATTERN] [--again]
                        [--floor 20]
    python3 bench/sweep --device cpu --threads 2 --count 40
    python3 bench/sweep --convolutions [--seed 1] [--count 200] [--seconds 200]

On a GPU several processes first compile and check every problem against fp64; then one after the other is
timed alone. Of each: GPU time with the host hidden behind a delay kernel, its floor, the time of a call, the
row and its prediction. One of --rivals problems is timed by PyTorch in all its ways (eager and torch.compile,
both layouts, cudnn.benchmark on and off), one of --rows on every row that takes it.

It is written to "sweep" of results/<device>.json after every problem; a later run measures what is missing or
was measured with other kernels. On a CPU: fp32, calls alone, against eager in both layouts.
With --convolutions PyTorch's convolutions alone are timed, for scripts/fit_costs.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

BEGIN = time.monotonic()  # importing PyTorch counts
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "python")]
FOLDER = os.environ.get("ONEPASS_SWEEP_CACHE", "")
CACHE = None if FOLDER else tempfile.TemporaryDirectory(prefix="onepass-sweep-")
FOLDER = FOLDER or CACHE.name
os.environ |= {
    "ONEPASS_CACHE_DIR": os.path.join(FOLDER, "onepass"),
    "TORCHINDUCTOR_CACHE_DIR": os.path.join(FOLDER, "inductor"),
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # of a process; there are many
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # whether there is a GPU is asked without touching it
}

import gpu_results  # noqa: E402

gpu_results.keep_bytecode()

import sweep_calls  # noqa: E402
import sweep_convolutions  # noqa: E402
import sweep_figures  # noqa: E402
import torch  # noqa: E402
from sweep_clock import CpuClock, GpuClock, digits, ratio_in, with_benchmark  # noqa: E402
from sweep_figures import Entry, Rates  # noqa: E402
from sweep_prepare import Task, prepare, prepare_all, timed_rows  # noqa: E402
from sweep_problems import Problem, draw  # noqa: E402

COMPILE_SHARE = 0.55  # of the time, for the processes that compile and check
AGAIN = 0.98  # a ratio below is measured three times


def rates_of(device: str) -> Rates:
    """A GPU's, or those that are typical of an architecture."""
    rate = torch.ops.onepass.cuda_bytes_per_second(device)
    return Rates(rate, torch.ops.onepass.cuda_tensor_flops(device))


class Sweep:
    """One run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, options.device
        self.end = BEGIN + options.seconds
        self.ready: dict[Task, Entry] = {}

    def numbers(self) -> list[int]:
        """Of the problems that are wanted."""
        wanted = range(self.options.first, self.options.first + self.options.count)
        found = [n for n in wanted if re.search(self.options.only, self.problem(n).key())]
        if self.options.floor == 0:
            return found
        device = f"cuda:{self.results.described['architecture']}"  # asked by name, the GPU is not touched
        rates = rates_of(device)
        least = 1e-6 * self.options.floor
        return [n for n in found if sweep_figures.floor_of(self.problem(n), rates).seconds >= least]

    def problem(self, number: int) -> Problem:
        """By its number."""
        return draw(self.options.seed, number, self.device)

    def has_rivals(self, number: int) -> bool:
        """Whether all ways of PyTorch are timed."""
        return self.device == "cpu" or number % self.options.rivals == 0

    def has_rows(self, number: int) -> bool:
        """Whether all rows are timed."""
        is_step = self.problem(number).group == "block_step"
        return self.device == "cuda" and not is_step and number % self.options.rows == 0

    def tasks(self, numbers: list[int]) -> list[Task]:
        """Of the processes that compile."""
        found: list[Task] = []
        for number in numbers:
            kinds = ["check"] + ["rows"] * self.has_rows(number)
            kinds += ["rivals"] * (self.has_rivals(number) and self.device == "cuda")
            found += [(self.options.seed, number, self.device, kind) for kind in kinds]
        return found

    def run(self) -> list[Entry]:
        """Prepares, measures, writes."""
        results = self.results = Results(self.device, self.options)
        numbers = [n for n in self.numbers() if not results.has(self.problem(n).key(), self.has_rivals(n))]
        if self.device == "cuda":
            until = BEGIN + COMPILE_SHARE * self.options.seconds
            self.ready = prepare_all(self.tasks(numbers), until, max(1, (os.cpu_count() or 2) - 2))
            print(f"{len(self.ready)} preparations in {time.monotonic() - BEGIN:.0f} s", flush=True)
        results.start()
        self.clock = GpuClock() if self.device == "cuda" else CpuClock()
        left_out = 0
        for number in numbers:
            if (self.device == "cuda" and not self.is_ready(number, "check")) or self.is_late():
                left_out += 1
                continue
            self.add(self.measured(number))
        # Compilers of rivals take seconds for each, even from their caches: what everyone needs comes first.
        for number in numbers:
            entry = results.by_key.get(self.problem(number).key(), {"error": "left out"})
            if self.is_ready(number, "rivals") and "error" not in entry and not self.is_late():
                self.guarded(number, entry, self.time_rivals)
                self.add(entry)
        if left_out:
            print(f"{left_out} problems are left out: the time was up")
        return results.entries()

    def is_late(self) -> bool:
        """Whether no problem may begin."""
        return time.monotonic() > self.end - 2

    def is_ready(self, number: int, what: str) -> bool:
        """Whether the other processes have done it."""
        return (self.options.seed, number, self.device, what) in self.ready

    def add(self, entry: Entry) -> None:
        """Keeps an entry and says it."""
        self.results.add(entry)
        print(sweep_figures.line_of(entry), flush=True)

    def guarded(self, number: int, entry: Entry, measure: Callable[[int, Problem, Entry], None]) -> None:
        """Fills an entry; an error is part of it: the others are measured all the same."""
        problem, begin = self.problem(number), time.monotonic()
        try:
            with sweep_calls.settings(problem):
                measure(number, problem, entry)
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        entry["taken_seconds"] = round(entry.get("taken_seconds", 0) + time.monotonic() - begin, 2)

    def measured(self, number: int) -> Entry:
        """The entry of one problem."""
        problem = self.problem(number)
        inside, outside = problem.conv.channels if problem.conv else (0, 0)
        groups = problem.conv.groups if problem.conv else 1
        entry: Entry = {
            "key": problem.key(),
            "number": number,
            "seed": self.options.seed,
            "group": problem.group,
            "kind": problem.conv.kind if problem.conv else "tail",
            "precision": problem.precision,
            "layout": problem.layout,
            "axes": [inside // groups, outside // groups] if problem.conv else [problem.slab(), problem.norm],
            "tensor_bytes": int(problem.bytes()),
            "hash": self.results.hash,
        }
        task = (self.options.seed, number, self.device, "check")
        entry |= self.ready[task] if self.device == "cuda" else prepare(task)[1]
        if "error" not in entry and not entry["right"]:
            entry["error"] = f"wrong: {entry['errors']}"
        if "error" not in entry:
            self.guarded(number, entry, self.time if self.device == "cuda" else self.time_rivals)
        return entry

    def time(self, number: int, problem: Problem, entry: Entry) -> None:
        """Ours alone, PyTorch's convolution, and every row."""
        subject = sweep_calls.Subject(problem, self.device)
        ours = subject.ours()
        floor = sweep_figures.floor_of(problem, self.results.rates)
        entry |= {"floor_seconds": digits(floor.seconds), "bound": floor.bound}
        alone = ours.backward() if problem.group == "tail_backward" else ours.step
        entry["gpu_seconds"] = self.clock.gpu_seconds(alone, problem.gradients)
        entry["call_seconds"] = self.clock.call_seconds({"": ours.step})[""]
        if problem.conv is not None:
            entry["torch_conv"] = {
                "seconds": self.clock.gpu_seconds(subject.convolution(), problem.gradients),
                "predicted": digits(sweep_calls.predicted_convolution(problem)),
            }
        rows = entry.get("rows", {})
        if self.is_ready(number, "rows"):
            del ours, subject, alone
            gc.collect()
            torch.cuda.empty_cache()
            for name in timed_rows(rows):
                rows[name]["seconds"] = digits(sweep_calls.row_seconds(problem, name))
        entry["rows"] = {name: {k: digits(v) for k, v in row.items()} for name, row in rows.items()}

    def time_rivals(self, number: int, problem: Problem, entry: Entry) -> None:
        """Calls as users make them, ours and PyTorch's."""
        subject, on_gpu = sweep_calls.Subject(problem, self.device), self.device == "cuda"
        ours = subject.ours()
        calls = {"onepass": with_benchmark(ours.step, False)}
        if on_gpu and entry["row"].startswith("PyTorch"):
            # A user who turns it on has it on for our convolutions too.
            calls["onepass, cudnn.benchmark"] = with_benchmark(ours.step, True)
        for name, model in subject.rivals(on_gpu or self.options.compilers).items():
            calls[name] = with_benchmark(model.step, False)
            if on_gpu and problem.conv is not None:
                calls[f"{name}, cudnn.benchmark"] = with_benchmark(model.step, True)
        everyone = self.clock.call_seconds(calls)
        measured = [everyone]
        if ratio_in(everyone) < AGAIN:
            best = min((n for n in everyone if "onepass" not in n), key=lambda n: everyone[n])
            few = {n: call for n, call in calls.items() if "onepass" in n or n == best}
            measured += [self.clock.call_seconds(few) for _ in range(2)]
            measured.sort(key=ratio_in)
            entry["ratios"] = [digits(ratio_in(found)) for found in measured]
        middle = measured[len(measured) // 2]
        entry["call_seconds"] = min(s for name, s in middle.items() if "onepass" in name)
        entry["torch_seconds"] = {name: s for name, s in (everyone | middle).items() if "onepass" not in name}
        entry["all_rivals"] = True


class Results:
    """ "sweep" of the device's file of results, written after every entry."""

    def __init__(self, device: str, options: argparse.Namespace) -> None:
        self.device, self.options = device, options
        if device == "cuda":
            self.described = gpu_results.describe_device()  # by a process of its own
            self.hash = self.described["device_code_hash"]
            self.content = gpu_results.read(self.described, "sweep")
        else:
            import record

            self.hash = record.source_hash()
            self.path = record.result_path(None)
            self.content = record.recorded(self.path).get("sweep", {})
        self.by_key: dict[str, Entry] = {entry["key"]: entry for entry in self.content.get("entries", [])}

    def has(self, key: str, rivals: bool) -> bool:
        """Whether this library has measured it, and against PyTorch where that is wanted."""
        entry = self.by_key.get(key, {})
        done = entry.get("hash") == self.hash and (entry.get("all_rivals") or not rivals)
        return not self.options.again and (done or ("error" in entry and entry["hash"] == self.hash))

    def start(self) -> None:
        """After the other processes: now the GPU may be touched."""
        if self.device == "cuda":
            self.rates = rates_of("cuda")
            print(self.described["description"], flush=True)

    def entries(self) -> list[Entry]:
        """All that this library has measured."""
        return [entry for entry in self.by_key.values() if entry["hash"] == self.hash]

    def add(self, entry: Entry) -> None:
        """Keeps one. Figures of other kernels leave the file."""
        self.by_key[entry["key"]] = entry
        content: dict[str, Any] = {
            "torch": torch.__version__,
            "seeds": sorted({entry["seed"] for entry in self.entries()}),
            "note": self.options.note,
            "entries": self.entries(),
        }
        if self.device == "cuda":
            content["cudnn"] = torch.backends.cudnn.version()
            content["rates"] = {
                "bytes_per_second": self.rates.bytes_per_second,
                "tensor_flops": self.rates.tensor_flops,
            }
            gpu_results.write(self.described, "sweep", content)
        else:
            import record

            content["threads"] = torch.get_num_threads()
            content["source_hash"] = self.hash
            whole = record.recorded(self.path) | {"sweep": content}
            self.path.write_text(json.dumps(whole, indent=1) + "\n")


def measure_convolutions(options: argparse.Namespace) -> None:
    """Adds to "convolutions" of the device's file of results."""
    described = gpu_results.describe_device()
    entries = gpu_results.read(described, "convolutions").get("entries", [])
    known = {(entry["of"], entry["seed"], entry["number"]) for entry in entries}
    end, clock = BEGIN + options.seconds, GpuClock()
    found = sweep_convolutions.measure(options.seed, options.count, end, clock.hidden[False].seconds)
    entries += [entry for entry in found if (entry["of"], entry["seed"], entry["number"]) not in known]
    content = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "entries": entries}
    gpu_results.write(described, "convolutions", content)
    print(f"{len(found)} convolutions in {time.monotonic() - BEGIN:.0f} s, {len(entries)} in all")


def summarise(entries: list[Entry], device: str) -> None:
    """The worst ones with their reasons, then the lines of the table."""
    good = [entry for entry in entries if "error" not in entry]
    print(f"\n{len(good)} problems measured, {len(entries) - len(good)} failed. The worst:")
    for entry in sweep_figures.worst_entries(good):
        print(f"{sweep_figures.line_of(entry)}\n    {sweep_figures.reason(entry)}")
    lines = sweep_figures.gpu_lines(good) if device == "cuda" else sweep_figures.cpu_lines(good)
    print()
    for line in lines:
        print(line.text())
    errors = [e for entry in good if (e := sweep_figures.prediction_error(entry)) is not None]
    if errors:
        off = sorted(max(error, 1 / error) for error in errors)
        tenth = off[int(0.9 * len(off))]
        print(f"predictions are off by {statistics.median(off):.2f}x, a tenth of them by {tenth:.2f}x")
    for entry in entries:
        if "error" in entry:
            print(sweep_figures.line_of(entry))


def main() -> None:
    """Measures until the time is up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first problem")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--only", default="", help="a regular expression of problems")
    parser.add_argument("--floor", type=float, default=0, help="on a GPU: only floors of so many us and more")
    parser.add_argument("--again", action="store_true", help="also what was measured before")
    parser.add_argument("--rivals", type=int, default=3, help="one of so many is timed by all of PyTorch")
    parser.add_argument("--rows", type=int, default=3, help="one of so many is timed on all rows")
    parser.add_argument("--compilers", action="store_true", help="torch.compile on a CPU too")
    parser.add_argument("--threads", type=int, default=2, help="of a CPU")
    parser.add_argument("--note", default="", help="what a reader of the results should know")
    parser.add_argument("--convolutions", action="store_true", help="PyTorch's alone")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("sweep: PyTorch sees no GPU")
    if options.device == "cpu" and options.floor:
        sys.exit("sweep: --floor is for a GPU: a CPU's problems have no floor")
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    os.makedirs(os.environ["TORCHINDUCTOR_CACHE_DIR"], exist_ok=True)
    if options.convolutions:
        return measure_convolutions(options)
    entries = Sweep(options).run()
    summarise(entries, options.device)
    if any("error" in entry for entry in entries):
        sys.exit("sweep: some problems failed")


if __name__ == "__main__":
    main()
