"""Time and memory of calls: interleaved, warmed up, with their spread."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

WARM_UPS = 2
LEAST_ROUNDS = 5
WIDE = 0.3  # a spread from the 10% to the 90% quantile, in medians, that says another program was running

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of many repeats."""

    median: float
    p10: float
    p90: float
    repeats: int

    @property
    def spread(self) -> float:
        """From the 10% to the 90% quantile, in medians."""
        return (self.p90 - self.p10) / self.median if self.median > 0 else 0.0

    @property
    def is_wide(self) -> bool:
        """Whether the repeats spread so widely that the median says little."""
        return self.spread > WIDE


def timing_of(seconds: list[float]) -> Timing:
    """Median and the 10% and 90% quantiles."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered)
    )


def steady(
    calls: Mapping[str, Call], device: torch.device, seconds: float, progress: Callable[[float], None]
) -> dict[str, Timing]:
    """As `interleaved`, measured once more where repeats spread widely; the calmer of both is given."""
    first = interleaved(calls, device, seconds, progress)
    if not any(timing.is_wide for timing in first.values()):
        return first
    second = interleaved(calls, device, seconds, progress)
    return min(first, second, key=lambda timings: sum(timing.spread for timing in timings.values()))


def one(call: Call, device: torch.device) -> float:
    """The median of a few repeats."""
    return interleaved({"": call}, device, 0.0, lambda done: None)[""].median


def interleaved(
    calls: Mapping[str, Call],
    device: torch.device,
    seconds: float,
    progress: Callable[[float], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times the calls in rounds, each once a round in a new order, for `seconds` per call.

    `clock` is that of a CPU; a GPU has its events.
    """
    taken = samples(calls, device, seconds, progress, clock)
    return {name: timing_of(own) for name, own in taken.items()}


def samples(
    calls: Mapping[str, Call],
    device: torch.device,
    seconds: float,
    progress: Callable[[float], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """As interleaved: the seconds of each repeat."""
    timer = _cuda_timer(device) if device.type == "cuda" else functools.partial(_time_cpu, clock)
    for _ in range(WARM_UPS):
        for call in calls.values():
            call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    budget = seconds * len(calls)
    order = list(calls)
    shuffle = random.Random(0).shuffle
    start = time.perf_counter()
    with _without_collector():
        while (spent := time.perf_counter() - start) < budget or len(taken[order[0]]) < LEAST_ROUNDS:
            progress(min(spent / budget, 1.0) if budget else 1.0)
            shuffle(order)
            for name in order:
                taken[name].append(timer(calls[name]))
    progress(1.0)
    return taken


def _time_cpu(clock: Callable[[], float], call: Call) -> float:
    start = clock()
    result = call()
    elapsed = clock() - start
    del result  # freed outside the measured time
    return elapsed


def _cuda_timer(device: torch.device) -> Callable[[Call], float]:
    """By events on the current stream, with the L2 cache overwritten before each call."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device=device)

    def time_cuda(call: Call) -> float:
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()
        end.record()
        end.synchronize()
        del result
        return start.elapsed_time(end) / 1e3

    return time_cuda


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# --- Memory ------------------------------------------------------------------------------------------

MEMORY_METHOD = {
    "cpu": "what PyTorch's allocator had handed out at one time (torch.profiler, profile_memory)",
    "cuda": "torch.cuda.max_memory_allocated",
}


def peak_bytes(call: Call, device: torch.device) -> int:
    """The most memory the call held at one time beyond what was held before, its result included."""
    return _peak_cuda(call, device) if device.type == "cuda" else _peak_cpu(call)


def _peak_cuda(call: Call, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def _peak_cpu(call: Call) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports the GPU it does not find as an error
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        result = call()
    del result
    events = profile.profiler.kineto_results.events()
    held = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes() if event.device_type() == torch.profiler.DeviceType.CPU else 0
        most = max(most, held)
    return most
