"""Python values that a traced forward read: which are compared by value, and how."""

from __future__ import annotations

import collections
import enum
import random
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onepass._refused import Refused

_SCALARS = (int, float, complex, str, bytes)
BY_IDENTITY = (
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
PURE = (*_SCALARS, torch.device, torch.Size, slice, range)
MISSING = object()  # the value of an attribute that is not there
MOST_VALUES = 1000  # of an object's own, that are compared


def is_pure(value: Any, depth: int = 0) -> bool:
    """Whether a value is compared by value: numbers, text and containers of them."""
    if isinstance(value, BY_IDENTITY) or type(value) in PURE:
        return True
    if depth > 8:
        return False
    if type(value) in (list, tuple, set, frozenset, collections.deque):
        return len(value) <= MOST_VALUES and all(is_pure(item, depth + 1) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return all(is_pure(item, depth + 1) for item in value)
    if type(value) in (dict, collections.OrderedDict):
        return len(value) <= MOST_VALUES and all(
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
    if type(some) in PURE or isinstance(some, (set, frozenset, bytearray)):
        return bool(some == other)
    return False


def literal(value: Any) -> str | None:
    """A value that code may hold itself."""
    plain = (bool, int, str, type(None))
    is_plain = type(value) in plain or (type(value) is tuple and all(type(item) in plain for item in value))
    return repr(value) if is_plain else None


def constant_key(value: Any) -> Any:
    """Equal for constants that may stand for each other in compiled code."""
    if isinstance(value, BY_IDENTITY) and type(value) is not bool and value is not None:
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
