"""A drawn problem as calls: by onepass, by PyTorch in every way it has, and in fp64 to judge both."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_bench_layers import Mean
from sweep_problems import LAYOUTS, Problem
from torch import Tensor, nn

import onepass
from onepass import _cpu, _cuda_explain
from onepass._description import describe

Call = Callable[[], Any]
GPU = "cuda"  # whose plans are asked for
TYPES = {
    "tf32": torch.float32,
    "strict": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "swish": nn.SiLU,
    "mish": nn.Mish,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "elu": nn.ELU,
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "hardswish": nn.Hardswish,
    "relu6": nn.ReLU6,
    "hardsigmoid": nn.Hardsigmoid,
}
CONVOLUTIONS = {
    False: (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    True: (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
}
# How far a result may be from fp64, of the largest value. Twice PyTorch's own distance is right too.
LIMITS = {"tf32": 1e-3, "strict": 2e-5, "bf16": 8 * 2**-8, "fp16": 8 * 2**-11}


def memory_format(layout: str, rank: int) -> torch.memory_format:
    """Of tensors with so many dimensions of space."""
    if layout == "contiguous" or rank == 1:
        return torch.contiguous_format
    return {2: torch.channels_last, 3: torch.channels_last_3d}[rank]


def numerics(problem: Problem) -> str:
    """The policy that fuse gets."""
    return "strict" if problem.precision == "strict" else "pytorch"


@contextlib.contextmanager
def settings(problem: Problem) -> Iterator[None]:
    """PyTorch's precision, as the problem wants it."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32
    cudnn.benchmark, cudnn.allow_tf32 = False, problem.precision != "strict"
    try:
        with torch.set_grad_enabled(problem.gradients):
            yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32 = before


def build(problem: Problem) -> nn.Sequential:
    """The modules that a user would write."""
    conv, channels = problem.conv, problem.convolved()[1]
    stages: list[nn.Module] = []
    if conv is not None:
        more = {"output_padding": conv.output_padding} if conv.transposed else {}
        stages.append(
            CONVOLUTIONS[conv.transposed][problem.rank - 1](
                *conv.channels,
                conv.kernel,
                conv.stride,
                conv.padding,
                groups=conv.groups,
                bias=conv.bias,
                **more,
            )
        )
    stages += [ACTIVATIONS[problem.before]()] if problem.before else []
    if problem.norm:
        norm = nn.GroupNorm(problem.norm, channels)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, 0.0, 0.5)
        stages.append(norm)
    stages += [ACTIVATIONS[problem.after]()] if problem.after else []
    stages += [Mean(problem.rank)] if problem.mean else []
    return nn.Sequential(*stages)


@dataclasses.dataclass
class Model:
    """A module, its input and the direction of its gradients, in one layout."""

    module: Callable[[Tensor], Tensor]
    parameters: list[Tensor]
    x: Tensor
    direction: Tensor | None  # none: no gradients are wanted

    def step(self) -> Any:
        """The call of a user: the result, or the gradients."""
        if self.direction is None:
            return self.module(self.x)
        return torch.autograd.grad(self.module(self.x), [self.x, *self.parameters], self.direction)

    def backward(self) -> Call:
        """The gradients alone, of a graph that is kept."""
        output = self.module(self.x)
        leaves = [self.x, *self.parameters]
        return lambda: torch.autograd.grad(output, leaves, self.direction, retain_graph=True)


class Subject:
    """A problem with its tensors on a device."""

    def __init__(self, problem: Problem, device: str) -> None:
        self.problem, self.device = problem, torch.device(device)
        torch.manual_seed(0)
        dtype = TYPES[problem.precision]
        with self.device:
            self.module = build(problem).to(dtype)
            self.x = torch.randn(problem.shape, dtype=dtype)
            self.direction = torch.randn(problem.output(), dtype=dtype) if problem.gradients else None

    def model(self, layout: str, change: Callable[[nn.Module], Any] = lambda module: module) -> Model:
        """A copy in this layout, by this way."""
        order = memory_format(layout, self.problem.rank)
        module = copy.deepcopy(self.module).to(memory_format=order)
        x = self.x.contiguous(memory_format=order).detach().requires_grad_(self.problem.gradients)
        direction = self.direction
        if direction is not None and not self.problem.mean:
            direction = direction.contiguous(memory_format=order)
        return Model(change(module), list(module.parameters()), x, direction)

    def ours(self) -> Model:
        """By onepass, in the problem's layout."""
        policy = numerics(self.problem)
        return self.model(self.problem.layout, lambda module: onepass.fuse(module, numerics=policy))

    def rivals(self, compilers: bool) -> dict[str, Model]:
        """PyTorch, in both layouts."""
        layouts = LAYOUTS if self.problem.rank > 1 else LAYOUTS[:1]
        ways = {f"eager {layout}": self.model(layout) for layout in layouts}
        if compilers:
            torch._dynamo.reset()  # it gives up on a function that it has compiled for eight modules
            ways |= {f"compile {layout}": self.model(layout, compiled) for layout in layouts}
        return ways

    def convolution(self) -> Call:
        """PyTorch's convolution alone, or its gradients: what the framework's costs predict."""
        order = memory_format(self.problem.layout, self.problem.rank)
        module = copy.deepcopy(self.module[0]).to(memory_format=order)
        x = self.x.contiguous(memory_format=order).detach().requires_grad_(self.problem.gradients)
        if not self.problem.gradients:
            return lambda: module(x)
        output = module(x)
        leaves, direction = [x, *module.parameters()], torch.randn_like(output)
        return lambda: torch.autograd.grad(output, leaves, direction, retain_graph=True)

    # --- Correctness ---

    def check(self) -> dict[str, Any]:
        """Errors of both against fp64, of the first and the last sample; their gradients alone are not zero,
        so that those of parameters are theirs.
        """
        count = self.problem.shape[0]
        picked = sorted({0, count - 1})
        if self.direction is not None:
            kept = self.direction[picked].clone()
            self.direction.zero_()
            self.direction[picked] = kept
        exact = self._exactly(picked)
        errors: dict[str, list[float]] = {}
        for name, model in (("onepass", self.ours()), ("eager", self.model(self.problem.layout))):
            found = model.step()
            found = found if isinstance(found, tuple) else (found,)
            errors[name] = [_error(found[0], exact[0], picked, self.problem.gradients)]
            errors[name] += [_error(mine, other) for mine, other in zip(found[1:], exact[1:], strict=True)]
        limit, eps = LIMITS[self.problem.precision], torch.finfo(self.x.dtype).eps
        right = all(
            ours <= max(limit, 2 * eager + eps) for ours, eager in zip(errors["onepass"], errors["eager"])
        )
        return {"errors": {name: max(found) for name, found in errors.items()}, "right": right}

    def _exactly(self, picked: list[int]) -> tuple[Tensor, ...]:
        """The result in fp64 of these samples, or the gradients."""
        module = copy.deepcopy(self.module).double()
        x = self.x[picked].double()
        if self.direction is None:
            return (module(x),)
        x.requires_grad_()
        direction = self.direction[picked].double()
        return torch.autograd.grad(module(x), [x, *module.parameters()], direction)


def _error(found: Tensor, exact: Tensor, picked: list[int] | None = None, alone: bool = False) -> float:
    """The largest distance, of the largest value. `alone`: samples that were not picked must be zero."""
    scale = max(exact.abs().max().item(), 1e-30)
    if picked is None:
        return _worst((found.double() - exact).abs().max().item() / scale)
    worst = _worst((found[picked].double() - exact).abs().max().item() / scale)
    if alone and found.shape[0] > 2:
        worst = max(worst, _worst(found[1:-1].abs().max().item() / scale))
    return worst


def _worst(error: float) -> float:
    return error if error == error else float("inf")


def compiled(module: nn.Module) -> Any:
    """By torch.compile."""
    return torch.compile(module, dynamic=False)


# --- What the plan says ---


def rows_of(problem: Problem) -> dict[str, dict[str, Any]]:
    """Every row of a GPU with its prediction or its refusal: of a block, a tail, or a tail's gradients."""
    mode = mode_of(problem)
    if not mode:
        return {}
    layout = "nhwc" if problem.layout == "channels_last" else "nchw"
    backward = problem.group == "tail_backward"
    text = torch.ops.onepass.rows(problem.block(), problem.shape, mode, layout, GPU, backward)
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        name, _, said = line.partition("\t")
        if said.startswith("no: "):
            found[name] = {"refusal": said.removeprefix("no: ")}
        else:
            found[name] = {"predicted": float(said)}
    return found


def mode_of(problem: Problem) -> str:
    """As in a problem string; empty where PyTorch rounds as no row does."""
    dtype, policy = TYPES[problem.precision], numerics(problem)
    if problem.conv is None:
        return _cuda_explain._numerics.mode_of(dtype, _cuda_explain._numerics.tail_words(policy))
    conv = describe(problem.block()).conv
    layout = "nhwc" if problem.layout == "channels_last" else "nchw"
    mode, _ = _cuda_explain._mode(policy, conv, problem.shape, dtype, layout, GPU, False)
    return mode


def predicted_convolution(problem: Problem) -> float:
    """Seconds of PyTorch's convolution alone, or of its gradients."""
    layout = "nhwc" if problem.layout == "channels_last" else "nchw"
    how = (problem.conv.text(problem.rank), problem.shape, mode_of(problem) or "tf32", layout, GPU)
    if not problem.gradients:
        return torch.ops.onepass.cuda_framework_seconds(*how)
    return torch.ops.onepass.cuda_framework_backward_seconds(*how, [True] * (3 if problem.conv.bias else 2))


def row_seconds(problem: Problem, row: str) -> float:
    """Measured, by the library itself."""
    layout = "nhwc" if problem.layout == "channels_last" else "nchw"
    backward = problem.group == "tail_backward"
    how = (problem.block(), problem.shape, mode_of(problem), layout, GPU, row, backward)
    return torch.ops.onepass.cuda_measured_seconds(*how)


def build_row(problem: Problem, row: str) -> None:
    """Compiles its kernels."""
    layout = "nhwc" if problem.layout == "channels_last" else "nchw"
    backward = problem.group == "tail_backward"
    how = (problem.block(), problem.shape, mode_of(problem), layout, GPU, row, backward)
    torch.ops.onepass.cuda_explain(*how)


def plan_of(problem: Problem, device: str) -> tuple[str, float]:
    """The row that runs, and its predicted seconds; 0 where none are predicted."""
    how = {
        "dtype": TYPES[problem.precision],
        "layout": memory_format(problem.layout, problem.rank),
        "device": GPU if device == "cuda" else device,
        "numerics": numerics(problem),
    }
    block = problem.block()
    text = onepass.explain(block, problem.shape, backward=problem.group == "tail_backward", **how)
    row, seconds = chosen_in(text)
    if device == "cpu" and _apart_on_cpu(problem):
        return "PyTorch's convolution and a tail", 0.0
    if problem.group == "block_step":
        wanted = next((line for line in text.splitlines() if "where gradients are wanted" in line), "")
        row = wanted.partition(": ")[2].replace("the same", row) if wanted else f"{row}, and its gradients"
        return row, 0.0
    if row.startswith("PyTorch") and device == "cuda":
        mode = mode_of(problem) or "tf32"
        layout = "nhwc" if problem.layout == "channels_last" else "nchw"
        seconds += torch.ops.onepass.cuda_framework_seconds(block, problem.shape, mode, layout, GPU)
    return row, seconds


def _apart_on_cpu(problem: Problem) -> bool:
    """Whether a fused module calls PyTorch's convolution."""
    order = memory_format(problem.layout, problem.rank)
    x = torch.empty(problem.shape, dtype=TYPES[problem.precision]).contiguous(memory_format=order)
    how = (_cpu.geometry_of(x), torch.get_num_threads(), problem.gradients)
    return _cpu.leaves_convolution(problem.block(), *how)


def chosen_in(text: str) -> tuple[str, float]:
    """The row that an explanation marks, and the seconds it predicts."""
    row, seconds = "", 0.0
    for line in text.splitlines():
        if line.startswith("-> ") and not row:
            row = line.removeprefix("-> ").replace("PyTorch's own convolution", "PyTorch")
        elif line.startswith("eager:") and not row:
            row = "eager"
        elif line.startswith("* "):
            words = line.split()
            row = row or words[1]
            return row, float(words[2]) / 1e3
    return row, seconds
