"""Fusing a model in place: every chain of stages that its modules' forwards compute runs as one block."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from onepass import _fallback, _library, _numerics, _swap
from onepass._facts import Fact, Outside, Typed
from onepass._fallback import Site
from onepass._match import Chain, Graph
from onepass._observe import globals_of
from onepass._refused import Refused
from onepass._rewrite import Call, compile_graph, rewrite
from onepass._shadow import class_of, shared_classes, user_classes
from onepass._stages import NORM_TYPES
from onepass._swap import State, Variant
from onepass._trace import Pattern, Trace, call_patterns, is_leaf, trace
from onepass._values import is_pure
from onepass._watch import Watch
from onepass.report import root_name, skipped_reasons

FilterFn = Callable[[str, nn.Module], bool]

_NORMS = (*NORM_TYPES, nn.modules.batchnorm._BatchNorm)


def fuse(
    model: nn.Module, *, conv: str = "fuse", filter_fn: FilterFn | None = None, numerics: str | None = None
) -> nn.Module:
    """Makes every matching chain of the model run as one block, in place, and returns the model.

    Parameters, names, order, state_dict, hooks and optimizers stay as they are. conv="keep" leaves
    convolutions to PyTorch and fuses what follows them. filter_fn(name, module) says whether a module's
    forward may be rewritten. `numerics` is "pytorch", "strict" or "fast" for this model's blocks, and what
    onepass.numerics() says unless given. A call that leaves the fused path warns once per module and reason
    with FallbackWarning, and onepass.report(model) counts it.
    """
    if conv not in ("fuse", "keep"):
        raise ValueError(f'conv is {conv!r}, must be "fuse" or "keep"')
    if numerics is not None:
        _numerics.checked(numerics)
    unfuse(model)
    reasons: dict[str, str] = {}
    skipped_reasons[model] = reasons
    if not _library.available():
        reasons[root_name(model)] = f"onepass cannot run: {_library.unavailable_reason()}"
        _fallback.warn(f"{root_name(model)} is not fused: {reasons[root_name(model)]}")
        return model
    with shared_classes():
        Session(model, conv, filter_fn or (lambda name, module: True), reasons, numerics=numerics).run()
    return model


def unfuse(model: nn.Module) -> nn.Module:
    """Gives every fused module of the model its own class back, and returns the model."""
    for module in model.modules():
        _swap.uninstall(module)
    skipped_reasons.pop(model, None)
    return model


def fuse_one(
    module: nn.Module, name: str, conv: str, patterns: Iterable[Pattern], numerics: str | None = None
) -> None:
    """Fuses the chains of one module's own forward; what is loaded from a file calls it."""
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
    rewriter.install()


def fuse_again(module: nn.Module, state: State) -> None:
    """Fuses a module anew after something that its forward reads was changed.

    Its counts go on, and what was fused before runs again if the change is undone.
    """
    state.traces += 1
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
        rewriter.install(state.traces)


class Session:
    """One run of fuse over a model, outer modules first: they show how the inner ones are called."""

    def __init__(
        self,
        model: nn.Module,
        conv: str,
        filter_fn: FilterFn,
        reasons: dict[str, str],
        rewriter: type[Rewriter] | None = None,
        numerics: str | None = None,
    ) -> None:
        self.rewriter = rewriter or Rewriter
        self.numerics = numerics
        self.model = model
        self.conv = conv
        self.filter_fn = filter_fn
        self.reasons = reasons
        self.observed: dict[nn.Module, set[Pattern]] = {}
        self.lonely: dict[nn.Module, str] = {}
        self.fused: set[nn.Module] = set()

    def rewriters(self) -> list[Rewriter]:
        """Those of the modules in whose forwards something fuses."""
        return [r for name, module in self.model.named_modules() if (r := self._analyse(name, module))]

    def run(self) -> None:
        """Fuses them all."""
        for rewriter in reversed(self.rewriters()):  # inner ones first: outer ones watch the classes
            rewriter.install()
            self.fused |= rewriter.replaced
        for name, module in self.model.named_modules():
            if isinstance(module, _NORMS) and module not in self.fused:
                self.reasons[name] = self.lonely.get(module, "it is called by a module that cannot be traced")

    def _analyse(self, name: str, module: nn.Module) -> Rewriter | None:
        if is_leaf(module):
            return None
        rewriter = self.rewriter(module, name, self.conv, self.numerics)
        try:
            rewriter.run([*call_patterns(module), *self.observed.get(module, ())])
        except Refused as refused:
            if type(module).forward is not nn.Module.forward and _has_norms(module):
                self.reasons[name or root_name(self.model)] = str(refused)
            return None
        finally:
            self._learn(rewriter)
        if not rewriter.variants:
            return None
        if not self.filter_fn(name, module):
            self.lonely.update(dict.fromkeys(rewriter.replaced, "filter_fn leaves its module out"))
            return None
        return rewriter

    def _learn(self, rewriter: Rewriter) -> None:
        for module, patterns in rewriter.observed.items():
            self.observed.setdefault(module, set()).update(patterns)
        self.lonely = rewriter.lonely | self.lonely


def _has_norms(module: nn.Module) -> bool:
    return any(isinstance(inner, _NORMS) for inner in module.modules())


class Rewriter:
    """Traces one module in both modes, finds the chains of its own forward and makes its variants."""

    def __init__(self, module: nn.Module, name: str, conv: str, numerics: str | None = None) -> None:
        self.module = module
        self.name = name
        self.conv = conv
        self.site = Site(name or root_name(module), numerics=numerics)
        self.patterns: list[Pattern] = []
        self.variants: list[Any] = []
        self.watched: dict[str, None] = {}  # paths of modules whose calls are left out, parents first
        self.calls: list[Call] = []  # of all variants, by their numbers
        self.watches: list[Watch] = []  # by the variants' numbers
        self.inlined: dict[str, nn.Module] = {}
        self.replaced: set[nn.Module] = set()
        self.observed: dict[nn.Module, set[Pattern]] = {}
        self.lonely: dict[nn.Module, str] = {}

    def run(self, patterns: Iterable[Pattern]) -> None:
        """Raises Refused where no way of calling the module can be traced."""
        self.patterns = list(dict.fromkeys(patterns))
        reason = _swap.why_not_swappable(self.module)
        if reason is not None:
            raise Refused(reason)
        refusals = [
            self._try(pattern, mode) for pattern, mode in itertools.product(self.patterns, (False, True))
        ]
        if refusals and None not in refusals:
            raise Refused(refusals[0])

    def install(self, traces: int = 0) -> None:
        """Swaps the module's class if anything is fused."""
        if not self.variants:
            return
        options = {"conv": self.conv, "patterns": self.patterns, "numerics": self.site.numerics}
        original = class_of(self.module)
        for variant in self.variants:
            if variant.holds is None:
                variant.facts = [self._retyped(fact) for fact in variant.facts]
                variant.holds = _swap.holds(self.module, variant)
        forward = _swap.generate(self.name, original, self.variants)
        state = State(
            self.name,
            original,
            options,
            self.variants,
            list(self.inlined),
            self.site,
            forward,
            self.calls,
            self.watches,
            traces,
        )
        _swap.install(self.module, state)

    def _retyped(self, fact: Fact) -> Fact:
        """A class may have been swapped since the trace, by fusing."""
        if not isinstance(fact, Typed):
            return fact
        return dataclasses.replace(fact, type=type(self.module.get_submodule(fact.path)))

    def _try(self, pattern: Pattern, training: bool) -> str | None:
        try:
            self._add_variant(pattern, training)
        except Refused as refused:
            return str(refused)
        return None

    def _add_variant(self, pattern: Pattern, training: bool) -> None:
        whole = trace(self.module, pattern, training)
        with contextlib.closing(whole.recorder):
            self._add_chains(whole, pattern, training)

    def _add_chains(self, whole: Trace, pattern: Pattern, training: bool) -> None:
        for module, patterns in whole.observed.items():
            self.observed.setdefault(module, set()).update(patterns)
        graph = Graph(whole, self.conv, (), whole.opaque)
        chains = graph.chains()
        self._note_lonely(graph)
        needed = set().union(*(_crossed(chain) for chain in chains if _belongs(chain)))
        if not any(map(_belongs, chains)):
            return
        mutating = {self.module.get_submodule(path) for path in graph.mutating_calls()}
        traced = self._trace_again(pattern, training, needed, whole)
        chains = Graph(traced, self.conv, mutating, whole.opaque).chains()
        if chains:
            self._rewrite(traced, chains, pattern)
        if traced is not whole:
            traced.recorder.close()

    def _trace_again(self, pattern: Pattern, training: bool, needed: set[str], whole: Trace) -> Trace:
        """Traces through only the modules that chains of this forward reach into: others run as they are."""
        if needed.issuperset(whole.inlined):
            return whole
        inline = {self.module.get_submodule(path) for path in needed}
        try:
            return trace(self.module, pattern, training, inline.__contains__)
        except Refused:
            return whole

    def _rewrite(self, traced: Trace, chains: list[Chain], pattern: Pattern) -> None:
        self.variants.append(self._variant(traced, chains, pattern))
        self.inlined |= traced.inlined
        for path in ("", *traced.inlined, *(path for chain in chains for path in chain.leaves)):
            self._watch(path)
        self.replaced |= {self.module.get_submodule(path) for chain in chains for path in chain.modules}

    def _variant(self, traced: Trace, chains: list[Chain], pattern: Pattern) -> Any:
        facts, outside = _facts_of(traced, chains)
        calls = rewrite(traced.graph, chains, self.name, self.site, len(self.calls))
        self.calls += calls
        function = compile_graph(traced.graph, self.name or "model")
        self.watches.append(traced.recorder.watch)
        number = len(self.watches) - 1
        return Variant(traced.training, pattern, function, calls, facts, outside, self.watches[-1], number)

    def _watch(self, path: str) -> None:
        if path and path not in self.watched:
            self._watch(path.rpartition(".")[0])
        self.watched.setdefault(path)

    def _note_lonely(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.op != "call_module" or not isinstance(graph.module(node), _NORMS) or node in graph.taken:
                continue
            self.lonely.setdefault(graph.module(node), _why_alone(graph, node))


def _facts_of(traced: Trace, chains: list[Chain]) -> tuple[list[Fact], list[Outside]]:
    """What must hold for the rewritten forward: all that was read of modules whose calls it leaves out."""
    leaves = {path for chain in chains for path in chain.leaves}
    facts: list[Fact] = []
    outside = dict(traced.recorder.outside)
    for shadow in traced.recorder.shadows.values():
        path, module = shadow.path, shadow.module
        called = is_leaf(module) and path not in leaves and not isinstance(module, _HOLDERS)
        kept = [fact for fact in shadow.facts if not called or getattr(fact, "name", "") == "inplace"]
        if path in leaves or path in traced.inlined or not path:
            facts.append(Typed(path, type(module), True))
        facts += kept
        if path in leaves:
            outside |= dict.fromkeys(_methods_of(class_of(module)))
        elif path in traced.inlined or not path:
            outside |= dict.fromkeys(_names_of(class_of(module)))
    return facts, list(outside)


_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _methods_of(cls: type) -> Iterator[Outside]:
    """What a module of PyTorch's runs when it is called: its methods, and the functions that they call."""
    for name in ("forward", "_conv_forward"):
        base = next((base for base in cls.__mro__ if name in vars(base)), None)
        if base is None:
            continue
        method = vars(base)[name]
        yield Outside.of(base, name, method)
        for space, *names in globals_of(method.__code__).reads:
            if len(names) == 1 and (module := method.__globals__.get(space)) in (F, torch):
                yield Outside.of(module, names[0], getattr(module, names[0]))


def _names_of(cls: type) -> Iterator[Outside]:
    """What user's classes hold besides code: read through the class it is not seen."""
    for base in user_classes(cls):
        for name, value in vars(base).items():
            if not name.startswith("__") and is_pure(value) and not callable(value):
                yield Outside.of(base, name, copy.deepcopy(value))
        yield Outside.of(base, "__call__", vars(base).get("__call__"))


def _why_alone(graph: Graph, node: fx.Node) -> str:
    module = graph.module(node)
    if not graph.stages[node]:
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return "batch normalisation is not a stage of the block language"
        return "it has a hook or options that the block language has not"
    if len(node.users) > 1:
        return "its output is used more than once and nothing before it fuses with it"
    return "nothing before or after it fuses with it"


def _belongs(chain: Chain) -> bool:
    """Whether the traced module's own forward is the innermost that holds the whole chain."""
    calls = [node.meta["calls"] for node in chain.nodes]
    return any(not call for call in calls) or len({call[0] for call in calls}) > 1


def _crossed(chain: Chain) -> set[str]:
    """The modules that must be traced through so that the chain lies in one graph."""
    return {path for node in chain.nodes for _, path in node.meta["calls"]}
