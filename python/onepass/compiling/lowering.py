"""How Inductor lowers the operators: in any layout of their inputs, or in the one of the graph's plan."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

LAYOUT = "onepass_layout"  # of a node's meta: "nchw" or "nhwc"
_WITH_CONVOLUTION = ("block_forward", "whole_forward", "whole_forward_with_statistics")
_OTHERS = ("forward", "forward_with_statistics", "backward", "block_backward", "whole_backward")


def _operators() -> dict[Any, bool]:
    """The operators, with whether the first argument is to lie in the layout of the plan."""
    names = {**dict.fromkeys(_WITH_CONVOLUTION, True), **dict.fromkeys(_OTHERS, False)}
    return {getattr(torch.ops.onepass, name).default: wants for name, wants in names.items()}


def takes_layout(node: fx.Node) -> bool:
    """Whether the node runs a convolution of the library's forward."""
    if node.op != "call_function":
        return False
    if node.target is torch.ops.onepass.forward.default:
        return str(node.args[2]).startswith("conv")
    return _operators().get(node.target, False)


@functools.cache
def install() -> None:
    """Registers the lowerings. Without them operators of other libraries' get exactly their traced strides,
    by copies on both sides in channels-last regions.
    """
    for operator in _operators():
        if operator not in lowering.lowerings:
            lowering.lowerings[operator] = functools.partial(_lower, operator)


def _lower(operator: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    layout = V.current_node.meta.get(LAYOUT)
    if layout is not None:
        rank = len(input.get_size())
        order = _channels_last_order(rank) if layout == "nhwc" else list(range(rank - 1, -1, -1))
        input = ir.ExternKernel.require_stride_order(input, order)
    return lowering.fallback_handler(operator, add_to_fallback_set=False)(input, *args, **kwargs)


def _channels_last_order(rank: int) -> list[int]:
    """Inductor's stride order: the place of each dimension, counted from the one that lies densest."""
    return [rank - 1, 0, *range(rank - 2, 0, -1)]
