"""Dynamo's graph read as stages: modules are inlined, and every node has a fake tensor with its sizes."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from onepass._match import Chain, Graph
from onepass._stage import Affine, NoMatch, Operand, Stage
from onepass._stages import identity
from onepass._trace import Trace

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DEVICES = ("cpu", "cuda")
_SWITCHES = {
    "_enter_autocast",
    "_exit_autocast",
    "_set_grad_enabled",
    "_enter_inference_mode",
    "_exit_inference_mode",
    "set_grad_enabled",
}


def value_of(node: Any) -> Any:
    """The fake tensor or symbolic number that stands for the node's result; None where there is none."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def are_equal(sizes: Any, others: Any) -> bool:
    """Whether equal for all sizes: a plain comparison of symbolic sizes would add a guard."""
    return len(sizes) == len(others) and statically_known_true(sym_eq(tuple(sizes), tuple(others)))


def name_writes(graph: fx.Graph) -> None:
    """Gives what reads a tensor after an in-place call the call's result, which is the same tensor.

    Dynamo has `h.relu_(); h *= 2` read h twice; a chain goes from result to result.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        written = _written_self(node)
        if written is not None:
            later = [user for user in written.users if order[user] > order[node]]
            for user in later:
                user.replace_input_with(written, node)


def _written_self(node: fx.Node) -> fx.Node | None:
    """The tensor that an in-place call writes and gives back."""
    if (
        node.op not in ("call_function", "call_method")
        or not node.args
        or not isinstance(node.args[0], fx.Node)
    ):
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = name.endswith("_") and not name.endswith("__")
    in_place = named or node.target in _IN_PLACE_OPERATORS or node.kwargs.get("inplace") is True
    value, result = value_of(node.args[0]), value_of(node)
    if not in_place or not isinstance(value, Tensor) or not isinstance(result, Tensor):
        return None
    return node.args[0] if value is result else None


class DynamoGraph(Graph):
    """The matcher's graph of one graph of Dynamo's."""

    def __init__(self, module: fx.GraphModule) -> None:
        switches = itertools.accumulate(_is_switch(node) for node in module.graph.nodes)
        self.regions = dict(zip(module.graph.nodes, switches, strict=True))
        super().__init__(Trace(module, False, module.graph, None, {}, {}, {}), "fuse", (), ())  # type: ignore[arg-type]

    def shape_of(self, node: Any) -> tuple[int, ...]:
        """The sizes of a weight; one with symbolic sizes is none."""
        value = value_of(node)
        if not isinstance(value, Tensor) or any(type(size) is not int for size in value.shape):
            raise NoMatch
        return tuple(value.shape)

    def per_channel(self, node: fx.Node) -> bool:
        """Operands are told apart by their sizes, in `_read`; both orders are tried."""
        value = value_of(node)
        return isinstance(value, Tensor) and value.dim() >= 3 and are_equal(value.shape[-1:], (1,))

    def may_follow(self, before: fx.Node, stage: Stage) -> bool:
        """Autocast and grad mode are those of all of a block's nodes, or of none."""
        return self.regions[before] == self.regions[stage.nodes[-1]]

    def is_worth(self, chain: Chain) -> bool:
        """A convolution or a norm alone too: costs say whether the library's is faster."""
        kinds = [stage.kind for stage in chain.written]
        return super().is_worth(chain) or kinds in (["conv"], ["norm"])

    def _read(self, node: fx.Node) -> Iterator[Stage]:
        if node.op not in ("call_function", "call_method") or not _is_computed(value_of(node)):
            return
        for stage in (*super()._read(node), *_no_copy(node), *_flat_mean(node)):
            if len({self.regions[inner] for inner in stage.nodes}) == 1 and _fits(stage):
                yield stage if stage.kind != "operand" else _bound(stage)

    def _mutated(self, node: fx.Node) -> list[fx.Node]:
        """As of a trace; operators say what they write, calls of graphs and modules may write anything."""
        if node.op == "call_module":
            return node.all_input_nodes
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return node.all_input_nodes
        if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return node.all_input_nodes if _writes(node.target) else []
        written = super()._mutated(node)
        first = node.args[0] if node.args else None
        if written and isinstance(first, list | tuple):  # torch._foreach_add_ and the like
            return [inner for inner in first if isinstance(inner, fx.Node)]
        return written

    def is_fresh(self, node: fx.Node) -> bool:
        """As of a trace; calls of modules are not looked into."""
        return node.op != "call_module" and super().is_fresh(node)


def _is_switch(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _SWITCHES


def _writes(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    return any(getattr(target, name)._schema.is_mutable for name in target.overloads())


def _is_computed(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype in DTYPES
        and value.device.type in _DEVICES
        and value.layout == torch.strided
        and not value.is_quantized
    )


def _fits(stage: Stage) -> bool:
    """Whether the tensors are of sizes and types that the stage takes."""
    value = value_of(stage.main)
    least, most = stage.dimensions
    if not _is_computed(value) or not least <= value.dim() <= most:
        return False
    tensors = [value_of(node) for parameter in stage.parameters for node in nodes_of(parameter)]
    if not all(_is_computed(tensor) and tensor.device == value.device for tensor in tensors):
        return False
    per_channel = stage.kind in ("norm", "affine") or stage.text == "prelu(per=channel)"
    return not per_channel or all(are_equal(tensor.shape, value.shape[1:2]) for tensor in tensors)


def nodes_of(parameter: Any) -> list[fx.Node]:
    """The nodes that a parameter is made from."""
    if isinstance(parameter, Affine):
        return parameter.norm.tensors
    return [parameter.node if isinstance(parameter, Operand) else parameter]


def _no_copy(node: fx.Node) -> Iterator[Stage]:
    """A call that gives back its tensor as it is: to its own type, a view of its own sizes."""
    main = node.args[0] if node.args else None
    value, result = value_of(main), value_of(node)
    if node.op != "call_method" or node.target not in _SAME or not isinstance(value, Tensor):
        return
    same = value.dtype == result.dtype and value.device == result.device
    if same and are_equal(value.shape, result.shape) and are_equal(value.stride(), result.stride()):
        yield dataclasses.replace(identity(main), nodes=(node,))


_SAME = {
    "contiguous",
    "to",
    "float",
    "half",
    "bfloat16",
    "type_as",
    "view",
    "reshape",
    "expand_as",
    "view_as",
}
_FLAT = {"flatten", "view", "reshape", torch.flatten, torch.reshape}


def _flat_mean(node: fx.Node) -> Iterator[Stage]:
    """The mean over all of space, of a view that has it in one dimension."""
    flat = node.args[0] if node.args else None
    if node.target not in ("mean", torch.mean) or not isinstance(flat, fx.Node) or flat.target not in _FLAT:
        return
    base = flat.args[0]
    value, viewed, result = value_of(base), value_of(flat), value_of(node)
    dims = (*node.args[1:], *(v for k, v in node.kwargs.items() if k in ("dim", "axis")))
    keeps = bool(node.kwargs.get("keepdim", False))
    plain = len(dims) == 1 and dims[0] in (-1, 2, [-1], [2], (-1,), (2,)) and "dtype" not in node.kwargs
    if not plain or keeps or not isinstance(value, Tensor) or viewed.dim() != 3 or list(flat.users) != [node]:
        return
    if value.dim() > 3 and are_equal(value.shape[:2], viewed.shape[:2]) and result.dim() == 2:
        yield Stage("mean", "mean", base, dimensions=(value.dim(),) * 2, nodes=(flat, node))


def _bound(stage: Stage) -> Stage:
    """An operand's stage with the text that its sizes give; raises NoMatch where the language has none."""
    (operand,) = stage.parameters
    shape, sizes = value_of(stage.main).shape, value_of(operand.node).shape
    ones = (1,) * (len(shape) - 2)
    if operand.op == "add" and are_equal(sizes, shape):
        return dataclasses.replace(stage, text="residual_add")
    if ones and are_equal(sizes, (*shape[:2], *ones)):
        return dataclasses.replace(stage, text=f"channel_{operand.op}(per=sample)")
    if ones and (are_equal(sizes, (1, shape[1], *ones)) or are_equal(sizes, (shape[1], *ones))):
        return dataclasses.replace(stage, text=f"channel_{operand.op}")
    raise NoMatch


_LOOPS = {
    *("add", "sub", "mul", "div", "truediv", "neg", "pow", "sqrt", "rsqrt", "exp", "log", "clamp", "clip"),
    *("relu", "relu6", "leaky_relu", "elu", "gelu", "silu", "mish", "softplus", "sigmoid", "tanh", "prelu"),
    *("hardswish", "hardsigmoid", "hardtanh", "dropout", "softmax", "where", "maximum", "minimum"),
    *("cat", "concat", "interpolate", "pad", "batch_norm", "group_norm", "instance_norm", "layer_norm"),
    *("mean", "sum", "var", "to", "float", "half", "bfloat16", "type_as", "pixel_shuffle"),
}


def is_loop(node: fx.Node) -> bool:
    """Whether Inductor computes the node in a loop of its own making, not by a kernel of PyTorch's."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    name = name.removesuffix("_")
    return name in _LOOPS or (node.target in _IN_PLACE_OPERATORS and name[1:] in _LOOPS)


_IN_PLACE_OPERATORS = {operator.iadd, operator.isub, operator.imul, operator.itruediv}
