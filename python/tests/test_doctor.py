"""The command line, and a package whose compiled library is missing or of another version."""

import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

import onepass
from onepass import _description

PACKAGE = pathlib.Path(onepass.__file__).parent


def python(*arguments: str, path: pathlib.Path = PACKAGE.parent) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env={"PYTHONPATH": str(path)}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def without_library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("package")
    shutil.copytree(PACKAGE, root / "onepass", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return root


@pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))
def test_doctor_reports_what_is_there() -> None:
    result = python("-m", "onepass", "doctor")
    assert result.returncode == 0
    for found in (onepass.__version__, torch.__version__, "is loaded", "threads", "cuda", "\nblas "):
        assert found in result.stdout


def test_import_without_the_library(without_library: pathlib.Path) -> None:
    result = python("-m", "onepass", "doctor", path=without_library)
    assert result.returncode == 1
    assert "lib_onepass_torch.so is missing" in result.stdout
    assert "ONEPASS_BUILD_PYTHON" in result.stdout


def test_calls_without_the_library_say_what_is_missing(without_library: pathlib.Path) -> None:
    program = """
import onepass, torch
assert not onepass.available() and "missing" in onepass.unavailable_reason()
for call in (lambda: onepass.Block("relu"), lambda: onepass.functional.run("relu", torch.ones(1, 2, 3))):
    try:
        call()
    except RuntimeError as error:
        assert "onepass cannot run: lib_onepass_torch.so is missing" in str(error)
    else:
        raise AssertionError("ran")
"""
    result = python("-c", program, path=without_library)
    assert result.returncode == 0, result.stderr


def test_a_damaged_library_is_a_reason_and_no_failure(
    without_library: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(without_library / "onepass", tmp_path / "onepass")
    (tmp_path / "onepass" / "lib_onepass_torch.so").write_bytes(b"not a library")
    result = python("-c", "import onepass; print(onepass.unavailable_reason())", path=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "cannot be loaded" in result.stdout
    assert "reinstall" in result.stdout


@pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))
def test_a_library_of_another_version_is_refused(tmp_path: pathlib.Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "onepass", ignore=shutil.ignore_patterns("__pycache__"))
    module = tmp_path / "onepass" / "_library.py"
    module.write_text(module.read_text().replace(f'"{onepass.__version__}"', '"99.0"'))
    result = python("-c", "import onepass; print(onepass.unavailable_reason())", path=tmp_path)
    assert f"is of onepass {onepass.__version__}, the package of 99.0" in result.stdout


def test_import_leaves_the_compiler_alone() -> None:
    result = python("-c", "import onepass, sys; assert 'torch._dynamo' not in sys.modules")
    assert result.returncode == 0, result.stderr
    functions = [lambda: 0, lambda: 0]
    marked = torch.compiler.assume_constant_result(functions[0]), _description.constant(functions[1])
    assert vars(marked[0]) == vars(marked[1]) != {}


def test_unknown_commands_list_the_known_ones() -> None:
    result = python("-m", "onepass", "frobnicate")
    assert result.returncode == 2
    known = "cache, doctor, explain, export, optimize, bench, cases, check"
    assert result.stderr == f"onepass: unknown command 'frobnicate', there are {known}\n"
    assert python("-m", "onepass").returncode == 0
