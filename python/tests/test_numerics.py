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


def even(x: Tensor) -> Tensor:
    """To TF32, to nearest, ties to even."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def away(x: Tensor) -> Tensor:
    """To nearest, ties away from zero."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def cut(x: Tensor) -> Tensor:
    """Towards zero."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


ROUNDINGS = {"fp32": lambda x: x, "tf32": even, "tf32_away": away, "other": cut}


class Rounding(torch.autograd.Function):
    """A convolution that rounds as `kinds` say: operands of the forward pass, of dx and of dw."""

    @staticmethod
    def forward(ctx: Any, conv: Conv, kinds: tuple[str, str, str], x: Tensor, w: Tensor) -> Tensor:
        ctx.how = conv, kinds
        ctx.save_for_backward(x, w)
        change = ROUNDINGS[kinds[0]]
        return _eager.convolve(conv, change(x), change(w))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        conv, kinds = ctx.how
        found = []
        for index, kind in enumerate(kinds[1:]):
            tensors = [ROUNDINGS[kind](t) for t in (*ctx.saved_tensors, gradient)]
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
    return namespace["_rounding_of"]


@pytest.mark.parametrize("text", list(CONVOLUTIONS))
@pytest.mark.parametrize(
    "kinds",
    [*((kind,) * 3 for kind in ROUNDINGS), ("tf32", "fp32", "tf32_away"), ("fp32", "other", "tf32")],
)
def test_how_a_convolution_rounds_is_found(text: str, kinds: tuple[str, str, str]) -> None:
    conv = describe(text).conv
    convolve = functools.partial(Rounding.apply, conv, kinds)
    for asked in (_rounding.asked, exported_asking()):
        found = asked(convolve, *tensors_of(conv, CONVOLUTIONS[text]), conv.transposed, True)
        assert tuple(found) == kinds
        found = asked(convolve, *tensors_of(conv, CONVOLUTIONS[text]), conv.transposed, False)
        assert found == [kinds[0]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """PyTorch is taken to have a GPU; what it is asked is listed."""
    asked: list[Any] = []

    def ask(conv: Conv, sizes: Any, order: Any, device: Any, gradients: bool) -> tuple[str, ...]:
        asked.append((conv.text, sizes))
        if "out of memory" in asked:
            raise torch.OutOfMemoryError
        return ("tf32", "tf32", "tf32")

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
        assert _rounding.rounds(*question())[0] == "tf32"
    assert len(gpu) == 1
    assert _rounding.rounds(*question(batch=3))[0] == "tf32" and len(gpu) == 2
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert _rounding.rounds(*question())[0] == "tf32" and len(gpu) == 3


def test_the_answer_is_fp32_where_pytorch_cannot_be_asked(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert _rounding.rounds(*question()) == _rounding.NEVER
    assert gpu == []
    gpu.append("out of memory")
    assert _rounding.rounds(*question()) == _rounding.NEVER
    gpu.clear()
    assert _rounding.rounds(*question())[0] == "tf32", "a later call asks again"
    assert _rounding.rounds(*question(batch=0)) == _rounding.NEVER


NO_MEAN = "conv2d(3,8,k=3) | relu | group_norm(4)"
S27 = "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean"


@pytest.mark.parametrize(
    ("policy", "dtype", "allowed", "answers", "forward", "backward"),
    [
        ("pytorch", torch.float32, True, ("tf32", "tf32", "tf32_away"), "tf32", "tf32"),
        ("pytorch", torch.float32, True, ("tf32_away", "tf32", "other"), "tf32_away", "tf32"),
        ("pytorch", torch.float32, True, ("other", "tf32", "tf32"), None, "tf32"),
        ("pytorch", torch.float32, True, ("fp32", "tf32", "tf32"), "near_f32", "near_f32"),
        ("pytorch", torch.float32, True, ("tf32", "fp32", "tf32"), "tf32", "near_f32"),
        ("pytorch", torch.float32, False, ("tf32", "tf32", "tf32"), "", ""),
        ("strict", torch.float32, True, ("tf32", "tf32", "tf32"), "strict", "strict"),
        ("fast", torch.float32, False, ("fp32", "fp32", "fp32"), "tf32 fast", "tf32 fast"),
        ("pytorch", torch.bfloat16, True, ("tf32", "tf32", "tf32"), "", ""),
        ("fast", torch.float16, True, ("tf32", "tf32", "tf32"), "", ""),
        ("strict", torch.bfloat16, True, ("tf32", "tf32", "tf32"), "strict", "strict"),
    ],
)
def test_words_of_a_policy(
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    dtype: torch.dtype,
    allowed: bool,
    answers: tuple[str, ...],
    forward: str | None,
    backward: str,
) -> None:
    monkeypatch.setattr(_numerics, "allows_tf32", lambda: allowed)
    monkeypatch.setattr(_rounding, "rounds", lambda *_: answers)
    monkeypatch.setattr(_numerics, "_averages", lambda *_: False)
    conv, x, w, _ = question()
    x, w = x.to(dtype), w.to(dtype)
    assert _numerics.forward_words(policy, conv, x, w) == forward
    assert _numerics.backward_words(policy, describe(NO_MEAN), x, w, (True, True)) == backward
    for words in (forward, backward):
        if words is not None:
            mode = _numerics.mode_of(dtype, words)
            assert torch.ops.onepass.cuda_predicted_gain(conv.text, x.shape, mode, "nchw", "cuda:sm_90a") > 0


def test_gradients_that_nobody_wants_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_numerics, "allows_tf32", lambda: True)
    monkeypatch.setattr(_rounding, "rounds", lambda *_: ("tf32", "fp32", "tf32"))
    _, x, w, _ = question()
    assert _numerics.backward_words("pytorch", describe(NO_MEAN), x, w, (False, True)) == "tf32"
    assert _numerics.backward_words("pytorch", describe(NO_MEAN), x, w, (True, True)) == "near_f32"


@pytest.mark.parametrize(
    ("block", "batch", "averages"),
    [(S27, 1024, True), (S27, 11, False), (S27.removesuffix(" | mean"), 1024, False)],
)
def test_gradients_average_weights_where_many_positions_do(block: str, batch: int, averages: bool) -> None:
    assert _numerics._averages(block, (batch, 3, 16, 32, 32), False, "cuda:sm_90a") == averages


def test_gradients_of_an_fp32_forward_that_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_numerics, "allows_tf32", lambda: True)
    monkeypatch.setattr(_numerics, "_averages", lambda *_: True)
    monkeypatch.setattr(_rounding, "rounds", lambda *_: ("fp32", "tf32", "tf32"))
    _, x, w, _ = question()
    assert _numerics.backward_words("pytorch", describe(S27), x, w, (True, True)) == "tf32 fast"
    assert _numerics.backward_words("pytorch", describe(NO_MEAN), x, w, (True, True)) == "tf32 fast"


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
        sites = [call.site for v in onepass._state.state_of(own).variants for call in v.calls]
        assert [site.numerics for site in sites] == ["strict"] * len(sites) and sites
    block = onepass.Block("conv2d(3,8,k=3) | relu", numerics="fast")
    assert copy.deepcopy(block)._site.numerics == "fast"
