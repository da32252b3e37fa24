"""Python code of the blocks of an exported file: the call of a kernel, and the original stages."""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from onepass import _rounding
from onepass._match import Chain
from onepass._stage import Affine, Attribute, BatchNorm
from onepass._stages import CONV_TYPES, exact_type
from onepass._trace import require_length
from onepass.exporting.chains import Found

MARK = "onepass_export_"  # before the names of the blocks in code that torch.fx writes


def replace(graph: fx.Graph, chain: Chain, name: str, replaced: dict[fx.Node, fx.Node]) -> None:
    """Puts one call in the place of the chain, as early as its operands allow."""
    function = _placeholder(name)
    externals = list(dict.fromkeys(replaced.get(node, node) for node in chain.externals))
    order = {node: index for index, node in enumerate(graph.nodes)}
    anchor = max((chain.nodes[0], *externals), key=order.__getitem__)
    with graph.inserting_before(anchor.next):
        result = graph.create_node("call_function", function, tuple(externals), name="fused")
    replaced[chain.nodes[-1]] = result
    chain.nodes[-1].replace_all_uses_with(result)
    for node in reversed(chain.nodes):
        graph.erase_node(node)


def _placeholder(name: str) -> Callable[..., Any]:
    def call(*_: Any) -> None:
        raise AssertionError

    call.__name__ = call.__qualname__ = f"{MARK}{name}"
    call.__module__ = "builtins"
    return call


def statements(graph: fx.Graph, name_of: Callable[[str, Any], str]) -> list[str]:
    """The graph as lines of a function that has `self`."""
    code = graph.python_code("self")
    lines = code.src.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("def forward("))
    body = [line[4:] for line in lines[first + 1 :] if line.strip()]
    text = "\n".join(re.sub(r"\s*#.*$", "", line) if "'" not in line else line for line in body)
    text = re.sub(rf"\w*{MARK}(\w+)\(", r"\1(self, ", text)
    for name, value in code.globals.items():
        if value is require_length:
            line = rf"^\w+ = {name}\((\w+), (\d+)\)(?:;  [\w =]* = None)?$"
            text = re.sub(line, _unpacking, text, flags=re.MULTILINE)
            continue
        if MARK in name or name in ("torch", "device", "inf", "nan", "NoneType"):
            continue
        if isinstance(getattr(value, "__name__", None), str) and value.__name__ == name == "torch":
            continue
        text = re.sub(rf"\b{re.escape(name)}\b", name_of(name, value), text)
    text = re.sub(r"\btorch\._C\._nn\.(\w+)", _functional, text)
    text = re.sub(r"(?<![\w.])inf\b", "torch.inf", text)  # fx has it as a name of its own
    # One statement and its return are one line.
    text = re.sub(r"(?:^|(?<=\n))(\w+) = (.*?)(?:;  [\w =]* = None)?\nreturn \1$", r"return \2", text)
    return text.splitlines()


def _unpacking(match: re.Match[str]) -> str:
    """Raises where there are more or fewer values."""
    return "_, " * int(match.group(2)) + f"= {match.group(1)}"


def _functional(match: re.Match[str]) -> str:
    public = hasattr(torch.nn.functional, match.group(1))
    return f"torch.nn.functional.{match.group(1)}" if public else match.group(0)


def _lines_of(chain_nodes: Sequence[fx.Node], result: fx.Node) -> list[str]:
    """Nodes of a chain as they were, without a return: what they read has the names of the nodes."""
    graph = fx.Graph()
    own = set(chain_nodes)
    copies: dict[fx.Node, fx.Node] = {}
    for node in chain_nodes:
        for outer in node.all_input_nodes:
            if outer not in own and outer not in copies:
                copies[outer] = graph.placeholder(outer.name)
    for node in chain_nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[result])
    lines = statements(graph, lambda name, value: name)
    return [re.sub(r";  [\w =,]* = None$", "", line) for line in lines]


def _path(path: str) -> str:
    """A submodule as an expression of `self`."""
    text = "self"
    for part in path.split(".") if path else ():
        text = f"{text}.{part}" if part.isidentifier() else f'getattr({text}, "{part}")'
    return text


def _expression(parameter: Any, replaced: dict[fx.Node, fx.Node]) -> str:
    if isinstance(parameter, BatchNorm):
        return _norm_call(parameter, _path, replaced)
    if isinstance(parameter, Attribute):
        return f"{_path(parameter.module)}.{parameter.name}"
    node, suffix = parameter
    return f"{replaced.get(node, node).name}{suffix}"


def _looked_up(parameter: Any, replaced: dict[fx.Node, fx.Node]) -> str:
    """The same by dictionaries: 0.1 us where an attribute of a module takes 1."""
    if isinstance(parameter, BatchNorm):
        return _norm_call(parameter, _looked_up_path, replaced)
    if not isinstance(parameter, Attribute) or parameter.computed:
        return _expression(parameter, replaced)
    return f'{_looked_up_path(parameter.module)}._parameters["{parameter.name}"]'


def _looked_up_path(path: str) -> str:
    return "self" + "".join(f'._modules["{part}"]' for part in path.split(".") if part)


def _norm_call(norm: BatchNorm, path: Callable[[str], str], replaced: dict[fx.Node, fx.Node]) -> str:
    """The scale and the shift of a batch norm, as two items of a list."""
    if isinstance(norm.mean, Attribute):
        return f"*_batch_norm({path(norm.mean.module)})"
    tensors = (norm.mean, norm.variance, norm.weight, norm.bias)
    given = ["None" if node is None else replaced.get(node, node).name for node in tensors]
    return f"*_scale_and_shift({', '.join(given)}, {norm.eps!r})"


def _parameters(expressions: Sequence[Any], replaced: dict[fx.Node, fx.Node]) -> list[str]:
    """The list of the block's parameters; those of a replica of the model are plain attributes."""
    pairs = [expression.norm if isinstance(expression, Affine) else expression for expression in expressions]
    expressions = [e for e, part in zip(pairs, expressions) if getattr(part, "part", "") != "shift"]
    quick = _list("parameters", [_looked_up(parameter, replaced) for parameter in expressions])
    plain = _list("parameters", [_expression(parameter, replaced) for parameter in expressions])
    if quick == plain:
        return plain
    inside = [[f"    {line}" for line in lines] for lines in (quick, plain)]
    return ["    try:", *inside[0], "    except KeyError:", *inside[1]]


def run_text(chain: Chain, found: Found, name: str, tail: str, replaced: dict[fx.Node, fx.Node]) -> str:
    """A function of the module and what the chain reads: kernels where they fit, else the original code.

    `name` has the block's kernels, `tail` those of what follows PyTorch's convolution; "" where there are
    none.
    """
    description = found.description
    externals = list(dict.fromkeys(replaced.get(node, node).name for node in chain.externals))
    x = externals[0]
    lines = [f"def _run_N(self, {', '.join(externals)}):", f'    """{found.block}"""']
    lines += _parameters(found.expressions, replaced)
    trailing = "[" + ", ".join(["...", *["None"] * found.trailing]) + "]" if found.trailing else ""
    conv_nodes = list(chain.stages[0].nodes) if description.conv is not None else []
    rest = [node for node in chain.nodes if node not in conv_nodes]
    why = []
    if name:
        lines += _attempt("why", name, x, "parameters", trailing)
        why.append("why")
    if conv_nodes:
        *before, last = _lines_of(conv_nodes, conv_nodes[-1])
        x = conv_nodes[-1].name
        lines += [f"    {line}" for line in (*before, f"{x} = {last.removeprefix('return ')}")]
    if tail:
        parameters = f"parameters[{description.conv_parameters}:]" if conv_nodes else "parameters"
        lines += _attempt("why_no_tail", tail, x, parameters, trailing)
        why.append("why_no_tail")
    said = f"    _say({name or tail!r}, {' or '.join(why)})"
    # Where the convolution is the whole block, leaving it to PyTorch is a plan.
    lines += [said] if tail else ["    if why:", f"    {said}"]
    if rest:
        lines += [f"    {line}" for line in _lines_of(rest, rest[-1])]
    else:
        lines.append(f"    return {x}")
    return "\n".join(lines) + "\n"


def _attempt(why: str, block: str, x: str, parameters: str, trailing: str) -> list[str]:
    return [
        f'    result, {why} = _attempt("{block}", {x}, {parameters})',
        "    if result is not None:",
        f"        return result{trailing}",
    ]


def _list(name: str, items: Sequence[str]) -> list[str]:
    line = f"    {name} = [{', '.join(items)}]"
    if len(line) <= 106:
        return [line]
    return [f"    {name} = [", *(f"        {item}," for item in items), "    ]"]


# --- The stages as functions of tensors -------------------------------------------------------------

_ACTIVATIONS: dict[type, tuple[Callable[..., Any], tuple[str, ...]]] = {
    nn.ReLU: (F.relu, ()),
    nn.ReLU6: (F.relu6, ()),
    nn.LeakyReLU: (F.leaky_relu, ("negative_slope",)),
    nn.ELU: (F.elu, ("alpha",)),
    nn.GELU: (F.gelu, ("approximate",)),
    nn.SiLU: (F.silu, ()),
    nn.Hardswish: (F.hardswish, ()),
    nn.Hardsigmoid: (F.hardsigmoid, ()),
    nn.Sigmoid: (torch.sigmoid, ()),
    nn.Tanh: (torch.tanh, ()),
    nn.Mish: (F.mish, ()),
    nn.Softplus: (F.softplus, ("beta", "threshold")),
    nn.Hardtanh: (F.hardtanh, ("min_val", "max_val")),
    nn.Threshold: (F.threshold, ("threshold", "value")),
}


def stages_text(
    chain: Chain, found: Found, root: nn.Module, replaced: dict[fx.Node, fx.Node], tail: bool
) -> str:
    """The original stages as a function of the block's tensors; `tail`: of those after the convolution."""
    stages = chain.stages[1:] if tail else chain.stages
    skipped = found.description.conv_parameters if tail else 0
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    first = stages[0].main
    known[first] = known[replaced.get(first, first)] = graph.placeholder("x")
    attributes: dict[tuple[str, str], fx.Node] = {}
    affine: dict[Affine, fx.Node] = {}
    operands: list[tuple[fx.Node, str, fx.Node]] = []
    for index, parameter in enumerate(found.expressions[skipped:]):
        given = graph.placeholder(f"p{index}")
        if isinstance(parameter, Attribute):
            attributes[parameter.module, parameter.name] = given
        elif isinstance(parameter, Affine):
            affine[parameter] = given
        else:
            operands.append((*parameter, given))
    for node, suffix, given in operands:
        operand = _as_it_was(graph, given, suffix, found.shapes[node])
        known[node] = known[replaced.get(node, node)] = operand
    given = set(known)
    for stage in stages:
        if stage.mutated in given:  # the caller's tensor, which is a leaf of the gradients
            known[stage.mutated] = graph.call_function(torch.clone, (known[stage.mutated],))
        if stage.kind == "affine":
            scale, shift = (_over_space(graph, affine[part], len(found.sizes)) for part in stage.parameters)
            scaled = graph.call_function(operator.mul, (known[stage.main], scale))
            known[stage.nodes[-1]] = graph.call_function(operator.add, (scaled, shift))
            continue
        for node in stage.nodes:
            known[node] = _called(graph, node, known, attributes, root)
    result = known[stages[-1].nodes[-1]]
    graph.output(graph.call_method("flatten", (result, 1)) if found.trailing else result)
    lines = statements(graph, lambda name, value: name)
    lines = [re.sub(r";  [\w =,]* = None$", "", line) for line in lines]
    head = f"({', '.join(n.name for n in graph.nodes if n.op == 'placeholder')}):"
    return "\n".join([head, *(f"    {line}" for line in lines)]) + "\n"


def _over_space(graph: fx.Graph, values: fx.Node, dimensions: int) -> fx.Node:
    """Values per channel in a shape that broadcasts."""
    return graph.call_method("view", (values, -1, *(1,) * (dimensions - 2))) if dimensions > 2 else values


def _as_it_was(graph: fx.Graph, given: fx.Node, suffix: str, shape: tuple[int, ...]) -> fx.Node:
    """An operand whose expression ends in a flatten, in the shape the stages had."""
    if suffix == ".flatten(1)":
        index = (Ellipsis, *(None for _ in shape[2:]))
        return graph.call_function(operator.getitem, (given, index))
    return graph.call_method("reshape", (given, shape)) if suffix else given


def _called(
    graph: fx.Graph,
    node: fx.Node,
    known: dict[fx.Node, fx.Node],
    attributes: dict[tuple[str, str], fx.Node],
    root: nn.Module,
) -> fx.Node:
    """The node with a function in the place of a module."""
    if node.op != "call_module":
        return graph.node_copy(node, known.__getitem__)
    path, x = str(node.target), known[node.all_input_nodes[0]]
    module: Any = root.get_submodule(path)
    weight, bias = (attributes.get((path, name)) for name in ("weight", "bias"))
    kind = exact_type(module)
    if kind in CONV_TYPES:
        return graph.call_function(*_convolution(module, x, weight, bias))
    if kind is nn.GroupNorm:
        return graph.call_function(F.group_norm, (x, module.num_groups, weight, bias, module.eps))
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        given = (x, None, None, weight, bias, True, module.momentum, module.eps)
        return graph.call_function(F.instance_norm, given)
    if kind is nn.PReLU:
        return graph.call_function(F.prelu, (x, weight))
    if kind in _ACTIVATIONS:
        function, names = _ACTIVATIONS[kind]
        return graph.call_function(function, (x,), {name: getattr(module, name) for name in names})
    return x  # an identity, or dropout that drops nothing


def _convolution(module: Any, x: Any, weight: Any, bias: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    writer = CONV_TYPES[exact_type(module)]
    function = getattr(F, f"conv{'_transpose' if writer.transposed else ''}{writer.rank}d")
    geometry = (module.stride, module.padding)
    if writer.transposed:
        return function, (x, weight, bias, *geometry, module.output_padding, module.groups, module.dilation)
    return function, (x, weight, bias, *geometry, module.dilation, module.groups)


def convolution_text(chain: Chain, found: Found, root: nn.Module) -> str:
    """The convolution alone, without its bias, as a function of two tensors."""
    stage, graph = chain.stages[0], fx.Graph()
    x, weight = (graph.placeholder(text) for text in ("x", "weight"))
    node = stage.nodes[-1]
    if node.op == "call_module":
        graph.output(
            graph.call_function(*_convolution(root.get_submodule(str(node.target)), x, weight, None))
        )
    else:
        given = inspect.signature(_plain(node.target, found)).bind(*node.args, **node.kwargs).arguments
        given = {key: value for key, value in given.items() if key not in ("input", "weight", "bias")}
        graph.output(graph.call_function(node.target, (x, weight), given))
    lines = statements(graph, lambda name, value: name)
    return "\n".join(["(x, weight):", *(f"    {line}" for line in lines)]) + "\n"


def _plain(target: Any, found: Found) -> Callable[..., Any]:
    """The parameters of F.convNd, which are builtins without a signature."""

    def conv(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1): ...  # type: ignore[no-untyped-def]

    def transposed(  # type: ignore[no-untyped-def]
        input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
    ): ...

    return transposed if found.description.conv.transposed else conv


def asking_text() -> str:
    """onepass._rounding.asked without its types, under the name that the file has for it."""
    tree = ast.parse(inspect.getsource(_rounding.asked))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.name, function.returns = "_rounding_of", None
    for argument in function.args.args:
        argument.annotation = None
    return ast.unparse(tree)
