"""Functional models give the blocks of their module form: hand-written activations, methods, views."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.compiling import operators  # noqa: F401  (defines onepass.chain)
from onepass.compiling.policy import plan
from onepass.compiling.rewrite import Rewriting

Function = Callable[[Tensor, nn.ModuleDict], Tensor]


def _conv(x: Tensor, m: nn.ModuleDict) -> Tensor:
    return F.conv2d(x, m["conv"].weight, m["conv"].bias, padding=1)


def _norm(x: Tensor, m: nn.ModuleDict) -> Tensor:
    return F.group_norm(x, 4, m["norm"].weight, m["norm"].bias)


def _normed(x: Tensor, m: nn.ModuleDict) -> Tensor:
    return _norm(_conv(x, m), m)


def _gelu_by_tanh(h: Tensor) -> Tensor:
    return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * torch.pow(h, 3))))


def _gelu_by_tanh_spread(h: Tensor) -> Tensor:
    return h * (0.5 + 0.5 * torch.tanh(0.7978845608 * h + 0.7978845608 * 0.044715 * h**3))


def _mixed_in_place(x: Tensor, m: nn.ModuleDict) -> Tensor:
    h = _normed(x, m)
    h += 1.0
    h.relu_()
    h *= 0.5
    return h


def _residual(x: Tensor, m: nn.ModuleDict) -> Tensor:
    return F.relu(torch.add(_normed(x, m), x))


def _residual_in_place(x: Tensor, m: nn.ModuleDict) -> Tensor:
    h = _normed(x, m)
    h += x
    return h.relu()


def _embedding(x: Tensor, m: nn.ModuleDict) -> Tensor:
    bias = m["norm"].bias.view(1, -1, 1, 1)
    return torch.sigmoid(_norm(_conv(x, m).add(bias), m))


NORMED = "conv2d(8,8,k=3,p=1) | group_norm(4)"
MODULES: dict[str, Callable[[], nn.Module]] = {
    "swish": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "mish": nn.Mish,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "leaky_relu(0.2)": lambda: nn.LeakyReLU(0.2),
    "elu(1)": nn.ELU,
    "softplus": nn.Softplus,
}

# An activation of the normed convolution, as people write it, and the module that is the same.
ACTIVATIONS: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
    ("silu as a product", "swish", lambda h: h * torch.sigmoid(h)),
    ("silu by methods", "swish", lambda h: h.mul(h.sigmoid())),
    ("silu as a quotient", "swish", lambda h: h / (1 + torch.exp(-h))),
    ("gelu by erf", "gelu", lambda h: 0.5 * h * (1.0 + torch.erf(h / math.sqrt(2.0)))),
    ("gelu by erf, otherwise ordered", "gelu", lambda h: h * 0.5 * (torch.erf(h * 0.70710678) + 1.0)),
    ("gelu by tanh", "gelu_tanh", _gelu_by_tanh),
    ("gelu by tanh, spread", "gelu_tanh", _gelu_by_tanh_spread),
    ("hardswish by relu6", "hardswish", lambda h: h * F.relu6(h + 3) / 6),
    ("hardswish by clamp", "hardswish", lambda h: h * (h + 3).clamp(0, 6) / 6),
    ("hardswish by hardtanh", "hardswish", lambda h: F.hardtanh(h + 3.0, 0.0, 6.0) * h * (1 / 6)),
    ("hardswish by hardsigmoid", "hardswish", lambda h: h * F.hardsigmoid(h)),
    ("hardsigmoid by relu6", "hardsigmoid", lambda h: F.relu6(h + 3) / 6),
    ("mish by softplus", "mish", lambda h: h * torch.tanh(F.softplus(h))),
    ("sigmoid by exp", "sigmoid", lambda h: 1 / (1 + torch.exp(-h))),
    ("sigmoid, a method", "sigmoid", lambda h: h.sigmoid()),
    ("sigmoid in place", "sigmoid", lambda h: h.sigmoid_()),
    ("tanh, a method", "tanh", lambda h: h.tanh()),
    ("relu in place", "relu", lambda h: F.relu(h, inplace=True)),
    ("relu in place, a function", "relu", lambda h: torch.relu_(h)),
    ("relu6", "relu6", lambda h: F.relu6(h)),
    ("leaky relu in place", "leaky_relu(0.2)", lambda h: F.leaky_relu_(h, 0.2)),
    ("elu", "elu(1)", lambda h: F.elu(h)),
    ("softplus", "softplus", lambda h: F.softplus(h)),
    ("a view of its own sizes", "swish", lambda h: F.silu(h.view(h.shape).contiguous())),
    ("to its own type", "swish", lambda h: F.silu(h.to(h.dtype))),
]

# Others, with the blocks of their module form.
MODELS: list[tuple[str, Function, str]] = [
    ("in place", _mixed_in_place, f"{NORMED} | add(1) | relu | mul(0.5)"),
    ("residual", _residual, f"{NORMED} | residual_add | relu"),
    ("residual in place", _residual_in_place, f"{NORMED} | residual_add | relu"),
    ("bias by a view", _embedding, "conv2d(8,8,k=3,p=1) | channel_add | group_norm(4) | sigmoid"),
    ("mean of a flat view", lambda x, m: F.relu(_normed(x, m)).flatten(2).mean(2), f"{NORMED} | relu | mean"),
    (
        "mean of a view",
        lambda x, m: F.relu(_normed(x, m)).view(x.shape[0], 8, -1).mean(dim=-1),
        f"{NORMED} | relu | mean",
    ),
    ("pooled", lambda x, m: F.adaptive_avg_pool2d(F.relu(_normed(x, m)), 1), f"{NORMED} | relu | mean"),
    (
        "divided",
        lambda x, m: torch.sigmoid(_normed(x, m) / 2 - 1),
        f"{NORMED} | mul(0.5) | add(-1) | sigmoid",
    ),
    (
        "dropout in evaluation",
        lambda x, m: F.relu(F.dropout(_normed(x, m), 0.3, training=False)),
        f"{NORMED} | relu",
    ),
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(1)
    yield


def layers() -> nn.ModuleDict:
    return nn.ModuleDict({"conv": nn.Conv2d(8, 8, 3, padding=1), "norm": nn.GroupNorm(4, 8)})


def blocks_and_result(run: Callable[..., Tensor], x: Tensor) -> tuple[list[str], Tensor]:
    """The blocks that the backend finds, and what the rewritten graph computes, without Inductor."""
    found: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        rewriting = Rewriting(module)
        found.extend(segment.block for segment in rewriting.segments)
        rewriting.apply([d.kept for d in plan(rewriting.segments, "all", None).decisions])
        return module.forward

    with torch.no_grad():
        return found, torch.compile(run, backend=backend)(x)


@pytest.mark.parametrize(("name", "text", "activation"), ACTIVATIONS, ids=[a[0] for a in ACTIVATIONS])
def test_an_activation_gives_the_block_of_its_module(
    name: str, text: str, activation: Callable[[Tensor], Tensor]
) -> None:
    m, x = layers(), torch.randn(2, 8, 6, 6)
    model = nn.Sequential(m["conv"], m["norm"], MODULES[text]())
    blocks, result = blocks_and_result(lambda x: activation(_normed(x, m)), x)
    wanted, _ = blocks_and_result(model, x)
    assert blocks == wanted == [f"{NORMED} | {text}"]
    torch.testing.assert_close(result, activation(_normed(x, m)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "model", "wanted"), MODELS, ids=[m[0] for m in MODELS])
def test_a_functional_model_gives_one_block(name: str, model: Function, wanted: str) -> None:
    m, x = layers(), torch.randn(2, 8, 6, 6)
    blocks, result = blocks_and_result(lambda x: model(x, m), x)
    assert blocks == [wanted]
    torch.testing.assert_close(result, model(x, m), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "almost",
    [
        lambda h: h * F.relu6(h + 3) / 5,
        lambda h: 0.5 * h * (1.0 + torch.erf(h / 1.5)),
        lambda h: h * torch.sigmoid(1.702 * h),
        lambda h: h / (1 + torch.exp(h)),
        lambda h: h * torch.tanh(F.softplus(h, beta=2)),
        lambda h: (g := torch.sigmoid(h)) * h + g,
    ],
)
def test_what_is_almost_an_activation_is_none(almost: Callable[[Tensor], Tensor]) -> None:
    m, x = layers(), torch.randn(2, 8, 6, 6)
    _, result = blocks_and_result(lambda x: almost(_normed(x, m)), x)
    torch.testing.assert_close(result, almost(_normed(x, m)), rtol=1e-4, atol=1e-5)
