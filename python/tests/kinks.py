"""Activations at their kinks, at infinities and at NaN: the points, PyTorch's functions, and their judge."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import _eager

inf, nan = math.inf, math.nan

Function = Callable[[Tensor], Tensor]


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """PyTorch's where its gradient is 1 at its limits, as in 2.11."""
    if _eager.CLAMP_PASSES_LIMITS:
        return x.clamp(low, high)
    return torch.where((x >= low) & (x <= high), x, x.detach().clamp(low, high))


# Each activation of the language as PyTorch code.
ACTIVATIONS: dict[str, Function] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu(0.5)": lambda x: F.leaky_relu(x, 0.5),
    "leaky_relu(-2)": lambda x: F.leaky_relu(x, -2.0),
    "elu(1)": F.elu,
    "elu(2)": lambda x: F.elu(x, 2.0),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swish": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mish": F.mish,
    "softplus": F.softplus,
    "clamp(-1,2)": lambda x: clamp(x, -1, 2),
    "clamp(0,inf)": lambda x: clamp(x, 0, inf),
    "clamp(-inf,6)": lambda x: clamp(x, -inf, 6),
    "clamp(-inf,inf)": lambda x: clamp(x, -inf, inf),
    "clamp(2,-1)": lambda x: clamp(x, 2, -1),
    "clamp(1,1)": lambda x: clamp(x, 1, 1),
    "hardtanh(-1,1)": F.hardtanh,
    "hardtanh(-3,3)": lambda x: F.hardtanh(x, -3, 3),
    "hardtanh(0,inf)": lambda x: F.hardtanh(x, 0, inf),
    "hardtanh(1,1)": lambda x: F.hardtanh(x, 1, 1),
    "mul(0)": lambda x: x * 0,
    "add(3)": lambda x: x + 3,
}

# Those that users write so: fuse gives them these texts.
WRITTEN = {
    text: function
    for text, function in ACTIVATIONS.items()
    if _eager.CLAMP_PASSES_LIMITS or not text.startswith("clamp")
}

# Sixteen points: every kink, some between them, and what is not finite.
FINITE = (0.0, -0.0, -3.0, 3.0, 6.0, -1.0, 1.0, 2.0, 20.0, -0.5, 0.5, 21.0, -6.0)
POINTS = (*FINITE, inf, -inf, nan)


def points(*sizes: int, dtype: torch.dtype = torch.float32, of: tuple[float, ...] = POINTS) -> Tensor:
    """Each of the points in turn, in a tensor of these sizes."""
    count = math.prod(sizes)
    return torch.tensor([of[i % len(of)] for i in range(count)], dtype=dtype).reshape(sizes)


def with_gradient(function: Function, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the gradient of the input."""
    x = x.detach().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, direction)[0]


def one_by_one(function: Function, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """The same by tensors of one element.

    PyTorch's vectors on a CPU have another gradient at NaN than its code for what is left over, which is also
    the GPU's, in relu6, hardtanh, elu and hardswish: where a NaN lies in memory decides.
    """
    known: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
    rows = []
    for value, gradient in zip(x.flatten(), direction.flatten(), strict=True):
        key = (repr(value.item()), repr(gradient.item()))
        if key not in known:
            known[key] = with_gradient(function, value.reshape(1), gradient.reshape(1))
        rows.append(known[key])
    return tuple(torch.cat(part).reshape(x.shape) for part in zip(*rows, strict=True))


def assert_same(name: str, actual: Tensor, expected: Tensor, terms: int = 1) -> None:
    """NaN and infinities in the same places, sums of so many terms as near as rounding allows: a wrong side
    of a kink is off by more.
    """
    loose = actual.dtype in (torch.bfloat16, torch.float16)
    allowed = {"rtol": 2e-2, "atol": 2e-2 * terms} if loose else {"rtol": 1e-5, "atol": 2e-6 * terms}
    torch.testing.assert_close(
        actual, expected, equal_nan=True, msg=lambda text: f"{name}: {text}", **allowed
    )
