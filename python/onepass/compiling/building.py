"""Compiles the kernels of parts side by side: before they are timed, or while Inductor is at work."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator

import torch

from onepass.compiling.parts import Part


@dataclasses.dataclass(frozen=True)
class Kernels:
    """A block whose kernels are built: the arguments of the operator that plans it."""

    block: str
    sizes: tuple[int, ...]
    mode: str
    layout: str
    device: str
    backward: bool


def kernels_of(parts: Iterable[Part]) -> list[Kernels]:
    """What the parts run of this library's, each once. Those of mixed types are built at their first call."""
    found: dict[Kernels, None] = {}
    for part in parts:
        if part.by != "onepass" or not part.has_one_type or not part.device.startswith("cuda"):
            continue
        for backward in (False, True) if any(part.wanted) else (False,):
            place = (part.layout, part.device, backward)
            found[Kernels(part.block, part.input.sizes, part.modes[backward], *place)] = None
    return list(found)


@contextlib.contextmanager
def ahead(parts: Iterable[Part]) -> Iterator[None]:
    """Builds in threads from here on; leaving waits for them."""
    wanted = kernels_of(parts)
    if not wanted:
        yield
        return
    with concurrent.futures.ThreadPoolExecutor(min(len(wanted), os.cpu_count() or 1)) as pool:
        for kernels in wanted:
            pool.submit(_build, kernels)
        yield


def _build(kernels: Kernels) -> None:
    """Plans the block, which puts its kernels into the cache; what fails says so again at its first call."""
    with contextlib.suppress(RuntimeError, ValueError):
        how = (kernels.block, kernels.sizes, kernels.mode, kernels.layout, kernels.device)
        torch.ops.onepass.cuda_explain(*how, "", kernels.backward)
