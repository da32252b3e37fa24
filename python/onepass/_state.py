"""What fusing keeps of a module: its rewritten forwards, and why the original runs instead."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onepass._facts import Fact, Outside, Untouched
from onepass._fallback import Site
from onepass._rewrite import Call
from onepass._stage import Attribute
from onepass._trace import Pattern
from onepass._watch import Watch

GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)

skipped_reasons: weakref.WeakKeyDictionary[nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()


def root_name(model: nn.Module) -> str:
    """What a report calls the model itself."""
    return f"({type(model).__name__})"


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
    function: Callable[..., Any]  # of the module, what it is called with, and the tensors
    tensors: list[Attribute]  # the parameters that it takes, which `find` finds
    calls: list[Call]
    facts: list[Fact]
    outside: list[Outside | Untouched]
    watch: Watch
    number: int  # among all that the module ever had
    find: Callable[[nn.Module], tuple[Any, ...] | None] | None = None  # None where a fact does not hold
    types: dict[str, type] = dataclasses.field(default_factory=dict)  # of the modules that it reads, by path

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
        for name in self.outside:
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
    owner: weakref.ref[nn.Module] | None = None
    replicas: State | None = None  # what torch.nn.DataParallel's replicas of the module have instead
    of_replica: bool = False

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
            owner=None,
            replicas=None,
        )


def state_of(module: nn.Module) -> State | None:
    """The state of a fused module."""
    return vars(module).get("_onepass")


def sites_of(module: nn.Module) -> list[Site]:
    """That of the module's own calls, and those of its chains."""
    state = state_of(module)
    return [] if state is None else [state.site, *(call.site for call in state.calls)]


def nothing_fuses(module: nn.Module) -> str:
    """Why a module without a variant for its mode runs its original forward."""
    return f"nothing fuses in {'training' if module.training else 'evaluation'} mode"


def why_original(module: nn.Module, state: State) -> Reason | None:
    """Why a call of the module now would run the original forward, whatever its arguments."""
    if any(getattr(torch.nn.modules.module, name) for name in GLOBAL_HOOKS):
        return Reason("a hook on all modules is registered; remove it to run fused")
    variants = [variant for variant in state.variants if variant.training is module.training]
    if not variants:
        return Reason(nothing_fuses(module))
    reasons = [variant.why_not(module) for variant in variants]
    return None if None in reasons else reasons[0]
