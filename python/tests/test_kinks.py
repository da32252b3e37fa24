"""Activations at their kinks, at infinities and at NaN are PyTorch's, forward and backward, on a CPU."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from fuse_support import blocks
from kinks import (
    ACTIVATIONS,
    FINITE,
    POINTS,
    WRITTEN,
    Function,
    assert_same,
    clamp,
    inf,
    nan,
    one_by_one,
    points,
    with_gradient,
)
from torch import Tensor, nn

import onepass
from onepass import _ops, fuse
from onepass._description import describe

pytestmark = [
    pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason())),
    # float64 is the library's reference.
    pytest.mark.filterwarnings("ignore:.*float64:onepass.FallbackWarning"),
]

FORMATS = (torch.contiguous_format, torch.channels_last)
DTYPES = (torch.float32, torch.bfloat16)
CHANNELS = len(POINTS)


def directions(x: Tensor) -> Tensor:
    """Gradients of the output that no two neighbouring points share."""
    values = torch.tensor([1.0, -2.0, 0.5], dtype=x.dtype)
    return values.repeat(x.numel() // 3 + 1)[: x.numel()].reshape(x.shape)


def check_tail(text: str, function: Function, x: Tensor) -> None:
    direction = directions(x)
    found = with_gradient(lambda t: _ops.apply(text, t, []), x, direction)
    wanted = one_by_one(function, x, direction)
    for part, actual, expected in zip(("output", "gradient"), found, wanted, strict=True):
        assert_same(f"{text}: {part}", actual, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("text", ACTIVATIONS)
def test_activation(text: str, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    x = points(2, 5, 6, 7, dtype=dtype).contiguous(memory_format=memory_format)
    check_tail(text, ACTIVATIONS[text], x)


@pytest.mark.parametrize("text", ["relu", "clamp(0,inf)", "hardtanh(-1,1)", "hardswish", "elu(2)"])
@pytest.mark.parametrize("gradient", [0.0, inf, nan])
def test_gradients_that_are_selected_and_not_multiplied(text: str, gradient: float) -> None:
    x = points(1, 1, CHANNELS)
    direction = torch.full_like(x, gradient)
    found = with_gradient(lambda t: _ops.apply(text, t, []), x, direction)
    assert_same(text, found[1], one_by_one(ACTIVATIONS[text], x, direction)[1])


def test_prelu() -> None:
    x, slope = points(2, 3, 8, 8), torch.tensor([0.25])
    direction = directions(x)
    found, wanted = [], []
    for run, results in (
        (lambda t, p: _ops.apply("prelu", t, [p]), found),
        (lambda t, p: nn.functional.prelu(t, p), wanted),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, slope)]
        y = run(*leaves)
        results += [y.detach(), *torch.autograd.grad(y, leaves, direction)]
    for actual, expected in zip(found, wanted, strict=True):
        assert_same("prelu", actual, expected)


@pytest.mark.parametrize("limit", [0.1, 0.7, 3.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_limits_are_compared_in_the_elements_type(limit: float, dtype: torch.dtype) -> None:
    near = torch.tensor(limit, dtype=dtype)
    beside = [torch.nextafter(near, near + s).item() for s in (1, -1)]
    x = points(1, 1, 6, dtype=dtype, of=(near.item(), *beside))
    check_tail(f"clamp(-1,{limit})", lambda t: clamp(t, -1, limit), x)
    check_tail(f"hardtanh(-1,{limit})", lambda t: nn.functional.hardtanh(t, -1, limit), x)


# --- Convolutions -------------------------------------------------------------------------------------------


def zero_conv(of: tuple[float, ...]) -> nn.Conv2d:
    """Zero weights, and the points as biases: a channel is one of them everywhere."""
    conv = nn.Conv2d(3, len(of), 3, padding=1)
    with torch.no_grad():
        conv.weight.zero_()
        conv.bias.copy_(torch.tensor(of))
    return conv


def passing_conv() -> nn.Conv2d:
    """Passes every element on as it is."""
    conv = nn.Conv2d(CHANNELS, CHANNELS, 1, groups=CHANNELS)
    with torch.no_grad():
        conv.weight.fill_(1)
        conv.bias.zero_()
    return conv


class Activation(nn.Module):
    """A function after a convolution."""

    def __init__(self, conv: nn.Conv2d, function: Function) -> None:
        super().__init__()
        self.conv, self.function = conv, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x))


def judged(model: Activation, x: Tensor, direction: Tensor) -> dict[str, Tensor]:
    """PyTorch's convolution with the activation element by element."""
    x = x.detach().requires_grad_()
    sums = model.conv(x)
    output, gradient = one_by_one(model.function, sums.detach(), direction)
    found = torch.autograd.grad(sums, [x, *model.conv.parameters()], gradient)
    return {"output": output, "input": found[0], "weight": found[1], "bias": found[2]}


def check_conv(text: str, conv: nn.Conv2d, x: Tensor, names: tuple[str, ...]) -> None:
    model = Activation(conv, ACTIVATIONS[text])
    direction = directions(conv(x).detach())
    wanted = judged(model, x, direction)
    fused = fuse(copy.deepcopy(model))
    assert [describe(block).tail for block in blocks(fused)] == [describe(text).text]
    leaf = x.detach().requires_grad_()
    output = fused(leaf)
    gradients = torch.autograd.grad(output, [leaf, *fused.parameters()], direction)
    found = dict(zip(("output", "input", "weight", "bias"), (output.detach(), *gradients), strict=True))
    for name in names:
        terms = 1 if name in ("output", "input") else x.numel() // x.shape[1]
        assert_same(f"{text}: {name}", found[name], wanted[name], terms)


IMAGES = ((torch.float32, torch.contiguous_format), (torch.bfloat16, torch.channels_last))


@pytest.mark.parametrize(("dtype", "memory_format"), IMAGES, ids=str)
@pytest.mark.parametrize("text", WRITTEN)
def test_zero_initialised_convolution(
    text: str, dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    x = torch.randint(-2, 3, (2, 3, 5, 6)).to(dtype).contiguous(memory_format=memory_format)
    check_conv(text, zero_conv(FINITE).to(dtype), x, ("output", "input", "weight", "bias"))
    # The gradient of the input adds NaN times zero up over all channels.
    check_conv(text, zero_conv(POINTS).to(dtype), x, ("output", "weight", "bias"))


@pytest.mark.parametrize(("dtype", "memory_format"), IMAGES, ids=str)
@pytest.mark.parametrize("text", WRITTEN)
def test_convolution_that_passes_the_points_on(
    text: str, dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    x = points(3, 7, 5, CHANNELS, dtype=dtype).permute(0, 3, 1, 2).contiguous(memory_format=memory_format)
    check_conv(text, passing_conv().to(dtype), x, ("output", "input", "weight", "bias"))


# --- Random programs ----------------------------------------------------------------------------------------

# Exact on the points: what follows meets its own kinks exactly.
EXACT: dict[str, Function] = {
    **{
        text: ACTIVATIONS[text]
        for text in ACTIVATIONS
        if text.startswith(("relu", "leaky", "clamp", "hardtanh"))
    },
    "mul(2)": lambda x: x * 2,
    "mul(-1)": lambda x: x * -1,
    "add(3)": lambda x: x + 3,
    "add(-1)": lambda x: x + -1,
}


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed: int) -> None:
    dice = random.Random(seed)
    texts = [dice.choice(list(EXACT)) for _ in range(dice.randint(1, 4))] + [dice.choice(list(ACTIVATIONS))]
    functions = [*(EXACT[text] for text in texts[:-1]), ACTIVATIONS[texts[-1]]]

    def program(x: Tensor) -> Tensor:
        for function in functions:
            x = function(x)
        return x

    values = tuple(dice.choice(POINTS) for _ in range(140))
    x = points(1, 4, 5, 7, dtype=dice.choice(DTYPES), of=values)
    check_tail(" | ".join(texts), program, x.contiguous(memory_format=dice.choice(FORMATS)))


# --- The language -------------------------------------------------------------------------------------------


def test_infinite_limits_are_described() -> None:
    stage = describe("clamp(-inf,inf)").stages[0]
    assert (stage.a, stage.b, stage.text) == (-inf, inf, "clamp(-inf,inf)")
    assert describe("hardtanh(-1,1)").text == "hardtanh"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("clamp(nan,1)", r"clamp\(nan,1\): the limit is nan, must be a number, inf or -inf"),
        ("clamp(0,high)", r"clamp\(0,high\): the limit is high, must be a number, inf or -inf"),
        ("leaky_relu(inf)", r"leaky_relu\(inf\): the constant is inf, must be a finite number"),
        ("hardtanh(2,-1)", r"hardtanh\(2,-1\): the lower limit is 2, must be at most the upper limit -1"),
    ],
)
def test_refusals(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        describe(text)
