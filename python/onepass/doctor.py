"""What this machine can run, and why not the rest."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import platform
import re
import shutil
import sysconfig

import torch

from onepass import _before_torch, _cuda, _library, _tool
from onepass._command_line import GOOD, WRONG, Parser, run


def report() -> list[tuple[str, str]]:
    """What was found, as lines of a name and a finding."""
    return [
        ("onepass", _library.__version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
        ("library", _library.unavailable_reason() or f"{_library.PATH.name} is loaded"),
        ("cpu", _cpu()),
        ("blas", _blas()),
        *_gpus(),
        ("compile", _compile()),
        ("export", _export()),
        ("optimize", _optimize()),
        ("tool", _c_plus_plus_tool()),
    ]


def _cpu() -> str:
    if not _library.available():
        return "not used: the library is not loaded"
    targets = json.loads(torch.ops.onepass.describe_library())["cpu_targets"]
    return f"{', '.join(targets)} with {torch.get_num_threads()} threads (torch.set_num_threads changes it)"


def _blas() -> str:
    """PyTorch's library of matrix products, and whether it needs a setting on this CPU."""
    built = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    name = built.group(1) if built else "unknown"
    variable = _before_torch.BLAS_VARIABLE
    given = os.environ.get(variable)
    if not _before_torch.hides_sve(platform.machine(), _before_torch.cpuinfo()):
        return name if given is None else f"{name}, {variable}={given}"
    if _before_torch.was_set:
        return f"{name}, {variable}={given} set by onepass: NVPL would use SVE, which this CPU does not show"
    needs = "" if given == _before_torch.GENERIC_BLAS else f", must be {_before_torch.GENERIC_BLAS} or unset"
    return f"{name}, {variable}={given} by the environment{needs}: this CPU shows no SVE"


def _gpus() -> list[tuple[str, str]]:
    """Each GPU with its driver and compiler, and where compiled kernels are kept; else why there is none."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        return [("cuda", "no device is visible" if built else "this PyTorch is built without CUDA")]
    reason = _cuda.unavailable_reason()
    if reason is not None:
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return [("cuda", f"{names}; blocks run eager, stage by stage by PyTorch: {reason}")]
    count = torch.ops.onepass.cuda_device_count()
    gpus = [(f"cuda:{i}", torch.ops.onepass.cuda_describe_device(i)) for i in range(count)]
    return [
        *gpus,
        ("kernels", f"compiled when first used, kept in {torch.ops.onepass.cuda_cache_directory()}"),
    ]


def _compile() -> str:
    """Whether torch.compile has what it builds CPU code with."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "a C++ compiler is missing, which torch.compile needs on a CPU: install g++"
    if not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python.h is missing, which torch.compile needs: install python3-dev"
    return f"torch.compile builds CPU code with {compiler}"


def _export() -> str:
    """Whether an exported file can be built here. Writing one needs nothing."""
    toolkit = _cuda_toolkit()
    if toolkit is None:
        return "files are written; a CUDA toolkit (nvcc) is missing, which running one needs"
    if shutil.which("ninja") is None:
        return "files are written; ninja is missing, which running one needs: pip install ninja"
    return f"files are written, and built with {toolkit}"


def _cuda_toolkit() -> pathlib.Path | None:
    """Where torch.utils.cpp_extension looks, which warns when it is imported without a GPU."""
    nvcc = shutil.which("nvcc")
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [given, nvcc and str(pathlib.Path(nvcc).parents[1]), "/usr/local/cuda"]
    found = (pathlib.Path(folder) for folder in folders if folder)
    return next((folder for folder in found if (folder / "bin" / "nvcc").exists()), None)


def _optimize() -> str:
    return "prints by rich" if importlib.util.find_spec("rich") else "rich is missing: pip install rich"


def _c_plus_plus_tool() -> str:
    found = _tool.find(os.environ.get("PATH", ""))
    return str(found) if found else f"not on PATH; only {', '.join(_tool.COMMANDS)} need it"


def main(argv: list[str]) -> int:
    """Prints the report; 1 where blocks cannot run, else as --help says."""
    return run(_doctor, argv)


def _doctor(argv: list[str]) -> int:
    Parser("doctor", description=__doc__).parse_args(argv)
    for name, finding in report():
        print(f"{name:<8} {finding}")
    return GOOD if _library.available() else WRONG
