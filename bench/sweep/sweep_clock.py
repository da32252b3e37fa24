"""Seconds of calls: the GPU's alone with the host hidden, and calls as users make them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

LEAST_ROUNDS, MOST_ROUNDS, SECONDS_OF_A_WAY = 5, 30, 0.02
MOST_SECONDS = 4.0  # of all ways; after that no round begins


def digits(value: float) -> float:
    """Four of them are enough."""
    return float(f"{value:.4g}")


class GpuClock:
    """Seconds by events, caches cold."""

    def __init__(self) -> None:
        import gpu_timing

        self.hidden = {
            False: gpu_timing.Stopwatch(gpu_timing.QUEUE_CYCLES),
            True: gpu_timing.Stopwatch(gpu_timing.GRADIENT_CYCLES),
        }
        self.shown = gpu_timing.Stopwatch(1)

    def gpu_seconds(self, call: Callable[[], Any], gradients: bool) -> float:
        """The host hidden."""
        return median_of({"": call}, self.hidden[gradients].seconds)[""]

    def call_seconds(self, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """As users make them."""
        return median_of(calls, self.shown.seconds)


class CpuClock:
    """Seconds of the host. With one thread its CPU time, which other work on the machine hardly changes."""

    def __init__(self) -> None:
        self.now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def call_seconds(self, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """As users make them."""
        return median_of(calls, self.seconds)

    def seconds(self, call: Callable[[], Any]) -> float:
        """One call; what it gives is freed afterwards."""
        begin = self.now()
        result = call()
        taken = self.now() - begin
        del result
        return taken


def median_of(
    calls: dict[str, Callable[[], Any]], seconds: Callable[[Callable[[], Any]], float]
) -> dict[str, float]:
    """Each call once a round."""
    for call in calls.values():
        seconds(call)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    gc.disable()
    begin = time.monotonic()
    for rounds in range(1, MOST_ROUNDS + 1):
        for name, call in calls.items():
            taken[name].append(seconds(call))
        taken_now = time.monotonic() - begin
        enough = rounds >= LEAST_ROUNDS and taken_now > SECONDS_OF_A_WAY * len(calls)
        if enough or taken_now > MOST_SECONDS:
            break
    gc.enable()
    return {name: digits(statistics.median(found)) for name, found in taken.items()}


def with_benchmark(call: Callable[[], Any], on: bool) -> Callable[[], Any]:
    """With cudnn.benchmark so."""

    def run() -> Any:
        torch._C._set_cudnn_benchmark(on)
        return call()

    return run


def ratio_in(seconds: dict[str, float]) -> float:
    """The best of PyTorch over ours."""
    ours = min(s for name, s in seconds.items() if "onepass" in name)
    return min(s for name, s in seconds.items() if "onepass" not in name) / ours
