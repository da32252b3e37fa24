"""The autograd function of a block on the CPU: what it saves, and how it computes gradients."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onepass import _cpu, _eager
from onepass._autograd import Stages, differentiable_again
from onepass._conv_gradients import conv_gradients_by_torch, has_input_gradient
from onepass._description import Conv, Description, describe

_CONSTANTS = 3  # arguments of the function below that are no tensors


def _stages_again(ctx: Any) -> Stages:
    """What differentiable_again needs. Values are those of the forward pass, whatever became of the bias."""
    description = describe(ctx.block)
    if description.conv is None:
        input, _, *parameters = ctx.saved_tensors
        return ctx.block, lambda x, *own: _eager.run(ctx.block, x, own), [input, *parameters], _CONSTANTS
    input, activation, _, weight, *tail_parameters = ctx.saved_tensors
    conv, tail = description.conv, description.tail
    count = description.conv_parameters

    def run(x: Tensor, *own: Tensor) -> Tensor:
        convolved = _eager.convolve(conv, x, *own[:count])
        if tail:
            convolved = convolved + (activation.to(convolved.dtype) - convolved).detach()
        return _eager.run(tail, convolved, own[count:]) if tail else convolved

    bias = (ctx.bias,) if conv.bias else ()
    return ctx.block, run, [input, weight, *bias, *tail_parameters], _CONSTANTS


class Differentiable(torch.autograd.Function):
    """A block whose gradients are wanted: the convolution, then the tail.

    Saves the input, the parameters, the convolution's output (read instead of computed again) and the
    statistics. `forward` takes ctx: with setup_context a call takes 24 microseconds more.
    `by_torch`: whether PyTorch convolves; its gradients then are by who is predicted to be faster. None: the
    library does all it can.
    """

    @staticmethod
    def forward(
        ctx: Any,
        block: str,
        out_dtype: torch.dtype | None,
        by_torch: bool | None,
        input: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        description = describe(block)
        ctx.block, ctx.may_leave = block, by_torch is not None
        if description.conv is None:
            output, statistics = torch.ops.onepass.forward_with_statistics.default(
                input, parameters, block, out_dtype
            )
            ctx.save_for_backward(input, statistics, *parameters)
            return output
        if by_torch:
            count = description.conv_parameters
            activation = _eager.convolve(description.conv, input, *parameters[:count])
            output, statistics = torch.ops.onepass.forward_with_statistics.default(
                activation, parameters[count:], description.tail, out_dtype
            )
        else:
            output, activation, statistics = torch.ops.onepass.block_forward.default(
                input, parameters, block, out_dtype
            )
        # No gradient depends on the convolution's bias: PyTorch does not keep it either. Gradients of
        # gradients do, on the value it has then.
        if description.conv.bias and not torch.compiler.is_compiling():
            ctx.bias = parameters[1]
        ctx.save_for_backward(
            input, activation, statistics, parameters[0], *parameters[description.conv_parameters :]
        )
        return output

    @staticmethod
    @differentiable_again(_stages_again)
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        description = describe(ctx.block)
        wanted = ctx.needs_input_grad[_CONSTANTS:]
        if description.conv is None:
            input, statistics, *parameters = ctx.saved_tensors
            gradients = torch.ops.onepass.backward.default(
                output_gradient, input, parameters, statistics, ctx.block, wanted
            )
        else:
            saved = list(ctx.saved_tensors)
            if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
                ctx.maybe_clear_saved_tensors()  # unless the graph is retained
            gradients = _block_gradients(description, output_gradient, saved, wanted, ctx.may_leave)
        return *(None,) * _CONSTANTS, *(
            gradient if want else None for gradient, want in zip(gradients, wanted)
        )


# From this size on the convolution's output is freed before the convolution's gradients are allocated; below,
# the second call of an operator that this takes (15 microseconds) is worth more.
_LARGE_BYTES = 1 << 20


def _block_gradients(
    description: Description,
    output_gradient: Tensor,
    saved: list[Tensor],
    wanted: Sequence[bool],
    may_leave: bool,
) -> Sequence[Tensor | None]:
    """The gradients of the input and of all parameters of a block with a convolution. Empties `saved`.

    `may_leave`: PyTorch computes the convolution's where it is predicted to be faster.
    """
    conv = description.conv
    assert conv is not None
    left = _are_left(conv, saved[0], wanted, may_leave)
    large = not torch.compiler.is_compiling() and saved[1].nbytes >= _LARGE_BYTES
    if not left and not large:
        input, activation, statistics, *parameters = saved
        return torch.ops.onepass.block_backward.default(
            output_gradient, input, activation, parameters, statistics, description.text, wanted
        )
    count = description.conv_parameters + 1
    conv_wanted, tail_wanted = wanted[:count], wanted[count:]
    gradient, tail_gradients = output_gradient, ()
    if description.tail:
        gradient, *tail_gradients = _tail_gradients(
            description.tail, output_gradient, saved, (any(conv_wanted), *tail_wanted), large
        )
    input, weight, nothing = saved[0], saved[3], saved[2].new_empty(0)
    saved.clear()
    if not any(conv_wanted):
        conv_gradients: Sequence[Tensor | None] = [None] * count
    elif left:
        conv_gradients = conv_gradients_by_torch(conv, gradient.to(input.dtype), input, weight, conv_wanted)
    else:
        conv_gradients = torch.ops.onepass.block_backward.default(
            gradient, input, nothing, [weight], nothing, conv.text, conv_wanted
        )
    return *conv_gradients, *tail_gradients


def _are_left(conv: Conv, input: Tensor, wanted: Sequence[bool], may_leave: bool) -> bool:
    """Whether PyTorch computes the convolution's gradients."""
    if wanted[0] and not has_input_gradient(conv):
        return True  # no convolution of the library gives the input's
    if not may_leave or not (wanted[0] or wanted[1]):
        return False
    how = (_cpu.geometry_of(input), torch.get_num_threads(), (wanted[0], wanted[1]))
    return _cpu.leaves_gradients(conv.text, *how)


def _tail_gradients(
    tail: str, output_gradient: Tensor, saved: list[Tensor], wanted: Sequence[bool], large: bool
) -> Sequence[Tensor]:
    """The gradients of the convolution's output, written over it if large and possible, and of parameters."""
    activation, statistics, parameters = 1, saved[2], saved[4:]
    if (
        large
        and wanted[0]
        and _has_no_other_holder(saved, activation)
        and torch.ops.onepass.may_overwrite_input.default(
            output_gradient, saved[activation], parameters, tail, wanted
        )
    ):
        _, *gradients = torch.ops.onepass.backward_.default(
            output_gradient, saved[activation], parameters, statistics, tail, wanted
        )
        return saved[activation], *gradients
    return torch.ops.onepass.backward.default(
        output_gradient, saved[activation], parameters, statistics, tail, wanted
    )


def _has_no_other_holder(tensors: list[Tensor], index: int) -> bool:
    """Whether the list alone holds the tensor and its memory.

    A retained graph holds it too. So may a hook on saved tensors, or code that read them from grad_fn.
    """
    # getrefcount counts its own argument too, and the storage's count the object of untyped_storage().
    return (
        sys.getrefcount(tensors[index]) == 2
        and tensors[index]._use_count() == 1
        and torch._C._storage_Use_Count(tensors[index].untyped_storage()._cdata) == 2
    )
