"""The optimize command: right and wrong models, files and requests it must refuse, and the page it writes."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_text import MODEL
from torch import Tensor, nn

from onepass import _command_line, _output_file, available, optimize, unavailable_reason
from onepass.optimizing import console, measure, model_file, study, variants, verify
from onepass.optimizing.chart import Bar, bars
from onepass.optimizing.measure import Timing

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")

needs_library = pytest.mark.skipif(not available(), reason=str(unavailable_reason()))


@pytest.fixture
def model_path(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A good model file; the current folder is an empty one."""
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return str(path)


@pytest.fixture
def without_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: nn.Module, **options: str) -> nn.Module:
        raise RuntimeError("no compiler was found:\n  g++ is missing\n  at all")

    monkeypatch.setattr(torch, "compile", refuse)


def run(*arguments: str) -> int:
    return optimize.main([*arguments, "--device", "cpu", "--seconds", "0.02"])


def files() -> list[str]:
    return sorted(path.name for path in pathlib.Path().iterdir())


def json_rows(text: str, step: int = 0) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in json.loads(text)["studies"][0]["steps"][step]["rows"]}


# --- Good requests ----------------------------------------------------------------


@needs_library
def test_table_and_report(model_path: str, without_compile: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model_path, "--batch", "2") == 0
    table = capsys.readouterr().out
    for expected in ("eager nhwc", "onepass fuse nhwc", "2x3x20x20", "conv, norm: conv2d(3,8", "use "):
        assert expected in table
    report = pathlib.Path("report.html").read_text()
    for expected in (
        "conv2d(3,8,k=3,p=1) | swish | group_norm(4) | hardswish",
        "predicted",
        "--batch 2",
        'class="bars"',
    ):
        assert expected in report
    assert "<script" not in report
    assert files() == ["report.html"]


@needs_library
def test_training_checks_every_gradient(
    model_path: str, without_compile: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model_path, "--train", "--json", "--no-report") == 0
    row = json_rows(capsys.readouterr().out, step=1)["onepass fuse"]
    gradients = {check["name"] for check in row["checks"] if check["is_gradient"]}
    names = ("input 0", "conv.weight", "conv.bias", "norm.weight", "norm.bias")
    assert gradients == {f"gradient of {name}" for name in names}
    assert row["timing"]["repeats"] >= measure.LEAST_ROUNDS
    assert row["peak_bytes"] > 6 * 8 * 20 * 20 * 4
    assert files() == []


def test_failure_to_compile_is_a_row(
    model_path: str, without_compile: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model_path, "--json", "--no-report") == 0
    rows = json_rows(capsys.readouterr().out)
    for name in ("compile", "compile nhwc", "onepass backend", "onepass backend nhwc"):
        assert rows[name]["reason"] == "RuntimeError: no compiler was found: g++ is missing"
        assert rows[name]["timing"] is None


@needs_library
def test_kept_convolution(model_path: str, without_compile: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model_path, "--conv", "keep", "--json", "--no-report") == 0
    fused = json.loads(capsys.readouterr().out)["studies"][0]["fused"]
    assert [block["block"] for block in fused] == ["swish | group_norm(4) | hardswish"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_command_line_with_two_files_and_compile(model_path: str) -> None:
    command = [sys.executable, "-m", "onepass", "optimize", model_path, str(ROOT / "examples" / "s27.py")]
    options = ["--batch", "3,2", "--device", "cpu", "--seconds", "0.02", "--report", "page.html"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    result = subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    for expected in ("3x3x20x20", "2x3x16x32x32", "s27, forward"):
        assert expected in result.stdout
    assert ">s27</h2>" in pathlib.Path("page.html").read_text()


DICTS = {
    "inputs by name": (
        MODEL.replace("[torch.rand(6, 3, 20, 20)]", "{'x': torch.rand(6, 3, 20, 20)}"),
        "gradient of input x",
    ),
    "a dict of tensors": (
        MODEL.replace("[torch.rand(6, 3, 20, 20)]", "[{'a': torch.rand(6, 3, 20, 20), 'b': 2}]").replace(
            "self.conv(x)", "self.conv(x['a'] * x['b'])"
        ),
        "gradient of input 0['a']",
    ),
    "arguments by name": (MODEL.replace("return [8]", "return {'channels': 8}"), "gradient of input 0"),
    "a dict as argument": (
        MODEL.replace("return [8]", "return [{'c': 8}]").replace(
            "super().__init__()", "super().__init__(); channels = channels['c']"
        ),
        "gradient of input 0",
    ),
}


@pytest.mark.parametrize("case", DICTS)
def test_dicts_of_inputs(
    case: str, model_path: str, without_compile: None, capsys: pytest.CaptureFixture[str]
) -> None:
    text, gradient = DICTS[case]
    pathlib.Path(model_path).write_text(text)
    assert run(model_path, "--train", "--batch", "2", "--json", "--no-report") == 0
    row = json_rows(capsys.readouterr().out, step=1)["onepass fuse"]
    assert gradient in {check["name"] for check in row["checks"]}


def test_json_is_alone_on_standard_output_and_strict(
    model_path: str,
    without_compile: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pathlib.Path(model_path).write_text("print('hello')\n" + MODEL)
    perturb(monkeypatch, CHANGES["NaN"])  # an error that is no number
    assert run(model_path, "--json", "--no-report") == 1
    captured = capsys.readouterr()
    json.loads(captured.out, parse_constant=lambda name: pytest.fail(name))
    assert "hello" in captured.err


def test_report_is_written_though_the_reader_of_the_table_leaves(
    model_path: str,
    without_compile: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def leave(*_: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(console, "print_studies", leave)
    assert run(model_path) == _command_line.CLOSED_PIPE
    assert files() == ["report.html"]
    assert capsys.readouterr().err == "wrote report.html\n"


def test_table_is_printed_though_the_disk_is_full(
    model_path: str,
    without_compile: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_output_file.os, "replace", refuse)
    assert run(model_path) == 2
    captured = capsys.readouterr()
    assert "model, forward" in captured.out
    assert captured.err == "onepass: report.html: No space left on device, the file was not written\n"
    assert files() == []


def test_an_error_of_onepass_is_one_line_and_loses_no_other_file(
    model_path: str,
    without_compile: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = optimize.study

    def fail(file: Any, *arguments: Any) -> Any:
        if file.name == "bad":
            raise AssertionError("an oversight")
        return good(file, *arguments)

    bad = pathlib.Path(model_path).with_name("bad.py")
    bad.write_text(MODEL)
    monkeypatch.setattr(optimize, "study", fail)
    assert run(str(bad), model_path) == _command_line.FAILED
    captured = capsys.readouterr()
    assert "bad.py: an error of onepass itself: AssertionError: an oversight\n" in captured.err
    assert "model, forward" in captured.out and files() == ["report.html"]


# --- Wrong results ----------------------------------------------------------------


class Perturbed(nn.Module):
    """A model whose output or gradient is off by a little, perhaps only from some call on."""

    def __init__(self, model: nn.Module, change: Callable[[Tensor], Tensor], good_calls: int = 0) -> None:
        super().__init__()
        self.__dict__["inner"] = model  # hidden, so that the parameters keep their names
        for name, child in model.named_children():
            self.add_module(name, child)
        self.change = change
        self.good_calls = good_calls

    def forward(self, x: Tensor) -> Tensor:
        self.good_calls -= 1
        y = self.inner(x)
        return y if self.good_calls >= 0 else self.change(y)


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + 1e-4)


def perturb(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor], good_calls: int = 0) -> None:
    monkeypatch.setattr(variants, "fuse", lambda model, conv: Perturbed(model, change, good_calls))


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "values": lambda y: y * (1 + 1e-4),
    "one value": lambda y: torch.where(torch.arange(y.numel()).reshape(y.shape) == 77, y + 1e-4, y),
    "shape": lambda y: y[:-1],
    "type": lambda y: y.double(),
    "NaN": lambda y: torch.where(y == y.max(), torch.nan, y),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_wrong_output_has_no_time(
    change: Callable[[Tensor], Tensor],
    model_path: str,
    without_compile: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    perturb(monkeypatch, change)
    assert run(model_path, "--json") == 1
    row = json_rows(capsys.readouterr().out)["onepass fuse"]
    assert row["wrong"].startswith("output: ")
    assert row["timing"] is None
    assert "Wrong: model" in pathlib.Path("report.html").read_text()


def test_wrong_gradient_has_no_time(
    model_path: str,
    without_compile: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    perturb(monkeypatch, ScaledGradient.apply)
    assert run(model_path, "--train", "--no-report") == 1
    table = capsys.readouterr().out
    assert "WRONG: gradient of" in " ".join(table.split())
    assert re.search(r"onepass fuse +\d", table.partition("training step")[0])  # the forward pass has a time


def test_result_that_goes_wrong_while_measured_has_no_time(
    model_path: str,
    without_compile: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    perturb(monkeypatch, CHANGES["values"], good_calls=study.FRESH_INPUTS + measure.WARM_UPS + 1)
    assert run(model_path, "--json", "--no-report") == 1
    assert json_rows(capsys.readouterr().out)["onepass fuse"]["timing"] is None


def test_model_that_fails_when_fused_is_wrong(
    model_path: str,
    without_compile: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(model: nn.Module, conv: str) -> nn.Module:
        raise RuntimeError("cannot fuse")

    monkeypatch.setattr(variants, "fuse", fail)
    assert run(model_path, "--no-report") == 1
    assert "not run: RuntimeError: cannot fuse" in " ".join(capsys.readouterr().out.split())


# --- Bad requests ----------------------------------------------------------------

BAD_FILES = {
    "def Model(:\n": "line 1: not Python",
    "import nothing_of_this_name\n": "No module named 'nothing_of_this_name'",
    "import sys; sys.exit(3)\n": "cannot be loaded: SystemExit: 3",
    MODEL.replace("class Model", "class Other"): "misses Model;",
    MODEL.replace("def get_init_inputs", "def other"): "misses get_init_inputs;",
    MODEL.replace("torch.rand(6, 3, 20, 20)", "1 / 0"): "get_inputs() raises ZeroDivisionError",
    MODEL.replace("torch.rand(6, 3, 20, 20)", "torch.rand(6, 2, 20, 20)"): "the model raises RuntimeError",
    MODEL.replace("torch.rand(6, 3, 20, 20)", "exit(7)"): "get_inputs() raises SystemExit: 7",
    MODEL.replace("return [8]", "return [8, 9]"): "Model(*get_init_inputs()) raises TypeError",
    MODEL.replace("return [8]", "return {'width': 8}"): "Model(**get_init_inputs()) raises TypeError",
    MODEL.replace("return [8]", "return 8"): "get_init_inputs() gives a int, must give a list or a dict",
    MODEL.replace("return nn.functional.hardswish", "return 3 and str"): "no floating-point tensor",
    MODEL.replace("class Model(nn.Module)", "def Model(c): return c\nclass Other(nn.Module)"): "gives a int",
}


@pytest.mark.parametrize(("text", "sentence"), BAD_FILES.items(), ids=BAD_FILES.values())
def test_bad_file(
    text: str, sentence: str, model_path: str, without_compile: None, capsys: pytest.CaptureFixture[str]
) -> None:
    pathlib.Path(model_path).write_text(text)
    assert run(model_path) == 2
    assert_one_sentence(capsys, sentence)
    assert files() == []


BAD_REQUESTS = {
    ("--batch", "0"): "--batch 0: must be",
    ("--batch", "2,3"): "--batch 2,3: must be",
    ("--batch", "7"): "--batch 7 is more than the 6 samples",
    ("--threads", "-1"): "--threads: -1 must be a whole number from 1 to 1024",
    ("--threads", "0"): "--threads: 0 must be a whole number from 1 to 1024",
    ("--threads", "4096"): "--threads: 4096 must be a whole number from 1 to 1024",
    ("--threads", "1e400"): "--threads: 1e400 must be a whole number from 1 to 1024",
    ("--seconds", "long"): "--seconds: long must be a number from 0 to 3600",
    ("--seconds", "nan"): "--seconds: nan must be a number from 0 to 3600",
    ("--seconds", "inf"): "--seconds: inf must be a number from 0 to 3600",
    ("--seconds", "-inf"): "--seconds: -inf must be a number from 0 to 3600",
    ("--seconds", "1e30"): "--seconds: 1e30 must be a number from 0 to 3600",
    ("--seconds", "-1e-3"): "--seconds: -1e-3 must be a number from 0 to 3600",
    ("--report", "no/such/folder.html"): "there is no such folder",
    ("--report", "."): "is a folder",
    ("--report", "/proc/report.html"): "cannot be written",
    ("--report", "/dev/null"): "is not a regular file",
    ("--report", "../model.py"): "is the model file",
    ("--conv", "drop"): "invalid choice: 'drop'",
    ("--fast",): "unrecognized arguments: --fast",
}


@pytest.mark.parametrize(("options", "sentence"), BAD_REQUESTS.items(), ids=BAD_REQUESTS.values())
def test_bad_request(
    options: tuple[str, ...],
    sentence: str,
    model_path: str,
    without_compile: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = pathlib.Path(model_path).read_bytes()
    assert optimize.main([model_path, "--device", "cpu", *options]) == 2
    assert_one_sentence(capsys, sentence)
    assert pathlib.Path(model_path).read_bytes() == before
    assert files() == []


@pytest.mark.parametrize("path", ["nothing.py", "."])
def test_path_that_is_no_file(path: str, model_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(path) == 2
    assert_one_sentence(capsys, f"{path}: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device(model_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert optimize.main([model_path, "--device", "cuda"]) == 2
    assert_one_sentence(capsys, "PyTorch sees no CUDA device")


def test_good_file_beside_a_bad_one_is_still_studied(
    model_path: str, without_compile: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("nothing.py", model_path) == 2
    captured = capsys.readouterr()
    assert "nothing.py: there is no such file" in captured.err
    assert "model, forward" in captured.out
    assert files() == ["report.html"]


def assert_one_sentence(capsys: pytest.CaptureFixture[str], sentence: str) -> None:
    error = capsys.readouterr().err
    assert error.startswith("onepass: ") and error.count("\n") == 1
    assert sentence in error


# --- Interruption ----------------------------------------------------------------


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_interrupted_study_writes_nothing(
    model_path: str,
    without_compile: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(measure, "interleaved", interrupt)
    assert run(model_path) == _command_line.INTERRUPTED
    assert_one_sentence(capsys, "interrupted")
    assert files() == []


def test_interrupted_write_keeps_the_old_report(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    monkeypatch.setattr(_output_file.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _output_file.publish(str(target), "new")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


# --- The parts ----------------------------------------------------------------


def test_same_seed_gives_the_same_model_and_inputs(model_path: str) -> None:
    file = model_file.load(model_path)
    first, second = (file.build(CPU).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    first, second = file.inputs(CPU, 1, 2).leaves[0], file.inputs(CPU, 2, 2).leaves[0]
    assert torch.equal(first, file.inputs(CPU, 1, None).leaves[0][:2])
    assert not torch.equal(first, second)


def test_rule_is_about_the_error_in_units_of_pytorchs_own() -> None:
    rule = verify.RULES["fp32"]
    exact = torch.linspace(-1, 1, 9, dtype=torch.float64)
    torchs = (exact + 4e-6).float()

    def check(error: float, is_gradient: bool = False) -> str:
        ours = (exact + error).float()
        return verify.compare("y", is_gradient, ours, torchs, exact, rule).wrong(rule)

    assert check(7e-6) == ""
    assert "2.5x PyTorch's" in check(1e-5)
    assert check(-8e-6, is_gradient=True) == ""
    assert "differs from PyTorch" in check(-8e-6)  # by 1.2e-5 around 0: more than allclose(1e-5, 1e-5)


def test_kinks_are_found_and_smooth_functions_have_none() -> None:
    x = torch.linspace(-1, 1, 41, dtype=torch.float64)
    noise = verify.rounding_noise(x, 0)

    def jump(function: Callable[[Tensor], Tensor]) -> float:
        gradients = []
        for shift in (noise, torch.zeros_like(x), -noise):
            leaf = (x + shift).requires_grad_()
            gradients += torch.autograd.grad(function(leaf).sum(), leaf)
        return verify.kink(*gradients)

    assert jump(torch.relu) == pytest.approx(1.0)
    assert jump(nn.functional.silu) < 1e-9


def test_time_is_taken_in_rounds() -> None:
    calls: list[str] = []
    timings = measure.interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, 0.01, lambda done: None
    )
    assert timings["a"].repeats == timings["b"].repeats >= measure.LEAST_ROUNDS
    rounds = ["".join(calls[i : i + 2]) for i in range(0, len(calls), 2)]
    assert set(rounds) == {"ab", "ba"}


def test_quantiles() -> None:
    assert measure.timing_of([float(i) for i in range(100, -1, -1)]) == Timing(50.0, 10.0, 90.0, 101)


def test_peak_memory_counts_what_is_alive_together() -> None:
    x = torch.ones(1 << 16)  # what the numbers 1 and 2 take is a few bytes
    for tensors, call in (
        (1, lambda: x + 1),
        (2, lambda: (x + 1) * 2),
        (3, lambda: [x + 1 for _ in range(3)]),
    ):
        assert measure.peak_bytes(call, CPU) == pytest.approx(tensors * 4 << 16, rel=1e-3)


def test_chart_shows_a_reason_where_there_is_no_value() -> None:
    drawing = bars("ms", [Bar("a", "1.0", 1.0, 0.5, 2.0), Bar("b", "not <run>")])
    assert drawing.count('class="bar"') == 1 and drawing.count("whisker") == 1
    assert "width:50.00%" in drawing and "not &lt;run&gt;" in drawing


def test_zero_has_no_bar() -> None:
    assert 'class="bar' not in bars("MiB", [Bar("a", "0.0", 0.0), Bar("b", "0.0", 0.0)]).partition("row")[2]
    drawing = bars("MiB", [Bar("a", "0.0", 0.0), Bar("b", "2.0", 2.0)])
    assert re.findall(r"width:([0-9.]+)%", drawing) == ["100.00"]


# --- The page in a browser ----------------------------------------------------------------

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)


def grey_levels(png: bytes) -> set[int]:
    """The first byte of every pixel of an 8-bit PNG, filters undone."""
    width, height, _, kind = struct.unpack(">IIBB", png[16:26])
    size = {2: 3, 6: 4}[kind]
    data, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        data += png[at + 8 : at + 8 + length] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += length + 12
    raw = zlib.decompress(data)
    stride = width * size + 1
    return {value for row in range(height) for value in raw[row * stride + 1 : (row + 1) * stride : size]}


@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")
def test_page_renders_without_errors(
    model_path: str, without_compile: None, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model_path, "--train") == 0
    shot = tmp_path / "shot.png"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1000,1400",
        "--enable-logging=stderr",
    ]
    command = [str(BROWSER), *options, f"--screenshot={shot}", pathlib.Path("report.html").resolve().as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert "CONSOLE" not in result.stderr
    assert len(grey_levels(shot.read_bytes())) > 20  # text and bars: a blank page has one
