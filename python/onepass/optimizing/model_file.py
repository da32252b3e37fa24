"""A Python file that defines a model to optimise: `Model`, `get_inputs` and `get_init_inputs`."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

NAMES = ("Model", "get_inputs", "get_init_inputs")


class BadModelFile(Exception):
    """A file that cannot be optimised, as one sentence for its user."""


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """A loaded file; models and inputs are drawn from it, the same ones for the same seed."""

    path: str
    module: types.ModuleType

    @property
    def name(self) -> str:
        """The file's name without folder and ending."""
        return pathlib.Path(self.path).stem

    def build(self, device: torch.device, seed: int = 0) -> nn.Module:
        """A new model."""
        torch.manual_seed(seed)
        arguments = self._call("get_init_inputs")
        model = self._guard("Model(*get_init_inputs())", lambda: self.module.Model(*arguments))
        if not isinstance(model, nn.Module):
            raise BadModelFile(
                f"{self.path}: Model gives a {type(model).__name__}, must give a torch.nn.Module"
            )
        return model.to(device)

    def inputs(self, device: torch.device, seed: int, batch: int | None) -> list[Any]:
        """New inputs; those with the first one's batch are cut to `batch` samples."""
        torch.manual_seed(seed)
        given = self._call("get_inputs")
        inputs = list(given) if isinstance(given, (list, tuple)) else [given]
        whole = next((x.shape[0] for x in inputs if isinstance(x, Tensor) and x.dim() > 0), None)
        if batch is not None and (whole is None or whole < batch):
            raise BadModelFile(
                f"{self.path}: --batch {batch} is more than the {whole or 0} samples of get_inputs()"
            )
        return [_cut(x, whole, batch).to(device) if isinstance(x, Tensor) else x for x in inputs]

    def run(self, call: Callable[[], Any]) -> Any:
        """Runs the original model; where it cannot run there is nothing to compare with."""
        return self._guard("the model", call)

    def _call(self, name: str) -> Any:
        return self._guard(f"{name}()", getattr(self.module, name))

    def _guard(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            raise BadModelFile(f"{self.path}: {what} raises {describe(error)}") from error


def load(path: str) -> ModelFile:
    """Runs the file as a module; raises BadModelFile with the reason where that is not possible."""
    file = pathlib.Path(path)
    if not file.is_file():
        raise BadModelFile(
            f"{path}: {'is a folder, not a file' if file.is_dir() else 'there is no such file'}"
        )
    module = _execute(file, path)
    missing = [name for name in NAMES if not callable(getattr(module, name, None))]
    if missing:
        raise BadModelFile(f"{path}: misses {' and '.join(missing)}; a model file defines {', '.join(NAMES)}")
    return ModelFile(path, module)


def describe(error: BaseException) -> str:
    """The kind of an exception and the first line it says, with the next where that ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _execute(file: pathlib.Path, path: str) -> types.ModuleType:
    name = f"onepass_model_file_{file.stem}"
    loader = importlib.machinery.SourceFileLoader(name, str(file))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = module  # where dataclasses and pickle look for the classes of the file
    sys.path.insert(0, str(file.resolve().parent))  # for files that import their neighbours
    try:
        loader.exec_module(module)
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        raise BadModelFile(f"{path}{where}: not Python: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise BadModelFile(f"{path}: cannot be loaded: {describe(error)}") from error
    finally:
        sys.path.pop(0)
    return module


def _cut(x: Tensor, whole: int | None, batch: int | None) -> Tensor:
    if batch is None or x.dim() == 0 or x.shape[0] != whole:
        return x
    return x[:batch].clone()  # a copy, so that the whole batch is freed
