"""What the library's operators return for shapes alone: torch.compile and torch.export ask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepass import _library
from onepass._conv_gradients import memory_format
from onepass._description import Description, Pointwise, describe


def _check_fakes(description: Description, input: Tensor, parameters: Sequence[Tensor]) -> None:
    """What running would refuse and the shapes below rely on."""
    conv = description.conv
    if len(parameters) != len(description.parameters):
        raise ValueError(
            f"{description.text}: {len(parameters)} parameters, must be {len(description.parameters)}"
        )
    if conv is not None and (input.dim() != conv.rank + 2 or input.shape[1] != conv.in_channels):
        raise ValueError(f"{conv.text}: the input {tuple(input.shape)} does not fit")
    if any(parameter.device != input.device for parameter in parameters):
        raise RuntimeError(f"{description.text}: all tensors must be on the input's device, {input.device}")


def _operand_format(description: Description, index: int, parameter: Tensor) -> torch.memory_format:
    """Tensors of the input's size keep their format, weights and vectors are contiguous."""
    return memory_format(parameter) if _is_of_input_size(description, index) else torch.contiguous_format


def _is_of_input_size(description: Description, index: int) -> bool:
    stage = description.stages[description.parameters[index].stage]
    return isinstance(stage, Pointwise) and stage.argument == "tensor"


def _only(gradients: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    """Those that are wanted; the others are empty."""
    return [g if want else g.new_empty(0) for g, want in zip(gradients, wanted, strict=True)]


def fake_forward(
    input: Tensor,
    parameters: Sequence[Tensor],
    block: str,
    out_dtype: torch.dtype | None = None,
    numerics: str = "",
) -> Tensor:
    description = describe(block)
    _check_fakes(description, input, parameters)
    deciding = (input,) if description.conv is None else (input, parameters[0])
    shape = description.output_shape(input.shape)
    order = memory_format(*deciding) if len(shape) > 2 else torch.contiguous_format
    return torch.empty(shape, dtype=out_dtype or input.dtype, device=input.device, memory_format=order)


def _fake_forward_with_statistics(
    input: Tensor,
    parameters: Sequence[Tensor],
    block: str,
    out_dtype: torch.dtype | None = None,
    numerics: str = "",
) -> tuple[Tensor, Tensor]:
    statistics = describe(block).statistics_shape(input.shape)
    output = fake_forward(input, parameters, block, out_dtype)
    return output, input.new_empty(statistics, dtype=torch.float32)


def _fake_backward(
    output_gradient: Tensor,
    input: Tensor,
    parameters: Sequence[Tensor],
    statistics: Tensor,
    block: str,
    wanted: Sequence[bool],
    numerics: str = "",
) -> list[Tensor]:
    description = describe(block)
    # The kernels of a GPU have all tensors of the input's size in its order.
    deciding = [input] * len(parameters) if input.is_cuda else parameters
    formats = [memory_format(input), *(_operand_format(description, i, p) for i, p in enumerate(deciding))]
    gradients = [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=order)
        for tensor, order in zip((input, *parameters), formats, strict=True)
    ]
    return _only(gradients, wanted)


def _fake_backward_over_input(
    output_gradient: Tensor,
    input: Tensor,
    parameters: Sequence[Tensor],
    statistics: Tensor,
    block: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    return _fake_backward(output_gradient, input, parameters, statistics, block, (False, *wanted[1:]))


def _fake_block_forward(
    input: Tensor, parameters: Sequence[Tensor], block: str, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    description = describe(block)
    output = fake_forward(input, parameters, block, out_dtype)
    if not description.tail:
        return output, *(input.new_empty(0, dtype=torch.float32) for _ in range(2))
    count = description.conv_parameters
    activation = fake_forward(input, parameters[:count], description.conv.text)
    return output, activation, input.new_empty(description.statistics_shape(input.shape), dtype=torch.float32)


def _fake_block_backward(
    output_gradient: Tensor,
    input: Tensor,
    activation: Tensor,
    parameters: Sequence[Tensor],
    statistics: Tensor,
    block: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    description = describe(block)
    conv, count = description.conv, description.conv_parameters
    weight, *tail = parameters
    gradients = [
        torch.empty(input.shape, dtype=input.dtype, memory_format=memory_format(input), device=input.device),
        torch.empty(weight.shape, dtype=weight.dtype, device=input.device),
    ]
    if conv.bias:
        gradients.append(weight.new_empty(conv.out_channels))
    for i, parameter in enumerate(tail):
        order = _operand_format(description, count + i, parameter)
        gradients.append(torch.empty_like(parameter, memory_format=order))
    return _only(gradients, wanted)


def _fake_whole_forward(
    input: Tensor, parameters: Sequence[Tensor], block: str, numerics: str, redone: int = -1
) -> Tensor:
    return fake_forward(input, parameters, block)


def _fake_whole_forward_with_statistics(
    input: Tensor, parameters: Sequence[Tensor], block: str, numerics: str, redone: int = -1
) -> tuple[Tensor, Tensor]:
    return _fake_forward_with_statistics(input, parameters, block)


def _fake_whole_backward(
    output_gradient: Tensor,
    input: Tensor,
    parameters: Sequence[Tensor],
    statistics: Tensor,
    output: Tensor,
    block: str,
    numerics: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    description = describe(block)
    order = memory_format(input, parameters[0])
    gradients = [torch.empty_like(input, memory_format=memory_format(input))]
    for i, parameter in enumerate(parameters):
        own = order if _is_of_input_size(description, i) else torch.contiguous_format
        gradients.append(torch.empty_like(parameter, memory_format=own))
    return _only(gradients, wanted)


if _library.available():
    torch.library.register_fake("onepass::forward", fake_forward)
    torch.library.register_fake("onepass::forward_with_statistics", _fake_forward_with_statistics)
    torch.library.register_fake("onepass::backward", _fake_backward)
    torch.library.register_fake("onepass::backward_", _fake_backward_over_input)
    torch.library.register_fake("onepass::block_forward", _fake_block_forward)
    torch.library.register_fake("onepass::block_backward", _fake_block_backward)
    torch.library.register_fake("onepass::whole_forward", _fake_whole_forward)
    torch.library.register_fake("onepass::whole_forward_with_statistics", _fake_whole_forward_with_statistics)
    torch.library.register_fake("onepass::whole_backward", _fake_whole_backward)
