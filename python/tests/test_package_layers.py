"""The layers of the package: no import circle, and no file over 500 lines."""

from __future__ import annotations

import ast
import graphlib
import pathlib
from collections.abc import Iterator

import pytest

import onepass

_PACKAGE = pathlib.Path(onepass.__file__).parent
_SOURCES = pathlib.Path(__file__).parents[1]
_MOST_LINES = 500


def imports_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """What each file of a package imports of the package, also in functions; files are named as modules."""
    return {name: set(_imports(name, text, sources)) for name, text in sources.items()}


def _imports(name: str, text: str, sources: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in sources)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from (
                    found for found in (inner if inner in sources else node.module,) if found in sources
                )


def circle(sources: dict[str, str]) -> list[str] | None:
    """Files that import each other in a circle."""
    try:
        graphlib.TopologicalSorter(imports_of(sources)).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def package() -> dict[str, str]:
    """The texts of the package's files by their modules."""
    found = {}
    for path in _PACKAGE.rglob("*.py"):
        parts = ("onepass", *path.relative_to(_PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def test_no_file_of_the_package_is_part_of_an_import_circle() -> None:
    sources = package()
    edges = imports_of(sources)
    assert "onepass._swap" in edges["onepass.fuse"] and "onepass.fuse" in edges["onepass"]
    assert circle(sources) is None


@pytest.mark.parametrize(
    "text",
    ["import p.a", "from p import a", "from p.a import name", "def f():\n    from p.a import name"],
)
def test_a_circle_is_found(text: str) -> None:
    sources = {"p": "", "p.a": "import p.b", "p.b": "from p.c import x", "p.c": text}
    assert set(circle(sources) or ()) == {"p.a", "p.b", "p.c"}


def test_no_file_has_more_than_500_lines() -> None:
    if not (_SOURCES / "csrc").is_dir():
        pytest.skip("the sources are not here")
    files = [path for folder in ("onepass", "csrc") for path in (_SOURCES / folder).rglob("*")]
    texts = [path for path in files if path.suffix in (".py", ".cc", ".h")]
    assert len(texts) > 50
    lengths = {str(path): len(path.read_text().splitlines()) for path in texts}
    assert not {path: count for path, count in lengths.items() if count > _MOST_LINES}
