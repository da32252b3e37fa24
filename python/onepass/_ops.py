"""Running a block on tensors: the raw operator, and its autograd function where gradients are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onepass import _cpu, _cuda, _eager, _fallback, _library
from onepass._autograd import applied, gradients_of, is_exporting
from onepass._description import Description, describe
from onepass._differentiable import Differentiable
from onepass._fakes import fake_forward
from onepass._fallback import Site, tracing, transforming
from onepass._frozen import Frozen, Packed
from onepass._operator import BuildFailed
from onepass._types import lowered_dtype, result_dtype

_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


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
    try:
        return run_block(block, input, parameters, out_dtype, counter)
    except RuntimeError as error:
        raise _library.refusal(error) from None


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
    settled: tuple[int, ...] = (),
) -> Tensor:
    """As apply, while torch.compile or torch.export traces. ONNX has PyTorch's operators alone."""
    exporting = is_exporting()
    if exporting and torch.onnx.is_in_onnx_export():
        output = _eager.run(block, input, parameters)
        out_dtype = input.dtype if settled and out_dtype is None else out_dtype
        return output if out_dtype is None else output.to(out_dtype)
    return run_block(block, input, parameters, out_dtype, site, exporting=exporting, settled=settled)


def run_block(
    block: str,
    input: Tensor,
    parameters: Sequence[Tensor],
    out_dtype: torch.dtype | None,
    site: Site | str,
    geometry: _cpu.Geometry | None = None,
    exporting: bool = False,
    settled: tuple[int, ...] = (),
) -> Tensor:
    """As apply, where nothing transforms or records PyTorch's operators.

    `geometry`: the input's where the call stands for modules; it raises TypeError for tensors of several
    types, which PyTorch's modules may refuse, and on a CPU PyTorch's convolution runs where it is faster.
    `exporting`: torch.export records the call. `settled`: the numbers of parameters that leave the type as it
    is, those of batch norms and of operations in place.
    """
    if input.is_cuda:
        if geometry is not None:
            _require_one_type(input, parameters, "cuda", settled)
        if settled and out_dtype is None:
            out_dtype = _settled_type(block, input, parameters, settled)
        return _run_on_cuda(block, input, parameters, out_dtype, site, exporting, settled)
    if not (input.is_cpu or input.is_meta):
        reason = f"the library has no kernels for {input.device.type}"
        if settled:
            raise NotImplementedError(reason)
        return _run_stages(block, input, parameters, out_dtype, site, reason)
    if _forward is None:
        _library.require()
    low = None
    if _is_any_autocast_enabled() and torch.is_autocast_enabled("cpu"):  # which takes 0.3 us to say
        low = torch.get_autocast_dtype("cpu")
    dtype, grad = input.dtype, torch.is_grad_enabled()
    same, differentiate = low is None and dtype in _COMPUTED, grad and input.requires_grad
    for parameter in parameters:
        same = same and parameter.dtype is dtype
        differentiate = differentiate or (grad and parameter.requires_grad)
    if not same:
        if geometry is not None:
            _require_one_type(input, parameters, "cpu", settled)
        out_dtype = out_dtype or result_dtype(describe(block), input, parameters, low, settled=settled)
        reason = _why_reference(out_dtype, dtype, *(parameter.dtype for parameter in parameters))
        if reason is not None and not input.is_meta:
            _fallback.left(site, _fallback.REFERENCE, reason)
    frozen = None if isinstance(site, str) or torch.compiler.is_compiling() else site.frozen
    if frozen is not None and differentiate:
        frozen.expect_change()
    by_torch = None
    # Where autocast makes the convolution one of 16 bits, prices of f32 say nothing of PyTorch's.
    if geometry is not None and (low is None or not _cpu.chooses_gradients(dtype)):
        try:
            apart = _cpu.leaves_convolution(block, geometry, torch.get_num_threads(), differentiate)
        except TypeError:  # symbolic sizes have no hash
            apart = False
        chooses = differentiate and same and _cpu.chooses_gradients(dtype)
        if apart and not chooses:
            return _run_apart(describe(block), input, parameters, out_dtype, site, settled)
        by_torch = apart if chooses else None
    if differentiate:
        if exporting:
            return torch.ops.onepass.forward_for_training.default(input, list(parameters), block, out_dtype)
        if low is not None:
            input, parameters = _lowered(describe(block), input, parameters, low)
        return applied(Differentiable, (block, out_dtype, by_torch), (input, *parameters))
    if frozen is not None and same and out_dtype is None:
        kept = _kept_weights(block, input, parameters, frozen)
        if kept is not None:
            return _forward_frozen(input, parameters, block, "", kept.tensor, kept.packing)
    if geometry is None:  # torch.compile may trace it, which does not know the other
        return _forward(input, parameters, block, out_dtype)
    return _forward_now(input, parameters, block, out_dtype)


def _settled_type(
    block: str, input: Tensor, parameters: Sequence[Tensor], settled: tuple[int, ...]
) -> torch.dtype | None:
    """The output's type on a GPU; None where it is that of all tensors."""
    low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    if low is None and all(parameter.dtype is input.dtype for parameter in parameters):
        return None
    return result_dtype(describe(block), input, parameters, low, "cuda", settled)


def _run_apart(
    description: Description,
    input: Tensor,
    parameters: Sequence[Tensor],
    out_dtype: torch.dtype | None,
    site: Site | str,
    settled: tuple[int, ...],
) -> Tensor:
    """PyTorch's convolution, then what follows it in one operator."""
    count = description.conv_parameters
    convolved = _eager.convolve(description.conv, input, *parameters[:count])
    settled = tuple(number - count for number in settled)
    geometry = _cpu.geometry_of(convolved)
    return run_block(
        description.tail, convolved, parameters[count:], out_dtype, site, geometry, settled=settled
    )


def _kept_weights(block: str, input: Tensor, parameters: Sequence[Tensor], frozen: Frozen) -> Packed | None:
    """What a frozen place has packed for a call on a CPU."""
    count = describe(block).conv_parameters
    if count == 0 or input.is_meta:
        return None
    return frozen.find((block, "", torch.get_num_threads()), input, parameters, count)


_forward_frozen = torch.ops.onepass.frozen_forward.default if _library.available() else None
_forward = torch.ops.onepass.forward.default if _library.available() else None
_forward_now = getattr(_forward, "_op", _forward)  # what it calls itself, without a frame: 0.3 us


def _require_one_type(
    input: Tensor, parameters: Sequence[Tensor], device: str, settled: tuple[int, ...]
) -> None:
    """Autocast brings all but doubles together."""
    dtype = input.dtype
    for parameter in parameters:
        if parameter.dtype is not dtype:
            break
    else:
        return
    dtypes = {input.dtype, *(p.dtype for number, p in enumerate(parameters) if number not in settled)}
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
    exporting: bool,
    settled: tuple[int, ...],
) -> Tensor:
    """PyTorch runs the stages of a block for which no kernel can be built: not tried again for its sizes."""
    if exporting and _wants_gradients(input, parameters):
        return torch.ops.onepass.forward_for_training.default(input, list(parameters), block, out_dtype)
    if _unbuilt and (reason := _unbuilt.get(_call_key(block, input, parameters))) is not None:
        return _run_stages(block, input, parameters, out_dtype, site, reason)
    try:
        return _cuda.apply(block, input, parameters, out_dtype, site, settled)
    except BuildFailed as failed:
        reason = str(failed)
    _unbuilt[_call_key(block, input, parameters)] = reason
    return _run_stages(block, input, parameters, out_dtype, site, reason)


def _call_key(block: str, input: Tensor, parameters: Sequence[Tensor]) -> tuple[Any, ...]:
    wanted = _wants_gradients(input, parameters)
    return block, input.shape, input.stride(), input.dtype, input.device, wanted


def _wants_gradients(input: Tensor, parameters: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (input, *parameters))


def _lowered(
    description: Description, input: Tensor, parameters: Sequence[Tensor], low: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """What autocast hands to the convolution. Without gradients nothing is rounded but the output."""
    count = description.conv_parameters
    if count == 0:
        return input, list(parameters)
    input, *conv = (t.to(lowered_dtype(t.dtype, low)) for t in (input, *parameters[:count]))
    return input, [*conv, *parameters[count:]]


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
    torch.library.register_fake("onepass::forward_for_training", fake_forward)
    torch.library.register_autograd(
        "onepass::forward_for_training", _exported_gradients, setup_context=_keep_arguments
    )
