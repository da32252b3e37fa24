"""The ways a model is run side by side: PyTorch's own and onepass."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from onepass.fuse import fuse
from onepass.optimizing.model_file import Arguments

EAGER, COMPILE, MAX_AUTOTUNE = "eager", "compile", "max-autotune"
FUSE, BACKEND = "onepass fuse", "onepass backend"
GRAPHS = " graphs"  # after a compiled variant that replays CUDA graphs
NHWC = " nhwc"  # with the model and its inputs in channels last
BENCH = " bench"  # with torch.backends.cudnn.benchmark
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_RECIPES = {
    EAGER: "the model as it is",
    COMPILE: "torch.compile(model)",
    COMPILE + GRAPHS: 'torch.compile(model, mode="reduce-overhead")',
    MAX_AUTOTUNE: 'torch.compile(model, mode="max-autotune")',
    FUSE: "onepass.fuse(model)",
    BACKEND: 'torch.compile(model, backend="onepass")',
    BACKEND + GRAPHS: 'torch.compile(model, backend="onepass", mode="reduce-overhead")',
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model with its own parameters, how it is called and the layout its inputs are given in."""

    name: str
    model: nn.Module
    call: nn.Module
    layout: torch.memory_format = torch.preserve_format

    @property
    def replays_graphs(self) -> bool:
        """Whether calls replay CUDA graphs, whose outputs the next call overwrites."""
        return GRAPHS in self.name or self.name.startswith(MAX_AUTOTUNE)

    def settings(self) -> contextlib.AbstractContextManager[None]:
        """What is set while the variant runs, its backward pass included."""
        if self.replays_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return _cudnn_benchmark() if self.name.endswith(BENCH) else contextlib.nullcontext()

    def prepare(self, inputs: Arguments, train: bool) -> Arguments:
        """Copies of the inputs as this variant wants them, floating ones with gradients where it trains."""
        return inputs.map(lambda x: self._prepare(x, train))

    def _prepare(self, x: Tensor, train: bool) -> Tensor:
        fits = x.dim() in _CHANNELS_LAST and self.layout in (_CHANNELS_LAST[x.dim()], torch.preserve_format)
        copy = x.detach().clone(memory_format=self.layout if fits else torch.preserve_format)
        return copy.requires_grad_(train and copy.is_floating_point())


@contextlib.contextmanager
def _cudnn_benchmark() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch._C._set_cudnn_benchmark(True)  # also where something has frozen the flags, as torch.testing does
    try:
        yield
    finally:
        torch._C._set_cudnn_benchmark(before)


def is_ours(name: str) -> bool:
    """Whether a variant is onepass, not one of PyTorch's own."""
    return name.startswith((FUSE, BACKEND))


def rival_of(name: str) -> str | None:
    """The variant in which Inductor compiles alone what it shares with this library in a backend's."""
    return name.replace(BACKEND, COMPILE) if name.startswith(BACKEND) else None


def recipe(name: str) -> str:
    """How a variant is had, for people."""
    base = name.removesuffix(BENCH).removesuffix(NHWC)
    words = [_RECIPES[base]]
    if NHWC in name:
        words.append("with model and inputs in channels last")
    if name.endswith(BENCH):
        words.append("and" if NHWC in name else "with")
        words.append("torch.backends.cudnn.benchmark = True")
    return " ".join(words)


def channels_last_format(inputs: Arguments) -> torch.memory_format | None:
    """The channels-last format of the first image or volume among the inputs."""
    dimensions = (x.dim() for x in inputs.tensors().values())
    return next((_CHANNELS_LAST[d] for d in dimensions if d in _CHANNELS_LAST), None)


def makers(
    build: Callable[[], nn.Module], inputs: Arguments, conv: str, device: torch.device
) -> Iterator[tuple[str, Callable[[], Variant]]]:
    """The variants of a model by name; making one may fail, with the reason in the exception.

    On a GPU also those with CUDA graphs and those that search for the fastest: Inductor's and cuDNN's.
    """
    is_gpu = device.type == "cuda"
    last = channels_last_format(inputs)
    for base, call in _ways(conv, is_gpu).items():
        layouts = {"": torch.preserve_format}
        if last is not None and base != MAX_AUTOTUNE:  # it takes minutes to compile
            layouts[NHWC] = last
        for suffix, layout in layouts.items():
            for bench in ("", BENCH) if is_gpu else ("",):
                name = base + suffix + bench
                yield name, functools.partial(_variant, name, build, call, layout)


def _ways(conv: str, is_gpu: bool) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """What is called in place of a model."""
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {EAGER: lambda model: model, COMPILE: _compiled}
    if is_gpu:
        ways[COMPILE + GRAPHS] = functools.partial(_compiled, mode="reduce-overhead")
        ways[MAX_AUTOTUNE] = functools.partial(_compiled, mode="max-autotune")
    ways[FUSE] = lambda model: fuse(model, conv=conv)
    ways[BACKEND] = functools.partial(_compiled, backend="onepass")
    if is_gpu:
        ways[BACKEND + GRAPHS] = functools.partial(_compiled, backend="onepass", mode="reduce-overhead")
    return ways


def _variant(
    name: str,
    build: Callable[[], nn.Module],
    call: Callable[[nn.Module], nn.Module],
    layout: torch.memory_format,
) -> Variant:
    model = build()
    if layout != torch.preserve_format:
        model = model.to(memory_format=layout)
    called = call(model)
    # What is compiled holds the model; what fuse returns is it, with the same parameters.
    return Variant(name, model if FUSE not in name else called, called, layout)


def _compiled(model: nn.Module, **options: str) -> nn.Module:
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns where there is no GPU
    # What other files compiled would count against this one's limit, and so do its own variants.
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(model, **options)
