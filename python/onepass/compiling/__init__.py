"""torch.compile(model, backend="onepass"): the backend, imported when Dynamo asks for it."""

from __future__ import annotations

from typing import Any


def backend(
    module: Any, inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Any:
    """Compiles a graph of Dynamo's; `mode` and `options` are those of torch.compile."""
    from onepass.compiling.compiler import compile_graph

    return compile_graph(module, inputs, mode, options)


def is_compiling_here() -> bool:
    """Whether Dynamo traces for this backend now: fused modules then run their original forwards."""
    from torch._dynamo.symbolic_convert import tls

    translator = getattr(tls, "current_tx", None)  # none: torch.export traces without Dynamo
    compiler = None if translator is None else translator.output.compiler_fn
    while compiler is not None and compiler is not backend:
        inner = getattr(compiler, "_torchdynamo_orig_backend", None)
        compiler = inner or getattr(compiler, "compiler_fn", None)
    return compiler is backend


is_compiling_here._dynamo_marked_constant = True  # type: ignore[attr-defined]
