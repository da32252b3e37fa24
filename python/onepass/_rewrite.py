"""Turning a traced graph into a Python function that runs its chains as blocks."""

from __future__ import annotations

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

from onepass import _alone, _batch_norm, _cpu, _cuda, _fallback, _ops
from onepass._description import Norm, describe
from onepass._fallback import Site
from onepass._frozen import Frozen
from onepass._match import Chain
from onepass._stage import Affine, Attribute, BatchNorm, Operand
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
    bare: bool = False  # a convolution and its batch norm, nothing else
    alone: bool = False  # a norm or an activation, nothing else
    input: _cpu.Geometry | None = None
    declined: _cpu.Geometry | None = None  # an input that, alone and without gradients, is PyTorch's

    def renewed(self, said: set[str]) -> Call:
        """For a copy of the module: nothing has run yet."""
        site = Site(self.site.name, said, self.site.numerics, self.site.layer)
        return Call(self.key, self.modules, self.key, site, self.bare, self.alone)


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


def compile_graph(graph: fx.Graph, name: str) -> Callable[..., Any]:
    """The graph as a function of the module and the graph's inputs."""
    code = graph.python_code("self")
    return compile_once(code.src, dict(code.globals), name, "forward")


def rewrite(
    graph: fx.Graph, chains: Sequence[Chain], name: str, site: Site, first_number: int = 0
) -> tuple[list[Call], list[Attribute]]:
    """Replaces each chain of the graph by one call. Returns the calls, and the parameters that they take.

    The graph gets the module as its first input, and a tuple of these parameters as its last. A chain that
    leaves the fused path is counted by itself, and warned of as its module is: by `site`. The calls are found
    on the module by their numbers, so that equal modules share the code.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for number, node in enumerate(inputs):
        node.target = f"onepass_{number}"  # a user's name may be that of a function in the code
        node._rename(node.target)
    with graph.inserting_before(next(iter(graph.nodes))):
        module = graph.placeholder("onepass_module")
    with graph.inserting_after(inputs[-1] if inputs else module):
        tensors = _Tensors(graph, graph.placeholder("onepass_tensors"))
    replaced: dict[fx.Node, fx.Node] = {}
    calls = [
        _replace(graph, module, tensors, chain, replaced, name, site, number)
        for number, chain in enumerate(chains, first_number)
    ]
    return calls, list(tensors.nodes)


def _replace(
    graph: fx.Graph,
    module: fx.Node,
    tensors: _Tensors,
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
    spec = _spec(chain, text, _original(chain, externals, name))
    own = Site(site.name, site.said, site.numerics, layer)
    own.frozen = None if site.frozen is None else Frozen()
    call = Call(text, tuple(chain.modules), text, own, spec.bare, spec.alone)
    function = _fused(spec)
    # As early as its operands allow, so that it reads its input where the first stage did; but after what is
    # asked of sizes on the way, which may be asserted.
    order = {node: index for index, node in enumerate(graph.nodes)}
    anchor = nodes[-1] if chain.size_reads else max((nodes[0], *externals), key=order.__getitem__)
    with graph.inserting_before(anchor.next):
        given = [parameter for stage in chain.stages for parameter in stage.given]
        parameters = [_given(tensors, parameter, replaced) for parameter in given]
        result = graph.call_function(function, (module, number, externals, parameters))
    _give_sizes(graph, module, chain, replaced, name)
    replaced[nodes[-1]] = result
    nodes[-1].replace_all_uses_with(result)
    for node in reversed(nodes):
        graph.erase_node(node)
    return call


def _give_sizes(
    graph: fx.Graph, module: fx.Node, chain: Chain, replaced: dict[fx.Node, fx.Node], name: str
) -> None:
    """Who asks for the sizes of a value that is no longer there is given them by the chain's input."""
    reads = chain.size_reads
    if not reads:
        return
    order = {node: index for index, node in enumerate(graph.nodes)}
    with graph.inserting_before(min(reads, key=order.__getitem__)):
        sizes = _sizes_node(graph, module, chain, replaced, name)
    for read in reads:
        with graph.inserting_before(read):
            replaced[read] = _answer(graph, read, sizes)
        read.replace_all_uses_with(replaced[read])
        graph.erase_node(read)


def _sizes_node(
    graph: fx.Graph, module: fx.Node, chain: Chain, replaced: dict[fx.Node, fx.Node], name: str
) -> fx.Node:
    """The sizes that all values of the chain have, from what it reads first."""
    first = chain.stages[0]
    if first.kind != "conv":
        return graph.call_function(getattr, (replaced.get(first.main, first.main), "shape"))
    conv = Chain([first])
    externals = list(dict.fromkeys(replaced.get(node, node) for node in conv.externals))
    function = _convolved_sizes(first.text, _original(conv, externals, name))
    return graph.call_function(function, (module, *externals))


def _answer(graph: fx.Graph, read: fx.Node, sizes: fx.Node) -> fx.Node:
    """What a node that asks for sizes gives."""
    dimensions = [*read.args[1:], *read.kwargs.values()]
    if read.target in ("numel", "nelement"):
        return graph.call_method("numel", (sizes,))
    if read.target in ("dim", "ndimension") or dimensions == ["ndim"]:
        return graph.call_function(len, (sizes,))
    if dimensions in ([], ["shape"], [None]):
        return sizes
    return graph.call_function(operator.getitem, (sizes, dimensions[0]))


@functools.lru_cache(maxsize=4096)
def _convolved_sizes(text: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the sizes of a convolution's output; what it does not take PyTorch's answers."""
    conv = describe(text).conv

    def sizes(module: Any, input: Tensor, *others: Any) -> torch.Size:
        shape = input.shape
        if len(shape) == conv.rank + 2 and shape[1] == conv.in_channels:
            output = conv.output_shape(shape)
            if min(output) > 0:
                return torch.Size(output)
        return original(module, input, *others).shape

    return sizes


class _Tensors:
    """The parameters of modules, found while the facts are checked: an input of the graph."""

    def __init__(self, graph: fx.Graph, given: fx.Node) -> None:
        self.graph = graph
        self.given = given
        self.nodes: dict[Attribute, fx.Node] = {}

    def parameter(self, attribute: Attribute) -> fx.Node:
        if attribute.computed:
            return self.graph.create_node("get_attr", f"{attribute.module}.{attribute.name}")
        if attribute not in self.nodes:
            with self.graph.inserting_after(self.given):
                self.nodes[attribute] = self.graph.call_function(
                    operator.getitem, (self.given, len(self.nodes))
                )
        return self.nodes[attribute]


def _given(tensors: _Tensors, parameter: Any, replaced: dict[fx.Node, fx.Node]) -> Any:
    """A parameter of the call; of a batch norm a tuple: its tensors, and eps."""
    if not isinstance(parameter, BatchNorm):
        return _parameter(tensors, parameter, replaced)
    norm = (parameter.mean, parameter.variance, parameter.weight, parameter.bias)
    return *(None if part is None else _parameter(tensors, part, replaced) for part in norm), parameter.eps


def _parameter(tensors: _Tensors, parameter: Any, replaced: dict[fx.Node, fx.Node]) -> fx.Node:
    if isinstance(parameter, Attribute):
        return tensors.parameter(parameter)
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


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What a fused call is made from; equal specs have one function."""

    text: str
    texts: tuple[str, ...]  # of the written stages
    slots: tuple[tuple[int, str], ...]  # of what is given and is an operand: number and operation
    places: tuple[int, ...]  # of the stages of operands
    settled: tuple[int, ...]  # numbers of parameters that leave the type as it is
    conv: str | None
    dimensions: tuple[int, int]
    trailing: int  # dimensions of one element that the result keeps
    verified: bool  # PyTorch refuses to normalise single elements
    bare: bool  # a convolution and its batch norm, nothing else
    alone: bool  # a norm or an activation, nothing else
    original: Callable[..., Any]


def _spec(chain: Chain, text: str, original: Callable[..., Any]) -> _Spec:
    given = [parameter for stage in chain.stages for parameter in stage.given]
    keeps = any(stage.keep_dimensions for stage in chain.stages)
    return _Spec(
        text,
        tuple(stage.text for stage in chain.written),
        tuple((i, parameter.op) for i, parameter in enumerate(given) if isinstance(parameter, Operand)),
        tuple(i for i, stage in enumerate(chain.written) if stage.kind == "operand"),
        _settled(chain),
        chain.stages[0].text if chain.stages[0].kind == "conv" else None,
        chain.dimensions,
        chain.dimensions[0] - 2 if keeps else 0,
        any(stage.kind == "norm" for stage in chain.stages),
        [stage.kind for stage in chain.written] == ["conv", "affine"],
        chain.single is not None,
        original,
    )


def _settled(chain: Chain) -> tuple[int, ...]:
    """Scales and shifts of batch norms, and what is added or multiplied in place."""
    by_parameter = [
        isinstance(parameter, Affine) or (stage.kind == "operand" and stage.mutated is stage.main)
        for stage in chain.stages
        for parameter in stage.parameters
    ]
    return tuple(i for i, settled in enumerate(by_parameter) if settled)


@functools.lru_cache(maxsize=4096)
def _fused(spec: _Spec) -> Callable[..., Any]:
    least, most = spec.dimensions
    bind = _operand_binder(spec)
    shape_of = _shape_before_tail(spec)
    text, original, settled = spec.text, spec.original, spec.settled
    bare, alone = spec.bare, spec.alone
    ones = (1,) * spec.trailing
    narrow, is_single = _single_elements(spec) if spec.verified else (-1, None)

    def run(module: Any, number: int, externals: list[Any], parameters: list[Any]) -> Tensor:
        call, input = module._onepass.calls[number], externals[0]
        shape, dtype = input.shape, input.dtype  # each 0.1 to 0.2 us: asked for once
        fits = least <= len(shape) <= most and dtype.is_floating_point
        if alone and not (fits and _is_taken(text, input, parameters, call)):
            return original(module, *externals)
        if not fits:
            _fallback.left(call.site, _fallback.STAGES, _why_unfit(input, spec.dimensions))
            return original(module, *externals)
        block = text
        if bare and input.is_cuda and not _is_whole(text, input, parameters, call):
            return original(module, *externals)
        if bind is not None:
            bound = bind(shape_of(input), parameters)
            if bound is None:
                _fallback.left(call.site, _fallback.STAGES, _UNBOUND)
                return original(module, *externals)
            block, parameters = bound
        if torch.compiler.is_compiling():
            if settled:
                if not _norms_fit(parameters, dtype):
                    return original(module, *externals)
                parameters = _with_norms(parameters, dtype)
            output = _ops.run_traced(block, input, parameters, None, call.site, settled)
        else:
            if is_single is not None and shape[-1] <= narrow and is_single(shape_of(input)):
                return original(module, *externals)  # which raises
            call.block = block
            call.input = geometry = (shape, input.stride(), dtype, input.device)
            try:
                if settled:
                    parameters = _with_norms(parameters, dtype)
                output = _ops.run_block(block, input, parameters, None, call.site, geometry, settled=settled)
            except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
                return _redo(call, original, module, externals, error)
        return output.reshape(output.shape + ones) if ones else output

    return run


def _is_whole(text: str, input: Tensor, given: list[Any], call: Call) -> bool:
    """Whether a convolution and its batch norm are one kernel on a GPU: else PyTorch's two are no more than
    its convolution and one kernel here, which needs scale and shift first.
    """
    if torch.compiler.is_compiling():
        return False
    *conv, (mean, _, weight, bias, _) = given
    call.input = _cpu.geometry_of(input)
    scale = mean if weight is None else weight
    shift = scale if bias is None or scale.requires_grad else bias
    one_type = input.dtype is torch.float32  # that of scale and shift
    return one_type and _cuda.is_whole(text, input, [*conv, scale, shift], call.site)


def _is_taken(text: str, input: Tensor, parameters: list[Any], call: Call) -> bool:
    """Whether a single stage is the library's: where it is predicted to be faster."""
    if torch.compiler.is_compiling():
        return False
    geometry = _cpu.geometry_of(input)
    if geometry == call.declined and not torch.is_grad_enabled():
        return False  # 1.6 us less of a call that takes PyTorch 15
    call.input, call.declined = geometry, None
    if _is_any_autocast_enabled() or not _alone.is_computed(input, parameters):
        return False
    gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (input, *parameters))
    try:
        taken = _alone.takes_alone(text, geometry, gradients)
    except TypeError:  # symbolic sizes have no hash
        return False
    if not (taken or gradients):
        call.declined = geometry
    return taken


_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def _norms_fit(given: list[Any], dtype: torch.dtype) -> bool:
    return all(_batch_norm.fits(norm[:-1], dtype) for norm in given if type(norm) is tuple)


def _with_norms(given: list[Any], dtype: torch.dtype) -> list[Tensor]:
    """The block's parameters: batch norms are a scale and a shift."""
    parameters: list[Tensor] = []
    for parameter in given:
        if type(parameter) is tuple:
            *tensors, eps = parameter
            parameters += _batch_norm.operands(tensors, eps, dtype)
        else:
            parameters.append(parameter)
    return parameters


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
    """A width, and a function: whether a norm of this shape has one element per slab, which PyTorch refuses.

    The function is asked only for inputs that are no wider.
    """
    norm = next(stage for stage in describe(spec.text).stages if isinstance(stage, Norm))
    conv = None if spec.conv is None else describe(spec.conv).conv
    narrow = 1 if conv is None else conv.stride[-1] + conv.dilation[-1] * (conv.kernel[-1] - 1)

    def is_single(shape: tuple[int, ...]) -> bool:
        values = math.prod(shape[2:])
        if not norm.instance:
            values *= shape[0] * shape[1] // norm.group_count(shape[1])
        return values == 1 and 0 not in shape

    return narrow, is_single


def _why_unfit(input: Tensor, dimensions: tuple[int, int]) -> str:
    if not input.is_floating_point():
        return f"the input of {str(input.dtype).removeprefix('torch.')} is not floating-point"
    least, most = dimensions
    wanted = str(least) if least == most else f"{least} to {most}"
    return f"the input has {input.dim()} dimensions, must have {wanted}"


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
