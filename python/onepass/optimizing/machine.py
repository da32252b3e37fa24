"""What a measurement was taken on."""

from __future__ import annotations

import datetime
import pathlib
import platform
import re
import subprocess

import torch

import onepass


def describe(device: torch.device) -> dict[str, str]:
    """Names and values for a table."""
    library = (
        "compiled operators loaded" if onepass.available() else onepass.unavailable_reason() or "unavailable"
    )
    facts = {
        "processor": f"{_processor()} ({platform.machine()})",
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "onepass": f"{onepass.__version__}, {library}",
        "date": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    }
    if device.type == "cuda":
        facts = {"GPU": torch.cuda.get_device_name(device), "CUDA": str(torch.version.cuda), **facts}
    return facts


def _processor() -> str:
    """The processor's name, from whichever source this system has."""
    try:
        text = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        cpuinfo = pathlib.Path("/proc/cpuinfo")
        text = cpuinfo.read_text() if cpuinfo.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE | re.IGNORECASE)
    return match.group(1).strip() if match else platform.processor() or "unknown"
