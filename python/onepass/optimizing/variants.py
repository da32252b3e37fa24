"""The ways a model is run side by side: PyTorch's own and onepass."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from onepass.fuse import fuse
from onepass.optimizing.model_file import Arguments

EAGER, COMPILE, CHANNELS_LAST, ONEPASS = "eager", "compile", "channels_last", "onepass"
MAX_AUTOTUNE = "max-autotune"
BENCH = " bench"  # after the name of a variant that runs with torch.backends.cudnn.benchmark
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model with its own parameters, how it is called and the layout its inputs are given in."""

    name: str
    model: nn.Module
    call: nn.Module
    layout: torch.memory_format = torch.preserve_format
    benchmark: bool = False  # whether cuDNN tries its algorithms out

    def settings(self) -> contextlib.AbstractContextManager[None]:
        """What is set while the variant runs, its backward pass included."""
        return _cudnn_benchmark() if self.benchmark else contextlib.nullcontext()

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
    return name.removesuffix(BENCH) == ONEPASS


def channels_last_format(inputs: Arguments) -> torch.memory_format | None:
    """The channels-last format of the first image or volume among the inputs."""
    dimensions = (x.dim() for x in inputs.tensors().values())
    return next((_CHANNELS_LAST[d] for d in dimensions if d in _CHANNELS_LAST), None)


def makers(
    build: Callable[[], nn.Module], inputs: Arguments, conv: str, device: torch.device
) -> Iterator[tuple[str, Callable[[], Variant]]]:
    """The variants of a model by name; making one may fail, with the reason in the exception.

    On a GPU also those that search for the fastest: Inductor's and, as `bench`, cuDNN's.
    """
    is_gpu = device.type == "cuda"
    layout = channels_last_format(inputs)
    plain: dict[str, Callable[[], Variant]] = {
        EAGER: lambda: _plain(EAGER, build()),
        COMPILE: lambda: _compiled(COMPILE, build()),
    }
    if is_gpu:
        plain[MAX_AUTOTUNE] = lambda: _compiled(MAX_AUTOTUNE, build(), mode="max-autotune")
    if layout is not None:
        plain[CHANNELS_LAST] = lambda: _plain(CHANNELS_LAST, build().to(memory_format=layout), layout)
    plain[ONEPASS] = lambda: _plain(ONEPASS, fuse(build(), conv=conv))
    for name, make in plain.items():
        yield name, make
        if is_gpu:
            yield name + BENCH, lambda name=name, make=make: _benchmarked(name, make())


def _plain(name: str, model: nn.Module, layout: torch.memory_format = torch.preserve_format) -> Variant:
    return Variant(name, model, model, layout)


def _benchmarked(name: str, variant: Variant) -> Variant:
    return dataclasses.replace(variant, name=name + BENCH, benchmark=True)


def _compiled(name: str, model: nn.Module, **options: str) -> Variant:
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns where there is no GPU
    # What other files compiled would count against this one's limit, and so do its own variants.
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return Variant(name, model, torch.compile(model, **options))
