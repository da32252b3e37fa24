"""The benchmark of a machine with a GPU, after scripts/gpu_build.sh: "benchmarks" of results/<device>.json.

    python3 scripts/gpu_bench.py [--seconds 280] [--only tail,block]

Tails, their gradients, whole blocks and training steps of the four workloads of examples/, by onepass, by
eager PyTorch, by torch.compile and by max-autotune. GPU time by events, the second-level cache overwritten
before each call, ways interleaved, medians with the 10% and 90% quantiles; every result is compared in the
same run. What the time does not suffice for is named in "left_out": the rivals' compilers take most of it.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import gpu_results
from gpu_results import ROOT

# Compiled kernels of this run alone: the first call of each is measured.
CACHE = tempfile.TemporaryDirectory(prefix="onepass-bench-")
os.environ["ONEPASS_CACHE_DIR"] = CACHE.name
sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import onepass  # noqa: E402
from onepass.optimizing import model_file  # noqa: E402
from onepass.optimizing.measure import peak_bytes, timing_of  # noqa: E402

DEVICE = torch.device("cuda")
SECONDS_OF_A_WAY = 0.25
LEAST_ROUNDS, MOST_ROUNDS = 7, 60
QUEUE_CYCLES = 400_000  # 0.2 ms in which the host gets ahead of the GPU: launches are not what is timed

Call = Callable[[], Any]
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A workload's tail: everything after its convolution."""

    tail: str
    shape: tuple[int, ...]  # of the convolution's output
    eager: Callable[[Tensor, Tensor, Tensor], Tensor]
    floor_factor: float  # how close to the floor its forward must come


WORKLOADS = {
    "s60": Workload(
        "swish | group_norm(4) | hardswish",
        (128, 16, 31, 63, 63),
        lambda x, w, b: F.hardswish(F.group_norm(torch.sigmoid(x) * x, 4, w, b)),
        1.25,
    ),
    "s19": Workload(
        "gelu | group_norm(8)", (128, 64, 258, 258), lambda x, w, b: F.group_norm(F.gelu(x), 8, w, b), 1.25
    ),
    "s61": Workload(
        "relu | group_norm(8)", (16, 128, 34, 34, 34), lambda x, w, b: F.group_norm(F.relu(x), 8, w, b), 1.35
    ),
    "s27": Workload(
        "hardswish | group_norm(4) | mean",
        (1024, 16, 13, 29, 29),
        lambda x, w, b: torch.mean(F.group_norm(F.hardswish(x), 4, w, b), dim=[2, 3, 4]),
        1.25,
    ),
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COMPILERS = {"compile": None, "max-autotune": "max-autotune-no-cudagraphs"}


def memory_format(layout: str, rank: int) -> torch.memory_format:
    """Of a tensor of this rank."""
    if layout == "contiguous":
        return torch.contiguous_format
    return {4: torch.channels_last, 5: torch.channels_last_3d}[rank]


# --- Time and memory ---------------------------------------------------------------------------------


class Stopwatch:
    """Seconds of GPU time of one call, with a cold second-level cache and the launches queued."""

    def __init__(self) -> None:
        l2_bytes = torch.cuda.get_device_properties(DEVICE).L2_cache_size
        self.flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device=DEVICE)

    def seconds(self, call: Call) -> float:
        """One call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        torch.cuda._sleep(QUEUE_CYCLES)
        start.record()
        result = call()
        end.record()
        end.synchronize()
        del result
        return start.elapsed_time(end) / 1e3


def time_ways(ways: dict[str, Call]) -> dict[str, Json]:
    """Each way once a round, in a new order each round."""
    watch = Stopwatch()
    for call in ways.values():
        watch.seconds(call)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    order, shuffle = list(ways), random.Random(0).shuffle
    gc.collect()
    gc.disable()
    begin = time.monotonic()
    for rounds in range(1, MOST_ROUNDS + 1):
        shuffle(order)
        for name in order:
            taken[name].append(watch.seconds(ways[name]))
        if rounds >= LEAST_ROUNDS and time.monotonic() - begin > SECONDS_OF_A_WAY * len(ways):
            break
    gc.enable()
    return {name: dataclasses.asdict(timing_of(seconds)) for name, seconds in taken.items()}


def first_calls(ways: dict[str, Call]) -> tuple[dict[str, Any], Json]:
    """The result of each way, and the seconds its first call took: compilation, loading, planning.

    A rival that cannot run leaves `ways`, and its words take the place of its seconds.
    """
    results, seconds = {}, {}
    for name, call in list(ways.items()):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        try:
            results[name] = call()
            torch.cuda.synchronize()
        except Exception as error:
            if name not in COMPILERS:
                raise
            seconds[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            del ways[name]
            continue
        seconds[name] = time.perf_counter() - begin
    return results, seconds


def seconds_to_move(moved: float, like: Tensor) -> float:
    """The least time for so many bytes, at the rate of copying a tensor of this size."""
    target = torch.empty_like(like)
    copied = 2 * like.numel() * like.element_size()
    return moved * time_ways({"copy": lambda: target.copy_(like)})["copy"]["median"] / copied


# --- Results compared --------------------------------------------------------------------------------


def largest(x: Tensor) -> float:
    """The largest absolute value, NaN where there is one."""
    return x.abs().max().item() if x.numel() else 0.0


def differences(results: dict[str, tuple[Tensor, ...]]) -> Json:
    """How far each way is from eager, relative to eager's largest value, at most over its results."""
    found: Json = {}
    for name, tensors in results.items():
        if name != "eager":
            pairs = zip(tensors, results["eager"], strict=True)
            ratios = [
                largest(ours.float() - theirs.float()) / max(largest(theirs), 1e-30) for ours, theirs in pairs
            ]
            found[name] = max(ratios, key=lambda ratio: (ratio != ratio, ratio))
    return found


# How far two honest results may be apart, of the largest value: roundings of one kernel, long sums of one,
# and convolutions in TF32, whose gradients PyTorch need not compute twice alike.
FP32_DIFFERENCES = {"tail": 2e-5, "batch_1": 2e-5, "tail_backward": 1e-4, "block": 1e-3, "training": 5e-3}
LOW_DIFFERENCES = {"tail": 4, "batch_1": 4, "tail_backward": 4, "block": 8, "training": 16}  # roundings


def is_close(difference: float, group: str, dtype: torch.dtype) -> bool:
    """Whether a result may differ so much from eager's."""
    if dtype == torch.float32:
        return difference <= FP32_DIFFERENCES[group]
    return difference <= LOW_DIFFERENCES[group] * torch.finfo(dtype).eps


# --- What is measured --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the results."""

    group: str  # tail, tail_backward, batch_1, block, training
    workload: str
    dtype: str = "fp32"
    layout: str = "contiguous"
    rivals: tuple[str, ...] = ("eager", "compile")
    cudnn_benchmark: bool = False

    def text(self) -> str:
        """For the log."""
        what = f"{self.group} {self.workload} {self.dtype} {self.layout}"
        benchmark = ", cudnn.benchmark" if self.cudnn_benchmark else ""
        return f"{what}{benchmark} against {' '.join(self.rivals)}"


def compiled(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """By a rival's compiler; eager stays as it is."""
    return function if name == "eager" else torch.compile(function, mode=COMPILERS[name], dynamic=False)


def tail_ways(case: Case) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The workload's tail by onepass and by each rival."""
    workload = WORKLOADS[case.workload]

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return onepass.functional.run(workload.tail, x, norm_weight=w, norm_bias=b)

    return {"onepass": ours, **{name: compiled(workload.eager, name) for name in case.rivals}}


def tail_tensors(case: Case, batch: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What the convolution gives, and the norm's weight and bias."""
    torch.manual_seed(1)
    shape = WORKLOADS[case.workload].shape
    shape = (batch or shape[0], *shape[1:])
    dtype = TYPES[case.dtype]
    x = torch.randn(shape, dtype=dtype, device=DEVICE)
    x = x.contiguous(memory_format=memory_format(case.layout, x.dim()))
    return x, *(torch.randn(shape[1], dtype=dtype, device=DEVICE) for _ in range(2))


def exact_errors(case: Case) -> Json:
    """Of four samples against fp64: ours and eager's, forward and gradients."""
    workload, tensors = WORKLOADS[case.workload], tail_tensors(case, 4)
    direction = torch.randn_like(workload.eager(*tensors))

    def computed(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        output = function(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, direction.to(dtype))]

    exact = computed(workload.eager, torch.float64)
    found: Json = {"ours": {}, "eager": {}}
    ways = {"ours": tail_ways(case)["onepass"], "eager": workload.eager}
    for name, function in ways.items():
        values = computed(function, TYPES[case.dtype])
        for what, value, right in zip(("y", "dx", "dweight", "dbias"), values, exact):
            found[name][what] = largest(value.double() - right) / max(largest(right), 1e-30)
    return found


def is_exact(errors: Json, dtype: torch.dtype) -> bool:
    """At most twice PyTorch's error, with a rounding of slack where PyTorch happens to have none."""
    slack = torch.finfo(dtype).eps
    return all(errors["ours"][what] <= 2 * errors["eager"][what] + slack for what in errors["ours"])


def is_right(entry: Json, case: Case) -> bool:
    """By fp64 where it was computed. Else by eager, unless a compiler's result is as far from eager's: eager
    rounds between its stages.
    """
    if "errors" in entry:
        return is_exact(entry["errors"], TYPES[case.dtype])
    found = entry["differences"]
    close = is_close(found["onepass"], case.group, TYPES[case.dtype])
    return close or any(found["onepass"] <= found.get(name, 0.0) for name in COMPILERS)


def measure_tail(case: Case) -> Json:
    """Forward without gradients."""
    x, w, b = tail_tensors(case, 1 if case.group == "batch_1" else None)
    functions = tail_ways(case)
    with torch.no_grad():
        ways = {name: lambda f=f: f(x, w, b) for name, f in functions.items()}
        results, first = first_calls(ways)
        written = results["eager"].numel() * x.element_size()
        entry = {
            "shape": list(x.shape),
            "first_call_seconds": first,
            "differences": differences({name: (result,) for name, result in results.items()}),
            "errors": exact_errors_with_grad(case),
        }
        del results
        if case.group == "batch_1":
            ways |= {f"{name} in a graph": graph_of(call) for name, call in ways.items()}
        entry["seconds"] = time_ways(ways)
        entry["floor_seconds"] = seconds_to_move(x.numel() * x.element_size() + written, x)
    return entry


def exact_errors_with_grad(case: Case) -> Json:
    """exact_errors where gradients are off."""
    with torch.enable_grad():
        return exact_errors(case)


def graph_of(call: Call) -> Call:
    """The call as a CUDA graph: what is left when launches cost nothing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure_tail_backward(case: Case) -> Json:
    """The gradients of input, weight and bias, from a graph that is kept."""
    leaves = [t.requires_grad_() for t in tail_tensors(case)]
    x = leaves[0]
    outputs, forward = first_calls({name: lambda f=f: f(*leaves) for name, f in tail_ways(case).items()})
    direction = torch.randn_like(outputs["eager"])
    ways = {
        name: lambda y=y: torch.autograd.grad(y, leaves, direction, retain_graph=True)
        for name, y in outputs.items()
    }
    results, first = first_calls(ways)
    entry = {
        "shape": list(x.shape),
        "first_call_seconds": {"forward": forward, "backward": first},
        "differences": differences(results),
        "errors": exact_errors(case),
    }
    del results
    entry["seconds"] = time_ways(ways)
    read = x.numel() + direction.numel()
    entry["floor_seconds"] = seconds_to_move((read + x.numel()) * x.element_size(), x.detach())
    return entry


@functools.cache
def loaded(workload: str) -> tuple[nn.Module, Tensor]:
    """Its model and its input, drawn once: the host takes seconds for the largest."""
    file = model_file.load(str(ROOT / "examples" / f"{workload}.py"))
    (x,) = file.inputs(DEVICE, 42, None)
    return file.build(DEVICE, 42), x


def block_ways(case: Case) -> tuple[dict[str, nn.Module], Tensor]:
    """The workload's model, fused and as each rival has it, and its input."""
    model, x = loaded(case.workload)
    dtype = TYPES[case.dtype]
    layout = memory_format(case.layout, x.dim())
    model = copy.deepcopy(model).to(dtype).to(memory_format=layout)
    x = x.to(dtype).contiguous(memory_format=layout).detach()
    ways: dict[str, Any] = {"onepass": onepass.fuse(copy.deepcopy(model))}
    ways |= {name: compiled(copy.deepcopy(model), name) for name in case.rivals}
    return ways, x


def measure_block(case: Case) -> Json:
    """The whole model without gradients."""
    models, x = block_ways(case)
    with torch.no_grad():
        ways = {name: lambda m=m: m(x) for name, m in models.items()}
        results, first = first_calls(ways)
        entry = {
            "shape": list(x.shape),
            "first_call_seconds": first,
            "differences": differences({name: (result,) for name, result in results.items()}),
        }
        del results
        entry["peak_bytes"] = {name: peak_bytes(call, DEVICE) for name, call in ways.items()}
        entry["seconds"] = time_ways(ways)
    return entry


def measure_training(case: Case) -> Json:
    """Forward and backward of the whole model, its input's gradient wanted too."""
    models, x = block_ways(case)
    x.requires_grad_()
    with torch.no_grad():
        direction = torch.randn_like(models["eager"](x))

    def step(model: nn.Module) -> tuple[Tensor, ...]:
        leaves = [x, *model.parameters()]
        return torch.autograd.grad(model(x), leaves, direction)

    ways = {name: lambda m=m: step(m) for name, m in models.items()}
    results, first = first_calls(ways)
    entry = {"shape": list(x.shape), "first_call_seconds": first, "differences": differences(results)}
    del results
    entry["peak_bytes"] = {name: peak_bytes(call, DEVICE) for name, call in ways.items()}
    entry["seconds"] = time_ways(ways)
    return entry


MEASURES: dict[str, Callable[[Case], Json]] = {
    "tail": measure_tail,
    "batch_1": measure_tail,
    "tail_backward": measure_tail_backward,
    "block": measure_block,
    "training": measure_training,
}


def cases() -> Iterator[Case]:
    """What matters most first: the time may not suffice for all."""
    for dtype in TYPES:
        for name in WORKLOADS:
            yield Case("tail", name, dtype)
    for name in ("s19", "s61"):
        yield Case("batch_1", name)
    for dtype in TYPES:
        for name in WORKLOADS:
            yield Case("tail_backward", name, dtype)
    for name in WORKLOADS:
        yield Case("block", name)
    for name in WORKLOADS:
        yield Case("training", name)
    for layout, dtype, benchmark in itertools.product(("contiguous", "channels_last"), TYPES, (False, True)):
        if (layout, dtype, benchmark) != ("contiguous", "fp32", False):  # as above
            for name in WORKLOADS:
                yield Case("block", name, dtype, layout, ("eager",), benchmark)
    for dtype in TYPES:
        for name in WORKLOADS:
            yield Case("tail", name, dtype, "channels_last", ("eager",))
            yield Case("training", name, dtype, "channels_last", ("eager",))
    for dtype in TYPES:
        for name in WORKLOADS:
            yield Case("tail", name, dtype, rivals=("eager", "max-autotune"))
    for name in WORKLOADS:
        yield Case("block", name, rivals=("eager", "max-autotune"))
    for name in WORKLOADS:
        yield Case("training", name, "bf16")
        yield Case("block", name, "fp32", "channels_last")
        yield Case("block", name, "bf16")


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


def host_seconds(call: Call, count: int = 300) -> float:
    """Of one call of many, waited for at the end."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def small_calls(gradients: bool) -> dict[str, Call]:
    """A tail of 512 elements by onepass and by the modules it replaces."""
    modules = nn.Sequential(nn.SiLU(), nn.GroupNorm(4, 16), nn.Hardswish()).to(DEVICE)
    block = onepass.Block("swish | group_norm(4) | hardswish", channels=16, device=DEVICE)
    x = torch.randn(2, 16, 4, 4, device=DEVICE, requires_grad=gradients)
    direction = torch.randn_like(x)

    def call_of(model: nn.Module) -> Call:
        if not gradients:
            return lambda: model(x)
        return lambda: torch.autograd.grad(model(x), [x, *model.parameters()], direction)

    return {"onepass": call_of(block), "eager": call_of(modules)}


def measure_overhead() -> Json:
    """Seconds of the host, where tensors are too small to matter."""
    found: Json = {}
    for kind, gradients in (("inference", False), ("training", True)):
        with torch.set_grad_enabled(gradients):
            calls = small_calls(gradients)
            taken: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(12):
                for name, call in calls.items():
                    taken[name].append(host_seconds(call))
            found[kind] = {
                name: dataclasses.asdict(timing_of(seconds[2:])) for name, seconds in taken.items()
            }
    return found


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
    torch._dynamo.reset()
    torch.backends.cudnn.benchmark = case.cudnn_benchmark
    entry: Json = dataclasses.asdict(case)
    try:
        entry |= MEASURES[case.group](case)
        entry["passed"] = is_right(entry, case)
    except Exception as error:  # the others are measured all the same
        entry |= {"passed": False, "error": f"{type(error).__name__}: {error}"}
    finally:
        torch.backends.cudnn.benchmark = False
    gc.collect()
    torch.cuda.empty_cache()
    return entry


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
    if "floor_seconds" in entry:
        parts.append(f"{ours / entry['floor_seconds']:.2f} of the floor")
    if "peak_bytes" in entry:
        peak = entry["peak_bytes"]
        parts.append(f"memory {peak['eager'] / max(peak['onepass'], 1):.2f}x less")
    return ", ".join(parts) + (
        "" if entry["passed"] else f"  WRONG {entry['differences']} {entry.get('errors', '')}"
    )


def targets(entries: list[Json], overhead: Json, first: Json, launches: Json) -> list[Json]:
    """What the kernels must reach, and whether they do."""
    found: list[Json] = []

    def add(what: str, value: float | None, limit: float, at_least: bool = False) -> None:
        met = value is not None and (value >= limit if at_least else value <= limit)
        found.append({"what": what, "value": value, "limit": limit, "met": met})

    for entry in entries:
        if "error" in entry or entry["layout"] != "contiguous":
            continue
        seconds = {name: timing["median"] for name, timing in entry["seconds"].items()}
        what = f"{entry['group']} {entry['workload']} {entry['dtype']}"
        if entry["group"] == "tail" and "compile" in seconds:
            factor = WORKLOADS[entry["workload"]].floor_factor
            add(f"{what}: times the floor", seconds["onepass"] / entry["floor_seconds"], factor)
            add(f"{what}: faster than compiled", seconds["compile"] / seconds["onepass"], 1.5, True)
        elif entry["group"] == "tail_backward":
            add(f"{what}: times the floor", seconds["onepass"] / entry["floor_seconds"], 1.5)
        elif entry["group"] == "batch_1":
            add(f"{what}: faster than eager", seconds["eager"] / seconds["onepass"], 3, True)
    for kind, timings in overhead.items():
        ratio = timings["onepass"]["median"] / timings["eager"]["median"]
        add(f"small tensor, {kind}: times the modules", ratio, 1.2)
    if launches:
        add("small tensor: launches", launches["onepass"], 1)
    for name, seconds in first.items():
        add(f"first call {name}, empty cache: seconds", seconds["empty_cache_seconds"], 3)
        add(f"first call {name}, full cache: seconds", seconds["full_cache_seconds"], 0.05)
    return found


def main() -> None:
    """Measures in order of importance until the time is up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument("--only", help="groups, with commas between; nothing is written then")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench-gpu: PyTorch sees no GPU")
    if not onepass.available():
        sys.exit(f"bench-gpu: {onepass.unavailable_reason()}")
    torch._functorch.config.donated_buffer = False  # a graph is gone through many times
    only = set(arguments.only.split(",")) if arguments.only else {*MEASURES, "overhead", "first_calls"}
    device = gpu_results.describe_device()
    print(device["description"], flush=True)

    begin = time.monotonic()
    overhead = measure_overhead() if "overhead" in only else {}
    first = measure_first_calls() if "first_calls" in only else {}
    entries, left_out = [], []
    longest: dict[str, float] = {}  # of cases of a group with the same rivals
    for case in cases():
        if case.group not in only:
            continue
        kind = f"{case.group} {case.rivals}"
        started = time.monotonic()
        if started - begin + longest.get(kind, 5) > arguments.seconds:
            left_out.append(case.text())
            continue
        entries.append(measured(case))
        taken = time.monotonic() - started
        longest[kind] = max(longest.get(kind, 0), taken)
        print(f"{case.text()} [{taken:.1f} s]\n    {line_of(entries[-1])}", flush=True)

    launches = measure_launches() if "overhead" in only else {}
    reached = targets(entries, overhead, first, launches)
    for target in reached:
        value = "unknown" if target["value"] is None else f"{target['value']:.3g}"
        print(
            f"{'met   ' if target['met'] else 'MISSED'} {target['what']}: {value} (limit {target['limit']})"
        )
    passed = all(entry["passed"] for entry in entries) and bool(entries)
    if not arguments.only:
        content = {
            "passed": passed,
            "seconds": round(time.monotonic() - begin, 1),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "command": "make bench-gpu",
            "targets": reached,
            "entries": entries,
            "overhead_seconds": overhead,
            "launches": launches,
            "first_calls": first,
            "left_out": left_out,
        }
        print(f"wrote {gpu_results.write(device, 'benchmarks', content)}")
    for text in left_out:
        print(f"left out, no time: {text}")
    if not passed:
        sys.exit("bench-gpu: failed")


if __name__ == "__main__":
    main()
