"""Every public name of onepass as typed code uses it: mypy --strict accepts this file (.ci/run)."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

import onepass


def uses_models(model: nn.Module) -> nn.Module:
    """fuse, freeze, report, unfreeze, unfuse."""
    fused: nn.Module = onepass.fuse(
        model, conv="keep", filter_fn=lambda name, module: True, numerics="strict"
    )
    found = onepass.report(fused)
    text: str = str(found)
    values: dict[str, object] = found.as_dict()
    assert text and values
    return onepass.unfuse(onepass.unfreeze(onepass.freeze(fused)))


def uses_blocks(x: Tensor) -> tuple[Tensor, Tensor, str]:
    """Block, functional, explain."""
    block = onepass.Block("conv2d(3,8,k=3,p=1) | silu | group_norm(2)", device="cpu", dtype=torch.float32)
    counts: dict[str, int] = block.fallbacks
    y: Tensor = onepass.functional.run("relu | mean", x)
    counts |= onepass.functional.fallbacks("relu | mean")
    plan: str = onepass.explain(block, x.shape, dtype=x.dtype, threads=1, backward=False)
    z: Tensor = block(x)
    return y, z, plan


def uses_settings() -> str:
    """numerics, tune, available, unavailable_reason, the version, the warnings."""
    policy: str = onepass.numerics()
    onepass.numerics(policy)
    onepass.tune(False)
    reason: str | None = onepass.unavailable_reason()
    assert onepass.available() is (reason is None)
    warnings.simplefilter("error", onepass.FallbackWarning)
    warnings.simplefilter("error", onepass.SlowPathWarning)
    version: str = onepass.__version__
    return version
