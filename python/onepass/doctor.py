"""What this machine can run, and why not the rest."""

from __future__ import annotations

import json
import platform

import torch

from onepass import _cuda, _library


def report() -> list[tuple[str, str]]:
    """What was found, as lines of a name and a finding."""
    return [
        ("onepass", _library.__version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
        ("library", _library.unavailable_reason() or f"{_library.PATH.name} is loaded"),
        ("cpu", _cpu()),
        *_gpus(),
    ]


def _cpu() -> str:
    if not _library.available():
        return "not used: the library is not loaded"
    targets = json.loads(torch.ops.onepass.describe_library())["cpu_targets"]
    return f"{', '.join(targets)} with {torch.get_num_threads()} threads (torch.set_num_threads changes it)"


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
    """Prints the report; returns 1 where blocks cannot run."""
    if argv:
        print("usage: python -m onepass doctor")
        return 2
    for name, finding in report():
        print(f"{name:<8} {finding}")
    return 0 if _library.available() else 1
