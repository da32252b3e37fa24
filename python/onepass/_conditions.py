"""Conditions on modules as Python text, and the constants that the text names."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from onepass._values import BY_IDENTITY, constant_key, is_pure, literal


class Code:
    """Collects conditions: text over `{prefix}...` names, and the constants that these stand for.

    Besides texts, `conditions` has assignments (a name and its value) and comparisons of which several become
    one of tuples, which is twice as fast.
    """

    def __init__(
        self,
        prefix: str,
        root: nn.Module | None,
        types: dict[str, type] | None = None,
        of_replica: bool = False,
    ) -> None:
        self.prefix = prefix
        self.root = root
        self.types = {} if types is None else types  # of the modules, by path: noted when first asked for
        self.of_replica = of_replica  # parameters are plain attributes
        self.conditions: list[str | tuple[str, str] | _Equal] = []
        self.constants: dict[str, Any] = {}
        self.modules = {"": f"{prefix}self"}
        self.members: dict[tuple[str, str], str] = {}
        self.tensors: dict[tuple[str, str, str], str] = {}

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
        """The variable of the module at a path, which must have the class that was noted."""
        if path not in self.modules:
            parent, _, name = path.rpartition(".")
            members = self.member(parent, "_modules")
            variable = f"{self.prefix}m{len(self.modules)}"
            if path not in self.types:
                self.types[path] = type(self.root.get_submodule(path))
            wanted = self.constant(self.types[path])
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

    def tensor(self, path: str, kind: str, name: str) -> str:
        """The variable of a parameter or buffer that is there."""
        if (path, kind, name) not in self.tensors:
            plain = self.of_replica and kind == "_parameters"
            members = self.member(path, "__dict__" if plain else kind)
            variable = f"{self.prefix}t{len(self.tensors)}"
            self.conditions.append((variable, f"{members}[{name!r}]"))
            self.tensors[path, kind, name] = variable
        return self.tensors[path, kind, name]

    def builtin(self, function: Any) -> str:
        """The name of a function that no argument of a user's can have."""
        name = f"{self.prefix}{function.__name__}"
        self.constants[name] = function
        return name

    def add(self, condition: str) -> None:
        """One more condition."""
        self.conditions.append(condition)

    def lines(self, result: str, otherwise: str) -> list[str]:
        """The body of a function that returns one expression where all conditions hold, or else another."""
        lines: list[str] = []
        for is_assignment, run in itertools.groupby(self.conditions, lambda c: isinstance(c, tuple)):
            if is_assignment:
                lines += [" = ".join(pair) for pair in run]
            else:
                lines += [f"if not ({' and '.join(_texts(run))}):", f"    return {otherwise}"]
        return [*lines, f"return {result}"]

    def texts(self) -> list[str]:
        """The conditions, of which none is an assignment."""
        return list(_texts(self.conditions))

    def is_value(self, expression: str, value: Any, strict: bool = True) -> None:
        """The expression has this value; `strict`: and its type, for True is 1."""
        if isinstance(value, BY_IDENTITY) or not is_pure(value):
            self.add(f"{expression} is {literal(value) or self.constant(value)}")
        elif isinstance(value, float) and (value != value or value == 0):  # nan; zeros have a sign
            self.add(f"{self.builtin(repr)}({expression}) == {repr(value)!r}")
        elif strict and type(value) in (int, float):
            self.add(f"{self.builtin(type)}({expression}) is {self.constant(type(value))}")
            self.add(f"{expression} == {self.constant(value)}")
        else:
            self.conditions.append(_Equal(expression, literal(value) or self.constant(value)))


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
