"""The types of a block's tensors: those of PyTorch's own functions, stage by stage, also under autocast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepass._description import Conv, Description, Norm, Pointwise, Stage

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def lowered_dtype(dtype: torch.dtype, low: torch.dtype | None) -> torch.dtype:
    """What autocast makes of a tensor that a convolution or prelu reads: it leaves float64 alone."""
    return dtype if low is None or dtype == torch.float64 else low


def result_dtype(
    description: Description,
    input: Tensor,
    parameters: Sequence[Tensor],
    low: torch.dtype | None,
    device: str = "cpu",
    settled: Sequence[int] = (),
) -> torch.dtype:
    """The output's type, where `low` is autocast's; raises TypeError for a mixture PyTorch refuses.

    `settled`: numbers of parameters that leave the type as it is, of batch norms and operations in place.
    """
    for name, tensor in (("input", input), *zip(description.names, parameters)):
        if tensor.dtype not in DTYPES:
            accepted = ", ".join(map(_name, DTYPES))
            raise TypeError(f"{name} is {_name(tensor.dtype)}, must be one of {accepted}")
    dtype = input.dtype
    for i, stage in enumerate(description.stages):
        pairs = enumerate(zip(description.parameters, parameters))
        read = [(p.name, t.dtype) for n, (p, t) in pairs if p.stage == i and n not in settled]
        dtype = _after(stage, dtype, read, low, device)
    return dtype


def _after(
    stage: Stage,
    dtype: torch.dtype,
    read: Sequence[tuple[str, torch.dtype]],
    low: torch.dtype | None,
    device: str,
) -> torch.dtype:
    """The type after a stage that reads parameters of these names and types."""
    if isinstance(stage, Conv) or (isinstance(stage, Pointwise) and stage.op == "prelu"):
        dtype = lowered_dtype(dtype, low)
        for name, given in read:
            _require_dtype(name, lowered_dtype(given, low), dtype)
    elif isinstance(stage, Pointwise):
        for _, given in read:
            dtype = torch.promote_types(dtype, given)
    if low is not None and device == "cuda" and _is_full_on_cuda(stage) and dtype != torch.float64:
        return torch.float32
    return dtype


def _is_full_on_cuda(stage: Stage) -> bool:
    """Whether CUDA's autocast computes the stage in float32; it leaves instance norms, batch norms to it."""
    if isinstance(stage, Norm):
        return not stage.instance
    return isinstance(stage, Pointwise) and stage.op == "softplus"


def _require_dtype(name: str, dtype: torch.dtype, wanted: torch.dtype) -> None:
    if dtype != wanted:
        raise TypeError(f"{name} is {_name(dtype)}, must be {_name(wanted)} as what it is applied to")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
