"""Who convolves f32 tensors on x86, forward and backward: the choice by formulas, and its results."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass import _cpu, _differentiable, _onednn
from onepass._description import Conv, describe


def conv_of(text: str) -> Conv:
    conv = describe(text).conv
    assert conv is not None
    return conv


@pytest.mark.parametrize(
    "text",
    ["conv2d(1,1,k=3,p=1)", "conv2d(1,1,k=4,s=3,p=2)", "conv2d(1,1,k=3x2,d=2,p=1x0)", "conv2d(1,1,k=1,s=2)"],
)
def test_taps_inside_the_input_are_counted(text: str) -> None:
    conv, space = conv_of(text), (7, 6)
    out_space = [conv.output_size(d, size) for d, size in enumerate(space)]
    expected = 1
    for d, (size, out_size) in enumerate(zip(space, out_space)):
        places = (
            y * conv.stride[d] + tap * conv.dilation[d] - conv.padding_before[d]
            for y, tap in itertools.product(range(out_size), range(conv.kernel[d]))
        )
        expected *= sum(0 <= place < size for place in places)
    assert _onednn._taps(conv, space, out_space) == expected


def seconds(text: str, *sizes: int, last: bool = False) -> float:
    found = _onednn.forward_seconds(conv_of(text), sizes, not last)
    assert found is not None
    return found


def test_few_columns_and_few_channels_cost_what_they_cost_in_their_layout() -> None:
    # The same products: 256 samples of one column take longer than 16 samples of 16.
    assert seconds("conv1d(64,64,k=5)", 256, 64, 5) > 2 * seconds("conv1d(64,64,k=5)", 16, 64, 20)
    # Contiguous channels are filled up to a vector, and brought into its order and back.
    two, many = "conv2d(2,2,k=1)", "conv2d(64,64,k=1)"
    assert seconds(two, 64, 2, 80, 48) > 3 * seconds(two, 64, 2, 80, 48, last=True)
    assert seconds(many, 4, 64, 80, 48) < 2 * seconds(many, 4, 64, 80, 48, last=True)


@pytest.mark.parametrize(
    "text",
    [
        "conv_transpose2d(64,64,k=2,s=2)",
        "conv2d(64,64,k=3,groups=4)",
        "conv2d(64,128,k=3,groups=64)",
        "conv2d(64,64,k=2,p=same)",
        "conv3d(64,64,k=5,p=2,groups=64)",
    ],
)
def test_convolutions_without_a_formula_stay(text: str) -> None:
    sizes = (4, 64, *(28,) * conv_of(text).rank)
    assert _onednn.forward_seconds(conv_of(text), sizes, False) is None
    assert not _onednn.leaves_forward(describe(f"{text} | relu"), sizes, False, 1, True)


def leaves_gradients(text: str, *sizes: int, last: bool) -> bool:
    return _onednn.leaves_gradients(conv_of(text), sizes, not last, 1, (True, True))


def test_gradients_that_stay_and_those_that_go(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = "conv2d(64,64,k=2,groups=4)"
    assert leaves_gradients(grouped, 16, 64, 56, 56, last=True)
    assert not leaves_gradients(grouped, 16, 64, 56, 56, last=False)
    assert not leaves_gradients(grouped, 1, 64, 8, 8, last=True)  # little work: PyTorch takes its time
    assert not leaves_gradients("conv2d(64,32,k=2,groups=32)", 16, 64, 56, 56, last=True)
    stay = ["conv2d(64,64,k=3,groups=4)", "conv2d(64,64,k=2,groups=64)", "conv2d(64,64,k=3,s=2)"]
    stay += ["conv2d(64,4,k=3)", "conv_transpose2d(64,64,k=3)"]
    for seconds_of in ("_input_seconds", "_weight_seconds"):
        monkeypatch.setattr(_onednn, seconds_of, lambda *_: 1e-12)
    for text in stay:
        assert not leaves_gradients(text, 4, 64, 28, 28, last=True)
    assert leaves_gradients("conv2d(64,64,k=3)", 4, 64, 28, 28, last=True)
    assert leaves_gradients("conv2d(64,64,k=1)", 4, 64, 28, 28, last=False)
    assert not leaves_gradients("conv2d(64,64,k=3)", 4, 64, 28, 28, last=False)
    monkeypatch.setattr(_onednn, "_weight_seconds", lambda *_: 1.0)
    assert not leaves_gradients("conv2d(64,64,k=1)", 4, 64, 28, 28, last=False)


CASES = [
    (nn.Conv2d(6, 8, 3, padding=1), (3, 6, 9, 7)),
    (nn.Conv3d(4, 8, 2, 2, groups=2, bias=False), (2, 4, 6, 5, 4)),
    (nn.Conv1d(5, 8, 3, dilation=2), (4, 5, 12)),
]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("conv", "sizes"), CASES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(("forward", "backward"), list(itertools.product([False, True], repeat=2)))
def test_results_gradients_and_strides_are_eagers_whoever_computes(
    monkeypatch: pytest.MonkeyPatch,
    conv: nn.Module,
    sizes: tuple[int, ...],
    last: bool,
    forward: bool,
    backward: bool,
) -> None:
    torch.manual_seed(1)
    order = FORMATS.get(len(sizes), torch.contiguous_format) if last else torch.contiguous_format
    eager = nn.Sequential(copy.deepcopy(conv), nn.SiLU(), nn.GroupNorm(4, 8), nn.Tanh()).to(
        memory_format=order
    )
    calls = counted(monkeypatch)
    monkeypatch.setattr(_cpu, "chooses_gradients", lambda dtype: True)
    monkeypatch.setattr(_cpu, "leaves_convolution", lambda *_: forward)
    monkeypatch.setattr(_cpu, "leaves_gradients", lambda *_: backward)
    fused = onepass.fuse(copy.deepcopy(eager))
    x = torch.randn(sizes).contiguous(memory_format=order)
    # Without both PyTorch 2.11's group norm of channels_last_3d crashes.
    for frozen in ((), ("x",), ("0.weight",)):
        results = [run(module, x, frozen) for module in (eager, fused)]
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        (expected, *_), (found, *_) = results
        assert found.stride() == expected.stride()
    assert calls == {"convolve": 3 * forward, "gradients": 3 * backward}


@pytest.mark.parametrize("gradients", [False, True])
def test_autocast_has_no_prices_of_f32(monkeypatch: pytest.MonkeyPatch, gradients: bool) -> None:
    """Its convolution is one of bfloat16."""
    calls = counted(monkeypatch)
    monkeypatch.setattr(_cpu, "chooses_gradients", lambda dtype: True)
    monkeypatch.setattr(_cpu, "leaves_convolution", lambda block, *_: "conv" in block)
    model = onepass.fuse(nn.Sequential(nn.Conv2d(6, 8, 3), nn.SiLU()).eval())
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(gradients):
        model(torch.randn(2, 6, 9, 9))
        assert calls["convolve"] == 0
    with torch.set_grad_enabled(gradients):
        model(torch.randn(2, 6, 9, 9))
    assert calls["convolve"] == 1


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often PyTorch convolves inside a fused call, and how often it computes gradients."""
    calls = {"convolve": 0, "gradients": 0}
    convolve, gradients = _differentiable._eager.convolve, _differentiable.conv_gradients_by_torch

    def counting_convolve(*arguments: object) -> Tensor:
        calls["convolve"] += 1
        return convolve(*arguments)

    def counting_gradients(*arguments: object) -> tuple[Tensor | None, ...]:
        calls["gradients"] += 1
        return gradients(*arguments)

    monkeypatch.setattr(_differentiable._eager, "convolve", counting_convolve)
    monkeypatch.setattr(_differentiable, "conv_gradients_by_torch", counting_gradients)
    return calls


def run(module: nn.Module, x: Tensor, frozen: tuple[str, ...]) -> list[Tensor]:
    """The result and the gradients of all but these."""
    x = x.detach().requires_grad_("x" not in frozen)
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in frozen)
    output = module(x)
    wanted = [tensor for tensor in (x, *parameters.values()) if tensor.requires_grad]
    direction = torch.linspace(-1, 1, math.prod(output.shape)).reshape(output.shape)
    return [output.detach(), *torch.autograd.grad(output, wanted, direction)]


def test_a_block_of_ones_own_is_the_librarys_all_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    monkeypatch.setattr(_cpu, "leaves_convolution", lambda *_: True)
    monkeypatch.setattr(_cpu, "leaves_gradients", lambda *_: True)
    block = onepass.Block("conv2d(6,8,k=3) | swish")
    block(torch.randn(2, 6, 8, 8, requires_grad=True)).sum().backward()
    assert calls == {"convolve": 0, "gradients": 0}
