"""The numerics of a block: PyTorch's precision for its convolution, fp32 throughout, or the fastest."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from onepass import _rounding
from onepass._conv_gradients import memory_format
from onepass._description import Conv, Description, constant

POLICIES = ("pytorch", "strict", "fast")
_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"}
_default = ["pytorch"]


def numerics(policy: str | None = None) -> str:
    """The policy of blocks that have none of their own; sets it where one is given.

    It matters on a GPU; a CPU always computes in fp32. docs/numerics.md has the figures.

    Args:
        policy: "pytorch": the result that PyTorch's settings give for this very convolution (cuDNN rounds the
            operands of some to TF32 and of others not). "strict": fp32 throughout, values before a norm held
            in fp32, no approximate activation. "fast": TF32 for every convolution, and weights that are right
            on average alone where that saves a product.

    Returns:
        The policy that now holds.

    Examples:
        >>> import onepass
        >>> onepass.numerics("strict")
        'strict'
        >>> onepass.numerics("pytorch")
        'pytorch'
    """
    if policy is not None:
        _default[0] = checked(policy)
    return _default[0]


def checked(policy: str) -> str:
    """The policy; raises ValueError where there is no such."""
    if policy not in POLICIES:
        raise ValueError(f'numerics is {policy!r}, must be "pytorch", "strict" or "fast"')
    return policy


@constant
def default() -> str:
    """The policy in force; a compiled graph keeps it."""
    return _default[0]


@constant
def allows_tf32() -> bool:
    """PyTorch's switch for convolutions of float32."""
    return torch.backends.cudnn.conv.fp32_precision == "tf32"


# --- A policy as the words of operators: those of a problem string behind the element type ---


def tail_words(policy: str) -> str:
    """Of a block without a convolution."""
    return "strict" if policy == "strict" else ""


# What PyTorch's convolution does, as a precision of ours.
_PRECISIONS = {"fp32": "near_f32", "tf32": "tf32", "tf32_away": "tf32_away"}


def forward_words(policy: str, conv: Conv, input: Tensor, weight: Tensor) -> str | None:
    """Of a block with this convolution. Where PyTorch may round to TF32, it is asked whether it does.

    None where it rounds as no kernel here does: then PyTorch runs the convolution.
    """
    words = known_words(policy, input.dtype)
    if words is not None:
        return words
    return _PRECISIONS.get(_rounding.rounds(conv, input, weight, False)[0])


def is_known(policy: str, conv: Conv, input: Tensor, weight: Tensor) -> bool:
    """Whether forward_words will give the same for such a call from now on."""
    if known_words(policy, input.dtype) is not None:
        return True
    return _rounding.rounds(conv, input, weight, False) is not _rounding.NEVER


def backward_words(
    policy: str, description: Description, input: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> str:
    """Of the gradients: of two that one kernel computes, the more exact.

    A block is computed anew for its gradients. Where its convolution was fp32, it is again, unless the
    gradients of "fast" take weights for exact on average, as they are then.
    """
    words = known_words(policy, input.dtype)
    if words is not None:
        return words
    forward, *gradients = _rounding.rounds(description.conv, input, weight, True)
    if any(want and answer == "fp32" for want, answer in zip(wanted, gradients)):
        return "near_f32"
    if forward != "fp32" or description.after_conv is None:
        return "tf32"
    last = memory_format(input) != torch.contiguous_format
    return (
        "tf32 fast"
        if _averages(description.text, tuple(input.shape), last, str(input.device))
        else "near_f32"
    )


@functools.lru_cache(maxsize=4096)
def _averages(block: str, sizes: tuple[int, ...], last: bool, device: str) -> bool:
    """Whether "fast" dithers the weights of the block, so that its gradients take them for exact."""
    layout = "nhwc" if last else "nchw"
    return torch.ops.onepass.cuda_dithers_weights(block, sizes, "tf32 fast", layout, device)


def known_words(policy: str, dtype: torch.dtype) -> str | None:
    """None where PyTorch must be asked."""
    if policy == "strict":
        return "strict"
    if dtype != torch.float32:
        return ""
    if policy == "fast":
        return "tf32 fast"
    return None if allows_tf32() else ""


def mode_of(dtype: torch.dtype, words: str) -> str:
    """The element type and the words, as in a problem string: a precision stands for f32."""
    return words if words.startswith(("tf32", "near_f32")) else f"{_DTYPES[dtype]} {words}".rstrip()
