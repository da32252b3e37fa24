"""Every public name says what it takes and gives, with an example that runs and a use that mypy checks."""

from __future__ import annotations

import doctest
import inspect
import pathlib
import re
from typing import Any

import pytest

import onepass
from onepass.report import Report

FUNCTIONAL = {f"functional.{name}": getattr(onepass.functional, name) for name in ("run", "fallbacks")}
METHODS = {"Block.forward": onepass.Block.forward, "Block.fallbacks": onepass.Block.fallbacks.fget}
NAMES: dict[str, Any] = {
    **{name: getattr(onepass, name) for name in onepass.__all__ if name not in ("__version__", "functional")},
    **FUNCTIONAL,
    **METHODS,
    "Report": Report,
}


@pytest.mark.parametrize("name", NAMES)
def test_its_example_runs(name: str) -> None:
    found = NAMES[name]
    tests = doctest.DocTestFinder(recurse=False).find(found, name, globs={})
    examples = [example for test in tests for example in test.examples]
    assert examples, f"{name} has no example"
    runner = doctest.DocTestRunner(verbose=False)
    said: list[str] = []
    for test in tests:
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)


@pytest.mark.parametrize("name", [name for name, found in NAMES.items() if inspect.isroutine(found)])
def test_its_arguments_and_result_are_described(name: str) -> None:
    text = inspect.getdoc(NAMES[name]) or ""
    parameters = [key for key in inspect.signature(NAMES[name]).parameters if key != "self"]
    described = re.search(r"^Args:\n(.*?)(?=^\w)", text, re.MULTILINE | re.DOTALL)
    listed = re.findall(r"^    \**(\w+):", described[1], re.MULTILINE) if described else []
    assert listed == parameters
    assert re.search(r"^Returns:\n    \w", text, re.MULTILINE)


def test_block_describes_what_it_is_made_of() -> None:
    parameters = list(inspect.signature(onepass.Block).parameters)
    assert re.findall(r"^    (\w+): ", inspect.getdoc(onepass.Block) or "", re.MULTILINE)[
        : len(parameters)
    ] == (parameters)


def test_every_public_name_is_in_the_reference_and_in_the_typed_script() -> None:
    root = pathlib.Path(__file__).resolve().parents[2]
    typed = (root / "python" / "tests" / "typed_use.py").read_text()
    reference = (root / "docs" / "api.md").read_text()
    for name in [*onepass.__all__, *FUNCTIONAL]:
        assert f"onepass.{name}" in typed, f"{name} is not used in typed_use.py"
        if name not in ("__version__", "functional"):
            assert f"heading: onepass.{name}}}" in reference, f"{name} is not in docs/api.md"
