"""Turning a traced graph into a Python function that runs its chains as blocks."""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from onepass import _fallback, _ops
from onepass._description import describe
from onepass._fallback import Site
from onepass._match import Chain
from onepass._stages import Attribute, Operand

_numbers = itertools.count()


@dataclasses.dataclass
class Call:
    """One fused call of a rewritten forward, and what it last ran on."""

    block: str
    modules: tuple[str, ...]
    key: str  # the block before any run
    site: Site  # counts the runs that left the fused path, and samples computed again
    input: tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device] | None = None


def compile_graph(graph: fx.Graph, name: str) -> Callable[..., Any]:
    """The graph as a function of the module and the graph's inputs."""
    code = graph.python_code("self")
    filename = f"<onepass {name} {next(_numbers)}>"
    linecache.cache[filename] = (len(code.src), None, code.src.splitlines(keepends=True), filename)
    namespace = dict(code.globals)
    exec(compile(code.src, filename, "exec"), namespace)
    return namespace["forward"]


def rewrite(graph: fx.Graph, chains: Sequence[Chain], name: str, site: Site) -> list[Call]:
    """Replaces each chain of the graph by one call; the graph gets a first input, the module itself.

    A chain that leaves the fused path is counted by itself, and warned of as its module is: by `site`.
    """
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        module = graph.placeholder("onepass_module")
    replaced: dict[fx.Node, fx.Node] = {}
    return [_replace(graph, module, chain, replaced, name, site) for chain in chains]


def _replace(
    graph: fx.Graph, module: fx.Node, chain: Chain, replaced: dict[fx.Node, fx.Node], name: str, site: Site
) -> Call:
    nodes = chain.nodes
    externals = list(dict.fromkeys(replaced.get(node, node) for node in chain.externals))
    text = _text(chain)
    layer = ".".join(part for part in (name, *chain.modules[:1]) if part) or text
    call = Call(text, tuple(chain.modules), text, Site(site.name, site.said, site.numerics, layer))
    function = _fused(chain, call, _original(chain, externals, name))
    # As early as its operands allow, so that it reads its input where the first stage did.
    order = {node: index for index, node in enumerate(graph.nodes)}
    anchor = max((nodes[0], *externals), key=order.__getitem__)
    with graph.inserting_before(anchor.next):
        given = [parameter for stage in chain.stages for parameter in stage.parameters]
        lookup = _Lookup(graph, module)
        parameters = [_parameter(lookup, parameter, replaced) for parameter in given]
        result = graph.call_function(function, (module, externals, parameters))
    replaced[nodes[-1]] = result
    nodes[-1].replace_all_uses_with(result)
    for node in reversed(nodes):
        graph.erase_node(node)
    return call


class _Lookup:
    """Emits the lookup of modules and parameters in their dictionaries: 7 times faster than as attributes."""

    def __init__(self, graph: fx.Graph, module: fx.Node) -> None:
        self.graph = graph
        self.modules = {"": module}
        self.members: dict[tuple[str, str], fx.Node] = {}

    def parameter(self, attribute: Attribute) -> fx.Node:
        if attribute.computed:
            return self.graph.create_node("get_attr", f"{attribute.module}.{attribute.name}")
        return self._item(attribute.module, "_parameters", attribute.name)

    def _item(self, path: str, members: str, name: str) -> fx.Node:
        if path not in self.modules:
            parent, _, child = path.rpartition(".")
            self.modules[path] = self._item(parent, "_modules", child)
        if (path, members) not in self.members:
            self.members[path, members] = self.graph.call_function(getattr, (self.modules[path], members))
        return self.graph.call_function(operator.getitem, (self.members[path, members], name))


def _parameter(lookup: _Lookup, parameter: Any, replaced: dict[fx.Node, fx.Node]) -> fx.Node:
    if isinstance(parameter, Attribute):
        return lookup.parameter(parameter)
    node = parameter.node if isinstance(parameter, Operand) else parameter
    return replaced.get(node, node)


def _original(chain: Chain, externals: list[fx.Node], name: str) -> Callable[..., Any]:
    """The chain as it was, as a function of the module and the tensors it reads."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in externals}
    for node in chain.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[chain.nodes[-1]])
    return compile_graph(graph, f"{name}, one chain unfused")


def _text(chain: Chain) -> str:
    """The block as the report shows it: an added tensor is taken to have the shape of what it is added to."""
    names = {"add": "residual_add", "mul": "channel_mul(per=sample)"}
    return " | ".join(names.get(stage.text, stage.text) for stage in chain.written)


def _fused(chain: Chain, call: Call, original: Callable[..., Any]) -> Callable[..., Any]:
    fits = _input_check(chain.dimensions)
    bind = _operand_binder(chain)
    shape_of = _shape_before_tail(chain)
    text, site = call.block, call.site
    keeps = any(stage.keep_dimensions for stage in chain.stages)
    ones = (1,) * (chain.dimensions - 2) if keeps and chain.dimensions is not None else ()

    def run(module: Any, externals: list[Any], parameters: list[Any]) -> Tensor:
        input = externals[0]
        if not fits(input):
            _fallback.left(site, _fallback.STAGES, _why_unfit(input, chain.dimensions))
            return original(module, *externals)
        block = text
        if bind is not None:
            bound = bind(shape_of(input), parameters)
            if bound is None:
                _fallback.left(site, _fallback.STAGES, _UNBOUND)
                return original(module, *externals)
            block, parameters = bound
        if not torch.compiler.is_compiling():
            call.block = block
            call.input = (input.shape, input.stride(), input.dtype, input.device)
        output = _ops.run_block(block, input, parameters, None, site)
        return output.reshape(output.shape + ones) if ones else output

    return run


def _input_check(dimensions: int | None) -> Callable[[Tensor], bool]:
    if dimensions is None:
        return lambda input: 2 <= input.dim() <= 5 and input.is_floating_point()
    return lambda input: input.dim() == dimensions and input.is_floating_point()


def _why_unfit(input: Tensor, dimensions: int | None) -> str:
    if not input.is_floating_point():
        return f"the input of {str(input.dtype).removeprefix('torch.')} is not floating-point"
    return f"the input has {input.dim()} dimensions, must have {dimensions or '2 to 5'}"


_UNBOUND = "a tensor that is added or multiplied is neither of the input's shape nor one value per channel"


def _shape_before_tail(chain: Chain) -> Callable[[Tensor], tuple[int, ...]]:
    if chain.stages[0].kind != "conv":
        return lambda input: tuple(input.shape)
    conv = describe(chain.stages[0].text).conv

    def shape(input: Tensor) -> tuple[int, ...]:
        spatial = [conv.output_size(d, size) for d, size in enumerate(input.shape[2:])]
        return (input.shape[0], conv.out_channels, *spatial)

    return shape


Binder = Callable[[tuple[int, ...], list[Any]], tuple[str, list[Any]] | None]


def _operand_binder(chain: Chain) -> Binder | None:
    """Finds the block's text and parameters once the operands' shapes are known; None without operands."""
    parameters = [parameter for stage in chain.stages for parameter in stage.parameters]
    slots = [(i, parameter.op) for i, parameter in enumerate(parameters) if isinstance(parameter, Operand)]
    if not slots:
        return None
    texts = [stage.text for stage in chain.written]
    places = [i for i, stage in enumerate(chain.written) if stage.kind == "operand"]
    blocks: dict[tuple[str, ...], str] = {}

    def bind(shape: tuple[int, ...], given: list[Any]) -> tuple[str, list[Any]] | None:
        bound, found = list(given), []
        for index, op in slots:
            text, bound[index] = _fit(op, given[index], shape)
            if text is None:
                return None
            found.append(text)
        key = tuple(found)
        if key not in blocks:
            named = dict(zip(places, found, strict=True))
            blocks[key] = " | ".join(named.get(i, text) for i, text in enumerate(texts))
        return blocks[key], bound

    return bind


def _fit(op: str, operand: Any, shape: tuple[int, ...]) -> tuple[str | None, Any]:
    """The stage that adds or multiplies with an operand of this shape, and the operand as it takes it."""
    if not isinstance(operand, Tensor):
        return None, operand
    sizes = tuple(operand.shape)
    if sizes == shape and op == "add":
        return "residual_add", operand
    ones = (1,) * (len(shape) - 2)
    if len(shape) > 2 and sizes == (*shape[:2], *ones):
        return f"channel_{op}(per=sample)", operand.flatten(1)
    if len(shape) > 2 and sizes in ((1, shape[1], *ones), (shape[1], *ones)):
        return f"channel_{op}", operand.flatten()
    return None, operand
