"""Compares exported.py with original.py: copied beside them and rules.py, and run without onepass."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.abc
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils.benchmark
from torch import Tensor, nn
from torch.utils import _pytree as pytree

FRESH_INPUTS = 3


class _NoOnepass(importlib.abc.MetaPathFinder):
    """An exported file that imports onepass is wrong, installed or not."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.partition(".")[0] == "onepass":
            raise ImportError("the exported file imports onepass")


Inputs = list[Any] | dict[str, Any]  # by position or by name; tensors may lie inside lists and dicts


def _call(function: Callable[..., Any], given: Any) -> Any:
    if isinstance(given, Mapping):
        return function(**given)
    return function(*given) if isinstance(given, (list, tuple)) else function(given)


def _inputs(module: Any, seed: int) -> Inputs:
    torch.manual_seed(seed)
    given = module.get_inputs()
    given = dict(given) if isinstance(given, Mapping) else given
    given = given if isinstance(given, (list, tuple, dict)) else [given]
    return pytree.tree_map_only(Tensor, lambda x: x.cuda(), given)


def _outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    result = _call(model, inputs)
    tensors = result if isinstance(result, (list, tuple)) else [result]
    return [x for x in tensors if isinstance(x, Tensor) and x.is_floating_point()]


def _cast(
    inputs: Inputs, dtype: torch.dtype | None, train: bool, noise: Callable[[Tensor], Tensor] | None = None
) -> Inputs:
    def cast(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        x = x.detach().clone() if dtype is None else x.detach().to(dtype)
        x = noise(x) if noise else x
        return x.requires_grad_(train)

    return pytree.tree_map_only(Tensor, cast, inputs)


def _results(model: nn.Module, inputs: Inputs, directions: list[Tensor], train: bool) -> dict[str, Tensor]:
    """Outputs by number and, where it trains, gradients by name."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)  # the same dropout for everyone
    with torch.set_grad_enabled(train):
        outputs = _outputs(model, inputs)
    found = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    if not train:
        return found
    torch.autograd.backward(outputs, [d.to(o) for d, o in zip(directions, outputs)])
    for keys, x in pytree.tree_leaves_with_path(inputs):
        if isinstance(x, Tensor) and x.grad is not None:
            found[f"gradient of input {pytree.keystr(keys)}"] = x.grad
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found | {f"gradient of {name}": gradient for name, gradient in gradients.items()}


def _faults(rules: Any, original: Any, exported: Any, train: bool) -> list[str]:
    torch.manual_seed(42)
    old = _call(original.Model, original.get_init_inputs()).cuda().train(train)
    torch.manual_seed(42)
    new = _call(exported.ModelNew, exported.get_init_inputs()).cuda().train(train)
    new.load_state_dict(old.state_dict())
    exact = copy.deepcopy(old).double()
    rule = None
    checks: dict[str, Any] = {}
    for seed in range(1, FRESH_INPUTS + 1):
        inputs = _inputs(original, seed)
        with torch.no_grad():
            directions = [torch.randn_like(output) for output in _outputs(old, inputs)]
        rule = rule or rules.rule_for(directions[0].dtype, directions[0].device)
        theirs = _results(old, _cast(inputs, None, train), directions, train)
        ours = _results(new, _cast(inputs, None, train), directions, train)
        wanted = _results(exact, _cast(inputs, torch.float64, train), directions, train)
        if ours.keys() != theirs.keys():
            return [f"the exported model has {sorted(ours)}, the original {sorted(theirs)}"]
        for name in theirs:
            is_gradient = name.startswith("gradient")
            found = rules.compare(name, is_gradient, ours[name], theirs[name], wanted[name], rule)
            asked = dataclasses.replace(rule, ratio=2.0) if is_gradient else rule
            if is_gradient and found.wrong(asked):
                jump = _jump(rules, exact, inputs, directions, name, wanted[name])
                found = dataclasses.replace(found, kink=jump)
            checks[name] = (checks[name][0].merge(found) if name in checks else found, asked)
        del theirs, ours, wanted
    for name, (check, _) in checks.items():
        print(f"  {name}: error {check.error:.1e} against fp64, the original's {check.torch_error:.1e}")
    return [fault for check, asked in checks.values() if (fault := check.wrong(asked))]


def _jump(
    rules: Any, exact: nn.Module, inputs: Inputs, directions: list[Tensor], name: str, here: Tensor
) -> float:
    """How far a gradient jumps when the inputs change by rounding errors."""

    def shifted(sign: float) -> Tensor:
        noise = lambda x: x + sign * rules.rounding_noise(x, 0)  # noqa: E731
        return _results(exact, _cast(inputs, torch.float64, True, noise), directions, True)[name]

    return rules.kink(shifted(1.0), here, shifted(-1.0))


def _milliseconds(call: Callable[[], Any]) -> float:
    """By torch.utils.benchmark, the second-level cache overwritten before each call."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device="cuda")

    def seconds(statement: str) -> float:
        names = {"call": call, "flush": flush}
        timer = torch.utils.benchmark.Timer(statement, globals=names)
        return timer.blocked_autorange(min_run_time=0.5).median

    return (seconds("flush.zero_(); call()") - seconds("flush.zero_()")) * 1e3


def _print_times(original: Any, exported: Any) -> None:
    """With gradients enabled, as a script that does not think of them runs a model, and without."""
    inputs = _inputs(original, 1)
    models = {
        name: _call(model, original.get_init_inputs()).cuda().eval()
        for name, model in (("original", original.Model), ("exported", exported.ModelNew))
    }
    for enabled, heading in ((True, "gradients enabled"), (False, "under no_grad")):
        with torch.set_grad_enabled(enabled):
            times = {name: _milliseconds(lambda m=model: _call(m, inputs)) for name, model in models.items()}
        ratio = times["original"] / times["exported"]
        both = f"original {times['original']:.3f} ms, exported {times['exported']:.3f} ms"
        print(f"  {heading}: {both}: {ratio:.2f} times as fast")
    for reason, calls in exported.ModelNew.why().items():
        print(f"  {reason} ({calls} calls)")


def main() -> None:
    """Prints what was found, then one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", action="store_true")
    arguments = parser.parse_args()
    sys.meta_path.insert(0, _NoOnepass())
    import exported
    import original
    import rules

    inputs = _inputs(original, 0)
    model = _call(exported.ModelNew, exported.get_init_inputs()).cuda().eval()
    start = time.perf_counter()
    with torch.no_grad():
        _call(model, inputs)
    torch.cuda.synchronize()
    print(f"built in {time.perf_counter() - start:.0f} s")
    del model, inputs
    wrong = []
    for train in (False, True) if arguments.train else (False,):
        print("training step" if train else "forward")
        wrong += _faults(rules, original, exported, train)
    if not wrong:
        _print_times(original, exported)
    print(json.dumps({"wrong": wrong}))


if __name__ == "__main__":
    main()
