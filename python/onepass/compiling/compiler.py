"""torch.compile(model, backend="onepass"): onepass for the blocks, Inductor for everything else."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from onepass import _fallback, _library, _numerics
from onepass.compiling import building, policy

_OWN_OPTIONS = {"onepass.keep": "faster", "onepass.numerics": None, "onepass.measure": True}


def compile_graph(
    module: fx.GraphModule, inputs: list[Any], mode: str | None, options: dict[str, Any] | None
) -> Any:
    """Rewrites the graph of Dynamo's and has Inductor compile it."""
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    own = {name: patches.pop(name, default) for name, default in _OWN_OPTIONS.items()}
    _check(own)
    plan = _library.unavailable_reason() or _rewrite(module, own, patches)
    if isinstance(plan, str):
        _fallback.warn(f"the model is compiled by Inductor alone: {plan}")
        return compile_fx(module, inputs, config_patches=patches)
    with building.ahead(policy.parts_of(plan)):
        return compile_fx(module, inputs, config_patches=patches)


def _check(own: dict[str, Any]) -> None:
    if own["onepass.keep"] not in policy.KEEP:
        accepted = ", ".join(map(repr, policy.KEEP))
        raise ValueError(f'"onepass.keep" is {own["onepass.keep"]!r}, must be one of {accepted}')
    if own["onepass.numerics"] is not None:
        _numerics.checked(own["onepass.numerics"])
    if not isinstance(own["onepass.measure"], bool):
        raise ValueError(f'"onepass.measure" is {own["onepass.measure"]!r}, must be True or False')


def _rewrite(module: fx.GraphModule, own: dict[str, Any], patches: dict[str, Any]) -> policy.Plan | str:
    """Rewrites the graph and adds to the patches: the plan, or why PyTorch's internals do not allow it.

    The graph is as it was then: what looks into internals runs before anything is changed.
    """
    try:
        from torch._inductor import config

        from onepass.compiling import lowering, operators, passes, record  # noqa: F401
        from onepass.compiling.rewrite import Rewriting

        theirs = patches.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
        lowering.install()
        rewriting = Rewriting(module)
        plan = policy.plan(rewriting.segments, *(own[name] for name in _OWN_OPTIONS))
        record.remember(module, plan)
    except (ImportError, AttributeError, TypeError) as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"PyTorch {torch.__version__} has other internals than this version knows ({what})"
    rewriting.apply([decision.kept for decision in plan.decisions])
    if any(decision.kept for decision in plan.decisions):
        patches["post_grad_custom_pre_pass"] = passes.LayoutPass(plan.layout, theirs)
        if plan.layout is not None:
            patches.update(_layout_patches(plan.layout, patches))
    return plan


def _layout_patches(layout: str, patches: dict[str, Any]) -> dict[str, Any]:
    """Convolutions that stay with Inductor take the layout of those that do not."""
    given = {"layout_optimization", "force_layout_optimization"} & patches.keys()
    if given:
        return {}
    if layout == "nhwc":
        return {"force_layout_optimization": True}
    return {"layout_optimization": False}
