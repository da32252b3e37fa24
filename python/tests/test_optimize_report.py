"""What optimize says of wins, losses, models that nothing fuses of and unsteady times, and its variants."""

from __future__ import annotations

import io
import math
import pathlib
import re
import shutil
from typing import Any

import pytest
import torch
from model_text import MODEL
from rich.cells import cell_len
from torch import nn

from onepass import available, optimize, unavailable_reason
from onepass.optimizing import blocks, console, measure, model_file, page, study, text, variants, verify
from onepass.optimizing.blocks import Coverage, FusedBlock, KeptChain
from onepass.optimizing.measure import Timing
from onepass.optimizing.study import Row, StepStudy, Study
from onepass.optimizing.verify import RULES, Check

BLOCK = "conv2d(3,8,k=3,p=1) | swish | group_norm(4) | hardswish"
MACHINE = {"GPU": "H200", "CUDA": "13.0", "processor": "Neoverse", "PyTorch": "2.11", "date": "2026-11-17"}
GREEN = re.compile(r'class="(?:[^"]* )?(?:win|faster)"')

needs_library = pytest.mark.skipif(not available(), reason=str(unavailable_reason()))


def row(variant: str, ms: float, spread: float = 0.02, **fields: Any) -> Row:
    check = Check("output", False, 2e-6, 1e-6, 1e-6, 1.0, True, True)
    timing = Timing(ms / 1e3, ms / 1e3, ms * (1 + spread) / 1e3, 100)
    return Row(variant, keeps_rule=True, checks=[check], timing=timing, peak_bytes=1 << 20, **fields)


def made_study(ms: dict[str, float], fused: int = 2, layers: int = 3, **fields: Any) -> Study:
    """A study with these times; `fused` of its layers are in one block."""
    names = tuple(f"layer{i}" for i in range(fused))
    found = [FusedBlock("layer0", names, BLOCK, "* tail  0.010 ms predicted", "the plan", 1e-5, 2e-5)]
    chains = [KeptChain("conv", f"{BLOCK} @ 1x3x8x8", True, "kept", 1e-5, 3e-5, False)]
    idle = "" if fused else "nothing was fused: this is eager"
    rows = [row(name, time, idle=idle if variants.is_ours(name) else "") for name, time in ms.items()]
    step = StepStudy("forward", RULES["fp32"], rows)
    return Study(
        "model",
        "model.py",
        ["1x3x8x8 float32"],
        [step],
        found if fused else [],
        fields.get("skipped", []),
        Coverage(layers, fused),
        chains if fused else [],
    )


WINS = {"eager": 4.0, "compile": 3.0, "onepass fuse": 2.5, "onepass backend": 1.5}
LOSES = {"eager": 4.0, "compile": 2.0, "onepass fuse": 3.0, "onepass backend": 2.5}
EVEN = {"eager": 4.0, "compile": 2.0, "onepass fuse": 3.0, "onepass backend": 1.99}


def rendered(*studies: Study) -> str:
    return page.render(studies, MACHINE, "python -m onepass optimize model.py", "the allocator's")


def body(html: str) -> str:
    return html.partition("</head>")[2]


def printed(*studies: Study) -> str:
    """What a pipe gets: it has no width of its own."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console.sys, "stdout", output)
        console.print_studies(studies)
    return output.getvalue()


# --- Wins and losses ----------------------------------------------------------------


def test_a_win_is_green_and_recommended() -> None:
    found = made_study(WINS)
    html = body(rendered(found))
    assert len(GREEN.findall(html)) == 6  # card, summary, two bars and two rows of the results
    assert '<b class="faster">2.00x</b>' in html
    assert text.recommendation(found, found.steps[0]) == (
        'model, forward: use torch.compile(model, backend="onepass"): 2.00x as fast as PyTorch\'s best '
        "(compile); error against fp64 2.0e-06, 2.00x eager's."
    )


@pytest.mark.parametrize(("ms", "word"), [(LOSES, "slower"), (EVEN, "no faster")])
def test_what_is_no_win_has_no_green_and_pytorch_is_recommended(ms: dict[str, float], word: str) -> None:
    found = made_study(ms)
    assert not GREEN.search(body(rendered(found)))
    sentence = text.recommendation(found, found.steps[0])
    assert sentence.startswith(f"model, forward: use torch.compile(model): onepass is {word} here")
    styles = [console._style(found.steps[0], r) for r in found.steps[0].rows]
    assert "bold green" not in styles


def test_where_nothing_fuses_noise_is_no_win() -> None:
    found = made_study(WINS, fused=0, skipped=[("norm", "its input is no image")])
    html = body(rendered(found))
    assert not GREEN.search(html)
    assert not any(found.steps[0].wins(r) for r in found.steps[0].rows)
    assert "nothing fused" in html and "Nothing was fused." in html
    assert "2.00x<" not in html.partition("<nav>")[0].partition("<table>")[2].rpartition("<td")[0]
    assert not re.search(r"onepass backend.*2\.00x.*2\.00x", printed(found))  # its error, and no speed
    assert "read the reasons under" in html and "its input is no image" in html
    assert "onepass changes nothing of this model" in text.recommendation(found, found.steps[0])


def test_what_to_do_where_little_was_fused() -> None:
    assert text.advice(made_study(WINS, fused=2, layers=4)) == ""
    assert "2 of 5 layers" in text.advice(made_study(WINS, fused=2, layers=5))
    assert "Little was fused" in body(rendered(made_study(WINS, fused=2, layers=5)))
    assert "use PyTorch's best" in text.advice(made_study(WINS, fused=0))


def test_a_wrong_result_is_never_recommended() -> None:
    found = made_study(WINS)
    for ours in found.steps[0].rows[2:]:
        ours.timing, ours.wrong = None, "output: error"
    assert found.wrong
    assert "WRONG: output: error" in text.recommendation(found, found.steps[0])
    assert 'class="wrong">Wrong: model</b>' in body(rendered(found))
    assert "faster" not in body(rendered(found)).partition("<nav>")[0]


def test_several_models_are_counted() -> None:
    html = body(rendered(made_study(WINS), made_study(LOSES)))
    assert '<b class="slower">faster in 1 of 2</b>' in html


# --- The page ----------------------------------------------------------------


def test_machine_date_and_command_come_first() -> None:
    html = body(rendered(made_study(WINS)))
    for fact in ("H200", "2026-11-17", "python -m onepass optimize model.py"):
        assert html.index(fact) < html.index('class="cards"')


def test_the_speed_up_is_beside_the_name() -> None:
    table = body(rendered(made_study(WINS))).partition("<table>")[2]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", table)
    assert cells[0].startswith("model, forward") and ">2.00x<" in cells[1]


def test_contents_lead_somewhere() -> None:
    html = body(rendered(made_study(WINS), made_study(LOSES)))
    links = re.findall(r'href="#([^"]+)"', html)
    assert len(links) == 7 and all(f'id="{link}"' in html for link in links)


def test_predictions_stand_beside_measurements() -> None:
    html = body(rendered(made_study(WINS)))
    assert re.search(r'number">0\.010</td><td class="number">0\.020</td>', html)  # a block
    assert re.search(r'number">0\.010</td><td class="number">0\.030</td><td>kept</td>', html)  # a chain


def test_every_variant_has_a_recipe() -> None:
    names = [
        name
        for device in ("cpu", "cuda")
        for name, _ in variants.makers(lambda: nn.ReLU(), arguments(4), "fuse", torch.device(device))
    ]
    assert len(set(names)) == 26
    recipes = {name: variants.recipe(name) for name in names}
    assert recipes["onepass backend graphs nhwc bench"] == (
        'torch.compile(model, backend="onepass", mode="reduce-overhead") with model and inputs in channels '
        "last and torch.backends.cudnn.benchmark = True"
    )


# --- The console ----------------------------------------------------------------


def test_no_line_is_longer_than_80_columns_and_no_row_is_broken() -> None:
    names = [n for n, _ in variants.makers(nn.ReLU, arguments(4), "fuse", torch.device("cuda"))]
    found = made_study(dict.fromkeys(names, 12345.678), skipped=[("module.with.a.name", "reason " * 30)])
    output = printed(found)
    assert max(cell_len(line) for line in output.splitlines()) <= 80
    rows = [line for line in output.splitlines() if re.match(r" ?(eager|compile|max|onepass)\b.*%", line)]
    assert len(rows) == len(names) / 2  # the faster of each pair
    assert all(re.search(r"12345\.7 +2% +1\.00x +1\.0 +2\.00x", line) for line in rows)


def test_the_console_lists_what_was_fused_and_ends_with_the_sentence() -> None:
    output = " ".join(printed(made_study(WINS)).split())
    assert f"2 of 3 layers run in 1 block; the backend keeps 1 of 1 chains layer0, layer1: {BLOCK}" in output
    assert output.endswith("(compile); error against fp64 2.0e-06, 2.00x eager's.")


def test_bench_is_shown_where_it_is_faster() -> None:
    ms = {"eager": 4.0, "eager bench": 3.0, "onepass fuse": 2.0, "onepass fuse bench": 2.5}
    shown = [r.variant for r in made_study(ms).steps[0].shown()]
    assert shown == ["eager bench", "onepass fuse"]
    output = printed(made_study(ms))
    assert "cudnn.benchmark" in output and "cudnn.benchmark" not in printed(made_study(WINS))


# --- Times that spread ----------------------------------------------------------------


def test_times_that_spread_are_measured_again_and_the_calmer_run_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [{"a": Timing(1.0, 0.9, 1.9, 9)}, {"a": Timing(1.1, 1.0, 1.2, 9)}]
    monkeypatch.setattr(measure, "interleaved", lambda *_: runs.pop(0))
    assert measure.steady({}, torch.device("cpu"), 0.0, lambda done: None)["a"].median == 1.1
    assert runs == []
    runs += [{"a": Timing(1.0, 0.9, 1.1, 9)}, {"a": Timing(2.0, 2.0, 2.0, 9)}]
    assert measure.steady({}, torch.device("cpu"), 0.0, lambda done: None)["a"].median == 1.0
    assert len(runs) == 1  # a calm run is not repeated


def test_times_that_still_spread_are_warned_of() -> None:
    found = made_study(WINS)
    assert text.warning(found.steps[0]) == ""
    found.steps[0].rows[1] = row("compile", 3.0, spread=0.5)
    warning = "The times of compile spread by more than 30% of their median, also when measured again."
    assert warning in body(rendered(found))
    assert warning in " ".join(printed(found).split())


# --- The variants ----------------------------------------------------------------


def arguments(dimensions: int) -> model_file.Arguments:
    return model_file.as_arguments([torch.rand((2,) * dimensions)])


def names_on(device: str, dimensions: int) -> list[str]:
    return [
        name
        for name, _ in variants.makers(nn.ReLU, arguments(dimensions), "fuse", torch.device(device))
        if not name.endswith(variants.BENCH)
    ]


def test_backend_and_graphs_in_both_layouts() -> None:
    cpu = ["eager", "compile", "onepass fuse", "onepass backend"]
    assert names_on("cpu", 2) == cpu
    assert names_on("cpu", 5) == [name + layout for name in cpu for layout in ("", " nhwc")]
    gpu = names_on("cuda", 4)
    for name in ("compile graphs", "onepass backend graphs", "onepass backend", "onepass fuse"):
        assert {name, f"{name} nhwc"} <= set(gpu)
    assert "max-autotune" in gpu


def test_variants_of_the_backend_are_compiled_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: asked.append(options) or model)
    for name, make in variants.makers(nn.ReLU, arguments(2), "fuse", torch.device("cuda")):
        if name in ("compile graphs", "onepass backend", "onepass backend graphs"):
            make()
    graphs = {"mode": "reduce-overhead"}
    assert asked == [graphs, {"backend": "onepass"}, {"backend": "onepass", **graphs}]


def test_a_variant_in_channels_last_has_weights_and_inputs_so() -> None:
    build = lambda: nn.Conv2d(3, 4, 3)  # noqa: E731
    inputs = model_file.as_arguments([torch.rand(2, 3, 5, 5)])
    made = dict(variants.makers(build, inputs, "fuse", torch.device("cpu")))
    variant = made["onepass fuse nhwc"]()
    (x,) = variant.prepare(inputs, train=False).leaves
    for tensor in (x, variant.model.weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


def check(error: float, torch_error: float = 1e-6, close: bool = True) -> Check:
    return Check("output", False, error, torch_error, error, 1.0, close, True)


def test_the_backend_may_round_as_inductor_does_and_fuse_may_not() -> None:
    rule = verify.RULES["fp32"]
    ours, inductors = check(9e-6), check(5e-6)
    assert study._why_wrong(Row("onepass fuse", checks=[ours]), [], rule)
    assert study._why_wrong(Row("onepass backend", checks=[ours]), [], rule)
    assert study._why_wrong(Row("onepass backend", checks=[ours]), [inductors], rule) == ""
    assert study._why_wrong(Row("onepass backend", checks=[check(5e-5)]), [inductors], rule)
    far = [check(1e-4, close=False)]
    assert study._why_wrong(Row("onepass backend", checks=far), [check(1e-6)], rule)
    assert variants.rival_of("onepass backend graphs nhwc") == "compile graphs nhwc"
    assert variants.rival_of("onepass fuse") is None


@needs_library
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_the_backend_is_verified_measured_and_reported(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    options = study.Options(torch.device("cpu"), 2, "fuse", True, 0.02)
    found = study.study(model_file.load(str(path)), options, lambda what, done: None)
    for step in found.steps:
        for name in ("compile nhwc", "onepass backend", "onepass backend nhwc"):
            assert step.row(name).checks and step.row(name).timing, step.row(name)
    assert [chain.block for chain in found.chains if not chain.gradients] == [f"{BLOCK} @ 2x3x20x20"]
    assert any(chain.gradients for chain in found.chains)
    assert found.coverage == Coverage(2, 2)
    (block,) = found.fused
    assert block.predicted and block.measured and math.isfinite(block.measured)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["onepass fuse", "onepass fuse nhwc"])
def test_blocks_are_measured_with_the_model_as_it_runs(dtype: torch.dtype, name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.Flatten(), nn.Linear(8, 2))
    inputs = model_file.as_arguments([torch.rand(2, 3, 3, 3, dtype=dtype)])
    made = dict(variants.makers(lambda: model.to(dtype), inputs, "fuse", torch.device("cpu")))
    (block,) = blocks.fused_blocks(made[name](), inputs)
    assert block.modules == ("0", "1", "2") and "ms predicted" in block.plan
    assert (" nhwc\n" in block.plan) == name.endswith("nhwc")
    assert 0 < block.predicted < 1e-3 and 0 < block.measured < 1
    assert blocks.coverage(model, [block]) == Coverage(5, 3)


def test_graphs_are_given_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of a CUDA graph are overwritten by the next step, which has to be marked."""
    marks: list[str] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append("step"))
    identity = nn.Identity()
    for name in ("compile", "onepass backend graphs", "max-autotune bench"):
        with variants.Variant(name, identity, identity).settings():
            pass
    assert marks == ["step", "step"]


def test_json_has_the_coverage_and_the_chains(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    monkeypatch.setattr(optimize, "study", lambda *_: made_study(WINS))
    assert optimize.main([str(path), "--device", "cpu", "--json", "--no-report"]) == 0
    output = capsys.readouterr().out
    assert '"coverage": {\n    "layers": 3,' in output and '"decision": "kept"' in output
