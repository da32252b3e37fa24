"""The C++ tool of the same name: its commands are forwarded to it where it is installed."""

from __future__ import annotations

import os
import pathlib

from onepass._command_line import BadRequest

NAME = "onepass"
COMMANDS = {
    "bench": "time a block beside what this machine can do at most",
    "cases": "list the problem strings of a file",
    "check": "run a block on random values, compare with a double-precision reference",
}


def find(search: str) -> pathlib.Path | None:
    """The first compiled program of this name on a search path; a script, as pip installs it, is not one."""
    for folder in search.split(os.pathsep):
        program = pathlib.Path(folder or ".") / NAME
        try:
            with program.open("rb") as file:
                is_script = file.read(2) == b"#!"
        except OSError:
            continue
        if not is_script and os.access(program, os.X_OK):
            return program
    return None


def forward(argv: list[str]) -> int:
    """Becomes the tool; raises BadRequest where it is not installed."""
    program = find(os.environ.get("PATH", ""))
    if program is None:
        raise BadRequest(
            f"{argv[0]} is a command of the C++ tool, which is not on PATH: in a clone `make tool` and "
            "`cmake --install build/release` put it there"
        )
    os.execv(program, [NAME, *argv])
