"""Judges an exported file as a public benchmark does, in a process that has never seen onepass:

    python3 stranger.py EXPORTED.py

Both models are built with one seed inside no_grad, moved to the GPU and compared on five random inputs under
PyTorch's default settings. Then both are timed with gradients enabled, by CUDA events, the second-level cache
overwritten before each call. Prints one line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

SEED = 42
TRIALS = 5
TOLERANCE = 1e-4
WARM_UP, REPEATS = 3, 30
FLUSH_BYTES = 256 << 20


def load(path: str) -> Any:
    """The file as a module."""
    spec = importlib.util.spec_from_file_location("judged", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_gpu(values: list[Any]) -> list[Any]:
    """Tensors moved, other values as they are."""
    return [x.cuda() if isinstance(x, torch.Tensor) else x for x in values]


def milliseconds(call: Callable[[], Any], flush: torch.Tensor) -> float:
    """The median of single calls."""
    taken = []
    for _ in range(WARM_UP + REPEATS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
        del result
    return statistics.median(taken[WARM_UP:])


def main() -> None:
    """Compares, then times."""
    sys.modules["onepass"] = None  # an import of it fails
    module = load(sys.argv[1])
    models = {}
    with torch.no_grad():
        for name in ("Model", "ModelNew"):
            torch.manual_seed(SEED)
            models[name] = getattr(module, name)(*on_gpu(module.get_init_inputs())).cuda()
    worst, wrong = 0.0, 0
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        for trial in range(TRIALS):
            torch.manual_seed(SEED + trial)
            inputs = on_gpu(module.get_inputs())
            wanted, found = (models[name](*inputs) for name in ("Model", "ModelNew"))
            worst = max(worst, (found - wanted).abs().max().item())
            wrong += not torch.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
            del wanted, found
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    times = {name: milliseconds(lambda model=model: model(*inputs), flush) for name, model in models.items()}
    words = [str(warning.message) for warning in said if "original code" in str(warning.message)]
    found = {"wrong": wrong, "difference": worst, "times": times, "warnings": words}
    print(json.dumps(found | {"why": module.ModelNew.why()}))


if __name__ == "__main__":
    main()
