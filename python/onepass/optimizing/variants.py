"""The ways a model is run side by side: PyTorch's own and onepass."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onepass.fuse import fuse

EAGER, COMPILE, CHANNELS_LAST, ONEPASS = "eager", "compile", "channels_last", "onepass"
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model with its own parameters, how it is called and the layout its inputs are given in."""

    name: str
    model: nn.Module
    call: nn.Module
    layout: torch.memory_format = torch.preserve_format

    def prepare(self, inputs: Sequence[Any], train: bool) -> list[Any]:
        """Copies of the inputs as this variant wants them, floating ones with gradients where it trains."""
        return [self._prepare(x, train) if isinstance(x, Tensor) else x for x in inputs]

    def _prepare(self, x: Tensor, train: bool) -> Tensor:
        fits = x.dim() in _CHANNELS_LAST and self.layout in (_CHANNELS_LAST[x.dim()], torch.preserve_format)
        copy = x.detach().clone(memory_format=self.layout if fits else torch.preserve_format)
        return copy.requires_grad_(train and copy.is_floating_point())


def channels_last_format(inputs: Sequence[Any]) -> torch.memory_format | None:
    """The channels-last format of the first image or volume among the inputs."""
    dimensions = (x.dim() for x in inputs if isinstance(x, Tensor))
    return next((_CHANNELS_LAST[d] for d in dimensions if d in _CHANNELS_LAST), None)


def makers(
    build: Callable[[], nn.Module], inputs: Sequence[Any], conv: str
) -> Iterator[tuple[str, Callable[[], Variant]]]:
    """The variants of a model by name; making one may fail, with the reason in the exception."""
    yield EAGER, lambda: _plain(EAGER, build())
    yield COMPILE, lambda: _compiled(build())
    layout = channels_last_format(inputs)
    if layout is not None:
        yield CHANNELS_LAST, lambda: _plain(CHANNELS_LAST, build().to(memory_format=layout), layout)
    yield ONEPASS, lambda: _plain(ONEPASS, fuse(build(), conv=conv))


def _plain(name: str, model: nn.Module, layout: torch.memory_format = torch.preserve_format) -> Variant:
    return Variant(name, model, model, layout)


def _compiled(model: nn.Module) -> Variant:
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns where there is no GPU
    torch._dynamo.reset()  # what other files compiled would count against this one's limit
    return Variant(COMPILE, model, torch.compile(model))
