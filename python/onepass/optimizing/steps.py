"""One step of work, a forward pass or a training step, and what came out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onepass.optimizing.model_file import Arguments
from onepass.optimizing.variants import Variant


class Step:
    """A forward pass, or a training step: forward and backward with all gradients, the inputs' too."""

    def __init__(self, train: bool) -> None:
        self.train = train
        self.name = "training step" if train else "forward"

    def run(self, variant: Variant, inputs: Arguments, directions: Sequence[Tensor]) -> list[Tensor]:
        """The output tensors; `directions` are the gradients that a loss would give for them."""
        with variant.settings():
            return self._run(variant, inputs, directions)

    def _run(self, variant: Variant, inputs: Arguments, directions: Sequence[Tensor]) -> list[Tensor]:
        if not self.train:
            with torch.no_grad():
                return floating(inputs.call(variant.call))
        self.clear(variant, inputs)
        outputs = floating(inputs.call(variant.call))
        differentiable = [(y, d) for y, d in zip(outputs, directions, strict=True) if y.requires_grad]
        torch.autograd.backward(*zip(*differentiable, strict=True))
        return outputs

    def clear(self, variant: Variant, inputs: Arguments) -> None:
        """Frees the gradients of the last step."""
        for tensor in (*variant.model.parameters(), *inputs.tensors().values()):
            tensor.grad = None

    def results(
        self, variant: Variant, inputs: Arguments, outputs: Sequence[Tensor]
    ) -> dict[tuple[str, bool], Tensor]:
        """What the step computed: (name, whether it is a gradient) -> tensor."""
        names = ["output"] if len(outputs) == 1 else [f"output {i}" for i in range(len(outputs))]
        found = {(name, False): output.detach() for name, output in zip(names, outputs, strict=True)}
        if self.train:
            tensors = [(f"input {name}", x) for name, x in inputs.tensors().items()]
            for name, tensor in (*tensors, *variant.model.named_parameters()):
                if tensor.grad is not None:
                    found[f"gradient of {name}", True] = tensor.grad
        return found


def floating(result: Any) -> list[Tensor]:
    """The floating-point tensors of whatever a model returns, in order."""
    leaves = pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
