"""Calls that leave the fused path: each site warns once per reason and counts them all."""

from __future__ import annotations

import sys
import threading
import warnings
from typing import Any

import torch
from torch.autograd import forward_ad

from onepass._frozen import Frozen
from onepass._own_code import LIBRARIES
from onepass._redone import Counted

ORIGINAL = "the original forward"
STAGES = "PyTorch's own stages"
CONVOLUTION = "PyTorch's own convolution"
REFERENCE = "the library's reference"

_lock = threading.Lock()


class FallbackWarning(UserWarning):
    """A call of a fused module, of a Block or of functional.run did not run the library's kernels.

    Given once for each module or block and reason; onepass.report and `Block.fallbacks` have the counts.

    Examples:
        >>> import onepass, warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", onepass.FallbackWarning)  # a fallback is an error here
    """


class Site(Counted):
    """A place in a model that runs a block.

    It counts calls that leave the fused path, by what ran and why, and samples that a GPU computes again. A
    copy starts at zero. `said` holds what was warned of; the chains of one module share it. `numerics` is the
    policy of its blocks, None for onepass.numerics(). `layer` is what a report calls the block, `name` the
    module that runs it. `frozen` has the packed weights of a frozen model, `choices` what was decided for
    calls on a GPU (_cuda).
    """

    __slots__ = ("choices", "counts", "frozen", "name", "numerics", "said")

    def __init__(
        self, name: str, said: set[str] | None = None, numerics: str | None = None, layer: str | None = None
    ) -> None:
        super().__init__(layer or name)
        self.name = name
        self.numerics = numerics
        self.frozen: Frozen | None = None
        self.choices: dict[tuple[Any, ...], Any] = {}
        self.counts: dict[str, int] = {}
        self.said: set[str] = set() if said is None else said

    def __reduce__(self) -> tuple[Any, ...]:
        return Site, (self.name, None, self.numerics, self.layer)


by_text: dict[str, Site] = {}  # of blocks that no module owns


def site_of_text(text: str) -> Site:
    """Of a block that is called as a function: one for all calls of the text."""
    return by_text.get(text) or by_text.setdefault(text, Site(text))


def left(site: Site | str, ran: str, reason: str) -> None:
    """Counts a call that left the fused path and warns if its site has not said so; a block's text is a site.

    Nothing happens while torch.compile traces: a warning would break the graph.
    """
    if torch.compiler.is_compiling():
        return
    text = f"{ran}: {reason}"
    with _lock:
        if isinstance(site, str):
            site = site_of_text(site)
        site.counts[text] = site.counts.get(text, 0) + 1
        if text in site.said:
            return
        site.said.add(text)
    warn(f"{site.name} left the fused path and ran {text}")


def warn(message: str) -> None:
    """Warns at the innermost line that is neither PyTorch's nor this package's."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*LIBRARIES, "<onepass ")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, FallbackWarning, stacklevel=level)


def counted(count: int, text: str) -> str:
    """A count of a site as a report has it."""
    return f"{count} {'call' if count == 1 else 'calls'} ran {text}"


transforming = torch._C._are_functorch_transforms_active  # a constant to Dynamo
_is_tracing = torch._C._is_tracing


def tracing() -> bool:
    """Whether torch.jit.trace records. It takes half the time of _get_tracing_state."""
    return _is_tracing()


def why_transformed() -> str | None:
    """Why no operator of the library may run now: something transforms or records PyTorch's own."""
    if transforming():
        return "inside a torch.func transform (vmap, grad, jvp and the like)"
    if forward_ad._current_level >= 0:
        return "inside torch.autograd.forward_ad.dual_level()"
    if tracing():
        return "torch.jit.trace records the call; torch.compile and torch.export keep it fused"
    return None
