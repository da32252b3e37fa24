"""What the commands of `onepass` share: exit codes, numbers, and that none shows a traceback."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from onepass._before_torch import is_script, leave

GOOD, WRONG, BAD_REQUEST, FAILED, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 3, 130, 141
EXIT_CODES = (
    "exit codes: 0 good, 1 a result is wrong, 2 the request cannot be served (one sentence on standard "
    "error), 3 an error of onepass itself (python -X dev shows where), 130 interrupted, 141 the reader of "
    "its output left"
)


class BadRequest(Exception):
    """A command line that cannot be served, as one sentence."""


class _Ended(Exception):
    """The command line asked for help, and got it."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


class Number:
    """A number of a command line, in a range that its refusal names."""

    def __init__(self, kind: type, least: float, most: float) -> None:
        self.kind, self.least, self.most = kind, least, most

    def __call__(self, text: str) -> float:
        try:
            value = self.kind(text)
        except ValueError:
            value = math.nan
        if not self.least <= value <= self.most:
            what = "a whole number" if self.kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text} must be {what} from {self.least:g} to {self.most:g}")
        return value


def program() -> str:
    """What the user typed in front of the command."""
    return "onepass" if is_script(sys.argv) else "python -m onepass"


class Parser(argparse.ArgumentParser):
    """Leaves what is wrong with a command line to the command."""

    def __init__(self, command: str, **options: Any) -> None:
        super().__init__(prog=f"{program()} {command}", **options, epilog=EXIT_CODES)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Ends the command, after --help."""
        raise _Ended(status)

    def error(self, message: str) -> NoReturn:
        """Raises it."""
        raise BadRequest(f"{message} (see {self.prog} --help)")

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parses; "-1e3" and "-inf" behind the name of a number are its value, not an option."""
        names = {
            name
            for action in self._actions
            if isinstance(action.type, Number)
            for name in action.option_strings
        }
        joined: list[str] = []
        for text in args:
            if joined and joined[-1] in names:
                joined[-1] += f"={text}"
            else:
                joined.append(text)
        return super().parse_args(joined)


def complain(sentence: str) -> None:
    """One line on standard error."""
    print(f"onepass: {' '.join(sentence.split())}", file=sys.stderr)


def describe(error: BaseException) -> str:
    """The kind of an exception and the first line it says, with the next where that ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def run(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """Runs a command; whatever goes wrong is one line on standard error and an exit code."""
    try:
        if signal.getsignal(signal.SIGINT) is leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = _status(command, argv)
        sys.stdout.flush()
        return status
    except BadRequest as error:
        complain(str(error))
    except KeyboardInterrupt:
        complain("interrupted, nothing was written")
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return CLOSED_PIPE
    except OSError as error:
        _drop_output()
        complain(f"{error.filename or 'standard output'}: {error.strerror or error}")
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        complain(f"an error of onepass itself, which python -X dev shows in full: {describe(error)}")
        return FAILED
    return BAD_REQUEST


def _status(command: Callable[[list[str]], int], argv: list[str]) -> int:
    try:
        return command(argv)
    except _Ended as end:
        return end.status
    except SystemExit as end:
        raise BadRequest(f"the model file ends the process: {describe(end)}") from end


def _drop_output() -> None:
    """What is still to be written cannot be: Python would try again when it ends, and say so."""
    if sys.stdout is sys.__stdout__:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def output_is_for_results() -> Iterator[None]:
    """What is printed meanwhile, by model files and compilers too, goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        if sys.__stdout__ is None or sys.stderr is not sys.__stderr__:
            yield
            return
        sys.__stdout__.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
