"""Replicas as torch.nn.DataParallel makes them for each call: they run the fused code of their module."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_support import replica_of
from torch import Tensor, nn

from onepass import FallbackWarning, fuse, report


def simple() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())


def without_parameters() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.InstanceNorm2d(4), nn.ReLU())


class Scaled(nn.Module):
    """Has a parameter of its own, reads a property of it, and runs a child twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.inner = simple()
        self.again = self.inner
        self.norm = nn.GroupNorm(1, 4)
        self.scale = nn.Parameter(torch.rand(4, 1, 1) + 1)
        self.register_buffer("shift", torch.rand(4, 1, 1))
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x))) * self.scale
        if self.scale.shape[0] == 4 and self.nothing is None:
            y = y + self.shift
        return self.inner(x) + self.again(x) + y


MODELS = {"simple": simple, "without parameters": without_parameters, "scaled": Scaled}


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A fused model and its eager twin."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    return fuse(models[0]), models[1]


def image() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, 6, 6)


def same_as_replicas(
    fused: nn.Module, eager: nn.Module, edit: Callable[[nn.Module], Any] = lambda m: None
) -> None:
    """Both models' replicas give the same outputs, and the models the same gradients."""
    results = []
    for model in (fused, eager):
        model.zero_grad(set_to_none=True)
        replicas = [replica_of(model) for _ in range(2)]
        for twin in replicas:
            edit(twin)
        outputs = [twin(image()) for twin in replicas]
        sum(y.square().sum() * (i + 1) for i, y in enumerate(outputs)).backward()
        results.append([*outputs, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


def left(model: nn.Module) -> int:
    return sum(fallback.calls for fallback in report(model).fallbacks)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("called", [False, True])
def test_replicas_stay_on_the_fused_path(name: str, training: bool, called: bool) -> None:
    fused, eager = (model.train(training) for model in pair(MODELS[name]))
    if called:
        fused(image())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for _ in range(6):  # more often than a module is traced again
            same_as_replicas(fused, eager)
    assert not report(fused).fallbacks
    assert all(entry.plan for entry in report(fused).fused), str(report(fused))
    with torch.no_grad():
        torch.testing.assert_close(replica_of(fused)(image()), eager(image()), rtol=1e-4, atol=1e-5)
    assert not report(fused).fallbacks
    torch.testing.assert_close(fused(image()), eager(image()), rtol=1e-4, atol=1e-5)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "an attribute": lambda m: setattr(m[1], "eps", 0.5),
    "another child": lambda m: m.__setitem__(2, nn.ReLU()),
    "one child more": lambda m: m.append(nn.Tanh()),
    "no bias": lambda m: setattr(m[0], "bias", None),
    "a class": lambda m: setattr(m[2], "__class__", nn.Mish),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("before", [0, 1])
def test_a_changed_model_is_traced_again_for_its_replicas(how: str, before: int) -> None:
    fused, eager = pair(simple)
    for _ in range(before):
        same_as_replicas(fused, eager)
    for model in (fused, eager):
        CHANGES[how](model)
    with pytest.warns(FallbackWarning, match="traced again"):
        same_as_replicas(fused, eager)
    lost = left(fused)
    for _ in range(3):
        same_as_replicas(fused, eager)
    assert left(fused) == lost, str(report(fused))


REPLICA_CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "an attribute": lambda m: setattr(m[1], "eps", 0.5),
    "a child": lambda m: setattr(m, "2", nn.ReLU()),
    "a hook": lambda m: m[1].__dict__.update(_forward_hooks={0: lambda module, args, output: 2 * output}),
    "a type": lambda m: setattr(m[0], "weight", m[0].weight.as_subclass(Marked)),
    "no tensor": lambda m: m[0].__dict__.__setitem__("bias", None),
}


class Marked(Tensor):
    """A type that no kernel knows."""


@pytest.mark.parametrize("how", REPLICA_CHANGES)
@pytest.mark.parametrize("before", [0, 1])
def test_a_changed_replica_runs_the_original(how: str, before: int) -> None:
    fused, eager = pair(simple)
    for _ in range(before):
        same_as_replicas(fused, eager)
    with pytest.warns(FallbackWarning):
        same_as_replicas(fused, eager, REPLICA_CHANGES[how])
    lost = left(fused)
    assert lost
    same_as_replicas(fused, eager)
    torch.testing.assert_close(fused(image()), eager(image()), rtol=1e-4, atol=1e-5)
    assert left(fused) == lost, str(report(fused))


def test_a_replica_of_a_class_with_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, eager = pair(Scaled)
    original = Scaled.forward
    monkeypatch.setattr(Scaled, "forward", lambda self, x, times=3: times * original(self, x))
    with pytest.warns(FallbackWarning, match="changed"):
        same_as_replicas(fused, eager)
    same_as_replicas(fused, eager)


@contextlib.contextmanager
def no_warning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield


def test_replicas_of_a_copy() -> None:
    fused, eager = pair(simple)
    same_as_replicas(fused, eager)
    twin = copy.deepcopy(fused)
    with no_warning():
        same_as_replicas(twin, eager)
    for model in (twin, eager):
        model[1].eps = 0.5
    with pytest.warns(FallbackWarning, match="traced again"):
        same_as_replicas(twin, eager)
    with no_warning():
        same_as_replicas(twin, eager)
