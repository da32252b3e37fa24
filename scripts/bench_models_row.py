"""A process of scripts/bench_models.py: one network, run by PyTorch or by the backend.

    python3 scripts/bench_models_row.py KEY pytorch|onepass [--small] [--device cpu]

Compiles and judges all its ways, and answers with one line of JSON. Then each line "SECONDS" on its standard
input times them, that many seconds each. The process ends with its input.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from bench_models_list import Row, rows
from torch import Tensor, nn

import onepass
from onepass.optimizing.measure import peak_bytes, samples

torch._functorch.config.donated_buffer = False  # a graph is gone through many times

BACKENDS = {"pytorch": {"eager": None, "compile": "inductor"}, "onepass": {"onepass": "onepass"}}


@dataclasses.dataclass(frozen=True)
class Way:
    """How a network runs: by whom, and in which layout."""

    name: str
    backend: str | None
    last: bool = False


def ways(side: str) -> list[Way]:
    """Those of a side, in both layouts."""
    found = BACKENDS[side].items()
    return [Way(f"{n}{', channels last' * last}", b, last) for n, b in found for last in (False, True)]


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
            self.run = torch.compile(self.model, backend=way.backend)

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
        return result.detach()

    def results(self) -> list[Tensor]:
        """What is compared: the result, and the gradients of a training step. Dropout draws from one seed."""
        torch.manual_seed(0)
        found = [self().float().clone()]
        if self.row.train:
            found += [p.grad.detach().float().clone() for p in self.model.parameters() if p.grad is not None]
        return found

    def captured(self) -> Callable[[], None]:
        """The kernels of a call as a CUDA graph, without the copies of torch.compile's own graphs."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph.replay


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
    """PyTorch's convolutions and products in full fp32, by the first algorithm that cuDNN names."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    kept = cudnn.allow_tf32, products.allow_tf32, cudnn.benchmark
    cudnn.allow_tf32 = products.allow_tf32 = cudnn.benchmark = False
    yield
    cudnn.allow_tf32, products.allow_tf32, cudnn.benchmark = kept


def reference(row: Row, model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """By eager PyTorch in fp32 without TF32."""
    with exact():
        plain = dataclasses.replace(row, dtype="fp32")
        return Runner(plain, Way("reference", None), model, inputs).results()


class Worker:
    """The ways of a side: compiled and judged once, then timed as often as is asked for."""

    def __init__(self, row: Row, side: str, device: str, small: bool) -> None:
        self.row, self.side, self.device = row, side, torch.device(device)
        self.model = row.network.build(small)
        self.inputs = tuple(tensor.to(device) for tensor in row.network.inputs(small))
        self.runners: dict[str, Runner] = {}
        self.calls: dict[str, Callable[[], Any]] = {}

    def judge(self) -> dict[str, Any]:
        """Compiles every way and judges it. A way that fails is a result."""
        wanted = reference(self.row, self.model, self.inputs)
        found = {}
        for way in ways(self.side):
            try:
                found[way.name] = self._judge(way, wanted)
            except Exception as failure:
                found[way.name] = {"failed": (str(failure).splitlines() or [repr(failure)])[0][:200]}
            self._free()
        return found

    def _judge(self, way: Way, wanted: list[Tensor]) -> dict[str, Any]:
        begin = time.monotonic()
        runner = Runner(self.row, way, self.model, self.inputs)
        runner()
        seconds = round(time.monotonic() - begin, 1)
        found = {
            "error": float(f"{error_of(runner.results(), wanted):.3g}"),
            "first_call_seconds": seconds,
            "peak_bytes": peak_bytes(runner, self.device),
            "kernels": launches_of(runner),
        }
        if way.backend == "onepass":
            chains = onepass.report(runner.run).chains
            found["chains"] = {"kept": sum(chain.kept for chain in chains), "found": len(chains)}
        self.runners[way.name] = runner
        return found

    def _free(self) -> None:
        for runner in self.runners.values():
            runner.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def time(self, seconds: float) -> dict[str, list[float]]:
        """Milliseconds of every way, and of the compiled ones in a CUDA graph."""
        if not self.calls:
            self.calls = dict(self.runners)
            for name, runner in self.runners.items():
                if self.device.type == "cuda" and runner.way.backend is not None:
                    self.calls[f"{name}, graphs"] = runner.captured()
        taken = samples(self.calls, self.device, seconds, lambda part: None)
        return {name: [round(1e3 * t, 4) for t in times] for name, times in taken.items()}


def main() -> None:
    """Reads the command line, then commands until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("key")
    parser.add_argument("side", choices=BACKENDS)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    row = next(row for row in rows() if row.key == options.key)
    torch.manual_seed(0)
    worker = Worker(row, options.side, options.device, options.small)
    print(json.dumps(worker.judge()), flush=True)
    # Other processes are at work until here: cuDNN's times would be disturbed. It measures in a new thread,
    # whose choices are its own, for gradients too where they are computed in the thread that asks.
    torch.backends.cudnn.benchmark = True
    thread = threading.Thread(target=answer, args=(worker,))
    thread.start()
    thread.join()


def answer(worker: Worker) -> None:
    """Times as often as is asked for."""
    with torch.autograd.set_multithreading_enabled(False):
        for line in sys.stdin:
            print(json.dumps(worker.time(float(line))), flush=True)


if __name__ == "__main__":
    main()
