"""The forward of a fused module as Python text: the variant whose facts hold, or the original."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from onepass import _fallback
from onepass._conditions import Code
from onepass._rewrite import compile_once
from onepass._state import GLOBAL_HOOKS, Variant
from onepass._trace import is_variadic, parameters_of

_PLAIN = (Tensor, nn.Parameter, FakeTensor)


def _prefix(parameters: Iterable[Any]) -> str:
    """What no name of the user's begins with."""
    prefix = "onepass_"
    names = [parameter.name for parameter in parameters]
    while any(name.startswith(prefix) for name in names):
        prefix = f"_{prefix}"
    return prefix


def generate(
    name: str,
    original: type,
    variants: list[Variant],
    note: Callable[..., Any],
    note_mode: Callable[[nn.Module], bool],
) -> Callable[..., Any]:
    """The forward of a state: the variant for mode and arguments whose facts hold, or the original.

    `note` hears of calls of the original, and may return a forward that runs instead. `note_mode` hears of
    calls in a mode in which nothing fuses, and says whether that is all there is to note.
    """
    parameters = parameters_of(original)
    p = _prefix(parameters)
    constants: dict[str, Any] = {
        f"{p}class": original,
        f"{p}note": note,
        f"{p}note_mode": note_mode,
        f"{p}plain": _PLAIN,
        f"{p}type": type,
        f"{p}is_compiling": torch.compiler.is_compiling,
        f"{p}transforming": _fallback.transforming,
        f"{p}tracing": torch._dynamo.assume_constant_result(_fallback.tracing),
        f"{p}forward_ad": forward_ad,
    }
    constants |= {f"{p}{hooks}": getattr(torch.nn.modules.module, hooks) for hooks in GLOBAL_HOOKS}
    signature, arguments = _signature(parameters, p, constants)
    guards = [f"not {parameter.name}" for parameter in parameters if is_variadic(parameter)]
    guards += [f"not {p}{hooks}" for hooks in GLOBAL_HOOKS]
    guards += [f"not {p}transforming()", f"{p}forward_ad._current_level < 0", f"not {p}tracing()"]
    lines = [f"def forward({p}self{signature}):", f"    if {' and '.join(guards)}:"]
    lines += [f"        {p}training = {p}self.training"]
    for i, variant in enumerate(variants):
        lines += [f"        {line}" for line in _branch(parameters, i, variant, p, constants)]
    modes = {variant.training for variant in variants}
    if len(modes) == 1:  # the other one is no change of anything: nothing has to be looked into
        other = f"not {p}training" if modes == {True} else f"{p}training"
        lines += [
            f"        if {other} and not {p}is_compiling() and {p}note_mode({p}self):",
            f"            return {p}class.forward({p}self{arguments})",
        ]
    given = "{" + ", ".join(f"{q.name!r}: {q.name}" for q in parameters) + "}"
    lines += [
        f"    if not {p}is_compiling():",
        f"        {p}instead = {p}note({p}self, {given})",
        f"        if {p}instead is not None:",
        f"            return {p}instead({p}self{arguments})",
        f"    return {p}class.forward({p}self{arguments})",
        "",
    ]
    return compile_once("\n".join(lines), constants, name or "model", "forward")


def _signature(parameters: list[Any], prefix: str, constants: dict[str, Any]) -> tuple[str, str]:
    """The parameters as written in a def, and as passed on to the original forward."""
    written, passed = [], []
    kinds = [parameter.kind for parameter in parameters]
    for i, parameter in enumerate(parameters):
        name = parameter.name
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY:
            if not {parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY} & set(kinds[:i]):
                written.append("*")
            passed.append(f"{name}={name}")
        else:
            passed.append(star + name)
        default = ""
        if parameter.default is not parameter.empty:
            constants[f"{prefix}default_{name}"] = parameter.default
            default = f"={prefix}default_{name}"
        written.append(star + name + default)
        positional_only_ends = i + 1 == len(kinds) or kinds[i + 1] is not parameter.POSITIONAL_ONLY
        if parameter.kind is parameter.POSITIONAL_ONLY and positional_only_ends:
            written.append("/")
    return "".join(f", {text}" for text in written), "".join(f", {text}" for text in passed)


def _branch(
    parameters: list[Any], number: int, variant: Variant, p: str, constants: dict[str, Any]
) -> list[str]:
    constants[f"{p}variant{number}"] = variant.function
    constants[f"{p}find{number}"] = variant.find
    tensors = variant.pattern.tensors([q.name for q in parameters if not is_variadic(q)])
    conditions = [f"{p}training" if variant.training else f"not {p}training"]
    conditions += [f"{p}type({name}) in {p}plain" for name in tensors]
    code = Code(f"{p}v{number}_", None)
    for name, value in variant.pattern.constants:
        if type(value) is str:
            conditions.append(f"{p}type({name}) is {code.constant(str)}")
        code.conditions.clear()
        code.is_value(name, value)
        conditions += code.texts()
    constants |= code.constants
    passed = "".join(f", {name}" for name in tensors)
    return [
        f"if {' and '.join(conditions)}:",
        f"    {p}tensors = {p}find{number}({p}self)",
        f"    if {p}tensors is not None:",
        f"        return {p}variant{number}({p}self, {p}self{passed}, {p}tensors)",
    ]


def finder(
    module: nn.Module, variant: Variant, of_replica: bool = False
) -> Callable[[nn.Module], tuple[Any, ...] | None]:
    """A function that gives the variant's tensors if its facts hold for a module, or for a replica of it."""
    p = "onepass_"
    outside, code = Code(p, module), Code(p, module, variant.types, of_replica)
    for name in variant.outside:
        name.condition(code if name.is_setting else outside)
    for fact in variant.facts:
        fact.condition(code)
    constants = dict(code.constants)
    if outside.conditions:
        text = "".join(f"    {line}\n" for line in outside.lines("True", "False"))
        function = compile_once(f"def outside():\n{text}", outside.constants, "names outside", "outside")
        constants[f"{p}outside"] = torch._dynamo.assume_constant_result(function)
        code.add(f"{p}outside()")
    if variant.watch:
        constants[f"{p}is_compiling"] = torch.compiler.is_compiling
        code.add(f"not {p}is_compiling()")
        code.add(f"{p}self._onepass.watches[{variant.number}].holds({p}self)")
    tensors = "".join(f"{code.tensor(t.module, t.kind, t.name)}, " for t in variant.tensors)
    lines = [
        f"def find({p}self):",
        "    try:",
        *(f"        {line}" for line in code.lines(f"({tensors})", "None")),
        "    except (AttributeError, KeyError, TypeError, ValueError):",
        "        return None",
        "",
    ]
    return compile_once("\n".join(lines), constants, "facts", "find")
