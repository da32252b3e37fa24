"""Installing a rewritten forward by swapping a module's class; guards run the original where they must."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from onepass import _fallback
from onepass._fallback import Site
from onepass._rewrite import Call
from onepass._trace import HOOK_DICTS, Pattern, is_variadic, parameters_of

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_AGAIN = "call onepass.fuse(model) again"
_PLAIN = (Tensor, nn.Parameter, FakeTensor)


@dataclasses.dataclass
class Variant:
    """One rewritten forward: for a mode and a way of calling it."""

    training: bool
    pattern: Pattern
    function: Callable[..., Any]
    calls: list[Call]


@dataclasses.dataclass(frozen=True)
class Watched:
    """A module whose own call the rewritten forwards leave out, and what must hold for that."""

    path: str
    module: nn.Module
    type: type
    follows_mode: bool  # its code may depend on its training flag
    flags: dict[str, Any]


@dataclasses.dataclass(eq=False)
class State:
    """What a fused module holds besides its class."""

    name: str
    original: type
    options: dict[str, Any]
    variants: list[Variant]
    watched: list[Watched]
    inlined: list[nn.Module]
    site: Site
    modules: tuple[nn.Module, ...] = ()


def state_of(module: nn.Module) -> State | None:
    """The state of a fused module."""
    return vars(module).get("_onepass")


def why_not_swappable(module: nn.Module) -> str | None:
    """Why a module's class cannot be swapped."""
    cls = type(module)
    if "forward" in vars(module):
        return "its forward is set on the object"
    if cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__:
        return "its class says itself how it is pickled"
    if "__slots__" in vars(cls):
        return "its class has slots"
    return None


def install(module: nn.Module, state: State) -> None:
    """Gives the module a class of its own whose forward runs the variants."""
    state.modules = tuple(watched.module for watched in state.watched)
    body = {
        "forward": _forward(module, state),
        "_onepass": None,
        "__module__": state.original.__module__,
        "__qualname__": state.original.__qualname__,
        "__doc__": state.original.__doc__,
        "__reduce_ex__": _reduce,
    }
    module.__class__ = type(state.original.__name__, (state.original,), body)
    vars(module)["_onepass"] = state


def uninstall(module: nn.Module) -> None:
    """Gives the module its class back."""
    state = vars(module).pop("_onepass", None)
    if state is not None and "_onepass" in vars(type(module)):
        module.__class__ = state.original


def why_original(module: nn.Module, state: State) -> str | None:
    """Why a call of the module now would run the original forward, whatever its arguments."""
    if any(getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS):
        return "a hook on all modules is registered; remove it to run fused"
    for watched in state.watched:
        reason = _why_changed(module, watched)
        if reason is not None:
            return f"{watched.path or 'the module'}: {reason}"
    if not any(variant.training is module.training for variant in state.variants):
        return f"nothing fuses in {'training' if module.training else 'evaluation'} mode"
    return None


def _why_changed(root: nn.Module, watched: Watched) -> str | None:
    module = watched.module
    try:
        found = root.get_submodule(watched.path)
    except AttributeError:
        found = None
    if found is not module:
        return f"the module was replaced after fusing; {_AGAIN}"
    if watched.path and type(module) is not watched.type:
        return f"its class is now {type(module).__name__}; {_AGAIN}"
    if watched.path and any(getattr(module, name) for name in HOOK_DICTS):
        return "a hook is on it; remove it to run fused"
    if watched.path and "forward" in vars(module):
        return "its forward is set on the object; delete it to run fused"
    if watched.follows_mode and module.training is not root.training:
        return "its training flag differs from its parent's; call train() or eval() of the parent"
    changed = [name for name, value in watched.flags.items() if getattr(module, name, None) != value]
    return f"its attribute {changed[0]} was changed after fusing; {_AGAIN}" if changed else None


# --- The forward --------------------------------------------------------------------------------------------


def _forward(module: nn.Module, state: State) -> Callable[..., Any]:
    """Generates the forward: one `if` over the guards, then the variant for the mode and the arguments."""
    namespace: dict[str, Any] = {
        "original": state.original.forward,
        "note": _note,
        "plain": _PLAIN,
        "is_compiling": torch.compiler.is_compiling,
        "transforming": _fallback.transforming,
        "tracing": _fallback.tracing,
        "forward_ad": forward_ad,
    }
    namespace |= {name: getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS}
    signature, arguments = _signature(module, namespace)
    guards = _guards(module, state, namespace)
    lines = [f"def forward(self{signature}):", "    fused = self._onepass", "    if fused is not None:"]
    lines += [f"        ({''.join(f'm{i}, ' for i in range(len(state.watched)))}) = fused.modules"]
    lines += [
        "        training = self.training",
        "        if (",
        *(f"            {guard}" for guard in guards),
        "        ):",
    ]
    lines += [
        f"            {line}"
        for i, variant in enumerate(state.variants)
        for line in _branch(module, i, variant, namespace)
    ]
    lines += ["        if not is_compiling():", f"            note(self, fused, {_given(module)})"]
    lines += [f"    return original(self{arguments})"]
    exec(compile("\n".join(lines), f"<onepass {state.name or 'model'}>", "exec"), namespace)
    forward = namespace["forward"]
    for name in ("__doc__", "__annotations__", "__module__", "__qualname__"):
        setattr(forward, name, getattr(state.original.forward, name, None))
    return forward


def _signature(module: nn.Module, namespace: dict[str, Any]) -> tuple[str, str]:
    """The parameters as written in a def, and as passed on to the original forward."""
    written, passed = [], []
    parameters = parameters_of(module)
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
            namespace[f"default_{name}"] = parameter.default
            default = f"=default_{name}"
        written.append(star + name + default)
        positional_only_ends = i + 1 == len(kinds) or kinds[i + 1] is not parameter.POSITIONAL_ONLY
        if parameter.kind is parameter.POSITIONAL_ONLY and positional_only_ends:
            written.append("/")
    return "".join(f", {text}" for text in written), "".join(f", {text}" for text in passed)


def _guards(module: nn.Module, state: State, namespace: dict[str, Any]) -> list[str]:
    guards = [f"not {parameter.name}" for parameter in parameters_of(module) if is_variadic(parameter)]
    guards += [f"not {name}" for name in _GLOBAL_HOOKS] + ["not transforming()"]
    guards += ["forward_ad._current_level < 0", "not tracing()"]
    numbers = {watched.path: i for i, watched in enumerate(state.watched)}
    for i, watched in enumerate(state.watched):
        guards += _flag_guards(f"m{i}", watched.flags)
        if not watched.path:
            continue
        namespace[f"type{i}"] = watched.type
        parent, _, name = watched.path.rpartition(".")
        guards += [f"m{numbers[parent]}._modules.get({name!r}) is m{i}", f"type(m{i}) is type{i}"]
        guards += [f"not m{i}.{hooks}" for hooks in HOOK_DICTS]
        guards += [f"'forward' not in m{i}.__dict__"]
        guards += [f"m{i}.training is training"] if watched.follows_mode else []
    return [guards[0], *(f"and {guard}" for guard in guards[1:])]


def _flag_guards(name: str, flags: dict[str, Any]) -> list[str]:
    exact = (bool, type(None))
    return [
        f"{name}.{flag} {'is' if type(value) in exact else '=='} {value!r}" for flag, value in flags.items()
    ]


def _branch(module: nn.Module, number: int, variant: Variant, namespace: dict[str, Any]) -> list[str]:
    namespace[f"variant{number}"] = variant.function
    named = [parameter.name for parameter in parameters_of(module) if not is_variadic(parameter)]
    tensors = variant.pattern.tensors(named)
    conditions = ["training" if variant.training else "not training"]
    conditions += [f"type({name}) in plain" for name in tensors]
    for name, value in variant.pattern.constants:
        same = f"{name} is {value!r}" if value is None or type(value) is bool else f"{name} == {value!r}"
        conditions.append(
            same
            if type(value) in (bool, type(None))
            else f"type({name}) is {type(value).__name__} and {same}"
        )
    passed = "".join(f", {name}" for name in tensors)
    return [f"if {' and '.join(conditions)}:", f"    return variant{number}(self, self{passed})"]


def _given(module: nn.Module) -> str:
    names = [parameter.name for parameter in parameters_of(module)]
    return "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"


def _note(module: nn.Module, state: State, arguments: dict[str, Any]) -> None:
    """Counts a call that ran the original forward, with the reason."""
    reason = why_original(module, state) or _fallback.why_transformed()
    if reason is None:
        kinds = ", ".join(f"{name}: {_kind(value)}" for name, value in arguments.items())
        reason = f"called in a way that was not traced ({kinds})"
    _fallback.left(state.site, _fallback.ORIGINAL, reason)


def _kind(value: Any) -> str:
    """No number: a call with another one is no other reason."""
    return str(value) if value is None or isinstance(value, bool) else type(value).__name__


# --- Copies -------------------------------------------------------------------------------------------------


def _reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Pickles and copies as the original class with the options of fusing: the copy fuses itself."""
    state = state_of(self)
    values = object.__reduce_ex__(self, 2)[2]
    if isinstance(values, dict):
        values = {name: value for name, value in values.items() if name != "_onepass"}
    original = next(cls for cls in type(self).__mro__[1:] if "_onepass" not in vars(cls))
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

        fuse_one(self, name, **options)

    loading = type(cls.__name__, (cls,), {"__setstate__": set_state})
    return loading.__new__(loading)
