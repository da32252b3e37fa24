"""Watching the Python code of a traced forward, in its thread alone.

A profile function sees each call before it happens. Globals that user's code reads become facts. A call that
a rewritten forward would lose stops the trace: prints, random numbers, custom gradients. A mode of torch
functions sees what is done with real tensors.
"""

from __future__ import annotations

import contextlib
import datetime
import dis
import functools
import itertools
import logging
import os
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from onepass._own_code import LIBRARIES, is_own_code
from onepass._refused import Refused
from onepass._shadow import Recorder, is_shadow, shadow_of

# What a forward may ask of PyTorch, and the answer may be another at the next call.
_AMBIENT = {
    torch.is_grad_enabled: "whether gradients are enabled",
    torch.is_inference_mode_enabled: "whether inference mode is on",
    torch.is_autocast_enabled: "whether autocast is on",
    torch.is_autocast_cpu_enabled: "whether autocast is on",
    torch.get_default_dtype: "for the default type",
    torch.get_num_threads: "for the number of threads",
}
# Python's modules whose functions depend on more than their arguments, or do more than return.
_SURROUNDINGS = {
    "_datetime", "_io", "_random", "_socket", "_thread", "_threading_local", "datetime", "io", "nt", "os",
    "posix", "queue", "random", "signal", "socket", "subprocess", "sys", "threading", "time",
}  # fmt: skip
_EFFECTS = {print: "prints", input: "reads the console", open: "opens a file", warnings.warn: "warns"}
_RANDOM = (
    "rand", "randn", "randint", "randperm", "bernoulli", "normal", "multinomial", "poisson", "rand_like",
    "randn_like", "randint_like", "dropout", "feature_dropout", "alpha_dropout", "manual_seed", "seed",
)  # fmt: skip
_OPERATIONS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_WRITES = {"__setitem__", "__set__", *(f"__i{operation}__" for operation in _OPERATIONS)}
_PROPERTIES = ("dtype", "device", "shape", "requires_grad", "is_cuda", "is_cpu", "ndim", "layout")
_CALLS = {nn.Module.__call__.__code__, nn.Module._call_impl.__code__}
_COMPILED = f"{LIBRARIES[1]}_dynamo/"
_CHECKPOINT = torch.utils.checkpoint.__file__
_LOGGING = logging.__file__


class Observer:
    """Watches what traced code calls."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Sees what runs inside, in this thread; the profile function there was comes back afterwards."""
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            with _RealTensors(self.recorder):
                sys.setprofile(self._see)
                try:
                    yield
                finally:
                    sys.setprofile(None)
        finally:
            _set_profile(before)

    def resume(self) -> None:
        """After an exception of its own, which ends the profiling."""
        sys.setprofile(self._see)

    def _see(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self._call(frame)
        elif event == "c_call":
            self._c_call(frame, arg)

    def _call(self, frame: types.FrameType) -> None:
        code = frame.f_code
        kind = _kind(code)
        if kind == _OWN:
            return
        if kind == _SURROUNDING:
            if frame.f_back is not None and not is_own_code(frame.f_back.f_code):
                raise Refused(f"its forward calls {frame.f_globals.get('__name__')}.{code.co_name}")
            return
        if kind == _CALL_OF_MODULE:
            if not is_shadow(frame.f_locals.get("self")):
                raise Refused("its forward calls a module that is not its child")
            return
        if kind == _FORWARD_OF_MODULE:
            if is_shadow(module := frame.f_locals.get("self")):
                self._method(shadow_of(module).module, code)
            return
        if kind is not _USERS:
            raise Refused(kind)
        found = globals_of(code)
        if found.writes:
            raise Refused(f"its forward sets the global {found.writes}")
        if found.catches:
            raise Refused("its forward catches exceptions")
        for chain in found.reads:
            self._read(frame.f_globals, chain)
        names = (*code.co_varnames[: code.co_argcount][:1], *code.co_freevars)
        for value in (frame.f_locals.get(name) for name in names):
            if isinstance(value, nn.Module):
                if not is_shadow(value):
                    raise Refused("its forward runs code of a module that is not its child")
                self._method(shadow_of(value).module, code)

    def _method(self, module: nn.Module, code: types.CodeType) -> None:
        """Notes where a method that runs is defined."""
        for cls in type(module).__mro__:
            value = vars(cls).get(code.co_name)
            if value is not None and _code_of(value) is code:
                self.recorder.note_outside(cls, code.co_name, value)

    def _read(self, space: Any, chain: tuple[str, ...]) -> None:
        """Notes a global `a.b.c`: the names as far as they lead through modules and classes."""
        for name in chain:
            names = space if isinstance(space, dict) else vars(space)
            if name not in names:
                return
            self.recorder.note_outside(space, name, names[name])
            space = names[name]
            if not isinstance(space, types.ModuleType | type):
                return

    def _c_call(self, frame: types.FrameType, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            if function.__name__ == "apply":
                raise Refused(f"its forward calls {owner.__name__}, whose gradient is its own")
            return
        if is_own_code(frame.f_code):
            return
        try:
            what = _AMBIENT.get(function)
        except TypeError:
            return
        if what is not None:
            raise Refused(f"its forward asks {what}")
        if function in _EFFECTS:
            raise Refused(f"its forward {_EFFECTS[function]}")
        if isinstance(owner, random.Random):
            raise Refused(RANDOM)
        place = owner.__name__ if isinstance(owner, types.ModuleType) else type(owner).__module__
        place = getattr(owner, "__module__", place) if isinstance(owner, type) else place
        if place.partition(".")[0] in _SURROUNDINGS:
            raise Refused(f"its forward calls {place}.{function.__name__}")


_OWN, _USERS, _CALL_OF_MODULE, _FORWARD_OF_MODULE, _SURROUNDING = "own", "users", "call", "forward", "around"
_AROUND = {module.__file__ for module in (threading, os, random, datetime)}


@functools.lru_cache(maxsize=8192)
def _kind(code: types.CodeType) -> str:
    """What the call of a function means: nothing of its own, something to note, or why the trace ends."""
    if not is_own_code(code):
        return _USERS
    if code in _CALLS:
        return _CALL_OF_MODULE
    name = code.co_filename
    if name == _CHECKPOINT and code.co_name == "checkpoint":
        return "its forward checkpoints activations"
    if name == _LOGGING and code.co_name in ("_log", "handle"):
        return "its forward logs"
    if name == contextlib.__file__ and code is contextlib.suppress.__exit__.__code__:
        return "its forward catches exceptions"
    if name.startswith(_COMPILED) and code.co_name == "compile_wrapper":
        return "its forward calls compiled code"
    if name in _AROUND:
        return _SURROUNDING
    return _FORWARD_OF_MODULE if code.co_name in ("forward", "_conv_forward") else _OWN


RANDOM = "its forward draws random numbers that do not depend on its input"


def _set_profile(before: Any) -> None:
    if before is not None and not callable(before):
        before.enable()  # a profiler written in C
    else:
        sys.setprofile(before)


def _code_of(value: Any) -> types.CodeType | None:
    """The code of a method, also of a property or a decorated one."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    while hasattr(value, "__wrapped__") and not hasattr(value, "__code__"):
        value = value.__wrapped__
    return getattr(value, "__code__", None)


def _catches(code: types.CodeType) -> bool:
    """Whether code has an `except`: what fails in a trace only would be caught."""
    names = [i.opname for i in dis.get_instructions(code) if i.opname not in ("CACHE", "NOP")]
    bare = any(pair == ("PUSH_EXC_INFO", "POP_TOP") for pair in itertools.pairwise(names))
    return bare or "CHECK_EXC_MATCH" in names or "JUMP_IF_NOT_EXC_MATCH" in names


class _Globals:
    """The global names of a code object: chains `a.b.c` that it reads, and one that it writes."""

    def __init__(self, code: types.CodeType) -> None:
        self.writes: str | None = None
        self.catches = _catches(code)
        self.reads: list[tuple[str, ...]] = []
        chain: tuple[str, ...] = ()
        for instruction in dis.get_instructions(code):
            name = instruction.opname
            if name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                self.writes = instruction.argval
            if chain and name in ("LOAD_ATTR", "LOAD_METHOD"):
                chain = (*chain, instruction.argval)
                continue
            if name in ("CACHE", "EXTENDED_ARG"):
                continue
            self._add(chain)
            chain = (instruction.argval,) if name in ("LOAD_GLOBAL", "LOAD_NAME") else ()
        self._add(chain)

    def _add(self, chain: tuple[str, ...]) -> None:
        if chain and chain not in self.reads:
            self.reads.append(chain)


globals_of: Callable[[types.CodeType], _Globals] = functools.lru_cache(maxsize=4096)(_Globals)


class _RealTensors(TorchFunctionMode):
    """What traced code does with tensors that are no stand-ins: nothing may be drawn or written."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, fx.Proxy) for value in _flat((args, kwargs))):
            return func(*args, **kwargs)
        known = self._check(func, args, kwargs)
        result = func(*args, **kwargs)
        is_value = not any(isinstance(value, Tensor) for value in _flat(result))
        if is_value and not known and any(isinstance(value, Tensor) for value in _flat((args, kwargs))):
            raise Refused("its forward reads the values of a tensor")
        return result

    def _check(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Refuses what draws or writes; says whether it asks for a property, which becomes a fact."""
        name = getattr(func, "__name__", "")
        if name in _RANDOM or (name.rstrip("_") in _RANDOM and name.endswith("_")):
            raise Refused(RANDOM)
        writes = (name.endswith("_") and not name.endswith("__")) or name in _WRITES
        if writes or kwargs.get("out") is not None:
            raise Refused("its forward writes a tensor that is not its own")
        if not args or not isinstance(args[0], Tensor):
            return False
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        what = name if name in _PROPERTIES else _METHODS.get(name)
        if what is None:
            return name in ("__hash__", "__repr__", "is_complex", "is_tensor", "stride", "is_contiguous")
        self.recorder.tensor_property(args[0], what)
        return True


_METHODS = {
    "size": "shape",
    "dim": "ndim",
    "numel": "shape",
    "nelement": "shape",
    "is_floating_point": "dtype",
    "__len__": "shape",
}


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    elif type(value) is dict:
        for item in value.values():
            yield from _flat(item)
    else:
        yield value
