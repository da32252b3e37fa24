"""The guides of docs/guides run as they stand, and the runner reads every fence."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUNNER = ROOT / "scripts" / "run_guide.py"
PAGES = sorted(path for path in (ROOT / "docs" / "guides").glob("*.md") if path.name != "README.md")

sys.path.insert(0, str(RUNNER.parent))
from run_guide import Step, steps  # noqa: E402


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_guide(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert any(step.title is None for step in steps(page.read_text())), "nothing runs"
    if page.stem == "cpp" and not (ROOT / "build" / "release" / "CMakeCache.txt").exists():
        pytest.skip("C++ is not built here")
    result = subprocess.run(
        [sys.executable, RUNNER, page, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout


def test_every_guide_is_listed() -> None:
    index = (ROOT / "docs" / "guides" / "README.md").read_text()
    assert len(PAGES) == 6 and all(f"]({page.name})" in index for page in PAGES)


def test_a_fence_is_read_with_its_title_and_line() -> None:
    page = 'A\n```python\na = 1\n```\n```python title="b.py"\nb = 2\n```\n```text\nno\n```\n'
    assert steps(page) == [Step("python", None, 3, "a = 1\n"), Step("python", "b.py", 6, "b = 2\n")]


@pytest.mark.parametrize("page", ["```\nno language\n```\n", "```cpp\nint a;\n```\n", "```sh\nopen\n"])
def test_code_that_would_not_run_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match=r"understood|does not run"):
        steps(page)
