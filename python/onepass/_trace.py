"""Tracing a module's forward with torch.fx: the graph of what it computes, or one sentence why none."""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import gc
import inspect
import operator
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute, ParameterProxy, TraceError
from torch.utils._python_dispatch import _disable_current_modes

from onepass import _facts
from onepass._observe import RANDOM, Observer
from onepass._own_code import unseen
from onepass._refused import Refused, raised
from onepass._shadow import Recorder, Shadow, class_of

SIMPLE_TYPES = (bool, int, float, str, type(None))


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
    recorder: Recorder  # the shadows, with the facts that the trace rests on; to be closed
    inlined: dict[str, nn.Module]  # by path: modules whose Python code was run to get the graph
    opaque: dict[nn.Module, str]  # modules left as calls, with the reason
    observed: dict[nn.Module, set[Pattern]]  # how other modules' forwards were called


def has_hooks(module: nn.Module) -> bool:
    """Whether something else runs when the module is called."""
    return any(getattr(module, name, None) for name in _facts.HOOKS)


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is PyTorch's own, so that its call is one operation."""
    own = type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))
    compiled = type(module).__module__.startswith("torch._dynamo")
    scripted = isinstance(module, torch.jit.ScriptModule)
    return (own and not isinstance(module, nn.Sequential)) or compiled or scripted


def parameters_of(module: nn.Module | type) -> list[inspect.Parameter]:
    """The parameters of the forward of a module or of a class, without self."""
    cls = module if isinstance(module, type) else class_of(module)
    try:
        return list(inspect.signature(cls.forward).parameters.values())[1:]
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


def trace(
    root: nn.Module, pattern: Pattern, training: bool, inline: Callable[[nn.Module], bool] = lambda _: True
) -> Trace:
    """Traces a forward; `inline` says which modules that are not PyTorch's own are traced through.

    Neither the model nor PyTorch is changed, and other threads may run both.
    """
    reasons: list[str | None] = []
    with torch.enable_grad():
        tracer = _Tracer(root, pattern, training, inline)
        try:
            with _random_states():
                tracer.run()
        except Exception as error:
            reasons.append(_reason(error))
    recorder = tracer.recorder
    reasons += [recorder.why_changed(), tracer.stand_ins_kept_outside()]
    for reason in filter(None, reasons):
        recorder.close()
        raise Refused(reason)
    recorder.tracing = False
    return Trace(
        root, training, tracer.graph, recorder, tracer.inlined, tracer.opaque,
        tracer.observed,
    )  # fmt: skip


def _pattern(constants: dict[str, Any]) -> Pattern | None:
    if any(type(value) not in SIMPLE_TYPES for value in constants.values()):
        return None
    return Pattern(tuple(constants.items()))


def _may_be_tensor(parameter: inspect.Parameter) -> bool:
    """Whether a tensor may be given instead of the default, None: no annotation says otherwise."""
    annotated = parameter.annotation is not parameter.empty
    return parameter.default is None and (not annotated or "Tensor" in str(parameter.annotation))


_BRANCHES = "its forward branches or loops on a tensor's value, shape or type"


def _reason(error: Exception) -> str:
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, TraceError):
        return _BRANCHES
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"its forward cannot be traced ({type(error).__name__}: {first_line[:120]})"


@contextlib.contextmanager
def _random_states() -> Iterator[None]:
    """Puts the random number generators back, and refuses a forward that used them."""
    generators: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
        (torch.get_rng_state, torch.set_rng_state),
        (random.getstate, random.setstate),
    ]
    if (numpy := sys.modules.get("numpy")) is not None:
        generators.append((numpy.random.get_state, numpy.random.set_state))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators.append((torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
    with _disable_current_modes():
        before = [get() for get, _ in generators]
    try:
        yield
    finally:
        with _disable_current_modes():
            drawn = [i for i, (get, _) in enumerate(generators) if not _equal(before[i], get())]
            for i in drawn:
                generators[i][1](before[i])
    if drawn:
        raise Refused(RANDOM)


def _equal(some: Any, other: Any) -> bool:
    """Whether two states are the same: tensors, arrays, or tuples of numbers and arrays."""
    if isinstance(some, Tensor):
        return torch.equal(some, other)
    if isinstance(some, list) or (isinstance(some, tuple) and any(hasattr(part, "dtype") for part in some)):
        return all(map(_equal, some, other))
    return some.tobytes() == other.tobytes() if hasattr(some, "tobytes") else some == other


def _contexts() -> tuple[bool, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


class _Unpacked:
    """Notes how many values a proxy is unpacked into, and those that are read from it."""

    def __getattr__(self, name: str) -> Any:
        return _Attribute(self, name)

    def __iter__(self) -> Iterator[Any]:
        caller = sys._getframe(1)
        place, code = caller.f_lasti, caller.f_code.co_code
        is_long = place >= 2 and dis.opname[code[place - 2]] == "EXTENDED_ARG"  # more than 255 names
        if dis.opname[code[place]] != "UNPACK_SEQUENCE" or is_long:
            return self.tracer.iter(self)
        count = code[place + 1]
        self.tracer.create_proxy("call_function", require_length, (self, count), {})
        return iter([self[i] for i in range(count)])


class _Attribute(_Unpacked, Attribute):
    """Of a value: its sizes, or a method that is called."""


class _Typed(_Unpacked):
    """Says that a proxy is a tensor to user code that asks, and stops the trace where that is not known."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        caller = sys._getframe(1)
        package = caller.f_globals.get("__name__", "").partition(".")[0]
        if package in ("torch", "onepass") and caller.f_code.co_name != "is_tensor":
            return type(self)
        if self.node.op in ("placeholder", "call_module", "get_attr"):
            return Tensor
        raise Refused("its forward asks for the type of a computed value")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("node", "tracer", "param", "name"):
            raise Refused(f"its forward sets the attribute {name} of a tensor")
        super().__setattr__(name, value)


def require_length(value: Any, count: int) -> None:
    """Raises as unpacking a value into so many names does: torch.fx records its elements alone."""
    if len(value) > count:
        raise ValueError(f"too many values to unpack (expected {count})")
    if len(value) < count:
        raise ValueError(f"not enough values to unpack (expected {count}, got {len(value)})")


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
    """A parameter of the traced module: its shape is known, and a fact."""

    def _noted(self) -> Tensor:
        tracer: _Tracer = self.tracer
        tracer.recorder.tensor_property(self.param, "shape")
        return self.param

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._noted().shape

    def size(self, *dim: Any) -> Any:
        return self._noted().size(*dim)

    def dim(self) -> int:
        return self._noted().dim()

    @property
    def ndim(self) -> int:
        return self._noted().ndim

    def numel(self) -> int:
        return self._noted().numel()

    def nelement(self) -> int:
        return self._noted().nelement()


class _Tracer(fx.Tracer):
    """Leaves as calls the modules that cannot be traced, and notes which call each node belongs to."""

    def __init__(
        self, root: nn.Module, pattern: Pattern, training: bool, inline: Callable[[nn.Module], bool]
    ) -> None:
        super().__init__()
        self.root = root
        self.graph = fx.Graph(tracer_cls=fx.Tracer)
        self.tensor_attrs: dict[Any, str] = {}
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
        self.made: list[weakref.ref[fx.Proxy]] = []
        self.recorder = Recorder(root, training, self)
        self.observer = Observer(self.recorder)

    def run(self) -> None:
        """Runs the forward on stand-ins."""
        constants = dict(self.pattern.constants)
        positional, keywords = [], {}
        parameters = parameters_of(self.root)
        if parameters and is_variadic(parameters[0]):
            raise Refused("its forward takes only variadic arguments")
        for parameter in parameters:
            if is_variadic(parameter):
                continue
            name = parameter.name
            value = constants[name] if name in constants else self.create_proxy("placeholder", name, (), {})
            if parameter.kind is parameter.KEYWORD_ONLY:
                keywords[name] = value
            else:
                positional.append(value)
        with self.observer.watching(), raised():
            result = class_of(self.root).forward(self.recorder.root.object, *positional, **keywords)
        self.create_node("output", "output", (self.create_arg(result),), {})

    def close(self) -> None:
        """Lets go of the model."""
        self.weights.clear()
        self.root = self.recorder = self.observer = None

    def stand_ins_kept_outside(self) -> str | None:
        """Whether the forward stored a value that outlives the call: lists and dicts lose it again."""
        own = {id(weight) for weight in self.weights.values()}

        def alive() -> list[fx.Proxy]:
            return [p for made in self.made if (p := made()) is not None and id(p) not in own]

        if not alive():
            return None
        gc.collect()
        found = alive()
        for proxy in found:
            for holder in gc.get_referrers(proxy):
                if holder is not found:
                    _take_out(holder, proxy)
        return "its forward keeps a tensor outside" if found else None

    def proxy(self, node: fx.Node) -> fx.Proxy:
        proxy = _Value(node, self)
        self.made.append(weakref.ref(proxy))
        return proxy

    def tensor(self, tensor: Tensor) -> Any:
        """The stand-in of a parameter or buffer."""
        name = self.names.get(id(tensor))
        if name is None:
            return tensor
        if name not in self.weights:
            node = self.create_node("get_attr", name, (), {})
            is_parameter = isinstance(tensor, nn.Parameter)
            self.weights[name] = _Weight(self, node, name, tensor) if is_parameter else self.proxy(node)
        return self.weights[name]

    def to_bool(self, obj: fx.Proxy) -> bool:
        raise Refused(_BRANCHES)

    def iter(self, obj: fx.Proxy) -> Any:
        try:
            return super().iter(obj)
        except TraceError:
            raise Refused(_BRANCHES) from None

    def keys(self, obj: fx.Proxy) -> Any:
        raise Refused(_BRANCHES)

    @unseen
    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        return super().create_proxy(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, Tensor):
            if id(a) not in self.names:
                raise Refused("its forward makes a tensor that does not depend on its input")
            return self.tensor(a).node
        if isinstance(a, nn.Module):
            raise Refused("its forward gives a module to a function")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _contexts() != self.contexts:
            raise Refused("its forward switches gradients or autocast on or off")
        node = super().create_node(*args, **kwargs)
        node.meta["calls"] = tuple(self.calls)
        return node

    def call(self, shadow: Shadow, args: Any, kwargs: Any) -> Any:
        """What the call of a module gives: one node, or what its forward gives."""
        module, path = shadow.module, shadow.path
        if self._is_kept(module, args, kwargs):
            return self.create_proxy("call_module", path, args, kwargs)
        last, mark = next(iter(reversed(self.graph.nodes)), None), len(self.recorder.journal)
        outside = dict(self.recorder.outside)
        try:
            return self._trace_through(shadow, path, args, kwargs)
        except Exception as error:
            self.opaque[module] = _reason(error)
        self.observer.resume()
        self.recorder.outside = outside
        self.recorder.forget_after(mark)
        self._erase_after(last)
        self.inlined = {p: i for p, i in self.inlined.items() if p != path and not p.startswith(path + ".")}
        return self.create_proxy("call_module", path, args, kwargs)

    @unseen
    def _is_kept(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether the call of a module stays one node."""
        if is_leaf(module):
            return True
        self._observe(module, args, kwargs)
        reason = self._why_kept(module)
        if reason:
            self.opaque[module] = reason
        return reason is not None

    def _why_kept(self, module: nn.Module) -> str | None:
        if has_hooks(module):
            return _facts.A_HOOK
        if "forward" in vars(module):
            return _facts.OWN_FORWARD
        if class_of(module).__call__ is not nn.Module.__call__:
            return "its class says itself how it is called"
        if class_of(module).__getattribute__ is not object.__getattribute__:
            return "its class says itself how attributes are read"
        return None if self.inline(module) else ""

    def _trace_through(self, shadow: Shadow, path: str, args: Any, kwargs: Any) -> Any:
        self.call_count += 1
        self.calls.append((self.call_count, path))
        try:
            with raised():
                result = class_of(shadow.module).forward(shadow.object, *args, **kwargs)
        finally:
            self.calls.pop()
        self.inlined[path] = shadow.module
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


def _take_out(holder: Any, value: Any) -> None:
    if isinstance(holder, list):
        holder[:] = [item for item in holder if item is not value]
    elif isinstance(holder, dict) and not isinstance(holder.get("__name__"), str):
        for key in [key for key, item in holder.items() if item is value]:
            del holder[key]
