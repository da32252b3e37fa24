"""Calling an operator of the library, with the exceptions that its users expect."""

from __future__ import annotations

from typing import Any

import torch


class BuildFailed(RuntimeError):
    """No row of the table has a kernel that compiles."""


def call(operator: Any, *arguments: Any) -> Any:
    """Runs the operator. Exceptions pass the stable interface as text: those of memory and of the compiler
    are made anew.
    """
    try:
        return operator(*arguments)
    except (RuntimeError, ValueError) as error:
        text = str(error)
        if text.startswith("CUDA out of memory."):
            raise torch.OutOfMemoryError(text) from None
        if text.startswith("kernel ") and " compile" in text:
            raise BuildFailed(text.splitlines()[0]) from error
        raise
