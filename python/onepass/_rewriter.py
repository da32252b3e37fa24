"""Rewriting one module: traces of its forward, the chains in it, and the facts that they rest on."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from onepass._facts import Fact, Outside, Typed
from onepass._fallback import Site
from onepass._match import Chain, Graph
from onepass._observe import globals_of
from onepass._refused import Refused
from onepass._rewrite import Call, compile_graph, rewrite
from onepass._shadow import class_of, user_classes
from onepass._stages import NORM_TYPES
from onepass._state import Variant, root_name
from onepass._trace import Pattern, Trace, is_leaf, trace
from onepass._values import is_pure
from onepass._watch import Watch

NORMS = (*NORM_TYPES, nn.modules.batchnorm._BatchNorm)


def _why_not_swappable(module: nn.Module) -> str | None:
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


class Rewriter:
    """Traces one module in both modes, finds the chains of its own forward and makes its variants."""

    gives_sizes = True  # Graph.gives_sizes

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
        self.unfused: dict[nn.Module, str] = {}  # norms, and why each runs by itself

    def run(self, patterns: Iterable[Pattern]) -> None:
        """Raises Refused where no way of calling the module can be traced."""
        self.patterns = list(dict.fromkeys(patterns))
        reason = _why_not_swappable(self.module)
        if reason is not None:
            raise Refused(reason)
        refusals = [
            self._try(pattern, mode) for pattern, mode in itertools.product(self.patterns, (False, True))
        ]
        if refusals and None not in refusals:
            raise Refused(refusals[0])

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
        graph = self._graph(whole, (), whole)
        chains = graph.chains()
        self._note_unfused(graph)
        needed = set().union(*(_crossed(chain) for chain in chains if _belongs(chain)))
        if not any(map(_belongs, chains)):
            return
        mutating = {self.module.get_submodule(path) for path in graph.mutating_calls()}
        traced = self._trace_again(pattern, training, needed, whole)
        chains = self._graph(traced, mutating, whole).chains()
        if chains:
            self._rewrite(traced, chains, pattern)
        if traced is not whole:
            traced.recorder.close()

    def _graph(self, traced: Trace, mutating: Iterable[nn.Module], whole: Trace) -> Graph:
        graph = Graph(traced, self.conv, mutating, whole.opaque)
        graph.gives_sizes = self.gives_sizes
        graph.singles = self._singles()
        return graph

    def _singles(self) -> tuple[str, ...]:
        """What may stand alone: a call chooses who runs it (_alone). Activations gain on a CPU."""
        devices = {parameter.device.type for parameter in self.module.parameters()}
        if devices <= {"cpu"}:
            return ("norm", "activation")
        return ("norm",) if devices == {"cuda"} else ()

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
        calls, tensors = rewrite(traced.graph, chains, self.name, self.site, len(self.calls))
        self.calls += calls
        function = compile_graph(traced.graph, self.name or "model")
        number, watch = len(self.watches), traced.recorder.watch
        self.watches.append(watch)
        return Variant(traced.training, pattern, function, tensors, calls, facts, outside, watch, number)

    def _watch(self, path: str) -> None:
        if path and path not in self.watched:
            self._watch(path.rpartition(".")[0])
        self.watched.setdefault(path)

    def _note_unfused(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.op != "call_module" or not isinstance(graph.module(node), NORMS) or node in graph.taken:
                continue
            self.unfused.setdefault(graph.module(node), _why_alone(graph, node))


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
            return _why_no_batch_norm(module, graph.training)
        return "it has a hook or options that the block language has not"
    if len(node.users) > 1:
        return "its output is used more than once and nothing before it fuses with it"
    return "nothing before or after it fuses with it"


def _why_no_batch_norm(module: nn.Module, training: bool) -> str:
    if class_of(module) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return f"{class_of(module).__name__} is not a stage of the block language"
    if training or module.running_mean is None:
        return "batch normalisation by the statistics of the batch is not a stage of the block language"
    return "it has a hook or options that the block language has not"


def _belongs(chain: Chain) -> bool:
    """Whether the traced module's own forward is the innermost that holds the whole chain."""
    calls = [node.meta["calls"] for node in chain.nodes]
    return any(not call for call in calls) or len({call[0] for call in calls}) > 1


def _crossed(chain: Chain) -> set[str]:
    """The modules that must be traced through so that the chain lies in one graph."""
    return {path for node in chain.nodes for _, path in node.meta["calls"]}
