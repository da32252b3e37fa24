"""What onepass made of a model: the blocks of `fuse` with both times, and the chains of the backend."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from onepass._description import describe
from onepass.explain import explain
from onepass.optimizing import measure
from onepass.optimizing.model_file import Arguments
from onepass.optimizing.variants import Variant
from onepass.report import Entry, report

_PREDICTED = re.compile(r"^\* .*?([0-9.e+-]+) ms predicted", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class FusedBlock:
    """A chain of modules that runs as one block, with what the planner says about it.

    Times are seconds of one call of the library's kernels; None where the forward pass ran none.
    """

    name: str
    modules: tuple[str, ...]
    block: str
    chosen: str
    plan: str
    predicted: float | None
    measured: float | None


@dataclasses.dataclass(frozen=True)
class KeptChain:
    """A chain that the backend found; kept where its own kernels are predicted to be faster."""

    name: str
    block: str
    kept: bool
    decision: str
    predicted: float  # seconds, by this library
    inductor: float  # seconds, by Inductor
    gradients: bool


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How much of a model runs in blocks of `fuse`: layers are modules without children."""

    layers: int
    fused: int

    @property
    def is_little(self) -> bool:
        """Whether most of the work stays PyTorch's."""
        return 2 * self.fused < self.layers


@dataclasses.dataclass
class _Seen:
    """Calls of one block on one kind of input."""

    plan: str
    seconds: float


class _BlockCalls(TorchDispatchMode):
    """Explains and times each block that runs, once for each kind of input."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.seen: dict[tuple[str, tuple[int, ...], torch.dtype], _Seen] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func.namespace == "onepass" and isinstance(args[0], Tensor):
            key = args[2], tuple(args[0].shape), args[0].dtype
            if key not in self.seen:
                plan = explain(*key[:2], dtype=key[2], device=self.device)
                self.seen[key] = _Seen(plan, measure.one(lambda: func(*args, **named), self.device))
        return func(*args, **named)


def fused_blocks(variant: Variant, inputs: Arguments, device: torch.device) -> list[FusedBlock]:
    """The blocks of a fused model, measured in a forward pass."""
    calls = _BlockCalls(device)
    variant.call.eval()
    with torch.no_grad(), calls:
        variant.prepare(inputs, train=False).call(variant.call)
    return [_block(entry, calls.seen) for entry in report(variant.model).fused]


def _block(entry: Entry, seen: dict[tuple[str, tuple[int, ...], torch.dtype], _Seen]) -> FusedBlock:
    """On a GPU what follows the convolution may be the block that runs."""
    texts = (entry.block, describe(entry.block).tail)
    found = next((calls for text in texts if (calls := [s for k, s in seen.items() if k[0] == text])), [])
    predictions = [float(match[1]) / 1e3 for call in found if (match := _PREDICTED.search(call.plan))]
    return FusedBlock(
        entry.name,
        entry.modules,
        entry.block,
        entry.plan or "",
        "\n".join(call.plan for call in found),
        sum(predictions) / len(predictions) if predictions else None,
        sum(call.seconds for call in found) / len(found) if found else None,
    )


def coverage(model: nn.Module, blocks: list[FusedBlock]) -> Coverage:
    """Of the modules without children that a model has, those in blocks."""
    layers = {name for name, module in model.named_modules() if name and not any(module.children())}
    return Coverage(len(layers), len(layers & {name for block in blocks for name in block.modules}))


def kept_chains(variant: Variant) -> list[KeptChain]:
    """The chains of a model that was compiled with backend="onepass", each once."""
    chains = report(variant.call).chains
    found = [
        KeptChain(
            chain.name,
            f"{chain.block} @ {'x'.join(map(str, chain.sizes))}",
            chain.kept,
            _decision(chain),
            chain.milliseconds / 1e3,
            chain.inductor_milliseconds / 1e3,
            chain.gradients,
        )
        for chain in chains
    ]
    return list(dict.fromkeys(found))


def _decision(chain: Any) -> str:
    if not chain.kept:
        return f"left to Inductor: {chain.reason}"
    return "kept" if chain.runs == chain.block else f"kept after PyTorch's convolution: {chain.runs}"
