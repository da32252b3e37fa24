"""What a traced forward read, as facts that later calls check again before they run the rewritten forward.

A fact gives a condition in Python text, over variables for the modules, and says in words why it no longer
holds. Texts and constants are equal for equal modules, so that these share their compiled code.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import itertools
import pathlib
import random
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onepass._refused import Refused

LIBRARIES = tuple(f"{pathlib.Path(file).parent}/" for file in (__file__, torch.__file__))
STANDARD = tuple(f"{path}/" for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})

_SCALARS = (int, float, complex, str, bytes)
_BY_IDENTITY = (
    bool,
    type(None),
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.MethodDescriptorType,
    type(Ellipsis),
    enum.Enum,
    torch.dtype,
    torch.layout,
    torch.memory_format,
)
_PURE = (*_SCALARS, torch.device, torch.Size, slice, range)
_MISSING = object()
_MOST_VALUES = 1000  # of an object's own, that are compared


class Code:
    """Collects conditions: text over `{prefix}...` names, and the constants that these stand for.

    Besides texts, `conditions` has assignments (a name and its value) and comparisons of which several become
    one of tuples, which is twice as fast.
    """

    def __init__(self, prefix: str, root: nn.Module | None) -> None:
        self.prefix = prefix
        self.root = root
        self.conditions: list[str | tuple[str, str] | _Equal] = []
        self.constants: dict[str, Any] = {}
        self.modules = {"": f"{prefix}self"}
        self.members: dict[tuple[str, str], str] = {}

    def constant(self, value: Any) -> str:
        """The name of a constant."""
        key = constant_key(value)
        for name, other in self.constants.items():
            if constant_key(other) == key:
                return name
        name = f"{self.prefix}c{len(self.constants)}"
        self.constants[name] = value
        return name

    def module(self, path: str) -> str:
        """The variable of the module at a path, which must have the class that it has now."""
        if path not in self.modules:
            parent, _, name = path.rpartition(".")
            members = self.member(parent, "_modules")
            variable = f"{self.prefix}m{len(self.modules)}"
            wanted = self.constant(type(self.root.get_submodule(path)))
            self.conditions.append((variable, f"{members}[{name!r}]"))
            self.add(f"{self.builtin(type)}({variable}) is {wanted}")
            self.modules[path] = variable
        return self.modules[path]

    def member(self, path: str, name: str) -> str:
        """The variable of `__dict__`, `_modules`, `_parameters` or `_buffers` of the module at a path."""
        if (path, name) not in self.members:
            module = self.module(path)
            if name == "__dict__":
                variable = f"{module}d"
                self.conditions.append((variable, f"{module}.__dict__"))
            else:
                values = self.member(path, "__dict__")
                variable = f"{module}{name[1]}"
                self.conditions.append((variable, f"{values}[{name!r}]"))
            self.members[path, name] = variable
        return self.members[path, name]

    def builtin(self, function: Any) -> str:
        """The name of a function that no argument of a user's can have."""
        name = f"{self.prefix}{function.__name__}"
        self.constants[name] = function
        return name

    def add(self, condition: str) -> None:
        """One more condition."""
        self.conditions.append(condition)

    def lines(self) -> list[str]:
        """The body of a function that says whether all conditions hold."""
        lines: list[str] = []
        for is_assignment, run in itertools.groupby(self.conditions, lambda c: isinstance(c, tuple)):
            if is_assignment:
                lines += [" = ".join(pair) for pair in run]
            else:
                lines += [f"if not ({' and '.join(_texts(run))}):", "    return False"]
        return [*lines, "return True"]

    def texts(self) -> list[str]:
        """The conditions, of which none is an assignment."""
        return list(_texts(self.conditions))

    def is_value(self, expression: str, value: Any, strict: bool = True) -> None:
        """The expression has this value; `strict`: and its type, for True is 1."""
        if isinstance(value, _BY_IDENTITY) or not is_pure(value):
            self.add(f"{expression} is {_literal(value) or self.constant(value)}")
        elif isinstance(value, float) and (value != value or value == 0):  # nan; zeros have a sign
            self.add(f"{self.builtin(repr)}({expression}) == {repr(value)!r}")
        elif strict and type(value) in (int, float):
            self.add(f"{self.builtin(type)}({expression}) is {self.constant(type(value))}")
            self.add(f"{expression} == {self.constant(value)}")
        else:
            self.conditions.append(_Equal(expression, _literal(value) or self.constant(value)))


@dataclasses.dataclass
class _Equal:
    """An expression that equals another."""

    some: str
    other: str


def _texts(conditions: Iterable[str | _Equal]) -> Iterator[str]:
    given = list(conditions)
    equal = [condition for condition in given if isinstance(condition, _Equal)]
    yield from (condition for condition in given if isinstance(condition, str))
    if len(equal) > 1:
        yield f"({', '.join(e.some for e in equal)}) == ({', '.join(e.other for e in equal)})"
    else:
        yield from (f"{e.some} == {e.other}" for e in equal)


def _literal(value: Any) -> str | None:
    """A value that code may hold itself."""
    plain = (bool, int, str, type(None))
    is_plain = type(value) in plain or (type(value) is tuple and all(type(item) in plain for item in value))
    return repr(value) if is_plain else None


def constant_key(value: Any) -> Any:
    """Equal for constants that may stand for each other in compiled code."""
    if isinstance(value, _BY_IDENTITY) and type(value) is not bool and value is not None:
        return id(value)
    return (type(value), repr(value)) if is_pure(value) else id(value)


def refuse_generators(value: Any, name: str) -> None:
    """An object that each use changes has no value that could be compared."""
    random_numbers = type(value).__module__.startswith("numpy.random") or isinstance(
        value, random.Random | torch.Generator
    )
    if random_numbers:
        raise Refused("its forward draws random numbers that do not depend on its input")
    if isinstance(value, Iterator):
        raise Refused(f"its forward reads the iterator {name}")


def is_pure(value: Any, depth: int = 0) -> bool:
    """Whether a value is compared by value: numbers, text and containers of them."""
    if isinstance(value, _BY_IDENTITY) or type(value) in _PURE:
        return True
    if depth > 8:
        return False
    if type(value) in (list, tuple, set, frozenset, collections.deque):
        return len(value) <= _MOST_VALUES and all(is_pure(item, depth + 1) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return all(is_pure(item, depth + 1) for item in value)
    if type(value) in (dict, collections.OrderedDict):
        return len(value) <= _MOST_VALUES and all(
            is_pure(k, depth + 1) and is_pure(v, depth + 1) for k, v in value.items()
        )
    return False


def same(some: Any, other: Any) -> bool:
    """Whether two containers hold the same, in the same order; what is no container by identity or value."""
    if some is other:
        return True
    if type(some) is not type(other) or isinstance(some, (Tensor, nn.Module)):
        return False
    if isinstance(some, dict):
        return len(some) == len(other) and all(
            same(a, b) and same(dict.__getitem__(some, a), dict.__getitem__(other, b))
            for a, b in zip(dict.keys(some), dict.keys(other))
        )
    if isinstance(some, (list, tuple, collections.deque)):
        return len(some) == len(other) and all(map(same, some, other))
    if isinstance(some, float):
        return repr(some) == repr(other)
    if type(some) in _PURE or isinstance(some, (set, frozenset, bytearray)):
        return bool(some == other)
    return False


# --- Facts of modules ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fact:
    """Of the module at `path`; equal facts are one."""

    path: str

    def condition(self, code: Code) -> None:
        """Adds the text of the condition."""
        raise NotImplementedError

    def why(self, module: nn.Module, root: nn.Module) -> str | None:
        """Why it does not hold for the module at the path."""
        raise NotImplementedError

    def is_change(self, module: nn.Module) -> bool:
        """Whether that is a lasting change, after which tracing again may help."""
        return True


@dataclasses.dataclass(frozen=True)
class Child(Fact):
    """A child that is there, or None. Another one of the same class is compared by its own facts."""

    name: str
    given: bool = dataclasses.field(compare=False)
    alias: str = dataclasses.field(compare=False)  # the path by which its facts are known

    @property
    def full(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    def condition(self, code: Code) -> None:
        if not self.given:
            code.add(f"{code.member(self.path, '_modules')}.get({self.name!r}, {code.prefix}self) is None")
        elif self.alias != self.full:
            first = code.module(self.alias)
            code.add(f"{code.member(self.path, '_modules')}.get({self.name!r}) is {first}")
        else:
            code.module(self.full)

    def why(self, module: nn.Module, root: nn.Module) -> str | None:
        found = module._modules.get(self.name, _MISSING)
        if found is _MISSING or (found is not None) is not self.given:
            return f"its module {self.name} was replaced after fusing"
        if self.given and self.alias != self.full and found is not root.get_submodule(self.alias):
            return f"its module {self.name} was replaced after fusing"
        return None


@dataclasses.dataclass(frozen=True)
class Typed(Fact):
    """The module's class, and nothing beside its forward runs when it is called."""

    type: type = dataclasses.field(compare=False)
    plain: bool  # without hooks and without a forward of its own

    def condition(self, code: Code) -> None:
        values = code.member(self.path, "__dict__")
        if self.plain and self.path:
            code.conditions += [f"not {values}[{name!r}]" for name in HOOKS]
            code.conditions += [f"{name!r} not in {values}" for name in self.methods]

    def is_change(self, module: nn.Module) -> bool:
        return type(module) is not self.type

    @property
    def methods(self) -> tuple[str, ...]:
        return ("forward", "_conv_forward") if hasattr(self.type, "_conv_forward") else ("forward",)

    def why(self, module: nn.Module, root: nn.Module) -> str | None:
        if self.path and type(module) is not self.type:
            return f"its class is now {type(module).__name__}"
        if not self.plain or not self.path:
            return None
        if any(getattr(module, name) for name in HOOKS):
            return f"{A_HOOK}; remove it to run fused"
        own = any(name in vars(module) for name in self.methods)
        return f"{OWN_FORWARD}; delete it to run fused" if own else None


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
A_HOOK = "a hook is on it"
OWN_FORWARD = "its forward is set on the object"


@dataclasses.dataclass(frozen=True)
class Names(Fact):
    """The names of all parameters, buffers or modules, in order."""

    kind: str
    names: tuple[str, ...] = dataclasses.field(compare=False)

    def condition(self, code: Code) -> None:
        code.add(f"(*{code.member(self.path, self.kind)},) == {self.names!r}")

    def why(self, module: nn.Module, root: nn.Module) -> str | None:
        if tuple(vars(module)[self.kind]) == self.names:
            return None
        return f"{self.kind[1:]} were added or removed after fusing"


@dataclasses.dataclass(frozen=True)
class Member(Fact):
    """A parameter or buffer that is there or None. It may be set as a plain tensor, as sharding does."""

    kind: str
    name: str
    given: bool = dataclasses.field(compare=False)

    def condition(self, code: Code) -> None:
        found = f"{code.member(self.path, self.kind)}[{self.name!r}]"
        code.add(f"{found} is {'not ' if self.given else ''}None")

    def why(self, module: nn.Module, root: nn.Module) -> str | None:
        found = vars(module)[self.kind].get(self.name)
        if (found is not None) is self.given:
            return None
        if self.given and isinstance(getattr(module, self.name, None), Tensor):
            return f"its {self.name} is not among its {self.kind[1:]}"
        return f"its {self.name} was {'removed' if self.given else 'added'} after fusing"


@dataclasses.dataclass(frozen=True)
class Value(Fact):
    """An attribute's value, on the object or its class."""

    name: str
    value: Any = dataclasses.field(compare=False)
    own: bool = dataclasses.field(compare=False)
    strict: bool = dataclasses.field(compare=False)

    def condition(self, code: Code) -> None:
        if self.own:
            expression = f"{code.member(self.path, '__dict__')}[{self.name!r}]"
        else:
            expression = f"{code.module(self.path)}.{self.name}"
        code.is_value(expression, self.value, self.strict)

    def why(self, module: nn.Module, root: nn.Module) -> str | None:
        moved = self.own and self.name not in vars(module)  # as an attribute does that becomes a module
        found = _MISSING if moved else getattr(module, self.name, _MISSING)
        return None if same(found, self.value) else f"its attribute {self.name} was changed after fusing"


@dataclasses.dataclass(frozen=True)
class Kind(Fact):
    """An attribute's type: of objects, whose own values a Watch compares."""

    name: str
    type: type = dataclasses.field(compare=False)

    def condition(self, code: Code) -> None:
        found = f"{code.module(self.path)}.{self.name}"
        code.add(f"{code.builtin(type)}({found}) is {code.constant(self.type)}")

    def why(self, module: nn.Module, root: nn.Module) -> str | None:
        found = getattr(module, self.name, None)
        return None if type(found) is self.type else f"its attribute {self.name} was changed after fusing"


@dataclasses.dataclass(frozen=True)
class NotOwn(Fact):
    """A method is the class's: the object has no attribute of this name."""

    name: str

    def condition(self, code: Code) -> None:
        code.add(f"{self.name!r} not in {code.member(self.path, '__dict__')}")

    def why(self, module: nn.Module, root: nn.Module) -> str | None:
        return f"its {self.name} is set on the object" if self.name in vars(module) else None


@dataclasses.dataclass(frozen=True)
class Absent(Fact):
    """There is no attribute of this name."""

    name: str

    def condition(self, code: Code) -> None:
        # A failing hasattr takes 1 us; but torch.compile sees that it is asked.
        module, name = code.module(self.path), repr(self.name)
        members = [code.member(self.path, k) for k in ("__dict__", "_modules", "_parameters", "_buffers")]
        quick = " and ".join(f"{name} not in {values}" for values in members)
        has, kind = code.builtin(hasattr), code.builtin(type)
        code.add(
            f"(not {has}({module}, {name}) if {code.builtin(torch.compiler.is_compiling)}()"
            f" else {quick} and not {has}({kind}({module}), {name}))"
        )

    def why(self, module: nn.Module, root: nn.Module) -> str | None:
        there = hasattr(module, self.name)
        return f"its attribute {self.name} was set after fusing" if there else None


@dataclasses.dataclass(frozen=True)
class Mode(Fact):
    """The training flag, which is read, is that of the module whose forward was traced."""

    def condition(self, code: Code) -> None:
        if self.path:
            values = code.member(self.path, "__dict__")
            code.add(f"{values}['training'] is {code.prefix}self.training")

    def is_change(self, module: nn.Module) -> bool:
        return False

    def why(self, module: nn.Module, root: nn.Module) -> str | None:
        if module.training is root.training:
            return None
        return "its training flag differs from its parent's; call train() or eval() of the parent"


@dataclasses.dataclass(frozen=True)
class Property(Fact):
    """A property of a parameter or buffer that Python code used: dtype, device, shape or requires_grad."""

    kind: str
    name: str
    property: str
    value: Any = dataclasses.field(compare=False)

    def condition(self, code: Code) -> None:
        tensor = f"{code.member(self.path, self.kind)}[{self.name!r}].{self.property}"
        code.is_value(tensor, self.value)

    def why(self, module: nn.Module, root: nn.Module) -> str | None:
        found = getattr(vars(module)[self.kind].get(self.name), self.property, _MISSING)
        return None if found == self.value else f"{self.property} of its {self.name} changed after fusing"


def of_value(
    path: str, name: str, value: Any, watch: Watch, *, own: bool = True, strict: bool = True
) -> Fact:
    """The fact of an attribute that was read; what it holds is watched where its value does not say all."""
    if is_pure(value):
        closed = isinstance(value, types.FunctionType) and value.__closure__
        if closed:
            watch.function(value)
        return Value(path, name, copy.deepcopy(value) if not callable(value) else value, own, strict)
    if not isinstance(value, (Tensor, nn.Module)):
        watch.attribute(path, name, value)
    return Kind(path, name, type(value))


# --- Facts of code ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outside:
    """A name of a namespace that traced code used: a global, a class's method, a name of a module."""

    space: Any = dataclasses.field(hash=False, compare=False)
    identity: int  # of the namespace
    name: str
    value: Any = dataclasses.field(hash=False, compare=False)
    code: Any = dataclasses.field(hash=False, compare=False, default=None)

    @classmethod
    def of(cls, space: Any, name: str, value: Any) -> Outside:
        """The fact that a name has this value; a function has its code too."""
        function = getattr(value, "__func__", value)
        code = function.__code__ if isinstance(function, types.FunctionType) else None
        if code is not None and code.co_filename.startswith(LIBRARIES):
            code = None  # nobody sets the code of PyTorch's functions
        if isinstance(space, dict):
            module = sys.modules.get(space.get("__name__", ""))
            space = module if module is not None and vars(module) is space else space
        return cls(space, id(space), name, value, code)

    @property
    def is_setting(self) -> bool:
        """Whether it is a value of a file, of which torch.compile shall know too."""
        return isinstance(self.space, types.ModuleType) and is_pure(self.value) and not callable(self.value)

    def condition(self, code: Code) -> None:
        space = code.constant(self.space)
        found = f"{space}.get({self.name!r})" if isinstance(self.space, dict) else f"{space}.{self.name}"
        if isinstance(self.space, type) and getattr(self.space, self.name, None) is not self.value:
            found = f"{space}.__dict__.get({self.name!r})"
        code.is_value(found, self.value)
        if self.code is not None:
            function = code.constant(getattr(self.value, "__func__", self.value))
            code.add(f"{function}.__code__ is {code.constant(self.code)}")

    def why(self) -> str | None:
        if isinstance(self.space, dict):
            where, found = self.space.get("__name__", "?"), self.space.get(self.name)
        elif isinstance(self.space, type):
            where, found = self.space.__name__, vars(self.space).get(self.name)
        else:
            where, found = self.space.__name__, getattr(self.space, self.name, _MISSING)
        own = self.code is None or getattr(getattr(found, "__func__", found), "__code__", None) is self.code
        is_same = same(found, self.value) and own
        return None if is_same else f"{where}.{self.name} was changed after fusing"


@dataclasses.dataclass(frozen=True)
class Untouched:
    """Nothing was set on a class that was made here for fused modules."""

    cls: type
    count: int  # of its names

    def condition(self, code: Code) -> None:
        code.add(f"len({code.constant(self.cls)}.__dict__) == {self.count}")

    def why(self) -> str | None:
        same = len(vars(self.cls)) == self.count
        return None if same else f"attributes of {self.cls.__name__} were set after fusing"


# --- What is compared by looking into it --------------------------------------------------------------------


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
        if content is None or len(content) > _MOST_VALUES:
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
            if getattr(module, place.name, _MISSING) is not place.object:
                return False
        return all(seen.holds() for seen in self.seen)

    def why(self, root: nn.Module) -> str | None:
        """Which one changed."""
        for place in self.places:
            if getattr(root.get_submodule(place.path), place.name, _MISSING) is not place.object:
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
    if isinstance(value, (*_BY_IDENTITY, Tensor, nn.Module, *_PURE)):
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
