"""A Python file that defines a model to optimise: `Model`, `get_inputs` and `get_init_inputs`."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onepass._command_line import describe

NAMES = ("Model", "get_inputs", "get_init_inputs")


class BadModelFile(Exception):
    """A file that cannot be optimised, as one sentence for its user."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments of a call by position and by name; tensors may lie inside lists and dicts."""

    positional: tuple[Any, ...]
    named: dict[str, Any]

    def call(self, function: Callable[..., Any]) -> Any:
        """Calls a function with them."""
        return function(*self.positional, **self.named)

    @property
    def leaves(self) -> list[Any]:
        """All values, those inside lists and dicts too."""
        return pytree.tree_leaves((self.positional, self.named))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name: 0 for the first argument, x for the one so called, 0['a'] inside."""
        found = {}
        for keys, leaf in pytree.tree_leaves_with_path((self.positional, self.named)):
            if isinstance(leaf, Tensor):
                first = getattr(keys[1], "idx", getattr(keys[1], "key", ""))
                found[f"{first}{pytree.keystr(keys[2:])}"] = leaf
        return found

    def map(self, change: Callable[[Tensor], Any]) -> Arguments:
        """The same with every tensor changed."""
        changed = pytree.tree_map_only(Tensor, change, (self.positional, self.named))
        return Arguments(*changed)


def as_arguments(given: Any) -> Arguments:
    """What a list gives by position, a dict by name, and anything else as the only argument."""
    if isinstance(given, Mapping):
        return Arguments((), dict(given))
    return Arguments(tuple(given) if isinstance(given, (list, tuple)) else (given,), {})


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """A loaded file; models and inputs are drawn from it, the same ones for the same seed."""

    path: str
    module: types.ModuleType
    text: str

    @property
    def name(self) -> str:
        """The file's name without folder and ending."""
        return pathlib.Path(self.path).stem

    def build(self, device: torch.device, seed: int = 0) -> nn.Module:
        """A new model."""
        torch.manual_seed(seed)
        given = self._call("get_init_inputs")
        if not isinstance(given, (list, tuple, Mapping)):
            raise BadModelFile(
                f"{self.path}: get_init_inputs() gives a {type(given).__name__}, must give a list or a dict"
            )
        stars = "**" if isinstance(given, Mapping) else "*"
        model = self._guard(
            f"Model({stars}get_init_inputs())", lambda: as_arguments(given).call(self.module.Model)
        )
        if not isinstance(model, nn.Module):
            raise BadModelFile(
                f"{self.path}: Model gives a {type(model).__name__}, must give a torch.nn.Module"
            )
        return model.to(device)

    def inputs(self, device: torch.device, seed: int, batch: int | None) -> Arguments:
        """New inputs; those with the first one's batch are cut to `batch` samples."""
        torch.manual_seed(seed)
        inputs = as_arguments(self._call("get_inputs"))
        whole = next((x.shape[0] for x in inputs.tensors().values() if x.dim() > 0), None)
        if batch is not None and (whole is None or whole < batch):
            raise BadModelFile(
                f"{self.path}: --batch {batch} is more than the {whole or 0} samples of get_inputs()"
            )
        return inputs.map(lambda x: _cut(x, whole, batch).to(device))

    def run(self, call: Callable[[], Any]) -> Any:
        """Runs the original model; where it cannot run there is nothing to compare with."""
        return self._guard("the model", call)

    def _call(self, name: str) -> Any:
        return self._guard(f"{name}()", getattr(self.module, name))

    def _guard(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (Exception, SystemExit) as error:
            raise BadModelFile(f"{self.path}: {what} raises {describe(error)}") from error


def load(path: str) -> ModelFile:
    """Runs the file as a module; raises BadModelFile with the reason where that is not possible."""
    file = pathlib.Path(path)
    if not file.is_file():
        raise BadModelFile(
            f"{path}: {'is a folder, not a file' if file.is_dir() else 'there is no such file'}"
        )
    text = _text(file, path)
    module = _execute(file, path)
    missing = [name for name in NAMES if not callable(getattr(module, name, None))]
    if missing:
        raise BadModelFile(f"{path}: misses {' and '.join(missing)}; a model file defines {', '.join(NAMES)}")
    return ModelFile(path, module, text)


def _text(file: pathlib.Path, path: str) -> str:
    """The source, by the encoding that it declares."""
    try:
        return importlib.util.decode_source(file.read_bytes())
    except (UnicodeDecodeError, SyntaxError) as error:
        raise BadModelFile(
            f"{path}: is not text in UTF-8, nor in an encoding that its first two lines declare: {error}"
        ) from error
    except OSError as error:
        raise BadModelFile(f"{path}: cannot be read: {error.strerror}") from error


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
