"""What a place in a model has decided for calls of its block on a GPU without gradients: 25 us of the host at
first, 4 from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onepass import _rounding, tuning

Key = tuple[Any, ...]
_MOST = 4096  # of a place
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def key_of(block: str, input: Tensor, parameters: Sequence[Tensor], policy: str) -> Key | None:
    """All that the choice follows from; None where it is not kept: types are mixed, or it is measured."""
    if torch.compiler.is_compiling() or _is_any_autocast_enabled():
        return None
    dtype = input.dtype
    for parameter in parameters:
        if parameter.dtype is not dtype:
            return None
    if isinstance(input, FakeTensor) or tuning.is_tuning():
        return None
    switches = _rounding.switches() if dtype is torch.float32 else None
    how = input.shape, input.stride(), parameters[0].stride(), dtype, input.device
    return block, how, policy, switches


def keep(choices: dict[Key, Any], key: Key, choice: Any) -> None:
    """Of many sizes, those since the last clearing."""
    if len(choices) >= _MOST:
        choices.clear()
    choices[key] = choice
