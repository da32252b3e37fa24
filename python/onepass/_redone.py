"""Samples whose values overflow f16 and that a GPU computes again in f32.

Kernels count them for each call site; the host reads the counts without waiting.
"""

from __future__ import annotations

import warnings

import torch

NONE = -1  # what operators take for no counter
_EVERY = 64  # calls between two looks


class SlowPathWarning(UserWarning):
    """Samples of a layer had values that overflow f16 and are computed again, in a slower way.

    The results are right. onepass.report(model).redone has the counts.

    Examples:
        >>> import onepass, warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", onepass.SlowPathWarning)
    """


class Counted:
    """Of a place in a model that runs a block: a counter on each GPU that it runs on.

    Counters are made when first used, also while a graph is captured. They are in host memory that kernels
    reach, so the host only reads memory.
    """

    __slots__ = ("_calls", "_counters", "_next_look", "layer")

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self._counters: dict[int, int] = {}
        self._calls = 0
        self._next_look = 2

    def counter(self, device: torch.device) -> int:
        """The number of the counter for a call on this GPU. Looks now and then, and warns once."""
        self._calls += 1
        if self._calls == self._next_look:
            self._look()
        number = self._counters.get(device.index)
        if number is None:
            number = self._counters.setdefault(device.index, _new_counter(device.index))
        return number

    def samples(self, *, wait: bool = False) -> int:
        """How many were computed again so far: of all calls after waiting, else of those that have ended."""
        if wait:
            for device in self._counters:
                torch.cuda.synchronize(device)
        return sum(map(_counted, self._counters.values()))

    def _look(self) -> None:
        count = self.samples()
        if count == 0:
            self._next_look = self._calls + _EVERY - self._calls % _EVERY
            return
        self._next_look = 0  # never again
        warnings.warn(SlowPathWarning(f"{self.layer}: {explanation(count)}"), stacklevel=2)


def _new_counter(device: int) -> int:
    return torch.ops.onepass.cuda_new_counter(device)


def _counted(number: int) -> int:
    return torch.ops.onepass.cuda_counted(number)


def explanation(samples: int) -> str:
    """What happened to so many samples, and what helps."""
    count = "1 sample" if samples == 1 else f"{samples} samples"
    return (
        f"{count} had values that leave f16's range and were computed again in f32, right but up to 20 times "
        'slower: scale the input to the order of 1, take numerics="strict" or run in bfloat16 (an input that '
        "does not begin on 16 bytes may be the reason too)"
    )


def counter(site: Counted | str, input: torch.Tensor) -> int:
    """What an operator on this input takes: the number of the site's counter; none where it has no owner."""
    return NONE if isinstance(site, str) else site.counter(input.device)
