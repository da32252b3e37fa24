"""What a block would run as, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from onepass import _cuda_explain, _library
from onepass._conv_gradients import has_input_gradient
from onepass._description import Description, describe
from onepass.block import Block
from onepass.compiling import report as compiled

_DTYPES = {torch.float64: "f64", **_cuda_explain.DTYPES}
_LAYOUTS = {torch.contiguous_format: "nchw", torch.channels_last: "nhwc", torch.channels_last_3d: "nhwc"}


@_library.with_refusals
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

    Args:
        block: A Block or its text. Of a model compiled with backend="onepass", which is given alone: each of
            its chains, and the plans of those kept.
        sizes: Of the input: batch, channels, then space.
        dtype: Of all tensors.
        layout: torch.channels_last and channels_last_3d are for channels after space.
        threads: Of the CPU; torch.get_num_threads() by default.
        device: It may also name an architecture, "cuda:sm_90a", whether there is such a GPU or not.
        strategy: Forces a row of the table.
        backward: Explains all gradients: those of the tail, then those of the convolution.
        numerics: As of onepass.fuse.

    Returns:
        Text for people; "*" marks the strategy that runs.

    Examples:
        >>> import onepass
        >>> text = onepass.explain("conv2d(3,16,p=1) | group_norm(4)", (8, 3, 32, 32), threads=1)
        >>> sum(line.startswith("*") for line in text.splitlines())
        1
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
