"""Five real models by torch.compile on a CPU: Inductor alone against the backend, forward and training step.

`scripts/record.py compiled` runs it. The two sides take turns, on one thread by default, and processor time
is counted: a loaded machine then gives the same figures as an idle one.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

import onepass
from onepass.optimizing import measure

SIDES = ("inductor", "onepass")


def time_model(real: Any, train: bool, seconds: float) -> dict[str, Any]:
    """One model in both ways: compared, then timed in turns. `seconds` are of each way."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = real.build().train(train)
    inputs = real.timed_inputs()
    models = {side: copy.deepcopy(model) for side in SIDES}
    runs = {side: torch.compile(each, backend=side) for side, each in models.items()}
    calls = {side: _call(real, models[side], runs[side], inputs, train) for side in SIDES}
    off = _off(*(_results(calls[side], models[side]) for side in SIDES))
    timings = measure.interleaved(calls, torch.device("cpu"), seconds, lambda _: None, time.process_time)
    chains = onepass.report(runs["onepass"]).chains
    speed_up = timings["inductor"].median / timings["onepass"].median
    words = "step" if train else "forward"
    print(f"{real.name}, {words}: {speed_up:.2f}x, off by {off:.1e} of the largest value", flush=True)
    return {
        "model": real.name,
        "train": train,
        "inputs": ["x".join(map(str, x.shape)) for x in inputs],
        "kept": sum(chain.kept for chain in chains),
        "found": len(chains),
        "off": off,
        "seconds": {name: vars(timing) for name, timing in timings.items()},
        "speed_up": speed_up,
    }


def _call(real: Any, model: Any, run: Any, inputs: tuple[Any, ...], train: bool) -> Callable[[], Tensor]:
    """One forward pass, or one training step."""

    def forward() -> Tensor:
        with torch.no_grad():
            return real.output(run(*inputs))

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        result = real.output(run(*inputs))
        result.square().mean().backward()
        return result

    return step if train else forward


def _results(call: Callable[[], Tensor], model: Any) -> list[Tensor]:
    """The result and the gradients of a call; dropout draws from one seed."""
    torch.manual_seed(0)
    result = call().detach().clone()
    return [result, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _off(wanted: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference over the largest value, of the worst tensor.

    Tensors of rounding errors alone, as gradients of biases before a norm, are left out.
    """
    largest = max((tensor.abs().max().item() for tensor in wanted[1:]), default=0.0)
    errors = []
    for i, (some, other) in enumerate(zip(found, wanted, strict=True)):
        scale = other.abs().max().item()
        if i == 0 or scale > 1e-4 * largest:
            errors.append((some - other).abs().max().item() / scale)
    return max(errors)
