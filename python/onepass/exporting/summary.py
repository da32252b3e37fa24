"""What an exported file fuses, what it does not fuse and why, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onepass.exporting.blocks import Block
from onepass.exporting.writer import Writer


def lines(writer: Writer, reasons: Mapping[str, str]) -> Iterator[str]:
    """The kernels of each block with their strategies, then what stays PyTorch's."""
    yield f"fused for {writer.request.architecture}:"
    for block in writer.blocks:
        sizes = "x".join(map(str, block.found.sizes))
        yield f"  {block.name}: {block.found.block} @ {sizes}"
        strategies = {operator.name: operator.strategy for operator in block.operators}
        yield from (f"    {name}: {strategy}" for name, strategy in strategies.items())
        yield from (f"    {sentence}" for sentence in _kept(block, writer))
    if left := {**reasons, **writer.planned.left_out}:
        yield "not fused:"
        yield from (f"  {name}: {reason}" for name, reason in left.items())


def _kept(block: Block, writer: Writer) -> Iterator[str]:
    if block.found.description.conv is not None:
        modes = writer.planned.modes(block.found.dtype)
        missing = [mode for mode in modes if mode not in block.whole]
        if missing:
            where = f" in {', '.join(missing)}" if len(modes) > 1 else ""
            yield f"without gradients the convolution{where} stays PyTorch's: no kernel is predicted to gain"
    if writer.request.train and not block.train and not block.whole_train:
        yield "the backward pass runs the original code: no kernel for it"
