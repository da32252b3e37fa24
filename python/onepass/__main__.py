"""The command line: onepass COMMAND, or python -m onepass COMMAND."""

from __future__ import annotations

import difflib
import importlib
import os
import sys

from onepass import __version__, _tool
from onepass._command_line import BAD_REQUEST, EXIT_CODES, GOOD, BadRequest, complain, program, run

# What each does, and its module with main(argv) -> exit status, imported when it is asked for.
COMMANDS = {
    "cache": ("list or clear the compiled GPU kernels kept on disk", "onepass.cache"),
    "doctor": ("what this machine can run, and why not the rest", "onepass.doctor"),
    "explain": ("which strategy a block gets, and what the others would cost", "onepass._explain_command"),
    "export": ("write a fused model as one file that needs PyTorch and a CUDA toolkit", "onepass.export"),
    "optimize": ("fuse a model file, verify it, measure it", "onepass.optimize"),
}


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    if argv and argv[0] in COMMANDS:
        try:
            module = importlib.import_module(COMMANDS[argv[0]][1])
        except ModuleNotFoundError as error:
            complain(f"{argv[0]} needs {error.name}: pip install {error.name}")
            return BAD_REQUEST
        return int(module.main(argv[1:]))
    if argv and argv[0] in _tool.COMMANDS:
        return run(_tool.forward, argv)
    return run(_help, argv)


def console() -> int:
    """The console script of the wheel."""
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    return main(sys.argv[1:])


def _help(argv: list[str]) -> int:
    if argv == ["--version"]:  # as the C++ tool says it
        print(f"onepass {__version__}")
        return GOOD
    if argv and argv[0] not in ("-h", "--help"):
        known = [*COMMANDS, *_tool.COMMANDS]
        near = difflib.get_close_matches(argv[0], known, 1, 0.5)
        guess = f"did you mean {near[0]}?" if near else "there are"
        raise BadRequest(f"unknown command '{argv[0]}', {guess} {'' if near else ', '.join(known)}".rstrip())
    print(f"usage: {program()} COMMAND [--help]\n")
    for name, (sentence, _) in COMMANDS.items():
        print(f"  {name:<10} {sentence}")
    found = _tool.find(os.environ.get("PATH", ""))
    print(f"\nby the C++ tool{f' {found}' if found else ', which is not on PATH'}:")
    for name, sentence in _tool.COMMANDS.items():
        print(f"  {name:<10} {sentence}")
    print(f"\n{EXIT_CODES}")
    return GOOD


if __name__ == "__main__":
    sys.exit(console())
