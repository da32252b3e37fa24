"""What a block would run as, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from onepass import _apart, _cuda_explain, _library
from onepass._conv_gradients import has_input_gradient
from onepass._description import Description, describe
from onepass.block import Block
from onepass.compiling import report as compiled

_DTYPES = {torch.float64: "f64", **_cuda_explain.DTYPES}
_LAYOUTS = {torch.contiguous_format: "nchw", torch.channels_last: "nhwc", torch.channels_last_3d: "nhwc"}


def explain(
    block: Block | str | Callable[..., Any],
    sizes: Sequence[int] = (),
    *,
    dtype: torch.dtype = torch.float32,
    layout: torch.memory_format = torch.contiguous_format,
    threads: int | None = None,
    device: torch.device | str = "cpu",
    strategy: str = "",
    backward: bool = False,
    numerics: str | None = None,
) -> str:
    """Every strategy with its predicted time or the reason against it, then the numbers of the chosen one.

    `strategy` forces a row of the table; `threads` is torch.get_num_threads() unless given. With `backward`
    it is about all gradients: those of the tail, then those of the convolution. `device` may also name an
    architecture, "cuda:sm_90a", whether there is such a GPU or not. `numerics` is as of onepass.fuse.

    Of a model compiled with backend="onepass" alone: each of its chains, and the plans of those kept.
    """
    if compiled.original_of(block) is not None:
        return compiled.explain(block, explain)
    text = block.text if isinstance(block, Block) else block
    kind = str(device).partition(":")[0]
    if kind == "cuda":
        return _cuda_explain.explain(
            describe(text), sizes, dtype, _LAYOUTS[layout], str(device), strategy, backward, numerics
        )
    if torch.device(device).type != "cpu":
        return f"{describe(text).text}\n\neager: on {kind} PyTorch's own kernels run the stages one by one\n"
    _library.require()
    if dtype not in _DTYPES:
        raise TypeError(f"dtype is {dtype}, must be one of {', '.join(map(str, _DTYPES))}")
    count = torch.get_num_threads() if threads is None else threads
    how = (_DTYPES[dtype], _LAYOUTS[layout], count)
    if not backward:
        description = describe(text)
        if not strategy and _apart.is_predicted(text, tuple(sizes), dtype, *how[1:], False):
            shape = description.conv_output_shape(sizes)
            tail = torch.ops.onepass.explain(description.tail, shape, *how, "")
            return f"{description.text}\n\n-> PyTorch's own convolution, then tail\n\n{tail}"
        return torch.ops.onepass.explain(text, list(sizes), *how, strategy)
    if strategy:
        raise ValueError("strategy forces a row of the forward table, must be left out for backward")
    return "\n".join(_backward_plans(describe(text), sizes, how))


def _backward_plans(
    description: Description, sizes: Sequence[int], how: tuple[str, str, int]
) -> Iterator[str]:
    """The plan of each part of a block as it is differentiated."""
    conv = description.conv
    if description.tail:
        tail_sizes = description.conv_output_shape(sizes)
        yield torch.ops.onepass.explain_backward(description.tail, tail_sizes, *how)
    if conv is not None and not has_input_gradient(conv):
        yield (
            f"backward of {conv.text}: by PyTorch's convolution_backward, for the library has no convolution "
            "that gives the input's gradient; without that one conv_backward runs\n"
        )
    elif conv is not None:
        yield torch.ops.onepass.explain_backward(conv.text, list(sizes), *how)
