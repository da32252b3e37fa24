"""Objects that a traced forward read and that are no modules: later calls compare what they hold."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import types
from typing import Any

from torch import Tensor, nn

from onepass._values import BY_IDENTITY, MISSING, MOST_VALUES, PURE, is_pure, same


@dataclasses.dataclass
class _Seen:
    """An object, and a copy of what it held."""

    object: Any
    held: Any

    def holds(self) -> bool:
        return same(_content(self.object), self.held)


@dataclasses.dataclass
class _Place:
    """An attribute that holds an object."""

    path: str
    name: str
    object: Any


class Watch:
    """Objects that a traced forward used and that are no modules: each with what it holds."""

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.seen: list[_Seen] = []

    def __bool__(self) -> bool:
        return bool(self.seen)

    def attribute(self, path: str, name: str, value: Any) -> None:
        """Watches an object that an attribute holds."""
        self.places.append(_Place(path, name, value))
        self.object(value)

    def function(self, function: types.FunctionType) -> None:
        """Watches what a function took from where it was defined."""
        for cell in function.__closure__ or ():
            self.object(cell)

    def object(self, value: Any, depth: int = 0) -> None:
        """Watches an object and those it holds."""
        if any(seen.object is value for seen in self.seen) or depth > 4 or len(self.seen) > 100:
            return
        content = _content(value)
        if content is None or len(content) > MOST_VALUES:
            return
        self.seen.append(_Seen(value, _kept(content)))
        for item in content.values() if isinstance(content, dict) else content:
            if not is_pure(item) and not isinstance(item, (Tensor, nn.Module)):
                self.object(item, depth + 1)

    def holds(self, root: nn.Module) -> bool:
        """Whether all are where they were and hold what they held."""
        for place in self.places:
            module = root
            for name in place.path.split(".") if place.path else ():
                module = module._modules[name]
            if getattr(module, place.name, MISSING) is not place.object:
                return False
        return all(seen.holds() for seen in self.seen)

    def why(self, root: nn.Module) -> str | None:
        """Which one changed."""
        for place in self.places:
            if getattr(root.get_submodule(place.path), place.name, MISSING) is not place.object:
                return f"its attribute {place.name} was changed after fusing"
        for seen in self.seen:
            if not seen.holds():
                place = next((p.name for p in self.places if p.object is seen.object), None)
                what = f"its attribute {place}" if place else f"a {type(seen.object).__name__} that it reads"
                return f"{what} was changed after fusing"
        return None

    def restore(self) -> str | None:
        """Gives changed objects their content back; names one."""
        changed = [seen for seen in self.seen if not seen.holds()]
        for seen in changed:
            _put_back(seen.object, seen.held)
        return f"a {type(changed[0].object).__name__}" if changed else None


def _content(value: Any) -> Any:
    """What an object holds, as a container of its own."""
    if isinstance(value, types.CellType):
        try:
            return [value.cell_contents]
        except ValueError:
            return []
    if isinstance(value, (list, tuple, dict, set, frozenset, collections.deque)):
        return value
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, (*BY_IDENTITY, Tensor, nn.Module, *PURE)):
        return None
    values = getattr(value, "__dict__", None)
    slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
    if slots:
        return {**(values or {}), **{name: getattr(value, name) for name in slots}}
    return values


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _kept(value: Any) -> Any:
    """A copy of a container and of those in it that are compared by value."""
    if isinstance(value, dict):
        twin = copy.copy(value) if type(value) in (dict, collections.OrderedDict) else dict(value)
        for key, item in value.items():
            twin[key] = copy.deepcopy(item) if is_pure(item) and not callable(item) else item
        return twin if type(twin) is type(value) else _as(value, twin)
    return copy.copy(value)


def _as(value: Any, twin: dict[Any, Any]) -> Any:
    try:
        return copy.copy(value)
    except Exception:
        return twin


def _put_back(value: Any, held: Any) -> None:
    if isinstance(value, (list, bytearray)):
        value[:] = held
    elif isinstance(value, collections.deque):
        value.clear()
        value.extend(held)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(held)
    elif isinstance(value, types.CellType):
        value.cell_contents = held[0]
    elif isinstance(held, dict):
        for name in {*(_content(value) or {}), *held}:
            if name in held:
                object.__setattr__(value, name, held[name])
            else:
                object.__delattr__(value, name)
