"""What a place in a model keeps of its choices: made once, and again where what they follow changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass import _choices, _cuda, _numerics, _rounding, tuning
from onepass._fallback import Site

pytestmark = pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))

BLOCK = "conv2d(3,8,k=3) | relu | group_norm(4)"
ROUNDED = ("tf32", "tf32", "tf32")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The sizes of calls that were decided anew, as if there were a GPU; kernels give zeros."""
    sizes: list[torch.Size] = []

    def words(_: Any, input: Tensor, *how: Any) -> tuple[str, str]:
        sizes.append(input.shape)
        return ("tf32", "tf32")

    monkeypatch.setattr(_cuda, "_words_of_whole", words)
    monkeypatch.setattr(_cuda, "_asked", [None])
    monkeypatch.setattr(_cuda, "_call", lambda operator, *arguments: torch.zeros(1))
    monkeypatch.setattr(_cuda, "counter", lambda *_: -1)
    monkeypatch.setattr(_numerics, "allows_tf32", lambda: True)
    monkeypatch.setattr(_rounding, "rounds", lambda *_: ROUNDED)
    monkeypatch.setattr(tuning, "is_tuning", lambda: False)
    return sizes


def tensors(batch: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    shapes = ((8, 3, 3, 3), (8,), (8,), (8,))
    return torch.zeros(batch, 3, 9, 9, dtype=dtype), [torch.zeros(shape, dtype=dtype) for shape in shapes]


def call(site: Site | str, x: Tensor, parameters: list[Tensor], block: str = BLOCK) -> None:
    with torch.no_grad():
        _cuda.apply(block, x, parameters, None, site)


def test_a_place_decides_once(asked: list) -> None:
    site, (x, parameters) = Site("a place"), tensors()
    for _ in range(3):
        call(site, x, parameters)
    assert len(asked) == 1
    call(Site("another"), x, parameters)
    assert len(asked) == 2


def test_other_blocks_of_a_place_are_decided_anew(asked: list) -> None:
    """An operand is a residual in one call and a factor of each channel in the next."""
    site, (x, parameters) = Site("a place"), tensors()
    for block in (BLOCK, f"{BLOCK} | relu") * 2:
        call(site, x, parameters, block)
    assert len(asked) == 2


CHANGES = {
    "batch": lambda x, p: (x[:1], p),
    "layout": lambda x, p: (x.contiguous(memory_format=torch.channels_last), p),
    "weight's layout": lambda x, p: (x, [p[0].contiguous(memory_format=torch.channels_last), *p[1:]]),
    "type": lambda x, p: (x.half(), [one.half() for one in p]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_tensors_are_decided_anew(asked: list, change: str) -> None:
    site, given = Site("a place"), tensors()
    changed = CHANGES[change](*given)
    for tensors_of_call in (given, changed, given, changed):
        call(site, *tensors_of_call)
    assert len(asked) == 2


SWITCHES = {
    "cudnn_benchmark": True,
    "cudnn_deterministic": True,
    "cudnn_enabled": False,
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_decides_anew(asked: list, switch: str) -> None:
    """Set as torch.backends does: other tests may have disabled its properties."""
    site, given = Site("a place"), tensors()
    read, write = (getattr(torch._C, f"_{verb}_{switch}") for verb in ("get", "set"))
    call(site, *given)
    before = read()
    write(SWITCHES[switch])
    try:
        call(site, *given)
    finally:
        write(before)
    assert before != SWITCHES[switch] and len(asked) == 2


def test_another_precision_decides_anew(asked: list) -> None:
    site, given = Site("a place"), tensors()
    call(site, *given)
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee" if before != "ieee" else "tf32"
    try:
        call(site, *given)
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    assert len(asked) == 2


def test_another_policy_decides_anew(asked: list, monkeypatch: pytest.MonkeyPatch) -> None:
    site, given = Site("a place"), tensors()
    call(site, *given)
    monkeypatch.setattr(_numerics, "_default", ["fast"])
    call(site, *given)
    assert len(asked) == 2


def test_deterministic_algorithms_decide_anew(asked: list) -> None:
    site, given = Site("a place"), tensors()
    call(site, *given)
    torch.use_deterministic_algorithms(True)
    try:
        call(site, *given)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(asked) == 2


def test_what_pytorch_was_not_asked_is_not_kept(asked: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured, say."""
    site, given = Site("a place"), tensors()
    monkeypatch.setattr(_rounding, "rounds", lambda *_: _rounding.NEVER)
    call(site, *given)
    monkeypatch.setattr(_rounding, "rounds", lambda *_: ROUNDED)
    call(site, *given)
    call(site, *given)
    assert len(asked) == 2


def test_tuning_autocast_and_texts_keep_nothing(asked: list, monkeypatch: pytest.MonkeyPatch) -> None:
    site, (x, parameters) = Site("a place"), tensors()
    for _ in range(2):
        call(BLOCK, x, parameters)
    assert len(asked) == 2
    with torch.autocast("cpu", torch.bfloat16):
        call(site, x, parameters)
    call(site, x, [parameters[0].double(), *parameters[1:]])
    monkeypatch.setattr(tuning, "is_tuning", lambda: True)
    call(site, x, parameters)
    assert not site.choices and len(asked) == 5


@pytest.mark.parametrize("dtype, reason", [(torch.float64, None), (torch.float32, "no compiler")])
def test_calls_that_cannot_run_whole_are_counted_each(
    dtype: torch.dtype, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cuda, "_asked", [reason])
    site, (x, parameters) = Site("a place"), tensors(dtype=dtype)
    with pytest.warns(onepass.FallbackWarning):
        for _ in range(3):
            call(site, x, parameters[:2], "conv2d(3,8,k=3)")
    assert list(site.counts.values()) == [3] and not site.choices


def test_choices_are_bounded(asked: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_choices, "_MOST", 3)
    site = Site("a place")
    for batch in range(1, 9):
        call(site, *tensors(batch))
    assert len(asked) == 8 and len(site.choices) <= 3
