"""Imports exported.py and makes its ModelNew: copied beside it and run without onepass, on any machine."""

from __future__ import annotations

import builtins
import dis
import importlib.abc
import inspect
import re
import sys
import types
from collections.abc import Iterator
from typing import Any


class _NoOnepass(importlib.abc.MetaPathFinder):
    """An exported file that imports onepass is wrong, installed or not."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.partition(".")[0] == "onepass":
            raise ImportError("the exported file imports onepass")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


# Functions of traced code, which uses what torch.fx writes; the others are the same in every file.
_TRACED = re.compile(r"_(run|stages|forward|convolve)_\d+|forward")


def _missing_names(module: types.ModuleType) -> list[str]:
    """Names that traced code uses and the file does not define: calls would fail."""
    functions = (vars(module) | vars(module.ModelNew)).items()
    own = [f.__code__ for name, f in functions if _TRACED.fullmatch(name) and inspect.isfunction(f)]
    steps = (step for code in own for inner in _codes(code) for step in dis.get_instructions(inner))
    named = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
    return sorted(name for name in named if not hasattr(module, name) and not hasattr(builtins, name))


def main() -> None:
    """Raises what is wrong with the file, as the last line of standard error says."""
    sys.meta_path.insert(0, _NoOnepass())
    import exported

    if missing := _missing_names(exported):
        raise NameError(f"it uses {missing[0]}, which it does not define")
    given = exported.get_init_inputs()
    model = exported.ModelNew(**given) if isinstance(given, dict) else exported.ModelNew(*given)
    if unlike := getattr(model, "_unlike", ""):
        raise ValueError(f"a new model would run its original code: {unlike}")


if __name__ == "__main__":
    main()
