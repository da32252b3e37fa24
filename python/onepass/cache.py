"""The compiled GPU kernels kept on disk: listed, or removed."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import torch

from onepass import _library
from onepass._command_line import GOOD, BadRequest, Parser, run


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel on disk."""

    kernel: str
    architecture: str
    bytes: int
    file: str


def directory() -> str:
    """Where compiled kernels are kept."""
    return str(torch.ops.onepass.cuda_cache_directory())


def kernels() -> list[Kernel]:
    """Those that are there."""
    folder = pathlib.Path(directory())
    found = []
    for line in torch.ops.onepass.cuda_cache_entries().splitlines():
        kernel, architecture, size, name = line.split("\t")
        found.append(Kernel(kernel, architecture, int(size), str(folder / name)))
    return found


def main(argv: list[str]) -> int:
    """Lists or clears; exit codes as --help says."""
    return run(_cache, argv)


def _cache(argv: list[str]) -> int:
    parser = Parser("cache", description=__doc__)
    parser.add_argument(
        "action",
        choices=("list", "clear"),
        help="clear removes kernels, tuned choices and records of compilers that crashed",
    )
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    arguments = parser.parse_args(argv)
    if not _library.available():
        raise BadRequest(f"onepass cannot run: {_library.unavailable_reason()}")
    try:
        action = {"list": _list, "clear": _clear}[arguments.action]
        values, lines = action()
    except (RuntimeError, ValueError) as error:
        raise BadRequest(str(error).splitlines()[0]) from error
    print(json.dumps(values, indent=2) if arguments.json else "\n".join(lines), file=sys.stdout)
    return GOOD


def _list() -> tuple[dict[str, object], list[str]]:
    found = kernels()
    lines = [f"{entry.kernel:<32} {entry.architecture:<8} {_size(entry.bytes)}" for entry in found]
    total = _size(sum(entry.bytes for entry in found))
    values = {"directory": directory(), "kernels": [dataclasses.asdict(entry) for entry in found]}
    return values, [*lines, f"{len(found)} kernels, {total} in {directory()}"]


def _clear() -> tuple[dict[str, object], list[str]]:
    removed = int(torch.ops.onepass.cuda_clear_cache())
    return {"directory": directory(), "removed": removed}, [f"{removed} kernels removed from {directory()}"]


def _size(count: float) -> str:
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.3g} {units[0]}" if units[0] != "bytes" else f"{count:.0f} bytes"
