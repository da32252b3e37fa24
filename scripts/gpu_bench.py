"""The benchmark of a machine with a GPU, after scripts/gpu_build.sh: "benchmarks" of results/<device>.json.

    python3 scripts/gpu_bench.py [--seconds 440] [--only tail,block] [--filter PATTERN]
    python3 scripts/gpu_bench.py --compile FOLDER     only the rivals' compilers
    python3 scripts/gpu_bench.py --compiled FOLDER    the rest, later
    python3 scripts/gpu_bench.py --left-out           what the recorded run had no time for, added to it

Tails, their gradients, whole blocks and training steps of the four workloads of examples/, a sweep of thin
convolutions, layers of real models and convolutions in groups, by onepass, by eager PyTorch, by torch.compile
and by max-autotune, in both layouts. First all compilers fill their caches, several processes at once; then
every case is measured alone: GPU time by events, the second-level cache overwritten before each call, ways
interleaved, medians with the 10% and 90% quantiles; every result is compared in the same run. A case that
misses its target is measured twice more: the median of the three counts. What the time does not suffice for
is named in "left_out". The results are written after every case.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import gpu_results
from gpu_results import ROOT

BEGIN = time.monotonic()  # importing PyTorch counts
# Compiled kernels of this run alone, unless a folder is given.
CACHE = tempfile.TemporaryDirectory(prefix="onepass-bench-")
FOLDER = CACHE.name
for option in ("--compile", "--compiled"):
    if option in sys.argv[:-1]:
        FOLDER = os.path.abspath(sys.argv[sys.argv.index(option) + 1])
os.environ |= {
    "ONEPASS_CACHE_DIR": os.path.join(FOLDER, "onepass"),
    "TORCHINDUCTOR_CACHE_DIR": os.path.join(FOLDER, "inductor"),
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # of a process; there are many
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # whether there is a GPU is asked without touching it
}
sys.path.insert(0, str(ROOT / "python"))
gpu_results.keep_bytecode()

import torch  # noqa: E402
import torch._functorch.config  # noqa: E402
from gpu_bench_cases import MEASURES, WORKLOADS, Case, cases, is_right, settings  # noqa: E402
from gpu_bench_host import SMALL, measure_overhead, small_calls  # noqa: E402
from gpu_bench_rivals import LOG, Rivals  # noqa: E402
from gpu_timing import COMPILERS, Call, Json  # noqa: E402

import onepass  # noqa: E402

torch._functorch.config.donated_buffer = False  # a graph is gone through many times


# --- Calls on tensors too small to matter ------------------------------------------------------------


def launches_of(call: Call) -> int | None:
    """Kernels that one call puts on the GPU; None where the profiler does not work."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        call()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in names if not name.startswith(("Memset", "Memcpy"))]
    return len(kernels) if kernels else None


def measure_launches() -> Json:
    """Kernels a call of that tail takes. The profiler may slow what comes after it: this comes last."""
    with torch.no_grad():
        return {name: launches_of(call) for name, call in small_calls(False).items()}


FIRST_CALLS = """
import json, sys, time, torch, onepass
seconds = {}
for name, (tail, shape) in json.loads(sys.argv[1]).items():
    x = torch.randn(shape, device="cuda")
    w, b = torch.randn(2, shape[1], device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    onepass.functional.run(tail, x, norm_weight=w, norm_bias=b)
    torch.cuda.synchronize()
    seconds[name] = time.perf_counter() - begin
print(json.dumps(seconds))
"""


def measure_first_calls() -> Json:
    """A new process's first call of each tail: with an empty cache of kernels, and with a full one."""
    tails = json.dumps({name: (w.tail, (2, *w.shape[1:])) for name, w in WORKLOADS.items()})
    seconds: dict[str, Json] = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "ONEPASS_CACHE_DIR": cache, "PYTHONPATH": str(ROOT / "python")}
        for kind in ("empty", "full"):
            command = [sys.executable, "-c", FIRST_CALLS, tails]
            run = subprocess.run(command, env=environment, capture_output=True, text=True)
            if run.returncode != 0:
                sys.exit(f"bench-gpu: a first call fails: {run.stderr.strip().splitlines()[-1]}")
            seconds[kind] = json.loads(run.stdout.splitlines()[-1])
    return {name: {f"{kind}_cache_seconds": seconds[kind][name] for kind in seconds} for name in WORKLOADS}


# --- The run -----------------------------------------------------------------------------------------


def measured(case: Case) -> Json:
    """The entry of one case, whatever happens."""
    begin = time.monotonic()
    entry: Json = dataclasses.asdict(case)
    try:
        with settings(case):
            entry |= MEASURES[case.group](case)
            entry["passed"] = is_right(entry, case)
    except Exception as error:  # the others are measured all the same
        entry |= {"passed": False, "error": f"{type(error).__name__}: {error}"}
    gc.collect()
    torch.cuda.empty_cache()
    entry["taken_seconds"] = round(time.monotonic() - begin, 2)
    return entry


def case_of(entry: Json) -> Case:
    """What an entry is of."""
    return Case(**{field.name: entry[field.name] for field in dataclasses.fields(Case)})


def line_of(entry: Json) -> str:
    """Milliseconds and ratios."""
    if "error" in entry:
        return f"FAILED {entry['error'].splitlines()[0]}"
    ours = entry["seconds"]["onepass"]["median"]
    parts = [f"{1e3 * ours:.3f} ms"]
    parts += [
        f"{name} {timing['median'] / ours:.2f}x"
        for name, timing in entry["seconds"].items()
        if name != "onepass"
    ]
    if entry["plan"]:
        parts[0] += f" ({entry['plan']})"
    if "floor_seconds" in entry:
        parts.append(f"{ours / entry['floor_seconds']:.2f} of the floor")
    if "peak_bytes" in entry:
        peak = entry["peak_bytes"]
        parts.append(f"memory {peak['eager'] / max(peak['onepass'], 1):.2f}x less")
    return ", ".join(parts) + (
        "" if entry["passed"] else f"  WRONG {entry['differences']} {entry.get('errors', '')}"
    )


# Milliseconds that whole blocks and training steps must reach, by type or precision.
BLOCK_LIMITS = {
    "s60": {"tf32": 0.40, "ieee": 0.50, "bf16": 0.30, "fp16": 0.30},
    "s27": {"tf32": 0.30, "fast": 0.22, "ieee": 0.50, "bf16": 0.18, "fp16": 0.18},
    "s19": {"tf32": 1.7, "ieee": 5.0, "bf16": 1.2, "fp16": 1.2},
    "s61": {"tf32": 0.55, "ieee": 2.0, "bf16": 0.45, "fp16": 0.45},
}
TRAINING_LIMITS = {"s60": 2.0, "s27": 2.0, "s19": 12.0, "s61": 4.0}
MEMORY_LIMITS = {"s60": 0.10, "s27": 0.05}  # of a training step over inputs and outputs, of PyTorch's
PREDICTIONS = 1.5  # a forward's cost, and what it takes, at most that many times one another
GEOMETRIC_MEANS = {
    ("thin", "fp32"): 4.0,
    ("layer", "fp32"): 1.4,
    ("layer", "bf16"): 1.25,
    ("grouped", "fp32"): 1.4,
    ("grouped", "bf16"): 1.25,
}


class Targets:
    """What the kernels must reach, and whether they do."""

    def __init__(self) -> None:
        self.found: list[Json] = []

    def add(self, what: str, value: float | None, limit: float, at_least: bool = False) -> None:
        """One of them."""
        met = value is not None and (value >= limit if at_least else value <= limit)
        self.found.append({"what": what, "value": value, "limit": limit, "met": met})

    def add_tail(self, entry: Json, what: str, seconds: dict[str, float]) -> None:
        """A tail, or its gradients."""
        ours = seconds["onepass"]
        if entry["batch"]:
            self.add(f"{what}, batch {entry['batch']}: faster than eager", seconds["eager"] / ours, 3, True)
            return
        floors = ours / entry["floor_seconds"]
        if entry["group"] == "tail_backward":
            self.add(f"{what}: times the floor", floors, 1.5)
            return
        self.add(f"{what}: times the floor", floors, WORKLOADS[entry["workload"]].floor_factor)
        if "compile" in seconds:
            self.add(f"{what}: faster than compiled", seconds["compile"] / ours, 1.5, True)

    def add_block(self, entry: Json, what: str, seconds: dict[str, float]) -> None:
        """A whole block, or a training step."""
        name, ours = entry["workload"], 1e3 * seconds["onepass"]
        if entry["group"] == "block":
            kind = entry["precision"] if entry["dtype"] == "fp32" else entry["dtype"]
            kind = kind if entry["numerics"] == "pytorch" else entry["numerics"]
            self.add(f"{what}, {kind}: ms", ours, BLOCK_LIMITS[name][kind])
        elif entry["dtype"] == "fp32":
            self.add(f"{what}: ms", ours, TRAINING_LIMITS[name])
            if name in MEMORY_LIMITS:
                peak = entry["peak_bytes"]
                outputs = entry["output_bytes"]
                least = min(peak[other] for other in peak if other != "onepass")
                ratio = (peak["onepass"] - outputs) / (least - outputs)
                self.add(f"{what}: memory, of PyTorch's", ratio, MEMORY_LIMITS[name])

    def add_sweep(self, entries: list[Json]) -> None:
        """Never slower than the best rival, and faster on average."""
        for (group, dtype), least in GEOMETRIC_MEANS.items():
            own = [entry for entry in entries if (entry["group"], entry["dtype"]) == (group, dtype)]
            ratios = {
                f"{entry['workload']}{entry['batch'] or ''}": min(
                    timing["median"] for name, timing in entry["seconds"].items() if name != "onepass"
                )
                / entry["seconds"]["onepass"]["median"]
                for entry in own
                if "error" not in entry
            }
            if not ratios:
                continue
            worst = min(ratios, key=lambda name: ratios[name])
            self.add(f"{group} {dtype}: {worst}, faster than the best rival", ratios[worst], 0.98, True)
            mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
            self.add(f"{group} {dtype}: geometric mean over the best rivals", mean, least, True)

    def add_predictions(self, entries: list[Json]) -> None:
        """What the plans' choices rest on, by row."""
        factors: dict[str, dict[str, float]] = {}
        for entry in entries:
            found = re.search(r"^\* (\S+) +(\S+) ms predicted$", entry.get("plan", ""))
            if found and "seconds" in entry and entry["group"] != "training":
                factor = 1e3 * entry["seconds"]["onepass"]["median"] / float(found[2])
                what = case_of(entry).text()
                factors.setdefault(found[1], {})[what] = max(factor, 1 / factor)
        for row, own in sorted(factors.items()):
            worst = max(own, key=lambda what: own[what])
            what = f"{row}: prediction and time apart by, of {len(own)} cases at most for {worst}"
            self.add(what, own[worst], PREDICTIONS)


def targets(entries: list[Json], overhead: Json, first: Json, launches: Json) -> list[Json]:
    """All of them that were measured."""
    found = Targets()
    for entry in entries:
        if "error" in entry or entry["layout"] != "contiguous" or entry["cudnn_benchmark"]:
            continue
        seconds = {name: timing["median"] for name, timing in entry["seconds"].items()}
        what = f"{entry['group']} {entry['workload']} {entry['dtype']}"
        if entry["group"].startswith("tail"):
            found.add_tail(entry, what, seconds)
        elif entry["group"] in ("block", "training"):
            found.add_block(entry, what, seconds)
        elif entry["batch"] == 1:
            found.add(f"{what}, batch 1: faster than eager", seconds["eager"] / seconds["onepass"], 3, True)
    found.add_sweep(entries)
    found.add_predictions(entries)
    for kind, timings in overhead.items():
        ratio = timings["onepass"]["median"] / timings["eager"]["median"]
        found.add(f"small tensor, {kind}: times the modules", ratio, 1.2)
        if "empty" in timings and not SMALL[kind][1]:
            above = timings["onepass"]["median"] - timings["empty"]["median"]
            found.add(f"small tensor, {kind}: us of the host above an empty operator", above * 1e6, 15)
    if launches:
        found.add("small tensor: launches", launches["onepass"], 1)
    for name, seconds in first.items():
        found.add(f"first call {name}, empty cache: seconds", seconds["empty_cache_seconds"], 3)
        found.add(f"first call {name}, full cache: seconds", seconds["full_cache_seconds"], 0.05)
    return found.found


def measure_all(
    wanted: list[Case], rivals: Rivals, end: float, report: Callable[[list[Json], list[str]], None]
) -> tuple[list[Json], list[str]]:
    """The entries, and what there was no time for; `report` hears of each."""
    entries: list[Json] = []
    left_out: list[str] = []
    longest: dict[str, float] = {}  # of cases of a group
    for case in wanted:
        if time.monotonic() + longest.get(case.group, 3) > end:
            left_out.append(case.text())
            continue
        for rival in (r for r in case.rivals if r not in rivals.ready(case)):
            key = rivals.key(case, rival)
            left_out.append(f"{key}: {rivals.errors.get(key, 'no time to compile')}")
        entry = measured(dataclasses.replace(case, rivals=rivals.ready(case)))
        keys = {way: rivals.key(case, way) for way in ("onepass", *COMPILERS)}
        entry["compile_seconds"] = {r: rivals.seconds[k] for r, k in keys.items() if k in rivals.seconds}
        longest[case.group] = max(longest.get(case.group, 0), entry["taken_seconds"])
        entries.append(entry)
        print(f"{case.text()} [{entry['taken_seconds']:.1f} s]\n    {line_of(entry)}", flush=True)
        report(entries, left_out)
    return entries, left_out


def measure_misses_again(entries: list[Json], end: float) -> None:
    """Cases that miss a target are measured twice more: the median of the three counts."""
    missed = {target["what"] for target in targets(entries, {}, {}, {}) if not target["met"]}
    for i, entry in enumerate(entries):
        own = {target["what"] for target in targets([entry], {}, {}, {})}
        if not own & missed or time.monotonic() + 2 * entry["taken_seconds"] > end:
            continue
        three = [entry, measured(case_of(entry)), measured(case_of(entry))]
        if any("error" in each for each in three):
            continue
        three.sort(key=lambda each: each["seconds"]["onepass"]["median"])
        medians = [each["seconds"]["onepass"]["median"] for each in three]
        entries[i] = {**three[1], "of_three_seconds": medians, "compile_seconds": entry["compile_seconds"]}
        print(f"{case_of(entry).text()}, of three\n    {line_of(entries[i])}", flush=True)


def main() -> None:
    """Measures in order of importance until the time is up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=440)
    parser.add_argument("--only", help="groups, with commas between; nothing is written then")
    parser.add_argument("--filter", default="", help="a regular expression of cases, the same")
    parser.add_argument("--compile", help="a folder: only the rivals compile, into it")
    parser.add_argument("--compiled", help="a folder that they have compiled into")
    parser.add_argument("--left-out", action="store_true", help="of the recorded run of the same plans")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench-gpu: PyTorch sees no GPU")
    end = BEGIN + arguments.seconds
    only = set(arguments.only.split(",")) if arguments.only else {*MEASURES, "overhead", "first_calls"}
    wanted = [case for case in cases() if case.group in only and re.search(arguments.filter, case.text())]
    # By processes of their own: compilers are forked before the GPU is touched.
    device = {} if arguments.compile else gpu_results.describe_device()
    recorded = recorded_run(device) if arguments.left_out else {}
    if arguments.left_out:
        wanted, only = left_out_cases(wanted, recorded), set()
    LOG.parent.mkdir(parents=True, exist_ok=True)
    os.makedirs(os.environ["TORCHINDUCTOR_CACHE_DIR"], exist_ok=True)
    rivals = Rivals()
    if not arguments.compiled:
        rivals.compile(wanted, end if arguments.compile else BEGIN + 0.45 * arguments.seconds)
        print(f"{len(rivals.seconds)} functions compiled by rivals in {time.monotonic() - BEGIN:.1f} s")
    if arguments.compile:
        return
    if not onepass.available():
        sys.exit(f"bench-gpu: {onepass.unavailable_reason()}")
    print(device["description"], flush=True)
    gc.freeze()  # what was imported: looking through it takes longer than many a measurement
    written = not arguments.only and not arguments.filter
    run(wanted, rivals, only, device, end, recorded, written)


LEFT_OUT = ", then --left-out"  # of the command of a run that another one has completed


def recorded_run(device: dict[str, str]) -> Json:
    """The run that --left-out completes."""
    recorded: Json = gpu_results.read(device, "benchmarks")
    if not recorded or not gpu_results.belongs_to(recorded, device, "benchmarks"):
        sys.exit("bench-gpu: --left-out needs a recorded run of the same plans")
    return recorded


def left_out_cases(all_cases: list[Case], recorded: Json) -> list[Case]:
    """Those that a run has not measured, or not against each rival."""
    left_out = recorded["left_out"]
    return [
        case
        for case in all_cases
        if any(text == case.text() or text.startswith(f"{case.text()} against ") for text in left_out)
    ]


def run(
    wanted: list[Case],
    rivals: Rivals,
    only: set[str],
    device: dict[str, str],
    end: float,
    before: Json,
    written: bool,
) -> None:
    """Measures, judges, writes. What `before` has of other cases stays."""
    parts: Json = {key: before.get(key, {}) for key in ("overhead_seconds", "first_calls", "launches")}
    texts = {case.text() for case in wanted}
    kept = [entry for entry in before.get("entries", []) if case_of(entry).text() not in texts]
    command = "make bench-gpu"
    if "--compiled" in sys.argv:
        command = "scripts/gpu_bench.py --compile, then --compiled"
    if before:
        command = before["command"].removesuffix(LEFT_OUT) + LEFT_OUT

    def content(measured_now: list[Json], left_out: list[str]) -> Json:
        entries = kept + measured_now
        return {
            "passed": all(entry["passed"] for entry in entries) and bool(entries),
            "seconds": round(before.get("seconds", 0) + time.monotonic() - BEGIN, 1),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "command": command,
            "targets": targets(entries, parts["overhead_seconds"], parts["first_calls"], parts["launches"]),
            "entries": entries,
            **parts,
            "left_out": left_out,
        }

    def report(entries: list[Json], left_out: list[str]) -> None:
        if written:
            gpu_results.write(device, "benchmarks", content(entries, left_out))

    if "overhead" in only:
        parts["overhead_seconds"] = measure_overhead()
    if "first_calls" in only:
        parts["first_calls"] = measure_first_calls()
    entries, left_out = measure_all(wanted, rivals, end, report)
    measure_misses_again(entries, end)
    if "overhead" in only:
        parts["launches"] = measure_launches()
    report(entries, left_out)
    found = content(entries, left_out)
    for target in found["targets"]:
        value = "unknown" if target["value"] is None else f"{target['value']:.3g}"
        met = "met   " if target["met"] else "MISSED"
        print(f"{met} {target['what']}: {value} (limit {target['limit']})")
    for text in left_out:
        print(f"left out: {text}")
    if not found["passed"]:
        sys.exit("bench-gpu: failed")


if __name__ == "__main__":
    main()
