"""Runs tests of python/tests_gpu for gpu_test.py, one for each line of its standard input.

A line is a test's name, the answer a line of JSON; before any, an empty object. What tests print goes to
standard error.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = ROOT / "python" / "tests_gpu"
sys.path[:0] = [str(ROOT / "python"), str(TESTS)]


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
    import torch

    if torch.cuda.is_available():
        torch.cuda.init()
    print("{}", file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), file=answers)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
