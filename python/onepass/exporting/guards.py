"""Guards of an exported forward: Python code that checks at every call what it was written from.

A trace holds while the modules whose calls it leaves out are the same: classes, methods, attributes that
code reads, hooks, parameters and children. A function `_changed_N` of the file says what changed.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from onepass._facts import HOOKS
from onepass._trace import is_leaf
from onepass.exporting.plans import NotExported

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_OF_ONE_MODE = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
_LISTS_CHILDREN = {"children", "named_children", "modules", "named_modules", "_modules"}
_ASKS_TYPES = {"isinstance", "type", "issubclass"}


class Reads:
    """Names that the code of a class's forward has, of the methods and functions it calls too."""

    def __init__(self, cls: type, file: types.ModuleType) -> None:
        self.cls = cls
        self.file = file
        self.names: set[str] = set()
        self.methods: dict[str, Any] = {}
        self.globals: dict[str, Any] = {}  # of the model's file
        self._seen: set[Any] = set()
        self._method("forward")

    def _method(self, name: str) -> None:
        found = inspect.getattr_static(self.cls, name)
        self.methods[name] = found
        if isinstance(found, property):
            found = found.fget
        self._function(inspect.unwrap(getattr(found, "__func__", found)))

    def _function(self, function: Any) -> None:
        if not isinstance(function, types.FunctionType) or function in self._seen:
            return
        self._seen.add(function)
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            constants = code.co_consts
            self.names |= {c for c in constants if isinstance(c, str) and c.isidentifier()}
            codes += [constant for constant in constants if isinstance(constant, types.CodeType)]
            for name in code.co_names:
                self.names.add(name)
                self._follow(name, function)

    def _follow(self, name: str, function: types.FunctionType) -> None:
        found = inspect.getattr_static(self.cls, name, None)
        is_code = isinstance(found, (types.FunctionType, property, staticmethod, classmethod))
        if is_code and not hasattr(nn.Module, name) and name not in self.methods:
            self._method(name)
        if function.__globals__ is vars(self.file) and name in function.__globals__:
            self.globals[name] = value = function.__globals__[name]
            if getattr(value, "__globals__", None) is vars(self.file):
                self._function(inspect.unwrap(value))


class Guards:
    """The `_changed_N` of a file, and the classes, methods and globals that they compare."""

    def __init__(self, file: types.ModuleType) -> None:
        self.file = file
        self.classes: dict[type, str] = {}  # the names that the file has for them
        self.methods: dict[tuple[type, str], str] = {}
        self.globals: dict[str, Any] = {}
        self.functions: list[str] = []
        self._reads: dict[type, Reads] = {}

    def function(self, root: nn.Module, watched: Iterable[str], inlined: Iterable[str]) -> str:
        """The name of a function that says why a call of the root must run the original code.

        `watched`: paths of modules whose calls its fused code leaves out, with their parents; `inlined`: of
        those, the ones whose own code was traced.
        """
        body = _Body(self, root, set(watched), set(inlined)).lines()
        text = "\n".join(f"    {line}" if line else "" for line in body)
        if text not in self.functions:
            self.functions.append(text)
        return f"_changed_{self.functions.index(text) + 1}"

    def text(self) -> str:
        """All of them."""
        head = ["# The classes, methods and functions that the kernels stand for, as this file found them."]
        head += [f"{name} = {self.expression(cls)}" for cls, name in self.classes.items()]
        head += [f"{name} = {self._method(*key)}" for key, name in self.methods.items()]
        head += [f"_{name}_function = {name}" for name, value in self.globals.items() if _is_function(value)]
        parts = ["\n".join(head), "\n".join(self._patched())]
        for number, body in enumerate(self.functions):
            title = (
                f'def _changed_{number + 1}(self):\n    """What is not as the fused code has it, or ""."""'
            )
            parts.append(f"{title}\n{body}")
        return "\n\n\n".join(parts)

    def _patched(self) -> list[str]:
        lines = ["def _patched():", '    """What was changed for all modules; "" where nothing was."""']
        lines += _if((f"_global{hooks}" for hooks in HOOKS), "a hook on all modules is registered")
        lines += _if("_module_class.__call__ is not _module_call", "torch.nn.Module.__call__ was replaced")
        for (cls, method), name in self.methods.items():
            is_bound = isinstance(inspect.getattr_static(cls, method), classmethod)
            condition = f"{self._method(cls, method)} {'!=' if is_bound else 'is not'} {name}"
            lines += _if(condition, f"{cls.__name__}.{method} was replaced")
        for name, value in self.globals.items():
            other = f"{name} is not _{name}_function" if _is_function(value) else None
            if not isinstance(value, (type, types.ModuleType)):
                other = other or differs_from(name, value, self)
            lines += _if(other, f"{name} of this file was changed") if other else []
        return [*lines, '    return ""']

    def _method(self, cls: type, name: str) -> str:
        """The expression of a method; those that PyTorch keeps to itself are not in all its versions."""
        if _is_pytorchs(cls) and name.startswith("_"):
            return f'getattr({self.classes[cls]}, "{name}", None)'
        return f"{self.classes[cls]}.{name}"

    def reads(self, cls: type) -> Reads:
        """What the code of a class reads; its methods are compared from now on."""
        if cls not in self._reads:
            self._reads[cls] = found = Reads(cls, self.file)
            for name in found.methods:
                self.methods[cls, name] = f"{self.name(cls).removesuffix('_class')}_{name}"
            self.globals |= found.globals
        return self._reads[cls]

    def name(self, cls: type) -> str:
        """The file's own name for a class."""
        if cls not in self.classes:
            if self.expression(cls) is None:
                raise NotExported(
                    f"its class {cls.__qualname__} cannot be named outside the function it is in"
                )
            taken = [known.__name__ for known in self.classes].count(cls.__name__)
            self.classes[cls] = f"_{cls.__name__}{taken + 1 if taken else ''}_class"
        return self.classes[cls]

    def expression(self, value: Any) -> str | None:
        """A class or function by a name that the exported file has; None where there is none."""
        qualified = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
        if _found(self.file, qualified) is value:
            return qualified
        home = getattr(value, "__module__", None) or ""
        if home.partition(".")[0] == "torch" and _found(torch, f"{home}.{qualified}"[6:]) is value:
            return f"{home}.{qualified}"
        for place in ("torch", "torch.nn.functional"):
            plain = getattr(value, "__name__", "")
            if plain and _found(sys.modules[place], plain) is value:
                return f"{place}.{plain}"
        if (
            home in sys.modules
            and home != self.file.__name__
            and _found(sys.modules[home], qualified) is value
        ):
            return f'sys.modules["{home}"].{qualified}'
        return None


def _is_function(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.BuiltinFunctionType))


def _found(place: Any, qualified: str) -> Any:
    for part in qualified.split("."):
        place = getattr(place, part, None)
    return place


# --- Values -------------------------------------------------------------------------------------------------


def literal(value: Any, guards: Guards, paths: dict[nn.Module, str]) -> str | None:
    """A value as Python code, where it can be one."""
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if type(value) is float:
        return repr(value) if abs(value) < float("inf") else f'float("{value}")'
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, nn.Module):
        return paths.get(value)
    if isinstance(value, enum.Enum):
        cls = guards.expression(type(value))
        return cls and f"{cls}.{value.name}"
    if type(value) in (tuple, list, dict, set, frozenset, torch.Size):
        return _container(value, lambda inner: literal(inner, guards, paths))
    return guards.expression(value) if isinstance(value, type) or _is_function(value) else None


def _container(value: Any, inner: Callable[[Any], str | None]) -> str | None:
    if type(value) is dict:
        pairs = [(inner(key), inner(item)) for key, item in value.items()]
        if any(None in pair for pair in pairs):
            return None
        return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
    items = [inner(item) for item in value]
    if None in items:
        return None
    text = ", ".join(items)
    if type(value) is list:
        return f"[{text}]"
    if type(value) in (set, frozenset):
        return f"{type(value).__name__}([{', '.join(sorted(items))}])"
    return f"({text},)" if len(items) == 1 else f"({text})"


def differs_from(
    expression: str, value: Any, guards: Guards, paths: dict[nn.Module, str] | None = None
) -> str | None:
    """A condition that the expression has another value."""
    text = literal(value, guards, paths or {})
    if text is None:
        return None
    is_one = value is None or isinstance(value, (bool, type)) or _is_function(value)
    return f"{expression} is not {text}" if is_one else f"{expression} != {text}"


# --- A function ---------------------------------------------------------------------------------------------


def _if(conditions: str | Iterable[str], reason: str, is_code: bool = False) -> list[str]:
    """Where one of the conditions holds, the reason is returned."""
    given = [conditions] if isinstance(conditions, str) else list(conditions)
    head = [f"    if {' or '.join(given)}:"]
    if len(head[0]) > 100 and len(given) > 1:
        head = ["    if (", f"        {given[0]}", *(f"        or {other}" for other in given[1:]), "    ):"]
    return [*head, f"        return {reason if is_code else json.dumps(reason)}"]


class _Body:
    """The checks of one fused forward, outer modules first."""

    def __init__(self, guards: Guards, root: nn.Module, watched: set[str], inlined: set[str]) -> None:
        self.guards = guards
        self.root = root
        self.own = {"", *inlined}  # whose Python code was traced
        leaves = {path for path in watched if is_leaf(root.get_submodule(path))}
        self.left_out = self.own | {p for p in leaves if not isinstance(root.get_submodule(p), _CONTAINERS)}
        self.watched = watched | self.own
        self.variables = {"": "own"}  # the dictionaries of modules that were looked up
        self.paths = {root: "self"}  # expressions of modules
        for path, module in root.named_modules():
            if path:
                steps = "".join(f'._modules.get("{part}")' for part in path.split("."))
                self.paths[module] = f"self{steps}"
        self.outer = set().union(*(self._reads(path).names for path in self.own))

    def lines(self) -> list[str]:
        """The function's body. Attributes are read in the modules' dictionaries: a third of the time."""
        found = ["own = self.__dict__"]
        for path, module in self._reached():
            found += self._lookup(path, module) if path else []
            found += [line[4:] for line in self._checks(path, module)]
        text = "\n".join(found)
        unused = {name for name in self.variables.values() if len(re.findall(rf"\b{name}\b", text)) == 1}
        inner = [f"    {line}" for line in found if line.partition(" = ")[0] not in unused]
        missing = ["except KeyError:", '    return "an attribute was removed"']
        return ["try:", *inner, *missing, "return _patched()"]

    def _reads(self, path: str) -> Reads:
        return self.guards.reads(base_of(self.root.get_submodule(path)))

    def _reached(self) -> Iterator[tuple[str, nn.Module]]:
        """What the traced code gets hold of: what is watched, children it names, what containers hold."""
        for path, module in self.root.named_modules(remove_duplicate=False):
            parent, _, name = path.rpartition(".")
            if path in self.watched:
                yield path, module
            elif parent in self.variables:
                is_inside = isinstance(self.root.get_submodule(parent), _CONTAINERS)
                if is_inside or (parent in self.own and name in self.outer):
                    yield path, module

    def _lookup(self, path: str, module: nn.Module) -> list[str]:
        parent, _, name = path.rpartition(".")
        variable = "".join(c if c.isalnum() else "_" for c in f"own_{path}")
        while variable in self.variables.values():
            variable += "_"
        self.variables[path] = variable
        lines = [f'module = {self.variables[parent]}["_modules"].get("{name}")']
        if path not in self.left_out and not self.outer & _ASKS_TYPES:
            lines += ["if module is None:", f'    return "{path} was removed"']
        else:
            cls = self.guards.name(base_of(module))
            condition = f"not isinstance(module, {cls})"
            if path in self.left_out:
                is_changed = base_of(module) is not type(module)
                condition = f"type(module){'.__mro__[1]' if is_changed else ''} is not {cls}"
            lines += [f"if {condition}:", f'    return _replaced("{path}", module, {cls})']
        return [*lines, f"{variable} = module.__dict__"]

    def _checks(self, path: str, module: nn.Module) -> list[str]:
        variable = self.variables[path]
        lines: list[str] = []
        if path in self.left_out and path:
            lines += _if((f'{variable}["{hooks}"]' for hooks in HOOKS), f"a hook is on {path}")
            if path in self.own or isinstance(module, _OF_ONE_MODE):
                differs = f"{path}.training differs from its parent's"
                lines += _if(f'{variable}["training"] is not own["training"]', differs)
        if path in self.left_out:
            lines += self._methods(path)
            lines += self._tensors(path, module)
        lines += self._children(path, module)
        return lines + list(self._attributes(path, module))

    def _methods(self, path: str) -> list[str]:
        methods = [name for name in self._reads(path).methods if path or name != "forward"]
        own = [f'"{name}" in {self.variables[path]}' for name in methods]
        return _if(own, f"a method of {path or 'the model'} is set on the object") if own else []

    def _tensors(self, path: str, module: nn.Module) -> list[str]:
        """Parameters and buffers that are there, or None; a replica of a model has plain attributes."""
        lines: list[str] = []
        own = self.variables[path]
        for kind in ("_parameters", "_buffers"):
            for name, tensor in vars(module)[kind].items():
                if name in self._reads(path).names:
                    given, full = f'{own}["{kind}"].get("{name}")', _joined(path, name)
                    if tensor is None:
                        added = (f"{given} is not None", f'{own}.get("{name}") is not None')
                        lines += _if(added, f"{full} was added")
                    else:
                        removed = f'{given} is None and {own}.get("{name}") is None'
                        lines += _if(removed, f"{full} was removed")
        return lines

    def _children(self, path: str, module: nn.Module) -> list[str]:
        """Names in a container, and of children that are None."""
        given, title = f'{self.variables[path]}["_modules"]', path or "the model"
        if isinstance(module, _CONTAINERS) or (path in self.own and self.outer & _LISTS_CHILDREN):
            return _if(
                f"tuple({given}) != {tuple(module._modules)!r}", f"the children of {title} were changed"
            )
        absent = [name for name, child in module._modules.items() if child is None and name in self.outer]
        return [
            line
            for name in absent
            for line in _if(f'{given}.get("{name}") is not None', f"{_joined(path, name)} was added")
        ]

    def _attributes(self, path: str, module: nn.Module) -> Iterator[str]:
        names, values = self.outer, dict(vars(module))
        is_sure, variable = path in self.left_out, self.variables[path]
        if is_sure:
            names = names | self._reads(path).names
            values = _class_values(base_of(module)) | values
        for name in sorted(names & values.keys()):
            is_private = _is_pytorchs(base_of(module)) and name.startswith("_")  # not in all its versions
            if name in vars(_EMPTY) or is_private:
                continue
            given = f'{variable}["{name}"]' if is_sure else f'{variable}.get("{name}")'
            if name not in vars(module):  # of the class, until the object has one
                given = f'{variable}.get("{name}", {self.guards.name(base_of(module))}.{name})'
            try:
                yield from self._attribute(_joined(path, name), given, values[name], names, 0)
            except NotExported:
                if is_sure:  # of another module the traced code may read it, or may not
                    raise

    def _attribute(self, full: str, given: str, value: Any, names: set[str], depth: int) -> Iterator[str]:
        """The value, or of an object the attributes that the code names."""
        if condition := differs_from(given, value, self.guards, self.paths):
            text = literal(value, self.guards, self.paths)
            yield from _if(condition, f'_differs("{full}", {given}, {text})', is_code=True)
            return
        cls = self.guards.expression(type(value))
        has_parts = hasattr(value, "__dict__") and not callable(value) and not isinstance(value, torch.Tensor)
        if not has_parts or cls is None or depth == 3:
            raise NotExported(
                f"its forward reads {full}, a {type(value).__name__} that the file cannot compare"
            )
        yield from _if(f"type({given}) is not {cls}", f"{full} was replaced")
        for part in sorted(names & vars(value).keys()):
            inner = f'getattr({given}, "{part}", None)'
            yield from self._attribute(f"{full}.{part}", inner, vars(value)[part], names, depth + 1)


def _joined(path: str, name: str) -> str:
    return ".".join(part for part in (path, name) if part)


def _is_pytorchs(cls: type) -> bool:
    return cls.__module__.startswith("torch.nn.")


_EMPTY = nn.Module()  # whose attributes are of every module, `training` too


def _class_values(cls: type) -> dict[str, Any]:
    """Attributes of the class and its bases that are no code."""
    code = (types.FunctionType, property, staticmethod, classmethod)
    found = {
        name: value
        for base in reversed(cls.__mro__)
        if base not in nn.Module.__mro__
        for name, value in vars(base).items()
        if not isinstance(value, code) and not name.startswith("__")
    }
    return {name: value for name, value in found.items() if not hasattr(value, "__get__")}


def base_of(module: nn.Module) -> type:
    """The module's class; of one with parametrisations, the class that it had before."""
    return type(module).__mro__[1] if parametrize.is_parametrized(module) else type(module)
