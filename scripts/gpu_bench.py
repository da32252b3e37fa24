"""The benchmark of a machine with a GPU, after scripts/gpu_build.sh: "benchmarks" of results/<device>.json.

    python3 scripts/gpu_bench.py [--seconds 240] [--only tail,block] [--filter PATTERN]
    python3 scripts/gpu_bench.py --compile FOLDER     only the rivals' compilers
    python3 scripts/gpu_bench.py --compiled FOLDER    the rest, later

Tails, their gradients, whole blocks and training steps of the four workloads of examples/, by onepass, by
eager PyTorch, by torch.compile and by max-autotune, in both layouts. First the rivals' compilers fill their
caches, several processes at once; then every case is measured alone: GPU time by events, the second-level
cache overwritten before each call, ways interleaved, medians with the 10% and 90% quantiles; every result is
compared in the same run. What the time does not suffice for is named in "left_out". The results are written
after every case.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import fcntl
import functools
import gc
import itertools
import json
import os
import pathlib
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gpu_results
from gpu_results import ROOT

BEGIN = time.monotonic()  # importing PyTorch counts
# Compiled kernels of this run alone, ours and, unless a folder is given, the rivals'.
CACHE = tempfile.TemporaryDirectory(prefix="onepass-bench-")
os.environ["ONEPASS_CACHE_DIR"] = CACHE.name
for option in ("--compile", "--compiled"):
    if option in sys.argv[:-1]:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath(sys.argv[sys.argv.index(option) + 1])
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(CACHE.name, "inductor"))
os.environ |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # of a process; there are many
sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import onepass  # noqa: E402
from onepass.optimizing import model_file  # noqa: E402
from onepass.optimizing.measure import peak_bytes, timing_of  # noqa: E402

torch._functorch.config.donated_buffer = False  # a graph is gone through many times

LOG = ROOT / "build" / "gpu" / "rivals.log"  # what their compilers say
DEVICE = torch.device("cuda")
SECONDS_OF_A_WAY = 0.12
LEAST_ROUNDS, MOST_ROUNDS = 7, 60
SECONDS_OF_FIRST_CALLS = 25  # two processes that import PyTorch
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
    keeps_size: bool = True  # the output has the input's


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
        keeps_size=False,
    ),
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALL_TYPES = TYPES | {"fp16": torch.float16}
THIN = ("s60", "s27")  # whose convolution runs with the block
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


def difference(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    """How far results are apart, relative to the largest value of each, at most over them."""
    ratios = []
    for mine, other in zip(ours, theirs, strict=True):
        wide = torch.promote_types(other.dtype, torch.float32)
        distance = mine.to(wide) - other.to(wide)
        ratios.append(largest(distance) / max(largest(other), 1e-30))
    return max(ratios, key=lambda ratio: (ratio != ratio, ratio))


# How far two honest results may be apart, of the largest value: roundings of one kernel, long sums of one,
# and convolutions in TF32, whose gradients PyTorch need not compute twice alike.
FP32_DIFFERENCES = {"tail": 2e-5, "batch_1": 2e-5, "tail_backward": 1e-4, "block": 1e-3, "training": 5e-3}
LOW_DIFFERENCES = {"tail": 4, "batch_1": 4, "tail_backward": 4, "block": 8, "training": 16}  # roundings


def allowed(group: str, dtype: torch.dtype) -> float:
    """How far a result may be from one that is right."""
    if dtype == torch.float32:
        return FP32_DIFFERENCES[group]
    return LOW_DIFFERENCES[group] * torch.finfo(dtype).eps


def is_right(entry: Json, case: Case) -> bool:
    """By fp64 where it was computed: no further from it than allowed, and not twice as far as PyTorch and a
    rounding. Else by the rivals: eager rounds between its stages, and its convolution need not be the
    compilers', so that one of them has to agree.
    """
    dtype = ALL_TYPES[case.dtype]
    limit = allowed(case.group, dtype)
    if "errors" in entry:
        ours, eager = entry["errors"]["onepass"], entry["errors"]["eager"]
        return ours <= limit and ours <= 2 * eager + torch.finfo(dtype).eps
    return any(found <= limit for found in entry["differences"].values())


# --- What is measured --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the results."""

    group: str  # of MEASURES
    workload: str
    dtype: str = "fp32"
    layout: str = "contiguous"
    rivals: tuple[str, ...] = ("eager", "compile")
    cudnn_benchmark: bool = False
    precision: str = "tf32"  # of fp32 convolutions

    def text(self) -> str:
        """For the log."""
        benchmark = ", cudnn.benchmark" if self.cudnn_benchmark else ""
        precision = "" if self.precision == "tf32" else f", {self.precision}"
        return f"{self.group} {self.workload} {self.dtype} {self.layout}{benchmark}{precision}"

    def names(self) -> tuple[str, ...]:
        """Of all ways."""
        return ("onepass", *self.rivals)


@contextlib.contextmanager
def settings(case: Case) -> Iterator[None]:
    """PyTorch's, as the case wants them."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32
    torch._dynamo.reset()
    cudnn.benchmark, cudnn.allow_tf32 = case.cudnn_benchmark, case.precision == "tf32"
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32 = before


@dataclasses.dataclass
class Started:
    """The ways of a case, and what their first calls gave."""

    x: Tensor  # the input
    ways: dict[str, Call]
    results: dict[str, tuple[Tensor, ...]]
    first: Json  # seconds
    exactly: Callable[[], tuple[Tensor, ...]] | None = None  # the results in fp64
    plan: Callable[[], str] = str  # what onepass runs

    def entry(self) -> Json:
        """What is known before anything is timed. Lets the results go."""
        ours = self.results["onepass"]
        entry: Json = {
            "shape": list(self.x.shape),
            "plan": self.plan(),
            "first_call_seconds": self.first,
            "differences": {
                name: difference(ours, theirs) for name, theirs in self.results.items() if name != "onepass"
            },
        }
        if self.exactly is not None:
            exact = self.exactly()
            entry["errors"] = {name: difference(found, exact) for name, found in self.results.items()}
        self.results = {}
        return entry


def compiled(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """By a rival's compiler; eager stays as it is."""
    return function if name == "eager" else torch.compile(function, mode=COMPILERS[name], dynamic=False)


def tail_ways(case: Case, names: tuple[str, ...]) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The workload's tail by these ways."""
    workload = WORKLOADS[case.workload]

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return onepass.functional.run(workload.tail, x, norm_weight=w, norm_bias=b)

    return {name: ours if name == "onepass" else compiled(workload.eager, name) for name in names}


def tail_tensors(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """What the convolution gives, and the norm's weight and bias."""
    torch.manual_seed(1)
    shape = WORKLOADS[case.workload].shape
    shape = (1 if case.group == "batch_1" else shape[0], *shape[1:])
    dtype = ALL_TYPES[case.dtype]
    x = torch.randn(shape, dtype=dtype, device=DEVICE)
    x = x.contiguous(memory_format=memory_format(case.layout, x.dim()))
    return x, *(torch.randn(shape[1], dtype=dtype, device=DEVICE) for _ in range(2))


def tail_plan(case: Case, x: Tensor, *, backward: bool = False) -> str:
    """The strategy of the workload's tail."""
    layout = memory_format(case.layout, x.dim())
    tail = WORKLOADS[case.workload].tail
    text = onepass.explain(tail, x.shape, dtype=x.dtype, layout=layout, device=DEVICE, backward=backward)
    found = re.search(r"^\* (\S+)", text, re.MULTILINE)
    return found.group(1) if found else text


def start_tail(case: Case, names: tuple[str, ...]) -> Started:
    """Forward without gradients."""
    tensors = tail_tensors(case)
    ways = {name: lambda f=f: f(*tensors) for name, f in tail_ways(case, names).items()}
    results, first = first_calls(ways)

    def exactly() -> tuple[Tensor, ...]:
        return (WORKLOADS[case.workload].eager(*(t.double() for t in tensors)),)

    return Started(
        tensors[0],
        ways,
        {name: (y,) for name, y in results.items()},
        first,
        exactly,
        lambda: tail_plan(case, tensors[0]),
    )


def measure_tail(case: Case) -> Json:
    """Forward without gradients."""
    with torch.no_grad():
        started = start_tail(case, case.names())
        x = started.x
        written = started.results["eager"][0].numel() * x.element_size()
        entry = started.entry()
        ways = dict(started.ways)
        if case.group == "batch_1":
            ways |= {f"{name} in a graph": graph_of(call) for name, call in started.ways.items()}
        entry["seconds"] = time_ways(ways)
        entry["floor_seconds"] = seconds_to_move(x.numel() * x.element_size() + written, x)
    return entry


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


def start_tail_backward(case: Case, names: tuple[str, ...]) -> Started:
    """The gradients of input, weight and bias, from a graph that is kept."""
    leaves = [t.requires_grad_() for t in tail_tensors(case)]
    eager = WORKLOADS[case.workload].eager
    with torch.no_grad():
        direction = torch.randn_like(eager(*leaves))
    outputs, forward = first_calls(
        {name: lambda f=f: f(*leaves) for name, f in tail_ways(case, names).items()}
    )
    ways = {
        name: lambda y=y: torch.autograd.grad(y, leaves, direction, retain_graph=True)
        for name, y in outputs.items()
    }
    results, first = first_calls(ways)

    def exactly() -> tuple[Tensor, ...]:
        doubled = [leaf.detach().double().requires_grad_() for leaf in leaves]
        return torch.autograd.grad(eager(*doubled), doubled, direction.double())

    return Started(
        leaves[0].detach(),
        ways,
        results,
        {"forward": forward, "backward": first},
        exactly,
        lambda: tail_plan(case, leaves[0], backward=True),
    )


def measure_tail_backward(case: Case) -> Json:
    """The gradients of input, weight and bias."""
    started = start_tail_backward(case, case.names())
    x = started.x
    given = x.numel() if WORKLOADS[case.workload].keeps_size else 0
    entry = started.entry()
    entry["seconds"] = time_ways(started.ways)
    entry["floor_seconds"] = seconds_to_move((2 * x.numel() + given) * x.element_size(), x)
    return entry


@functools.cache
def loaded(workload: str) -> tuple[nn.Module, Tensor]:
    """Its model and its input, drawn on the GPU: the host takes seconds for the largest."""
    file = model_file.load(str(ROOT / "examples" / f"{workload}.py"))
    with DEVICE:
        (x,) = file.inputs(DEVICE, 42, None)
    return file.build(DEVICE, 42), x


def block_ways(case: Case, names: tuple[str, ...]) -> tuple[nn.Module, dict[str, nn.Module], Tensor]:
    """The workload's model as it is and by these ways, and its input."""
    model, x = loaded(case.workload)
    dtype = ALL_TYPES[case.dtype]
    layout = memory_format(case.layout, x.dim())
    model = copy.deepcopy(model).to(dtype).to(memory_format=layout)
    x = x.to(dtype).contiguous(memory_format=layout).detach()
    ways = {}
    for name in names:
        own = copy.deepcopy(model)
        ways[name] = onepass.fuse(own) if name == "onepass" else compiled(own, name)
    return model, ways, x


def block_plan(models: dict[str, nn.Module]) -> str:
    """What the fused model has run."""
    return "; ".join(block.plan for block in onepass.report(models["onepass"]).fused)


def start_block(case: Case, names: tuple[str, ...]) -> Started:
    """The whole model without gradients."""
    _, models, x = block_ways(case, names)
    ways = {name: lambda m=m: m(x) for name, m in models.items()}
    results, first = first_calls(ways)
    results = {name: (y,) for name, y in results.items()}
    return Started(x, ways, results, first, plan=lambda: block_plan(models))


def measure_block(case: Case) -> Json:
    """The whole model without gradients."""
    with torch.no_grad():
        return with_memory(start_block(case, case.names()))


def start_training(case: Case, names: tuple[str, ...]) -> Started:
    """Forward and backward of the whole model, its input's gradient wanted too."""
    model, models, x = block_ways(case, names)
    with torch.no_grad():
        direction = torch.randn_like(model(x))
    x.requires_grad_()

    def step(model: nn.Module) -> tuple[Tensor, ...]:
        leaves = [x, *model.parameters()]
        return torch.autograd.grad(model(x), leaves, direction)

    ways = {name: lambda m=m: step(m) for name, m in models.items()}
    results, first = first_calls(ways)
    return Started(x, ways, results, first, plan=lambda: block_plan(models))


def measure_training(case: Case) -> Json:
    """Forward and backward of the whole model."""
    return with_memory(start_training(case, case.names()))


def with_memory(started: Started) -> Json:
    """Time and memory."""
    entry = started.entry()
    entry["peak_bytes"] = {name: peak_bytes(call, DEVICE) for name, call in started.ways.items()}
    entry["seconds"] = time_ways(started.ways)
    return entry


MEASURES: dict[str, Callable[[Case], Json]] = {
    "tail": measure_tail,
    "batch_1": measure_tail,
    "tail_backward": measure_tail_backward,
    "block": measure_block,
    "training": measure_training,
}
STARTS: dict[str, Callable[[Case, tuple[str, ...]], Started]] = {
    "tail": start_tail,
    "batch_1": start_tail,
    "tail_backward": start_tail_backward,
    "block": start_block,
    "training": start_training,
}
INFERENCE = ("tail", "batch_1", "block")  # without gradients


def cases() -> Iterator[Case]:
    """What matters most first: the time may not suffice for all."""
    everyone = ("eager", "compile", "max-autotune")
    for group, dtype, name in itertools.product(("tail", "tail_backward"), TYPES, WORKLOADS):
        yield Case(group, name, dtype, rivals=everyone if group == "tail" else everyone[:2])
    for name in WORKLOADS:
        yield Case("block", name, rivals=everyone)
    for name in THIN:
        yield Case("block", name, precision="ieee")
        yield Case("block", name, "fp16", rivals=("eager",))
    for name in WORKLOADS:
        yield Case("block", name, "bf16")
    for dtype, name in itertools.product(TYPES, WORKLOADS):
        yield Case("training", name, dtype, rivals=everyone if dtype == "fp32" else everyone[:2])
    for name in ("s19", "s61"):
        yield Case("block", name, precision="ieee")
        yield Case("batch_1", name)
    for group, dtype in itertools.product(("block", "tail", "training", "tail_backward"), ("bf16", "fp32")):
        for name in WORKLOADS:
            more = group in ("block", "tail") and dtype == "bf16"
            yield Case(group, name, dtype, "channels_last", everyone if more else everyone[:2])
    for name in WORKLOADS:
        yield Case("block", name, rivals=("eager",), cudnn_benchmark=True)


# --- The rivals' compilers ---------------------------------------------------------------------------


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
            with settings(case), torch.set_grad_enabled(case.group not in INFERENCE):
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
        """What the cases need, several processes at once, the default compiler first."""
        waiting: queue.SimpleQueue[tuple[Case, str]] = queue.SimpleQueue()
        for rival, case in itertools.product(COMPILERS, wanted):
            if rival in case.rivals:
                waiting.put((case, rival))
        count = max(1, min(8, (os.cpu_count() or 2) // 2))
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
                [sys.executable, __file__, "--prepare"],
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
            for _ in range(9):
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
        if entry["group"] == "tail":
            factor = WORKLOADS[entry["workload"]].floor_factor
            add(f"{what}: times the floor", seconds["onepass"] / entry["floor_seconds"], factor)
            if "compile" in seconds:
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
        keys = {rival: rivals.key(case, rival) for rival in COMPILERS}
        entry["compile_seconds"] = {r: rivals.seconds[k] for r, k in keys.items() if k in rivals.seconds}
        longest[case.group] = max(longest.get(case.group, 0), entry["taken_seconds"])
        entries.append(entry)
        print(f"{case.text()} [{entry['taken_seconds']:.1f} s]\n    {line_of(entry)}", flush=True)
        report(entries, left_out)
    return entries, left_out


def main() -> None:
    """Measures in order of importance until the time is up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--only", help="groups, with commas between; nothing is written then")
    parser.add_argument("--filter", default="", help="a regular expression of cases, the same")
    parser.add_argument("--compile", help="a folder: only the rivals compile, into it")
    parser.add_argument("--compiled", help="a folder that they have compiled into")
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench-gpu: PyTorch sees no GPU")
    if arguments.prepare:
        prepare_lines()
        return
    end = BEGIN + arguments.seconds
    only = set(arguments.only.split(",")) if arguments.only else {*MEASURES, "overhead", "first_calls"}
    wanted = [case for case in cases() if case.group in only and re.search(arguments.filter, case.text())]
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
    device = gpu_results.describe_device()
    print(device["description"], flush=True)
    run(wanted, rivals, only, device, end, written=not arguments.only and not arguments.filter)


def run(
    wanted: list[Case], rivals: Rivals, only: set[str], device: dict[str, str], end: float, written: bool
) -> None:
    """Measures, judges, writes."""
    parts: Json = {"overhead_seconds": {}, "first_calls": {}, "launches": {}}

    def content(entries: list[Json], left_out: list[str]) -> Json:
        return {
            "passed": all(entry["passed"] for entry in entries) and bool(entries),
            "seconds": round(time.monotonic() - BEGIN, 1),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "command": "make bench-gpu",
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
    entries, left_out = measure_all(wanted, rivals, end, report)
    if "first_calls" in only and time.monotonic() + SECONDS_OF_FIRST_CALLS > end:
        left_out.append("first calls")
    elif "first_calls" in only:
        parts["first_calls"] = measure_first_calls()
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
