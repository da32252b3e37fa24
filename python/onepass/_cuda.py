"""Running a block on CUDA tensors: whole where that is faster, else a tail after PyTorch's convolution."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from onepass import _choices, _eager, _fallback, _library, _numerics, tuning
from onepass._autograd import Stages, applied, differentiable_again, is_exporting
from onepass._conv_gradients import conv_gradients_by_torch, memory_format
from onepass._description import Description, constant, describe
from onepass._fallback import Site
from onepass._operator import call as _call
from onepass._redone import counter
from onepass._types import result_dtype

FUSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def apply(
    block: str,
    input: Tensor,
    parameters: Sequence[Tensor],
    out_dtype: torch.dtype | None,
    site: Site | str,
    settled: tuple[int, ...] = (),
) -> Tensor:
    """As _ops.run_block. A convolution that runs here has PyTorch's precision; others are PyTorch's own."""
    description = describe(block)
    conv = description.conv
    if conv is None:
        return _run_tail(description, input, parameters, out_dtype, site)
    policy = _policy_of(site)
    if torch.compiler.is_dynamo_compiling() and _is_decided_later(input, parameters, out_dtype):
        return torch.ops.onepass.cuda_block.default(input, list(parameters), block, policy)
    frozen = None if isinstance(site, str) else site.frozen
    if frozen is not None:
        frozen.expect_change()
    trains = _wants_any(input, parameters)
    if trains and description.after_conv is None:  # each pass is decided by itself
        return _run_apart(description, input, parameters, out_dtype, policy, site)
    # Whole blocks have one type: the fp32 scale of a batch norm of 16 bits is no mistake to be told of.
    counting = None if settled and out_dtype is not None else site
    words = _words_of_call(description, input, parameters, out_dtype, site, counting)
    if words is not None:
        if trains:
            return applied(_Whole, (block, words, site), (input, *parameters))
        if frozen is not None:
            kept = _call(frozen.find, (block, words[0]), input, parameters, description.conv_parameters)
            if kept is not None:
                operator, numerics = torch.ops.onepass.frozen_forward.default, words[0]
                packed, packing, redone = kept.tensor, kept.packing, counter(site, input)
                return _call(operator, input, parameters, block, numerics, packed, packing, redone)
        return _call(_whole_forward, input, parameters, block, words[0], counter(site, input))
    return _run_apart(description, input, parameters, out_dtype, policy, site)


# --- Blocks with a convolution that is run here ---


def is_whole(block: str, input: Tensor, parameters: Sequence[Tensor], site: Site | str) -> bool:
    """Whether apply would run the block in one operator; `parameters` may stand for others of their types."""
    return _words_of_call(describe(block), input, parameters, None, site, None) is not None


def _policy_of(site: Site | str) -> str:
    return (None if isinstance(site, str) else site.numerics) or _numerics.default()


def _run_apart(
    description: Description,
    input: Tensor,
    parameters: Sequence[Tensor],
    out_dtype: torch.dtype | None,
    policy: str,
    site: Site | str,
) -> Tensor:
    """The convolution, then the tail."""
    count = description.conv_parameters
    convolved = _convolve(description, input, parameters[:count], policy, site)
    if description.after_conv is None:
        return convolved if out_dtype is None else convolved.to(out_dtype)
    if not _adds_bias_later(description, input, parameters):
        return _run_tail(description.after_conv, convolved, parameters[count:], out_dtype, site)
    bias = parameters[1]
    if bias.dtype != convolved.dtype:  # under autocast
        bias = bias.to(convolved.dtype)
    return _run_tail(description.after_product, convolved, [bias, *parameters[count:]], out_dtype, site)


def _adds_bias_later(description: Description, input: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether the tail adds the convolution's bias. PyTorch's kernel for it reads and writes the output once
    more: 181 us beside 129 of the convolution (64 to 512 channels, k=1, 64x1869, bf16).
    """
    if description.after_conv is None or not description.conv.bias:
        return False
    return why_eager(input.dtype, parameters[1].dtype) is None


def _convolve(
    description: Description, input: Tensor, parameters: Sequence[Tensor], policy: str, site: Site | str
) -> Tensor:
    """The convolution alone, without a bias that the tail adds: PyTorch's, but where gradients are wanted
    and a pass is predicted to gain here.
    """
    if _adds_bias_later(description, input, parameters):
        parameters = parameters[:1]
    alone = description if description.after_conv is None else description.conv_alone
    if len(parameters) == len(alone.parameters) and any(_wanted(input, parameters)):
        passes = _passes_of(alone, input, parameters, policy, site if alone is description else None)
        if passes is not None:
            return applied(_Convolution, (alone, passes, site), (input, *parameters))
    return _eager.convolve(description.conv, input, *parameters)


Words = tuple[str, str]  # the numerics of an operator: of the forward pass, of the gradients


@dataclasses.dataclass(frozen=True)
class _Passes:
    """Who computes a convolution and its gradients: this library with these numerics, or PyTorch."""

    words: Words
    forward: bool
    gradients: tuple[bool, ...]  # of the input and of the parameters


def _passes_of(
    alone: Description, input: Tensor, parameters: Sequence[Tensor], policy: str, site: Site | str | None
) -> _Passes | None:
    """None where all is PyTorch's. `site` counts the calls whose types alone speak against it."""
    if torch.compiler.is_compiling() or isinstance(input, FakeTensor):
        return None
    if not _has_one_type(input, parameters, None):
        if site is not None:
            _note_types(alone, input, parameters, site)
        return None
    weight, wanted = parameters[0], _wanted(input, parameters)
    forward = _numerics.forward_words(policy, alone.conv, input, weight)
    convolves = forward is not None and _is_worth_fusing(*_how(alone, input, forward))
    ours = [False] * len(wanted)
    for i in range(2):
        only = tuple(want and number == i for number, want in enumerate(wanted))
        words = _numerics.backward_words(policy, alone, input, weight, only)
        ours[i] = any(only) and _is_worth_training(*_how(alone, input, words), only)
    ours[2:] = [ours[1]] * len(ours[2:])  # a bias is added along
    if not convolves and not any(ours):
        return None
    backward = _numerics.backward_words(policy, alone, input, weight, ours)
    return _Passes((forward or "", backward), convolves, tuple(ours))


def _words_of_call(
    description: Description,
    input: Tensor,
    parameters: Sequence[Tensor],
    out_dtype: torch.dtype | None,
    site: Site | str,
    counting: Site | str | None,
) -> Words | None:
    """As _words_of_whole. A place keeps the answer for calls without gradients."""
    policy, key = _policy_of(site), None
    if not (isinstance(site, str) or out_dtype is not None or _wants_any(input, parameters)):
        key = _choices.key_of(description.text, input, parameters, policy)
        if key in site.choices:
            return site.choices[key]
    # Each call that its types keep from running whole is counted.
    decides = key is not None and _has_one_type(input, parameters, out_dtype)
    holds = decides and _numerics.is_known(policy, description.conv, input, parameters[0])
    words = _words_of_whole(description, input, parameters, out_dtype, policy, counting)
    if holds:
        _choices.keep(site.choices, key, words)
    return words


def _words_of_whole(
    description: Description,
    input: Tensor,
    parameters: Sequence[Tensor],
    out_dtype: torch.dtype | None,
    policy: str,
    site: Site | str | None = None,
) -> Words | None:
    """How the convolution runs here too: one element type, no autocast, and the plan predicts a gain; None
    where it is PyTorch's.

    Where gradients are wanted, the gain of the whole training step. While something traces, when sizes may be
    symbolic, the convolution is PyTorch's. `site` counts the calls whose types alone speak against it.
    """
    if torch.compiler.is_compiling() or isinstance(input, FakeTensor):
        return None
    if not _has_one_type(input, parameters, out_dtype):
        if site is not None:
            _note_types(description, input, parameters, site)
        return None
    conv, weight = description.conv, parameters[0]
    forward = _numerics.forward_words(policy, conv, input, weight)
    if forward is None:
        return None
    wanted = _wanted(input, parameters)
    if any(wanted):
        backward = _numerics.backward_words(policy, description, input, weight, wanted)
        return (
            (forward, backward) if _is_worth_training(*_how(description, input, backward), wanted) else None
        )
    how = _how(description, input, forward)
    chosen = _tuned(description, input, parameters, how, forward) if tuning.is_tuning() else None
    is_worth = _is_worth_fusing(*how) if chosen is None else chosen
    return (forward, forward) if is_worth else None


def _has_one_type(input: Tensor, parameters: Sequence[Tensor], out_dtype: torch.dtype | None) -> bool:
    dtype = input.dtype
    if dtype not in FUSED_DTYPES or out_dtype not in (None, dtype):
        return False
    if torch.is_autocast_enabled("cuda") or any(parameter.dtype != dtype for parameter in parameters):
        return False
    return unavailable_reason() is None


def _note_types(
    description: Description, input: Tensor, parameters: Sequence[Tensor], site: Site | str
) -> None:
    """Counts a convolution that is PyTorch's for the types of its tensors, not by cost."""
    low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else input.dtype
    reason = why_eager(input.dtype, low, *(parameter.dtype for parameter in parameters))
    if reason is not None:
        if description.after_conv is None:  # else the tail says it
            _fallback.left(site, _fallback.CONVOLUTION, reason)
        return
    block, sizes, _, last, device = _how(description, input, "")
    how, wanted = (block, sizes, _numerics.mode_of(low, ""), last, device), _wanted(input, parameters)
    if not (_is_worth_training(*how, wanted) if any(wanted) else _is_worth_fusing(*how)):
        return
    reason = "its tensors have different types; cast its parameters and its input to one to run fused"
    if torch.is_autocast_enabled("cuda"):
        reason = f"autocast is on; cast the model and its input to {low} instead to run fused"
    _fallback.left(site, _fallback.CONVOLUTION, reason)


def _is_decided_later(input: Tensor, parameters: Sequence[Tensor], out_dtype: torch.dtype | None) -> bool:
    """Whether a graph of Dynamo, which cannot ask the plan, holds the block as one operator: gradients are
    not wanted. The operator is what it decides to be when the graph is lowered.
    """
    return not _wants_any(input, parameters) and _has_one_type(input, parameters, out_dtype)


def _lowered_block(input: Tensor, parameters: Sequence[Tensor], block: str, policy: str) -> Tensor:
    """Whole where the sizes are known and the plan predicts a gain; else PyTorch's convolution and the tail.

    Then PyTorch's compiler chooses the layout of the convolution.
    """
    description = describe(block)
    known = all(isinstance(size, int) for size in input.shape)
    with torch.no_grad():
        words = _numerics.forward_words(policy, description.conv, input, parameters[0]) if known else None
        if words is not None and _is_worth_fusing(*_how(description, input, words)):
            return torch.ops.onepass.whole_forward.default(input, parameters, block, words)
        if description.after_conv is None:
            return _eager.convolve(description.conv, input, *parameters)
        convolved = _eager.convolve(description.conv, input, parameters[0])
        tail = description.after_product.text
        strict = _numerics.tail_words(policy)
        return torch.ops.onepass.forward.default(convolved, parameters[1:], tail, None, strict)


if _library.available():
    _whole_forward = torch.ops.onepass.whole_forward.default
    _operators = torch.library.Library("onepass", "FRAGMENT")
    _operators.define("cuda_block(Tensor input, Tensor[] parameters, str block, str policy) -> Tensor")
    _operators.impl("cuda_block", _lowered_block, "CompositeImplicitAutograd")


def _how(description: Description, input: Tensor, words: str) -> tuple[str, tuple[int, ...], str, bool, str]:
    """What a choice is made by."""
    last = memory_format(input) != torch.contiguous_format
    mode = _numerics.mode_of(input.dtype, words)
    return description.text, tuple(input.shape), mode, last, str(input.device)


def _wants_any(input: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether any gradient is wanted."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (input, *parameters))


def _wanted(input: Tensor, parameters: Sequence[Tensor]) -> tuple[bool, ...]:
    """Which gradients are: the input's, then each parameter's."""
    enabled = torch.is_grad_enabled()
    return tuple(enabled and tensor.requires_grad for tensor in (input, *parameters))


@functools.lru_cache(maxsize=4096)
def _is_worth_fusing(block: str, sizes: tuple[int, ...], mode: str, last: bool, device: str) -> bool:
    layout = "nhwc" if last else "nchw"
    with _disable_current_modes():  # those of a compiler at work
        return torch.ops.onepass.cuda_is_worth_fusing(block, sizes, mode, layout, device)


_CLOSE = 3.0  # predictions this far apart are not doubted
_measured: dict[tuple[Any, ...], bool] = {}


def _tuned(
    description: Description, input: Tensor, parameters: Sequence[Tensor], how: tuple[Any, ...], words: str
) -> bool | None:
    """Whether the block is measured to be faster whole than as PyTorch's convolution and the tail.

    None where the predictions are not close, or nothing can be measured now.
    """
    if how in _measured:
        return _measured[how]
    if torch.cuda.is_current_stream_capturing():
        return None
    block, sizes, mode, last, device = how
    gain = torch.ops.onepass.cuda_predicted_gain(block, sizes, mode, "nhwc" if last else "nchw", device)
    if not 1 / _CLOSE < gain < _CLOSE:
        return None
    whole = torch.ops.onepass.whole_forward.default

    def parts() -> Tensor:
        return _run_apart(description, input, parameters, None, "", block)

    ways = {"whole": lambda: whole(input, parameters, block, words), "parts": parts}
    question = f"{block} @ {sizes} {mode} {'nhwc' if last else 'nchw'}: whole or parts"
    _measured[how] = tuning.faster(input.device, question, ways) == "whole"
    return _measured[how]


@functools.lru_cache(maxsize=4096)
def _is_worth_training(
    block: str, sizes: tuple[int, ...], mode: str, last: bool, device: str, wanted: tuple[bool, ...]
) -> bool:
    layout = "nhwc" if last else "nchw"
    return torch.ops.onepass.cuda_is_worth_training(block, sizes, mode, layout, device, wanted)


def _run_stages(text: str) -> Callable[..., Tensor]:
    return lambda input, *parameters: _eager.run(text, input, parameters)


def _convolution_stages(ctx: Any) -> Stages:
    return ctx.how[0], _run_stages(ctx.how[0]), list(ctx.saved_tensors), 3


def _whole_stages(ctx: Any) -> Stages:
    input, _, _, *parameters = ctx.saved_tensors
    return ctx.how[0], _run_stages(ctx.how[0]), [input, *parameters], 3


def _tail_stages(ctx: Any) -> Stages:
    input, _, *parameters = ctx.saved_tensors
    return ctx.how[0], _run_stages(ctx.how[0]), [input, *parameters], 3


class _Convolution(torch.autograd.Function):
    """A convolution alone: each pass here or by PyTorch. Saves its input and its parameters."""

    @staticmethod
    def forward(
        ctx: Any, alone: Description, passes: _Passes, site: Site | str, input: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.how, ctx.ours = (alone.text, passes.words[1]), passes.gradients
        ctx.save_for_backward(input, *parameters)
        if passes.forward:
            operator = torch.ops.onepass.whole_forward.default
            return _call(operator, input, parameters, alone.text, passes.words[0], counter(site, input))
        return _eager.convolve(alone.conv, input, *parameters)

    @staticmethod
    @differentiable_again(_convolution_stages)
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        ours = [want and own for want, own in zip(wanted, ctx.ours)]
        others = [want and not own for want, own in zip(wanted, ctx.ours)]
        input, *parameters = ctx.saved_tensors
        input = input.contiguous(memory_format=memory_format(input))
        gradients: list[Tensor | None] = [None] * len(wanted)
        if any(ours):
            operator, nothing = torch.ops.onepass.whole_backward.default, input.new_empty(0)
            given = _call(operator, output_gradient, input, parameters, nothing, nothing, *ctx.how, ours)
            gradients = [gradient if own else None for gradient, own in zip(given, ours)]
        if any(others):
            conv = describe(ctx.how[0]).conv
            given = conv_gradients_by_torch(conv, output_gradient, input, parameters[0], others)
            gradients = [more if other else own for own, more, other in zip(gradients, given, others)]
        return None, None, None, *gradients


class _Whole(torch.autograd.Function):
    """A block with its convolution, whose gradients are wanted.

    Saves its input, its parameters and the statistics of its slabs: the convolution is computed anew.
    """

    @staticmethod
    def forward(
        ctx: Any, block: str, words: Words, site: Site | str, input: Tensor, *parameters: Tensor
    ) -> Tensor:
        operator = torch.ops.onepass.whole_forward_with_statistics.default
        output, statistics = _call(operator, input, parameters, block, words[0], counter(site, input))
        ctx.how = block, words[1]
        # Means are small, and spare the gradients a pass.
        kept = output if output.dim() == 2 else statistics.new_empty(0)
        ctx.save_for_backward(input, statistics, kept, *parameters)
        return output

    @staticmethod
    @differentiable_again(_whole_stages)
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        input, statistics, kept, *parameters = ctx.saved_tensors
        operator = torch.ops.onepass.whole_backward.default
        gradients = _call(operator, output_gradient, input, parameters, statistics, kept, *ctx.how, wanted)
        return None, None, None, *(gradient if want else None for gradient, want in zip(gradients, wanted))


# --- Tails ---


def _run_tail(
    description: Description,
    input: Tensor,
    parameters: Sequence[Tensor],
    out_dtype: torch.dtype | None,
    site: Site | str,
) -> Tensor:
    low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    dtype, differentiate = input.dtype, input.requires_grad
    same = low is None and dtype in FUSED_DTYPES
    for parameter in parameters:
        same = same and parameter.dtype == dtype
        differentiate = differentiate or parameter.requires_grad
    if same and out_dtype is None:
        reason = unavailable_reason()
    else:
        out_dtype = out_dtype or result_dtype(description, input, parameters, low, "cuda")
        reason = why_eager(out_dtype, dtype, *(parameter.dtype for parameter in parameters))
    if reason is not None:
        _fallback.left(site, _fallback.STAGES, reason)
        output = _eager.run(description.text, input, parameters)
        return output if out_dtype is None else output.to(out_dtype)
    words = _numerics.tail_words(_policy_of(site))
    if differentiate and torch.is_grad_enabled() and not is_exporting():
        return applied(_Tail, (description.text, out_dtype, words), (input, *parameters))
    return _call(torch.ops.onepass.forward.default, input, parameters, description.text, out_dtype, words)


def why_eager(*dtypes: torch.dtype) -> str | None:
    """Why tails with tensors of these types run as PyTorch's stages; None where one kernel runs them."""
    for dtype in dtypes:
        if dtype not in FUSED_DTYPES:
            name = str(dtype).removeprefix("torch.")
            return f"{name} is not computed by the GPU kernels; use float32, float16 or bfloat16 to run fused"
    return unavailable_reason()


_asked: list[str | None] = []  # the answer, once there is one


@constant
def unavailable_reason() -> str | None:
    """Why no kernel can be compiled or run, as one sentence; None where it can.

    Asked of the driver once, when the first CUDA tensor comes: a process that only imports onepass can fork.
    """
    if not _asked:
        reason = _library.unavailable_reason()
        _asked.append(reason or torch.ops.onepass.cuda_unavailable_reason() or None)
    return _asked[0]


class _Tail(torch.autograd.Function):
    """A tail whose gradients are wanted: saves its input, its parameters and the statistics of its slabs."""

    @staticmethod
    def forward(
        ctx: Any, tail: str, out_dtype: torch.dtype | None, words: str, input: Tensor, *parameters: Tensor
    ) -> Tensor:
        operator = torch.ops.onepass.forward_with_statistics.default
        output, statistics = _call(operator, input, parameters, tail, out_dtype, words)
        ctx.how = tail, words
        ctx.save_for_backward(input, statistics, *parameters)
        return output

    @staticmethod
    @differentiable_again(_tail_stages)
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        input, statistics, *parameters = ctx.saved_tensors
        operator = torch.ops.onepass.backward.default
        tail, words = ctx.how
        gradients = _call(operator, output_gradient, input, parameters, statistics, tail, wanted, words)
        return None, None, None, *(gradient if want else None for gradient, want in zip(gradients, wanted))
