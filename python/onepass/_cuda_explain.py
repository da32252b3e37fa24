"""What a block runs as on a GPU: whole by the planner's choice, or its convolution by PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onepass import _cuda, _numerics, _rounding
from onepass._description import Conv, Description

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def explain(
    description: Description,
    sizes: Sequence[int],
    dtype: torch.dtype,
    layout: str,
    device: str,
    strategy: str = "",
    backward: bool = False,
    numerics: str | None = None,
) -> str:
    """As onepass.explain; `device` is "cuda", "cuda:1" or an architecture, "cuda:sm_90a"."""
    conv, tail = description.conv, description.tail
    reason = _why_eager(dtype, device)
    policy = numerics or _numerics.default()
    mode, said = "", ""
    if conv is not None and reason is None:
        mode, said = _mode(policy, conv, sizes, dtype, layout, device, backward)
    if conv is not None and reason is None and mode and _is_whole(strategy):
        arguments = (description.text, sizes, mode, layout, device)
        wanted = [True] * (1 + len(description.parameters))
        trains = torch.ops.onepass.cuda_is_worth_training(*arguments, wanted)
        if backward and (strategy or trains):
            return torch.ops.onepass.cuda_explain(*arguments, strategy, True) + said
        if not backward and (strategy or torch.ops.onepass.cuda_is_worth_fusing(*arguments)):
            plan = torch.ops.onepass.cuda_explain(*arguments, strategy, False)
            if trains:
                rows = torch.ops.onepass.cuda_explain(*arguments, "", True)
                how = f"the same, then {_chosen(rows)}"
            else:
                how = "PyTorch's own convolution"
                if tail:
                    how = _apart(description, sizes, mode, layout, device)
            return f"{plan}{said}  where gradients are wanted: {how}\n"
    if not tail:
        return f"{description.text}\n\n-> PyTorch's own convolution\n"
    if reason is not None:
        return f"{description.text}\n\neager: PyTorch's own kernels run the stages one by one: {reason}\n"
    shape = description.conv_output_shape(sizes)
    tail_mode = _numerics.mode_of(dtype, _numerics.tail_words(policy))
    run = description.text if conv is None else description.after_product.text
    plan = torch.ops.onepass.cuda_explain(run, shape, tail_mode, layout, device, strategy, backward)
    note = "  tensors that do not lie dense in this order are copied first\n"
    if conv is None:
        return plan + note
    ours = backward and mode and _ours(description, sizes, mode, layout, device)
    if not ours or not all(ours):
        apart = f", the {_gradient_of(ours[0])} of the convolution here" if ours and any(ours) else ""
        how = f"-> PyTorch's own convolution, then {_chosen(plan)}{apart}"
        return f"{description.text}\n\n{how}\n\n{plan}{note}"
    alone = description.conv_alone
    convolution = torch.ops.onepass.cuda_explain(alone.text, sizes, mode, layout, device, "", True)
    how = f"-> {_chosen(plan)}, then {_chosen(convolution)}"
    return f"{description.text}\n\n{how}\n\n{plan}{note}\n{convolution}"


def _ours(
    description: Description, sizes: Sequence[int], mode: str, layout: str, device: str
) -> tuple[bool, bool]:
    """Whether the gradient of the input, and that of the weights, is computed here, the tail apart."""
    arguments = (description.conv_alone.text, sizes, mode, layout, device)
    worth = torch.ops.onepass.cuda_is_worth_training
    return worth(*arguments, [True, False]), worth(*arguments, [False, True])


def _apart(description: Description, sizes: Sequence[int], mode: str, layout: str, device: str) -> str:
    """How the convolution runs in training, the tail apart."""
    ours = _ours(description, sizes, mode, layout, device)
    if not any(ours):
        return "PyTorch's own convolution, then the rest"
    if not all(ours):
        return f"the convolution and the rest apart, its {_gradient_of(ours[0])} here, the other PyTorch's"
    alone = description.conv_alone.text
    rows = torch.ops.onepass.cuda_explain(alone, sizes, mode, layout, device, "", True)
    return f"the convolution and the rest apart, its gradients by {_chosen(rows)}"


def _gradient_of(of_input: bool) -> str:
    """The one of the two that is computed here."""
    return "input's gradient" if of_input else "weights' gradient"


def _mode(
    policy: str,
    conv: Conv,
    sizes: Sequence[int],
    dtype: torch.dtype,
    layout: str,
    device: str,
    backward: bool,
) -> tuple[str, str]:
    """The mode of the convolution, and a line that says why where it is PyTorch's choice. A GPU that is not
    there cannot be asked: its TF32 kernels are assumed.
    """
    words = _numerics.known_words(policy, dtype)
    if words is not None:
        return _numerics.mode_of(dtype, words), ""
    if ":sm_" in device:
        return "tf32", "  PyTorch is not asked whether it rounds this convolution to TF32: taken to\n"
    order = torch.contiguous_format
    if layout == "nhwc":
        order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(sizes), order)
    answers = _rounding.answers(conv, tuple(sizes), order, torch.device(device), backward)
    if backward:
        answers = ("fp32" if "fp32" in answers[1:] else "tf32",)
    said = {
        "fp32": "computes this convolution in fp32, and so does this",
        "tf32": "rounds this convolution to TF32, and so does this",
        "tf32_away": "rounds this convolution to TF32, ties away from zero, and so does this",
        "other": "rounds this convolution in a way that no kernel here does: it is left to PyTorch",
    }[answers[0]]
    mode = {"fp32": "near_f32", "other": ""}.get(answers[0], answers[0])
    return mode, f"  PyTorch's default {said}\n"


def _chosen(plan: str) -> str:
    return next(line for line in plan.splitlines() if line.startswith("* ")).split()[1]


def _is_whole(strategy: str) -> bool:
    """Whether the row, or some row where none is forced, takes blocks with their convolution."""
    return not strategy or strategy.startswith(("thin_", "gemm_", "scaled", "narrow", "banded", "direct"))


def _why_eager(dtype: torch.dtype, device: str) -> str | None:
    if dtype not in DTYPES:
        return _cuda.why_eager(dtype)
    return None if ":sm_" in device else _cuda.unavailable_reason()
