"""Packed weights that a frozen model keeps: every place that runs a block has its own."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

MOST_PACKINGS = 4  # of a place: more would be most of a model's memory
_MOST_CALLS = 4096
_NO_PARAMETERS = "its weights are no parameters of a module, or a tensor is of a class of its own"
_UNKNOWN = object()
_lock = threading.RLock()


@dataclasses.dataclass(eq=False)
class Packed:
    """Weights as one way of packing leaves them."""

    tensor: Tensor
    packing: int  # what plans compare
    in_graph: bool = False  # a captured graph reads them


@dataclasses.dataclass(eq=False)
class _Seen:
    """A parameter as it was packed."""

    parameter: weakref.ref[Tensor]
    version: int | None  # None of inference tensors, which have none
    address: int
    steps: int  # of optimizers

    @classmethod
    def of(cls, tensor: Tensor) -> _Seen:
        key = id(tensor)
        steps = _steps.setdefault(key, 0)
        version = None if tensor.is_inference() else tensor._version
        return cls(weakref.ref(tensor, lambda _: _steps.pop(key, None)), version, tensor.data_ptr(), steps)

    def holds(self, tensor: Tensor) -> bool:
        if self.parameter() is not tensor or tensor.data_ptr() != self.address:
            return False
        if self.version is not None and tensor._version != self.version:
            return False
        return _steps.get(id(tensor)) == self.steps


# Of optimizers, by the id of a parameter that is packed. Fused ones write without counting a version.
_steps: dict[int, int] = {}


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not _steps:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in _steps:
                _steps[id(parameter)] += 1


_hooks: list[Any] = []  # the one of all optimizers, once something is packed


class Frozen:
    """What a place keeps: packed weights for each kind of call, until one of its weights changes."""

    __slots__ = ("_by_call", "_by_packing", "_seen", "changes", "reasons")

    def __init__(self) -> None:
        self.changes = 0  # of weights that were packed
        self.reasons: dict[str, int] = {}  # why calls packed weights themselves
        self.drop()

    def drop(self) -> None:
        """Forgets all packed weights: the next calls pack anew."""
        with _lock:
            self._seen: list[_Seen] = []
            self._by_call: dict[Any, Packed | None] = {}
            self._by_packing: dict[int, Packed] = {}

    def expect_change(self, weights: Sequence[Tensor]) -> None:
        """Before a call that may need gradients: whoever trains a weight changes it, in whatever way."""
        if self._seen and torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
            self._changed()

    @property
    def bytes(self) -> int:
        """Of the packed weights."""
        return sum(packed.tensor.nbytes for packed in list(self._by_packing.values()))

    def find(
        self, how: tuple[Any, ...], input: Tensor, parameters: Sequence[Tensor], weights: int
    ) -> Packed | None:
        """The packed weights for a call; None where it has to pack them itself, or packs none.

        `how`: the block and what else chooses its plan. `weights`: so many parameters are the convolution's.
        """
        for seen, tensor in zip(self._seen, parameters):
            if not seen.holds(tensor):
                if type(tensor) is not nn.Parameter:
                    return self._refuse(_NO_PARAMETERS)
                self._changed()
                break
        key = (how, input.shape, input.stride())
        packed = self._by_call.get(key, _UNKNOWN)
        if packed is _UNKNOWN:
            packed = self._prepare(key, input, parameters, weights)
        if packed is not None and input.is_cuda and not packed.in_graph and _is_capturing():
            # The graph's memory: as that of parameters, it has to live while the graph is replayed.
            packed.in_graph = True
            weakref.finalize(parameters[0], _release, packed).atexit = False
        return packed

    def _changed(self) -> None:
        with _lock:
            self.changes += 1
            self.drop()

    def _prepare(
        self, key: tuple[Any, ...], input: Tensor, parameters: Sequence[Tensor], weights: int
    ) -> Packed | None:
        own = parameters[:weights]
        if any(type(tensor) is not nn.Parameter for tensor in own) or type(input) is not Tensor:
            return self._refuse(_NO_PARAMETERS)
        (block, numerics, *_), *_ = key
        arguments = (input, list(parameters), block, numerics)
        packing = torch.ops.onepass.frozen_packing.default(*arguments)
        with _lock:
            found = self._by_packing.get(packing)
            if len(self._by_call) >= _MOST_CALLS:
                self._by_call.clear()
            if packing != 0 and found is None:
                if len(self._by_packing) >= MOST_PACKINGS:
                    return self._refuse(f"inputs of other sizes have {MOST_PACKINGS} kinds of packed weights")
                if input.is_cuda and _is_capturing():
                    return self._refuse("a graph was captured before: call the model once before the capture")
                # What is seen is taken before: a change meanwhile is seen by the next call.
                self._seen = [_Seen.of(tensor) for tensor in own]
                if not _hooks:
                    _hooks.append(register_optimizer_step_post_hook(_note_step))
                with torch.no_grad():
                    tensor = torch.ops.onepass.frozen_pack.default(*arguments)
                if input.is_cuda:  # other streams may read it from now on
                    torch.cuda.current_stream(input.device).synchronize()
                found = self._by_packing[packing] = Packed(tensor, packing)
            self._by_call[key] = found
        return found

    def _refuse(self, reason: str) -> None:
        with _lock:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1


def _release(_: Packed) -> None:
    """The parameter is gone, and so are the graphs that read what it was packed to."""


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()
