"""What a call costs the host, for scripts/gpu_bench.py: tensors are too small to matter."""

from __future__ import annotations

import copy
import dataclasses
import time

import torch
from gpu_timing import DEVICE, Call, Json
from torch import nn

import onepass
from onepass.optimizing.measure import timing_of


def host_seconds(call: Call, count: int = 100) -> float:
    """Of one call of many, until it returns: as many as the driver queues without waiting for the GPU."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    taken = time.perf_counter() - begin
    torch.cuda.synchronize()
    return taken / count


def small_calls(gradients: bool) -> dict[str, Call]:
    """A tail of 512 elements by onepass and by the modules it replaces."""
    modules = nn.Sequential(nn.SiLU(), nn.GroupNorm(4, 16), nn.Hardswish()).to(DEVICE)
    block = onepass.Block("swish | group_norm(4) | hardswish", channels=16, device=DEVICE)
    x = torch.randn(2, 16, 4, 4, device=DEVICE, requires_grad=gradients)
    direction = torch.randn_like(x)

    def call_of(model: nn.Module) -> Call:
        if not gradients:
            return lambda: model(x)
        return lambda: torch.autograd.grad(model(x), [x, *model.parameters()], direction)

    return {"onepass": call_of(block), "eager": call_of(modules)}


def small_fused_calls() -> dict[str, Call]:
    """A fused module whose convolution runs here too."""
    modules = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.GroupNorm(4, 8)).to(DEVICE)
    fused = onepass.fuse(copy.deepcopy(modules))
    x = torch.randn(2, 3, 9, 9, device=DEVICE)
    return {"onepass": lambda: fused(x), "eager": lambda: modules(x)}


# What is called, and whether with gradients.
SMALL = {
    "inference": (lambda: small_calls(False), False),
    "inference of a fused convolution": (small_fused_calls, False),
    "training": (lambda: small_calls(True), True),
}


def measure_overhead() -> Json:
    """Seconds of the host, where tensors are too small to matter; and of an operator that does nothing."""
    found: Json = {}
    x = torch.randn(2, 16, device=DEVICE)
    for kind, (calls_of, gradients) in SMALL.items():
        with torch.set_grad_enabled(gradients):
            calls = {**calls_of(), "empty": lambda: torch.ops.aten.alias(x)}
            taken: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(9):
                for name, call in calls.items():
                    taken[name].append(host_seconds(call))
            found[kind] = {
                name: dataclasses.asdict(timing_of(seconds[2:])) for name, seconds in taken.items()
            }
    return found
