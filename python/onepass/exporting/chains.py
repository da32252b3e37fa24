"""What of a model is exported: the chains of its modules' forwards, with the tensors of an example call."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from onepass._description import Description, describe
from onepass._match import Chain
from onepass._rewrite import fit
from onepass._rewriter import Rewriter
from onepass._stage import Affine, Attribute, Operand
from onepass._trace import Pattern, Trace, is_variadic, parameters_of
from onepass.exporting.plans import BATCH
from onepass.fuse import Session
from onepass.optimizing.model_file import Arguments, ModelFile, as_arguments


@dataclasses.dataclass
class Variant:
    """A forward as it is called in the example, in one mode."""

    training: bool
    pattern: Pattern
    traced: Trace
    chains: list[Chain]


@dataclasses.dataclass
class Fused:
    """A module in whose forward chains are fused."""

    path: str
    rewriter: Rewriter
    variants: list[Variant]
    values: dict[fx.Node, Any]  # of the nodes of all variants, in the example
    samples: int  # of the inputs for each one of the example
    left: list[str]  # paths of batch norms that are not exported


@dataclasses.dataclass(frozen=True)
class Found:
    """A chain as the block language and the file's code have it."""

    block: str
    description: Description
    sizes: tuple[int, ...]  # of the input
    dtype: torch.dtype
    layout: str
    parameters: tuple[tuple[int, ...], ...]  # sizes; BATCH where the first is the batch
    expressions: tuple[Any, ...]  # of the parameters: Attribute, Affine, or (node, suffix of its expression)
    trailing: int  # dimensions of one element that the result keeps
    shapes: dict[fx.Node, tuple[int, ...]]  # of the operands that are nodes, in the example
    stages: int  # of the original

    @property
    def tail(self) -> bool:
        """Whether more than one stage follows the convolution, so that one kernel for them gains."""
        return self.stages > 2

    @property
    def has_batch_norm(self) -> bool:
        """Whether some parameters are scales and shifts of batch norms."""
        return any(isinstance(expression, Affine) for expression in self.expressions)


class _Finder(Rewriter):
    """Collects chains where fusing would rewrite."""

    gives_sizes = False  # an exported forward has no code for it

    def _variant(self, traced: Trace, chains: list[Chain], pattern: Pattern) -> Variant:
        return Variant(traced.training, pattern, traced, chains)


def find(file: ModelFile, model: nn.Module, conv: str) -> tuple[list[Fused], dict[str, str]]:
    """The fused modules, outer ones first; and why others are not."""
    reasons: dict[str, str] = {}
    session = Session(model, conv, lambda name, module: True, reasons, _Finder)
    rewriters = session.rewriters()
    fused: list[Fused] = []
    if rewriters:
        calls, samples = _example_calls(file, model, [rewriter.name for rewriter in rewriters])
        inlined: set[str] = set()  # whose code is part of an outer forward
        for rewriter in rewriters:
            name = rewriter.name
            if name in inlined:
                continue
            shown = name or f"({type(model).__name__})"
            if name not in calls:
                reasons[shown] = "the inputs of get_inputs() do not lead to a call of it"
            elif found := _fused(rewriter, *calls[name], samples):
                fused.append(found)
                reasons |= {".".join(p for p in (name, path) if p): _OF_16_BITS for path in found.left}
                inlined |= {".".join(p for p in (name, path) if p) for path in rewriter.inlined}
            else:
                reasons[shown] = _why_not_so(rewriter, calls[name][1])
    replaced = set().union(*(rewriter.replaced for rewriter in rewriters))
    return fused, reasons | _unfused(session, replaced)


def _unfused(session: Session, replaced: set[nn.Module]) -> dict[str, str]:
    """Why norms run by themselves in all modes."""
    names = {m: name for name, m in session.model.named_modules() if m not in replaced}
    return {names[module]: reason for module, reason in session.unfused.items() if module in names}


# --- The example call -------------------------------------------------------------------------------

Calls = dict[str, tuple[nn.Module, dict[str, Any]]]


def _example_calls(file: ModelFile, model: nn.Module, paths: Sequence[str]) -> tuple[Calls, int]:
    """The arguments of each module's first call, and how many samples of the inputs are one of the call.

    A forward pass without memory, on meta tensors; of one sample where the model looks at values.
    """
    try:
        return _meta_calls(file, model, paths), 1
    except (Exception, SystemExit):
        inputs = file.inputs(torch.device("cpu"), 0, None)
        batch = next((x.shape[0] for x in inputs.tensors().values() if x.dim() > 0), 1)
        inputs = inputs.map(lambda x: x[:1].clone() if x.dim() > 0 and x.shape[0] == batch else x)
        return file.run(lambda: _calls(copy.deepcopy(model).eval(), inputs, paths)), batch


def _meta_calls(file: ModelFile, model: nn.Module, paths: Sequence[str]) -> Calls:
    with torch.device("meta"):
        inputs = as_arguments(file.module.get_inputs()).map(lambda x: x.to("meta"))
    return _calls(copy.deepcopy(model).to("meta").eval(), inputs, paths)


def _calls(model: nn.Module, inputs: Arguments, paths: Sequence[str]) -> Calls:
    calls: Calls = {}

    def note(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(path, (module, _bound(module, args, kwargs)))

        return hook

    handles = [model.get_submodule(p).register_forward_pre_hook(note(p), with_kwargs=True) for p in paths]
    with torch.no_grad():
        inputs.call(model)
    for handle in handles:
        handle.remove()
    return calls


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the forward's parameters."""
    named = [parameter for parameter in parameters_of(module) if not is_variadic(parameter)]
    bound = {p.name: p.default for p in named if p.default is not p.empty}
    return bound | {p.name: value for p, value in zip(named, args)} | kwargs


def _fused(rewriter: Rewriter, module: nn.Module, arguments: dict[str, Any], samples: int) -> Fused | None:
    variants = [v for v in rewriter.variants if _is_called_so(v.pattern, arguments)]
    chosen: dict[bool, Variant] = {}
    for variant in variants:
        chosen.setdefault(variant.training, variant)
    values: dict[fx.Node, Any] = {}
    left: list[str] = []
    for variant in chosen.values():
        values |= _run(variant, module, arguments)
        variant.chains = [part for chain in variant.chains for part in _of_one_type(chain, values, left)]
    return Fused(rewriter.name, rewriter, list(chosen.values()), values, samples, left) if chosen else None


_OF_16_BITS = "its scale and shift are fp32, and exported kernels of 16 bits have one type"


def _of_one_type(chain: Chain, values: dict[fx.Node, Any], left: list[str]) -> Iterator[Chain]:
    """The chain, or the parts of one of 16 bits between its batch norms, which are `left`."""
    input = values.get(chain.stages[0].main)
    if not isinstance(input, Tensor) or input.dtype == torch.float32:
        yield chain
        return
    for is_affine, stages in itertools.groupby(chain.stages, lambda stage: stage.kind == "affine"):
        part = Chain(list(stages))
        if is_affine:
            left += part.modules
        elif len(part.written) > 1:
            yield part


def _is_called_so(pattern: Pattern, arguments: dict[str, Any]) -> bool:
    constants = dict(pattern.constants)
    return all(
        (name in constants and type(constants[name]) is type(value) and constants[name] == value)
        if not isinstance(value, Tensor)
        else name not in constants
        for name, value in arguments.items()
    )


def _why_not_so(rewriter: Rewriter, given: dict[str, Any]) -> str:
    """Why no trace of the module is of such a call."""
    for name, value in given.items():
        if isinstance(value, (dict, list, tuple)):
            return f"{name} is a {type(value).__name__}, must be a tensor or a constant"
    shown = ", ".join(f"{n}={v!r}" for n, v in given.items() if not isinstance(v, Tensor))
    return f"it is called as it was not traced: {shown}" if shown else "it is called as it was not traced"


class _Values(fx.Interpreter):
    """Keeps what each node gives."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(fx.GraphModule(module, graph), garbage_collect_values=False)
        self.nodes = dict(zip(self.module.graph.nodes, graph.nodes, strict=True))
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.values[self.nodes[n]] = result
        return result


def _run(variant: Variant, module: nn.Module, arguments: dict[str, Any]) -> dict[fx.Node, Any]:
    with _mode(module, variant.training), torch.no_grad():
        interpreter = _Values(module, variant.traced.graph)
        given = [
            arguments[str(node.target)] for node in variant.traced.graph.nodes if node.op == "placeholder"
        ]
        interpreter.run(*given)
    return interpreter.values


@contextlib.contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    before = module.training
    module.train(training)
    try:
        yield
    finally:
        module.train(before)


# --- Chains as blocks -------------------------------------------------------------------------------


def read(chain: Chain, fused: Fused) -> Found | None:
    """The chain with the example's tensors; None where the kernels have no such block."""
    module, values = fused.rewriter.module, fused.values
    input = values[chain.externals[0]]
    if not isinstance(input, Tensor) or input.dim() < 2 or input.numel() == 0:
        return None
    texts = [stage.text for stage in chain.written]
    operands = iter([i for i, stage in enumerate(chain.written) if stage.kind == "operand"])
    conv = describe(texts[0]).conv if chain.stages[0].kind == "conv" else None
    shape = tuple(input.shape)
    if conv is not None:
        spatial = (conv.output_size(d, size) for d, size in enumerate(shape[2:]))
        shape = (shape[0], conv.out_channels, *spatial)
    sizes, expressions = [], []
    for parameter in (p for stage in chain.stages for p in stage.parameters):
        expression: Any = parameter
        if isinstance(parameter, Attribute):
            tensor = getattr(module.get_submodule(parameter.module), parameter.name)
        elif isinstance(parameter, Operand):
            text, tensor = fit(parameter.op, values[parameter.node], shape)
            if text is None:
                return None
            texts[next(operands)] = text
            expression = (parameter.node, _suffix(values[parameter.node], tensor))
        elif isinstance(parameter, Affine):
            tensor = input.new_empty(shape[1], dtype=torch.float32)
        else:
            tensor, expression = values[parameter], (parameter, "")
        if tensor.dtype != input.dtype:
            return None
        sizes.append(tuple(tensor.shape))
        expressions.append(expression)
    block = " | ".join(texts)
    description = describe(block)
    if _has_slabs_of_one(description, shape):
        return None
    per_sample = [_has_batch(description, i) for i in range(len(sizes))]
    sizes = [(BATCH, *s[1:]) if has else s for s, has in zip(sizes, per_sample, strict=True)]
    trailing = input.dim() - 2 if any(stage.keep_dimensions for stage in chain.stages) else 0
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
    is_last = last is not None and not input.is_contiguous() and input.is_contiguous(memory_format=last)
    layout = "nhwc" if is_last else "nchw"
    batch = input.shape[0] * fused.samples
    return Found(
        block,
        description,
        (batch, *input.shape[1:]),
        input.dtype,
        layout,
        tuple(sizes),
        tuple(expressions),
        trailing,
        {e[0]: tuple(values[e[0]].shape) for e in expressions if not isinstance(e, (Attribute, Affine))},
        len(chain.written),
    )


def _has_slabs_of_one(description: Description, shape: tuple[int, ...]) -> bool:
    """Whether a norm's slab is one element: PyTorch's norm refuses those of a single sample."""
    if description.norm is None:
        return False
    return math.prod(shape[1:]) == description.norm.group_count(shape[1])


def _suffix(operand: Tensor, fitted: Tensor) -> str:
    if fitted.shape == operand.shape:
        return ""
    return ".flatten(1)" if fitted.dim() == 2 else ".flatten()"


def _has_batch(description: Description, index: int) -> bool:
    stage = description.stages[description.parameters[index].stage]
    is_operand = description.parameters[index].role == "operand"
    return is_operand and (
        getattr(stage, "argument", "") == "tensor" or getattr(stage, "per", "") == "sample"
    )
