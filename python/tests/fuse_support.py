"""Comparing a fused model with its original: outputs, gradients and which blocks run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onepass import fuse, report

Output = Callable[[Any], Tensor]


def blocks(model: nn.Module) -> list[str]:
    """The texts of all fused blocks."""
    return [entry.block for entry in report(model).fused]


def reasons(model: nn.Module) -> str:
    """All reasons of what is not fused and of what left the fused path, as one text."""
    found = report(model)
    return "\n".join(f"{entry.name}: {entry.reason}" for entry in (*found.skipped, *found.fallbacks))


def assert_same(
    fused: nn.Module, original: nn.Module, *inputs: Any, output: Output = lambda y: y, **kwargs: Any
) -> None:
    """Outputs and all gradients agree; inputs are written in place by both or by neither."""
    results = []
    for model in (fused, original):
        given = [
            tensor.clone().requires_grad_(tensor.is_floating_point())
            if isinstance(tensor, Tensor)
            else tensor
            for tensor in inputs
        ]
        passed = [
            tensor * 1 if isinstance(tensor, Tensor) and tensor.is_floating_point() else tensor
            for tensor in given
        ]
        model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        result = output(model(*passed, **kwargs))
        result.float().square().mean().backward()
        leaves = [tensor for tensor in given if isinstance(tensor, Tensor)] + list(model.parameters())
        gradients = [None if leaf.grad is None else leaf.grad for leaf in leaves]
        results.append((result.detach(), [p.detach() for p in passed if isinstance(p, Tensor)], gradients))
    (result, written, gradients), (wanted, wanted_written, wanted_gradients) = results
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
    for some, other in zip(written, wanted_written, strict=True):
        torch.testing.assert_close(some, other, rtol=1e-4, atol=1e-5)
    scale = max((g.abs().max().item() for g in wanted_gradients if g is not None and g.numel()), default=0.0)
    for some, other in zip(gradients, wanted_gradients, strict=True):
        assert (some is None) == (other is None)
        if some is not None:
            torch.testing.assert_close(some, other, rtol=1e-3, atol=1e-4 * scale + 1e-8)


def check(
    model: nn.Module,
    *inputs: Any,
    expect: list[str] | None = None,
    conv: str = "fuse",
    output: Output = lambda y: y,
) -> nn.Module:
    """Fuses a copy of the model, compares in both modes and then the blocks that ran."""
    fused = fuse(copy.deepcopy(model), conv=conv)
    for training in (False, True):
        assert_same(fused.train(training), model.train(training), *inputs, output=output)
    if expect is not None:
        assert blocks(fused) == expect, blocks(fused)
    return fused


def replica_of(model: nn.Module) -> nn.Module:
    """As torch.nn.parallel.replicate: every module copied, its parameters plain tensors."""
    modules = list(model.modules())
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    for module, twin in copies.items():
        for name, child in module._modules.items():
            twin._modules[name] = None
            if child is not None:
                setattr(twin, name, copies[child])
        for name, parameter in module._parameters.items():
            if parameter is None:
                twin._parameters[name] = None
            else:
                setattr(twin, name, parameter * 1)
    return copies[model]
