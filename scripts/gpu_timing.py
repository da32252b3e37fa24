"""GPU time of calls: by events, the second-level cache overwritten before each, ways interleaved."""

from __future__ import annotations

import dataclasses
import gc
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.optimizing.measure import timing_of

DEVICE = torch.device("cuda")
SECONDS_OF_A_WAY = 0.1
LEAST_ROUNDS, MOST_ROUNDS = 7, 60
# 0.8 ms in which the host gets ahead of the GPU: launches are not what is timed. With 0.2 ms, blocks of
# several launches took up to 1.4 times their best after rivals of 10 ms and more.
QUEUE_CYCLES = 1_600_000
# Where autograd takes its time between the launches: 0.7 ms for a step of s27, 1.5 where the host has waited
# for 50 ms before (it does for rivals of 140).
GRADIENT_CYCLES = 4 * QUEUE_CYCLES
COMPILERS = {"compile": None, "max-autotune": "max-autotune-no-cudagraphs"}

Call = Callable[[], Any]
Json = dict[str, Any]


class Stopwatch:
    """Seconds of GPU time of one call, with a cold second-level cache and the launches queued."""

    def __init__(self, queue_cycles: int) -> None:
        self.queue_cycles = queue_cycles
        l2_bytes = torch.cuda.get_device_properties(DEVICE).L2_cache_size
        self.flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device=DEVICE)

    def seconds(self, call: Call) -> float:
        """One call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        torch.cuda._sleep(self.queue_cycles)
        start.record()
        result = call()
        end.record()
        end.synchronize()
        del result
        return start.elapsed_time(end) / 1e3


def time_ways(ways: dict[str, Call], queue_cycles: int = QUEUE_CYCLES) -> dict[str, Json]:
    """Each way once a round, in a new order each round."""
    watch = Stopwatch(queue_cycles)
    for call in ways.values():
        watch.seconds(call)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    order, shuffle = list(ways), random.Random(0).shuffle
    gc.collect()
    gc.disable()
    begin = time.monotonic()
    for rounds in range(1, MOST_ROUNDS + 1):
        shuffle(order)
        for name in order:
            taken[name].append(watch.seconds(ways[name]))
        if rounds >= LEAST_ROUNDS and time.monotonic() - begin > SECONDS_OF_A_WAY * len(ways):
            break
    gc.enable()
    return {name: dataclasses.asdict(timing_of(seconds)) for name, seconds in taken.items()}


def first_calls(ways: dict[str, Call]) -> tuple[dict[str, Any], Json]:
    """The result of each way, and the seconds its first call took: compilation, loading, planning.

    A rival that cannot run leaves `ways`, and its words take the place of its seconds.
    """
    results, seconds = {}, {}
    for name, call in list(ways.items()):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        try:
            results[name] = call()
            torch.cuda.synchronize()
        except Exception as error:
            if name not in COMPILERS:
                raise
            seconds[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            del ways[name]
            continue
        seconds[name] = time.perf_counter() - begin
    return results, seconds


def seconds_to_move(moved: float, like: Tensor) -> float:
    """The least time for so many bytes, at the rate of copying a tensor of this size."""
    target = torch.empty_like(like)
    copied = 2 * like.numel() * like.element_size()
    return moved * time_ways({"copy": lambda: target.copy_(like)})["copy"]["median"] / copied
