"""The wheel: one for every Python and PyTorch, without traces of the machine that built it."""

import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

import onepass

ROOT = pathlib.Path(__file__).parents[2]
LIBRARY = pathlib.Path(onepass.__file__).with_name("lib_onepass_torch.so")


def test_versions_agree() -> None:
    project = re.search(r"project\(onepass VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    assert project is not None
    assert project.group(1) == onepass.__version__


@pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))
def test_library_needs_no_python_no_cuda_and_no_path() -> None:
    dynamic = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*?)\]", dynamic)
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if "python" in name or "cuda" in name or "c10" in name]
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


@pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))
def test_library_uses_only_the_stable_interface() -> None:
    command = ["nm", "-D", "--undefined-only", LIBRARY]
    undefined = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "aoti_torch_" in undefined
    assert not re.findall(r"\b_Z\w*(?:c10|at\d|torch)\w*", undefined)
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True
    )
    assert exported.stdout == ""


@pytest.mark.skipif(
    "ONEPASS_TEST_WHEEL" not in os.environ, reason="builds the library: set ONEPASS_TEST_WHEEL=1"
)
def test_wheel(tmp_path: pathlib.Path) -> None:
    build = ["pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)]
    subprocess.run([sys.executable, "-m", *build], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert f"onepass-{onepass.__version__}-py3-none-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "onepass/lib_onepass_torch.so" in names
    assert "onepass/__init__.py" in names
    assert not [
        name
        for name in names
        if name.split("/")[0] not in ("onepass", f"onepass-{onepass.__version__}.dist-info")
    ]
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", "-t", site, wheel], check=True)
    program = "import onepass, torch; print(onepass.__file__, onepass.Block('relu')(torch.ones(1, 1, 3)))"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(site) in result.stdout
