"""Samples that a GPU computes again: when the host looks, what it says, that calls hand on their counters.

Counters are lists here: nothing needs a GPU.
"""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass import _cuda, _fallback, _redone
from onepass._fallback import Site

pytestmark = pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))

GPU = torch.device("cuda:0")


class Counters:
    """What kernels have added, and how often the host looked."""

    def __init__(self) -> None:
        self.devices: list[int] = []
        self.values: list[int] = []
        self.looks = 0

    def new(self, device: int) -> int:
        self.devices.append(device)
        self.values.append(0)
        return len(self.values) - 1

    def counted(self, number: int) -> int:
        self.looks += 1
        return self.values[number]


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    made = Counters()
    monkeypatch.setattr(_redone, "_new_counter", made.new)
    monkeypatch.setattr(_redone, "_counted", made.counted)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


def test_a_site_looks_at_its_second_call_and_at_every_64th(counters: Counters) -> None:
    site = Site("layer")
    looked = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in range(1, 200):
            before = counters.looks
            site.counter(GPU)
            looked += [call] if counters.looks > before else []
    assert looked == [2, 64, 128, 192]


@pytest.mark.parametrize(("seen", "warned"), [(1, 2), (2, 64), (70, 128)])
def test_a_site_warns_once_with_its_name(counters: Counters, seen: int, warned: int) -> None:
    site = Site("encoder.conv1")
    for call in range(1, 300):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            number = site.counter(GPU)
        if call == warned:
            (warning,) = caught
            assert warning.category is onepass.SlowPathWarning
            said = str(warning.message)
            assert said.startswith("encoder.conv1: 3 samples had values that leave f16's range")
            assert "20 times slower" in said
        else:
            assert not caught
        if call == seen:
            counters.values[number] += 3
    looks = counters.looks
    site.counter(GPU)
    assert counters.looks == looks, "nothing is left to say"


def test_each_gpu_has_a_counter_of_its_own(counters: Counters) -> None:
    site = Site("layer")
    numbers = [site.counter(torch.device("cuda", index)) for index in (0, 1, 0, 1)]
    assert numbers == [0, 1, 0, 1]
    assert counters.devices == [0, 1]
    counters.values[:] = 2, 5
    assert site.samples(wait=True) == 7


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))])
def test_copies_of_a_block_count_anew(counters: Counters, copied: Any) -> None:
    block = onepass.Block("conv2d(3,8,k=3) | relu")
    number = block._site.counter(GPU)
    counters.values[number] = 4
    other = copied(block)
    assert block._site.samples() == 4
    assert other._site.samples() == 0
    assert other._site.counter(GPU) != number
    assert not [name for name in block.state_dict() if "site" in name]


# --- Calls ---


@pytest.fixture
def calls(counters: Counters, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The operators that fake tensors reach, with their last argument, as if there were a GPU."""
    made = []

    def call(operator: Any, *arguments: Any) -> Any:
        made.append((operator.name(), arguments[-1]))
        return operator(*arguments)

    monkeypatch.setattr(_cuda, "_call", call)
    monkeypatch.setattr(_cuda, "_asked", [None])
    monkeypatch.setattr(_cuda, "_is_worth_fusing", lambda *how: True)
    words = ("tf32", "tf32")
    monkeypatch.setattr(
        _cuda, "_words_of_whole", lambda *how: None if torch.compiler.is_compiling() else words
    )
    passes = _cuda._Passes(words, True, (True, True, True))
    monkeypatch.setattr(_cuda, "_passes_of", lambda *how: passes)
    return made


BLOCK = "conv2d(3,8,k=3) | relu | group_norm(4)"


def test_a_block_hands_on_its_counter(counters: Counters, calls: list) -> None:
    with FakeTensorMode():
        block = onepass.Block(BLOCK, device="cuda")
        alone = onepass.Block("conv2d(3,8,k=3)", device="cuda")
        x = torch.empty(2, 3, 9, 9, device="cuda")
        with torch.no_grad():
            block(x), block(x), alone(x)
        block(x), alone(x)
    forward, training = "onepass::whole_forward", "onepass::whole_forward_with_statistics"
    assert calls == [(forward, 0), (forward, 0), (forward, 1), (training, 0), (forward, 1)]


def test_a_function_has_a_counter_for_each_text(counters: Counters, calls: list) -> None:
    _fallback.by_text.clear()  # other tests' counters
    with FakeTensorMode(), torch.no_grad():
        x, weight = torch.empty(2, 3, 9, 9, device="cuda"), torch.empty(8, 3, 3, 3, device="cuda")
        for text in ("conv2d(3,8,k=3,bias=false)", "conv2d(3,8,k=3,bias=false) | relu") * 2:
            onepass.functional.run(text, x, conv_weight=weight)
    _fallback.by_text.clear()
    assert [number for _, number in calls] == [0, 1, 0, 1]


def test_a_compiled_block_has_none(counters: Counters, calls: list) -> None:
    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad():
        block = onepass.Block(BLOCK, device="cuda")
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        assert compiled(torch.empty(2, 3, 9, 9, device="cuda")).shape == (2, 8, 7, 7)
    assert counters.values == []


FAKES = FakeTensorMode()


class Net(nn.Module):
    """Two chains, one of them inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.GroupNorm(4, 8))
        self.head = nn.Conv2d(8, 8, 3)
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.head(self.stem(x))))


def fused_net() -> nn.Module:
    """Fused as it is, then its parameters on a GPU that is not there."""
    model = onepass.fuse(Net())
    with FAKES:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty(parameter.shape, device="cuda")))
    return model


def test_a_fused_layer_warns_with_its_path_and_is_in_the_report(counters: Counters, calls: list) -> None:
    model = fused_net()
    caught: list[warnings.WarningMessage] = []

    def run() -> None:
        with FAKES, torch.no_grad(), warnings.catch_warnings(record=True) as now:
            warnings.simplefilter("always")
            model(torch.empty(2, 3, 9, 9, device="cuda"))
        caught.extend(warning for warning in now if warning.category is onepass.SlowPathWarning)

    run()
    assert [number for _, number in calls] == [0, 1]
    assert onepass.report(model).redone == []
    assert "slow:" not in str(onepass.report(model))
    counters.values[1] = 1
    for _ in range(130):
        run()
    assert [str(warning.message).split(":")[0] for warning in caught] == ["head"]
    found = onepass.report(model)
    assert [(layer.name, layer.samples) for layer in found.redone] == [("head", 1)]
    assert found.as_dict()["redone"] == [{"name": "head", "samples": 1}]
    assert "slow:\n  head  1 sample had values that leave f16's range" in str(found)


def test_the_report_adds_up_a_layers_modes(counters: Counters, calls: list) -> None:
    model = fused_net()
    with FAKES, torch.no_grad():
        for mode in (True, False):
            model.train(mode)(torch.empty(2, 3, 9, 9, device="cuda"))
    assert [number for _, number in calls] == [0, 1, 2, 3]
    counters.values[:] = 0, 2, 0, 5
    assert [(layer.name, layer.samples) for layer in onepass.report(model).redone] == [("head", 7)]


def test_the_report_names_blocks_by_their_path(counters: Counters) -> None:
    model = nn.Sequential(nn.Identity(), onepass.Block(BLOCK))
    counters.values[model[1]._site.counter(GPU)] = 2
    assert [(layer.name, layer.samples) for layer in onepass.report(model).redone] == [("1", 2)]
