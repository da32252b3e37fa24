"""Turning a traced graph into a Python function that runs its chains as blocks."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import linecache
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from onepass import _fallback, _ops
from onepass._description import Norm, describe
from onepass._fallback import Site
from onepass._match import Chain
from onepass._stages import Attribute, Operand
from onepass._values import constant_key

_numbers = itertools.count()
_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}  # equal texts over equal constants are one function


@dataclasses.dataclass
class Call:
    """One fused call of a rewritten forward, and what it last ran on."""

    block: str
    modules: tuple[str, ...]
    key: str  # the block before any run
    site: Site  # counts the runs that left the fused path, and samples computed again
    input: tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device] | None = None

    def renewed(self, said: set[str]) -> Call:
        """For a copy of the module: nothing has run yet."""
        site = Site(self.site.name, said, self.site.numerics, self.site.layer)
        return Call(self.key, self.modules, self.key, site)


def compile_once(source: str, constants: dict[str, Any], name: str, wanted: str) -> Callable[..., Any]:
    """The function `wanted` of the source; the same for equal sources over equal constants."""
    key = (source, wanted, *((name, constant_key(value)) for name, value in sorted(constants.items())))
    if key not in _compiled:
        filename = f"<onepass {name} {next(_numbers)}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        namespace = dict(constants)
        exec(compile(source, filename, "exec"), namespace)
        if len(_compiled) > _MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = namespace[wanted]
    return _compiled[key]


_MOST_COMPILED = 10_000


@dataclasses.dataclass(frozen=True)
class Source:
    """A graph as Python text: a function of the module and the graph's inputs."""

    text: str
    constants: dict[str, Any]
    name: str

    def compiled(self) -> Callable[..., Any]:
        """The function."""
        return compile_once(self.text, self.constants, self.name, "forward")

    def for_replicas(self) -> Source:
        """The same of a replica of torch.nn.DataParallel, whose parameters are plain attributes."""
        tree = ast.parse(self.text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "_parameters":
                node.attr = "__dict__"
        return Source(ast.unparse(tree), self.constants, f"{self.name}, a replica")


def source_of(graph: fx.Graph, name: str) -> Source:
    """The text of a graph."""
    code = graph.python_code("self")
    return Source(code.src, dict(code.globals), name)


def rewrite(
    graph: fx.Graph, chains: Sequence[Chain], name: str, site: Site, first_number: int = 0
) -> list[Call]:
    """Replaces each chain of the graph by one call; the graph gets a first input, the module itself.

    A chain that leaves the fused path is counted by itself, and warned of as its module is: by `site`. The
    calls are found on the module by their numbers, so that equal modules share the code.
    """
    for number, node in enumerate([node for node in graph.nodes if node.op == "placeholder"]):
        node.target = f"onepass_{number}"  # a user's name may be that of a function in the code
        node._rename(node.target)
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        module = graph.placeholder("onepass_module")
    replaced: dict[fx.Node, fx.Node] = {}
    return [
        _replace(graph, module, chain, replaced, name, site, number)
        for number, chain in enumerate(chains, first_number)
    ]


def _replace(
    graph: fx.Graph,
    module: fx.Node,
    chain: Chain,
    replaced: dict[fx.Node, fx.Node],
    name: str,
    site: Site,
    number: int,
) -> Call:
    nodes = chain.nodes
    externals = list(dict.fromkeys(replaced.get(node, node) for node in chain.externals))
    text = _text(chain)
    layer = ".".join(part for part in (name, *chain.modules[:1]) if part) or text
    call = Call(text, tuple(chain.modules), text, Site(site.name, site.said, site.numerics, layer))
    function = _fused(_spec(chain, text, _original(chain, externals, name)))
    # As early as its operands allow, so that it reads its input where the first stage did.
    order = {node: index for index, node in enumerate(graph.nodes)}
    anchor = max((nodes[0], *externals), key=order.__getitem__)
    with graph.inserting_before(anchor.next):
        given = [parameter for stage in chain.stages for parameter in stage.parameters]
        lookup = _Lookup(graph, module)
        parameters = [_parameter(lookup, parameter, replaced) for parameter in given]
        result = graph.call_function(function, (module, number, externals, parameters))
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
    return source_of(graph, f"{name}, one chain unfused").compiled()


def _text(chain: Chain) -> str:
    """The block as the report shows it: an added tensor is taken to have the shape of what it is added to."""
    names = {"add": "residual_add", "mul": "channel_mul(per=sample)"}
    return " | ".join(names.get(stage.text, stage.text) for stage in chain.written)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What a fused call is made from; equal specs have one function."""

    text: str
    texts: tuple[str, ...]  # of the written stages
    slots: tuple[tuple[int, str], ...]  # of the parameters that are operands: number and operation
    places: tuple[int, ...]  # of the stages of operands
    conv: str | None
    dimensions: int | None
    trailing: int  # dimensions of one element that the result keeps
    verified: bool  # PyTorch refuses to normalise single elements
    original: Callable[..., Any]


def _spec(chain: Chain, text: str, original: Callable[..., Any]) -> _Spec:
    parameters = [parameter for stage in chain.stages for parameter in stage.parameters]
    keeps = any(stage.keep_dimensions for stage in chain.stages)
    return _Spec(
        text,
        tuple(stage.text for stage in chain.written),
        tuple((i, parameter.op) for i, parameter in enumerate(parameters) if isinstance(parameter, Operand)),
        tuple(i for i, stage in enumerate(chain.written) if stage.kind == "operand"),
        chain.stages[0].text if chain.stages[0].kind == "conv" else None,
        chain.dimensions,
        chain.dimensions - 2 if keeps and chain.dimensions is not None else 0,
        any(stage.kind == "norm" for stage in chain.stages),
        original,
    )


@functools.lru_cache(maxsize=4096)
def _fused(spec: _Spec) -> Callable[..., Any]:
    fits = _input_check(spec.dimensions)
    bind = _operand_binder(spec)
    shape_of = _shape_before_tail(spec)
    text, original = spec.text, spec.original
    ones = (1,) * spec.trailing
    few, lonely = _single_elements(spec) if spec.verified else (-1, None)

    def run(module: Any, number: int, externals: list[Any], parameters: list[Any]) -> Tensor:
        call, input = module._onepass.calls[number], externals[0]
        if not fits(input):
            _fallback.left(call.site, _fallback.STAGES, _why_unfit(input, spec.dimensions))
            return original(module, *externals)
        block = text
        if bind is not None:
            bound = bind(shape_of(input), parameters)
            if bound is None:
                _fallback.left(call.site, _fallback.STAGES, _UNBOUND)
                return original(module, *externals)
            block, parameters = bound
        if torch.compiler.is_compiling():
            output = _ops.run_traced(block, input, parameters, None, call.site)
        else:
            if lonely is not None and input.size(-1) <= few and lonely(shape_of(input)):
                return original(module, *externals)  # which raises
            call.block = block
            call.input = (input.shape, input.stride(), input.dtype, input.device)
            try:
                output = _ops.run_block(block, input, parameters, None, call.site, True)
            except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
                return _redo(call, original, module, externals, error)
        return output.reshape(output.shape + ones) if ones else output

    return run


def _redo(
    call: Call, original: Callable[..., Any], module: Any, externals: list[Any], error: Exception
) -> Tensor:
    """What the library refuses PyTorch computes, or refuses in its own words."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    try:
        output = original(module, *externals)
    except Exception as own:
        raise own from None
    _fallback.left(
        call.site, _fallback.STAGES, str(error).splitlines()[0] if str(error) else "it was refused"
    )
    return output


def _single_elements(spec: _Spec) -> tuple[int, Callable[[tuple[int, ...]], bool]]:
    """Whether PyTorch refuses to normalise a tensor of this shape, for each value would be alone.

    Asked only for inputs whose last dimension is no longer than the first of what is returned.
    """
    norm = next(stage for stage in describe(spec.text).stages if isinstance(stage, Norm))
    conv = None if spec.conv is None else describe(spec.conv).conv
    few = 1 if conv is None else conv.stride[-1] + conv.dilation[-1] * (conv.kernel[-1] - 1)

    def lonely(shape: tuple[int, ...]) -> bool:
        values = math.prod(shape[2:])
        if not norm.instance:
            values *= shape[0] * shape[1] // norm.group_count(shape[1])
        return values == 1 and 0 not in shape

    return few, lonely


def _input_check(dimensions: int | None) -> Callable[[Tensor], bool]:
    if dimensions is None:
        return lambda input: 2 <= input.dim() <= 5 and input.is_floating_point()
    return lambda input: input.dim() == dimensions and input.is_floating_point()


def _why_unfit(input: Tensor, dimensions: int | None) -> str:
    if not input.is_floating_point():
        return f"the input of {str(input.dtype).removeprefix('torch.')} is not floating-point"
    return f"the input has {input.dim()} dimensions, must have {dimensions or '2 to 5'}"


_UNBOUND = "a tensor that is added or multiplied is neither of the input's shape nor one value per channel"


def _shape_before_tail(spec: _Spec) -> Callable[[Tensor], tuple[int, ...]]:
    if spec.conv is None:
        return lambda input: tuple(input.shape)
    conv = describe(spec.conv).conv

    def shape(input: Tensor) -> tuple[int, ...]:
        spatial = [conv.output_size(d, size) for d, size in enumerate(input.shape[2:])]
        return (input.shape[0], conv.out_channels, *spatial)

    return shape


Binder = Callable[[tuple[int, ...], list[Any]], tuple[str, list[Any]] | None]


def _operand_binder(spec: _Spec) -> Binder | None:
    """Finds the block's text and parameters once the operands' shapes are known; None without operands."""
    slots, texts, places = spec.slots, spec.texts, spec.places
    if not slots:
        return None
    blocks: dict[tuple[str, ...], str] = {}

    def bind(shape: tuple[int, ...], given: list[Any]) -> tuple[str, list[Any]] | None:
        bound, found = list(given), []
        for index, op in slots:
            text, bound[index] = fit(op, given[index], shape)
            if text is None:
                return None
            found.append(text)
        key = tuple(found)
        if key not in blocks:
            named = dict(zip(places, found, strict=True))
            blocks[key] = " | ".join(named.get(i, text) for i, text in enumerate(texts))
        return blocks[key], bound

    return bind


def fit(op: str, operand: Any, shape: tuple[int, ...]) -> tuple[str | None, Any]:
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
