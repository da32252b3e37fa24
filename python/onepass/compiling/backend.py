"""torch.compile(model, backend="onepass"): onepass for the blocks, Inductor for everything else."""

from __future__ import annotations

from typing import Any

from torch import fx

from onepass import _library
from onepass.compiling import policy
from onepass.compiling.rewrite import rewrite


def compile_graph(
    module: fx.GraphModule, inputs: list[Any], mode: str | None, options: dict[str, Any] | None
) -> Any:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    if _library.available():
        from onepass.compiling import operators  # noqa: F401

        rewrite(module, policy.decide)
    return compile_fx(module, inputs, config_patches=patches)
