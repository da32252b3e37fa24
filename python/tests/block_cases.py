"""Blocks, their inputs, and the rules by which results are compared with PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass import _eager
from onepass._description import Description, describe

# A spread over every kind of stage and position, each small enough for a gradient check.
BLOCKS = (
    "conv1d(3,4,k=3,p=1) | relu",
    "conv1d(4,6,k=5,s=2,p=2,groups=2,bias=false) | gelu | group_norm(3) | tanh | mean",
    "conv2d(3,8,k=3,p=1) | swish | group_norm(4) | hardswish",
    "conv2d(4,8,k=3x1,s=2x1,p=1x0,groups=2) | group_norm(2,affine=false) | residual_add | leaky_relu(0.2)",
    "conv2d(6,6,k=3,p=2,d=2,groups=6) | instance_norm(affine=true) | silu",
    "conv2d(4,6,k=2,p=same) | channel_add(per=sample) | group_norm(3) | mish",
    "conv3d(2,4,k=2) | hardswish | group_norm(2) | mean",
    "conv_transpose1d(4,4,k=3,s=2,p=1,op=1) | elu(0.7) | instance_norm",
    "conv_transpose2d(4,6,k=3,s=2,p=1,groups=2) | prelu(per=channel) | group_norm(3)",
    "conv_transpose3d(3,4,k=3,s=2,p=1) | swish | group_norm(2) | hardswish",
    "conv2d(3,4,k=3)",
    "group_norm(4)",
    "instance_norm",
    "mean",
    "softplus | group_norm(2,eps=1e-3) | channel_mul | residual_add | sigmoid",
    "prelu | channel_mul | channel_add | group_norm(8) | clamp(-1,1.5) | mean",
    "mul(0.5) | add(1) | relu6 | hardsigmoid | gelu_tanh",
)

# Every stage alone.
STAGES = (
    "conv2d(8,8,k=3)",
    "conv_transpose2d(8,8,k=2,s=2)",
    "group_norm(4)",
    "group_norm(4,affine=false)",
    "instance_norm",
    "instance_norm(affine=true)",
    "mean",
    "prelu",
    "prelu(per=channel)",
    "channel_mul",
    "channel_add(per=sample)",
    "residual_add",
    "relu",
    "relu6",
    "leaky_relu(0.01)",
    "elu(1)",
    "gelu",
    "gelu_tanh",
    "swish",
    "hardswish",
    "hardsigmoid",
    "sigmoid",
    "tanh",
    "mish",
    "softplus",
    "clamp(-1,1)",
    "clamp(0,inf)",
    "hardtanh(-1,1)",
    "mul(2)",
    "add(1)",
)

SPATIAL = {1: (9,), 2: (6, 7), 3: (4, 5, 3)}
SMALL = {1: (5,), 2: (4, 3), 3: (2, 3, 2)}  # for what is computed once for every element


def parameter_shape(description: Description, index: int, sizes: torch.Size) -> tuple[int, ...]:
    """The sizes of one of the block's parameters for an input of these sizes."""
    parameter = description.parameters[index]
    stage = description.stages[parameter.stage]
    shape = description.conv_output_shape(sizes)
    conv = description.conv
    if parameter.role == "conv_weight":
        ends = (conv.in_channels, conv.out_channels)
        first, second = ends if conv.transposed else ends[::-1]
        return (first, second // conv.groups, *conv.kernel)
    if parameter.role == "operand" and stage.argument == "tensor":
        return tuple(shape)
    if parameter.role == "operand" and stage.per == "tensor":
        return (1,)
    if parameter.role == "operand" and stage.per == "sample":
        return (shape[0], shape[1])
    return (shape[1],)


def example(
    text: str,
    *,
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
    spatial: dict[int, tuple[int, ...]] = SPATIAL,
) -> tuple[Tensor, list[Tensor]]:
    """A random input of the block and random parameters."""
    description = describe(text)
    conv = description.conv
    rank = conv.rank if conv is not None else 2
    x = torch.randn(batch, conv.in_channels if conv is not None else 8, *spatial[rank], dtype=dtype)
    shapes = [parameter_shape(description, i, x.shape) for i in range(len(description.parameters))]
    return x, [torch.randn(shape, dtype=torch.float64).mul(0.5).to(dtype) for shape in shapes]


def exact(text: str, x: Tensor, parameters: list[Tensor]) -> Tensor:
    """The block by PyTorch in float64, of the operands as stored."""
    return _eager.run(text, x.double(), [parameter.double() for parameter in parameters])


def max_error(actual: Tensor, expected: Tensor) -> float:
    return (actual.double() - expected).abs().max().item() if actual.numel() else 0.0


def assert_as_exact(actual: Tensor, by_torch: Tensor, expected: Tensor, *, factor: float = 2.0) -> None:
    """The error against float64 is at most factor times PyTorch's and some roundings of the largest value."""
    assert actual.shape == expected.shape
    assert actual.dtype == by_torch.dtype
    if actual.numel() == 0:
        return
    roundings = 2 if actual.dtype in (torch.bfloat16, torch.float16) else 16
    rounding = roundings * torch.finfo(actual.dtype).eps * max(1.0, expected.abs().max().item())
    assert max_error(actual, expected) <= factor * max_error(by_torch, expected) + rounding
