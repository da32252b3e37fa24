"""A stage of the block language as the matcher finds it, and where its parameters come from."""

from __future__ import annotations

import dataclasses

from torch import fx


class NoMatch(Exception):
    """These arguments are not a stage of the language."""


@dataclasses.dataclass(frozen=True)
class Attribute:
    """A block's parameter that is looked up on the module at each call."""

    module: str
    name: str
    computed: bool  # by a parametrisation, at each access
    kind: str = "_parameters"  # or "_buffers"


@dataclasses.dataclass(frozen=True)
class Operand:
    """A block's parameter that is a tensor of the graph; what it adds or multiplies depends on its shape."""

    node: fx.Node
    op: str  # "add" or "mul"


@dataclasses.dataclass(frozen=True)
class BatchNorm:
    """What a batch norm in evaluation computes with: scale and shift per channel follow at each call."""

    mean: Attribute | fx.Node
    variance: Attribute | fx.Node
    weight: Attribute | fx.Node | None
    bias: Attribute | fx.Node | None
    eps: float

    @property
    def tensors(self) -> list[Attribute | fx.Node]:
        """All that it reads."""
        return [t for t in (self.mean, self.variance, self.weight, self.bias) if t is not None]


@dataclasses.dataclass(frozen=True)
class Affine:
    """A block's parameter that is the scale or the shift of a batch norm."""

    norm: BatchNorm
    part: str  # "scale" or "shift"


Parameter = Attribute | Operand | Affine | fx.Node


@dataclasses.dataclass
class Stage:
    """One stage of the language and the nodes that compute it; an identity has no text."""

    kind: str  # conv, norm, pointwise, operand, affine, mean or identity
    text: str
    main: fx.Node
    parameters: tuple[Parameter, ...] = ()
    mutated: fx.Node | None = None
    dimensions: tuple[int, int] = (2, 5)  # of the input, the least and the most
    keep_dimensions: bool = False  # a mean whose result keeps its dimensions
    module: str | None = None
    nodes: tuple[fx.Node, ...] = ()
    weight: int = 1  # how many stages it stands for where chains are compared

    @property
    def given(self) -> tuple[Parameter | BatchNorm, ...]:
        """Its parameters as a call looks them up: a batch norm instead of the scale and shift made of it."""
        return (self.parameters[0].norm,) if self.kind == "affine" else self.parameters
