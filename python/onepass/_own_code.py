"""Which code is PyTorch's, this package's or Python's own, and which is the user's."""

from __future__ import annotations

import functools
import pathlib
import sysconfig
import types

import torch

LIBRARIES = tuple(f"{pathlib.Path(file).parent}/" for file in (__file__, torch.__file__))
_STANDARD = tuple(f"{path}/" for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


def is_own_code(code: types.CodeType) -> bool:
    """Whether code is PyTorch's, this package's or Python's own: what it reads is not a user's."""
    return _is_own_file(code.co_filename)


@functools.cache
def _is_own_file(name: str) -> bool:
    if "site-packages" in name and not name.startswith(LIBRARIES):
        return False
    return name.startswith((*LIBRARIES, *_STANDARD, "<frozen", "<__array_function__"))
