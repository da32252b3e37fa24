"""Activations written out with arithmetic, as 0.5 * x * (1 + erf(x / sqrt(2))): read as one stage.

An expression over one tensor becomes nested tuples in a normal form: products and sums are flat, their
constants folded and first, the rest sorted. Forms of known activations are compared with it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from onepass._stage import NoMatch

Form = tuple[Any, ...]  # ("x",), ("c", value), ("mul", ...), ("add", ...) or (function, constants..., form)
_DEEPEST = 10
_X: Form = ("x",)


def _constant(value: float) -> Form:
    return ("c", float(value))


def _rounded(form: Form) -> Form:
    """With constants of six digits: people write 0.7071 in many ways."""
    if form[0] == "c":
        return ("c", float(f"{form[1]:.6g}"))
    parts = [_rounded(part) if isinstance(part, tuple) else part for part in form[1:]]
    return (form[0], *(sorted(parts, key=repr) if form[0] in ("mul", "add") else parts))


def _product(*factors: Form) -> Form:
    constant, rest = 1.0, []
    for factor in factors:
        for part in factor[1:] if factor[0] == "mul" else (factor,):
            if part[0] == "c":
                constant *= part[1]
            else:
                rest.append(part)
    return _flat("mul", constant, 1.0, rest)


def _sum(*terms: Form) -> Form:
    constant, rest = 0.0, []
    for term in terms:
        for part in term[1:] if term[0] == "add" else (term,):
            if part[0] == "c":
                constant += part[1]
            else:
                rest.append(part)
    return _flat("add", constant, 0.0, rest)


def _flat(kind: str, constant: float, neutral: float, rest: list[Form]) -> Form:
    first = [] if constant == neutral else [_constant(constant)]
    parts = [*first, *sorted(rest, key=repr)]
    if not parts:
        return _constant(neutral)
    return parts[0] if len(parts) == 1 else (kind, *parts)


def _negated(form: Form) -> Form:
    return _product(_constant(-1), form)


def _inverse(form: Form) -> Form:
    if form[0] == "c":
        return _constant(1 / form[1])
    return ("inverse", form)


def _power(base: Form, exponent: Form) -> Form:
    if exponent not in (_constant(2), _constant(3)):
        raise NoMatch
    return _product(*[base] * int(exponent[1]))


def _limited(form: Form, low: float, high: float) -> Form:
    return ("clamp", float(low), float(high), form)


def _clamped(form: Form, min: Any = -math.inf, max: Any = math.inf) -> Form:
    return _limited(form, *(_value(v) if isinstance(v, tuple) else v for v in (min, max)))


def _value(form: Form) -> float:
    if form[0] != "c":
        raise NoMatch
    return form[1]


def _hardtanh(form: Form, min_val: Any = -1.0, max_val: Any = 1.0) -> Form:
    return _clamped(form, min_val, max_val)


def _hardsigmoid(form: Form) -> Form:
    return _product(_constant(1 / 6), _limited(_sum(form, _constant(3)), 0, 6))


def _sigmoid(form: Form) -> Form:
    return ("sigmoid", form)


def _softplus(form: Form) -> Form:
    return ("softplus", form)


def _of(name: str) -> Callable[[Form], Form]:
    return lambda form: (name, form)


_ARITHMETIC: dict[Any, Callable[..., Form]] = {
    **dict.fromkeys((operator.mul, torch.mul, "mul"), _product),
    **dict.fromkeys((operator.add, torch.add, "add"), _sum),
    **dict.fromkeys((operator.truediv, torch.div, "div"), lambda a, b: _product(a, _inverse(b))),
    **dict.fromkeys((operator.sub, torch.sub, "sub"), lambda a, b: _sum(a, _negated(b))),
    **dict.fromkeys((operator.neg, torch.neg, "neg"), _negated),
    **dict.fromkeys((operator.pow, torch.pow, "pow"), _power),
    **dict.fromkeys((torch.square, "square"), lambda a: _product(a, a)),
    **dict.fromkeys((torch.reciprocal, "reciprocal"), _inverse),
    **dict.fromkeys((torch.sigmoid, F.sigmoid, "sigmoid"), _sigmoid),
    **dict.fromkeys((torch.tanh, F.tanh, "tanh"), _of("tanh")),
    **dict.fromkeys((torch.erf, "erf"), _of("erf")),
    **dict.fromkeys((torch.exp, "exp"), _of("exp")),
    **dict.fromkeys((torch.clamp, torch.clip, "clamp", "clip"), _clamped),
    **dict.fromkeys((torch.clamp_min, "clamp_min"), lambda a, min: _clamped(a, min)),
    F.relu6: lambda a: _limited(a, 0, 6),
    F.hardtanh: _hardtanh,
    F.hardsigmoid: _hardsigmoid,
    F.softplus: _softplus,
}


def _forms() -> dict[Form, str]:
    half, one = _constant(0.5), _constant(1)
    erf = ("erf", _product(_constant(math.sqrt(0.5)), _X))
    cube = _product(_constant(0.044715), _X, _X, _X)
    root = _constant(math.sqrt(2 / math.pi))
    # With the root multiplied in, and not.
    inner = [_product(root, _sum(_X, cube)), _sum(_product(root, _X), _product(root, cube))]
    tanh = [("tanh", form) for form in inner]
    logistic = _inverse(_sum(one, ("exp", _negated(_X))))
    return {
        _product(half, _X, _sum(one, erf)): "gelu",
        _product(_X, _sum(half, _product(half, erf))): "gelu",
        **{_product(half, _X, _sum(one, form)): "gelu_tanh" for form in tanh},
        **{_product(_X, _sum(half, _product(half, form))): "gelu_tanh" for form in tanh},
        _product(_X, logistic): "swish",
        _product(_X, _sigmoid(_X)): "swish",
        logistic: "sigmoid",
        _product(_X, _hardsigmoid(_X)): "hardswish",
        _hardsigmoid(_X): "hardsigmoid",
        _product(_X, ("tanh", _softplus(_X))): "mish",
    }


_FORMS = {_rounded(form): name for form, name in _forms().items()}


def read(node: fx.Node) -> tuple[str, fx.Node, tuple[fx.Node, ...]] | None:
    """The activation that a node ends, its input and the nodes before it; None where it is none.

    The nodes in between have no other readers.
    """
    if not _is_arithmetic(node):
        return None
    for x in _sources(node):
        inner: dict[fx.Node, None] = {}
        try:
            name = _FORMS.get(_rounded(_form(node, x, inner, 0)))
        except (NoMatch, TypeError, ZeroDivisionError):
            continue
        own = {*inner, node}
        if name is not None and all(set(each.users) <= own for each in inner):
            return name, x, tuple(reversed(inner))
    return None


def _is_arithmetic(node: Any) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.op in ("call_function", "call_method")
        and node.target in _ARITHMETIC
    )


def _sources(node: fx.Node) -> list[fx.Node]:
    """The nodes that the expression may be a function of, nearest first."""
    found, level = {}, [node]
    for _ in range(_DEEPEST):
        level = [inner for each in level if _is_arithmetic(each) for inner in each.all_input_nodes]
        found |= dict.fromkeys(level)
    return list(found)


def _form(value: Any, x: fx.Node, inner: dict[fx.Node, None], depth: int) -> Form:
    """Adds the nodes below `value` to `inner`, those that others read last."""
    if value is x:
        return _X
    if type(value) in (int, float):
        return _constant(value)
    if not _is_arithmetic(value) or depth > _DEEPEST or value.kwargs.get("inplace"):
        raise NoMatch
    args = [_form(arg, x, inner, depth + 1) for arg in value.args]
    kwargs = {
        name: _form(arg, x, inner, depth + 1) if isinstance(arg, fx.Node) else arg
        for name, arg in value.kwargs.items()
        if name != "inplace"
    }
    form = _ARITHMETIC[value.target](*args, **kwargs)
    if depth > 0:
        inner.pop(value, None)
        inner[value] = None
    return form
