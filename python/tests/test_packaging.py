"""The wheel: one for every Python and PyTorch, without traces of the machine that built it."""

import os
import pathlib
import re
import shutil
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


def assert_needs_no_more_than_pytorch(library: pathlib.Path) -> None:
    """PyTorch, which is in the process, and the compiler's runtime: no Python, CUDA, Highway or path."""
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*?)\]", dynamic))
    assert "libtorch_cpu.so" in needed
    system = r"lib(stdc\+\+|m|gcc_s|c|dl|pthread)\.so\.\d|ld-linux.*"
    assert {name for name in needed if not re.fullmatch(system, name)} == {"libtorch_cpu.so"}
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


@pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))
def test_library_needs_no_more_than_pytorch() -> None:
    assert_needs_no_more_than_pytorch(LIBRARY)


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


def release_folder_as_start(folder: pathlib.Path) -> tuple[list[str], dict[str, str]]:
    """Gives a build folder the objects of build/release: Ninja keeps those it would compile the same way.

    Returns the options and the environment that make the commands the same.
    """
    release = ROOT / "build" / "release"
    if not (release / "CMakeCache.txt").exists():
        return [], {}
    for name in ("CMakeFiles/onepass_objects.dir", "python/csrc/CMakeFiles/onepass_torch.dir"):
        if (release / name).exists():
            shutil.copytree(release / name, folder / name)
    for name in (".ninja_log", ".ninja_deps"):
        shutil.copy2(release / name, folder)
    cached = dict(re.findall(r"^(\w+):\w+=(.*)$", (release / "CMakeCache.txt").read_text(), re.MULTILINE))
    same = ("ONEPASS_WERROR", "CMAKE_CXX_COMPILER_LAUNCHER")
    options = [f"--config-settings=cmake.define.{name}={cached[name]}" for name in same if cached.get(name)]
    return options, {"CXX": cached["CMAKE_CXX_COMPILER"]}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    pytest.importorskip("scikit_build_core", reason="builds the wheel: pip install scikit-build-core")
    build = ROOT / "build" / "wheel"  # beside release, since Ninja's notes may hold relative paths
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    options, environment = release_folder_as_start(build)
    folder = tmp_path_factory.mktemp("wheel")
    settings = [f"--config-settings=build-dir={build}", *options]  # -C is not in every pip
    command = ["pip", "wheel", "--no-deps", "--no-build-isolation", *settings]
    subprocess.run(
        [sys.executable, "-m", *command, "-w", str(folder), str(ROOT)],
        env={**os.environ, **environment},
        check=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_has_the_package_alone_for_every_python(wheel: pathlib.Path) -> None:
    assert f"onepass-{onepass.__version__}-py3-none-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert names.count("onepass/lib_onepass_torch.so") == 1
    packages = [ROOT / "python" / name for name in ("onepass", "onepass_unfuse_before_saving")]
    sources = {
        p.relative_to(ROOT / "python").as_posix() for package in packages for p in package.rglob("*.py")
    }
    metadata = f"onepass-{onepass.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(metadata)} == {
        *sources,
        "onepass/lib_onepass_torch.so",
    }


FUSED_BLOCK = """
import pathlib
import torch
import onepass

block = onepass.Block("conv2d(3,8,k=3,p=1) | silu | group_norm(2) | hardswish")
x = torch.randn(2, 3, 9, 11, requires_grad=True)
y = block(x)
y.square().sum().backward()
conv, norm = block.conv_weight, block.norm_weight
z = torch.nn.functional.silu(torch.nn.functional.conv2d(x, conv, block.conv_bias, padding=1))
z = torch.nn.functional.hardswish(torch.nn.functional.group_norm(z, 2, norm, block.norm_bias))
torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
assert x.grad.isfinite().all() and x.grad.abs().max() > 0
maps = pathlib.Path("/proc/self/maps").read_text().split()
print(onepass.__file__)
print(*sorted({path for path in maps if "onepass" in path or "libhwy" in path}), sep="\\n")
"""


def test_installed_wheel_runs_a_block_with_nothing_but_pytorch(
    wheel: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    site = tmp_path / "site"
    install = ["pip", "install", "--no-deps", "--no-index", "-t", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True)
    result = subprocess.run(
        [sys.executable, "-c", FUSED_BLOCK],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    package, *mapped = result.stdout.splitlines()
    assert package == str(site / "onepass" / "__init__.py")
    assert mapped == [str(site / "onepass" / "lib_onepass_torch.so")]
    assert_needs_no_more_than_pytorch(site / "onepass" / "lib_onepass_torch.so")
