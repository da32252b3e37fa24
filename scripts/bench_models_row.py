"""One row of scripts/bench_models.py, in a process of its own: compiles all ways, or times and judges them.

    python3 scripts/bench_models_row.py KEY compile|measure [--small] [--device cpu] [--seconds 3]

Prints one line of JSON at its end.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from bench_models_list import Row, rows
from torch import Tensor, nn

import onepass
from onepass.optimizing.measure import interleaved, peak_bytes

torch._functorch.config.donated_buffer = False  # a graph is gone through many times


@dataclasses.dataclass(frozen=True)
class Way:
    """How a network runs: by whom, in which layout, with CUDA graphs or not."""

    name: str
    backend: str | None
    last: bool = False
    graphs: bool = False


def ways(device: str) -> list[Way]:
    """Eager, torch.compile and the backend, in both layouts, the compilers with and without CUDA graphs."""
    found = [Way("eager", None), Way("eager, channels last", None, True)]
    for backend, name in (("inductor", "compile"), ("onepass", "onepass")):
        for last in (False, True):
            for graphs in (False, True) if device == "cuda" else (False,):
                parts = (name, "channels last" if last else "", "graphs" if graphs else "")
                found.append(Way(", ".join(filter(None, parts)), backend, last, graphs))
    return found


class Runner:
    """The network of a row, run in one way."""

    def __init__(self, row: Row, way: Way, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.row, self.way = row, way
        device = inputs[0].device
        self.model = copy.deepcopy(model).to(device).train(row.train)
        cast = row.dtype == "bf16" and not row.train
        self.autocast = row.dtype == "bf16" and row.train
        if cast:
            self.model.bfloat16()
        self.inputs = tuple(self._given(tensor, cast) for tensor in inputs)
        self.model = self._laid(self.model)
        self.run = self.model
        if way.backend is not None:
            mode = "reduce-overhead" if way.graphs else None
            self.run = torch.compile(self.model, backend=way.backend, mode=mode)

    def _given(self, tensor: Tensor, cast: bool) -> Tensor:
        if tensor.is_floating_point() and cast:
            tensor = tensor.bfloat16()
        return self._laid(tensor)

    def _laid(self, what: Any) -> Any:
        if not self.way.last:
            return what
        if isinstance(what, Tensor):
            formats = {4: torch.channels_last, 5: torch.channels_last_3d}
            return what.contiguous(memory_format=formats[what.dim()]) if what.dim() in formats else what
        for parameter in what.parameters():
            parameter.data = self._laid(parameter.data)
        return what

    def __call__(self) -> Tensor:
        """One forward pass or one training step; its result."""
        if not self.row.train:
            with torch.no_grad():
                return self.run(*self.inputs)
        self.model.zero_grad(set_to_none=True)
        with torch.autocast(self.inputs[0].device.type, torch.bfloat16, enabled=self.autocast):
            result = self.run(*self.inputs)
        result.float().square().mean().backward()
        return result

    def results(self) -> list[Tensor]:
        """What is compared: the result, and the gradients of a training step. Dropout draws from one seed."""
        torch.manual_seed(0)
        found = [self().detach().float().clone()]
        if self.row.train:
            found += [p.grad.detach().float().clone() for p in self.model.parameters() if p.grad is not None]
        return found


def error_of(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The root mean square of the difference over that of the reference, the worst tensor of all.

    Tensors whose values are rounding errors alone, as gradients of biases before a norm, are left out.
    """
    norms = [tensor.square().mean().sqrt().item() for tensor in wanted]
    largest = max(norms[1:], default=0.0)
    errors = [
        (some - other).square().mean().sqrt().item() / norm
        for i, (some, other, norm) in enumerate(zip(found, wanted, norms, strict=True))
        if i == 0 or norm > 1e-4 * largest
    ]
    return max(errors)


def launches_of(call: Callable[[], Any]) -> int | None:
    """Kernels that one call puts on the GPU; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        call()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not name.startswith(("Memset", "Memcpy")) for name in names)


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """PyTorch's convolutions and products in full fp32."""
    kept = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = kept


def reference(row: Row, model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """By eager PyTorch in fp32 without TF32."""
    with exact():
        plain = dataclasses.replace(row, dtype="fp32")
        return Runner(plain, Way("reference", None), model, inputs).results()


def compile_all(row: Row, model: nn.Module, inputs: tuple[Tensor, ...], device: str) -> dict[str, Any]:
    """Fills the caches of all compilers."""
    seconds = {}
    for way in ways(device):
        if way.backend is None:
            continue
        begin = time.monotonic()
        Runner(row, way, model, inputs)()
        seconds[way.name] = round(time.monotonic() - begin, 1)
        torch._dynamo.reset()
        gc.collect()
    return {"compile_seconds": seconds}


def measure_all(
    row: Row, model: nn.Module, inputs: tuple[Tensor, ...], device: str, seconds: float
) -> dict[str, Any]:
    """Times all ways in turns, then judges results, memory and launches of each."""
    wanted = reference(row, model, inputs)
    found: dict[str, dict[str, Any]] = {}
    runners: dict[str, Runner] = {}
    for way in ways(device):
        try:
            runner = Runner(row, way, model, inputs)
            error = error_of(runner.results(), wanted)
        except Exception as failure:  # a way that fails is a result
            found[way.name] = {
                "failed": str(failure).splitlines()[0][:200] if str(failure) else repr(failure)
            }
            continue
        runners[way.name] = runner
        found[way.name] = {"error": float(f"{error:.3g}")}
    where = torch.device(device)
    timings = interleaved(runners, where, seconds, lambda part: None)
    for name, timing in timings.items():
        runner = runners[name]
        found[name] |= {"ms": [round(1e3 * t, 4) for t in (timing.median, timing.p10, timing.p90)]}
        found[name] |= {"peak_bytes": peak_bytes(runner, where), "kernels": launches_of(runner)}
    reports = {name: _counts(runner) for name, runner in runners.items() if runner.way.backend == "onepass"}
    return {"ways": found, "chains": reports, **_verdict(found)}


def _counts(runner: Runner) -> dict[str, int]:
    chains = onepass.report(runner.run).chains
    return {"kept": sum(chain.kept for chain in chains), "found": len(chains)}


def _verdict(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How the backend compares with the best of torch.compile, and whether its results are as exact."""
    ours = {name: way for name, way in found.items() if name.startswith("onepass")}
    theirs = {name: way for name, way in found.items() if name not in ours}
    timed = [{n: w["ms"][0] for n, w in side.items() if "ms" in w} for side in (ours, theirs)]
    compiled = {name: ms for name, ms in timed[1].items() if name.startswith("compile")}
    worst = max((way["error"] for way in theirs.values() if "error" in way), default=0.0)
    right = all("error" in way and way["error"] <= 1.5 * worst + 1e-5 for way in ours.values())
    verdict: dict[str, Any] = {"right": right}
    if timed[0] and compiled:
        best, rival = min(timed[0], key=timed[0].__getitem__), min(compiled, key=compiled.__getitem__)
        verdict |= {"best": best, "best_of_compile": rival}
        verdict["speedup"] = round(compiled[rival] / timed[0][best], 3)
        verdict["speedup_of_all"] = round(min(timed[1].values()) / timed[0][best], 3)
    return verdict


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("key")
    parser.add_argument("phase", choices=("compile", "measure"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    row = next(row for row in rows() if row.key == options.key)
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = row.network.build(options.small)
    inputs = tuple(tensor.to(options.device) for tensor in row.network.inputs(options.small))
    if options.phase == "compile":
        result = compile_all(row, model, inputs, options.device)
    else:
        result = measure_all(row, model, inputs, options.device, options.seconds)
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
