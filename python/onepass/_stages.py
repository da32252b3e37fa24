"""The stages of the block language as PyTorch code writes them: modules, functions, methods and operators.

Each reader takes the arguments of the PyTorch function whose meaning it reads.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from onepass._eager import CLAMP_PASSES_LIMITS
from onepass._shadow import class_of
from onepass._stage import Affine, Attribute, BatchNorm, NoMatch, Stage

ShapeOf = Callable[[Any], tuple[int, ...]]


def _attribute(module: nn.Module, path: str, name: str) -> Attribute | None:
    if name in module._parameters:
        return None if module._parameters.get(name) is None else Attribute(path, name, computed=False)
    return Attribute(path, name, computed=True)


def number(value: Any) -> str:
    """A constant as the language writes it: finite ones alone."""
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise NoMatch
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        raise NoMatch  # which PyTorch does not take
    text = str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
    return text.replace("e-0", "e-").replace("e+", "e")


def _limit(value: Any) -> str:
    """A limit of a clamp, which may be infinite."""
    if type(value) is float and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return number(value)


def _activation(text: str, input: Any, inplace: Any = False) -> Stage:
    return Stage("pointwise", text, input, mutated=input if inplace else None)


def _simple(text: str) -> Callable[..., Stage]:
    return lambda input, inplace=False: _activation(text, input, inplace)


def _leaky_relu(input: Any, negative_slope: Any = 0.01, inplace: Any = False) -> Stage:
    return _activation(f"leaky_relu({number(negative_slope)})", input, inplace)


def _elu(input: Any, alpha: Any = 1.0, inplace: Any = False) -> Stage:
    return _activation(f"elu({number(alpha)})", input, inplace)


def _gelu(input: Any, approximate: Any = "none") -> Stage:
    return _activation({"none": "gelu", "tanh": "gelu_tanh"}[approximate], input)


def _softplus(input: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Stage:
    if (beta, threshold) != (1, 20):
        raise NoMatch
    return _activation("softplus", input)


def _clamp(input: Any, min: Any = None, max: Any = None, inplace: Any = False) -> Stage:
    if min is None and max is None:
        raise NoMatch
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    name = "clamp" if CLAMP_PASSES_LIMITS or low > high else "hardtanh"
    return _activation(f"{name}({_limit(low)},{_limit(high)})", input, inplace)


def _clamp_min(input: Any, min: Any, inplace: Any = False) -> Stage:
    return _clamp(input, min=min, inplace=inplace)


def _clamp_max(input: Any, max: Any, inplace: Any = False) -> Stage:
    return _clamp(input, max=max, inplace=inplace)


def _hardtanh(input: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: Any = False) -> Stage:
    text = f"hardtanh({_limit(min_val)},{_limit(max_val)})"
    if min_val > max_val:  # an error, which is PyTorch's to raise
        raise NoMatch
    text = "relu6" if text == "hardtanh(0,6)" else text
    return _activation(text, input, inplace)


def _threshold(input: Any, threshold: Any, value: Any, inplace: Any = False) -> Stage:
    if (number(threshold), number(value)) != ("0", "0"):
        raise NoMatch
    return _activation("relu", input, inplace)


def _relu6(input: Any, min_val: Any, max_val: Any, inplace: Any) -> Stage:
    """The module is a Hardtanh, whose limits may be set."""
    if (min_val, max_val) != (0, 6):
        return _hardtanh(input, min_val, max_val, inplace)
    return _activation("relu6", input, inplace)


def _prelu(input: Any, weight: Any, slopes: int) -> Stage:
    stage = _activation("prelu" if slopes == 1 else "prelu(per=channel)", input)
    return dataclasses.replace(stage, parameters=(weight,))


def _dropout(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Stage:
    if training is not False and not (type(p) in (int, float) and p == 0):
        raise NoMatch
    return identity(input)


def identity(input: Any) -> Stage:
    return Stage("identity", "", input)


def scale(input: Any, factor: Any, inplace: Any = False) -> Stage:
    stage = _activation(f"mul({number(factor)})", input, inplace)
    return stage if factor != 1 else identity(input)


def shift(input: Any, term: Any, inplace: Any = False) -> Stage:
    stage = _activation(f"add({number(term)})", input, inplace)
    return stage if term != 0 else identity(input)


def _div(input: Any, other: Any, inplace: Any = False) -> Stage:
    if type(other) not in (int, float) or other == 0:
        raise NoMatch
    return scale(input, 1 / other, inplace)


def _sub(input: Any, other: Any, alpha: Any = 1, inplace: Any = False) -> Stage:
    if type(other) not in (int, float) or alpha != 1:
        raise NoMatch
    return shift(input, -other, inplace)


def _neg(input: Any) -> Stage:
    return scale(input, -1)


def _mean(input: Any, dim: Any = None, keepdim: Any = False, dtype: Any = None, axis: Any = None) -> Stage:
    dims = dim if axis is None else axis
    dims = [dims] if type(dims) is int else dims
    if dtype is not None or not isinstance(dims, list | tuple) or not all(type(d) is int for d in dims):
        raise NoMatch
    count = len(dims)
    if not 1 <= count <= 3 or sorted(dims) not in (list(range(2, count + 2)), list(range(-count, 0))):
        raise NoMatch
    return Stage("mean", "mean", input, dimensions=(count + 2,) * 2, keep_dimensions=bool(keepdim))


def _adaptive_mean(rank: int) -> Callable[..., Stage]:
    def read(input: Any, output_size: Any) -> Stage:
        sizes = [output_size] if type(output_size) is int else list(output_size)
        if any(type(size) is not int or size != 1 for size in sizes):
            raise NoMatch
        return Stage("mean", "mean", input, dimensions=(rank + 2,) * 2, keep_dimensions=True)

    return read


def _affine(arguments: list[str], weight: Any, bias: Any, default: bool) -> tuple[list[str], tuple[Any, ...]]:
    if (weight is None) != (bias is None):
        raise NoMatch
    if (weight is not None) != default:
        arguments = [*arguments, "affine=" + ("false" if default else "true")]
    return arguments, () if weight is None else (weight, bias)


def _group_norm(input: Any, num_groups: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5) -> Stage:
    arguments = [number(num_groups)] + ([f"eps={number(eps)}"] if eps != 1e-5 else [])
    arguments, parameters = _affine(arguments, weight, bias, True)
    return Stage("norm", f"group_norm({','.join(arguments)})", input, parameters)


def _instance_norm(
    input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: Any = True, momentum: Any = 0.1, eps: Any = 1e-5,
) -> Stage:  # fmt: skip
    if running_mean is not None or running_var is not None or use_input_stats is not True:
        raise NoMatch
    arguments, parameters = _affine([f"eps={number(eps)}"] if eps != 1e-5 else [], weight, bias, False)
    return Stage(
        "norm", f"instance_norm({','.join(arguments)})" if arguments else "instance_norm", input, parameters
    )


def _batch_norm(
    input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: Any = False, momentum: Any = 0.1, eps: Any = 1e-5,
) -> Stage:  # fmt: skip
    """A batch norm in evaluation, of tensors of the graph: a scale and a shift per channel."""
    given = (running_mean, running_var, *(t for t in (weight, bias) if t is not None))
    if training is not False or not all(isinstance(tensor, fx.Node) for tensor in given):
        raise NoMatch
    return _affine_stage(input, BatchNorm(running_mean, running_var, weight, bias, eps))


def _affine_stage(input: Any, norm: BatchNorm) -> Stage:
    number(norm.eps)
    norm = dataclasses.replace(norm, eps=float(norm.eps))
    parts = (Affine(norm, "scale"), Affine(norm, "shift"))
    return Stage("affine", "channel_mul | channel_add", input, parts)


def _extents(value: Any, rank: int) -> str:
    values = [value] * rank if type(value) is int else list(value)
    values = values * rank if len(values) == 1 else values
    if len(values) != rank or any(type(v) is not int for v in values):
        raise NoMatch
    return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))


@dataclasses.dataclass(frozen=True)
class _Conv:
    """Writes the text of one kind of convolution."""

    rank: int
    transposed: bool

    def stage(self, input: Any, weight: Any, bias: Any, sizes: Any, groups: Any, **geometry: Any) -> Stage:
        if len(sizes) != self.rank + 2 or type(groups) is not int:
            raise NoMatch
        channels = [sizes[0], sizes[1] * groups] if self.transposed else [sizes[1] * groups, sizes[0]]
        arguments = [*map(str, channels), f"k={_extents(list(sizes[2:]), self.rank)}"]
        for key, neutral in (("s", "1"), ("p", "0"), ("d", "1"), ("groups", "1"), ("op", "0")):
            value = str(groups) if key == "groups" else self._value(geometry.get(key, int(neutral)))
            arguments += [f"{key}={value}"] if value != neutral else []
        arguments += ["bias=false"] if bias is None else []
        name = f"conv_transpose{self.rank}d" if self.transposed else f"conv{self.rank}d"
        parameters = (weight,) if bias is None else (weight, bias)
        text = f"{name}({','.join(arguments)})"
        return Stage("conv", text, input, parameters, dimensions=(self.rank + 2,) * 2)

    def _value(self, value: Any) -> str:
        if isinstance(value, str):
            return {"same": "same", "valid": "0"}[value]
        return _extents(value, self.rank)


CONV_TYPES = {
    getattr(nn, f"Conv{'Transpose' if transposed else ''}{rank}d"): _Conv(rank, transposed)
    for rank in (1, 2, 3)
    for transposed in (False, True)
}


def _weights(module: nn.Module, path: str) -> tuple[Attribute | None, Attribute | None]:
    return _attribute(module, path, "weight"), _attribute(module, path, "bias")


def _conv_module(module: Any, path: str, input: Any) -> Stage:
    if module.padding_mode != "zeros":
        raise NoMatch
    writer = CONV_TYPES[exact_type(module)]
    weight, bias = _weights(module, path)
    geometry = {"s": module.stride, "p": module.padding, "d": module.dilation}
    geometry |= {"op": module.output_padding} if writer.transposed else {}
    sizes = _weight_sizes(module, writer.transposed)
    return writer.stage(input, weight, bias, sizes, module.groups, **geometry)


def _weight_sizes(module: Any, transposed: bool) -> tuple[int, ...]:
    """Of a convolution's weight; one that is computed at each access is not computed for that."""
    weight = module._parameters.get("weight")
    if weight is not None:
        return tuple(weight.shape)
    channels = (module.in_channels, module.out_channels)
    first, second = channels if transposed else reversed(channels)
    return (first, second // module.groups, *module.kernel_size)


def _conv_function(writer: _Conv, shape_of: ShapeOf) -> Callable[..., Stage]:
    def conv(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):  # type: ignore[no-untyped-def]
        sizes = shape_of(weight)
        return writer.stage(input, weight, bias, sizes, groups, s=stride, p=padding, d=dilation)

    def transposed(  # type: ignore[no-untyped-def]
        input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
    ):
        sizes = shape_of(weight)
        return writer.stage(
            input, weight, bias, sizes, groups, s=stride, p=padding, d=dilation, op=output_padding
        )

    return transposed if writer.transposed else conv


def _group_norm_module(module: Any, path: str, input: Any) -> Stage:
    return _group_norm(input, module.num_groups, *_weights(module, path), module.eps)


_RUNNING = ("running_mean", "running_var")


def _instance_norm_module(module: Any, path: str, input: Any) -> Stage:
    if module.track_running_stats or any(module._buffers.get(name) is not None for name in _RUNNING):
        raise NoMatch  # buffers are written whatever the flag says
    weight, bias = _weights(module, path)
    stage = _instance_norm(input, weight=weight, bias=bias, eps=module.eps)
    rank = {nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}[exact_type(module)]
    return dataclasses.replace(stage, dimensions=(rank + 2,) * 2)


def _batch_norm_module(module: Any, path: str, input: Any) -> Stage:
    if module.training or any(module._buffers.get(name) is None for name in _RUNNING):
        raise NoMatch  # the statistics are those of the batch
    mean, variance = (Attribute(path, name, computed=False, kind="_buffers") for name in _RUNNING)
    stage = _affine_stage(input, BatchNorm(mean, variance, *_weights(module, path), module.eps))
    return dataclasses.replace(stage, dimensions=_BATCH_NORMS[exact_type(module)])


_BATCH_NORMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4, 4), nn.BatchNorm3d: (5, 5)}


NORM_TYPES = (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

_MODULES: dict[type, Callable[[Any, str, Any], Stage]] = {
    **{conv: _conv_module for conv in CONV_TYPES},
    nn.GroupNorm: _group_norm_module,
    **{norm: _instance_norm_module for norm in NORM_TYPES[1:]},
    **{norm: _batch_norm_module for norm in _BATCH_NORMS},
    nn.ReLU: lambda m, _, x: _activation("relu", x, m.inplace),
    nn.ReLU6: lambda m, _, x: _relu6(x, m.min_val, m.max_val, m.inplace),
    nn.LeakyReLU: lambda m, _, x: _leaky_relu(x, m.negative_slope, m.inplace),
    nn.PReLU: lambda m, path, x: _prelu(x, _attribute(m, path, "weight"), m.num_parameters),
    nn.ELU: lambda m, _, x: _elu(x, m.alpha, m.inplace),
    nn.GELU: lambda m, _, x: _gelu(x, m.approximate),
    nn.SiLU: lambda m, _, x: _activation("swish", x, m.inplace),
    nn.Hardswish: lambda m, _, x: _activation("hardswish", x, m.inplace),
    nn.Hardsigmoid: lambda m, _, x: _activation("hardsigmoid", x, m.inplace),
    nn.Sigmoid: lambda m, _, x: _activation("sigmoid", x),
    nn.Tanh: lambda m, _, x: _activation("tanh", x),
    nn.Mish: lambda m, _, x: _activation("mish", x, m.inplace),
    nn.Softplus: lambda m, _, x: _softplus(x, m.beta, m.threshold),
    nn.Hardtanh: lambda m, _, x: _hardtanh(x, m.min_val, m.max_val, m.inplace),
    nn.Threshold: lambda m, _, x: _threshold(x, m.threshold, m.value, m.inplace),
    nn.Identity: lambda m, _, x: identity(x),
}
_FORWARDS = {cls: cls.forward for cls in _MODULES}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def _in_place(read: Callable[..., Stage]) -> Callable[..., Stage]:
    return lambda *args, **kwargs: read(*args, inplace=True, **kwargs)


_FUNCTIONS: dict[Any, Callable[..., Stage]] = {
    F.relu: _simple("relu"),
    F.relu6: _simple("relu6"),
    F.leaky_relu: _leaky_relu,
    F.elu: _elu,
    F.gelu: _gelu,
    F.silu: _simple("swish"),
    F.hardswish: _simple("hardswish"),
    F.hardsigmoid: _simple("hardsigmoid"),
    F.mish: _simple("mish"),
    F.softplus: _softplus,
    F.hardtanh: _hardtanh,
    F.hardtanh_: _in_place(_hardtanh),
    F.leaky_relu_: _in_place(_leaky_relu),
    F.elu_: _in_place(_elu),
    F.threshold: _threshold,
    F.group_norm: _group_norm,
    torch.group_norm: lambda *args, cudnn_enabled=True, **kwargs: _group_norm(*args[:5], **kwargs),
    F.instance_norm: _instance_norm,
    F.batch_norm: _batch_norm,
    torch.batch_norm: lambda *args, cudnn_enabled=True, **kwargs: _batch_norm(*args[:8], **kwargs),
    **{dropout: _dropout for dropout in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)},
    **{getattr(F, f"adaptive_avg_pool{rank}d"): _adaptive_mean(rank) for rank in (1, 2, 3)},
    operator.truediv: _div,
    operator.itruediv: _in_place(_div),
    operator.sub: _sub,
    operator.isub: _in_place(_sub),
    operator.neg: _neg,
}

# Operations that are also functions of torch and methods of tensors, by name; a trailing _ means in place.
_NAMED: dict[str, Callable[..., Stage]] = {
    "relu": _simple("relu"),
    "sigmoid": _simple("sigmoid"),
    "tanh": _simple("tanh"),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
    "threshold": _threshold,
    "div": _div,
    "sub": _sub,
    "neg": _neg,
    "mean": _mean,
}

CONV_FUNCTIONS = {
    getattr(F, f"conv{'_transpose' if writer.transposed else ''}{writer.rank}d"): writer
    for writer in CONV_TYPES.values()
}


def exact_type(module: nn.Module) -> type:
    """The module's class; of a parametrised module, the class it was before."""
    cls = module.__class__
    return cls.__bases__[0] if "parametrizations" in module._modules else cls


def static_shape(node: Any, root: nn.Module) -> tuple[int, ...]:
    """The shape of a tensor computed from parameters alone."""
    try:
        return tuple(_on_meta(node, root).shape)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise NoMatch from None


def _on_meta(node: Any, root: nn.Module) -> Any:
    if not isinstance(node, fx.Node):
        return node
    if node.op == "get_attr":
        return torch.empty_like(operator.attrgetter(node.target)(root), device="meta", requires_grad=False)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda inner: _on_meta(inner, root))
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    if node.op != "call_function":
        raise NoMatch
    return node.target(*args, **kwargs)


def module_reader(module: nn.Module) -> Callable[..., Stage]:
    """What reads the call of a module from the module, its path and the arguments."""
    if class_of(module) in _DROPOUTS:
        return lambda m, _, input: _dropout(input, m.p, m.training)
    if class_of(module).forward is not _FORWARDS.get(exact_type(module)):
        raise NoMatch  # patched since PyTorch was loaded
    try:
        return _MODULES[exact_type(module)]
    except KeyError:
        raise NoMatch from None


def function_reader(target: Any, shape_of: ShapeOf) -> Callable[..., Stage]:
    """What reads the call of a function, or of the tensor method of this name, from the arguments.

    `shape_of` gives the sizes of a weight, or raises NoMatch where they are not known.
    """
    if target in (F.prelu, torch.prelu, "prelu"):
        return lambda input, weight: _prelu(input, weight, shape_of(weight)[0])
    if target in CONV_FUNCTIONS:
        return _conv_function(CONV_FUNCTIONS[target], shape_of)
    if target in _FUNCTIONS:
        return _FUNCTIONS[target]
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if not isinstance(target, str) and getattr(torch, name, None) is not target:
        raise NoMatch
    if name in _NAMED:
        return _NAMED[name]
    if name.removesuffix("_") not in _NAMED:
        raise NoMatch
    return _in_place(_NAMED[name.removesuffix("_")])
