"""The compiled operators: loaded once, and the reason where they cannot be."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__version__ = "0.1.0"

OLDEST_TORCH = (2, 10)
_Function = TypeVar("_Function", bound=Callable[..., Any])
PATH = pathlib.Path(__file__).with_name("lib_onepass_torch.so")


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _load() -> str | None:
    """Loads the operators; returns why not, as one sentence that says what to do."""
    if _torch_version() < OLDEST_TORCH:
        return f"PyTorch {torch.__version__} is older than 2.10: pip install 'torch>=2.10'"
    if not PATH.exists():
        return f"{PATH.name} is missing: pip install onepass, or build with -DONEPASS_BUILD_PYTHON=ON"
    try:
        torch.ops.load_library(str(PATH))
    except (OSError, RuntimeError) as error:
        return (
            f"{PATH.name} cannot be loaded ({error.__cause__ or error}): reinstall onepass for this machine"
        )
    built = json.loads(torch.ops.onepass.describe_library())["version"]
    if built != __version__:
        return f"{PATH.name} is of onepass {built}, the package of {__version__}: reinstall onepass"
    return None


_reason = _load()


def available() -> bool:
    """Whether the compiled operators are loaded.

    Returns:
        False where fuse would change nothing and Block raises.

    Examples:
        >>> import onepass
        >>> onepass.available() == (onepass.unavailable_reason() is None)
        True
    """
    return _reason is None


def unavailable_reason() -> str | None:
    """Why the compiled operators are not loaded.

    Returns:
        One sentence that says what to do; None where they are loaded.

    Examples:
        >>> import onepass
        >>> print(onepass.unavailable_reason() or "ready")
        ready
    """
    return _reason


def refusal(error: RuntimeError) -> Exception:
    """The error as what it is: PyTorch 2.15 brings the library's ValueError as RuntimeError."""
    own = torch.ops.onepass.last_refusal() if available() else ""
    return ValueError(own) if own and str(error) == own else error


def with_refusals(function: _Function) -> _Function:
    """Lets a function of the operators raise ValueError where the library refuses."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            raise refusal(error) from None

    return run  # type: ignore[return-value]


@functools.cache
def content_hash() -> str:
    """Of the compiled operators and of the package's sources: what compiled graphs and times depend on."""
    digest = hashlib.sha256()
    for path in (PATH, *sorted(PATH.parent.rglob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def has_cpu_kernels() -> bool:
    """Whether the operators have kernels for this CPU, besides the reference."""
    return available() and bool(json.loads(torch.ops.onepass.describe_library())["cpu_targets"])


def require() -> None:
    """Raises RuntimeError with the reason unless the compiled operators are loaded."""
    if _reason is not None:
        raise RuntimeError(f"onepass cannot run: {_reason}")
