"""What onepass made of a model: the blocks of `fuse` with both times, and the chains of the backend."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from onepass import _numerics
from onepass._conv_gradients import format_of
from onepass._description import describe
from onepass.explain import explain
from onepass.optimizing import measure
from onepass.optimizing.model_file import Arguments
from onepass.optimizing.variants import Variant
from onepass.report import Entry, report


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


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A block on one kind of input: its plan and the seconds of a call."""

    plan: str
    predicted: float
    measured: float


_Kind = tuple[str, tuple[int, ...], torch.dtype, torch.memory_format]


class _BlockCalls(TorchDispatchMode):
    """Explains and times each block that runs, once for each kind of input."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[_Kind, _Seen] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func.namespace == "onepass" and isinstance(args[0], Tensor):
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | named
            x, block = given["input"], given["block"]
            kind = (block, tuple(x.shape), x.dtype, format_of(x.shape, x.stride()))
            if kind not in self.seen:
                seconds = measure.one(lambda: func(*args, **named), x.device)
                self.seen[kind] = _Seen(*_planned(kind, x.device, given.get("numerics", "")), seconds)
        return func(*args, **named)


def _planned(kind: _Kind, device: torch.device, words: str) -> tuple[str, float]:
    """The plan's text and its prediction."""
    block, sizes, dtype, order = kind
    layout = "nchw" if order == torch.contiguous_format else "nhwc"
    how = (_numerics.mode_of(dtype, words), layout, str(device), torch.get_num_threads())
    predicted = torch.ops.onepass.predicted_seconds(block, list(sizes), *how)
    return explain(block, sizes, dtype=dtype, layout=order, device=device), predicted


def fused_blocks(variant: Variant, inputs: Arguments) -> list[FusedBlock]:
    """The blocks of a fused model, measured in a forward pass."""
    calls = _BlockCalls()
    variant.call.eval()
    with torch.no_grad(), calls:
        variant.prepare(inputs, train=False).call(variant.call)
    return [_block(entry, calls.seen) for entry in report(variant.model).fused]


def _block(entry: Entry, seen: dict[_Kind, _Seen]) -> FusedBlock:
    """On a GPU the block that runs may be what follows the convolution. Kinds of input are averaged."""
    texts = (entry.block, describe(entry.block).tail)
    found = next((calls for text in texts if (calls := [s for k, s in seen.items() if k[0] == text])), [])
    return FusedBlock(
        entry.name,
        entry.modules,
        entry.block,
        entry.plan or "",
        "\n".join(call.plan for call in found),
        statistics.mean(call.predicted for call in found) if found else None,
        statistics.mean(call.measured for call in found) if found else None,
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
