"""What has to happen before PyTorch is used: a setting of its BLAS, Ctrl-C while a command loads."""

from __future__ import annotations

import os
import pathlib
import platform
import signal
import sys
from collections.abc import MutableMapping
from typing import NoReturn

BLAS_VARIABLE = "NVPL_BLAS_DEBUG_CPU_TYPE"
GENERIC_BLAS = "1"  # NVPL's "Generic ASIMD" kernels


def hides_sve(machine: str, info: str) -> bool:
    """Whether an AArch64 CPU shows no SVE.

    NVPL, the BLAS in PyTorch's wheels for AArch64, chooses kernels by the CPU's name. A Neoverse V1 or V2
    whose virtual machine hides SVE gets those of SVE, and matrix products crash or never end.
    """
    features = {word for line in info.splitlines() if line.startswith("Features") for word in line.split()}
    return machine == "aarch64" and bool(features) and "sve" not in features


def cpuinfo() -> str:
    """What Linux says of the processors; "" elsewhere."""
    try:
        return pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def choose_blas_kernels(environment: MutableMapping[str, str], machine: str, info: str) -> bool:
    """Sets the variable where it is needed and not set; NVPL reads it at its first call, not when loaded."""
    if environment.get(BLAS_VARIABLE) or not hides_sve(machine, info):
        return False
    environment[BLAS_VARIABLE] = GENERIC_BLAS
    return True


def is_script(argv: list[str]) -> bool:
    """Whether the console script of the wheel was started."""
    return pathlib.PurePath(argv[0] if argv else "").name in ("onepass", "onepass.exe")


def is_command(argv: list[str], original: list[str]) -> bool:
    """Whether a command imports the package, before its __main__ runs."""
    started = argv[:1] == ["-m"] and original[-len(argv)].removeprefix("-m") == "onepass"
    return started or is_script(argv)


def leave(*_: object) -> NoReturn:
    """What a command does at Ctrl-C before its __main__ runs."""
    os.write(2, b"onepass: interrupted, nothing was written\n")
    os._exit(130)


was_set = choose_blas_kernels(os.environ, platform.machine(), cpuinfo())
if is_command(sys.argv, sys.orig_argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, leave)  # until __main__ runs; loading PyTorch takes seconds
