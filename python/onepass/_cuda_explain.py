"""What a block runs as on a GPU: whole by the planner's choice, or its convolution by PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onepass import _cuda
from onepass._description import Description

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def explain(
    description: Description,
    sizes: Sequence[int],
    dtype: torch.dtype,
    layout: str,
    device: str,
    strategy: str = "",
    backward: bool = False,
) -> str:
    """As onepass.explain; `device` is "cuda", "cuda:1" or an architecture, "cuda:sm_90a"."""
    conv, tail = description.conv, description.tail
    reason = _why_eager(dtype, device)
    if conv is not None and reason is None and _is_whole(strategy):
        mode = _cuda.mode_of(dtype)
        arguments = (description.text, sizes, mode, layout, device)
        wanted = [True] * (1 + len(description.parameters))
        trains = torch.ops.onepass.cuda_is_worth_training(*arguments, wanted)
        if backward and (strategy or trains):
            return torch.ops.onepass.cuda_explain(*arguments, strategy, True)
        if not backward and (strategy or torch.ops.onepass.cuda_is_worth_fusing(*arguments)):
            plan = torch.ops.onepass.cuda_explain(*arguments, strategy, False)
            if trains:
                rows = torch.ops.onepass.cuda_explain(*arguments, "", True)
                how = f"the same, then {_chosen(rows)}"
            elif tail and _trains_alone(description, sizes, dtype, layout, device):
                how = "the convolution and the rest apart, its gradients by gemm_backward"
            else:
                how = "PyTorch's own convolution, then the rest"
            return f"{plan}  where gradients are wanted: {how}\n"
    if not tail:
        return f"{description.text}\n\n-> PyTorch's own convolution\n"
    if reason is not None:
        return f"{description.text}\n\neager: PyTorch's own kernels run the stages one by one: {reason}\n"
    shape = description.conv_output_shape(sizes)
    plan = torch.ops.onepass.cuda_explain(tail, shape, DTYPES[dtype], layout, device, strategy, backward)
    note = "  tensors that do not lie dense in this order are copied first\n"
    if conv is None:
        return plan + note
    if not backward or not _trains_alone(description, sizes, dtype, layout, device):
        return f"{description.text}\n\n-> PyTorch's own convolution, then {_chosen(plan)}\n\n{plan}{note}"
    alone, mode = description.conv_alone, _cuda.mode_of(dtype)
    convolution = torch.ops.onepass.cuda_explain(alone.text, sizes, mode, layout, device, "", True)
    how = f"-> {_chosen(plan)}, then {_chosen(convolution)}"
    return f"{description.text}\n\n{how}\n\n{plan}{note}\n{convolution}"


def _trains_alone(
    description: Description, sizes: Sequence[int], dtype: torch.dtype, layout: str, device: str
) -> bool:
    """Whether the gradients of the convolution, apart from what follows it, are computed here."""
    alone = description.conv_alone
    wanted = [True] * (1 + len(alone.parameters))
    mode = _cuda.mode_of(dtype)
    return torch.ops.onepass.cuda_is_worth_training(alone.text, sizes, mode, layout, device, wanted)


def _chosen(plan: str) -> str:
    return next(line for line in plan.splitlines() if line.startswith("* ")).split()[1]


def _is_whole(strategy: str) -> bool:
    """Whether the row, or some row where none is forced, takes blocks with their convolution."""
    return not strategy or strategy.startswith(("thin_", "gemm_", "direct"))


def _why_eager(dtype: torch.dtype, device: str) -> str | None:
    if dtype not in DTYPES:
        return _cuda.why_eager(dtype)
    return None if ":sm_" in device else _cuda.unavailable_reason()
