"""Tracing a module's forward with torch.fx: the graph of what it computes, or one sentence why none."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.fx.proxy import ParameterProxy, TraceError

SIMPLE_TYPES = (bool, int, float, str, type(None))
HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Refused(Exception):
    """A module cannot be traced; the message is one sentence."""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """How a forward is called: some parameters are constants, all others are tensors."""

    constants: tuple[tuple[str, Any], ...] = ()

    def tensors(self, names: list[str]) -> list[str]:
        """The parameters that are tensors."""
        constants = dict(self.constants)
        return [name for name in names if name not in constants]


@dataclasses.dataclass
class Trace:
    """A traced forward."""

    root: nn.Module
    training: bool
    graph: fx.Graph
    inlined: dict[str, nn.Module]  # by path: modules whose Python code was run to get the graph
    opaque: dict[nn.Module, str]  # modules left as calls, with the reason
    observed: dict[nn.Module, set[Pattern]]  # how other modules' forwards were called


def has_hooks(module: nn.Module) -> bool:
    """Whether something else runs when the module is called."""
    return any(getattr(module, name, None) for name in HOOK_DICTS)


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is PyTorch's own, so that its call is one operation."""
    own = type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))
    return (own and not isinstance(module, nn.Sequential)) or isinstance(module, torch.jit.ScriptModule)


def class_of(module: nn.Module) -> type:
    """The module's class; of a fused module, the class it was before."""
    state = vars(module).get("_onepass")
    return type(module) if state is None else state.original


def parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    """The parameters of the module's forward, without self."""
    try:
        return list(inspect.signature(class_of(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        raise Refused("its forward has no readable signature") from None


def is_variadic(parameter: inspect.Parameter) -> bool:
    """Whether the parameter is *args or **kwargs."""
    return parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def call_patterns(module: nn.Module) -> list[Pattern]:
    """How the module may be called: with all tensors it may take, those it must, the first alone."""
    named = [parameter for parameter in parameters_of(module) if not is_variadic(parameter)]
    constants = {p.name: p.default for p in named[1:] if p.default is not p.empty}
    settled = {p.name: p.default for p in named[1:] if p.name in constants and not _may_be_tensor(p)}
    alone = {p.name: None for p in named[1:] if p.default is p.empty} | constants
    patterns = [_pattern(settled), _pattern(constants), _pattern(alone)]
    return [pattern for pattern in dict.fromkeys(patterns) if pattern is not None]


def flags_of(module: nn.Module) -> dict[str, Any]:
    """The plain attributes that the module's forward reads: a trace holds while they have these values."""
    names = _names_read(class_of(module), "forward", set())
    return {
        name: value
        for name, value in vars(module).items()
        if name in names and name != "training" and type(value) in SIMPLE_TYPES
    }


def trace(
    root: nn.Module, pattern: Pattern, training: bool, inline: Callable[[nn.Module], bool] = lambda _: True
) -> Trace:
    """Traces a forward; `inline` says which modules that are not PyTorch's own are traced through."""
    with _modes(root, training), _unchanged(root), torch.enable_grad(), _no_checkpointing():
        tracer = _Tracer(root, pattern, inline)
        try:
            graph = tracer.trace(root)
        except Exception as error:
            raise Refused(_reason(error)) from error
    return Trace(root, training, graph, tracer.inlined, tracer.opaque, tracer.observed)


def _pattern(constants: dict[str, Any]) -> Pattern | None:
    if any(type(value) not in SIMPLE_TYPES for value in constants.values()):
        return None
    return Pattern(tuple(constants.items()))


def _may_be_tensor(parameter: inspect.Parameter) -> bool:
    """Whether a tensor may be given instead of the default, None: no annotation says otherwise."""
    annotated = parameter.annotation is not parameter.empty
    return parameter.default is None and (not annotated or "Tensor" in str(parameter.annotation))


def _names_read(cls: type, method: str, seen: set[str]) -> set[str]:
    """All names in the code of a method and of the methods it calls."""
    seen.add(method)
    function = inspect.unwrap(getattr(cls, method))
    codes = [function.__code__] if isinstance(function, types.FunctionType) else []
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    called = [
        name
        for name in names - seen
        if isinstance(inspect.getattr_static(cls, name, None), types.FunctionType)
    ]
    for name in called:
        if name not in seen and not hasattr(nn.Module, name):
            names |= _names_read(cls, name, seen)
    return names


def _reason(error: Exception) -> str:
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, TraceError):
        return "its forward branches or loops on a tensor's value, shape or type"
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"its forward cannot be traced ({type(error).__name__}: {first_line[:120]})"


@contextlib.contextmanager
def _modes(root: nn.Module, training: bool) -> Iterator[None]:
    """Sets the training flag of every module, and back."""
    before = [(module, module.training) for module in root.modules()]
    try:
        for module, _ in before:
            module.training = training
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextlib.contextmanager
def _unchanged(root: nn.Module) -> Iterator[None]:
    """Undoes what a traced forward did outside the graph, and refuses it: a rewritten one would not do it."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in root.modules()]
    states, changed = _random_states(), set()
    try:
        yield
    finally:
        drawn = not _same_states(states, _random_states())
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        for module, attributes, buffers in before:
            changed |= _restore(vars(module), attributes) | _restore(module._buffers, buffers)
    if changed:
        raise Refused(f"its forward sets the attribute {min(changed)}")
    if drawn:
        raise Refused("its forward draws random numbers that do not depend on its input")


def _random_states() -> tuple[Any, ...]:
    """What the global random number generators hold."""
    numpy = sys.modules.get("numpy")
    keys = () if numpy is None else numpy.random.get_state()[1:3]
    return torch.get_rng_state(), random.getstate(), *(torch.as_tensor(key) for key in keys)


def _same_states(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    same = [torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(some, others, strict=True)]
    return all(same)


def _restore(values: dict[str, Any], before: dict[str, Any]) -> set[str]:
    names = {name for name in values.keys() | before.keys() if values.get(name) is not before.get(name)}
    if names:
        values.clear()
        values.update(before)
    return names


@contextlib.contextmanager
def _no_checkpointing() -> Iterator[None]:
    """Refuses forwards that checkpoint activations: the graph would lose the checkpoints."""

    def refuse(*_: Any, **__: Any) -> None:
        raise Refused("its forward checkpoints activations")

    name = "_checkpoint_without_reentrant_generator"
    original = getattr(torch.utils.checkpoint, name)
    setattr(torch.utils.checkpoint, name, refuse)
    try:
        yield
    finally:
        setattr(torch.utils.checkpoint, name, original)


def _contexts() -> tuple[bool, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


class _Typed:
    """Says that a proxy is a tensor to user code that asks, and stops the trace where that is not known."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        caller = sys._getframe(1)
        package = caller.f_globals.get("__name__", "").partition(".")[0]
        if package == "torch" and caller.f_code.co_name != "is_tensor":
            return type(self)
        if self.node.op in ("placeholder", "call_module", "get_attr"):
            return Tensor
        raise Refused("its forward asks for the type of a computed value")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("node", "tracer", "param", "name"):
            raise Refused(f"its forward sets the attribute {name} of a tensor")
        super().__setattr__(name, value)


def _in_place(name: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    function = getattr(operator, name)
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


# torch.fx records x += y as x + y: other names of x would not see what is written.
for _name in (
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "imatmul",
    "iand",
    "ior",
    "ixor",
):
    setattr(_Typed, f"__{_name}__", _in_place(_name))


class _Value(_Typed, fx.Proxy):
    """A value of the traced forward."""


class _Weight(_Typed, ParameterProxy):
    """A parameter of the traced module: its shape is known."""


class _Tracer(fx.Tracer):
    """Leaves as calls the modules that cannot be traced, and notes which call each node belongs to."""

    proxy_buffer_attributes = True

    def __init__(self, root: nn.Module, pattern: Pattern, inline: Callable[[nn.Module], bool]) -> None:
        super().__init__(param_shapes_constant=True)
        self.pattern = pattern
        self.inline = inline
        self.inlined: dict[str, nn.Module] = {}
        self.opaque: dict[nn.Module, str] = {}
        self.observed: dict[nn.Module, set[Pattern]] = {}
        self.calls: list[tuple[int, str]] = []  # (number of the call, path), outermost first
        self.call_count = 0
        self.weights: dict[str, fx.Proxy] = {}
        self.contexts = _contexts()
        self.names = {id(p): n for n, p in [*root.named_parameters(), *root.named_buffers()]}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        constants = dict(self.pattern.constants)
        positional, keywords = [], {}
        for parameter in parameters_of(self.root):
            if is_variadic(parameter):
                continue
            name = parameter.name
            value = constants[name] if name in constants else self.create_proxy("placeholder", name, (), {})
            if parameter.kind is parameter.KEYWORD_ONLY:
                keywords[name] = value
            else:
                positional.append(value)
        return lambda: root_fn(self.root, *positional, **keywords), []

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        name = self.names.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            node = self.create_node("get_attr", name, (), {})
            is_parameter = isinstance(attr_val, nn.Parameter)
            parameter_proxy_cache[name] = (
                _Weight(self, node, name, attr_val) if is_parameter else self.proxy(node)
            )
        self.weights = parameter_proxy_cache
        return parameter_proxy_cache[name]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, Tensor) and id(a) not in self.names:
            raise Refused("its forward makes a tensor that does not depend on its input")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _contexts() != self.contexts:
            raise Refused("its forward switches gradients or autocast on or off")
        node = super().create_node(*args, **kwargs)
        node.meta["calls"] = tuple(self.calls)
        return node

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        path = self.path_of_module(m)
        reason = None
        if not is_leaf(m):
            self._observe(m, args, kwargs)
            reason = self._why_kept(m)
        if is_leaf(m) or reason is not None:
            if reason:
                self.opaque[m] = reason
            return self.create_proxy("call_module", path, args, kwargs)
        last = next(iter(reversed(self.graph.nodes)), None)
        try:
            return self._trace_through(m, path, args, kwargs)
        except Exception as error:
            self._erase_after(last)
            self.opaque[m] = _reason(error)
            self.inlined = {
                p: i for p, i in self.inlined.items() if p != path and not p.startswith(path + ".")
            }
            return self.create_proxy("call_module", path, args, kwargs)

    def _why_kept(self, module: nn.Module) -> str | None:
        if has_hooks(module):
            return "a hook is on it"
        if "forward" in vars(module):
            return "its forward is set on the object"
        return None if self.inline(module) else ""

    def _trace_through(self, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        self.call_count += 1
        self.calls.append((self.call_count, path))
        try:
            result = class_of(module).forward(module, *args, **kwargs)
        finally:
            self.calls.pop()
        self.inlined[path] = module
        return result

    def _erase_after(self, last: fx.Node | None) -> None:
        for node in reversed(self.graph.nodes):
            if node is last:
                break
            self.graph.erase_node(node)
            if node.op == "get_attr":
                self.weights.pop(node.target, None)

    def _observe(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        named = parameters_of(module)
        variadic = {parameter.name for parameter in named if is_variadic(parameter)}
        try:
            bound = inspect.signature(class_of(module).forward).bind(module, *args, **kwargs)
        except TypeError:
            return
        bound.apply_defaults()
        given = {p.name: bound.arguments[p.name] for p in named}
        if any(given[name] for name in variadic):
            return
        constants = {n: v for n, v in given.items() if n not in variadic and not isinstance(v, fx.Proxy)}
        pattern = _pattern(constants)
        if pattern is not None:
            self.observed.setdefault(module, set()).add(pattern)
