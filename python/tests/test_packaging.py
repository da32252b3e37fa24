"""The wheel: one for every Python and PyTorch, without traces of the machine that built it."""

import email
import importlib.metadata
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


REPOSITORY = {"GITHUB_SERVER_URL": "https://git.invalid", "GITHUB_REPOSITORY": "someone/onepass"}


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
        env={**os.environ, **environment, **REPOSITORY},
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
        "onepass/py.typed",
    }


def test_wheel_says_its_licence_and_where_it_comes_from(wheel: pathlib.Path) -> None:
    folder = f"onepass-{onepass.__version__}.dist-info"
    archive = zipfile.ZipFile(wheel)
    metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert archive.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    home = "https://git.invalid/someone/onepass"
    assert set(metadata.get_all("Project-URL")) == {
        f"Repository, {home}",
        f"Changelog, {home}/blob/main/CHANGELOG.md",
        f"Documentation, {home}/blob/main/docs/usage.md",
    }
    assert set(metadata.get_all("Requires-Dist")) >= {"torch>=2.10", "rich"}


def requirements(name: str, found: dict[str, importlib.metadata.Distribution]) -> None:
    """Adds an installed distribution and all that it needs here."""
    name = re.sub("[-_.]+", "-", name).lower()
    if name in found:
        return
    try:
        found[name] = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return  # of another platform
    for text in found[name].requires or ():
        if "extra ==" not in text:
            requirements(re.match(r"[\w.-]+", text)[0], found)


@pytest.fixture(scope="module")
def environment(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A virtual environment with PyTorch, what PyTorch needs, and the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    distributions: dict[str, importlib.metadata.Distribution] = {}
    requirements("torch", distributions)
    for distribution in distributions.values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    return folder


def run_in(
    environment: pathlib.Path, folder: pathlib.Path, *command: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(environment / "bin"), "/usr/bin", "/bin"])
    variables = {"PATH": path, "HOME": str(folder)}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


MAPPED = """
import pathlib, runpy, sys
runpy.run_path(sys.argv[1])
import onepass
maps = pathlib.Path("/proc/self/maps").read_text().split()
print(onepass.__file__)
print(*sorted({path for path in maps if "onepass" in path or "libhwy" in path}), sep="\\n")
"""


def test_installed_wheel_runs_with_nothing_but_pytorch(
    environment: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    python = str(environment / "bin" / "python")
    smoke = str(ROOT / "scripts" / "wheel_smoke.py")
    result = run_in(environment, tmp_path, python, "-c", MAPPED, smoke)
    assert result.returncode == 0, result.stderr
    *_, package, mapped = result.stdout.splitlines()
    (installed,) = environment.glob("lib/python3*/site-packages/onepass")
    assert package == str(installed / "__init__.py")
    assert mapped == str(installed / LIBRARY.name)
    assert_needs_no_more_than_pytorch(installed / LIBRARY.name)


def test_installed_command_says_what_is_missing(environment: pathlib.Path, tmp_path: pathlib.Path) -> None:
    command = str(environment / "bin" / "onepass")
    doctor = run_in(environment, tmp_path, command, "doctor")
    assert doctor.returncode == 0, doctor.stderr
    assert "lib_onepass_torch.so is loaded" in doctor.stdout
    assert "rich is missing: pip install rich" in doctor.stdout
    assert re.search(r"^tool +not on PATH", doctor.stdout, re.MULTILINE)
    optimize = run_in(environment, tmp_path, command, "optimize", "model.py")
    assert optimize.returncode == 2  # before that line, PyTorch itself may miss NumPy
    assert optimize.stderr.splitlines()[-1] == "onepass: optimize needs rich: pip install rich"
    check = run_in(environment, tmp_path, command, "check", "relu @ 1x2x3")
    assert check.returncode == 2
    said = check.stderr.splitlines()[-1]
    assert said.startswith("onepass: check is a command of the C++ tool, which is not on PATH")
    assert "usage: onepass explain" in run_in(environment, tmp_path, command, "help", "explain").stdout
