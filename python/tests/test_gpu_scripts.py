"""The GPU's benchmark on the CPU, with small tensors and no compilers: that no group of cases breaks."""

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import onepass

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"

pytestmark = pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))


class Stopwatch:
    """Of the host."""

    def __init__(self, queue_cycles: int) -> None:
        assert queue_cycles > 0

    def seconds(self, call: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("ONEPASS_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # importing the scripts sets them
    # PyTorch's own tests, which others here import, forbid to set flags as the scripts do.
    flags = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", True)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "argv", ["gpu_bench.py"])
    names = (
        "gpu_timing",
        "gpu_bench_layers",
        "gpu_bench_cases",
        "gpu_bench_host",
        "gpu_bench_rivals",
        "gpu_bench",
    )
    found = {name: __import__(name) for name in names}
    for module in found.values():
        if hasattr(module, "DEVICE"):
            monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(found["gpu_timing"], "Stopwatch", Stopwatch)
    monkeypatch.setattr(found["gpu_timing"], "SECONDS_OF_A_WAY", 0.001)
    monkeypatch.setattr(found["gpu_timing"], "LEAST_ROUNDS", 1)
    cases = found["gpu_bench_cases"]
    monkeypatch.setattr(cases, "peak_bytes", lambda call, device: 1)
    monkeypatch.setattr(cases, "graph_of", lambda call: call)
    for name, workload in cases.WORKLOADS.items():
        shape = (2, workload.shape[1], *[5] * (len(workload.shape) - 2))
        monkeypatch.setitem(cases.WORKLOADS, name, dataclasses.replace(workload, shape=shape))
    for layers in (found["gpu_bench_layers"].THIN_LAYERS, found["gpu_bench_layers"].REAL_LAYERS):
        for name, layer in layers.items():
            channels = tuple(min(count, 64) for count in layer.channels)
            small = dataclasses.replace(layer, size=(8,) * len(layer.size), batch=2, channels=channels)
            monkeypatch.setitem(layers, name, small)
    load = cases.model_file.load

    def load_small(path: pathlib.Path) -> Any:
        file = load(path)
        for name, value in {"batch_size": 2, "depth": 8, "height": 8, "width": 8}.items():
            if hasattr(file.module, name):
                setattr(file.module, name, value)
        return file

    monkeypatch.setattr(cases.model_file, "load", load_small)
    return found


def test_no_group_of_the_gpu_benchmark_breaks(
    scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    bench, compilers = scripts["gpu_bench"], scripts["gpu_timing"].COMPILERS
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(bench.gpu_results, "write", lambda device, part, content: written.append(content))
    chosen: dict[tuple[str, ...], Any] = {}
    for case in scripts["gpu_bench_cases"].cases():  # one of each kind
        kind = (case.group, case.layout, case.precision, str(bool(case.batch)))
        if case.dtype == "fp32":
            rivals = tuple(name for name in case.rivals if name not in compilers)
            chosen.setdefault(kind, dataclasses.replace(case, rivals=rivals))
    device = {"device": "none", "description": "none", "device_code_hash": "none"}
    rivals = scripts["gpu_bench_rivals"].Rivals()
    bench.run(list(chosen.values()), rivals, set(), device, time.monotonic() + 100, {}, written=True)
    entries = written[-1]["entries"]
    assert len(entries) == len(chosen) and not written[-1]["left_out"]
    assert {entry["group"] for entry in entries} == set(bench.MEASURES)
    assert not [entry["error"] for entry in entries if "error" in entry]
    assert all(entry["passed"] for entry in entries)
    assert {target["what"].split()[0] for target in written[-1]["targets"]} >= set(bench.MEASURES)


def test_elements_at_kinks_are_left_out_and_no_others(scripts: dict[str, Any]) -> None:
    cases = scripts["gpu_bench_cases"]
    x = torch.tensor([-2.0, 1e-8, 0.5, 3.0], dtype=torch.float64)

    def gradients(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x > 0).double(), (x > 0).double().sum(0, keepdim=True)

    exact = gradients(x)
    kinks = cases.at_kinks(exact, [gradients(x + d) for d in (cases.NUDGE, -cases.NUDGE)], 1e-4)
    assert kinks[0].tolist() == [False, True, False, False]
    assert kinks[1].tolist() == [1]
    other_side = gradients(x - cases.NUDGE)
    assert cases.difference(other_side, exact) == 1
    assert cases.difference(other_side, exact, kinks) == 0
    other_side[0][2] = 0
    assert cases.difference(other_side, exact, kinks) == 1
    other_side = gradients(x - 1)
    assert cases.difference((exact[0], other_side[1]), exact, kinks) == pytest.approx(1 / 3)


def test_a_wrong_gradient_of_a_tail_is_found_beside_kinks(scripts: dict[str, Any]) -> None:
    cases = scripts["gpu_bench_cases"]
    case = next(case for case in cases.cases() if (case.group, case.workload) == ("tail_backward", "s60"))
    started = cases.start_tail_backward(case, ("onepass", "eager"))
    dx, *others = started.results["onepass"]
    wrong = dx.clone()
    wrong.view(-1)[7] += dx.abs().max()
    started.results["onepass"] = (wrong, *others)
    entry = started.entry()
    assert entry["at_kinks"] == 0
    assert entry["errors"]["onepass"] > 0.5
    assert not cases.is_right(entry, case)
    assert not cases.is_right({**entry, "at_kinks": 3}, case)
    near = {"errors": {"onepass": 5e-6, "eager": 1e-7}}
    assert cases.is_right({**near, "at_kinks": 3}, case)
    assert not cases.is_right({**near, "at_kinks": 0}, case)


def test_a_missed_target_counts_by_the_median_of_three(
    scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, cases = scripts["gpu_bench"], scripts["gpu_bench_cases"]
    limit = 1e-3 * bench.BLOCK_LIMITS["s60"]["fp16"]

    def entry(case: Any, seconds: float) -> dict[str, Any]:
        timings = {"onepass": {"median": seconds}, "eager": {"median": 1.0}}
        found = {"seconds": timings, "taken_seconds": 0.0, "compile_seconds": {}, "plan": "", "passed": True}
        return {**dataclasses.asdict(case), **found}

    slow, quick = (cases.Case("block", name, "fp16", rivals=("eager",)) for name in ("s60", "s27"))
    later = iter([0.9 * limit, 0.8 * limit])
    monkeypatch.setattr(bench, "measured", lambda case: entry(case, next(later)))
    entries = [entry(slow, 1.1 * limit), entry(quick, 0.0)]
    bench.measure_misses_again(entries, time.monotonic() + 60)
    assert entries[0]["seconds"]["onepass"]["median"] == 0.9 * limit
    assert entries[0]["of_three_seconds"] == [0.8 * limit, 0.9 * limit, 1.1 * limit]
    assert "of_three_seconds" not in entries[1]
