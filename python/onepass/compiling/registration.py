"""Makes the backend known to Dynamo: by its entry point where the package is installed, else by a call."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from onepass.compiling import backend

NAME = "onepass"
_GROUP = "torch_dynamo_backends"
_REGISTRY = "torch._dynamo.backends.registry"


def has_entry_point() -> bool:
    """Whether Dynamo finds the backend in the metadata of the installed package."""
    try:
        points = importlib.metadata.distribution("onepass").entry_points
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(point.group == _GROUP and point.name == NAME for point in points)


def register() -> None:
    """Registers the backend unless its entry point does: both at once fail with "duplicate name".

    Importing Dynamo takes as long as importing the rest of PyTorch, so this waits until someone does.
    """
    if has_entry_point():
        return
    registry = sys.modules.get(_REGISTRY)
    if registry is not None:
        _register_at(registry)
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _register_at(registry: ModuleType) -> None:
    if NAME not in registry._COMPILER_FNS:
        registry.register_backend(backend, name=NAME)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Registers the backend as soon as Dynamo's registry is imported, and is gone then."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The registry's own spec, whose loader registers the backend at its end; None for other modules."""
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register_at(module)

            loader.exec_module = execute_and_register
        return spec
