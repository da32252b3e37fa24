"""On a CPU: whether PyTorch's convolution, then the tail, is predicted to be faster than the whole block."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from onepass._conv_gradients import memory_format
from onepass._description import describe
from onepass.compiling.costs import Question, costs

# Predictions of the two are off by up to this factor. A wide convolution before a norm of single channels is
# where it is exceeded: its channels are computed one by one (13 times as long as PyTorch's, 1280 to 192).
_MARGIN = 2.0


def is_faster(block: str, input: Tensor, gradients: bool) -> bool:
    """All tensors have the input's type."""
    layout = "nchw" if memory_format(input) == torch.contiguous_format else "nhwc"
    return is_predicted(block, input.shape, input.dtype, layout, torch.get_num_threads(), gradients)


@functools.lru_cache(maxsize=4096)
def is_predicted(
    block: str, sizes: tuple[int, ...], dtype: torch.dtype, layout: str, threads: int, gradients: bool
) -> bool:
    """The same of sizes. PyTorch's rates are known of fp32, without groups and not transposed."""
    description = describe(block)
    conv = description.conv
    if (
        dtype != torch.float32
        or conv is None
        or conv.transposed
        or conv.groups > 1
        or not description.tail
        or 0 in sizes
    ):
        return False
    wanted = (True,) * (1 + len(description.parameters)) if gradients else ()
    question = Question(block, tuple(sizes), "f32", 4, "cpu", threads, wanted, False, False)
    found = costs(question, layout)
    return found.whole > _MARGIN * found.tail
