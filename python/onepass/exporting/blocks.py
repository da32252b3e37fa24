"""The blocks of an exported file: the operators that compute each chain of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from onepass._match import Chain
from onepass.exporting import block_code
from onepass.exporting.chains import Found, Fused, read
from onepass.exporting.plans import BACKWARD, FORWARD, STATISTICS, Operator, Planner, Problem

# What a convolution of f32 tensors is planned for, by --numerics: the name in the file, and the plan's words.
_MODES = {
    "pytorch": {"tf32": "tf32", "tf32_away": "tf32_away", "near_f32": "near_f32", "f32": "f32"},
    "strict": {"f32": "f32 strict"},
    "fast": {"tf32": "tf32 fast"},
}
_WORDS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
TRAIN, BACKWARD_SUFFIX = "_train", "_backward"  # a training step's operators, behind the block's name


@dataclasses.dataclass
class Block:
    """A chain of the model with its operators."""

    name: str
    found: Found
    whole: dict[str, Operator]  # with the convolution, by mode
    whole_train: dict[str, tuple[Operator, Operator]]  # forward and backward of the same
    tail: Operator | None  # what follows PyTorch's convolution, or a block without one
    train: tuple[Operator, Operator] | None
    stages: str  # the original's code of the whole chain, as a function's parameters and body
    tail_stages: str  # of what follows the convolution
    convolution: str  # of the convolution alone; "" where there is no choice of precision

    @property
    def tail_name(self) -> str:
        """What the file calls the part after PyTorch's convolution; a block without one is its own."""
        return f"{self.name}_tail" if self.found.description.conv is not None else self.name

    @property
    def whole_forwards(self) -> list[Operator]:
        """The forward operators that include the convolution."""
        return [*self.whole.values(), *(forward for forward, _ in self.whole_train.values())]

    @property
    def tail_forwards(self) -> list[Operator]:
        """The forward operators of what follows PyTorch's convolution."""
        return [*([self.tail] if self.tail else []), *(self.train or ())[:1]]

    @property
    def operators(self) -> list[Operator]:
        """All of them."""
        tail = [self.tail] if self.tail else []
        trained = [operator for pair in self.whole_train.values() for operator in pair]
        return [*self.whole.values(), *trained, *tail, *(self.train or ())]


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asked for."""

    path: str
    text: str  # of the original file
    architecture: str
    train: bool
    numerics: str
    command: str


class Blocks:
    """Plans blocks for chains; chains with equal problems and equal code share one block."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.planner = Planner(request.architecture)
        self.by_problem: dict[Any, Block] = {}
        self.left_out: dict[str, str] = {}  # chains without a kernel, and why

    def block(self, chain: Chain, fused: Fused, replaced: dict[fx.Node, fx.Node]) -> Block | None:
        found = read(chain, fused)
        given = not fused.path and chain.externals[0].op == "placeholder"  # whose gradient is rarely wanted
        text = " | ".join(stage.text for stage in chain.written)
        if found is None or found.dtype not in _WORDS:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _WORDS)
            kind = f"its type is {found.dtype}" if found else "its tensors have other shapes or mixed types"
            self.left_out[text] = f"{kind}, kernels take the block language's in {known}"
            return None
        root = fused.rewriter.module
        is_conv = found.description.conv is not None
        codes = (
            block_code.stages_text(chain, found, root, replaced, tail=False),
            block_code.stages_text(chain, found, root, replaced, tail=True) if is_conv and found.tail else "",
            block_code.convolution_text(chain, found, root)
            if is_conv and found.dtype == torch.float32
            else "",
        )
        key = (found.block, found.sizes, found.dtype, found.layout, found.parameters, given, codes)
        if key not in self.by_problem:
            block = self._plan(found, f"block_{len(self.by_problem) + 1}", given, codes)
            if not block.operators:
                self.left_out[text] = "no kernel is predicted to be faster than PyTorch's"
                return None
            self.by_problem[key] = block
        return dataclasses.replace(self.by_problem[key], found=found)

    def modes(self, dtype: torch.dtype) -> dict[str, str]:
        """What the file calls the precisions of a convolution of this type, and the words of their plans."""
        return _MODES[self.request.numerics] if dtype == torch.float32 else {"": self._words(dtype)}

    def _words(self, dtype: torch.dtype) -> str:
        """The words of the plan of a block without a convolution."""
        return _WORDS[dtype] + (" strict" if self.request.numerics == "strict" else "")

    def _plan(self, found: Found, name: str, given: bool, codes: tuple[str, str, str]) -> Block:
        description, modes = found.description, self.modes(found.dtype)
        whole: dict[str, Operator] = {}
        whole_train: dict[str, tuple[Operator, Operator]] = {}
        if description.conv is not None:
            for mode, words in modes.items():
                problem = _problem(found, description.text, words, whole=True)
                own = f"{name}_{mode}" if mode else name
                if self.planner.is_worth_fusing(problem):
                    whole[mode] = self.planner.operator(own, FORWARD, problem)
                problem = dataclasses.replace(problem, wants_input=not given)
                if self.request.train and self.planner.is_worth_training(problem):
                    whole_train[mode] = self._pair(own, problem)
            _share(whole, lambda operator: (operator,))
            _share(whole_train, lambda pair: pair)
        text = description.tail if description.conv is not None else description.text
        if not text or (description.conv is not None and not found.tail):
            return Block(name, found, whole, whole_train, None, None, *codes)
        suffix = "_tail" if description.conv is not None else ""
        problem = _problem(found, text, self._words(found.dtype), whole=False)
        tail = train = None
        # PyTorch's convolution may round as no kernel here does.
        if len(whole) < len(modes) or len(modes) > 1:
            tail = self.planner.operator(name + suffix, FORWARD, problem)
        if self.request.train:
            train = self._pair(name + suffix, problem)
        return Block(name, found, whole, whole_train, tail, train, *codes)

    def _pair(self, name: str, problem: Problem) -> tuple[Operator, Operator]:
        """A training step's two operators."""
        forward = self.planner.operator(name + TRAIN, STATISTICS, problem)
        return forward, self.planner.operator(name + BACKWARD_SUFFIX, BACKWARD, problem)


def _problem(found: Found, block: str, mode: str, whole: bool) -> Problem:
    description = found.description
    sizes = found.sizes
    count = 0 if whole else description.conv_parameters
    shape = sizes if whole else tuple(description.conv_output_shape(sizes))
    norm = description.norm
    channels = description.conv_output_shape(sizes)[1]
    return Problem(
        block,
        shape,
        mode,
        found.layout,
        tuple(description.output_shape(sizes)),
        found.parameters[count:],
        norm.group_count(channels) if norm is not None else None,
    )


def _share(found: dict[str, Any], operators: Callable[[Any], tuple[Operator, ...]]) -> None:
    """Precisions whose plans are the same use the operators of the last one."""
    modes = list(found)
    for mode in modes[:-1]:
        for later in reversed(modes[modes.index(mode) + 1 :]):
            pairs = zip(operators(found[mode]), operators(found[later]), strict=True)
            if all(a.kernels == b.kernels and a.plan["steps"] == b.plan["steps"] for a, b in pairs):
                found[mode] = found[later]
                break
