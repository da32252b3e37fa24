"""The command line: python -m onepass COMMAND."""

from __future__ import annotations

import importlib
import sys

# Each is a module of the package with main(argv) -> exit status, imported when it is asked for.
COMMANDS = {
    "doctor": "what this machine can run, and why not the rest",
    "export": "write a fused model as one file that needs PyTorch and a CUDA toolkit",
    "optimize": "fuse a model file, verify it, measure it",
}


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    if argv and argv[0] in COMMANDS:
        return importlib.import_module(f"onepass.{argv[0]}").main(argv[1:])
    asked = not argv or argv[0] in ("-h", "--help")
    if not asked:
        print(f"unknown command '{argv[0]}'", file=sys.stderr)
    print("usage: python -m onepass COMMAND", file=sys.stdout if asked else sys.stderr)
    for name, sentence in COMMANDS.items():
        print(f"  {name:<10} {sentence}", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
