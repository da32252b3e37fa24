"""onepass.Block as a module: initialisation, arguments, copies, state."""

import copy
import pickle

import pytest
import torch
from torch import nn

import onepass

pytestmark = pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))

TEXT = "conv2d(3,8,k=3,p=1) | prelu(per=channel) | group_norm(4) | hardswish"


def modules() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.PReLU(8), nn.GroupNorm(4, 8), nn.Hardswish())


@pytest.mark.parametrize(
    ("text", "build"),
    [
        (TEXT, modules),
        (
            "conv1d(4,6,k=3,groups=2,bias=false)",
            lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2, bias=False)),
        ),
        (
            "conv_transpose3d(3,4,k=3,s=2,p=1,op=1) | instance_norm(affine=true)",
            lambda: nn.Sequential(
                nn.ConvTranspose3d(3, 4, 3, 2, 1, output_padding=1), nn.InstanceNorm3d(4, affine=True)
            ),
        ),
        ("conv2d(3,4,k=2,p=same)", lambda: nn.Sequential(nn.Conv2d(3, 4, 2, padding="same"))),
    ],
)
def test_same_seed_gives_the_modules_weights_and_results(text: str, build) -> None:
    torch.manual_seed(3)
    block = onepass.Block(text)
    torch.manual_seed(3)
    reference = build()
    for mine, theirs in zip(block.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    channels = next(reference.parameters()).shape[0 if "transpose" in text else 1]
    x = torch.randn(2, 4 if "conv1d" in text else channels, *(6,) * (next(block.parameters()).dim() - 2))
    torch.testing.assert_close(block(x), reference(x), rtol=1e-5, atol=1e-5)


def test_training_follows_the_modules() -> None:
    torch.manual_seed(0)
    block, reference = onepass.Block(TEXT), modules()
    for mine, theirs in zip(block.parameters(), reference.parameters(), strict=True):
        theirs.data.copy_(mine.data)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (block, reference)]
    for _ in range(5):
        x, target = torch.randn(4, 3, 7, 6), torch.randn(4, 8, 7, 6)
        for module, optimizer in zip((block, reference), optimizers, strict=True):
            optimizer.zero_grad()
            (module(x) - target).square().mean().backward()
            optimizer.step()
    for mine, theirs in zip(block.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_names_and_text() -> None:
    block = onepass.Block(" conv2d(3, 8,k=3,p=1) |prelu(per=channel)| group_norm(4) | hardswish")
    assert list(block.state_dict()) == ["conv_weight", "conv_bias", "prelu", "norm_weight", "norm_bias"]
    assert repr(block) == f"Block({TEXT})"


def test_copies() -> None:
    block, x = onepass.Block(TEXT), torch.randn(2, 3, 6, 6)
    expected = block(x)
    for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(copied(x), expected)
        assert copied.conv_weight.data_ptr() != block.conv_weight.data_ptr()
    other = onepass.Block(TEXT)
    other.load_state_dict(block.state_dict())
    assert torch.equal(other(x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_conversion(dtype: torch.dtype) -> None:
    block = onepass.Block(TEXT)
    x = torch.randn(2, 3, 6, 6)
    expected = block(x)
    converted = block.to(dtype)
    assert converted(x.to(dtype)).dtype == dtype
    torch.testing.assert_close(converted(x.to(dtype)).float(), expected, rtol=0.05, atol=0.05)
    assert onepass.Block(TEXT, dtype=dtype).conv_weight.dtype == dtype


def test_channels_last_model() -> None:
    block = onepass.Block(TEXT)
    x = torch.randn(2, 3, 6, 6)
    expected = block(x)
    block.to(memory_format=torch.channels_last)
    actual = block(x.contiguous(memory_format=torch.channels_last))
    assert actual.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_meta_device() -> None:
    block = onepass.Block(TEXT, device="meta")
    assert block(torch.empty(2, 3, 6, 6, device="meta")).shape == (2, 8, 6, 6)


def test_arguments_of_the_call() -> None:
    block = onepass.Block("conv2d(3,8,k=1) | channel_add(per=sample) | group_norm(2) | residual_add | relu")
    x, embedding, residual = torch.randn(2, 3, 4, 4), torch.randn(2, 8), torch.randn(2, 8, 4, 4)
    hidden = nn.functional.conv2d(x, block.conv_weight, block.conv_bias) + embedding[:, :, None, None]
    hidden = nn.functional.group_norm(hidden, 2, block.norm_weight, block.norm_bias)
    actual = block(x, residual_add=residual, channel_add=embedding)
    torch.testing.assert_close(actual, torch.relu(hidden + residual), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="must give channel_add, residual_add"):
        block(x, channel_add=embedding)
    with pytest.raises(TypeError, match="must give none"):
        onepass.Block("relu")(x, residual_add=residual)


def test_tails_need_channels() -> None:
    with pytest.raises(ValueError, match="how many channels"):
        onepass.Block("swish | group_norm(4)")
    block = onepass.Block("swish | group_norm(4)", channels=8)
    x = torch.randn(2, 8, 5)
    expected = nn.functional.group_norm(nn.functional.silu(x), 4, block.norm_weight, block.norm_bias)
    torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="channels is 9, must be 8"):
        onepass.Block("conv2d(3,8)", channels=9)


def test_bad_text() -> None:
    with pytest.raises(ValueError, match="16 channels are not divisible into 5 groups"):
        onepass.Block("conv2d(3,16) | group_norm(5)")


def test_explain() -> None:
    block = onepass.Block(TEXT)
    said = onepass.explain(block, (2, 3, 64, 64), threads=1)
    assert "conv_channel_lanes" in said
    assert "reference" in said
    assert "2x3x64x64 bf16" in onepass.explain(TEXT, (2, 3, 64, 64), dtype=torch.bfloat16)
    assert "nhwc" in onepass.explain(TEXT, (2, 3, 64, 64), layout=torch.channels_last)
    assert "* reference" in onepass.explain(TEXT, (2, 3, 8, 8), strategy="reference")
    assert "eager" in onepass.explain(TEXT, (2, 3, 8, 8), device="cuda")
    with pytest.raises(ValueError, match="5 channels"):
        onepass.explain(TEXT, (2, 5, 8, 8))
    with pytest.raises(TypeError, match="int32"):
        onepass.explain(TEXT, (2, 3, 8, 8), dtype=torch.int32)


def test_explain_backward() -> None:
    said = onepass.explain("conv2d(3,8,k=3,p=1) | swish | group_norm(4)", (2, 3, 64, 64), backward=True)
    assert "* tail_backward" in said
    assert "* conv_backward" in said
    assert "input gradient: conv_transpose2d(8,3,k=3,p=1,bias=false)" in said
    assert "saved by forward: mean and rstd of each slab" in said
    assert "reference_backward" in onepass.explain("relu", (2, 3, 8), backward=True)
    assert "PyTorch's convolution_backward" in onepass.explain(
        "conv2d(3,8,k=2,p=same)", (2, 3, 8, 8), backward=True
    )
    with pytest.raises(ValueError, match="must be left out for backward"):
        onepass.explain("relu", (2, 3, 8), backward=True, strategy="reference")
