"""The command line: help, exit codes, Ctrl-C, readers that leave, files that cannot be written, BLAS."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import resource
import shutil
import signal
import subprocess
import sys
import types

import pytest
import torch

import onepass
from onepass import __main__ as command_line
from onepass import _before_torch, _command_line, _output_file, _tool, doctor

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMANDS = tuple(command_line.COMMANDS)
INTERRUPTED = "onepass: interrupted, nothing was written\n"


def start(*arguments: str, path: str = "", **options: object) -> subprocess.Popen[str]:
    search = os.pathsep.join(filter(None, [path, str(ROOT / "python")]))
    environment = {"PYTHONPATH": search, "PATH": os.environ["PATH"]}
    return subprocess.Popen(
        [sys.executable, "-m", "onepass", *arguments],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_take_interrupts,
        **options,
    )


def _take_interrupts() -> None:
    """A shell gives programs in the background the setting to ignore them, and their children inherit it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# --- Help --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(arguments) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: ") and all(f"\n  {name} " in said for name in COMMANDS)
    assert "exit codes: 0 good" in said


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--version"]) == 0
    assert capsys.readouterr().out == f"onepass {onepass.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([name, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"python -m onepass {name}" in said and "130 interrupted" in said
    assert command_line.main(["help", name]) == 0
    assert capsys.readouterr().out == said


def test_the_nearest_command_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["exprot"]) == 2
    assert capsys.readouterr().err == "onepass: unknown command 'exprot', did you mean export?\n"
    assert command_line.main(["help", "optimise"]) == 2
    assert "did you mean optimize?" in capsys.readouterr().err
    assert command_line.main(["doctor", "--loud"]) == 2
    assert "unrecognized arguments: --loud" in capsys.readouterr().err


# --- The C++ tool ------------------------------------------------------------------------------------


def test_commands_of_the_tool_are_forwarded(tmp_path: pathlib.Path) -> None:
    scripts, programs = tmp_path / "scripts", tmp_path / "programs"
    scripts.mkdir()
    programs.mkdir()
    (scripts / "onepass").write_text("#!/bin/sh\nexit 7\n")  # as pip installs it: not the tool
    (scripts / "onepass").chmod(0o755)
    shutil.copy2(shutil.which("echo") or "/bin/echo", programs / "onepass")
    search = os.pathsep.join([str(scripts), str(programs)])
    assert _tool.find(str(scripts)) is None
    assert _tool.find(search) == programs / "onepass"
    command = [sys.executable, "-m", "onepass", "check", "relu @ 1x2x3", "--json"]
    environment = {"PYTHONPATH": str(ROOT / "python"), "PATH": search}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout) == (0, "check relu @ 1x2x3 --json\n")


def test_commands_of_the_tool_are_refused_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert command_line.main(["bench", "--peaks"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("onepass: bench is a command of the C++ tool") and said.count("\n") == 1


# --- explain and cache -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [
            "conv2d(3,16,p=1) | group_norm(4) | relu",
            "--input",
            "2x3x8x8",
            "--layout",
            "nhwc",
            "--threads",
            "1",
        ],
        ["conv2d(3,16,p=1) | group_norm(4) | relu @ 2x3x8x8 f32 nhwc", "--threads", "1"],
    ],
)
def test_explain_prints_what_the_package_says(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["explain", *arguments]) == 0
    expected = onepass.explain(
        "conv2d(3,16,p=1) | group_norm(4) | relu", (2, 3, 8, 8), layout=torch.channels_last, threads=1
    )
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["relu"], "the input has no sizes"),
        (["relu @ 2xthree"], "2xthree: must be whole numbers joined by x"),
        (["relu @ 1x2x3 f8"], "f8: not a word of a problem here"),
        (["relu @ 1x2x3 f32", "--dtype", "f16"], "--dtype is f16, the problem says f32"),
        (["relu @ 1x2x3 nhwc"], "nhwc needs an input of 4 or 5 sizes"),
        (["rely @ 1x2x3"], "rely"),
    ],
)
def test_explain_refuses_in_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["explain", *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_cache_is_listed_and_cleared(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    assert command_line.main(["cache", "list"]) == 0
    assert capsys.readouterr().out == f"0 kernels, 0 bytes in {tmp_path}\n"
    (tmp_path / "a-kernel.cubin").write_text("not one")
    assert command_line.main(["cache", "list", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["kernels"]
    assert entry == {
        "kernel": "damaged",
        "architecture": "",
        "bytes": 7,
        "file": str(tmp_path / "a-kernel.cubin"),
    }
    assert command_line.main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"1 kernels removed from {tmp_path}\n"
    assert list(tmp_path.glob("*.cubin")) == []
    assert command_line.main(["cache", "burn"]) == 2


# --- Ends --------------------------------------------------------------------------------------------


def test_errors_of_onepass_are_one_line_and_in_full_for_developers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> list[tuple[str, str]]:
        raise LookupError("an\noversight")

    monkeypatch.setattr(doctor, "report", fail)
    assert doctor.main([]) == _command_line.FAILED
    said = capsys.readouterr().err
    assert said.startswith("onepass: an error of onepass itself") and said.count("\n") == 1
    monkeypatch.setattr(sys, "flags", types.SimpleNamespace(dev_mode=True))
    with pytest.raises(LookupError):
        doctor.main([])


@pytest.mark.parametrize("command", ["export", "optimize"])
def test_interrupted_command_ends_with_one_line(tmp_path: pathlib.Path, command: str) -> None:
    model = tmp_path / "model.py"
    model.write_text("import sys, time\nprint('ready', file=sys.stderr, flush=True)\ntime.sleep(60)\n")
    output = {"export": ["-o", "new.py"], "optimize": ["--report", "new.html"]}[command]
    process = start(command, str(model), *output, cwd=tmp_path)
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (None, INTERRUPTED)
    assert process.returncode == 130
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"model.py"}


def test_interrupted_while_pytorch_loads(tmp_path: pathlib.Path) -> None:
    text = "import sys, time\nprint('ready', file=sys.stderr, flush=True)\ntime.sleep(60)\n"
    (tmp_path / "torch.py").write_text(text)
    process = start("doctor", path=str(tmp_path))
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (None, INTERRUPTED)
    assert process.returncode == 130


def test_only_the_command_itself_takes_the_signal() -> None:
    assert _before_torch.is_command(["-m", "doctor"], ["python", "-X", "dev", "-m", "onepass", "doctor"])
    assert _before_torch.is_command(["-m"], ["python", "-monepass"])
    assert _before_torch.is_command(["/env/bin/onepass", "doctor"], ["python", "/env/bin/onepass", "doctor"])
    assert not _before_torch.is_command(["-m", "onepass"], ["python", "-m", "other", "onepass"])
    assert not _before_torch.is_command(["/usr/bin/pytest", "onepass"], ["python", "-m", "pytest", "onepass"])
    assert not _before_torch.is_command(["-c"], ["python", "-c", "import onepass"])


def test_a_reader_that_left_is_not_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start("doctor", stdout=writer)
    os.close(writer)
    assert process.communicate(timeout=60) == (None, "")
    assert process.returncode == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_output_that_cannot_be_written_is_said() -> None:
    with open("/dev/full", "w") as full:
        process = start("doctor", stdout=full)
        said = process.communicate(timeout=60)[1]
    assert said == "onepass: standard output: No space left on device\n"
    assert process.returncode == 2


# --- Files -------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_file(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "new.html"
    target.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="the file was not written"):
            _output_file.publish(target, "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert target.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_links_and_permissions_stay(tmp_path: pathlib.Path) -> None:
    target, link = tmp_path / "real.html", tmp_path / "link.html"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    _output_file.publish(link, "new")
    assert link.is_symlink() and target.read_text() == "new" and target.stat().st_mode & 0o777 == 0o640


def test_checking_leaves_nothing(tmp_path: pathlib.Path) -> None:
    _output_file.check("-o", str(tmp_path / "new.py"), [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_files_are_refused(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "new.py"
    target.write_text("old")
    target.chmod(0o444)
    with pytest.raises(_command_line.BadRequest, match="read-only"):
        _output_file.check("-o", str(target), [])


# --- BLAS --------------------------------------------------------------------------------------------

HIDDEN = "processor\t: 0\nFeatures\t: fp asimd i8mm bf16\nCPU part\t: 0xd40\n"
SHOWN = HIDDEN.replace("i8mm", "sve i8mm")


def test_blas_is_told_that_there_is_no_sve() -> None:
    environment: dict[str, str] = {}
    assert not _before_torch.choose_blas_kernels(environment, "x86_64", HIDDEN)
    assert not _before_torch.choose_blas_kernels(environment, "aarch64", SHOWN)
    assert not _before_torch.choose_blas_kernels(environment, "aarch64", "")
    assert environment == {}
    assert _before_torch.choose_blas_kernels(environment, "aarch64", HIDDEN)
    assert environment == {"NVPL_BLAS_DEBUG_CPU_TYPE": "1"}
    environment = {"NVPL_BLAS_DEBUG_CPU_TYPE": "2"}
    assert not _before_torch.choose_blas_kernels(environment, "aarch64", HIDDEN)
    assert environment == {"NVPL_BLAS_DEBUG_CPU_TYPE": "2"}


@pytest.mark.parametrize("first", ["onepass", "torch"])
def test_double_precision_ends(first: str) -> None:
    program = f"""
import {first}, onepass, torch
x, w = torch.rand(2, 3, 16, 32, 32, dtype=torch.float64), torch.rand(16, 3, 4, 4, 4, dtype=torch.float64)
print(tuple(torch.nn.functional.conv3d(x, w).shape))
"""
    environment = {"PYTHONPATH": str(ROOT / "python"), "PATH": os.environ["PATH"]}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert found.stdout == "(2, 16, 13, 29, 29)\n", found.stderr


def test_doctor_says_what_blas_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(_before_torch, "cpuinfo", lambda: HIDDEN)
    monkeypatch.setenv("NVPL_BLAS_DEBUG_CPU_TYPE", "1")
    monkeypatch.setattr(_before_torch, "was_set", True)
    assert "NVPL_BLAS_DEBUG_CPU_TYPE=1 set by onepass" in dict(doctor.report())["blas"]
    monkeypatch.setattr(_before_torch, "was_set", False)
    monkeypatch.setenv("NVPL_BLAS_DEBUG_CPU_TYPE", "3")
    assert "must be 1 or unset" in dict(doctor.report())["blas"]
    monkeypatch.setattr(_before_torch, "cpuinfo", lambda: SHOWN)
    assert "must be" not in dict(doctor.report())["blas"]
