"""Which code is PyTorch's, this package's or Python's own, and which is the user's."""

from __future__ import annotations

import functools
import pathlib
import sys
import sysconfig
import types
from collections.abc import Callable
from typing import TypeVar

import torch

LIBRARIES = tuple(f"{pathlib.Path(file).parent}/" for file in (__file__, torch.__file__))
_STANDARD = tuple(f"{path}/" for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})

Function = TypeVar("Function", bound=Callable)


def unseen(function: Function) -> Function:
    """Runs a function that calls no user's code without the profile function that watches a trace.

    It sees four events for each call inside, which took a third of the time of fuse.
    """

    @functools.wraps(function)
    def run(*args, **kwargs):
        profile = sys.getprofile()
        if not callable(profile):  # none, or a profiler written in C: nothing watches
            return function(*args, **kwargs)
        sys.setprofile(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(profile)

    return run


def is_own_code(code: types.CodeType) -> bool:
    """Whether code is PyTorch's, this package's or Python's own: what it reads is not a user's."""
    return _is_own_file(code.co_filename)


@functools.cache
def _is_own_file(name: str) -> bool:
    if "site-packages" in name and not name.startswith(LIBRARIES):
        return False
    return name.startswith((*LIBRARIES, *_STANDARD, "<frozen", "<__array_function__"))
