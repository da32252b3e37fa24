"""The forward of a module in an exported file: its signature, its checks, and the original otherwise."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator

from torch import nn

from onepass._trace import is_variadic, parameters_of
from onepass.exporting.chains import Fused
from onepass.exporting.plans import NotExported


def forward_text(fused: Fused, bodies: dict[bool, list[str]], changed: str, original: str) -> str:
    """The forward; `original` is the function that it runs otherwise, "" for the class's own."""
    module = fused.rewriter.module
    signature, passed = _signature(module)
    name = f"{type(module).__name__}.forward" if fused.path else "forward"
    given = [part for part in ("self" if original else "", passed) if part]
    original = f"return {original or 'super().forward'}({', '.join(given)})"
    lines = [
        f"def forward(self{signature}):",
        f"    why = {changed}(self)",
        "    if why:",
        f'        _say("{name}", why)',
        f"        {original}",
    ]
    for condition, why in _argument_checks(fused):
        lines += [f"    if {condition}:", f'        _say("{name}", {json.dumps(why)})', f"        {original}"]
    modes = sorted(bodies)
    same_code = len(modes) == 2 and bodies[False] == bodies[True]
    if len(modes) == 1:
        other = "training" if modes == [False] else "evaluation"
        lines += [
            "    if self.training:" if modes == [False] else "    if not self.training:",
            f'        _say("{name}", "the model is in {other} mode")',
            f"        {original}",
        ]
    if len(modes) == 1 or same_code:
        lines += [f"    {line}" for line in bodies[modes[0]]]
    else:
        lines += ["    if self.training:", *(f"        {line}" for line in bodies[True])]
        lines += [f"    {line}" for line in bodies[False]]
    return "\n".join(lines)


def _argument_checks(fused: Fused) -> Iterator[tuple[str, str]]:
    """Conditions that a call is not as it was traced, and what to say then."""
    constants = dict(fused.variants[0].pattern.constants)
    for parameter in parameters_of(fused.rewriter.module):
        name = parameter.name
        if is_variadic(parameter):
            yield name, f"{name} is not empty"
        elif name not in constants:
            yield f"not isinstance({name}, torch.Tensor)", f"{name} is no tensor"
        else:
            value = constants[name]
            is_one = value is None or isinstance(value, bool)
            other = f"type({name}) is not {type(value).__name__} or {name} != {value!r}"
            yield f"{name} is not {value!r}" if is_one else other, f"{name} is not {value!r}"


def _signature(module: nn.Module) -> tuple[str, str]:
    """The forward's parameters as its source has them, and as they are passed on."""
    try:
        source = inspect.cleandoc("\n" + inspect.getsource(type(module).forward))
        function = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef))
    except (OSError, TypeError, SyntaxError, StopIteration):
        raise NotExported(f"the source of {type(module).__name__}.forward cannot be read") from None
    arguments = function.args
    (arguments.posonlyargs or arguments.args).pop(0)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    passed = []
    for parameter in parameters_of(module):
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        by_name = f"{parameter.name}=" if parameter.kind is parameter.KEYWORD_ONLY else ""
        passed.append(f"{star}{by_name}{parameter.name}")
    text = ast.unparse(arguments)
    return f", {text}" if text else "", ", ".join(passed)
