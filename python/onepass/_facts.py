"""What a traced forward read, as facts that later calls check again before they run the rewritten forward.

A fact gives a condition in Python text, over variables for the modules, and says in words why it no longer
holds. Texts and constants are equal for equal modules, so that these share their compiled code.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onepass._conditions import Code
from onepass._own_code import LIBRARIES
from onepass._values import MISSING, is_pure, same
from onepass._watch import Watch

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
        found = module._modules.get(self.name, MISSING)
        if found is MISSING or (found is not None) is not self.given:
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
        # Dynamo of PyTorch 2.15 has no guard for [*members].
        members = code.member(self.path, self.kind)
        code.add(f"{code.builtin(tuple)}({members}) == {code.constant(self.names)}")

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
        if not self.given:
            code.add(f"{code.member(self.path, self.kind)}[{self.name!r}] is None")
        elif code.of_replica:
            found = code.tensor(self.path, self.kind, self.name)
            code.add(f"{code.builtin(type)}({found}) in {code.constant((Tensor, nn.Parameter))}")
        else:
            code.add(f"{code.tensor(self.path, self.kind, self.name)} is not None")

    def why(self, module: nn.Module, root: nn.Module) -> str | None:
        found = _tensor_of(module, self.kind, self.name)
        if (found is not None) is self.given:
            return None
        if self.given and isinstance(getattr(module, self.name, None), Tensor):
            return f"its {self.name} is not among its {self.kind[1:]}"
        return f"its {self.name} was {'removed' if self.given else 'added'} after fusing"


def _tensor_of(module: nn.Module, kind: str, name: str) -> Tensor | None:
    """The parameter or buffer. A replica of torch.nn.DataParallel has parameters as plain attributes."""
    found = vars(module)[kind].get(name)
    if found is None and kind == "_parameters" and is_replica(module):
        plain = vars(module).get(name)
        return plain if type(plain) in (Tensor, nn.Parameter) else None
    return found


def is_replica(module: nn.Module) -> bool:
    """Whether torch.nn.DataParallel made the module for one call."""
    return "_is_replica" in vars(module)


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
        found = MISSING if moved else getattr(module, self.name, MISSING)
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
        tensor = code.tensor(self.path, self.kind, self.name)
        code.is_value(f"{tensor}.{self.property}", self.value)

    def why(self, module: nn.Module, root: nn.Module) -> str | None:
        found = getattr(_tensor_of(module, self.kind, self.name), self.property, MISSING)
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
            code = None  # PyTorch's functions keep their code
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
            where, found = self.space.__name__, getattr(self.space, self.name, MISSING)
        own = self.code is None or getattr(getattr(found, "__func__", found), "__code__", None) is self.code
        is_same = same(found, self.value) and own
        return None if is_same else f"{where}.{self.name} was changed after fusing"


@dataclasses.dataclass(frozen=True)
class Untouched:
    """Nothing was set on a class that was made here for fused modules."""

    cls: type
    names: Mapping[str, Any]  # vars(cls), a view: made here once, for that takes 50 ns
    count: int  # of the names when nothing was set
    is_setting = False

    def condition(self, code: Code) -> None:
        code.add(f"{code.builtin(len)}({code.constant(self.names)}) == {self.count}")

    def why(self) -> str | None:
        same = len(self.names) == self.count
        return None if same else f"attributes of {self.cls.__name__} were set after fusing"
