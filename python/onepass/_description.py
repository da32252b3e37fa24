"""Blocks as Python values: the stages with their numbers, the parameters, and shapes that may be symbolic."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from onepass import _library

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution or transposed convolution; one number per spatial dimension."""

    text: str
    rank: int
    transposed: bool
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding_before: tuple[int, ...]
    padding_after: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    bias: bool

    def output_size(self, dimension: int, size: Any) -> Any:
        """The size after the convolution in one spatial dimension, also of a symbolic size."""
        span = self.dilation[dimension] * (self.kernel[dimension] - 1) + 1
        padding = self.padding_before[dimension] + self.padding_after[dimension]
        if self.transposed:
            return (size - 1) * self.stride[dimension] + span + self.output_padding[dimension] - padding
        return (size + padding - span) // self.stride[dimension] + 1

    @property
    def weights(self) -> int:
        """How many there are."""
        return self.in_channels * self.out_channels // self.groups * math.prod(self.kernel)

    def output_shape(self, sizes: Sequence[Any]) -> list[Any]:
        """Of an input of these sizes, which may be symbolic."""
        return [
            sizes[0],
            self.out_channels,
            *(self.output_size(d, size) for d, size in enumerate(sizes[2:])),
        ]

    def multiply_adds(self, sizes: Sequence[int]) -> int:
        """Each position of the coarser side with each tap and each pair of a group's channels."""
        spatial = sizes[2:]
        if not self.transposed:
            spatial = [self.output_size(d, size) for d, size in enumerate(spatial)]
        return sizes[0] * math.prod(spatial) * self.weights


@dataclasses.dataclass(frozen=True)
class Pointwise:
    """An activation or an operation with an argument; `per` says how many values a slope or channel has."""

    text: str
    op: str
    a: float
    b: float
    argument: str
    per: str


@dataclasses.dataclass(frozen=True)
class Norm:
    """A group or instance normalisation."""

    text: str
    instance: bool
    groups: int
    eps: float
    affine: bool

    def group_count(self, channels: int) -> int:
        """How many slabs a sample has."""
        return channels if self.instance else self.groups


@dataclasses.dataclass(frozen=True)
class Mean:
    """The mean over all spatial dimensions."""

    text: str


Stage = Conv | Pointwise | Norm | Mean


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One tensor the block takes besides its input."""

    name: str
    stage: int
    role: str


@dataclasses.dataclass(frozen=True)
class Description:
    """A parsed block.

    What follows from the stages are fields and not properties: Dynamo reads them without tracing code.
    """

    text: str
    stages: tuple[Stage, ...]
    parameters: tuple[Parameter, ...]
    names: tuple[str, ...]  # of the parameters, in order
    conv: Conv | None
    norm: Norm | None
    conv_parameters: int  # how many of the parameters, the first ones, are the convolution's
    tail: str  # the text of the block without its convolution, empty where nothing is left
    after_conv: Description | None  # the tail as a block of its own, where a convolution is before it
    # The convolution without its bias, where a tail follows it, and the tail with the bias before it.
    conv_alone: Description | None
    after_product: Description | None

    def conv_output_shape(self, sizes: Sequence[Any]) -> list[Any]:
        """The shape before the tail, also of symbolic sizes."""
        return list(sizes) if self.conv is None else self.conv.output_shape(sizes)

    def output_shape(self, sizes: Sequence[Any]) -> list[Any]:
        """The shape after all stages, also of symbolic sizes."""
        shape = self.conv_output_shape(sizes)
        return shape[:2] if isinstance(self.stages[-1], Mean) else shape

    def statistics_shape(self, sizes: Sequence[Any]) -> list[Any]:
        """The shape of mean and reciprocal deviation per slab; one empty dimension without a norm."""
        if self.norm is None:
            return [0]
        batch, channels = self.conv_output_shape(sizes)[:2]
        return [batch, self.norm.group_count(channels), 2]


def _stage(kind: str, fields: dict[str, Any]) -> Stage:
    if kind == "conv":
        return Conv(
            **{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
        )
    if kind == "pointwise":
        return Pointwise(**fields)
    if kind == "mean":
        return Mean(**fields)
    return Norm(instance=kind == "instance_norm", **fields)


def _without_bias(conv: Conv) -> str:
    return f"{conv.text[:-1]},bias=false)" if conv.bias else conv.text


def _description(text: str, stages: tuple[Stage, ...], parameters: tuple[Parameter, ...]) -> Description:
    conv = stages[0] if isinstance(stages[0], Conv) else None
    conv_parameters = sum(parameter.role.startswith("conv_") for parameter in parameters)
    tail = " | ".join(stage.text for stage in stages if stage is not conv)
    after_conv = conv_alone = after_product = None
    if conv is not None and tail:
        rest = (dataclasses.replace(p, stage=p.stage - 1) for p in parameters[conv_parameters:])
        after_conv = _description(tail, stages[1:], tuple(rest))
        plain = dataclasses.replace(conv, bias=False, text=_without_bias(conv))
        conv_alone = _description(plain.text, (plain,), parameters[:1])
        after_product = _remember(f"channel_add | {tail}") if conv.bias else after_conv
    return Description(
        text,
        stages,
        parameters,
        names=tuple(parameter.name for parameter in parameters),
        conv=conv,
        norm=next((stage for stage in stages if isinstance(stage, Norm)), None),
        conv_parameters=conv_parameters,
        tail=tail,
        after_conv=after_conv,
        conv_alone=conv_alone,
        after_product=after_product,
    )


class _Known:
    """What Dynamo reads described blocks from, as attributes: of a dictionary it would see no new entries."""


_known = _Known()
_described: dict[str, Description] = {}
_is_compiling = torch.compiler.is_dynamo_compiling


def describe(text: str) -> Description:
    """The parsed block; raises ValueError naming the stage, the value and what is accepted."""
    if _is_compiling():
        return getattr(_known, _attribute_of(text))
    found = _described.get(text)
    return _remember(text) if found is None else found


def constant(function: _Function) -> _Function:
    """Marks a function as torch.compiler.assume_constant_result does, without its import of torch._dynamo:
    that is half of what importing onepass would take.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def _attribute_of(text: str) -> str:
    """The attribute of _known that is the block's description, from now on if not before."""
    description = _described.get(text) or _remember(text)
    name = f"block_{text.encode().hex()}"
    setattr(_known, name, description)
    return name


@_library.with_refusals
def _remember(text: str) -> Description:
    _library.require()
    described = json.loads(torch.ops.onepass.describe(text))
    stages = tuple(_stage(stage.pop("kind"), stage) for stage in described["stages"])
    parameters = tuple(Parameter(**parameter) for parameter in described["parameters"])
    return _described.setdefault(text, _description(described["text"], stages, parameters))
