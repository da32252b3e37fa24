"""Shadows: stand-ins of a model's modules on which a forward is traced.

A shadow has the methods of its module's class and a copy of its attributes. A traced forward therefore
changes nothing of the model, and calls of modules reach the tracer without any patch of PyTorch. Everything
that is read is noted as a fact, which later calls check again.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from onepass import _facts
from onepass._facts import Fact, Outside
from onepass._own_code import is_own_code, unseen
from onepass._refused import Refused
from onepass._values import MISSING, is_pure, refuse_generators, same
from onepass._watch import Watch

_MEMBERS = ("_parameters", "_buffers", "_modules")
_KEY = "_onepass_shadow"
_CONTAINERS = (list, dict, set, collections.deque, bytearray)


class Tracer(Protocol):
    """What shadows need of the tracer."""

    def call(self, shadow: Shadow, args: Any, kwargs: Any) -> Any:
        """What the call of a module gives."""

    def tensor(self, tensor: Tensor) -> Any:
        """What stands for a parameter or buffer."""

    def close(self) -> None:
        """Lets go of the model."""


def class_of(module: nn.Module) -> type:
    """The module's class; of a fused module, the class it was before."""
    return getattr(type(module), "_onepass_original", None) or type(module)


def user_classes(cls: type) -> list[type]:
    """The class and its bases that are not PyTorch's."""
    return [
        base for base in cls.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins", "abc")
    ]


class Shadow:
    """What a shadow knows of itself."""

    __slots__ = ("cls", "copies", "facts", "module", "object", "path", "recorder", "values")

    def __init__(self, module: nn.Module, path: str, recorder: Recorder) -> None:
        self.module = module
        self.cls = class_of(module)
        self.path = path
        self.recorder = recorder
        self.facts: dict[Fact, None] = {}
        self.copies: dict[str, tuple[Any, Any]] = {}  # by attribute: what the forward sees, and another copy
        self.object = object.__new__(_shadow_class(self.cls))
        values = dict(vars(module))
        values.pop("_onepass", None)
        values["training"] = recorder.training
        for name in _MEMBERS:
            if name in values:
                values[name] = _Members(values[name], name, self)
        values[_KEY] = self
        self.values = values
        object.__setattr__(self.object, "__dict__", values)

    def note(self, fact: Fact) -> None:
        """Keeps a fact of this module."""
        if fact not in self.facts:
            self.facts[fact] = None
            self.recorder.journal.append((self, fact))

    @unseen
    def own(self, name: str, value: Any) -> Any:
        """An attribute of the object: containers are copied, so that what the forward changes is seen."""
        strict = bool(user_classes(self.cls))
        kept = vars(self.module).get(name)
        self.note(_facts.of_value(self.path, name, kept, self.recorder.watch, strict=strict))
        refuse_generators(value, name)
        if isinstance(value, types.MethodType) and value.__self__ is self.module:
            return types.MethodType(value.__func__, self.object)
        if not isinstance(value, (*_CONTAINERS, tuple)) or name in self.copies:
            return value
        value, pristine = (self.recorder.copied(value) for _ in range(2))
        self.copies[name] = (value, pristine)
        self.values[name] = value
        return value

    def changed(self) -> str | None:
        """An attribute that the traced code changed."""
        before = {**vars(self.module), _KEY: None}
        before.pop("_onepass", None)
        for name in self.values.keys() ^ before.keys():
            return name
        for name, (value, pristine) in self.copies.items():
            if self.values[name] is not value or not same(value, pristine):
                return name
        for name, value in self.values.items():
            kept = name in (_KEY, "training", *_MEMBERS) or name in self.copies
            if not kept and value is not before[name]:
                return name
        return None


class Recorder:
    """The shadows of one trace, and what was read of all that are not modules."""

    def __init__(self, root: nn.Module, training: bool, tracer: Tracer) -> None:
        self.training = training
        self.tracer = tracer
        self.tracing = True
        self.shadows: dict[nn.Module, Shadow] = {}
        self.paths: dict[str, Shadow] = {}
        self.watch = Watch()  # what later calls compare
        self.lent = Watch()  # what the traced code may have changed, besides
        self.tensors = {
            id(tensor): (path, kind, name)
            for path, module in root.named_modules()
            for kind in ("_parameters", "_buffers")
            for name, tensor in vars(module)[kind].items()
        }
        self.journal: list[tuple[Shadow, Fact]] = []  # in the order in which they were noted
        self.outside: dict[Outside, None] = {}
        self.classes: dict[type, dict[str, Any]] = {}  # user's classes and what they held
        self.known = {module: path for path, module in reversed(list(root.named_modules()))}
        self.root = self.shadow(root, "")

    def shadow(self, module: nn.Module, path: str) -> Shadow:
        """The shadow of a module that the root reaches by this path."""
        found = self.shadows.get(module)
        if found is None:
            found = self.shadows[module] = Shadow(module, path, self)
            self._lend_classes(found)
        self.paths.setdefault(path, found)
        return found

    def _lend_classes(self, shadow: Shadow) -> None:
        for cls in (type(shadow.object), *user_classes(shadow.cls)):
            if cls not in self.classes:
                self.classes[cls] = dict(vars(cls))
                for name, value in vars(cls).items():
                    if isinstance(value, _CONTAINERS) and not name.startswith("__"):
                        self.lent.object(value)

    def _restored_class(self) -> str | None:
        """Gives user's classes back what they held; names a class that had changed."""
        changed = None
        for cls, before in self.classes.items():
            for name in vars(cls).keys() | before.keys():
                if vars(cls).get(name) is before.get(name) or name.startswith("__"):
                    continue
                changed = cls.__name__
                if name in before:
                    setattr(cls, name, before[name])
                else:
                    delattr(cls, name)
        return changed

    def at(self, path: str) -> Shadow:
        """The shadow at a path."""
        if path not in self.paths:
            parent, _, name = path.rpartition(".")
            members = self.at(parent).module._modules
            self.shadow(members[name], path)
        return self.paths[path]

    def note_outside(self, space: Any, name: str, value: Any) -> None:
        """Keeps the value of a name of a file, a class or a Python module that traced code used."""
        fact = Outside.of(space, name, value)
        if fact in self.outside or isinstance(value, (Tensor, nn.Module)):
            return
        refuse_generators(value, name)
        if isinstance(value, _CONTAINERS) and is_pure(value):
            self.lent.object(value)
            fact = Outside.of(space, name, copy.deepcopy(value))
        elif not is_pure(value) and not hasattr(type(value), "__get__"):
            self.watch.object(value)
        self.outside[fact] = None

    def tensor_property(self, tensor: Tensor, name: str) -> None:
        """Python code uses a property of a tensor: noted if it is one of the modules'."""
        if id(tensor) in self.tensors:
            path, kind, member = self.tensors[id(tensor)]
            self.at(path).note(_facts.Property(path, kind, member, name, getattr(tensor, name)))

    def copied(self, value: Any) -> Any:
        """A copy of a container, and of those in it; modules become shadows."""
        if isinstance(value, nn.Module):
            return self.shadow(value, self.known[value]).object if value in self.known else value
        if type(value) in (list, set, collections.deque):
            return type(value)(map(self.copied, value))
        if type(value) is tuple:
            return tuple(map(self.copied, value))
        if isinstance(value, dict):
            twin = copy.copy(value)
            for key in twin:
                dict.__setitem__(twin, key, self.copied(value[key]))
            return twin
        return copy.copy(value) if isinstance(value, _CONTAINERS) else value

    def forget_after(self, mark: int) -> None:
        """Drops the facts noted since the journal was this long."""
        for shadow, fact in self.journal[mark:]:
            del shadow.facts[fact]
        del self.journal[mark:]

    def close(self) -> None:
        """Lets go of the model: references in circles would keep its memory until the next collection."""
        self.tracer.close()
        self.tracer = None
        for shadow in self.shadows.values():
            shadow.values.clear()
            shadow.object = shadow.recorder = None
        for kept in (self.shadows, self.paths, self.known, self.journal, self.classes):
            kept.clear()

    def why_changed(self) -> str | None:
        """What the traced code changed outside the graph; objects that are not modules are put back."""
        changed = [self._restored_class(), self.watch.restore(), self.lent.restore()]
        restored = next(filter(None, changed), None)
        names = [name for shadow in self.shadows.values() if (name := shadow.changed())]
        if names:
            return f"its forward sets the attribute {min(names)}"
        return f"its forward changes {restored}" if restored else None


class _Members(dict):
    """A module's parameters, buffers or modules: notes which are read, and gives their stand-ins."""

    def __init__(self, members: dict[str, Any], kind: str, owner: Shadow) -> None:
        super().__init__(members)
        self.kind = kind
        self.owner = owner

    @unseen
    def _stand_in(self, name: str) -> Any:
        owner, member = self.owner, super().__getitem__(name)
        if self.kind != "_modules":
            owner.note(_facts.Member(owner.path, self.kind, name, member is not None))
            tracing = owner.recorder.tracing and isinstance(member, Tensor)
            return owner.recorder.tracer.tensor(member) if tracing else member
        if member is None:
            owner.note(_facts.Child(owner.path, name, False, ""))
            return None
        path = f"{owner.path}.{name}" if owner.path else name
        shadow = owner.recorder.shadow(member, path)
        owner.note(_facts.Child(owner.path, name, True, shadow.path))
        return shadow.object

    def _all(self) -> list[tuple[str, Any]]:
        self.owner.note(_facts.Names(self.owner.path, self.kind, tuple(super().keys())))
        if self.kind == "_modules":
            return [(name, self._stand_in(name)) for name in dict.keys(self)]
        return list(super().items())

    def __getitem__(self, name: str) -> Any:
        return self._stand_in(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self._stand_in(name) if name in self else default

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, _ in self._all()])

    def __reversed__(self) -> Iterator[str]:
        return reversed([name for name, _ in self._all()])

    def __len__(self) -> int:
        self.owner.note(_facts.Names(self.owner.path, self.kind, tuple(super().keys())))
        return super().__len__()

    def keys(self) -> Any:
        return [name for name, _ in self._all()]

    def values(self) -> Any:
        return [member for _, member in self._all()]

    def items(self) -> Any:
        return self._all()

    def _refuse(self, name: Any = "", *_: Any, **__: Any) -> Any:
        raise Refused(f"its forward sets the attribute {name}")

    __setitem__ = __delitem__ = __ior__ = pop = popitem = update = setdefault = clear = _refuse


class ShadowObject:
    """What all shadows do, whatever their modules' classes."""

    def __getattribute__(self, name: str) -> Any:
        values = object.__getattribute__(self, "__dict__")
        shadow: Shadow | None = values.get(_KEY)
        if shadow is None:
            return object.__getattribute__(self, name)
        if name == "__class__":
            return shadow.cls
        if name == "__dict__":
            if not is_own_code(sys._getframe(1).f_code):
                raise Refused("its forward reads __dict__ of a module")
            return values
        if name.startswith("__") or name in _facts.HOOKS or name in _MEMBERS:
            return object.__getattribute__(self, name)
        if name == "training":
            shadow.note(_facts.Mode(shadow.path))
            return values["training"]
        if _is_own(shadow, name):
            return shadow.own(name, values[name])
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        shadow: Shadow | None = object.__getattribute__(self, "__dict__").get(_KEY)
        try:
            if shadow is None:
                raise AttributeError(name)
            return shadow.cls.__getattr__(self, name)  # type: ignore[attr-defined]
        except AttributeError:
            if shadow is not None:
                shadow.note(_facts.Absent(shadow.path, name))
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        raise Refused(f"its forward sets the attribute {name}")

    def __delattr__(self, name: str) -> None:
        raise Refused(f"its forward deletes the attribute {name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shadow = shadow_of(self)
        return shadow.recorder.tracer.call(shadow, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Refused("its forward copies a module")


@unseen
def _is_own(shadow: Shadow, name: str) -> bool:
    """Whether an attribute is the object's own; what its class has is noted."""
    on_class = _static(shadow.cls, name)
    if on_class is MISSING:
        return name in shadow.values
    has_setter = hasattr(type(on_class), "__set__")
    if name in shadow.values and not has_setter:
        return True
    if has_setter:
        _note_method(shadow, name)
    elif hasattr(type(on_class), "__get__"):
        shadow.note(_facts.NotOwn(shadow.path, name))
        _note_method(shadow, name)
    else:
        shadow.note(_facts.of_value(shadow.path, name, on_class, shadow.recorder.watch, own=False))
    return False


def _note_method(shadow: Shadow, name: str) -> None:
    """A method or property that is looked up must stay what its class has."""
    for base in user_classes(shadow.cls):
        if name in vars(base):
            shadow.recorder.note_outside(base, name, vars(base)[name])
            return


def shadow_of(value: Any) -> Shadow:
    """Of a shadow's object."""
    return object.__getattribute__(value, "__dict__")[_KEY]


def is_shadow(value: Any) -> bool:
    """Whether a module is a shadow."""
    return issubclass(type(value), ShadowObject)


def _static(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return MISSING


# What a class of shadows does not take over from the class of the module.
_LEFT_OUT = {
    "__abstractmethods__", "__call__", "__class__", "__class_getitem__", "__del__", "__delattr__", "__dict__",
    "__doc__", "__getattr__", "__getattribute__", "__init__", "__init_subclass__", "__new__", "__reduce__",
    "__reduce_ex__", "__setattr__", "__slots__", "__weakref__", "_abc_impl",
}  # fmt: skip


class _Classes(threading.local):
    """The classes of shadows while one model is fused: later the user's classes may have changed."""

    made: dict[type, type] | None = None


_classes = _Classes()


@contextlib.contextmanager
def shared_classes() -> Iterator[None]:
    """Traces inside share the classes of their shadows."""
    before, _classes.made = _classes.made, {}
    try:
        yield
    finally:
        _classes.made = before


def _shadow_class(cls: type) -> type:
    """A class with all that the class and its bases define. Not a subclass: registries would see it."""
    made = {} if _classes.made is None else _classes.made
    if cls not in made:
        body = {name: value for base in reversed(cls.__mro__[:-1]) for name, value in vars(base).items()}
        body = {name: value for name, value in body.items() if name not in _LEFT_OUT}
        named = {name: body.pop(name) for name in list(body) if hasattr(type(body[name]), "__set_name__")}
        made[cls] = type(cls.__name__, (ShadowObject,), body)
        for name, value in named.items():
            setattr(made[cls], name, value)
    return made[cls]
