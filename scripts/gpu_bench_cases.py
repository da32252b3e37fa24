"""What the benchmark of a GPU measures: a case is a line of `cases()`, a group one of `MEASURES`."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from gpu_bench_layers import GROUPED_LAYERS, REAL_LAYERS, THIN_LAYERS, loaded_layer
from gpu_results import ROOT
from gpu_timing import (
    COMPILERS,
    DEVICE,
    GRADIENT_CYCLES,
    QUEUE_CYCLES,
    Call,
    Json,
    first_calls,
    seconds_to_move,
    time_ways,
)
from torch import Tensor, nn

import onepass
from onepass.optimizing import model_file
from onepass.optimizing.measure import peak_bytes


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


def memory_format(layout: str, rank: int) -> torch.memory_format:
    """Of a tensor of this rank."""
    if layout == "contiguous":
        return torch.contiguous_format
    return {4: torch.channels_last, 5: torch.channels_last_3d}[rank]


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
    batch: int = 0  # as many samples as the workload has
    numerics: str = "pytorch"

    def text(self) -> str:
        """For the log."""
        benchmark = ", cudnn.benchmark" if self.cudnn_benchmark else ""
        precision = "" if self.precision == "tf32" else f", {self.precision}"
        batch = f", batch {self.batch}" if self.batch else ""
        numerics = "" if self.numerics == "pytorch" else f", {self.numerics}"
        settings = f"{batch}{benchmark}{precision}{numerics}"
        return f"{self.group} {self.workload} {self.dtype} {self.layout}{settings}"

    def names(self) -> tuple[str, ...]:
        """Of all ways."""
        return ("onepass", *self.rivals)


# --- Results compared --------------------------------------------------------------------------------


def largest(x: Tensor) -> float:
    """The largest absolute value, NaN where there is one."""
    return x.abs().max().item() if x.numel() else 0.0


def difference(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], kinks: tuple[Tensor, ...] = ()) -> float:
    """How far results are apart, relative to the largest value of each, at most over them; `kinks` is what
    at_kinks gave.
    """
    ratios = []
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        wide = torch.promote_types(other.dtype, torch.float32)
        distance = mine.to(wide) - other.to(wide)
        if kinks and index == 0:
            distance = distance.masked_fill(kinks[index], 0)
        elif kinks:
            distance = (distance.abs() - kinks[index]).relu()
        ratios.append(largest(distance) / max(largest(other), 1e-30))
    return max(ratios, key=lambda ratio: (ratio != ratio, ratio))


# Of an input: twenty roundings; in 16 bits what a swish of 4 may be off.
NUDGE = 2e-6
LOW_NUDGE = 2e-5
KINKS = 1e-5  # of a gradient's elements, at most

Gradients = tuple[Tensor, ...]  # of a tail's input, and of its weight and bias, which are sums


def at_kinks(exact: Gradients, nudged: list[Gradients], limit: float) -> Gradients:
    """What an honest result may do at kinks of an activation, where it may have either derivative: a mask of
    the input's elements whose gradient jumps where inputs are nudged (the others move by about the nudge),
    and how far each sum then moves.
    """
    bound = limit * max(largest(exact[0]), 1e-30)
    mask = torch.stack([(other[0] - exact[0]).abs() > bound for other in nudged]).any(0)
    sums = zip(exact[1:], *(other[1:] for other in nudged), strict=True)
    return mask, *(torch.stack([(other - here).abs() for other in others]).amax(0) for here, *others in sums)


# How far two honest results may be apart, of the largest value: roundings of one kernel, long sums of one,
# and convolutions in TF32, whose gradients PyTorch need not compute twice alike.
FP32_DIFFERENCES = {
    "tail": 2e-5,
    "tail_backward": 1e-4,
    "block": 1e-3,
    "thin": 1e-3,
    "layer": 1e-3,
    "grouped": 1e-3,
    "training": 5e-3,
}
LOW_DIFFERENCES = {  # roundings
    "tail": 4,
    "tail_backward": 4,
    "block": 8,
    "thin": 8,
    "layer": 8,
    "grouped": 8,
    "training": 16,
}


def allowed(group: str, dtype: torch.dtype) -> float:
    """How far a result may be from one that is right."""
    if dtype == torch.float32:
        return FP32_DIFFERENCES[group]
    return LOW_DIFFERENCES[group] * torch.finfo(dtype).eps


def is_right(entry: Json, case: Case) -> bool:
    """By fp64 where it was computed: not twice as far from it as PyTorch and a rounding, and no further than
    allowed, but in training, where PyTorch's TF32 may be further off than that. (Where an element lies at a
    kink, the last alone: its derivative is in the sums of its slab, and so in each gradient of it.) Else by
    the rivals: eager rounds between its stages, and its convolution need not be the compilers', so that one
    has to agree.
    """
    dtype = ALL_TYPES[case.dtype]
    limit = allowed(case.group, dtype)
    if "errors" in entry:
        ours, eager = entry["errors"]["onepass"], entry["errors"]["eager"]
        near = ours <= limit or case.group == "training"
        if near and entry.get("at_kinks"):
            return True
        return near and ours <= 2 * eager + torch.finfo(dtype).eps
    return any(found <= limit for found in entry["differences"].values())


# --- What is measured --------------------------------------------------------------------------------


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
    nudged: Callable[[float], Gradients] | None = None  # the results in fp64, of inputs so far beside
    limit: float = math.inf  # what has a larger error is looked at again without elements at kinks
    agreement: float = -1.0  # a rival this near is enough: nothing is computed in fp64
    output_bytes: int = 0  # of outputs and gradients, which every way has

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
        if self.exactly is not None and min(entry["differences"].values()) > self.agreement:
            exact = self.exactly()
            entry["errors"] = {name: difference(found, exact) for name, found in self.results.items()}
            if self.nudged is not None and entry["errors"]["onepass"] > self.limit:
                nudge = NUDGE if ours[0].dtype == torch.float32 else LOW_NUDGE
                kinks = at_kinks(exact, [self.nudged(nudge), self.nudged(-nudge)], self.limit)
                entry["at_kinks"] = int(kinks[0].sum())
                if entry["at_kinks"] <= KINKS * kinks[0].numel():
                    entry["errors"] = {n: difference(r, exact, kinks) for n, r in self.results.items()}
        self.results = {}
        return entry


def compiled(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """By a rival's compiler; eager stays as it is."""
    return function if name not in COMPILERS else torch.compile(function, mode=COMPILERS[name], dynamic=False)


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
    shape = (case.batch or shape[0], *shape[1:])
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
        if case.batch:
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
    eager, keeps_size = WORKLOADS[case.workload].eager, WORKLOADS[case.workload].keeps_size
    with torch.no_grad():
        direction = torch.randn_like(eager(*leaves))
    if keeps_size:  # in the case's layout: PyTorch's group_norm gives channels before space whatever comes
        direction = direction.contiguous(memory_format=memory_format(case.layout, direction.dim()))
    outputs, forward = first_calls(
        {name: lambda f=f: f(*leaves) for name, f in tail_ways(case, names).items()}
    )
    ways = {
        name: lambda y=y: torch.autograd.grad(y, leaves, direction, retain_graph=True)
        for name, y in outputs.items()
    }
    results, first = first_calls(ways)

    def exactly(aside: Tensor | float = 0) -> tuple[Tensor, ...]:
        doubled = [leaf.detach().double() for leaf in leaves]
        doubled[0] = doubled[0] + aside
        doubled = [leaf.requires_grad_() for leaf in doubled]
        return torch.autograd.grad(eager(*doubled), doubled, direction.double())

    def nudged(distance: float) -> Gradients:
        # By signs of its own for each element: a norm takes away what all elements have in common.
        return exactly(torch.where(direction > 0, distance, -distance).double())

    return Started(
        leaves[0].detach(),
        ways,
        results,
        {"forward": forward, "backward": first},
        exactly,
        lambda: tail_plan(case, leaves[0], backward=True),
        nudged if keeps_size else None,
        allowed(case.group, leaves[0].dtype),
    )


def measure_tail_backward(case: Case) -> Json:
    """The gradients of input, weight and bias."""
    started = start_tail_backward(case, case.names())
    x = started.x
    given = x.numel() if WORKLOADS[case.workload].keeps_size else 0
    entry = started.entry()
    entry["seconds"] = time_ways(started.ways, GRADIENT_CYCLES)
    entry["floor_seconds"] = seconds_to_move((2 * x.numel() + given) * x.element_size(), x)
    return entry


@functools.lru_cache(maxsize=2)
def loaded(workload: str) -> tuple[nn.Module, Tensor]:
    """Its model and its input, drawn on the GPU: the host takes seconds for the largest."""
    if workload not in WORKLOADS:
        return loaded_layer(workload, DEVICE)
    file = model_file.load(str(ROOT / "examples" / f"{workload}.py"))
    with DEVICE:
        (x,) = file.inputs(DEVICE, 42, None).leaves
    return file.build(DEVICE, 42), x


@dataclasses.dataclass
class Model:
    """A model by one way, and its input as that way likes it."""

    module: Callable[[Tensor], Tensor]
    x: Tensor

    def __call__(self) -> Tensor:
        """Its output."""
        return self.module(self.x)


def block_ways(case: Case, names: tuple[str, ...]) -> dict[str, Model]:
    """The workload's model by these ways; "channels_last" is eager in that order."""
    module, x = loaded(case.workload)
    dtype = ALL_TYPES[case.dtype]
    ways = {}
    for name in names:
        layout = memory_format("channels_last" if name == "channels_last" else case.layout, x.dim())
        own = copy.deepcopy(module).to(dtype).to(memory_format=layout)
        given = x[: case.batch or None].to(dtype).contiguous(memory_format=layout).detach()
        fused = name == "onepass"
        ways[name] = Model(onepass.fuse(own, numerics=case.numerics) if fused else compiled(own, name), given)
    return ways


def block_plan(models: dict[str, Model]) -> str:
    """What the fused model has run."""
    return "; ".join(block.plan for block in onepass.report(models["onepass"].module).fused)


def start_block(case: Case, names: tuple[str, ...]) -> Started:
    """The whole model without gradients."""
    models = block_ways(case, names)
    ways: dict[str, Call] = dict(models)
    results, first = first_calls(ways)
    results = {name: (y,) for name, y in results.items()}
    return Started(models[names[0]].x, ways, results, first, plan=lambda: block_plan(models))


def measure_block(case: Case) -> Json:
    """The whole model without gradients."""
    with torch.no_grad():
        return with_memory(start_block(case, case.names()), QUEUE_CYCLES)


def start_training(case: Case, names: tuple[str, ...]) -> Started:
    """Forward and backward of the whole model, its input's gradient wanted too."""
    models = block_ways(case, names)
    with torch.no_grad():
        torch.manual_seed(2)
        direction = torch.randn_like(models[names[0]]())
    for model in models.values():
        model.x.requires_grad_()

    def step(model: Model) -> tuple[Tensor, ...]:
        leaves = [model.x, *model.module.parameters()]
        return torch.autograd.grad(model(), leaves, direction)

    def exactly() -> tuple[Tensor, ...]:
        module = copy.deepcopy(loaded(case.workload)[0]).to(ALL_TYPES[case.dtype]).double()
        exact = Model(module, models[names[0]].x.detach().double().requires_grad_())
        return torch.autograd.grad(exact(), [exact.x, *module.parameters()], direction.double())

    ways = {name: lambda m=m: step(m) for name, m in models.items()}
    results, first = first_calls(ways)
    return Started(
        models[names[0]].x,
        ways,
        results,
        first,
        exactly,
        lambda: block_plan(models),
        agreement=allowed(case.group, ALL_TYPES[case.dtype]),
        output_bytes=direction.nbytes + sum(gradient.nbytes for gradient in results[names[0]]),
    )


def measure_training(case: Case) -> Json:
    """Forward and backward of the whole model."""
    return with_memory(start_training(case, case.names()), GRADIENT_CYCLES)


def with_memory(started: Started, queue_cycles: int) -> Json:
    """Time and memory."""
    entry = started.entry()
    entry["peak_bytes"] = {name: peak_bytes(call, DEVICE) for name, call in started.ways.items()}
    entry["output_bytes"] = started.output_bytes
    entry["seconds"] = time_ways(started.ways, queue_cycles)
    return entry


MEASURES: dict[str, Callable[[Case], Json]] = {
    "tail": measure_tail,
    "tail_backward": measure_tail_backward,
    "block": measure_block,
    "thin": measure_block,
    "layer": measure_block,
    "grouped": measure_block,
    "training": measure_training,
}
STARTS: dict[str, Callable[[Case, tuple[str, ...]], Started]] = {
    "tail": start_tail,
    "tail_backward": start_tail_backward,
    "block": start_block,
    "thin": start_block,
    "layer": start_block,
    "grouped": start_block,
    "training": start_training,
}
GRADIENTS = ("tail_backward", "training")


def cases() -> Iterator[Case]:
    """What matters most first: the time may not suffice for all."""
    everyone = ("eager", "compile", "max-autotune")
    two, layouts = ("eager", "compile"), ("eager", "channels_last", "compile")
    for group, dtype, name in itertools.product(("tail", "tail_backward"), TYPES, WORKLOADS):
        yield Case(group, name, dtype, rivals=everyone if group == "tail" and dtype == "fp32" else two)
    for name in WORKLOADS:
        yield Case("block", name, rivals=everyone)
        yield Case("block", name, precision="ieee", rivals=("eager",))
    yield Case("block", "s27", rivals=("eager",), numerics="fast")
    for dtype, name in itertools.product(("bf16", "fp16"), WORKLOADS):
        yield Case("block", name, dtype, rivals=two if dtype == "bf16" else ("eager",))
    for name in WORKLOADS:
        yield Case("training", name)
    for name in ("s19", "s61"):
        yield Case("tail", name, batch=1)
    for name, batch in itertools.product(THIN, (1, 8, 32)):
        yield Case("thin", name, batch=batch, rivals=layouts)
    for name in THIN_LAYERS:
        yield Case("thin", name, rivals=layouts, cudnn_benchmark=True)
    for dtype, name in itertools.product(TYPES, REAL_LAYERS):
        yield Case("layer", name, dtype, rivals=layouts, cudnn_benchmark=True)
    for dtype, name in itertools.product(TYPES, GROUPED_LAYERS):
        yield Case("grouped", name, dtype, rivals=layouts, cudnn_benchmark=True)
    for name in WORKLOADS:
        yield Case("training", name, "bf16")
    for group, dtype in itertools.product(("block", "tail", "training", "tail_backward"), ("bf16", "fp32")):
        for name in WORKLOADS:
            more = group == "block" and dtype == "bf16"
            yield Case(group, name, dtype, "channels_last", everyone if more else two)
    for name in WORKLOADS:
        yield Case("block", name, rivals=("eager", "channels_last"), cudnn_benchmark=True)
