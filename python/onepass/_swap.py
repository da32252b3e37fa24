"""Installing a rewritten forward by swapping a module's class; guards run the original where they must."""

from __future__ import annotations

import abc
import copy
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from onepass import _fallback
from onepass._conditions import Code
from onepass._facts import Fact, Outside, Untouched
from onepass._fallback import Site
from onepass._rewrite import Call, compile_once
from onepass._shadow import class_of
from onepass._trace import Pattern, is_variadic, parameters_of
from onepass._watch import Watch

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_PLAIN = (Tensor, nn.Parameter, FakeTensor)
_MOST_TRACES = 4  # of one module after changes: one that changes at each call would be traced at each


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why the original forward runs; a lasting change, or something that may go again, as a hook."""

    text: str
    changed: bool = False


@dataclasses.dataclass
class Variant:
    """One rewritten forward: for a mode and a way of calling it, while its facts hold."""

    training: bool
    pattern: Pattern
    function: Callable[..., Any]
    calls: list[Call]
    facts: list[Fact]
    outside: list[Outside]
    watch: Watch
    number: int  # among all that the module ever had
    holds: Callable[[nn.Module], bool] | None = None  # says whether the facts do

    def why_not(self, root: nn.Module) -> Reason | None:
        """Which fact does not hold."""
        for fact in self.facts:
            try:
                module = root.get_submodule(fact.path)
                reason, changed = fact.why(module, root), fact.is_change(module)
            except AttributeError:
                reason, changed = "the module was removed after fusing", True
            if reason is not None:
                return Reason(f"{fact.path or 'the module'}: {reason}", changed)
        for name in (*self.outside, _untouched(root)):
            if (reason := name.why()) is not None:
                return Reason(reason, True)
        reason = self.watch.why(root)
        return None if reason is None else Reason(f"the module: {reason}", True)


@dataclasses.dataclass(eq=False)
class State:
    """What a fused module holds besides its class."""

    name: str
    original: type
    options: dict[str, Any]
    variants: list[Variant]
    inlined: list[str]  # the paths of modules whose code is part of the rewritten forward
    site: Site
    forward: Callable[..., Any]
    calls: list[Call]  # by their numbers
    watches: list[Watch]  # by the variants' numbers
    traces: int = 0  # after changes
    waits: bool = False  # for its first trace: it was loaded before the modules it holds were whole

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        """For a copy of the module, which runs the same code. Nothing is traced again."""
        said: set[str] = set()
        renewed = {id(call): call.renewed(said) for call in self.calls}
        watches = [copy.deepcopy(watch, memo) for watch in self.watches]
        variants = [
            dataclasses.replace(
                variant, calls=[renewed[id(call)] for call in variant.calls], watch=watches[variant.number]
            )
            for variant in self.variants
        ]
        return dataclasses.replace(
            self,
            variants=variants,
            site=Site(self.site.name, said, self.site.numerics),
            calls=list(renewed.values()),
            watches=watches,
            traces=0,
        )


def state_of(module: nn.Module) -> State | None:
    """The state of a fused module."""
    return vars(module).get("_onepass")


def defer(module: nn.Module, name: str, options: dict[str, Any]) -> None:
    """Lets a module that cannot be traced yet be traced when it is first called or reported on."""
    original, site = type(module), Site(name or f"({type(module).__name__})", numerics=options["numerics"])
    forward = generate(name, original, [])
    install(module, State(name, original, options, [], [], site, forward, [], [], waits=True))


def settle(module: nn.Module) -> None:
    """Traces a module that waits for it."""
    from onepass.fuse import fuse_one  # here, for fuse imports this module

    with _lock:
        state = state_of(module)
        if state is not None and state.waits:
            uninstall(module)
            fuse_one(module, state.name, **state.options)


def why_not_swappable(module: nn.Module) -> str | None:
    """Why a module's class cannot be swapped."""
    cls = type(module)
    if "forward" in vars(module):
        return "its forward is set on the object"
    own = "_onepass_original" not in vars(cls)
    reduces = cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__
    if own and reduces:
        return "its class says itself how it is pickled"
    if "__slots__" in vars(cls) and own:
        return "its class has slots"
    return None


# --- One class for each class that is fused -----------------------------------------------------------------


class _Silent(nn.Module):
    """Keeps __init_subclass__ of a user's class from being called for the class made here."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


_classes: weakref.WeakValueDictionary[tuple[int, int], type] = weakref.WeakValueDictionary()
_lock = threading.RLock()


def fused_class(cls: type) -> type:
    """The class that fused modules of a class have: one, unknown to its metaclass and registries."""
    with _lock:
        key = (id(cls), id(cls.forward))
        found = _classes.get(key)
        if found is None or found._onepass_original is not cls:
            found = _classes[key] = _make_class(cls)
        return found


def _make_class(cls: type) -> type:
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_onepass": None,
        "_onepass_original": cls,
        "forward": _entry(cls),
        "__reduce_ex__": _reduce,
        "__copy__": _copy,
        "__deepcopy__": _deepcopy,
        "__prepare_scriptable__": _prepare_scriptable,
    }
    for name in ("__copy__", "__deepcopy__"):
        if hasattr(cls, name):
            del body[name]
    meta = type(cls)
    make = abc.ABCMeta.__new__ if issubclass(meta, abc.ABCMeta) else type.__new__
    made = make(meta, cls.__name__, (_Silent, cls), body)
    made._onepass_names = len(vars(made)) + 1
    return made


def install(module: nn.Module, state: State) -> None:
    """Gives the module the class of fused modules, whose forward runs the variants."""
    vars(module)["_onepass"] = state
    module.__class__ = fused_class(state.original)


def uninstall(module: nn.Module) -> None:
    """Gives the module its class back."""
    vars(module).pop("_onepass", None)
    if "_onepass_original" in vars(type(module)):
        module.__class__ = type(module)._onepass_original


# --- The forward --------------------------------------------------------------------------------------------


def _prefix(parameters: Iterable[Any]) -> str:
    """What no name of the user's begins with."""
    prefix = "onepass_"
    names = [parameter.name for parameter in parameters]
    while any(name.startswith(prefix) for name in names):
        prefix = f"_{prefix}"
    return prefix


def _entry(cls: type) -> Callable[..., Any]:
    """The forward of the class of fused modules: that of the module's state, or the original.

    Arguments are bound by what it calls: the class's forward may be replaced by one with others.
    """
    lines = [
        "def forward(self, /, *args, **kwargs):",
        "    state = self._onepass",
        "    if state is not None:",
        "        if cls.forward is original and original.__code__ is code:",
        "            return state.forward(self, *args, **kwargs)",
        "        if not is_compiling():",
        "            note(self, {})",
        "    return cls.forward(self, *args, **kwargs)",
        "",
    ]
    constants = {
        "cls": cls,
        "original": cls.forward,
        "code": getattr(cls.forward, "__code__", None),
        "note": _note,
        "is_compiling": torch.compiler.is_compiling,
    }
    if constants["code"] is None:
        lines[3] = "        if cls.forward is original:"
    forward = compile_once("\n".join(lines), constants, cls.__name__, "forward")
    for name in ("__doc__", "__annotations__", "__module__", "__qualname__", "__wrapped__"):
        value = cls.forward if name == "__wrapped__" else getattr(cls.forward, name, None)
        setattr(forward, name, value)
    return forward


def generate(name: str, original: type, variants: list[Variant]) -> Callable[..., Any]:
    """The forward of a state: the variant for mode and arguments whose facts hold, or the original."""
    parameters = parameters_of(original)
    p = _prefix(parameters)
    constants: dict[str, Any] = {
        f"{p}class": original,
        f"{p}note": _note,
        f"{p}plain": _PLAIN,
        f"{p}type": type,
        f"{p}is_compiling": torch.compiler.is_compiling,
        f"{p}transforming": _fallback.transforming,
        f"{p}tracing": _fallback.tracing,
        f"{p}forward_ad": forward_ad,
    }
    constants |= {f"{p}{hooks}": getattr(torch.nn.modules.module, hooks) for hooks in _GLOBAL_HOOKS}
    signature, arguments = _signature(parameters, p, constants)
    guards = [f"not {parameter.name}" for parameter in parameters if is_variadic(parameter)]
    guards += [f"not {p}{hooks}" for hooks in _GLOBAL_HOOKS]
    guards += [f"not {p}transforming()", f"{p}forward_ad._current_level < 0", f"not {p}tracing()"]
    lines = [f"def forward({p}self{signature}):", f"    if {' and '.join(guards)}:"]
    lines += [] if variants else ["        pass"]
    for i, variant in enumerate(variants):
        lines += [f"        {line}" for line in _branch(parameters, i, variant, p, constants)]
    given = "{" + ", ".join(f"{q.name!r}: {q.name}" for q in parameters) + "}"
    lines += [
        f"    if not {p}is_compiling():",
        f"        {p}note({p}self, {given})",
        f"    return {p}class.forward({p}self{arguments})",
        "",
    ]
    return compile_once("\n".join(lines), constants, name or "model", "forward")


def _signature(parameters: list[Any], prefix: str, constants: dict[str, Any]) -> tuple[str, str]:
    """The parameters as written in a def, and as passed on to the original forward."""
    written, passed = [], []
    kinds = [parameter.kind for parameter in parameters]
    for i, parameter in enumerate(parameters):
        name = parameter.name
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY:
            if not {parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY} & set(kinds[:i]):
                written.append("*")
            passed.append(f"{name}={name}")
        else:
            passed.append(star + name)
        default = ""
        if parameter.default is not parameter.empty:
            constants[f"{prefix}default_{name}"] = parameter.default
            default = f"={prefix}default_{name}"
        written.append(star + name + default)
        positional_only_ends = i + 1 == len(kinds) or kinds[i + 1] is not parameter.POSITIONAL_ONLY
        if parameter.kind is parameter.POSITIONAL_ONLY and positional_only_ends:
            written.append("/")
    return "".join(f", {text}" for text in written), "".join(f", {text}" for text in passed)


def _branch(
    parameters: list[Any], number: int, variant: Variant, p: str, constants: dict[str, Any]
) -> list[str]:
    constants[f"{p}variant{number}"] = variant.function
    constants[f"{p}holds{number}"] = variant.holds
    tensors = variant.pattern.tensors([q.name for q in parameters if not is_variadic(q)])
    conditions = [f"{p}self.training" if variant.training else f"not {p}self.training"]
    conditions += [f"{p}type({name}) in {p}plain" for name in tensors]
    code = Code(f"{p}v{number}_", None)
    for name, value in variant.pattern.constants:
        if type(value) is str:
            conditions.append(f"{p}type({name}) is {code.constant(str)}")
        code.conditions.clear()
        code.is_value(name, value)
        conditions += code.texts()
    constants |= code.constants
    passed = "".join(f", {name}" for name in tensors)
    return [
        f"if {' and '.join(conditions)} and {p}holds{number}({p}self):",
        f"    return {p}variant{number}({p}self, {p}self{passed})",
    ]


def holds(module: nn.Module, variant: Variant) -> Callable[[nn.Module], bool]:
    """A function that says whether the variant's facts hold, which they do now."""
    p = "onepass_"
    outside, code = Code(p, module), Code(p, module)
    for name in variant.outside:
        name.condition(code if name.is_setting else outside)
    _untouched(module).condition(outside)
    for fact in variant.facts:
        fact.condition(code)
    constants = dict(code.constants)
    if outside.conditions:
        text = "".join(f"    {line}\n" for line in outside.lines())
        function = compile_once(f"def outside():\n{text}", outside.constants, "names outside", "outside")
        constants[f"{p}outside"] = torch._dynamo.assume_constant_result(function)
        code.add(f"{p}outside()")
    if variant.watch:
        constants[f"{p}is_compiling"] = torch.compiler.is_compiling
        code.add(f"not {p}is_compiling()")
        code.add(f"{p}self._onepass.watches[{variant.number}].holds({p}self)")
    lines = [
        f"def holds({p}self):",
        "    try:",
        *(f"        {line}" for line in code.lines()),
        "    except (AttributeError, KeyError, TypeError, ValueError):",
        "        return False",
        "",
    ]
    return compile_once("\n".join(lines), constants, "facts", "holds")


def _untouched(module: nn.Module) -> Untouched:
    cls = fused_class(class_of(module))
    return Untouched(cls, cls._onepass_names)


def why_original(module: nn.Module, state: State) -> Reason | None:
    """Why a call of the module now would run the original forward, whatever its arguments."""
    if any(getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS):
        return Reason("a hook on all modules is registered; remove it to run fused")
    variants = [variant for variant in state.variants if variant.training is module.training]
    if not variants:
        return Reason(f"nothing fuses in {'training' if module.training else 'evaluation'} mode")
    reasons = [variant.why_not(module) for variant in variants]
    return None if None in reasons else reasons[0]


def _note(module: nn.Module, arguments: dict[str, Any]) -> None:
    """Counts a call that runs the original forward; after a lasting change the module is traced again."""
    state = state_of(module)
    if state is None:
        return
    if state.waits:
        settle(module)
        return
    transformed = _fallback.why_transformed()
    reason = why_original(module, state)
    again = reason is not None and reason.changed and transformed is None and state.traces < _MOST_TRACES
    text = transformed if reason is None else reason.text
    if text is None:
        kinds = ", ".join(f"{name}: {_kind(value)}" for name, value in arguments.items())
        text = f"called in a way that was not traced ({kinds})"
    _fallback.left(state.site, _fallback.ORIGINAL, f"{text}; it is traced again" if again else text)
    if again:
        from onepass.fuse import fuse_again  # here, for fuse imports this module

        with _lock:
            if state_of(module) is state:
                fuse_again(module, state)


def _kind(value: Any) -> str:
    """No number: a call with another one is no other reason."""
    return str(value) if value is None or isinstance(value, bool) else type(value).__name__


# --- Copies -------------------------------------------------------------------------------------------------


def _copy(self: nn.Module) -> Any:
    """As copy.copy does for a class without a method of its own."""
    return copy._reconstruct(self, None, *object.__reduce_ex__(self, 4))


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> Any:
    """As copy.deepcopy does for a class without a method of its own; the state copies itself."""
    return copy._reconstruct(self, memo, *object.__reduce_ex__(self, 4))


def _reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Pickles as the original class with the options of fusing: what is loaded fuses itself."""
    state = state_of(self)
    values = object.__reduce_ex__(self, 2)[2]
    if isinstance(values, dict):
        values = {name: value for name, value in values.items() if name != "_onepass"}
    original = type(self)._onepass_original
    if state is None:
        return _new, (original,), values
    return _new_fused, (original, state.name, state.options), values


def _new(cls: type) -> Any:
    return cls.__new__(cls)


def _new_fused(cls: type, name: str, options: dict[str, Any]) -> nn.Module:
    """An empty module that fuses itself once its contents are set."""

    def set_state(self: nn.Module, values: Any) -> None:
        self.__class__ = cls
        self.__setstate__(values)
        from onepass.fuse import fuse_one  # here, for fuse imports this module

        try:
            fuse_one(self, name, **options)
        except Exception:  # part of it is still to come, as where a child refers to its parent
            defer(self, name, options)

    make = abc.ABCMeta.__new__ if issubclass(type(cls), abc.ABCMeta) else type.__new__
    loading = make(type(cls), cls.__name__, (_Silent, cls), {"__setstate__": set_state})
    return loading.__new__(loading)


def _prepare_scriptable(self: nn.Module) -> Any:
    raise RuntimeError(
        f"torch.jit.script cannot compile the fused {type(self).__name__}: call onepass.unfuse(model) first"
    )
