"""The command line: python -m onepass COMMAND."""

from __future__ import annotations

import difflib
import importlib
import os
import sys

from onepass._command_line import EXIT_CODES, GOOD, BadRequest, run

# Each is a module of the package with main(argv) -> exit status, imported when it is asked for.
COMMANDS = {
    "doctor": "what this machine can run, and why not the rest",
    "export": "write a fused model as one file that needs PyTorch and a CUDA toolkit",
    "optimize": "fuse a model file, verify it, measure it",
}


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    if argv and argv[0] in COMMANDS:
        return importlib.import_module(f"onepass.{argv[0]}").main(argv[1:])
    return run(_help, argv)


def _help(argv: list[str]) -> int:
    if argv and argv[0] not in ("-h", "--help"):
        near = difflib.get_close_matches(argv[0], COMMANDS, 1, 0.5)
        guess = f"did you mean {near[0]}?" if near else "there are"
        raise BadRequest(
            f"unknown command '{argv[0]}', {guess} {'' if near else ', '.join(COMMANDS)}".rstrip()
        )
    print("usage: python -m onepass COMMAND [--help]\n")
    for name, sentence in COMMANDS.items():
        print(f"  {name:<10} {sentence}")
    print(f"\n{EXIT_CODES}")
    return GOOD


if __name__ == "__main__":
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.exit(main(sys.argv[1:]))
