"""The sweep: what it draws, its floors and figures, and a whole run as on a GPU with the CPU in its place."""

import argparse
import importlib.util
import json
import math
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import onepass
from onepass._description import describe

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "bench" / "sweep", ROOT / "scripts")

pytestmark = pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))
    flags = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", True)
    names = ("problems", "figures", "clock", "calls", "prepare", "map")
    yield {name: __import__(f"sweep_{name}") for name in names}
    for name in [name for name in sys.modules if name.startswith("sweep_")]:
        del sys.modules[name]


# --- The generator ---


def test_a_seed_gives_one_list_and_longer_lists_begin_with_it(modules: dict[str, Any]) -> None:
    problems = modules["problems"].problems
    assert problems(5, 40) == problems(5, 40)
    assert problems(5, 60)[:40] == problems(5, 40)
    assert problems(6, 40) != problems(5, 40)
    assert problems(5, 40, "cpu") != problems(5, 40)


def test_the_whole_space_is_drawn(modules: dict[str, Any]) -> None:
    space = modules["problems"]
    drawn = space.problems(3, 3000)
    convs = [p for p in drawn if p.conv]
    tails = [p for p in drawn if not p.conv and p.norm]
    assert {p.group for p in drawn} == set(space.SHARES)
    assert {p.precision for p in convs} == set(space.PRECISIONS)
    assert {p.precision for p in tails} == {"tf32", "bf16", "fp16"}
    for found in (convs, tails):
        assert {p.rank for p in found} == {1, 2, 3}
        assert {p.layout for p in found if p.rank > 1} == set(space.LAYOUTS)
        assert {p.mean for p in found} == {False, True}
    assert {p.conv.kind for p in convs} == set(space.KINDS)
    assert {p.conv.kernel for p in convs} == set(space.KERNELS)
    for side in (0, 1):
        assert {p.conv.channels[side] for p in convs} == set(space.CHANNELS)
    transposed = {(p.conv.stride, p.conv.output_padding) for p in convs if p.conv.transposed}
    assert transposed == {(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)}
    assert {p.conv.stride for p in convs if p.conv.kind == "strided"} == {2, 3}
    assert {p.shape[0] for p in convs} == set(space.BATCHES)
    assert any(not p.norm for p in convs)
    assert min(p.slab() for p in tails) < 64 and max(p.slab() for p in tails) > 4e6
    assert min(p.norm for p in tails) == 1 and max(p.norm for p in tails) == 4096
    limits = space.LIMITS["cuda"]
    assert all(limits.least_bytes * 0.5 <= p.bytes() <= limits.most_bytes * 1.1 for p in drawn)
    assert all(p.products() <= limits.most_products for p in drawn)
    assert min(p.bytes() for p in drawn) < 2e6 and max(p.bytes() for p in drawn) > 9e8


def test_problems_are_what_their_blocks_say(modules: dict[str, Any]) -> None:
    for problem in modules["problems"].problems(11, 300):
        description = describe(problem.block())
        assert tuple(description.output_shape(problem.shape)) == problem.output(), problem.key()
        assert tuple(description.conv_output_shape(problem.shape)) == problem.convolved()
        if problem.conv:
            conv = description.conv
            assert (conv.stride[0], conv.groups, conv.transposed) == (
                problem.conv.stride,
                problem.conv.groups,
                problem.conv.transposed,
            )


def test_modules_are_the_blocks_too(modules: dict[str, Any]) -> None:
    calls = modules["calls"]
    for problem in modules["problems"].problems(12, 60):
        with torch.device("meta"):
            module = calls.build(problem)
            assert tuple(module(torch.empty(problem.shape)).shape) == problem.output(), problem.key()


# --- Floors and figures ---


def block(modules: dict[str, Any], group: str = "block", **more: Any) -> Any:
    space = modules["problems"]
    conv = space.Conv("ordinary", (16, 32), 3, padding=1)
    fields = {"conv": conv, "before": "relu", "norm": 8, "after": "", "mean": False}
    fields |= {"shape": (4, 16, 10, 20), "precision": "tf32", "layout": "contiguous"} | more
    return space.Problem(group=group, **fields)


def test_a_floor_is_the_larger_of_bytes_and_operations(modules: dict[str, Any]) -> None:
    figures = modules["figures"]
    moved = 4 * (4 * 16 * 200 + 4 * 32 * 200 + 16 * 32 * 9)
    operations = 2 * 4 * 200 * 16 * 32 * 9
    slow_memory = figures.floor_of(block(modules), figures.Rates(1e6, 1e30))
    assert (slow_memory.seconds, slow_memory.bound) == (pytest.approx(moved / 1e6), "bytes")
    slow_cores = figures.floor_of(block(modules), figures.Rates(1e30, 1e6))
    assert (slow_cores.seconds, slow_cores.bound) == (pytest.approx(operations / 1e6), "operations")
    rates = figures.Rates(1e30, 1e6)
    seconds = {p: figures.floor_of(block(modules, precision=p), rates).seconds for p in ("bf16", "strict")}
    assert seconds["bf16"] == pytest.approx(operations / figures.HALF / 1e6)
    assert seconds["strict"] == pytest.approx(operations * 3 / figures.HALF / 1e6)


def test_a_step_does_three_times_the_operations_and_gradients_move_inputs_twice(
    modules: dict[str, Any],
) -> None:
    figures = modules["figures"]
    operations = 2 * 4 * 200 * 16 * 32 * 9
    step = figures.floor_of(block(modules, "block_step"), figures.Rates(1e30, 1e6))
    assert step.seconds == pytest.approx(3 * operations / 1e6)
    weights, x, y = 16 * 32 * 9, 4 * 16 * 200, 4 * 32 * 200
    moved = figures.floor_of(block(modules, "block_step"), figures.Rates(1e6, 1e30))
    assert moved.seconds == pytest.approx(4 * (3 * (x + weights) + 2 * y) / 1e6)
    tail = block(modules, "tail_backward", conv=None, precision="fp16", mean=True)
    assert figures.floor_of(tail, figures.Rates(1e6, 1)).seconds == pytest.approx(2 * (2 * x + 4 * 16) / 1e6)


def test_transposed_convolutions_count_their_inputs(modules: dict[str, Any]) -> None:
    conv = modules["problems"].Conv("transposed", (16, 32), 4, 2, 1, transposed=True, groups=2)
    problem = block(modules, conv=conv)
    assert problem.convolved() == (4, 32, 20, 40)
    assert problem.products() == 4 * 200 * 16 * 16 * 16


def entry(**more: Any) -> dict[str, Any]:
    fields = {
        "key": "k",
        "group": "block",
        "precision": "tf32",
        "row": "a",
        "tensor_bytes": 2**27,
        "floor_seconds": 1e-4,
        "bound": "bytes",
        "gpu_seconds": 2e-4,
        "call_seconds": 3e-4,
        "axes": [64, 64],
        "all_rivals": True,
        "torch_seconds": {"eager": 9e-4, "compile": 6e-4},
        "rows": {"a": {"predicted": 1e-4, "seconds": 2e-4}, "b": {"predicted": 2e-4, "seconds": 1e-4}},
    }
    return fields | more


def test_figures_of_an_entry(modules: dict[str, Any]) -> None:
    figures = modules["figures"]
    assert figures.efficiency(entry()) == pytest.approx(0.5)
    assert figures.speed(entry()) == pytest.approx(2.0)
    assert figures.speed(entry(all_rivals=False)) is None
    assert figures.choice_loss(entry()) == pytest.approx(2.0)
    assert figures.choice_loss(entry(row="PyTorch, then t", gpu_seconds=4e-4)) == pytest.approx(4.0)
    assert figures.choice_loss(entry(row="b")) == pytest.approx(1.0)
    assert "b takes 0.100 ms" in figures.reason(entry())


def test_lines_have_geometric_means_and_the_worst(modules: dict[str, Any]) -> None:
    figures = modules["figures"]
    entries = [entry(), entry(gpu_seconds=8e-4), entry(floor_seconds=1e-6, gpu_seconds=1.0)]
    lines = {line.what: line for line in figures.gpu_lines(entries)}
    efficiency = lines["blocks, efficiency, tf32"]
    assert (efficiency.count, efficiency.mean, efficiency.worst) == (2, pytest.approx(0.25), 0.125)
    assert not efficiency.met
    tails = [entry(group="tail", gpu_seconds=1.2e-4), entry(group="tail", tensor_bytes=2**20)]
    (tail, _) = figures.gpu_lines(tails)
    assert (tail.count, tail.mean, tail.met) == (1, pytest.approx(1.2), True)
    assert [e["gpu_seconds"] for e in figures.worst_entries(entries)] == [8e-4, 2e-4]


def test_the_map_has_a_cell_for_each_pair_of_bins(modules: dict[str, Any]) -> None:
    result = {
        "device": {"name": "NVIDIA X"},
        "sweep": {
            "date": "2026-01-01",
            "seeds": [1, 4],
            "torch": "2",
            "entries": [entry(), entry(axes=[3, 1280]), entry(axes=[2, 700]), entry(key="lost", error="no")],
        },
    }
    drawing = modules["map"].drawing(result)
    assert drawing.count("<rect") == 2
    assert "input channels of a group from 2, output channels of a group from 512: 0.50 of 2" in drawing
    section = "\n".join(modules["map"].section(result, "map.svg"))
    assert "3 problems of seeds 1, 4" in section and "1 failed" in section and "](map.svg)" in section


# --- PyTorch's convolutions ---


def test_layers_are_given_by_their_number_and_within_limits(modules: dict[str, Any]) -> None:
    convolutions = __import__("sweep_convolutions")
    for number in range(40):
        layer = convolutions.layer(3, number)
        assert layer == convolutions.layer(3, number)
        assert convolutions.LEAST_BYTES <= convolutions.moved_bytes(layer) <= convolutions.MOST_BYTES
        assert min(layer.convolved()) > 0 and layer.products() <= convolutions.MOST_PRODUCTS
    places = list(convolutions.places(3, 30))
    assert {place["of"] for place in places} == {"drawn", "layer"}
    assert all(convolutions.problem_of(place).group.startswith("block") for place in places)


def test_a_convolution_that_fails_is_an_entry_and_the_time_ends_the_list(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    convolutions = __import__("sweep_convolutions")
    figures = iter([{"forward": 1e-3}])

    def measured(problem: Any, seconds: Any) -> dict[str, float]:
        for found in figures:
            return found
        raise RuntimeError("no algorithm\nmore")

    monkeypatch.setattr(convolutions, "_measured", measured)
    found = convolutions.measure(3, 2, time.monotonic() + 60, lambda call: 0.0)
    assert found[0]["forward"] == 1e-3 and found[1]["error"] == "RuntimeError: no algorithm"
    assert convolutions.measure(3, 2, time.monotonic() - 1, lambda call: 0.0) == []


# --- The fit of costs ---


def test_a_fit_is_the_median_drawn_towards_one(modules: dict[str, Any]) -> None:
    fit_costs = __import__("fit_costs")
    fit = fit_costs.fit([2.0, 2.0, 2.0])
    assert fit.factor == pytest.approx(math.sqrt(2))  # of three problems: half of the logarithm
    assert fit.before == pytest.approx(2) and fit.typical == pytest.approx(math.sqrt(2))
    many = fit_costs.fit([4.0] * 97)
    assert many.factor == pytest.approx(4**0.97) and many.rarely < 1.1


def test_rows_are_fitted_and_known_factors_multiply(modules: dict[str, Any]) -> None:
    fit_costs, space = __import__("fit_costs"), modules["problems"]
    number = next(n for n in range(100) if space.draw(1, n).group == "block")
    problem = space.draw(1, number)
    entry_ = entry(key=problem.key(), seed=1, number=number)
    short = entry_ | {"rows": {"a": {"predicted": 1e-6, "seconds": 9e-6}}, "error": "x"}
    stale = entry_ | {"key": "of another generator"}
    found = fit_costs.fits({"entries": [entry_, short, stale]})
    size = problem.element_bytes
    assert set(found) == {("a", size), ("b", size)}
    assert found["a", size].factor == pytest.approx(2 ** (1 / 4))
    result = {
        "device": {"description": "GPU; driver 1 from here"},
        "sweep": {"date": "d", "torch": "t", "cudnn": "c"},
    }
    text = fit_costs.table(result, found, {("a", size): 2.0})
    assert f'{{"a", {size}, {2 * 2**0.25:.3f}, 1, ' in text and "// GPU; driver 1; d, PyTorch t" in text


def test_trees_find_a_rule_and_are_judged_by_problems_they_did_not_see(modules: dict[str, Any]) -> None:
    fit_trees = pytest.importorskip("fit_trees")
    random = fit_trees.np.random.default_rng(3)
    rows = random.uniform(0, 8, (400, 3))
    targets = fit_trees.np.where(rows[:, 1] > 4, 2.0, 0.0) + fit_trees.np.where(rows[:, 2] > 6, 1.0, 0.0)
    data = fit_trees.Data(rows, targets, fit_trees.np.array(["drawn"] * 400))
    errors = fit_trees.cross_validated(data)["drawn"]
    assert errors.problems == 400 and errors.typical < 1.05
    noise = fit_trees.Data(rows, random.normal(0, 1, 400), data.of)
    assert fit_trees.cross_validated(noise)["drawn"].typical > 1.4


def test_the_library_reads_trees_as_they_were_fitted(modules: dict[str, Any]) -> None:
    """The prediction of PyTorch's convolution is the base times two to the sum of the committed trees."""
    fit_trees = pytest.importorskip("fit_trees")
    torch, convolutions = fit_trees.torch, fit_trees.sweep_convolutions

    def trees_of(name: str) -> list[Any]:
        lines = (fit_trees.ROOT / "src/cuda/costs" / f"convolution_{name}.inc").read_text().splitlines()
        parts = (re.findall(r"{([^{}]+)}", line) for line in lines if line.startswith("{"))
        numbers = ([[float(x.rstrip("F")) for x in part.split(",")] for part in own] for own in parts)
        return [fit_trees.Tree([int(f) for f in own[0]], own[1], own[2]) for own in numbers]

    wanted = {"input": [True, False], "weight": [False, True]}
    for number in range(6):
        problem = convolutions.layer(5, number)
        text = problem.conv.text(problem.rank)[:-1] + ",bias=false)"
        layout = "nhwc" if problem.layout == "channels_last" else "nchw"
        how = (text, problem.shape, fit_trees.MODES[problem.precision], layout, fit_trees.DEVICE)
        *features, base = map(float, torch.ops.onepass.cuda_convolution_features(*how).split())
        rows = fit_trees.np.array([features])
        for name in ("forward", "input", "weight"):
            factor = 2 ** sum(float(tree.values(rows)[0]) for tree in trees_of(name))
            found = (
                torch.ops.onepass.cuda_framework_seconds(*how)
                if name == "forward"
                else torch.ops.onepass.cuda_framework_backward_seconds(*how, wanted[name])
            )
            assert found == pytest.approx(base * factor, rel=0.02), (name, problem.key())


def test_the_committed_table_is_read_back(modules: dict[str, Any]) -> None:
    fit_costs = __import__("fit_costs")
    lines = [line for line in fit_costs.TABLE.read_text().splitlines() if not line.startswith("//")]
    assert len(fit_costs.known()) == len(lines)
    assert all(0.1 < factor < 10 for factor in fit_costs.known().values())


# --- A whole run ---


class HostClock:
    """In the place of a GPU's."""

    def __init__(self) -> None:
        self.calls = 0

    def gpu_seconds(self, call: Callable[[], Any], gradients: bool) -> float:
        call()
        return 1e-3

    def call_seconds(self, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
        for call in calls.values():
            call()
        self.calls += 1
        return {name: 1.0 if "onepass" in name else 0.5 for name in calls}


@pytest.fixture
def main(modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    for name in ("ONEPASS_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("ONEPASS_SWEEP_CACHE", str(tmp_path))
    cache = os.environ["ONEPASS_CACHE_DIR"]
    path = FOLDERS[0] / "__main__.py"
    spec = importlib.util.spec_from_file_location("sweep_main", path)
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    os.environ["ONEPASS_CACHE_DIR"] = cache
    calls, space = modules["calls"], modules["problems"]
    subject = calls.Subject
    monkeypatch.setattr(calls, "GPU", "cuda:sm_90a")
    monkeypatch.setattr(calls, "Subject", lambda problem, device: subject(problem, "cpu"))
    monkeypatch.setattr(calls, "row_seconds", lambda problem, row: 1e-3)
    monkeypatch.setattr(calls, "compiled", lambda module: module)
    small = space.Limits(2**12, 2**17, 1e7, space.PRECISIONS)
    monkeypatch.setitem(space.LIMITS, "cuda", small)
    clock = HostClock()
    monkeypatch.setattr(main, "GpuClock", lambda: clock)
    monkeypatch.setattr(main, "prepare_all", lambda tasks, end, processes: dict(map(main.prepare, tasks)))
    described = {"device": "Fake", "architecture": "sm_90a", "description": "a GPU", "device_code_hash": "h"}
    monkeypatch.setattr(main.gpu_results, "describe_device", lambda: described)
    monkeypatch.setattr(main.gpu_results, "path_of", lambda device: tmp_path / "fake.json")
    monkeypatch.setattr(main.Results, "start", lambda self: setattr(self, "rates", main.Rates(4e12, 5e14)))
    main.clock = clock
    return main


def options(**more: Any) -> argparse.Namespace:
    fields = {"device": "cuda", "seed": 2, "first": 0, "count": 12, "seconds": 1e6, "only": ""}
    fields |= {"again": False, "floor": 0, "rivals": 2, "rows": 2, "compilers": False, "note": ""} | more
    return argparse.Namespace(**fields)


def test_a_run_measures_every_problem_and_resumes(
    main: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(main, "BEGIN", time.monotonic())
    entries = main.Sweep(options(count=6)).run()
    assert [e["error"] for e in entries if "error" in e] == []
    assert len(entries) == 6 and all(e["right"] and e["row"] for e in entries)
    assert all(math.isfinite(e["floor_seconds"]) and e["floor_seconds"] > 0 for e in entries)
    convolved = [e for e in entries if e["group"].startswith("block")]
    assert convolved and all(e["torch_conv"]["predicted"] > 0 for e in convolved)
    with_rivals = [e for e in entries if e["number"] % 2 == 0]
    assert all(e["all_rivals"] and len(e["ratios"]) == 3 for e in with_rivals)
    timed = [e for e in with_rivals if e["group"] != "block_step"]
    assert timed and all(any("seconds" in row for row in e["rows"].values()) for e in timed if e["rows"])
    written = json.loads((tmp_path / "fake.json").read_text())["sweep"]
    assert [e["key"] for e in written["entries"]] == [e["key"] for e in entries]
    before = main.clock.calls
    assert len(main.Sweep(options(count=6)).run()) == 6
    assert main.clock.calls == before
    main.summarise(entries, "cuda")


def test_small_problems_are_left_out_where_floors_are_wanted(main: Any) -> None:
    sweep = main.Sweep(options(count=6))
    sweep.results = main.Results("cuda", sweep.options)
    every = sweep.numbers()
    rates = main.rates_of("cuda:sm_90a")
    floors = {n: 1e6 * main.sweep_figures.floor_of(sweep.problem(n), rates).seconds for n in every}
    sweep.options.floor = sorted(floors.values())[2]
    assert sweep.numbers() == [n for n in every if floors[n] >= sweep.options.floor]
    assert 0 < len(sweep.numbers()) < len(every)


def test_a_wrong_result_is_not_timed(
    main: Any, modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "BEGIN", time.monotonic())
    monkeypatch.setattr(modules["calls"].onepass, "fuse", lambda module, numerics: Wrong(module))
    (entry_,) = main.Sweep(options(count=1)).run()
    assert entry_["error"].startswith("wrong") and "gpu_seconds" not in entry_


class Wrong(torch.nn.Module):
    """Off by a tenth."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x) * 1.1
