"""What this machine can run, and why not the rest."""

from __future__ import annotations

import json
import os
import platform
import re

import torch

from onepass import _before_torch, _cuda, _library
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


def main(argv: list[str]) -> int:
    """Prints the report; 1 where blocks cannot run, else as --help says."""
    return run(_doctor, argv)


def _doctor(argv: list[str]) -> int:
    Parser(prog="python -m onepass doctor", description=__doc__).parse_args(argv)
    for name, finding in report():
        print(f"{name:<8} {finding}")
    return GOOD if _library.available() else WRONG
