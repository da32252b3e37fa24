"""Runs a guide of docs/guides as a reader would: scripts/run_guide.py PAGE.md [FOLDER].

Fenced code with a title becomes a file of that name. Without one, `sh` runs in bash, `python` in one
namespace for the whole page, `text` not at all. All in the order of the page, in FOLDER or a temporary one.
"""

from __future__ import annotations

import dataclasses
import linecache
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
_FENCE = re.compile(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_NOT_RUN = ("text",)


@dataclasses.dataclass(frozen=True)
class Step:
    """Fenced code of a page."""

    language: str
    title: str | None
    line: int  # of its first line
    code: str


def steps(page: str) -> list[Step]:
    """The fenced code of a page that runs or becomes a file; raises ValueError at a fence it cannot read."""
    found = [
        Step(match[1], match[2], page.count("\n", 0, match.start()) + 2, match[3])
        for match in _FENCE.finditer(page)
    ]
    fences = len(re.findall(r"^```", page, re.MULTILINE))
    if fences != 2 * len(found):
        raise ValueError(f"{fences} lines begin with ```, {2 * len(found)} of them are understood")
    kept = [step for step in found if step.language not in _NOT_RUN]
    unknown = [step.language for step in kept if step.title is None and step.language not in ("sh", "python")]
    if unknown:
        raise ValueError(f"{unknown[0]} does not run: give it a title, or call it text")
    return kept


def run(page: pathlib.Path, folder: pathlib.Path) -> None:
    """Runs the page in the folder."""
    namespace: dict[str, Any] = {"__name__": "__guide__"}
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    for step in steps(page.read_text(encoding="utf-8")):
        print(f"--- {page.name}:{step.line} {step.title or step.language}", flush=True)
        if step.title is not None:
            (folder / step.title).write_text(step.code, encoding="utf-8")
        elif step.language == "sh":
            subprocess.run(["bash", "-euo", "pipefail", "-c", step.code], check=True)
        else:
            name = f"{page.name}:{step.line}"
            linecache.cache[name] = (len(step.code), None, step.code.splitlines(keepends=True), name)
            exec(compile(step.code, name, "exec"), namespace)


def _prepare_environment(folder: pathlib.Path) -> None:
    """The package of this clone, and its commands, as an installed wheel would give them."""
    path = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    sys.path.insert(0, str(ROOT / "python"))
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, module in (("onepass", "onepass"), ("torchrun", "torch.distributed.run")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (commands / name).chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(commands), os.environ["PATH"]])
    os.environ["ONEPASS_CLONE"] = str(ROOT)


def main() -> None:
    """Runs the page that is named."""
    page = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix="onepass-guide-") as temporary:
        folder = pathlib.Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else pathlib.Path(temporary)
        _prepare_environment(folder)
        run(page, folder)
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
