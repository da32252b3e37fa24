"""The sentence that says why a forward cannot be traced."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Noted(threading.local):
    """The reasons of the trace of this thread: user's code may catch the exception."""

    reasons: list[str] | None = None


_noted = _Noted()


class Refused(Exception):
    """A module cannot be traced; the message is one sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        if _noted.reasons is not None:
            _noted.reasons.append(reason)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Raises Refused at the end if it was raised inside and caught."""
    before, _noted.reasons = _noted.reasons, []
    try:
        yield
        reasons = _noted.reasons
    finally:
        _noted.reasons = before
    if reasons:
        raise Refused(reasons[0])
