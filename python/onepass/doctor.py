"""What this machine can run, and why not the rest."""

from __future__ import annotations

import json
import platform

import torch

from onepass import _library


def report() -> list[tuple[str, str]]:
    """What was found, as lines of a name and a finding."""
    return [
        ("onepass", _library.__version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
        ("library", _library.unavailable_reason() or f"{_library.PATH.name} is loaded"),
        ("cpu", _cpu()),
        ("cuda", _cuda()),
    ]


def _cpu() -> str:
    if not _library.available():
        return "not used: the library is not loaded"
    targets = json.loads(torch.ops.onepass.describe_library())["cpu_targets"]
    return f"{', '.join(targets)} with {torch.get_num_threads()} threads (torch.set_num_threads changes it)"


def _cuda() -> str:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        return "no device is visible" if built else "this PyTorch is built without CUDA"
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"{names}; blocks on CUDA tensors run eager, stage by stage by PyTorch"


def main(argv: list[str]) -> int:
    """Prints the report; returns 1 where blocks cannot run."""
    if argv:
        print("usage: python -m onepass doctor")
        return 2
    for name, finding in report():
        print(f"{name:<8} {finding}")
    return 0 if _library.available() else 1
