"""Replaces chains of Dynamo's graphs by one operator each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from onepass._batch_norm import scale_and_shift
from onepass._match import Chain
from onepass._stage import Affine, BatchNorm, Stage
from onepass._stages import CONV_FUNCTIONS
from onepass.compiling.graph import DynamoGraph, is_loop, name_writes, nodes_of, value_of


@dataclasses.dataclass(frozen=True)
class Segment:
    """A chain of a graph with the tensors that decide how it runs."""

    block: str
    input: Tensor  # fake, as all
    parameters: tuple[Tensor, ...]
    convolved: Tensor  # what the convolution gives; without one, the input
    output: Tensor
    out_dtype: torch.dtype  # the output's, or the one that all that reads it converts it to
    wanted: tuple[bool, ...]  # which gradients: the input's, then each parameter's; all false without any
    where: str  # the module, else the line of code that computes its first stage
    types: frozenset[torch.dtype]  # of all tensors, also of those between stages: autocast may lower some
    fused_input: bool = False  # Inductor would compute the input in the same loop
    fused_users: bool = False  # Inductor would compute what reads the result in the same loop
    enters: bool = False  # the input is given to the graph, in a layout that is not the graph's to choose
    leaves: bool = False  # the result is the graph's

    @property
    def trains(self) -> bool:
        """Whether any gradient is wanted."""
        return any(self.wanted)


@dataclasses.dataclass(frozen=True)
class Kept:
    """How a kept chain runs: the operator's block, behind PyTorch's convolution or with it, and its words."""

    block: str
    after_convolution: bool = False
    adds_bias: bool = False  # that of the convolution before it
    forward_words: str = ""
    backward_words: str = ""


class Rewriting:
    """The chains of a graph and of those inside it (checkpoints, branches): found first, then replaced."""

    def __init__(self, module: fx.GraphModule) -> None:
        inner = [each for each in module.modules() if isinstance(each, fx.GraphModule)]
        for each in inner:
            name_writes(each.graph)
        self.places = [_Place(each, DynamoGraph(each)) for each in inner]
        self.found = [(place, chain) for place in self.places for chain in place.graph.chains()]
        self.segments = [segment_of(chain) for _, chain in self.found]

    def apply(self, decisions: Sequence[Kept | None]) -> None:
        """Replaces the chains that are kept; the others stay as they are."""
        for (place, chain), kept in zip(self.found, decisions, strict=True):
            if kept is not None:
                place.replace(_after_convolution(chain, kept) if kept.after_convolution else chain, kept)
        for place in self.places:
            place.finish()


def segment_of(chain: Chain) -> Segment:
    """The chain's text and tensors."""
    text = " | ".join(stage.text for stage in chain.written)
    input, last = value_of(chain.stages[0].main), chain.nodes[-1]
    parameters = tuple(
        _value(parameter, stage.text) for stage in chain.written for parameter in stage.parameters
    )
    output = value_of(last)
    grad = output.requires_grad
    wanted = tuple(grad and tensor.requires_grad for tensor in (input, *parameters))
    main = chain.stages[0].main
    fused_input = chain.stages[0].kind != "conv" and is_loop(main) and len(main.users) == 1
    fused_users = bool(last.users) and all(map(is_loop, last.users))
    enters, leaves = main.op == "placeholder", any(user.op == "output" for user in last.users)
    places = (fused_input, fused_users, enters, leaves)
    between = (value_of(node).dtype for node in chain.nodes if isinstance(value_of(node), Tensor))
    types = frozenset((input.dtype, *(tensor.dtype for tensor in parameters), *between))
    has_conv = chain.stages[0].kind == "conv"
    convolved = value_of(chain.stages[0].nodes[-1]) if has_conv else input
    tensors = (input, parameters, convolved, output, _read_as(last))
    return Segment(text, *tensors, wanted, _place_of(chain.nodes[0]), types, *places)


def _read_as(node: fx.Node) -> torch.dtype:
    """The type that autocast gives the tensor in all convolutions that read it; else its own.

    Rounding it where it is written gives the same values.
    """
    own = value_of(node).dtype
    read = {value_of(user).dtype if _convolves(user, node) else own for user in node.users}
    return read.pop() if own == torch.float32 and len(read) == 1 else own


def _convolves(user: fx.Node, node: fx.Node) -> bool:
    """Whether the user is a convolution with the node as its input, and as nothing else."""
    inputs = [*user.args[1:], *user.kwargs.values()]
    return user.target in CONV_FUNCTIONS and user.args[:1] == (node,) and node not in inputs


def _after_convolution(chain: Chain, kept: Kept) -> Chain:
    """The stages behind the convolution, which loses its bias where the kept block adds it."""
    conv, *rest = chain.stages
    if not kept.adds_bias:
        return Chain(rest)
    node, (_, bias) = conv.nodes[-1], conv.parameters
    if len(node.args) > 2:
        node.update_arg(2, None)
    else:
        node.update_kwarg("bias", None)
    return Chain([Stage("operand", "channel_add", node, (bias,)), *rest])


def _value(parameter: Any, text: str) -> Tensor:
    """The fake tensor that the block is given for a parameter."""
    if isinstance(parameter, Affine):
        with torch.enable_grad():
            return _affine(parameter.norm)[parameter.part == "shift"]
    (node,) = nodes_of(parameter)
    return _as_given(value_of(node), text)


def _affine(norm: BatchNorm) -> tuple[Tensor, Tensor]:
    weights = [None if node is None else value_of(node) for node in (norm.weight, norm.bias)]
    return scale_and_shift(value_of(norm.mean), value_of(norm.variance), *weights, norm.eps)


def _as_given(value: Tensor, text: str) -> Tensor:
    """An operand per channel without its dimensions of one element."""
    return value.flatten(_start(text)) if text.startswith("channel_") else value


def _start(text: str) -> int:
    return 1 if "per=sample" in text else 0


def _place_of(node: fx.Node) -> str:
    """The module that computes the node, else the line of code."""
    modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    path = modules[-1].replace("._modules['", ".").replace("']", "") if modules else ""
    root, _, inner = re.sub(r"^[LG]\['", "", path).partition(".")
    names = [name for name in (root, inner) if name and name not in ("self", "fn")]  # what is compiled itself
    return ".".join(names) or _line_of(node)


def _line_of(node: fx.Node) -> str:
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    return lines[-1] if lines else ""


class _Place:
    """A graph whose chains are being replaced."""

    def __init__(self, module: fx.GraphModule, graph: DynamoGraph) -> None:
        self.module = module
        self.graph = graph
        self.moved: dict[fx.Node, fx.Node] = {}
        self.affine: dict[BatchNorm, tuple[fx.Node, fx.Node]] = {}

    def replace(self, chain: Chain, kept: Kept) -> None:
        """Puts the operator where its operands are all computed, and takes the chain's nodes out.

        Nodes are erased one by one: eliminate_dead_code would drop in-place calls whose results are unused.
        """
        graph, last = self.module.graph, chain.nodes[-1]
        self.affine.clear()  # what another chain has computed may come later in the graph
        order = {node: index for index, node in enumerate(graph.nodes)}
        externals = [self.moved.get(node, node) for node in chain.externals]
        anchor = max((chain.nodes[0], *externals), key=order.__getitem__)
        segment = segment_of(chain)
        types = {tensor.dtype for tensor in (segment.input, *segment.parameters, segment.output)}
        types.add(segment.out_dtype)
        with graph.inserting_before(anchor.next):
            parameters = [
                self._parameter(parameter, stage.text)
                for stage in chain.written
                for parameter in stage.parameters
            ]
            main = self.moved.get(chain.stages[0].main, chain.stages[0].main)
            out_dtype = None if len(types) == 1 else segment.out_dtype
            words = (kept.forward_words, kept.backward_words)
            operator = torch.ops.onepass.chain.default
            block = graph.call_function(operator, (main, parameters, segment.block, out_dtype, *words))
            result = block
            value = segment.output
            if value.dtype != segment.out_dtype:
                with torch.enable_grad():
                    value = value.to(segment.out_dtype)
            if any(stage.keep_dimensions for stage in chain.stages):
                spatial = segment.output.dim() - 2
                block.meta = last.meta | {"example_value": value.flatten(1)}
                result = graph.call_method(
                    "reshape", (block, (*block.meta["example_value"].shape, *(1,) * spatial))
                )
        result.meta = last.meta | {"example_value": value}
        self.moved[last] = result
        last.replace_all_uses_with(result)
        for node in reversed(chain.nodes):
            graph.erase_node(node)

    def _parameter(self, parameter: Any, text: str) -> fx.Node:
        if isinstance(parameter, Affine):
            return self._affine(parameter)
        (node,) = nodes_of(parameter)
        node = self.moved.get(node, node)
        if not text.startswith("channel_"):
            return node
        return self._call("flatten", node, _start(text))

    def _affine(self, parameter: Affine) -> fx.Node:
        """Emits scale_and_shift, once for both parts; each node with its example value."""
        norm = parameter.norm
        if norm not in self.affine:
            given = [None if n is None else self.moved.get(n, n) for n in (norm.weight, norm.bias)]
            mean, variance, weight, bias = (
                None if n is None else self._call("float", n) for n in (norm.mean, norm.variance, *given)
            )
            scale = self._call(torch.rsqrt, self._call(torch.add, variance, norm.eps))
            scale = scale if weight is None else self._call(torch.mul, scale, weight)
            shift = self._call(torch.mul, self._call(torch.neg, mean), scale)
            shift = shift if bias is None else self._call(torch.add, shift, bias)
            self.affine[norm] = (scale, shift)
        return self.affine[norm][parameter.part == "shift"]

    def _call(self, target: Any, *args: Any) -> fx.Node:
        """Emits a call of a function, or of the tensor method of this name."""
        graph = self.module.graph
        method = isinstance(target, str)
        node = graph.call_method(target, args) if method else graph.call_function(target, args)
        values = fx.map_arg(args, value_of)
        with torch.enable_grad():
            function = getattr(values[0], target) if method else target
            node.meta["example_value"] = function(*values[1:]) if method else function(*values)
        return node

    def finish(self) -> None:
        """Checks the graph and makes its code anew."""
        self.module.graph.lint()
        self.module.recompile()
