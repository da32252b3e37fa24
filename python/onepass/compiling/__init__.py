"""torch.compile(model, backend="onepass"): the backend, imported when Dynamo asks for it."""

from __future__ import annotations

from typing import Any


def backend(
    module: Any, inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Any:
    """Compiles a graph of Dynamo's; `mode` and `options` are those of torch.compile."""
    from onepass.compiling.backend import compile_graph

    return compile_graph(module, inputs, mode, options)
