"""Swapping the class of a fused module: its forward runs the variants, and a change traces it again."""

from __future__ import annotations

import abc
import copy
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from onepass import _fallback, _library
from onepass._dispatch import finder, generate
from onepass._facts import Fact, Typed, Untouched, is_replica
from onepass._fallback import Site
from onepass._refused import Refused
from onepass._rewrite import compile_once
from onepass._rewriter import Rewriter
from onepass._shadow import class_of, shared_classes
from onepass._state import State, nothing_fuses, root_name, sites_of, state_of, why_original
from onepass._trace import Pattern, call_patterns
from onepass.compiling import is_compiling_here

_MOST_TRACES = 4  # of one module after changes: one that changes at each call would be traced at each
_lock = threading.RLock()


def install(rewriter: Rewriter, traces: int = 0) -> None:
    """Swaps the class of the rewriter's module if anything is fused."""
    if not rewriter.variants:
        return
    module, original = rewriter.module, class_of(rewriter.module)
    cls = fused_class(original)
    for variant in rewriter.variants:
        if variant.find is None:
            variant.facts = [_retyped(fact, module) for fact in variant.facts]
            variant.outside.append(cls._onepass_untouched)
            variant.find = finder(module, variant)
    state = State(
        rewriter.name,
        original,
        {"conv": rewriter.conv, "patterns": rewriter.patterns, "numerics": rewriter.site.numerics},
        rewriter.variants,
        list(rewriter.inlined),
        rewriter.site,
        generate(rewriter.name, original, rewriter.variants, _note, _note_mode),
        rewriter.calls,
        rewriter.watches,
        traces,
    )
    _set_state(module, state)


def _retyped(fact: Fact, root: nn.Module) -> Fact:
    """A class may have been swapped since the trace, by fusing."""
    if not isinstance(fact, Typed):
        return fact
    return dataclasses.replace(fact, type=type(root.get_submodule(fact.path)))


def _set_state(module: nn.Module, state: State) -> None:
    state.owner = weakref.ref(module)
    vars(module)["_onepass"] = state
    module.__class__ = fused_class(state.original)


def uninstall(module: nn.Module) -> None:
    """Gives the module its class back."""
    vars(module).pop("_onepass", None)
    if "_onepass_original" in vars(type(module)):
        module.__class__ = type(module)._onepass_original


def settle(module: nn.Module) -> None:
    """Traces a module that waits for it."""
    with _lock:
        state = state_of(module)
        if state is not None and state.waits:
            uninstall(module)
            _fuse_one(module, state.name, **state.options)


def _defer(module: nn.Module, name: str, options: dict[str, Any]) -> None:
    """Lets a module that cannot be traced yet be traced when it is first called or reported on."""
    original, site = type(module), Site(name or root_name(module), numerics=options["numerics"])
    forward = generate(name, original, [], _note, _note_mode)
    _set_state(module, State(name, original, options, [], [], site, forward, [], [], waits=True))


def _fuse_one(
    module: nn.Module, name: str, conv: str, patterns: Iterable[Pattern], numerics: str | None = None
) -> None:
    """Fuses the chains of one module's own forward."""
    if not _library.available():
        reason = _library.unavailable_reason()
        _fallback.warn(f"a fused model is loaded unfused: onepass cannot run: {reason}")
        return
    rewriter = Rewriter(module, name, conv, numerics)
    try:
        with shared_classes():
            rewriter.run(patterns)
    except Refused as refused:
        _fallback.warn(f"{rewriter.site.name} is fused no more: {refused}")
        return
    install(rewriter)


def _fuse_again(module: nn.Module, state: State) -> None:
    """Fuses a module anew after something that its forward reads was changed.

    Its counts go on, and what was fused before runs again if the change is undone.
    """
    state.traces += 1
    _drop_packed(module)
    rewriter = Rewriter(module, state.name, state.options["conv"], state.options["numerics"])
    rewriter.site = state.site
    rewriter.calls, rewriter.watches = list(state.calls), list(state.watches)
    try:
        with shared_classes():
            rewriter.run([*call_patterns(module), *state.options["patterns"]])
    except Refused:
        return
    if rewriter.variants:
        rewriter.variants += state.variants
        install(rewriter, state.traces)


# --- One class for each class that is fused -----------------------------------------------------------------


class _Silent(nn.Module):
    """Keeps __init_subclass__ of a user's class from being called for the class made here."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


_classes: weakref.WeakValueDictionary[tuple[int, int], type] = weakref.WeakValueDictionary()


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
        "extra_repr": _extra_repr,
        "_apply": _apply,
        "_load_from_state_dict": _load_from_state_dict,
    }
    for name in ("__copy__", "__deepcopy__"):
        if hasattr(cls, name):
            del body[name]
    meta = type(cls)
    make = abc.ABCMeta.__new__ if issubclass(meta, abc.ABCMeta) else type.__new__
    made = make(meta, cls.__name__, (_Silent, cls), body)
    made._onepass_untouched = Untouched(made, vars(made), len(vars(made)) + 1)
    return made


def _extra_repr(self: nn.Module) -> str:
    """What the class says of itself, then a line for each block, so that print(model) shows what is fused."""
    own = type(self)._onepass_original.extra_repr(self)
    state = state_of(self)
    if state is None:
        return own
    blocks = dict.fromkeys(
        f"(fused: {', '.join(call.modules)}): {call.block}" if call.modules else f"(fused): {call.block}"
        for variant in state.variants
        for call in variant.calls
    )
    waiting = ["(fused when it is first called)"] if state.waits else []
    return "\n".join(line for line in (own, *waiting, *blocks) if line)


def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """As the class does; packed weights are of the parameters before. What sees their changes refers to them
    weakly, and PyTorch swaps no such tensor: it goes first.
    """
    _drop_packed(self)
    type(self)._onepass_original._apply(self, *args, **kwargs)
    _drop_packed(self)
    return self


def _load_from_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    _drop_packed(self)
    type(self)._onepass_original._load_from_state_dict(self, *args, **kwargs)
    _drop_packed(self)


def _expect_change(module: nn.Module) -> None:
    """Before a call of the original forward, which may train the weights."""
    for site in sites_of(module):
        if site.frozen is not None:
            site.frozen.expect_change()


def _drop_packed(module: nn.Module) -> None:
    for site in sites_of(module):
        if site.frozen is not None:
            site.frozen.drop()


# --- The forward --------------------------------------------------------------------------------------------


def _entry(cls: type) -> Callable[..., Any]:
    """The forward of the class of fused modules: that of the module's state, or the original.

    Arguments are bound by what it calls: the class's forward may be replaced by one with others.
    """
    lines = [
        "def forward(self, /, *args, **kwargs):",
        "    state = self._onepass",
        "    if state is not None and not (is_compiling() and is_compiling_here()):",
        "        if cls.forward is original and original.__code__ is code:",
        "            if len(args) == 1 and not kwargs:",  # the usual call, in half the time
        "                return state.forward(self, args[0])",
        "            return state.forward(self, *args, **kwargs)",
        "        if not is_compiling():",
        "            note_replaced(self)",
        "    return cls.forward(self, *args, **kwargs)",
        "",
    ]
    constants = {
        "cls": cls,
        "original": cls.forward,
        "code": getattr(cls.forward, "__code__", None),
        "note_replaced": _note_replaced,
        "is_compiling": torch.compiler.is_compiling,
        "is_compiling_here": is_compiling_here,
    }
    if constants["code"] is None:
        lines[3] = "        if cls.forward is original:"
    forward = compile_once("\n".join(lines), constants, cls.__name__, "forward")
    for name in ("__doc__", "__annotations__", "__module__", "__qualname__", "__wrapped__"):
        value = cls.forward if name == "__wrapped__" else getattr(cls.forward, name, None)
        setattr(forward, name, value)
    return forward


def _note(module: nn.Module, arguments: dict[str, Any]) -> Callable[..., Any] | None:
    """Counts a call that runs the original forward; after a lasting change the module is traced again.

    Returns the forward that a replica of torch.nn.DataParallel runs instead.
    """
    state = state_of(module)
    if state is None:
        return None
    if state.waits:
        settle(state.owner() or module)
        return None
    _expect_change(module)
    if is_replica(module) and not state.of_replica:
        return _share_with(module, state)
    transformed = _fallback.why_transformed()
    reason = why_original(module, state)
    source = None
    if reason is not None and reason.changed and transformed is None:
        source = _traceable(module, state)
    text = transformed if reason is None else reason.text
    if text is None:
        kinds = ", ".join(f"{name}: {_kind(value)}" for name, value in arguments.items())
        text = f"called in a way that was not traced ({kinds})"
    _fallback.left(state.site, _fallback.ORIGINAL, f"{text}; it is traced again" if source else text)
    if source is not None:
        with _lock:
            if (now := _traceable(module, state)) is not None:
                _fuse_again(*now)
    return None


def _note_mode(module: nn.Module) -> bool:
    """Counts a call in a mode in which nothing fuses, in a tenth of what _note takes: it may be a training's.

    False for a replica that does not have the state of replicas yet.
    """
    state = state_of(module)
    if state is None or (is_replica(module) and not state.of_replica):
        return False
    _expect_change(module)
    _fallback.left(state.site, _fallback.ORIGINAL, nothing_fuses(module))
    return True


def _note_replaced(module: nn.Module) -> None:
    """Notes a call of a module whose class has another forward now."""
    state = state_of(module)
    if state is not None and is_replica(module) and not state.of_replica:
        _share_with(module, state)
    _note(module, {})


def _traceable(module: nn.Module, state: State) -> tuple[nn.Module, State] | None:
    """The module to trace after a change, with its state: a replica's is the one it was made of."""
    if state.of_replica:
        owner = state.owner()
        own = None if owner is None else state_of(owner)
        if own is None or own.replicas is not state:
            return None
        module, state = owner, own
        reason = why_original(module, state)
        if reason is None or not reason.changed:
            return None
    return (module, state) if state_of(module) is state and state.traces < _MOST_TRACES else None


def _share_with(replica: nn.Module, state: State) -> Callable[..., Any]:
    """Lets a replica run the code of its module while the facts hold for the replica's own values."""
    with _lock:
        if state.replicas is None:
            variants = [
                dataclasses.replace(variant, find=finder(replica, variant, of_replica=True))
                for variant in state.variants
            ]
            forward = generate(state.name, state.original, variants, _note, _note_mode)
            state.replicas = dataclasses.replace(state, variants=variants, forward=forward, of_replica=True)
    vars(replica)["_onepass"] = state.replicas
    return state.replicas.forward


def _kind(value: Any) -> str:
    """No number: a call with another one is no other reason."""
    return str(value) if value is None or isinstance(value, bool) else type(value).__name__


# --- Copies -------------------------------------------------------------------------------------------------


def _copy(self: nn.Module) -> Any:
    """As copy.copy does for a class without a method of its own."""
    return copy._reconstruct(self, None, *object.__reduce_ex__(self, 4))


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> Any:
    """As copy.deepcopy does for a class without a method of its own; the state copies itself."""
    twin = copy._reconstruct(self, memo, *object.__reduce_ex__(self, 4))
    if (state := state_of(twin)) is not None:
        state.owner = weakref.ref(twin)
    return twin


def _reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Pickles as the original class with the options of fusing: what is loaded fuses itself."""
    state = state_of(self)
    values = object.__reduce_ex__(self, 2)[2]
    if isinstance(values, dict):
        values = {name: value for name, value in values.items() if name != "_onepass"}
    original = type(self)._onepass_original
    if state is None:
        return new, (original,), values
    return new_fused, (original, state.name, state.options), values


def new(cls: type) -> Any:
    """An empty module of the class."""
    return cls.__new__(cls)


def new_fused(cls: type, name: str, options: dict[str, Any]) -> nn.Module:
    """An empty module that fuses itself once its contents are set."""

    def set_state(self: nn.Module, values: Any) -> None:
        self.__class__ = cls
        self.__setstate__(values)
        try:
            _fuse_one(self, name, **options)
        except Exception:  # part of it is still to come, as where a child refers to its parent
            _defer(self, name, options)

    make = abc.ABCMeta.__new__ if issubclass(type(cls), abc.ABCMeta) else type.__new__
    loading = make(type(cls), cls.__name__, (_Silent, cls), {"__setstate__": set_state})
    return loading.__new__(loading)


# Pickles name this module, so that the error says what to do where onepass is not installed.
new.__module__ = new_fused.__module__ = "onepass_unfuse_before_saving"


def _prepare_scriptable(self: nn.Module) -> Any:
    raise RuntimeError(
        f"torch.jit.script cannot compile the fused {type(self).__name__}: call onepass.unfuse(model) first"
    )
