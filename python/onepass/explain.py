"""What a block would run as, and why."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onepass import _library
from onepass._description import describe
from onepass.block import Block

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"}
_LAYOUTS = {torch.contiguous_format: "nchw", torch.channels_last: "nhwc", torch.channels_last_3d: "nhwc"}


def explain(
    block: Block | str,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    layout: torch.memory_format = torch.contiguous_format,
    threads: int | None = None,
    device: torch.device | str = "cpu",
    strategy: str = "",
) -> str:
    """Every strategy with its predicted time or the reason against it, then the numbers of the chosen one.

    `strategy` forces a row of the table; `threads` is torch.get_num_threads() unless given.
    """
    text = block.text if isinstance(block, Block) else block
    kind = torch.device(device).type
    if kind != "cpu":
        return f"{describe(text).text}\n\neager: on {kind} PyTorch's own kernels run the stages one by one\n"
    _library.require()
    if dtype not in _DTYPES:
        raise TypeError(f"dtype is {dtype}, must be one of {', '.join(map(str, _DTYPES))}")
    count = torch.get_num_threads() if threads is None else threads
    return torch.ops.onepass.explain(text, list(sizes), _DTYPES[dtype], _LAYOUTS[layout], count, strategy)
