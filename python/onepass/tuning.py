"""Opt-in tuning on a GPU: strategies of similar predicted cost are timed, and the choice is kept on disk.

    onepass.tune()        # or ONEPASS_TUNE=1 in the environment

From then on the first call of a block with new sizes times these strategies on memory of its own. Where one
includes the convolution, PyTorch's convolution with a fused tail is timed too. Results differ by rounding
alone. Plans that were made before do not change.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import torch

from onepass import _library

_REPEATS = 7
_state = {"wanted": os.environ.get("ONEPASS_TUNE", "") not in ("", "0"), "told": False}


def tune(enabled: bool = True) -> None:
    """Turns tuning on a GPU on, or off again.

    The first call of a block with new sizes then times the strategies that are predicted to be close, and
    keeps the choice on disk. Results differ by rounding alone.

    Args:
        enabled: Whether to tune from now on. ONEPASS_TUNE=1 in the environment is the same as True.

    Returns:
        Nothing.

    Examples:
        >>> import onepass
        >>> onepass.tune()
        >>> onepass.tune(False)
    """
    _state.update(wanted=bool(enabled), told=False)
    is_tuning()


def is_tuning() -> bool:
    """Whether tuning is on; tells the operators once they are loaded."""
    if not _state["told"] and _library.available():
        torch.ops.onepass.cuda_set_tuning(_state["wanted"])
        _state["told"] = True
    return _state["wanted"]


def faster(device: torch.device, question: str, ways: dict[str, Callable[[], Any]]) -> str:
    """The name of the fastest way on this GPU: remembered, or measured now."""
    index = torch.cuda.current_device() if device.index is None else device.index
    known = torch.ops.onepass.cuda_remembered_choice(index, question)
    if known in ways:
        return known
    with torch.no_grad(), torch.cuda.device(device):
        seconds = {name: _seconds(call) for name, call in ways.items()}
    chosen = min(seconds, key=lambda name: seconds[name])
    torch.ops.onepass.cuda_remember_choice(index, question, chosen)
    return chosen


def _seconds(call: Callable[[], Any]) -> float:
    call()  # compiles, and has cuDNN choose
    return statistics.median(elapsed(call) for _ in range(_REPEATS))


def elapsed(call: Callable[[], Any]) -> float:
    """Seconds of a call on the current stream, by events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
