"""Convolutions of few output pixels on the CPU, as modules: results, gradients, and who computes them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import onepass
from onepass import _cpu

CASES = [
    (nn.Conv2d(48, 32, 3, 2, 1), (5, 48, 5, 4)),
    (nn.Conv2d(64, 24, 4), (3, 64, 4, 6)),
    (nn.Conv1d(96, 40, 5, 1, 2), (6, 96, 7)),
    (nn.Conv3d(16, 24, 2, 2), (4, 16, 2, 4, 5)),
]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize(("conv", "sizes"), CASES, ids=lambda value: type(value).__name__)
def test_results_and_gradients_are_those_of_doubles(
    conv: nn.Module, sizes: tuple[int, ...], dtype: torch.dtype, limit: float, last: bool
) -> None:
    torch.manual_seed(3)
    order = FORMATS.get(len(sizes), torch.contiguous_format) if last else torch.contiguous_format
    module = nn.Sequential(copy.deepcopy(conv), nn.SiLU(), nn.GroupNorm(4, conv.out_channels), nn.SiLU())
    module = module.to(dtype).to(memory_format=order)
    x = torch.randn(sizes, dtype=dtype).contiguous(memory_format=order)
    judge, exact = copy.deepcopy(module).double(), x.double().requires_grad_()
    fused = onepass.fuse(module)
    x.requires_grad_()
    expected, found = judge(exact), fused(x)
    direction = torch.randn_like(expected).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), found, rtol=limit, atol=limit)
    wanted = torch.autograd.grad(expected, [exact, *judge.parameters()], direction.double())
    got = torch.autograd.grad(found, [x, *fused.parameters()], direction)
    for a, b in zip((found, *got), (expected, *wanted), strict=True):
        assert (a.double() - b).abs().max() <= limit * b.abs().max().clamp(min=1)


def is_left(block: str, *sizes: int, dtype: torch.dtype = torch.float32, gradients: bool) -> bool:
    return _cpu.leaves_convolution(block, _cpu.geometry_of(torch.empty(sizes, dtype=dtype)), 1, gradients)


def test_steps_leave_convolutions_of_one_tap_and_many_pixels_alone() -> None:
    tap = "conv2d(256,256,k=1) | group_norm(8) | swish"
    assert is_left(tap, 4, 256, 14, 14, gradients=True)
    # On x86 PyTorch's step is faster there too.
    assert is_left(tap, 64, 256, 4, 4, gradients=True) is _cpu.on_core(False, True)
    assert not is_left(tap, 4, 256, 14, 14, dtype=torch.bfloat16, gradients=True)
    wide = "conv2d(256,256,k=3,p=1) | relu"
    assert is_left(wide, 2, 256, 28, 28, dtype=torch.bfloat16, gradients=False)
    assert not is_left(wide, 2, 256, 28, 28, dtype=torch.bfloat16, gradients=True)


def test_large_weights_over_few_pixels_stay_with_the_library() -> None:
    assert not is_left("conv2d(320,128,k=5,s=2) | relu | swish", 1, 320, 5, 5, gradients=False)
    assert not is_left("conv1d(1280,192,k=5) | group_norm(192) | mean", 64, 1280, 7, gradients=False)
