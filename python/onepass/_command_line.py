"""What the commands of `python -m onepass` share: exit codes, and a request that cannot be served."""

from __future__ import annotations

import argparse
from typing import NoReturn

GOOD, WRONG, BAD_REQUEST, INTERRUPTED = 0, 1, 2, 130


class BadRequest(Exception):
    """A command line that cannot be served, as one sentence."""


class Parser(argparse.ArgumentParser):
    """Leaves what is wrong with a command line to the command."""

    def error(self, message: str) -> NoReturn:
        """Raises it."""
        raise BadRequest(message)
