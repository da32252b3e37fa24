"""What was compiled, for report and explain: the plans of the compilations of this process."""

from __future__ import annotations

import collections
import dataclasses
import weakref
from typing import Any

import torch
from torch import Tensor, fx

from onepass.compiling.policy import Plan

_MOST = 512  # compilations that are remembered


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A graph that was compiled: its plan, the code it came from and the parameters it reads."""

    plan: Plan
    code: Any
    parameters: tuple[weakref.ref[Tensor], ...]

    def is_of(self, model: Any) -> bool:
        """Whether the graph is of this model or function: its code is, or it reads its parameters."""
        if isinstance(model, torch.nn.Module):
            own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
            read = [tensor for ref in self.parameters if (tensor := ref()) is not None]
            if own:
                return any(id(tensor) in own for tensor in read)
            model = model.forward
        return self.code is not None and getattr(model, "__code__", None) is self.code


_compilations: collections.deque[Compilation] = collections.deque(maxlen=_MOST)


def remember(module: fx.GraphModule, plan: Plan) -> None:
    """Keeps the plan of the graph that Dynamo has just handed over."""
    arguments = [node.meta.get("grapharg") for node in module.graph.nodes if node.op == "placeholder"]
    tensors = [argument.example for argument in arguments if argument is not None]
    refs = tuple(weakref.ref(tensor) for tensor in tensors if isinstance(tensor, Tensor))
    _compilations.append(Compilation(plan, _traced_code(), refs))


def _traced_code() -> Any:
    """The code of the function that Dynamo traces now."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output.root_tx.f_code
    except AttributeError:  # called by hand, outside of Dynamo
        return None


def compilations_of(model: Any) -> list[Compilation]:
    """Of the model or function, oldest first."""
    return [compilation for compilation in _compilations if compilation.is_of(model)]
