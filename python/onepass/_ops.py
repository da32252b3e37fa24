"""Running a block on tensors: the raw operator, and its autograd function where gradients are needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onepass import _cuda, _eager, _fallback, _library
from onepass._autograd import differentiable_again, gradients_of, is_exporting
from onepass._conv_gradients import conv_gradients_by_torch, memory_format
from onepass._description import Conv, Description, Pointwise, describe
from onepass._fallback import Site, tracing, transforming
from onepass._types import lowered_dtype, result_dtype


def apply(
    block: str,
    input: Tensor,
    parameters: Sequence[Tensor],
    *,
    out_dtype: torch.dtype | None = None,
    site: Site | None = None,
) -> Tensor:
    """Runs the block; `parameters` are in the order of the block's stages.

    Differentiable; gradients of gradients are PyTorch's own. The output has PyTorch's type for these stages,
    also under autocast, unless a type is given. Inside transforms and tracers PyTorch runs the stages. `site`
    counts the calls that leave the fused path; without one the block's text does.
    """
    counter = block if site is None else site
    if torch.compiler.is_compiling():
        return run_traced(block, input, parameters, out_dtype, counter)
    if transforming() or forward_ad._current_level >= 0 or tracing():
        reason = _fallback.why_transformed()
        return _run_stages(block, input, parameters, out_dtype, counter, reason)
    return run_block(block, input, parameters, out_dtype, counter)


def _run_stages(
    block: str,
    input: Tensor,
    parameters: Sequence[Tensor],
    out_dtype: torch.dtype | None,
    site: Site | str,
    reason: str,
) -> Tensor:
    _fallback.left(site, _fallback.STAGES, reason)
    output = _eager.run(block, input, parameters)
    return output if out_dtype is None else output.to(out_dtype)


def run_traced(
    block: str,
    input: Tensor,
    parameters: Sequence[Tensor],
    out_dtype: torch.dtype | None,
    site: Site | str,
) -> Tensor:
    """As apply, while torch.compile or torch.export traces. ONNX has PyTorch's operators alone."""
    if is_exporting() and torch.onnx.is_in_onnx_export():
        output = _eager.run(block, input, parameters)
        return output if out_dtype is None else output.to(out_dtype)
    return run_block(block, input, parameters, out_dtype, site)


def run_block(
    block: str,
    input: Tensor,
    parameters: Sequence[Tensor],
    out_dtype: torch.dtype | None,
    site: Site | str,
    of_modules: bool = False,
) -> Tensor:
    """As apply, where nothing transforms or records PyTorch's operators.

    `of_modules`: raises TypeError for tensors of several types, which PyTorch's modules may refuse.
    """
    if input.is_cuda:
        if of_modules:
            _require_one_type(input, parameters, "cuda")
        return _run_on_cuda(block, input, parameters, out_dtype, site)
    if not (input.is_cpu or input.is_meta):
        reason = f"the library has no kernels for {input.device.type}"
        return _run_stages(block, input, parameters, out_dtype, site, reason)
    _library.require()
    low = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    dtype, differentiate = input.dtype, input.requires_grad
    same = low is None and dtype in _COMPUTED
    for parameter in parameters:
        same = same and parameter.dtype == dtype
        differentiate = differentiate or parameter.requires_grad
    if not same:
        if of_modules:
            _require_one_type(input, parameters, "cpu")
        out_dtype = out_dtype or result_dtype(describe(block), input, parameters, low)
        reason = _why_reference(out_dtype, dtype, *(parameter.dtype for parameter in parameters))
        if reason is not None and not input.is_meta:
            _fallback.left(site, _fallback.REFERENCE, reason)
    if differentiate and torch.is_grad_enabled():
        if is_exporting():
            return torch.ops.onepass.forward_for_training.default(input, list(parameters), block, out_dtype)
        if low is not None:
            input, parameters = _lowered(describe(block), input, parameters, low)
        return _Differentiable.apply(block, out_dtype, input, *parameters)
    return torch.ops.onepass.forward.default(input, parameters, block, out_dtype)


def _require_one_type(input: Tensor, parameters: Sequence[Tensor], device: str) -> None:
    """Autocast brings all but doubles together."""
    dtypes = {tensor.dtype for tensor in (input, *parameters)}
    if len(dtypes) > 1 and (torch.float64 in dtypes or not torch.is_autocast_enabled(device)):
        raise TypeError("its tensors have several types, which PyTorch may refuse")


# What the vectorised kernels of this CPU compute. The library's reference computes everything.
_COMPUTED = _cuda.FUSED_DTYPES if _library.has_cpu_kernels() else ()


def _why_reference(*dtypes: torch.dtype) -> str | None:
    """Why no kernel of the CPU computes tensors of these types."""
    if not _COMPUTED:
        return "this CPU has neither NEON nor AVX2"
    if torch.float64 in dtypes:
        return "float64 is not computed by the CPU kernels; use float32, float16 or bfloat16 to run fused"
    return None


_unbuilt: dict[tuple[Any, ...], str] = {}  # calls for which no kernel could be built, and why


def _run_on_cuda(
    block: str,
    input: Tensor,
    parameters: Sequence[Tensor],
    out_dtype: torch.dtype | None,
    site: Site | str,
) -> Tensor:
    """PyTorch runs the stages of a block for which no kernel can be built: not tried again for its sizes."""
    if torch.is_grad_enabled() and is_exporting() and any(t.requires_grad for t in (input, *parameters)):
        return torch.ops.onepass.forward_for_training.default(input, list(parameters), block, out_dtype)
    if _unbuilt and (reason := _unbuilt.get(_call_key(block, input, parameters))) is not None:
        return _run_stages(block, input, parameters, out_dtype, site, reason)
    try:
        return _cuda.apply(block, input, parameters, out_dtype, site)
    except _cuda.BuildFailed as failed:
        reason = str(failed)
    _unbuilt[_call_key(block, input, parameters)] = reason
    return _run_stages(block, input, parameters, out_dtype, site, reason)


def _call_key(block: str, input: Tensor, parameters: Sequence[Tensor]) -> tuple[Any, ...]:
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (input, *parameters))
    return block, input.shape, input.stride(), input.dtype, input.device, wanted


def _lowered(
    description: Description, input: Tensor, parameters: Sequence[Tensor], low: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """What autocast hands to the convolution. Without gradients nothing is rounded but the output."""
    count = description.conv_parameters
    if count == 0:
        return input, list(parameters)
    input, *conv = (t.to(lowered_dtype(t.dtype, low)) for t in (input, *parameters[:count]))
    return input, [*conv, *parameters[count:]]


# --- Gradients ---


class _Differentiable(torch.autograd.Function):
    """A block whose gradients are wanted: the convolution, then the tail.

    Saves the input, the parameters, the convolution's output (read instead of computed again) and the
    statistics. `forward` takes ctx: with setup_context a call takes 24 microseconds more.
    """

    @staticmethod
    def forward(
        ctx: Any, block: str, out_dtype: torch.dtype | None, input: Tensor, *parameters: Tensor
    ) -> Tensor:
        description = describe(block)
        ctx.block = block
        ctx.stages = _stages_again
        ctx.bias = None
        if description.conv is None:
            output, statistics = torch.ops.onepass.forward_with_statistics.default(
                input, parameters, block, out_dtype
            )
            ctx.save_for_backward(input, statistics, *parameters)
            return output
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
    @differentiable_again
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        description = describe(ctx.block)
        wanted = ctx.needs_input_grad[2:]
        if description.conv is None:
            input, statistics, *parameters = ctx.saved_tensors
            gradients = torch.ops.onepass.backward.default(
                output_gradient, input, parameters, statistics, ctx.block, wanted
            )
        else:
            saved = list(ctx.saved_tensors)
            if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
                ctx.maybe_clear_saved_tensors()  # unless the graph is retained
            gradients = _block_gradients(description, output_gradient, saved, wanted)
        return None, None, *(gradient if want else None for gradient, want in zip(gradients, wanted))


def _stages_again(ctx: Any) -> tuple[str, Any, list[Tensor], int]:
    """What differentiable_again needs. Values are those of the forward pass, whatever became of the bias."""
    description = describe(ctx.block)
    if description.conv is None:
        input, _, *parameters = ctx.saved_tensors
        return ctx.block, lambda x, *own: _eager.run(ctx.block, x, own), [input, *parameters], 2
    input, activation, _, weight, *tail_parameters = ctx.saved_tensors
    conv, tail = description.conv, description.tail
    count = description.conv_parameters

    def run(x: Tensor, *own: Tensor) -> Tensor:
        convolved = _eager.convolve(conv, x, *own[:count])
        if tail:
            convolved = convolved + (activation.to(convolved.dtype) - convolved).detach()
        return _eager.run(tail, convolved, own[count:]) if tail else convolved

    bias = () if ctx.bias is None else (ctx.bias,)
    return ctx.block, run, [input, weight, *bias, *tail_parameters], 2


# From this size on the convolution's output is freed before the convolution's gradients are allocated; below,
# the second call of an operator that this takes (15 microseconds) is worth more.
_LARGE_BYTES = 1 << 20


def _block_gradients(
    description: Description, output_gradient: Tensor, saved: list[Tensor], wanted: Sequence[bool]
) -> Sequence[Tensor | None]:
    """The gradients of the input and of all parameters of a block with a convolution. Empties `saved`."""
    conv = description.conv
    assert conv is not None
    by_library = not wanted[0] or has_input_gradient(conv)
    large = not torch.compiler.is_compiling() and saved[1].nbytes >= _LARGE_BYTES
    if by_library and not large:
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
    elif by_library:
        conv_gradients = torch.ops.onepass.block_backward.default(
            gradient, input, nothing, [weight], nothing, conv.text, conv_wanted
        )
    else:  # no convolution of the library gives the input's gradient
        conv_gradients = conv_gradients_by_torch(conv, gradient.to(input.dtype), input, weight, conv_wanted)
    return *conv_gradients, *tail_gradients


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

    The graph does where it is retained, and whoever looked at saved tensors, in a hook or by grad_fn, may.
    """
    # getrefcount counts its own argument too, and the storage's count the object of untyped_storage().
    return (
        sys.getrefcount(tensors[index]) == 2
        and tensors[index]._use_count() == 1
        and torch._C._storage_Use_Count(tensors[index].untyped_storage()._cdata) == 2
    )


def has_input_gradient(conv: Conv) -> bool:
    """Whether a convolution of the library gives it: up to 16 times as fast as PyTorch's on Neoverse-V1."""
    even = conv.padding_before == conv.padding_after
    # Output padding of a stride and more reaches beyond what a plain convolution of the gradient sees.
    seen = all(padding < stride for padding, stride in zip(conv.output_padding, conv.stride))
    return even and seen


# --- What the operators return, without running them: also for symbolic sizes ---


def _check_fakes(description: Description, input: Tensor, parameters: Sequence[Tensor]) -> None:
    """What running would refuse and the shapes below rely on."""
    conv = description.conv
    if len(parameters) != len(description.parameters):
        raise ValueError(
            f"{description.text}: {len(parameters)} parameters, must be {len(description.parameters)}"
        )
    if conv is not None and (input.dim() != conv.rank + 2 or input.shape[1] != conv.in_channels):
        raise ValueError(f"{conv.text}: the input {tuple(input.shape)} does not fit")
    if any(parameter.device != input.device for parameter in parameters):
        raise RuntimeError(f"{description.text}: all tensors must be on the input's device, {input.device}")


def _operand_format(description: Description, index: int, parameter: Tensor) -> torch.memory_format:
    """Tensors of the input's size keep their format, weights and vectors are contiguous."""
    stage = description.stages[description.parameters[index].stage]
    is_tensor = isinstance(stage, Pointwise) and stage.argument == "tensor"
    return memory_format(parameter) if is_tensor else torch.contiguous_format


def _fake_forward(
    input: Tensor,
    parameters: Sequence[Tensor],
    block: str,
    out_dtype: torch.dtype | None = None,
    numerics: str = "",
) -> Tensor:
    description = describe(block)
    _check_fakes(description, input, parameters)
    deciding = (input,) if description.conv is None else (input, parameters[0])
    shape = description.output_shape(input.shape)
    order = memory_format(*deciding) if len(shape) > 2 else torch.contiguous_format
    return torch.empty(shape, dtype=out_dtype or input.dtype, device=input.device, memory_format=order)


def _fake_forward_with_statistics(
    input: Tensor,
    parameters: Sequence[Tensor],
    block: str,
    out_dtype: torch.dtype | None = None,
    numerics: str = "",
) -> tuple[Tensor, Tensor]:
    statistics = describe(block).statistics_shape(input.shape)
    output = _fake_forward(input, parameters, block, out_dtype)
    return output, input.new_empty(statistics, dtype=torch.float32)


def _fake_backward(
    output_gradient: Tensor,
    input: Tensor,
    parameters: Sequence[Tensor],
    statistics: Tensor,
    block: str,
    wanted: Sequence[bool],
    numerics: str = "",
) -> list[Tensor]:
    description = describe(block)
    # The kernels of a GPU have all tensors of the input's size in its order.
    deciding = [input] * len(parameters) if input.is_cuda else parameters
    formats = [memory_format(input), *(_operand_format(description, i, p) for i, p in enumerate(deciding))]
    gradients = [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=order)
        for tensor, order in zip((input, *parameters), formats, strict=True)
    ]
    return [g if want else g.new_empty(0) for g, want in zip(gradients, wanted, strict=True)]


def _fake_backward_over_input(
    output_gradient: Tensor,
    input: Tensor,
    parameters: Sequence[Tensor],
    statistics: Tensor,
    block: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    return _fake_backward(output_gradient, input, parameters, statistics, block, (False, *wanted[1:]))


def _fake_block_forward(
    input: Tensor, parameters: Sequence[Tensor], block: str, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    description = describe(block)
    output = _fake_forward(input, parameters, block, out_dtype)
    if not description.tail:
        return output, *(input.new_empty(0, dtype=torch.float32) for _ in range(2))
    count = description.conv_parameters
    activation = _fake_forward(input, parameters[:count], description.conv.text)
    return output, activation, input.new_empty(description.statistics_shape(input.shape), dtype=torch.float32)


def _fake_block_backward(
    output_gradient: Tensor,
    input: Tensor,
    activation: Tensor,
    parameters: Sequence[Tensor],
    statistics: Tensor,
    block: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    description = describe(block)
    conv, count = description.conv, description.conv_parameters
    weight, *tail = parameters
    gradients = [
        torch.empty(input.shape, dtype=input.dtype, memory_format=memory_format(input), device=input.device),
        torch.empty(weight.shape, dtype=weight.dtype, device=input.device),
    ]
    if conv.bias:
        gradients.append(weight.new_empty(conv.out_channels))
    for i, parameter in enumerate(tail):
        order = _operand_format(description, count + i, parameter)
        gradients.append(torch.empty_like(parameter, memory_format=order))
    return [g if want else g.new_empty(0) for g, want in zip(gradients, wanted, strict=True)]


def _fake_whole_forward(
    input: Tensor, parameters: Sequence[Tensor], block: str, numerics: str, redone: int = -1
) -> Tensor:
    return _fake_forward(input, parameters, block)


def _fake_whole_forward_with_statistics(
    input: Tensor, parameters: Sequence[Tensor], block: str, numerics: str, redone: int = -1
) -> tuple[Tensor, Tensor]:
    return _fake_forward_with_statistics(input, parameters, block)


def _fake_whole_backward(
    output_gradient: Tensor,
    input: Tensor,
    parameters: Sequence[Tensor],
    statistics: Tensor,
    output: Tensor,
    block: str,
    numerics: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    description = describe(block)
    order = memory_format(input, parameters[0])
    gradients = [torch.empty_like(input, memory_format=memory_format(input))]
    for i, parameter in enumerate(parameters):
        stage = description.stages[description.parameters[i].stage]
        is_tensor = isinstance(stage, Pointwise) and stage.argument == "tensor"
        own = order if is_tensor else torch.contiguous_format
        gradients.append(torch.empty_like(parameter, memory_format=own))
    return [g if want else g.new_empty(0) for g, want in zip(gradients, wanted, strict=True)]


# --- In exported programs ---


def _forward_for_training(
    input: Tensor, parameters: Sequence[Tensor], block: str, out_dtype: torch.dtype | None = None
) -> Tensor:
    with torch.no_grad():
        return run_block(block, input, parameters, out_dtype, block)


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, parameters, ctx.block, ctx.out_dtype = inputs
    ctx.save_for_backward(input, *parameters)


def _exported_gradients(ctx: Any, output_gradient: Tensor) -> tuple[Any, ...]:
    input, *parameters = ctx.saved_tensors
    wanted = (ctx.needs_input_grad[0], *ctx.needs_input_grad[1])

    def run(x: Tensor, *own: Tensor) -> Tensor:
        return _run_for_gradients(ctx.block, x, own, ctx.out_dtype)

    gradient, *own = gradients_of(run, [input, *parameters], wanted, output_gradient)
    others = len(ctx.needs_input_grad) - 2
    return gradient, own, *(None,) * others


def _run_for_gradients(
    block: str, input: Tensor, parameters: Sequence[Tensor], out_dtype: torch.dtype | None
) -> Tensor:
    if is_exporting() or torch.compiler.is_compiling():
        return _eager.run(block, input, parameters)
    return run_block(block, input, parameters, out_dtype, block)


if _library.available():
    _operators = torch.library.Library("onepass", "FRAGMENT")
    _operators.define(
        "forward_for_training(Tensor input, Tensor[] parameters, str block, ScalarType? out_dtype=None) "
        "-> Tensor"
    )
    _operators.impl("forward_for_training", _forward_for_training, "CompositeExplicitAutograd")
    torch.library.register_fake("onepass::forward_for_training", _fake_forward)
    torch.library.register_autograd(
        "onepass::forward_for_training", _exported_gradients, setup_context=_keep_arguments
    )
    torch.library.register_fake("onepass::forward", _fake_forward)
    torch.library.register_fake("onepass::forward_with_statistics", _fake_forward_with_statistics)
    torch.library.register_fake("onepass::backward", _fake_backward)
    torch.library.register_fake("onepass::backward_", _fake_backward_over_input)
    torch.library.register_fake("onepass::block_forward", _fake_block_forward)
    torch.library.register_fake("onepass::block_backward", _fake_block_backward)
    torch.library.register_fake("onepass::whole_forward", _fake_whole_forward)
    torch.library.register_fake("onepass::whole_forward_with_statistics", _fake_whole_forward_with_statistics)
    torch.library.register_fake("onepass::whole_backward", _fake_whole_backward)
