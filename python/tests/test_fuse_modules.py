"""What fuse must not change: hooks, modes, copies, training, and every call that is not as it was traced."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import json
import pathlib
import pickle
import random
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_support import assert_same, blocks, check, reasons
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from onepass import _library, explain, fuse, report, unfuse


class Net(nn.Module):
    """Two blocks, the second with dropout, and a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.GroupNorm(2, 8)
        self.act = nn.SiLU()
        self.block = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(dropout), nn.GroupNorm(4, 8), self.act
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm1(self.conv1(x)))
        return self.head(self.block(x).mean((2, 3)))


def image() -> Tensor:
    return torch.randn(2, 3, 6, 7)


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return fuse(copy.deepcopy(model)), model


def is_fused(model: nn.Module) -> bool:
    return bool(report(model).fused)


# --- The module stays what it was ---------------------------------------------------------------------------


def test_names_parameters_and_classes_stay() -> None:
    model = Net()
    before = list(model.state_dict()), list(model.named_parameters()), repr(model)
    assert fuse(model) is model
    said = [line for line in repr(model).splitlines() if not line.lstrip().startswith("(fused")]
    assert (list(model.state_dict()), said) == (before[0], before[2].splitlines())
    assert all(a is b and n == m for (n, a), (m, b) in zip(before[1], model.named_parameters(), strict=True))
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)
    assert len(blocks(model)) == 2


def test_unfuse_gives_the_class_back() -> None:
    model = Net()
    attributes = set(vars(model))
    unfuse(fuse(model))
    assert type(model) is Net
    assert type(model.block) is nn.Sequential
    assert set(vars(model)) == attributes
    assert not is_fused(model)


def test_fusing_twice_is_fusing_once() -> None:
    model = fuse(fuse(Net()), conv="keep")
    assert [cls for cls in type(model).__mro__ if cls.__name__ == "Net"] == [type(model), Net]
    assert all(not block.startswith("conv") for block in blocks(model))


def test_state_dict_loads_into_a_fused_model() -> None:
    fused, original = fuse(Net()), Net()
    fused.load_state_dict(original.state_dict())
    assert_same(fused, original, image())


def test_moving_and_casting_follow() -> None:
    fused, original = pair(Net())
    assert_same(fused.double(), original.double(), image().double())
    assert_same(fused.to(torch.float32), original.to(torch.float32), image())
    assert_same(
        fused.to(memory_format=torch.channels_last), original, image().to(memory_format=torch.channels_last)
    )


def test_an_optimizer_built_before_fusing_trains_it() -> None:
    model = Net()
    original = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, original)]
    fuse(model)
    for _ in range(5):
        x, y = image(), torch.randn(2, 5)
        for optimizer, m in zip(optimizers, (model, original), strict=True):
            optimizer.zero_grad()
            F.mse_loss(m(x), y).backward()
            optimizer.step()
    assert is_fused(model)
    for a, b in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


# --- Copies -------------------------------------------------------------------------------------------------


def _saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved],
    ids=["deepcopy", "pickle", "save"],
)
def test_a_copy_is_fused_on_its_own(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    fused, original = pair(Net())
    twin = duplicate(fused)
    assert isinstance(twin, Net)
    assert blocks(twin) == blocks(fused)
    assert_same(twin, original, image())
    with torch.no_grad():
        fused.conv1.weight.zero_()
    assert_same(twin, original, image())
    assert type(unfuse(twin)) is Net


def test_a_copy_of_a_fused_model_that_was_unfused_is_plain() -> None:
    assert type(copy.deepcopy(unfuse(fuse(Net())))) is Net


def test_a_copy_loads_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(fuse(Net()))
    monkeypatch.setattr(_library, "_reason", "not built")
    assert type(pickle.loads(data)) is Net


# --- Modes --------------------------------------------------------------------------------------------------


def test_switching_modes_switches_the_forward() -> None:
    fused, original = pair(Net(dropout=0.5))
    for training in (True, False, True, True, False):
        assert_same(fused.train(training), original.train(training), image())
    assert {entry.modes for entry in report(fused).fused} == {("eval", "train"), ("eval",), ("train",)}


def test_a_child_in_another_mode_runs_the_original() -> None:
    fused, original = pair(Net(dropout=0.5))
    for model in (fused, original):
        model.eval()
        model.block[1].train()
    assert_same(fused, original, image())
    assert "training flag differs" in reasons(fused)


def test_a_dropout_rate_changed_later_counts() -> None:
    fused, original = pair(Net(dropout=0.0))
    for model in (fused, original):
        model.train()
        model.block[1].p = 0.5
    assert_same(fused, original, image())
    assert "attribute p was changed" in reasons(fused)


def test_an_attribute_changed_later_counts() -> None:
    class Switched(Net):
        double = False

        def __init__(self) -> None:
            super().__init__()
            self.twice = False

        def forward(self, x: Tensor) -> Tensor:
            return self.step(super().forward(x))

        def step(self, x: Tensor) -> Tensor:
            return 2 * x if self.twice else x

    fused, original = pair(Switched())
    assert_same(fused, original, image())
    fused.twice = original.twice = True
    assert_same(fused, original, image())
    assert "attribute twice was changed" in reasons(fused)


# --- Hooks and replaced parts -------------------------------------------------------------------------------

HOOKS = [
    lambda m, seen: m.register_forward_hook(lambda *_: seen.append(1)),
    lambda m, seen: m.register_forward_pre_hook(lambda *_: seen.append(1)),
    lambda m, seen: m.register_full_backward_hook(lambda *_: seen.append(1)),
    lambda m, seen: m.register_full_backward_pre_hook(lambda *_: seen.append(1)),
]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", ["conv1", "norm1", "act", "block", "block.0"])
def test_a_hook_added_after_fusing_runs(name: str, hook: Any) -> None:
    fused, original = pair(Net())
    seen: list[int] = []
    handle = hook(fused.get_submodule(name), seen)
    x = image()
    fused(x.requires_grad_()).sum().backward()
    assert seen
    handle.remove()
    seen.clear()
    assert_same(fused, original, image())
    assert not seen
    assert len(blocks(fused)) == 2


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_added_before_fusing_runs(hook: Any) -> None:
    model, seen = Net(), []
    hook(model.norm1, seen)
    assert blocks(fuse(model)) == ["conv2d(8,8,k=3,p=1) | group_norm(4) | swish | mean"]
    model(image().requires_grad_()).sum().backward()
    assert seen


def test_a_hook_on_all_modules_runs() -> None:
    fused, seen = fuse(Net()), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        fused(image())
        assert nn.Conv2d in seen
        assert "hook on all modules" in reasons(fused)
    finally:
        handle.remove()


def test_hooks_on_the_fused_module_itself_keep_it_fused() -> None:
    fused, seen = fuse(Net()), []
    fused.register_forward_hook(lambda *_: seen.append(1))
    fused(image())
    assert seen
    assert len(blocks(fused)) == 2
    assert not reasons(fused)


def test_a_replaced_child_runs() -> None:
    fused, original = pair(Net())
    fused.conv1 = nn.Conv2d(3, 8, 3, padding=1, stride=2)
    original.conv1 = copy.deepcopy(fused.conv1)
    assert_same(fused, original, image())
    assert "conv1: its attribute stride was changed after fusing" in reasons(fused)


def test_a_forward_set_on_a_child_runs() -> None:
    fused = fuse(Net())
    fused.conv1.forward = lambda x: torch.zeros(2, 8, 6, 7)
    assert fused(image())[0].equal(fused(image())[0])
    assert "forward is set on the object" in reasons(fused)


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_a_parametrised_weight_is_fused() -> None:
    model = Net()
    parametrize.register_parametrization(model.conv1, "weight", _Doubled())
    fused = check(model, image())
    assert any(block.startswith("conv2d(3,8,k=3,p=1)") for block in blocks(fused))


def test_a_parametrisation_added_later_counts() -> None:
    fused, original = pair(Net())
    for model in (fused, original):
        parametrize.register_parametrization(model.conv1, "weight", _Doubled())
    assert_same(fused, original, image())
    assert "class is now ParametrizedConv2d" in reasons(fused)


@pytest.mark.parametrize("wrap", [torch.nn.utils.spectral_norm, torch.nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_weights_computed_by_hooks_are_computed(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Net().eval()
    wrap(model.conv1)
    fused = fuse(pickle.loads(pickle.dumps(model)))
    assert_same(fused, model, image())
    assert blocks(fused)[0] == "group_norm(2) | swish"


def test_a_child_whose_class_is_swapped_runs_as_that_class() -> None:
    class Sharded(nn.Conv2d):
        """What FSDP2 does to a module: another class in place."""

        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    fused, original = pair(Net())
    for model in (fused, original):
        model.conv1.__class__ = Sharded
    assert_same(fused, original, image())


def test_parameters_given_to_a_call_are_used() -> None:
    fused, original = pair(Net())
    weights = {name: torch.randn_like(p) for name, p in original.named_parameters()}
    x = image()
    results = [torch.func.functional_call(model, weights, (x,)) for model in (fused, original)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


# --- Calls --------------------------------------------------------------------------------------------------


class Flexible(nn.Module):
    """A block as diffusion libraries write it: optional tensors, *args and **kwargs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(
        self, x: Tensor, shift: Tensor | None = None, *args: Any, scale: float = 1.0, **kwargs: Any
    ) -> Tensor:
        x = self.conv(x)
        if shift is not None:
            x = x + shift[:, :, None, None]
        if args or kwargs:
            x = x + len(args) + len(kwargs)
        return F.silu(self.norm(x)) * scale


@pytest.mark.parametrize(
    ("args", "kwargs", "ran"),
    [
        ((), {}, "conv2d(3,8,k=3,p=1) | group_norm(2) | swish"),
        ((torch.randn(2, 8),), {}, "conv2d(3,8,k=3,p=1) | channel_add(per=sample) | group_norm(2) | swish"),
        (
            (),
            {"shift": torch.randn(2, 8)},
            "conv2d(3,8,k=3,p=1) | channel_add(per=sample) | group_norm(2) | swish",
        ),
        ((None, 1, 2), {}, None),
        ((), {"more": 3}, None),
        ((), {"scale": 0.5}, None),
    ],
)
def test_every_way_of_calling(args: tuple[Any, ...], kwargs: dict[str, Any], ran: str | None) -> None:
    fused, original = pair(Flexible())
    assert_same(fused, original, image(), *args, **kwargs)
    if ran is None:
        assert "not traced" in reasons(fused)
    else:
        assert ran in blocks(fused)
        assert "not traced" not in reasons(fused)


def test_a_parent_that_passes_none_is_followed() -> None:
    class Inner(Flexible):
        def forward(self, x: Tensor, shift: Tensor, scale: float) -> Tensor:  # type: ignore[override]
            return super().forward(x, shift, scale=scale)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, None, 2.0)

    fused = check(Outer(), image())
    assert blocks(fused) == ["conv2d(3,8,k=3,p=1) | group_norm(2) | swish | mul(2)"]
    assert not reasons(fused)


def test_a_tensor_subclass_runs_the_original() -> None:
    class Tagged(Tensor):
        """A tensor with metadata, as MONAI's."""

    fused, x = fuse(Net()), image()
    assert type(fused(x.as_subclass(Tagged))) is Tagged
    assert "Tagged" in reasons(fused)


def test_function_transforms_run_the_original() -> None:
    fused, original = pair(Net())
    x = torch.randn(3, 2, 3, 6, 7)
    torch.testing.assert_close(torch.vmap(fused)(x), torch.vmap(original)(x), rtol=1e-4, atol=1e-4)


# --- What cannot be traced ----------------------------------------------------------------------------------


class Hostile(Net):
    """A net whose own forward is overridden; its block can still be fused."""

    def __init__(self, step: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.step = step
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.step(self, self.act(self.norm1(self.conv1(x))))
        return self.head(self.block(x).mean((2, 3)))


def _count(m: nn.Module, x: Tensor) -> Tensor:
    m.seen = getattr(m, "seen", 0) + 1
    return x


def _frozen(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


def _low(m: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=True):
        return x * 2


HOSTILE = [
    (lambda m, x: x if x.sum() > 0 else -x, "branches or loops on a tensor"),
    (lambda m, x: x if x.shape[0] == 2 else -x, "branches or loops on a tensor"),
    (lambda m, x: x * torch.rand(()), "makes a tensor that does not depend|random numbers"),
    (lambda m, x: x * random.random(), "random numbers"),
    (lambda m, x: x + torch.ones(8, 1, 1), "makes a tensor that does not depend"),
    (lambda m, x: checkpoint(m.act, x, use_reentrant=False), "checkpoints activations"),
    (_count, "sets the attribute seen"),
    (_frozen, "switches gradients or autocast"),
    (_low, "switches gradients or autocast"),
]


@pytest.mark.parametrize(("step", "reason"), HOSTILE)
def test_an_untraceable_forward_is_left_and_its_children_fused(step: Any, reason: str) -> None:
    random.seed(0)
    model = Hostile(step)
    seen = dict(vars(model))
    fused = fuse(model)
    assert vars(fused).keys() == seen.keys()
    assert blocks(fused) == ["conv2d(8,8,k=3,p=1) | group_norm(4) | swish"]
    assert type(fused) is Hostile
    entry = next(entry for entry in report(fused).skipped if entry.name == "(Hostile)")
    assert any(part in entry.reason for part in reason.split("|"))
    state = random.getstate()
    original = unfuse(copy.deepcopy(fused))
    torch.manual_seed(3)
    result = fused(x := image())
    torch.manual_seed(3)
    random.setstate(state)
    torch.manual_seed(3)
    image()
    torch.testing.assert_close(result, original(x), rtol=1e-4, atol=1e-4)


def test_buffers_written_in_forward_are_written() -> None:
    def step(m: nn.Module, x: Tensor) -> Tensor:
        m.calls.add_(1)
        return x

    fused, original = pair(Hostile(step))
    for _ in range(3):
        x = image()
        torch.testing.assert_close(fused(x), original(x), rtol=1e-4, atol=1e-5)
    assert fused.calls == original.calls == 3
    assert len(blocks(fused)) == 2


def test_running_statistics_are_written_whatever_the_flag_says() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.ReLU())
    model[1].track_running_stats = False
    fused, original = pair(model)
    assert_same(fused, original, image())
    for name, buffer in original.named_buffers():
        torch.testing.assert_close(fused.get_buffer(name), buffer)


def test_asking_for_the_type_is_answered_as_for_a_tensor() -> None:
    class Asking(Net):
        def forward(self, x: Tensor | list[Tensor]) -> Tensor:
            x = x if isinstance(x, Tensor) and torch.is_tensor(x) else torch.cat(x)
            return super().forward(x)

    fused, original = pair(Asking())
    assert_same(fused, original, image())
    assert len(blocks(fused)) == 2
    x = image()
    torch.testing.assert_close(fused([x, x]), original([x, x]), rtol=1e-4, atol=1e-5)


def test_a_fused_model_is_freed_at_once() -> None:
    fuse(Net())  # what PyTorch imports late
    gc.collect()
    gc.disable()
    try:
        model = fuse(Net())
        model(image())
        kept = [weakref.ref(parameter) for parameter in model.parameters()]
        del model
        assert not any(reference() is not None for reference in kept)
    finally:
        gc.enable()


def test_without_the_library_the_model_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "_reason", "it is not built")
    model = fuse(Net())
    assert type(model) is Net
    assert "it is not built" in reasons(model)
    assert not report(model).fused


def test_filter_fn_says_which_forwards_are_rewritten() -> None:
    names = []

    def only_block(name: str, module: nn.Module) -> bool:
        names.append(name)
        return name == "block"

    model = fuse(Net(), filter_fn=only_block)
    assert type(model) is Net
    assert blocks(model) == ["conv2d(8,8,k=3,p=1) | group_norm(4) | swish"]
    assert "norm1: filter_fn leaves its module out" in reasons(model)
    assert set(names) <= {"", "block"}


# --- The report ---------------------------------------------------------------------------------------------


def test_the_report_prints_and_serialises() -> None:
    model = fuse(nn.Sequential(Net(), nn.Sequential(nn.MaxPool2d(1), nn.BatchNorm2d(5))))
    found = report(model)
    assert "conv2d(3,8,k=3,p=1) | group_norm(2) | swish" in str(found)
    assert "0.conv1" in str(found)
    assert "1.1: nothing before or after it fuses with it" in reasons(model)
    assert json.loads(json.dumps(found.as_dict()))["fused"][0]["modules"][0] == "0.conv1"
    assert found.fused[0].plan is None
    model[0](image())
    assert report(model).fused[0].plan


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_report_names_the_plan_for_the_order_of_the_input(layout: torch.memory_format) -> None:
    block, sizes = "conv2d(16,32,k=3,p=1,groups=2) | group_norm(2) | swish", (2, 16, 32, 32)
    conv = nn.Conv2d(16, 32, 3, padding=1, groups=2)  # never left to PyTorch
    model = fuse(nn.Sequential(conv, nn.GroupNorm(2, 32), nn.SiLU()))
    model(torch.rand(sizes).contiguous(memory_format=layout))
    assert report(model).fused[0].plan in explain(block, sizes, layout=layout)


# --- With the rest of PyTorch -------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_autocast_gives_the_types_and_values_of_the_original(dropout: float) -> None:
    fused, original = pair(Net(dropout).eval())
    x = image()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result, wanted = fused(x), original(x)
    assert result.dtype == wanted.dtype
    torch.testing.assert_close(result, wanted, rtol=0.05, atol=0.05)
    assert len([entry for entry in report(fused).fused if entry.plan]) == 2


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_compile_without_graph_breaks(training: bool, gradients: bool) -> None:
    torch._dynamo.reset()
    fused, original = pair(Net().train(training))
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    if gradients:
        assert_same(compiled, original, image())
        return
    with torch.no_grad():
        x = image()
        torch.testing.assert_close(compiled(x), original(x), rtol=1e-4, atol=1e-5)


def test_export_holds_the_blocks() -> None:
    fused, original = pair(Net().eval())
    x = image()
    program = torch.export.export(fused, (x,))
    assert "onepass.forward" in program.graph_module.code
    torch.testing.assert_close(program.module()(x), original(x), rtol=1e-4, atol=1e-5)


def test_onnx_gets_pytorchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.onnx._internal.exporter._flags._is_onnx_exporting", True)
    fused, original = pair(Net().eval())
    x = image()
    program = torch.export.export(fused, (x,))
    assert "onepass" not in program.graph_module.code
    torch.testing.assert_close(program.module()(x), original(x), rtol=1e-4, atol=1e-5)


def test_activation_checkpointing_around_a_fused_module() -> None:
    fused, original = pair(Net())

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    assert_same(Checkpointed(fused), original, image())


def _train_step(rank: int, port: int, path: str) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    fused, original = pair(Net())
    torch.manual_seed(10 + rank)
    x = image()
    gradients = []
    for model in (fused, original):
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel(x).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert len(blocks(fused)) == 2
    torch.save(gradients, f"{path}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_data_parallel_gradients_agree(tmp_path: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_train_step, (port, str(tmp_path)), nprocs=2)
    (fused, original), (fused_other, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for some, other, wanted in zip(fused, fused_other, original, strict=True):
        torch.testing.assert_close(some, other)
        torch.testing.assert_close(some, wanted, rtol=1e-3, atol=1e-5)


_LOADS = """
import pickle
import sys

import torch

sys.modules["onepass"] = sys.modules["onepass_unfuse_before_saving"] = None  # as where it is not installed
pickled, result, saved = sys.argv[1:]
with open(pickled, "rb") as file:
    models = [pickle.load(file), torch.load(saved, weights_only=False)]
for model in models:
    assert torch.equal(model(torch.ones(1, 2, 3, 3)), torch.load(result))
"""


@pytest.mark.parametrize("unfused", [True, False])
def test_a_model_pickled_after_unfuse_loads_without_onepass(tmp_path: pathlib.Path, unfused: bool) -> None:
    model = fuse(nn.Sequential(nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4), nn.ReLU()))
    if unfused:
        model = unfuse(model)
    paths = [tmp_path / name for name in ("pickled", "result", "saved")]
    paths[0].write_bytes(pickle.dumps(model))
    torch.save(model(torch.ones(1, 2, 3, 3)), paths[1])
    torch.save(model, paths[2])
    command = [sys.executable, "-c", _LOADS, *map(str, paths)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode == 0) is unfused, result.stderr
    assert unfused or "onepass_unfuse_before_saving" in result.stderr
    assert "onepass.unfuse" in fuse.__doc__


class _InPlace(nn.Module):
    """An addition or a product in place, whose result has the type of what is written."""

    def __init__(self, norm: nn.Module, how: str) -> None:
        super().__init__()
        self.conv, self.norm, self.how = nn.Conv2d(8, 8, 3, padding=1), norm, how

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        if self.how == "out += x":
            out += x
        elif self.how == "out *= gate":
            out *= x[:, :, :1, :1]
        elif self.how == "out.add_(x)":
            out.add_(x)
        elif self.how == "short += out":
            short = x.bfloat16() * 1
            short += out.float()
            out = short
        else:
            out = out + x
        return torch.relu(out)


@pytest.mark.parametrize("how", ["out += x", "out *= gate", "out.add_(x)", "short += out", "out + x"])
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d, nn.InstanceNorm2d, lambda channels: nn.GroupNorm(2, channels)]
)
def test_operations_in_place_keep_the_type_of_what_is_written(norm: Any, how: str) -> None:
    model = _InPlace(norm(8), how).eval()
    fused = fuse(copy.deepcopy(model))
    x = torch.randn(2, 8, 9, 9)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, found = model(x), fused(x)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=4e-2, atol=4e-2)
