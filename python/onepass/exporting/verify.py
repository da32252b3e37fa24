"""Whether an exported file is right and fast: asked in a fresh process that has no onepass."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from onepass.optimizing import verify as rules

_JUDGE = pathlib.Path(__file__).with_name("judge.py")
_PROBE = pathlib.Path(__file__).with_name("probe.py")


def _without_onepass(path: str) -> str:
    """A search path without the folders that have the package."""
    folders = [folder for folder in path.split(os.pathsep) if folder]
    return os.pathsep.join(folder for folder in folders if not (pathlib.Path(folder) / "onepass").exists())


def run(original: pathlib.Path, exported: str, train: bool) -> tuple[bool, str]:
    """Builds the exported text and compares it with the original; what was found, for people."""
    process = _process(_JUDGE, original, exported, ["--train"] if train else [])
    lines = process.stdout.strip().splitlines()
    if process.returncode != 0 or not lines:
        words = "\n".join((process.stderr or process.stdout).strip().splitlines()[-12:])
        return False, f"the exported file does not run:\n{words}"
    found = json.loads(lines[-1])
    return not found["wrong"], "\n".join([*lines[:-1], *found["wrong"]])


def why_not_importable(original: pathlib.Path, exported: str) -> str:
    """Why the exported text cannot be imported and its ModelNew made; "" where it can, on any machine."""
    process = _process(_PROBE, original, exported, [])
    if process.returncode == 0:
        return ""
    return (process.stderr.strip().splitlines() or [f"the process ended with {process.returncode}"])[-1]


def _process(
    script: pathlib.Path, original: pathlib.Path, exported: str, options: list[str]
) -> subprocess.CompletedProcess[str]:
    """Runs a script beside both files, without onepass."""
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        shutil.copy(original, place / "original.py")
        (place / "exported.py").write_text(exported, encoding="utf-8")
        shutil.copy(script, place / "judge.py")
        shutil.copy(str(rules.__file__), place / "rules.py")
        environment = {**os.environ, "PYTHONPATH": _without_onepass(os.environ.get("PYTHONPATH", ""))}
        command = [sys.executable, "judge.py", *options]
        return subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, errors="replace"
        )
