"""Frozen models: weights are packed once, with the same bits, until one of them changes."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import onepass
from onepass import _cpu, _frozen, _ops

pytestmark = pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))

BLOCK = "conv2d(16,40,k=3,p=1) | relu | group_norm(4)"


@pytest.fixture(autouse=True)
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions are the library's, whatever is predicted for this processor."""
    monkeypatch.setattr(_cpu, "leaves_convolution", lambda *how: False)


class Packings:
    """The operators that pack and that take packed weights, counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.packed = 0
        self.find = _frozen.Frozen.find
        self.reads: list[bool] = []
        real = _frozen.Packed

        def made(*args: object) -> _frozen.Packed:
            self.packed += 1
            return real(*args)

        def find(own: _frozen.Frozen, *args: object) -> _frozen.Packed | None:
            found = self.find(own, *args)
            self.reads.append(found is not None)
            return found

        monkeypatch.setattr(_frozen, "Packed", made)
        monkeypatch.setattr(_frozen.Frozen, "find", find)


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> Packings:
    return Packings(monkeypatch)


def sequence() -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 40, 3, padding=1), nn.ReLU(), nn.GroupNorm(4, 40)).eval()


@pytest.fixture(params=["fused", "block"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    """One that is frozen and has run once."""
    torch.manual_seed(0)
    if request.param == "fused":
        made = onepass.fuse(sequence(), freeze=True)
    else:
        made = onepass.freeze(onepass.Block(BLOCK))
    run(made)
    return made


X = torch.randn(2, 16, 13, 14, generator=torch.Generator().manual_seed(3))


def run(model: nn.Module, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        return model(x)


def weight_of(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def assert_right(model: nn.Module) -> None:
    """The bits of an unfrozen model with these weights."""
    found, twin = run(model), copy.deepcopy(model)
    assert onepass.report(twin).frozen == []
    assert torch.equal(found, run(twin))


def test_weights_are_packed_once(packings: Packings, model: nn.Module) -> None:
    assert_right(model)
    assert_right(model)
    assert (packings.packed, packings.reads) == (1, [True] * 3)


def test_the_report_counts_what_is_kept(model: nn.Module) -> None:
    report = onepass.report(model)
    (kept,) = report.frozen
    assert kept.bytes >= weight_of(model).nbytes
    assert (kept.changes, kept.packed_by_calls) == (0, {})
    assert f"frozen, {kept.bytes / 1e6:.1f} MB:" in str(report)
    assert report.as_dict()["frozen"] == [
        {"name": kept.name, "bytes": kept.bytes, "changes": 0, "packed_by_calls": {}}
    ]
    assert set(model.state_dict()) == set(onepass.unfreeze(model).state_dict())
    assert onepass.report(model).frozen == []


def double_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        weight_of(model).mul_(2)


def change_the_bias(model: nn.Module) -> None:
    with torch.no_grad():
        list(model.parameters())[1].add_(1)


def replace(model: nn.Module) -> None:
    owner = model[0] if isinstance(model, nn.Sequential) else model
    name = next(iter(owner._parameters))
    setattr(owner, name, nn.Parameter(-weight_of(model)))


def take_a_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).square().mean().backward()
    optimizer.step()


def step_fused(model: nn.Module) -> None:
    """The version stays as it is, and no forward ran here."""
    weight = weight_of(model)
    weight.grad, version = torch.ones_like(weight), weight._version
    torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()
    assert weight._version == version


def write_through_data_in_training(model: nn.Module) -> None:
    model(X).sum().backward()
    weight_of(model).data.mul_(2)


CHANGES = [
    double_in_place,
    change_the_bias,
    replace,
    take_a_step,
    step_fused,
    write_through_data_in_training,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_packed_anew(packings: Packings, model: nn.Module, change) -> None:
    before = run(model)
    change(model)
    assert not torch.equal(run(model), before)
    assert_right(model)
    assert onepass.report(model).frozen[0].changes == 1
    assert packings.packed == 2


def test_loading_and_moving_drop_packed_weights(model: nn.Module) -> None:
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    for change in (lambda: model.load_state_dict(state), model.bfloat16, model.float):
        assert onepass.report(model).frozen[0].bytes > 0
        change()
        assert sum(kept.bytes for kept in onepass.report(model).frozen) == 0
        run(model, X.to(weight_of(model).dtype))
    assert_right(model)


def test_calls_with_gradients_pack(packings: Packings, model: nn.Module) -> None:
    packings.reads.clear()
    model(X).sum().backward()
    assert packings.reads == []
    assert weight_of(model).grad is not None


def test_copies_and_pickles_are_not_frozen(packings: Packings, model: nn.Module) -> None:
    packings.reads.clear()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(twin), run(model))
        assert onepass.report(twin).frozen == []
    assert packings.reads == [True, True]  # of the model


def test_unfreezing_frees_the_memory(model: nn.Module) -> None:
    sites = (
        [model._site] if isinstance(model, onepass.Block) else [call.site for call in model._onepass.calls]
    )
    packed = weakref.ref(next(iter(sites[0].frozen._kept.by_packing.values())).tensor)
    assert packed() is not None
    onepass.unfreeze(model)
    gc.collect()
    assert packed() is None


def test_a_child_that_comes_back_to_the_same_address() -> None:
    """Its parameter, version and address are those of before, the memory is not."""
    model = onepass.fuse(sequence(), freeze=True)
    with torch.no_grad():
        model[0].weight.fill_(1 + 2**-12)  # which f16 rounds
        run(model)
        addresses = set()
        for _ in range(20):
            addresses.add(model[0].weight.data_ptr())
            model[0].half().float()
            assert_right(model)
            model[0].weight.fill_(1 + 2**-12)
            run(model)


def test_training_that_leaves_the_convolution_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = onepass.fuse(sequence(), freeze=True)
    before = run(model)
    monkeypatch.setattr(_cpu, "chooses_gradients", lambda dtype: False)
    monkeypatch.setattr(_cpu, "leaves_convolution", lambda block, *how: "conv" in block and how[-1])
    model(X).sum().backward()
    weight_of(model).data.mul_(2)
    assert not torch.equal(run(model), before)
    assert_right(model)


def test_training_by_the_original_forward() -> None:
    """A batch norm is fused in evaluation alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 40, 3, padding=1), nn.BatchNorm2d(40), nn.ReLU()).eval()
    onepass.fuse(model, freeze=True)
    run(model)
    with pytest.warns(onepass.FallbackWarning):
        model.train()(X).sum().backward()
    model.eval()
    weight_of(model).data.mul_(2)
    assert_right(model)


def test_conversions_that_swap_parameters(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double().float()
        assert_right(model)
        model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_right(model)


def test_a_thread_that_asks_while_another_drops(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    """Between the check of the weights and the look-up another thread drops and packs anew."""
    checks: list[bool] = []
    real = _frozen._Kept.holds

    def holds(own: _frozen._Kept, parameters: object) -> bool:
        held = real(own, parameters)
        checks.append(held)
        if len(checks) == 1:
            double_in_place(model)
            run(model)
        return held

    wanted = run(copy.deepcopy(model))
    monkeypatch.setattr(_frozen._Kept, "holds", holds)
    assert torch.equal(run(model), wanted)  # weights and what was packed of them belong together
    assert checks[0]
    assert_right(model)


def test_unfreezing_while_another_thread_calls(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    real = _ops.describe

    def describe(text: str) -> object:
        onepass.unfreeze(model)
        return real(text)

    wanted = run(model)
    monkeypatch.setattr(_ops, "describe", describe)
    assert torch.equal(run(model), wanted)
    assert onepass.report(model).frozen == []


def test_traces_hold_no_packed_weights(model: nn.Module) -> None:
    with torch.no_grad():
        traced = make_fx(model)(X)
        double_in_place(model)
        assert torch.equal(traced(X), run(model))


def test_steps_of_optimizers_are_noted_of_living_weights_alone() -> None:
    block = onepass.freeze(onepass.Block(BLOCK))
    for _ in range(3):
        block.conv_weight = nn.Parameter(torch.randn_like(block.conv_weight))
        run(block)
    gc.collect()
    own = [seen for seen in _frozen._all_seen if seen.is_of({id(weight) for weight in block.parameters()})]
    assert len(own) == 2  # the weight and the bias


def test_writes_through_data_are_not_seen() -> None:
    """The documented limit; whoever merges a LoRA meets it."""
    block = onepass.freeze(onepass.Block(BLOCK))
    before = run(block)
    block.conv_weight.data.mul_(2)
    assert torch.equal(run(block), before)
    onepass.freeze(block)
    assert_right(block)
    assert not torch.equal(run(block), before)


def test_variants_of_before_a_change_keep_nothing() -> None:
    model = onepass.fuse(sequence(), freeze=True)
    run(model)
    alone = sum(kept.bytes for kept in onepass.report(model).frozen)
    for groups in (8, 5):
        model[2] = nn.GroupNorm(groups, 40)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", onepass.FallbackWarning)  # it is traced again
            run(model)
        run(model)
    assert sum(kept.bytes for kept in onepass.report(model).frozen) == alone


def test_inference_mode_and_other_threads(model: nn.Module) -> None:
    wanted, threads = run(model), torch.get_num_threads()
    with torch.inference_mode():
        assert torch.equal(model(X), wanted)
    try:
        torch.set_num_threads(threads % 2 + 1)
        assert torch.equal(run(model), wanted)
    finally:
        torch.set_num_threads(threads)


def test_many_sizes_keep_a_bounded_number(model: nn.Module) -> None:
    for size in range(9, 9 + 2 * _frozen.MOST_PACKINGS):
        x = torch.randn(1, 16, size, size)
        assert torch.equal(run(model, x), run(copy.deepcopy(model), x))
    (kept,) = onepass.report(model).frozen
    assert sum(kept.packed_by_calls.values()) == _frozen.MOST_PACKINGS + 1
    assert "inputs of other sizes" in str(onepass.report(model))


def test_other_tensors_in_place_of_parameters_are_packed_by_the_call(packings: Packings) -> None:
    """A new tensor may lie where the last one did, with the same version."""
    block = onepass.freeze(onepass.Block(BLOCK))
    for seed in range(3):
        torch.manual_seed(seed)
        weights = {name: torch.randn_like(value) for name, value in block.named_parameters()}
        with torch.no_grad():
            found = torch.func.functional_call(block, weights, (X,))
            fresh = onepass.Block(BLOCK)
            fresh.load_state_dict(weights)
            assert torch.equal(found, fresh(X))
    assert packings.reads == [False] * 3
    assert "no parameters" in next(iter(onepass.report(block).frozen[0].packed_by_calls))


def test_a_model_that_is_traced_again_stays_frozen(packings: Packings) -> None:
    model = onepass.fuse(sequence(), freeze=True)
    run(model)
    model[2] = nn.GroupNorm(8, 40)
    with pytest.warns(onepass.FallbackWarning):
        run(model)
    packings.reads.clear()
    run(model)
    assert packings.reads == [True]


def test_compiled_calls_leave_frozen_weights_out(packings: Packings, model: nn.Module) -> None:
    packings.reads.clear()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(run(compiled), run(copy.deepcopy(model)))
    assert packings.reads == []


def test_what_is_not_fused_is_warned_of() -> None:
    with pytest.warns(onepass.FallbackWarning, match="nothing of .* is frozen"):
        onepass.freeze(nn.Conv2d(3, 4, 3))


def test_a_plan_that_packs_nothing_keeps_nothing(packings: Packings) -> None:
    tail = onepass.freeze(onepass.Block("relu | group_norm(4)", channels=16))
    run(tail)
    assert packings.reads == []
    assert onepass.report(tail).frozen == []
