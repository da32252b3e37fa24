"""On a CPU blocks that PyTorch's convolution runs faster are left to it, and the tail stays fused."""

import pytest
import torch
from torch import nn

import onepass
from onepass import _apart, _eager
from onepass._description import describe

pytestmark = pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))

# Each channel is a slab, so that the library computes them one by one: 13 times as long as PyTorch.
SLOW = "conv1d(1280,192,k=5,bias=false) | group_norm(192) | relu6"
SLOW_SIZES = (16, 1280, 7)


def test_a_wide_convolution_before_a_norm_of_channels_is_left_to_pytorch() -> None:
    assert _apart.is_predicted(SLOW, SLOW_SIZES, torch.float32, "nchw", 2, False)
    assert "-> PyTorch's own convolution, then tail" in onepass.explain(SLOW, SLOW_SIZES, threads=2)


@pytest.mark.parametrize(
    ("block", "sizes"),
    [
        ("conv3d(3,16,k=3,p=1) | swish | group_norm(4) | hardswish", (2, 3, 16, 32, 32)),
        ("conv2d(64,64,k=3,p=1) | relu | group_norm(8)", (2, 64, 64, 64)),
        ("conv_transpose2d(64,64,k=3) | gelu | group_norm(8)", (2, 64, 32, 32)),
        ("conv2d(64,64,k=3,p=1,groups=64) | relu | group_norm(64)", (2, 64, 8, 8)),
        ("conv2d(8,8,k=3)", (2, 8, 0, 0)),
    ],
)
def test_other_blocks_run_whole(block: str, sizes: tuple[int, ...]) -> None:
    for gradients in (False, True):
        assert not _apart.is_predicted(block, sizes, torch.float32, "nchw", 2, gradients)


def test_results_and_gradients_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    convolved = []
    real = _eager.convolve
    monkeypatch.setattr(_eager, "convolve", lambda *a: convolved.append(1) or real(*a))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1280, 192, 5, bias=False), nn.GroupNorm(192, 192), nn.SiLU())
    x = torch.randn(SLOW_SIZES, requires_grad=True)
    expected = model(x)
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x, *model.parameters()], direction)
    fused = onepass.fuse(model)
    output = fused(x)
    found = torch.autograd.grad(output, [x, *fused.parameters()], direction)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), expected, rtol=1e-4, atol=1e-4)
    assert convolved == [1, 1]
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


def test_other_types_run_whole() -> None:
    assert describe(SLOW).conv is not None
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert not _apart.is_predicted(SLOW, SLOW_SIZES, dtype, "nchw", 2, False)
