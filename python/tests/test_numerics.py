"""The numerics policy: how it becomes the words of operators, and how PyTorch is asked for its rounding."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass import _eager, _numerics, _rounding
from onepass._description import Conv, describe
from onepass.exporting import block_code

CONVOLUTIONS = {
    "conv1d(2,4,k=3)": (2, 2, 12),
    "conv2d(3,8,k=3,p=1)": (2, 3, 9, 9),
    "conv2d(8,8,k=3,groups=8)": (2, 8, 9, 9),
    "conv2d(4,6,k=1,s=2)": (1, 4, 7, 7),
    "conv_transpose3d(3,8,k=3,s=2,p=1)": (1, 3, 4, 4, 4),
    "conv_transpose2d(4,6,k=2,s=2,groups=2)": (2, 4, 5, 5),
    "conv3d(512,4,k=3)": (1, 512, 5, 5, 5),  # a sum of ones of all channels would lose what is asked for
}


def rounded(x: Tensor) -> Tensor:
    """To TF32, to nearest even."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class Rounding(torch.autograd.Function):
    """A convolution that rounds what `rounds` says: operands of the forward pass, of dx and of dw."""

    @staticmethod
    def forward(ctx: Any, conv: Conv, rounds: tuple[bool, bool, bool], x: Tensor, w: Tensor) -> Tensor:
        ctx.how = conv, rounds
        ctx.save_for_backward(x, w)
        return _eager.convolve(conv, *((rounded(x), rounded(w)) if rounds[0] else (x, w)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        conv, rounds = ctx.how
        found = []
        for index, does in enumerate(rounds[1:]):
            tensors = [rounded(t) if does else t for t in (*ctx.saved_tensors, gradient)]
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in tensors[:2]]
                found.append(torch.autograd.grad(_eager.convolve(conv, *leaves), leaves, tensors[2])[index])
        return None, None, *found


def tensors_of(conv: Conv, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    channels = (conv.out_channels, conv.in_channels // conv.groups)
    if conv.transposed:
        channels = (conv.in_channels, conv.out_channels // conv.groups)
    return torch.empty(sizes), torch.empty((*channels, *conv.kernel))


@functools.cache
def exported_asking() -> Any:
    """The same function as exported files have it."""
    namespace: dict[str, Any] = {"torch": torch}
    exec(block_code.asking_text(), namespace)
    return namespace["_rounds_operands"]


@pytest.mark.parametrize("text", list(CONVOLUTIONS))
@pytest.mark.parametrize("rounds", [(False,) * 3, (True,) * 3, (True, False, True), (False, True, False)])
def test_what_a_convolution_rounds_is_found(text: str, rounds: tuple[bool, bool, bool]) -> None:
    conv = describe(text).conv
    convolve = functools.partial(Rounding.apply, conv, rounds)
    for asked in (_rounding.asked, exported_asking()):
        found = asked(convolve, *tensors_of(conv, CONVOLUTIONS[text]), conv.transposed, True)
        assert tuple(found) == rounds
        found = asked(convolve, *tensors_of(conv, CONVOLUTIONS[text]), conv.transposed, False)
        assert found == [rounds[0]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """PyTorch is taken to have a GPU; what it is asked is listed."""
    asked: list[Any] = []

    def ask(conv: Conv, sizes: Any, order: Any, device: Any, gradients: bool) -> tuple[bool, ...]:
        asked.append((conv.text, sizes))
        if "out of memory" in asked:
            raise torch.OutOfMemoryError
        return (True, True, True)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(_rounding, "_ask", ask)
    monkeypatch.setattr(_rounding, "_known", {})
    yield asked


def question(batch: int = 2) -> tuple[Conv, Tensor, Tensor, bool]:
    conv = describe("conv2d(3,8,k=3)").conv
    return conv, torch.empty(batch, 3, 9, 9), torch.empty(8, 3, 3, 3), False


def test_pytorch_is_asked_once_for_each_convolution_and_setting(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        assert _rounding.rounds(*question())[0]
    assert len(gpu) == 1
    assert _rounding.rounds(*question(batch=3))[0] and len(gpu) == 2
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert _rounding.rounds(*question())[0] and len(gpu) == 3


def test_the_answer_is_no_where_pytorch_cannot_be_asked(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert _rounding.rounds(*question()) == _rounding.NEVER
    assert gpu == []
    gpu.append("out of memory")
    assert _rounding.rounds(*question()) == _rounding.NEVER
    gpu.clear()
    assert _rounding.rounds(*question())[0], "a later call asks again"
    assert _rounding.rounds(*question(batch=0)) == _rounding.NEVER


@pytest.mark.parametrize(
    ("policy", "dtype", "allowed", "rounds", "forward", "backward"),
    [
        ("pytorch", torch.float32, True, (True, True, True), "tf32", "tf32"),
        ("pytorch", torch.float32, True, (False, True, True), "near_f32", "tf32"),
        ("pytorch", torch.float32, True, (True, False, True), "tf32", "near_f32"),
        ("pytorch", torch.float32, False, (True, True, True), "", ""),
        ("strict", torch.float32, True, (True, True, True), "strict", "strict"),
        ("fast", torch.float32, False, (False, False, False), "tf32 fast", "tf32 fast"),
        ("pytorch", torch.bfloat16, True, (True, True, True), "", ""),
        ("fast", torch.float16, True, (True, True, True), "", ""),
        ("strict", torch.bfloat16, True, (True, True, True), "strict", "strict"),
    ],
)
def test_words_of_a_policy(
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    dtype: torch.dtype,
    allowed: bool,
    rounds: tuple[bool, ...],
    forward: str,
    backward: str,
) -> None:
    monkeypatch.setattr(_numerics, "allows_tf32", lambda: allowed)
    monkeypatch.setattr(_rounding, "rounds", lambda *_: rounds)
    conv, x, w, _ = question()
    x, w = x.to(dtype), w.to(dtype)
    assert _numerics.forward_words(policy, conv, x, w) == forward
    assert _numerics.backward_words(policy, conv, x, w, (True, True)) == backward
    # A gradient that nobody wants does not decide.
    assert _numerics.backward_words(policy, conv, x, w, (False, True)).replace("near_f32", "tf32") == (
        backward.replace("near_f32", "tf32")
    )
    mode = _numerics.mode_of(dtype, forward)
    assert torch.ops.onepass.cuda_predicted_gain(conv.text, x.shape, mode, "nchw", "cuda:sm_90a") > 0


def test_the_default_policy() -> None:
    assert onepass.numerics() == "pytorch"
    try:
        assert onepass.numerics("strict") == "strict" == onepass.numerics()
        assert "3 products" in onepass.explain(
            "conv3d(3,16,k=4) | mean", (2, 3, 16, 32, 32), device="cuda:sm_90a", strategy="thin_wgmma"
        )
    finally:
        onepass.numerics("pytorch")
    for call in (onepass.numerics, lambda name: onepass.fuse(nn.Identity(), numerics=name)):
        with pytest.raises(ValueError, match=r'numerics is \'exact\', must be "pytorch", "strict" or "fast"'):
            call("exact")
    assert onepass.numerics() == "pytorch"


def test_a_model_has_a_policy_of_its_own_and_so_do_its_copies() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU())
    onepass.fuse(model, numerics="strict")
    for own in (model, copy.deepcopy(model)):
        sites = [call.site for v in onepass._swap.state_of(own).variants for call in v.calls]
        assert [site.numerics for site in sites] == ["strict"] * len(sites) and sites
    block = onepass.Block("conv2d(3,8,k=3) | relu", numerics="fast")
    assert copy.deepcopy(block)._site.numerics == "fast"
