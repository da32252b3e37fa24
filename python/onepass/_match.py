"""Finding chains of stages in a traced graph: which nodes are one block, its text and its parameters."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from onepass import _handwritten
from onepass._alone import is_costly
from onepass._stage import NoMatch, Operand, Stage
from onepass._stages import CONV_TYPES, function_reader, module_reader, scale, shift, static_shape
from onepass._trace import Trace, has_hooks

_ADD = {"add": False, "add_": True, operator.add: False, operator.iadd: True, torch.add: False}
_MUL = {"mul": False, "mul_": True, operator.mul: False, operator.imul: True, torch.mul: False}
MOST_STAGES = 64  # of a block: longer chains are cut
# Stages whose sizes follow from those of the input alone.
_SIZED = ("conv", "norm", "affine", "pointwise", "identity")
_IN_PLACE = {
    getattr(operator, name) for name in dir(operator) if name[0] == "i" and hasattr(operator, name[1:])
}
_FRESH_FUNCTIONS = {
    torch.cat,
    torch.sub,
    operator.sub,
    operator.mul,
    operator.add,
    operator.truediv,
    F.interpolate,
}
_FRESH_MODULES = (
    nn.Linear,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.batchnorm._BatchNorm,
)


@dataclasses.dataclass
class Chain:
    """Stages that one block runs."""

    stages: list[Stage]

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes it replaces, in order."""
        return [node for stage in self.stages for node in stage.nodes]

    @property
    def written(self) -> list[Stage]:
        """The stages that the block's text has."""
        return [stage for stage in self.stages if stage.text]

    @property
    def single(self) -> str | None:
        """Of a lone norm "norm", of a lone activation that takes PyTorch long "activation"."""
        written = self.written
        if len(written) != 1:
            return None
        if written[0].kind == "norm":
            return "norm"
        return "activation" if is_costly(written[0].text) else None

    @property
    def leaves(self) -> list[str]:
        """The paths of PyTorch's modules that it runs instead of."""
        return [stage.module for stage in self.stages if stage.module is not None]

    @property
    def modules(self) -> list[str]:
        """The paths of the modules it runs instead of: of each stage, the innermost."""
        calls = [stage.nodes[-1].meta["calls"] for stage in self.stages]
        inner = [call[-1][1] if call else None for call in calls]
        paths = [stage.module or path for stage, path in zip(self.stages, inner, strict=True)]
        return [path for path in dict.fromkeys(paths) if path is not None]

    @property
    def dimensions(self) -> tuple[int, int]:
        """How many dimensions the input must have, at least and at most."""
        least, most = zip(*(stage.dimensions for stage in self.stages), strict=True)
        return max(least), min(most)

    @property
    def size_reads(self) -> list[fx.Node]:
        """The nodes beside it that ask for the sizes of what it computes on the way."""
        own = set(self.nodes)
        inner = [stage.nodes[-1] for stage in self.stages[:-1]]
        return [user for node in inner for user in node.users if user not in own]

    @property
    def externals(self) -> list[fx.Node]:
        """The nodes it reads, its input first."""
        own = set(self.nodes)
        read = [self.stages[0].main, *(node for inner in self.nodes for node in inner.all_input_nodes)]
        return [node for node in dict.fromkeys(read) if node not in own]


class Graph:
    """A traced graph read as stages."""

    singles: tuple[str, ...] = ()  # of "norm" and "activation", those that may be worth a call alone
    # Whether others may ask for the sizes of a value inside a chain: they are given them without it.
    gives_sizes = False

    def __init__(
        self, traced: Trace, conv: str, mutating: Iterable[nn.Module], opaque: Iterable[nn.Module]
    ) -> None:
        self.root = traced.root
        self.called: dict[str, nn.Module] = {}  # by path
        self.training = traced.training
        self.recorder = traced.recorder
        self.nodes = list(traced.graph.nodes)
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.keep_conv = conv == "keep"
        self.mutating = set(mutating)  # modules that write what they are given
        self.opaque = set(opaque)  # modules that may
        self.stages: dict[fx.Node, list[Stage]] = {}
        self.origins: dict[fx.Node, set[fx.Node]] = {}
        for node in self.nodes:
            self.stages[node] = list(self._read(node))
            self.origins[node] = self._origins(node)
        self.mutators = {node: mutated for node in self.nodes if (mutated := self._mutated(node))}
        # The memory that each of them may write, and whether it is only possible that it does.
        self.writes = [
            (node, set().union(*(self.origins[target] for target in mutated)), self._is_opaque(node))
            for node, mutated in self.mutators.items()
        ]
        self.taken: set[fx.Node] = set()

    def module(self, node: fx.Node) -> nn.Module:
        """The module that a call_module node calls."""
        path = str(node.target)
        if path not in self.called:
            self.called[path] = self.root.get_submodule(path)
        return self.called[path]

    def read(self, node: fx.Node) -> nn.Module:
        """The module that a call_module node calls, for reading attributes: they become facts."""
        return self.recorder.at(str(node.target)).object

    def shape_of(self, node: Any) -> tuple[int, ...]:
        """The sizes of a weight; raises NoMatch where they are not known."""
        return static_shape(node, self.root)

    def may_follow(self, before: fx.Node, stage: Stage) -> bool:
        """Whether a stage may run in one block with the node that it reads, as far as their places say."""
        return True

    def _read(self, node: fx.Node) -> Iterator[Stage]:
        for read in (self._written_out, self._single, self._addition, self._product):
            try:
                for stage in read(node):
                    stage.nodes = (*stage.nodes, node)
                    kept = stage.kind == "conv" and self.keep_conv
                    if isinstance(stage.main, fx.Node) and not kept:
                        yield stage
            except (NoMatch, TypeError, KeyError, AttributeError):
                continue

    def _written_out(self, node: fx.Node) -> Iterator[Stage]:
        """An activation written with arithmetic."""
        found = _handwritten.read(node)
        if found is not None:
            text, main, inner = found
            nodes = tuple(sorted(inner, key=self.order.__getitem__))
            yield Stage("pointwise", text, main, nodes=nodes, weight=len(nodes) + 1)

    def _single(self, node: fx.Node) -> Iterator[Stage]:
        if node.op == "call_module":
            module, path = self.module(node), str(node.target)
            if not has_hooks(module) and vars(module).keys().isdisjoint(("forward", "_conv_forward")):
                reader = module_reader(module)
                stage = reader(self.read(node), path, *node.args, **node.kwargs)
                yield dataclasses.replace(stage, module=path)
        elif node.op in ("call_function", "call_method"):
            yield function_reader(node.target, self.shape_of)(*node.args, **node.kwargs)

    def _addition(self, node: fx.Node) -> Iterator[Stage]:
        if node.target not in _ADD or node.op not in ("call_function", "call_method"):
            return
        mutated = node.args[0] if _ADD[node.target] else None
        first, second = _two_operands(node)
        for main, other in ((first, second), (second, first)):
            if type(other) in (int, float):
                yield dataclasses.replace(shift(main, other), mutated=mutated)
            elif mutated not in (None, main):  # the result is the other tensor, and has its type
                continue
            elif _are_two(main, other) and not self.per_channel(main):
                yield Stage("operand", "add", main, (Operand(other, "add"),), mutated)

    def _product(self, node: fx.Node) -> Iterator[Stage]:
        if node.target not in _MUL or node.op not in ("call_function", "call_method"):
            return
        mutated = node.args[0] if _MUL[node.target] else None
        first, second = _two_operands(node)
        for main, other in ((first, second), (second, first)):
            if type(other) in (int, float):
                yield dataclasses.replace(scale(main, other), mutated=mutated)
            elif mutated not in (None, main):
                continue
            elif _are_two(main, other):
                gate = self._gate(node, main, other)
                if gate is not None:
                    yield dataclasses.replace(gate, mutated=mutated if mutated is main else None)
                elif self.per_channel(other) and not self.per_channel(main):
                    yield Stage("operand", "mul", main, (Operand(other, "mul"),), mutated)

    def _gate(self, product: fx.Node, main: fx.Node, other: fx.Node) -> Stage | None:
        """x * sigmoid(x) and x * tanh(softplus(x))."""
        names, nodes, node, user = [], [], other, product
        while node is not main:
            stage = next(
                (s for s in self.stages.get(node, ()) if s.kind == "pointwise" and s.mutated is None), None
            )
            if stage is None or len(names) == 2 or list(node.users) != [user]:
                return None
            names.append(stage.text)
            nodes = [node, *nodes]
            node, user = stage.main, node
        text = {("sigmoid",): "swish", ("tanh", "softplus"): "mish"}.get(tuple(names))
        return None if text is None else Stage("pointwise", text, main, nodes=tuple(nodes))

    def per_channel(self, node: fx.Node) -> bool:
        """Whether a tensor is seen to have one value per channel: indexed or viewed with sizes of one."""
        if node.op == "get_attr":
            shape = static_shape(node, self.root)
            return len(shape) >= 3 and shape[-1] == 1
        if node.target is operator.getitem:
            index = node.args[1]
            widened = isinstance(index, tuple) and None in index
            return widened or (type(index) is int and self.per_channel(node.args[0]))
        if node.target in ("unsqueeze", "view", "reshape", torch.unsqueeze, torch.reshape):
            last = node.args[-1][-1] if isinstance(node.args[-1], tuple | list) else node.args[-1]
            return last == 1 or (node.target in ("unsqueeze", torch.unsqueeze) and last == -1)
        follows = node.target in _ADD or node.target in _MUL or node.target in ("chunk", torch.chunk)
        pointwise = any(stage.kind in ("pointwise", "identity") for stage in self.stages.get(node, ()))
        return (follows or pointwise) and all(self.per_channel(inner) for inner in node.all_input_nodes)

    # --- Who shares memory with whom, and who writes it -----------------------------------------------------

    def is_fresh(self, node: fx.Node) -> bool:
        """Whether a node's result is a tensor of its own."""
        if node.op == "call_module" and isinstance(self.module(node), (*_FRESH_MODULES, *CONV_TYPES)):
            return True
        if node.op == "call_function" and node.target in _FRESH_FUNCTIONS:
            return True
        stages = self.stages[node]
        return bool(stages) and all(stage.text and stage.mutated is None for stage in stages)

    def _origins(self, node: fx.Node) -> set[fx.Node]:
        """The nodes whose memory a node's result may share."""
        if self.is_fresh(node):
            return {node}
        written = self._mutated(node)
        shared = written if written and node.op != "call_module" else node.all_input_nodes
        return {node}.union(*(self.origins[inner] for inner in shared))

    def _mutated(self, node: fx.Node) -> list[fx.Node]:
        """The tensors that a node writes."""
        if node.op == "call_module":
            module = self.module(node)
            in_place = "inplace" in vars(module) and self.read(node).inplace
            writes = in_place or module in self.mutating | self.opaque
            return node.all_input_nodes if writes else []
        if node.op not in ("call_function", "call_method"):
            return []
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        named = name.endswith("_") and not name.endswith("__")
        in_place = named or node.target in _IN_PLACE or node.target is operator.setitem
        if in_place or node.kwargs.get("inplace") or _inplace_argument(node):
            return [node.all_input_nodes[0]]
        return [node.kwargs["out"]] if isinstance(node.kwargs.get("out"), fx.Node) else []

    def _is_opaque(self, node: fx.Node) -> bool:
        return node.op == "call_module" and self.module(node) in self.opaque

    def mutating_calls(self) -> set[str]:
        """The paths of traced-through modules that write tensors they did not make."""
        paths = set()
        for node, mutated in self.mutators.items():
            for origin in set().union(*(self.origins[target] for target in mutated)):
                outer = set(origin.meta["calls"])
                paths |= {path for number, path in node.meta["calls"] if (number, path) not in outer}
        return paths

    # --- Chains ---------------------------------------------------------------------------------------------

    def chains(self) -> list[Chain]:
        """Chains without a node in common, longest first taken, in the order of the graph."""
        found: list[Chain] = []
        while True:
            candidates = [Chain(self._longest(node, True, False)) for node in self.nodes]
            candidates = sorted(filter(self.is_worth, candidates), key=self._rank)
            taken_before = len(found)
            for chain in candidates:
                if self.taken.isdisjoint(chain.nodes):
                    self.taken.update(chain.nodes)
                    found.append(chain)
            if len(found) == taken_before:
                return sorted(found, key=lambda chain: self.order[chain.nodes[0]])

    def is_worth(self, chain: Chain) -> bool:
        """At least two stages, not all of them constants to multiply with or add; or a single, where asked."""
        written = chain.written
        if chain.single in self.singles:
            return True
        plain = all(stage.text.startswith(("mul(", "add(")) for stage in written)
        return len(written) >= 2 and not plain

    def _rank(self, chain: Chain) -> tuple[int, int, int]:
        return -_weight(chain.stages), -len(chain.stages), self.order[chain.nodes[0]]

    def _longest(self, node: fx.Node, last: bool, norm_follows: bool, room: int = MOST_STAGES) -> list[Stage]:
        """The longest run of stages that ends with this node, of those that one block holds."""
        best: list[Stage] = []
        if room == 0:
            return best
        for stage in self.stages[node]:
            is_norm = stage.kind == "norm"
            if (is_norm and norm_follows) or (stage.kind == "mean" and not last):
                continue
            if not self.taken.isdisjoint(stage.nodes):
                continue
            before: list[Stage] = []
            alone = self._readers(stage.main) <= set(stage.nodes) and self.may_follow(stage.main, stage)
            if stage.kind != "conv" and alone:
                before = self._longest(stage.main, False, norm_follows or is_norm, room - 1)
            stages = self._without_hazards([*before, stage]) if last else [*before, stage]
            if _weight(stages) > _weight(best) or not best:
                best = stages
        return best

    def _without_hazards(self, stages: list[Stage]) -> list[Stage]:
        """The last stages that may run as one: no other node reads their writes or writes what they read."""
        while stages:
            chain = Chain(stages)
            nodes = set(chain.nodes)
            shown = [i for i, stage in enumerate(stages) if not self._is_private(stage.mutated, chain)]
            if self.gives_sizes:
                shown += _last_of_unknown_sizes(stages)
            cut = max(shown) + 1 if shown else self._first_after_write(chain, nodes)
            if cut == 0:
                break
            stages = stages[cut:]
        least, most = Chain(stages).dimensions if stages else (0, 0)
        return stages if least <= most else []

    def _is_private(self, mutated: fx.Node | None, chain: Chain) -> bool:
        """Whether only the stage itself reads the tensor that it writes."""
        if mutated is None:
            return True
        own = set(chain.nodes)
        outside = [origin for origin in self.origins[mutated] if origin not in own]
        return all(self.is_fresh(origin) and self._has_one_reader(origin, chain) for origin in outside)

    def _readers(self, node: fx.Node) -> set[fx.Node]:
        """Who reads what a tensor holds."""
        return {user for user in node.users if not (self.gives_sizes and asks_sizes(user))}

    def _has_one_reader(self, node: fx.Node, chain: Chain) -> bool:
        readers = self._readers(node)
        return any(readers <= set(stage.nodes) for stage in chain.stages)

    def _first_after_write(self, chain: Chain, nodes: set[fx.Node]) -> int:
        """How many stages begin before another node writes a tensor that the chain or its backward reads."""
        first, last = self.order[chain.nodes[0]], self.order[chain.nodes[-1]]
        read = set().union(*(self.origins[node] for node in chain.externals))
        for node, written, is_opaque in reversed(self.writes):
            place = self.order[node]
            if node in nodes or place < first or (place > last and is_opaque):
                continue
            if not read.isdisjoint(written):
                return sum(self.order[stage.nodes[0]] < place for stage in chain.stages)
        return 0


def asks_sizes(node: fx.Node) -> bool:
    """Whether a node asks for the sizes of a tensor, or how many there are."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "ndimension", "numel", "nelement")
    return node.target is getattr and node.args[1] in ("shape", "ndim")


def _last_of_unknown_sizes(stages: list[Stage]) -> list[int]:
    """The last stage that is asked for sizes which do not follow from the chain's input; none, or one."""
    sized = list(itertools.accumulate((stage.kind in _SIZED for stage in stages), operator.and_))
    nodes = set(Chain(stages).nodes)
    asked = [not set(stage.nodes[-1].users) <= nodes for stage in stages[:-1]]
    return [i for i, (known, reads) in enumerate(zip(sized, asked)) if reads and not known][-1:]


def _two_operands(node: fx.Node) -> tuple[Any, Any]:
    def bind(input: Any, other: Any, alpha: Any = 1) -> tuple[Any, Any]:
        if alpha != 1:
            raise NoMatch
        return input, other

    return bind(*node.args, **node.kwargs)


def _are_two(main: Any, other: Any) -> bool:
    return isinstance(main, fx.Node) and isinstance(other, fx.Node) and main is not other


def _inplace_argument(node: fx.Node) -> bool:
    """Whether a functional of torch.nn is called with a positional inplace=True, which is its last."""
    module = getattr(node.target, "__module__", None)
    return module == "torch.nn.functional" and bool(node.args) and node.args[-1] is True


def _weight(stages: list[Stage]) -> int:
    return sum(stage.weight for stage in stages if stage.text)
