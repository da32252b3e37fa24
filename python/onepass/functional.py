"""Blocks as functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass import _fallback, _ops
from onepass._description import describe


def run(text: str, x: Tensor, **parameters: Tensor) -> Tensor:
    """Runs a block on x.

    A call that leaves the fused path warns once per text and reason with FallbackWarning; `fallbacks(text)`
    counts them all.

    Args:
        text: The block.
        x: Batch, channels, then space.
        **parameters: The block's parameters and operands, by name.

    Returns:
        The block's output, in the type of x.

    Examples:
        >>> import onepass, torch
        >>> x, weight, bias = torch.randn(2, 8, 4, 4), torch.ones(8), torch.zeros(8)
        >>> y = onepass.functional.run("group_norm(4) | relu", x, norm_weight=weight, norm_bias=bias)
        >>> torch.allclose(y, torch.nn.functional.group_norm(x, 4).relu(), atol=1e-5)
        True
    """
    site = None if torch.compiler.is_compiling() else _fallback.site_of_text(text)
    return _ops.apply(text, x, ordered(text, parameters), site=site)


def fallbacks(text: str) -> dict[str, int]:
    """How many calls of run with this text left the fused path.

    Args:
        text: As it was given to run.

    Returns:
        Counts by what ran instead and why.

    Examples:
        >>> import onepass
        >>> onepass.functional.fallbacks("group_norm(4) | relu")
        {}
    """
    site = _fallback.by_text.get(text)
    return {} if site is None else dict(site.counts)


def ordered(text: str, parameters: dict[str, Tensor]) -> list[Tensor]:
    """The parameters in the block's order; raises TypeError unless they are exactly those it takes."""
    names = describe(text).names
    missing = [name for name in names if name not in parameters]
    unknown = [name for name in parameters if name not in names]
    if missing or unknown:
        found = "misses " + ", ".join(missing) if missing else "does not take " + ", ".join(unknown)
        takes = ", ".join(names) or "no parameters"
        raise TypeError(f"{text}: the call {found}; the block takes {takes}")
    return [parameters[name] for name in names]
