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


def _without_onepass(path: str) -> str:
    """A search path without the folders that have the package."""
    folders = [folder for folder in path.split(os.pathsep) if folder]
    return os.pathsep.join(folder for folder in folders if not (pathlib.Path(folder) / "onepass").exists())


def run(original: pathlib.Path, exported: pathlib.Path, train: bool) -> tuple[bool, str]:
    """Builds the exported file and compares it with the original; what was found, for people."""
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        shutil.copy(original, place / "original.py")
        shutil.copy(exported, place / "exported.py")
        shutil.copy(_JUDGE, place / "judge.py")
        shutil.copy(str(rules.__file__), place / "rules.py")
        environment = {**os.environ, "PYTHONPATH": _without_onepass(os.environ.get("PYTHONPATH", ""))}
        command = [sys.executable, "judge.py", *(["--train"] if train else [])]
        process = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    lines = process.stdout.strip().splitlines()
    if process.returncode != 0 or not lines:
        words = "\n".join((process.stderr or process.stdout).strip().splitlines()[-12:])
        return False, f"the exported file does not run:\n{words}"
    found = json.loads(lines[-1])
    return not found["wrong"], "\n".join([*lines[:-1], *found["wrong"]])
