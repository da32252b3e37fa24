"""A batch norm in evaluation as a scale and a shift per channel, from its statistics at each call.

Nothing is kept between calls. Version counters do not see writes through `.data`, by other libraries, or by
the replay of a CUDA graph. One operator computes both, in one small kernel on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass import _library

Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # mean, variance, weight, bias


def scale_and_shift(
    mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """By PyTorch's operators, in fp32 at least: 16 bits would lose what a large mean needs."""
    dtype = torch.float64 if mean.dtype == torch.float64 else torch.float32
    scale = torch.rsqrt(variance.to(dtype) + eps)
    if weight is not None:
        scale = scale * weight.to(dtype)
    shift = -mean.to(dtype) * scale
    return scale, shift if bias is None else shift + bias.to(dtype)


def operands(tensors: Tensors, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of a norm of values of this type, by one operator unless gradients go through it or it is traced.

    Raises TypeError for types that PyTorch may refuse, ValueError for tensors of several lengths.
    """
    if not fits(tensors, dtype):
        raise TypeError("its batch norm has types which PyTorch may refuse, or its statistics want gradients")
    if torch.compiler.is_compiling():
        return scale_and_shift(*tensors, eps)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        shapes = {tensor.shape for tensor in tensors if tensor is not None}
        if len(shapes) > 1:
            raise ValueError("batch norm: statistics, weight and bias must be of one length")
        return scale_and_shift(*tensors, eps)
    return _operator(*tensors, eps)


_operator = torch.ops.onepass.scale_and_shift.default if _library.available() else scale_and_shift
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def fits(tensors: Tensors, dtype: torch.dtype) -> bool:
    """Whether PyTorch takes such a norm: of the values' type, or of fp32 with values of 16 bits.

    Autocast makes values of 16 bits. PyTorch has no gradients of running statistics.
    """
    mean, variance, weight, bias = tensors
    own = mean.dtype
    if own is not torch.float32 and (own is not dtype or _is_any_autocast_enabled()):
        return False
    if own is torch.float32 and dtype is torch.float64:
        return False
    if (mean.requires_grad or variance.requires_grad) and torch.is_grad_enabled():
        return False
    one = variance.dtype is own and (weight is None or weight.dtype is own)
    return one and (bias is None or bias.dtype is own)


if _library.available():

    def _fake(
        mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if mean.dtype == torch.float64 else torch.float32
        return torch.empty_like(mean, dtype=dtype), torch.empty_like(mean, dtype=dtype)

    torch.library.register_fake("onepass::scale_and_shift", _fake)
