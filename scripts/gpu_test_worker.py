"""Runs tests of python/tests_gpu for gpu_test.py, one for each line of its standard input.

A line is a test's name, the answer a line of JSON. Before any, it says which tests there are. What tests
print goes to standard error.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
import unittest
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = ROOT / "python" / "tests_gpu"
sys.path[:0] = [str(ROOT / "python"), str(TESTS)]


def tests_in(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """The cases of a suite of suites."""
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from tests_in(item)
        else:
            yield item


def listed() -> list[dict[str, object]]:
    """Every test, and whether it wants the machine to itself."""
    suite = unittest.defaultTestLoader.discover(str(TESTS), top_level_dir=str(TESTS))
    found = []
    for case in tests_in(suite):
        method = getattr(case, getattr(case, "_testMethodName", ""), None)
        alone = getattr(case, "alone", False) or getattr(method, "alone", False)
        found.append({"name": case.id(), "alone": bool(alone)})
    return found


def answer(name: str) -> dict[str, object]:
    """How the test went; the words of every failure, those of its parts included."""
    result = unittest.TestResult()
    begin = time.monotonic()
    unittest.defaultTestLoader.loadTestsFromName(name).run(result)
    words = [text for case, text in result.failures + result.errors for text in (str(case), text)]
    if result.unexpectedSuccesses:
        words.append("succeeded unexpectedly")
    return {
        "seconds": round(time.monotonic() - begin, 3),
        "failures": len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses),
        "skipped": "; ".join(reason for _, reason in result.skipped),
        "words": "\n".join(words),
    }


def main() -> None:
    """Answers until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    print(json.dumps(listed()), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), file=answers)
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()


if __name__ == "__main__":
    main()
