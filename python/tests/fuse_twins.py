"""A fused model and its eager twin: the same calls and edits for both, and what must be equal after them."""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
import sys
import textwrap
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch
from fuse_snippets import load
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from onepass import FallbackWarning, fuse, report

Edit = str | Callable[[nn.Module], Any]

_OWN = frozenset(vars(nn.Module()))  # what every module has
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def seed_all(seed: int) -> None:
    """Seeds every global generator."""
    torch.default_generator.manual_seed(seed)  # manual_seed walks the stack for each device that there is not
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))


def bfloat16() -> torch.autocast:
    """The context of a call in mixed precision."""
    return torch.autocast("cpu", dtype=torch.bfloat16)


def random_states() -> dict[str, Any]:
    """What the global generators hold."""
    _, key, *rest = numpy.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "python": hash(random.getstate()),
        "numpy": hash((key.tobytes(), *rest)),
    }


# --- What is compared ---------------------------------------------------------------------------------------


def snapshot(value: Any, depth: int = 6) -> Any:
    """A value as plain containers, numbers and tensors that later calls do not change."""
    assert not issubclass(type(value), fx.Proxy), "a proxy of the trace is left in a container of the user's"
    if isinstance(value, Tensor):
        return {"tensor": value.detach().clone(), "requires_grad": value.requires_grad}
    if isinstance(value, _PLAIN):
        return value
    if depth == 0:
        return type(value).__name__
    if isinstance(value, dict):
        return {_key(key): snapshot(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple, collections.deque)):
        return [snapshot(inner, depth - 1) for inner in value]
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    if isinstance(value, numpy.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, (set, frozenset, itertools.count)):
        return repr(value)
    if isinstance(value, (nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)):
        return type(value).__name__ if isinstance(value, nn.Module) else "code"
    return {type(value).__name__: snapshot(getattr(value, "__dict__", ()), depth - 1)}


def _key(key: Any) -> Any:
    return key if isinstance(key, (str, int)) else str(key)


def stores(model: nn.Module) -> dict[str, Any]:
    """What calls may have stored: weights, buffers, attributes of modules and classes, and globals."""
    found: dict[str, Any] = {"state_dict": snapshot(dict(model.state_dict()))}
    for name, module in model.named_modules():
        own = {k: v for k, v in vars(module).items() if k not in _OWN and not k.startswith("_onepass")}
        found[f"attributes of {name!r}"] = snapshot(own)
        found[f"children of {name!r}"] = [key for key, child in module._modules.items() if child is not None]
        file = sys.modules.get(type(module).__module__)
        if file is not None and file.__name__.startswith("onepass_user_"):
            found["globals"] = snapshot({key: value for key, value in vars(file).items() if key.isupper()})
            cls = type(module)
            names = {key for base in cls.__mro__ for key, v in vars(base).items() if _is_stored(key, v)}
            found[f"class of {name!r}"] = {key: snapshot(getattr(cls, key)) for key in sorted(names)}
    return found


def _is_stored(name: str, value: Any) -> bool:
    """Whether an attribute of a class may be something that a forward stores."""
    return not name.startswith(("__", "_onepass")) and isinstance(value, (bool, int, float, list, Tensor))


def alike(found: Any, wanted: Any, rtol: float = 1e-4, atol: float = 1e-5, path: str = "") -> None:
    """Raises AssertionError that names the first place where two snapshots differ."""
    if isinstance(wanted, Tensor) and isinstance(found, Tensor):
        exact = rtol == atol == 0 or not wanted.is_floating_point()
        tolerances = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": rtol, "atol": atol}
        try:
            torch.testing.assert_close(found, wanted, equal_nan=True, **tolerances)
        except AssertionError as error:
            raise AssertionError(f"{path}: {error}") from None
    elif isinstance(wanted, dict) and isinstance(found, dict):
        assert list(found) == list(wanted), f"{path}: keys are {list(found)}, eager has {list(wanted)}"
        for key in wanted:
            alike(found[key], wanted[key], rtol, atol, f"{path}[{key!r}]")
    elif isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)):
        assert len(found) == len(wanted), f"{path}: {len(found)} entries, eager has {len(wanted)}"
        for i, (some, other) in enumerate(zip(found, wanted, strict=True)):
            alike(some, other, rtol, atol, f"{path}[{i}]")
    elif isinstance(wanted, float) and isinstance(found, float):
        close = abs(found - wanted) <= atol + rtol * abs(wanted) or found == wanted
        assert close or (found != found and wanted != wanted), f"{path}: {found}, eager has {wanted}"
    else:
        assert type(found) is type(wanted) and found == wanted, f"{path}: {found!r}, eager has {wanted!r}"


def differs(some: Any, other: Any) -> bool:
    """Whether two snapshots are not alike."""
    try:
        alike(some, other)
    except AssertionError:
        return True
    return False


# --- Calls --------------------------------------------------------------------------------------------------


def _weights(like: Tensor) -> Tensor:
    """Other than the output itself: the gradient through a norm would vanish."""
    return torch.sin(torch.arange(like.numel(), dtype=torch.float32)).reshape(like.shape)


def _gradients(result: Any, leaves: dict[str, Tensor]) -> dict[str, Any]:
    outputs = [
        tensor
        for tensor in tree_leaves(result)
        if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.device.type == "cpu"
    ]
    if outputs:
        sum((tensor.float() * _weights(tensor)).sum() for tensor in outputs).backward()
    return {name: None if leaf.grad is None else leaf.grad.detach().clone() for name, leaf in leaves.items()}


def outcome(model: nn.Module, args: Any, kwargs: Any, context: Any, seed: int, leaf: bool) -> dict[str, Any]:
    """Calls the model and runs the backward pass: output, gradients, what was stored, the error's class."""

    def given(value: Any) -> Any:
        return value.clone().requires_grad_(leaf) if _floating(value) else value

    taken = tree_map(given, (args, kwargs))
    inputs = {f"input {i}": tensor for i, tensor in enumerate(tree_leaves(taken)) if _floating(tensor)}
    model.zero_grad(set_to_none=True)
    seed_all(seed)
    found: dict[str, Any] = {"error": None}
    try:
        with context():
            passed, named = tree_map(lambda v: v * 1 if _floating(v) else v, taken)
            result = model(*passed, **named)
        found["output"] = snapshot(result)
        found["inputs"] = snapshot(tree_leaves((passed, named)))
        leaves = {name: p for name, p in model.named_parameters() if p.is_leaf}
        found["gradients"] = _gradients(result, inputs | leaves)
    except Exception as error:
        found["error"] = type(error).__name__
        found["message"] = str(error)
    found["stores"] = stores(model)
    found["random"] = random_states()
    return found


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


Tolerance = tuple[float, float]  # relative, absolute


def _compare(found: dict[str, Any], wanted: dict[str, Any], near: Tolerance, stored: Tolerance) -> None:
    if "modified by an inplace operation" in wanted.get("message", ""):
        return  # in the backward pass: a fused chain has no intermediate that a write in place could spoil
    assert found["error"] == wanted["error"], (
        f"fused raises {found['error']}: {found.get('message')}; "
        f"eager {wanted['error']}: {wanted.get('message')}"
    )
    for part in ("output", "inputs"):
        alike(found.get(part), wanted.get(part), *near, part)
    alike(found["stores"], wanted["stores"], *stored, "stores")
    gradients = wanted.get("gradients", {})
    finite = [g[g.isfinite()].abs().max().item() for g in gradients.values() if _has_finite(g)]
    scale = max(finite, default=0.0)
    alike(found.get("gradients", {}), gradients, 10 * near[0], 10 * near[1] * scale + 1e-7, "gradients")
    alike(found["random"], wanted["random"], 0, 0, "random states")


def _has_finite(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.isfinite().any())


class Twins:
    """Two models built alike, one of them fused; both get every call and every edit."""

    def __init__(self, make: Callable[[], nn.Module], other: Callable[[], nn.Module] | None = None) -> None:
        self.eager, self.fused = self._built(make), self._built(other or make)
        self.seed = 0
        self.heard: list[str] = []
        self.stored: Tolerance = (0.0, 0.0)  # of what calls so far have stored
        self.fuse()

    def fuse(self, **options: Any) -> None:
        """Fuses the fused one, anew where it was; that changes nothing that it holds."""
        before = {"stores": stores(self.fused), "random": random_states()}
        self.heard.clear()
        self._listening(lambda: fuse(self.fused, **options))
        alike({"stores": stores(self.fused), "random": random_states()}, before, 0, 0, "fuse changed")

    @classmethod
    def of(cls, source: str, name: str = "Model", **how: Any) -> Twins:
        """From a user's file, loaded once for each so that each has globals and classes of its own."""
        return cls(getattr(load(source), name), getattr(load(source), name), **how)

    @staticmethod
    def _built(make: Callable[[], nn.Module]) -> nn.Module:
        seed_all(0)
        return make()

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        """The eager one first."""
        return self.eager, self.fused

    def edit(self, edit: Edit, path: str | None = None) -> None:
        """Runs an edit on both: a function of the model, or statements on `self` and its file `user`.

        `self` is the module at the path; without one the model or, of a Parent, its inner one.
        """
        for model in self.both:
            self._edit(model, edit, path)

    def attempt(self, edit: Edit, path: str | None = None) -> None:
        """As `edit`, where the edit may fail: for both with the same class of error."""
        errors = []
        for model in self.both:
            try:
                self._edit(model, edit, path)
                errors.append("nothing")
            except Exception as error:
                errors.append(type(error).__name__)
        assert errors[0] == errors[1], f"the edit raises {errors[1]}, of eager {errors[0]}"

    @staticmethod
    def _edit(model: nn.Module, edit: Edit, path: str | None) -> None:
        if path is None:
            path = "inner" if type(model).__name__ == "Parent" else ""
        inner = model.get_submodule(path)
        seed_all(1)
        if isinstance(edit, str):
            user = sys.modules[type(model).__module__]
            exec(
                textwrap.dedent(edit), {"self": inner, "user": user, "nn": nn, "torch": torch, "types": types}
            )
        else:
            edit(inner)

    def replace(self, duplicate: Callable[[nn.Module], nn.Module]) -> None:
        """Goes on with copies of both; where the eager one cannot be copied, neither can the fused one."""
        copies: list[Any] = []
        for model in self.both:
            try:
                copies.append(duplicate(model))
            except Exception as error:
                copies.append(type(error).__name__)
        eager, fused = copies
        if isinstance(eager, str) or isinstance(fused, str):
            assert eager == fused, f"the copy is {fused}, of eager {eager}"
            return
        self.eager, self.fused = copies
        self.heard.clear()  # a copy starts anew

    def same(
        self,
        *args: Any,
        context: Any = contextlib.nullcontext,
        leaf: bool = True,
        near: Tolerance = (1e-4, 1e-5),
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Calls both, asserts that nothing tells them apart, and returns what the eager one did."""
        self.seed += 1
        wanted = outcome(self.eager, args, kwargs, context, self.seed, leaf)
        found = self._listening(lambda: outcome(self.fused, args, kwargs, context, self.seed, leaf))
        self.stored = max(self.stored, near)
        _compare(found, wanted, near, self.stored)
        if context is bfloat16:
            self._copy_state()
        unsaid = [
            f.reason for f in report(self.fused).fallbacks if not any(f.reason in s for s in self.heard)
        ]
        assert not unsaid, f"left the fused path without a warning: {unsaid}"
        return wanted

    @torch.no_grad()
    def _copy_state(self) -> None:
        """What was stored in low precision would let later calls differ."""
        for wanted, found in zip(self.eager.buffers(), self.fused.buffers(), strict=True):
            found.copy_(wanted)

    def _listening(self, call: Callable[[], Any]) -> Any:
        """Keeps the fallback warnings of a call, each of which may come once."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = call()
        said = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
        self.heard += said
        again = [text for text, count in collections.Counter(self.heard).items() if count > 1]
        assert not again, f"said more than once: {again}"
        return result

    @property
    def left(self) -> int:
        """How many calls left the fused path."""
        return sum(entry.calls for entry in report(self.fused).fallbacks)

    def same_on_the_fused_path(self, *args: Any, **kwargs: Any) -> None:
        """As `same`, and the call does not leave the fused path."""
        before = self.left
        self.same(*args, **kwargs)
        assert self.left == before, str(report(self.fused))
