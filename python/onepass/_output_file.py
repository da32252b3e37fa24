"""Files that commands write: checked before the work, written whole or not at all."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Sequence

from onepass._command_line import BadRequest


def check(option: str, path: str, inputs: Sequence[str]) -> None:
    """Raises BadRequest where the path cannot be written, or is one of the inputs by whatever name."""
    target = pathlib.Path(path)
    said = f"{option} {path}"
    if target.is_dir():
        raise BadRequest(f"{said}: is a folder, must be a file")
    if not target.resolve().parent.is_dir():
        raise BadRequest(f"{said}: there is no such folder")
    if target.exists():
        for given in inputs:
            if pathlib.Path(given).exists() and target.samefile(given):
                raise BadRequest(f"{said}: is the model file {given} itself, must be another file")
        if not target.is_file():
            raise BadRequest(f"{said}: is not a regular file")
        if not os.access(target, os.W_OK):
            raise BadRequest(f"{said}: cannot be written, the file is read-only")
    try:
        handle, name = _temporary(target.resolve())
    except OSError as error:
        raise BadRequest(f"{said}: cannot be written: {error.strerror}") from None
    os.close(handle)
    os.unlink(name)


def publish(path: str | pathlib.Path, text: str) -> None:
    """Writes beside the place and renames; a link stays a link, and a file keeps its permissions."""
    target = pathlib.Path(path).resolve()
    handle, name = _temporary(target)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(name, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        os.replace(name, target)
    except OSError as error:
        pathlib.Path(name).unlink(missing_ok=True)
        raise OSError(
            error.errno, f"{error.strerror or error}, the file was not written", str(path)
        ) from error
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise


def _temporary(target: pathlib.Path) -> tuple[int, str]:
    return tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
