"""The operator that stands for a chain in Dynamo's graph, and what AOTAutograd makes of it: raw operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onepass import _library
from onepass._conv_gradients import conv_gradients_by_torch, has_input_gradient
from onepass._description import Description, describe
from onepass._types import lowered_dtype


def _chain(
    input: Tensor,
    parameters: Sequence[Tensor],
    block: str,
    out_dtype: torch.dtype | None,
    forward_words: str,
    backward_words: str,
) -> Tensor:
    """Runs the block in one operator; on a GPU a block with a convolution runs whole.

    AOTAutograd traces through it, with autocast and grad mode as they are at its place in the graph.
    """
    description = describe(block)
    parameters = list(parameters)
    device = input.device.type
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (input, *parameters)):
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if low is not None:
            count = description.conv_parameters
            lowered = (input, *parameters[:count]) if count else ()
            lowered = tuple(t.to(lowered_dtype(t.dtype, low)) for t in lowered)
            input, *parameters = (*lowered, *(input, *parameters)[len(lowered) :])
        with torch.autocast(device, enabled=False):
            words = (forward_words, backward_words)
            return _Differentiable.apply(block, out_dtype, words, input, *parameters)
    return _forward(description, input, parameters, out_dtype, forward_words)


def _forward(
    description: Description,
    input: Tensor,
    parameters: Sequence[Tensor],
    out_dtype: torch.dtype | None,
    words: str,
) -> Tensor:
    operators = torch.ops.onepass
    if input.device.type == "cuda" and description.conv is not None:
        return operators.whole_forward.default(input, parameters, description.text, words)
    return operators.forward.default(input, parameters, description.text, out_dtype, words)


class _Differentiable(torch.autograd.Function):
    """The same where gradients are wanted; its saved tensors become edges between the two graphs."""

    @staticmethod
    def forward(
        ctx: Any,
        block: str,
        out_dtype: torch.dtype | None,
        words: tuple[str, str],
        input: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        description = describe(block)
        ctx.block, ctx.words = block, words[1]
        own, operators = list(parameters), torch.ops.onepass
        if description.conv is None:
            output, statistics = operators.forward_with_statistics.default(
                input, own, block, out_dtype, words[0]
            )
            ctx.save_for_backward(input, statistics, *parameters)
        elif input.device.type == "cuda":
            output, statistics = _whole_with_statistics(description, input, own, words[0])
            kept = output if output.dim() == 2 else statistics.new_empty(0)
            ctx.save_for_backward(input, statistics, kept, *parameters)
        else:
            output, activation, statistics = operators.block_forward.default(input, own, block, out_dtype)
            tail = parameters[description.conv_parameters :]
            ctx.save_for_backward(input, activation, statistics, parameters[0], *tail)
        return output

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        description = describe(ctx.block)
        wanted = list(ctx.needs_input_grad[3:])
        operators = torch.ops.onepass
        if description.conv is None:
            input, statistics, *parameters = ctx.saved_tensors
            gradients = operators.backward.default(
                output_gradient, input, parameters, statistics, ctx.block, wanted, ctx.words
            )
        elif output_gradient.device.type == "cuda":
            input, statistics, kept, *parameters = ctx.saved_tensors
            gradients = operators.whole_backward.default(
                output_gradient, input, parameters, statistics, kept, ctx.block, ctx.words, wanted
            )
        else:
            gradients = _block_gradients(description, output_gradient, list(ctx.saved_tensors), wanted)
        return None, None, None, *(g if want else None for g, want in zip(gradients, wanted, strict=True))


def _whole_with_statistics(
    description: Description, input: Tensor, parameters: list[Tensor], words: str
) -> tuple[Tensor, Tensor]:
    operators = torch.ops.onepass
    if description.after_conv is not None:
        return operators.whole_forward_with_statistics.default(input, parameters, description.text, words)
    output = operators.whole_forward.default(input, parameters, description.text, words)
    return output, input.new_empty(0)


def _block_gradients(
    description: Description, output_gradient: Tensor, saved: list[Tensor], wanted: list[bool]
) -> Sequence[Tensor | None]:
    """The gradients of a block with a convolution on the CPU: in one operator where the library has all."""
    conv, operators = description.conv, torch.ops.onepass
    assert conv is not None
    input, activation, statistics, weight, *tail = saved
    if not wanted[0] or has_input_gradient(conv):
        return operators.block_backward.default(
            output_gradient, input, activation, [weight, *tail], statistics, description.text, wanted
        )
    count = description.conv_parameters + 1
    gradient, tail_gradients = output_gradient, []
    if description.tail:
        needed = [any(wanted[:count]), *wanted[count:]]
        gradient, *tail_gradients = operators.backward.default(
            output_gradient, activation, tail, statistics, description.tail, needed
        )
    conv_gradients = conv_gradients_by_torch(
        conv, gradient.to(input.dtype), input, weight, tuple(wanted[:count])
    )
    return *conv_gradients, *tail_gradients


if _library.available():
    _operators = torch.library.Library("onepass", "FRAGMENT")
    _operators.define(
        "chain(Tensor input, Tensor[] parameters, str block, ScalarType? out_dtype, str forward_words, "
        "str backward_words) -> Tensor"
    )
    _operators.impl("chain", _chain, "CompositeImplicitAutograd")
