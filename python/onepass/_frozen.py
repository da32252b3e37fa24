"""Packed weights that a frozen model keeps: every place that runs a block has its own."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

MOST_PACKINGS = 4  # of a place: more would be most of a model's memory
_MOST_CALLS = 4096
_NO_PARAMETERS = "its weights are no parameters of a module, or a tensor is of a class of its own"
_UNKNOWN = object()
_lock = threading.RLock()
_has_dispatch_modes = torch._C._len_torch_dispatch_stack


@dataclasses.dataclass(eq=False)
class Packed:
    """Weights as one way of packing leaves them."""

    tensor: Tensor
    packing: int  # what plans compare
    stream: int  # that wrote it; 0 on a CPU
    in_graph: bool = False  # a captured graph reads them


class _Seen:
    """A parameter as it was packed."""

    __slots__ = ("__weakref__", "_address", "_parameter", "_storage", "_version", "stepped")

    def __init__(self, tensor: Tensor) -> None:
        self._parameter = weakref.ref(tensor)
        self._version = None if tensor.is_inference() else tensor._version  # those have none
        self._address = tensor.data_ptr()
        # Held weakly, its number is given to no other storage; an address is, after `module.half().float()`.
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self.stepped = False  # by an optimizer: fused ones write without counting a version
        _all_seen.add(self)

    def is_of(self, ids: set[int]) -> bool:
        """Whether the parameter is one of those with these ids."""
        return id(self._parameter()) in ids

    def is_trained(self) -> bool:
        parameter = self._parameter()
        return parameter is not None and parameter.requires_grad

    def holds(self, tensor: Tensor) -> bool:
        if self.stepped or self._parameter() is not tensor or tensor.data_ptr() != self._address:
            return False
        if self._version is not None and tensor._version != self._version:
            return False
        return tensor.untyped_storage()._cdata == self._storage.cdata


_all_seen: weakref.WeakSet[_Seen] = weakref.WeakSet()


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not _all_seen:
        return
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for seen in list(_all_seen):
        if seen.is_of(ids):
            seen.stepped = True


_hooks: list[Any] = []  # the one of all optimizers, once something is packed


class _Kept:
    """What a place keeps of its weights as they were seen. Another takes its place when one of them changes."""

    __slots__ = ("by_call", "by_packing", "seen")

    def __init__(self, seen: Sequence[_Seen] = ()) -> None:
        self.seen = seen
        self.by_call: dict[Any, Packed | None] = {}
        self.by_packing: dict[int, Packed] = {}

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        for seen, tensor in zip(self.seen, parameters):
            if not seen.holds(tensor):
                return False
        return True


class Frozen:
    """What a place keeps: packed weights for each kind of call, until one of its weights changes."""

    __slots__ = ("_kept", "changes", "reasons")

    def __init__(self) -> None:
        self.changes = 0  # of weights that were packed
        self.reasons: dict[str, int] = {}  # why calls packed weights themselves
        self._kept = _Kept()

    def drop(self) -> None:
        """Forgets all packed weights: the next calls pack anew."""
        self._kept = _Kept()

    def expect_change(self) -> None:
        """Before a call that may need gradients: whoever trains a weight changes it, in whatever way."""
        kept = self._kept
        if torch.is_grad_enabled() and any(seen.is_trained() for seen in kept.seen):
            self._changed(kept)

    @property
    def bytes(self) -> int:
        """Of the packed weights."""
        return sum(packed.tensor.nbytes for packed in list(self._kept.by_packing.values()))

    def find(
        self, how: tuple[Any, ...], input: Tensor, parameters: Sequence[Tensor], weights: int
    ) -> Packed | None:
        """The packed weights for a call; None where it has to pack them itself, or packs none.

        `how`: the block and what else chooses its plan. `weights`: so many parameters are the convolution's.
        """
        if _has_dispatch_modes():  # a tracer would keep what is packed as a constant
            return None
        kept = self._kept
        if not kept.holds(parameters):
            if any(type(tensor) is not nn.Parameter for tensor in parameters[:weights]):
                return self._refuse(_NO_PARAMETERS)
            kept = self._changed(kept)
        key = (how, input.shape, input.stride())
        packed = kept.by_call.get(key, _UNKNOWN)
        if packed is _UNKNOWN:
            packed = self._prepare(kept, key, input, parameters, weights)
        if packed is not None and input.is_cuda:
            _hold_for_stream(packed, input, parameters[0])
        return packed

    def _changed(self, kept: _Kept) -> _Kept:
        """Drops what is kept, unless another thread has."""
        with _lock:
            if self._kept is kept:
                self.changes += 1
                self._kept = _Kept()
            return self._kept

    def _prepare(
        self, kept: _Kept, key: tuple[Any, ...], input: Tensor, parameters: Sequence[Tensor], weights: int
    ) -> Packed | None:
        own = parameters[:weights]
        if any(type(tensor) is not nn.Parameter for tensor in own) or type(input) is not Tensor:
            return self._refuse(_NO_PARAMETERS)
        (block, numerics, *_), *_ = key
        arguments = (input, list(parameters), block, numerics)
        packing = torch.ops.onepass.frozen_packing.default(*arguments)
        with _lock:
            if self._kept is not kept or not kept.holds(parameters):
                return None  # changed meanwhile: this call packs, the next one sees it
            if len(kept.by_call) >= _MOST_CALLS:
                kept.by_call.clear()
            found = kept.by_packing.get(packing)
            if packing != 0 and found is None:
                if len(kept.by_packing) >= MOST_PACKINGS:
                    return self._refuse(f"inputs of other sizes have {MOST_PACKINGS} kinds of packed weights")
                if input.is_cuda and _is_capturing():
                    return self._refuse(
                        "a CUDA graph was captured before they were packed: call the model once before"
                    )
                # What is seen is taken before: a change meanwhile is seen by the next call.
                if not kept.seen:
                    kept = _Kept([_Seen(tensor) for tensor in own])
                found = kept.by_packing[packing] = _pack(arguments, packing)
            kept.by_call[key] = found
            self._kept = kept
        return found

    def _refuse(self, reason: str) -> None:
        with _lock:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1


def _pack(arguments: tuple[Any, ...], packing: int) -> Packed:
    input = arguments[0]
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_note_step))
    with torch.no_grad():
        tensor = torch.ops.onepass.frozen_pack.default(*arguments)
    if not input.is_cuda:
        return Packed(tensor, packing, 0)
    stream = torch.cuda.current_stream(input.device)
    stream.synchronize()  # other streams may read it from now on
    return Packed(tensor, packing, stream.cuda_stream)


def _hold_for_stream(packed: Packed, input: Tensor, parameter: Tensor) -> None:
    """Keeps the memory until the kernels that read it have run, whoever drops it."""
    if _is_capturing():
        if not packed.in_graph:
            # The graph's memory: as that of parameters, it has to live while the graph is replayed.
            packed.in_graph = True
            weakref.finalize(parameter, _release, packed).atexit = False
    elif torch._C._cuda_getCurrentRawStream(input.get_device()) != packed.stream:
        packed.tensor.record_stream(torch.cuda.current_stream(input.device))


def _release(_: Packed) -> None:
    """The parameter is gone, and so are the graphs that read what it was packed to."""


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()
