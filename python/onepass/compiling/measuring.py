"""Times of parts on the GPU that is there: measured once, then remembered on disk for this GPU."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from onepass import _eager, _library
from onepass._conv_gradients import format_named
from onepass._description import describe
from onepass.compiling import building, parts
from onepass.compiling.parts import Given, Part
from onepass.tuning import elapsed

_SPAN = 5e-4  # seconds that calls of a part are repeated for in one graph, and at most so often
_MOST_CALLS = 20
_REPLAYS = 7  # the least counts: other processes make a GPU slower alone

_known: dict[str, float] = {}
_log = logging.getLogger(__name__)


def seconds_of(wanted: Sequence[Part]) -> dict[Part, float]:
    """Of each part; predicted for one that cannot be timed now (no memory, a capture under way)."""
    with _disable_current_modes():  # those of a compiler at work
        new = [part for part in wanted if _remembered(part) is None]
        if new and not torch.cuda.is_current_stream_capturing():
            with building.ahead(new):
                pass
            for part in new:
                _measure(part)
            torch.cuda.empty_cache()  # what was allocated for this is the model's again
        return {part: _known.get(_question(part)) or parts.predicted(part) for part in wanted}


def _remembered(part: Part) -> float | None:
    question = _question(part)
    if question not in _known:
        answer = torch.ops.onepass.cuda_remembered_choice(_index(part), question)
        with contextlib.suppress(ValueError):  # it was never asked, or the file is damaged
            _known[question] = float(answer)
    return _known.get(question)


def _question(part: Part) -> str:
    """As a text, with all that the time depends on."""
    tensors = " ".join(
        f"{'x'.join(map(str, given.sizes))}:{given.dtype}" for given in (part.input, *part.parameters)
    )
    gradients = "".join("01"[want] for want in part.wanted)
    flags = torch.backends.cudnn
    switches = (flags.benchmark, flags.deterministic, flags.conv.fp32_precision, flags.version())
    version = _library.content_hash() if part.by == "onepass" else f"{torch.__version__} {switches}"
    how = f"{part.words} {tensors} {part.out_dtype} {part.layout} gradients {gradients or 'none'}"
    return f"seconds of {part.block} by {part.by} {version}: {how}"


def _index(part: Part) -> int:
    index = torch.device(part.device).index
    return torch.cuda.current_device() if index is None else index


def _measure(part: Part) -> None:
    """Remembers the seconds, in this process and on disk; nothing where it cannot be timed."""
    index = _index(part)
    try:
        with _as_outside(), torch.cuda.device(index):
            seconds = _seconds(_call(part))
    except Exception as error:  # no memory, a refused block, Inductor's: the plan has the prediction
        _log.warning("%s by %s cannot be timed, its prediction counts: %s", part.block, part.by, error)
        return
    _log.info("%s @ %s by %s: %.1f us", part.block, part.input.sizes, part.by, 1e6 * seconds)
    _known[_question(part)] = seconds
    torch.ops.onepass.cuda_remember_choice(index, _question(part), f"{seconds:.4g}")


@contextlib.contextmanager
def _as_outside() -> Iterator[None]:
    """Without the modes under which a model may be compiled."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cuda", enabled=False):
        yield


def _call(part: Part) -> Callable[[], Any]:
    """A call of the part on tensors of its own, with its gradients where they are wanted."""
    generator = torch.Generator(torch.device(part.device)).manual_seed(0)  # the model's is left alone
    make = functools.partial(_tensor, part, generator)
    wanted = part.wanted or (False,) * (1 + len(part.parameters))
    given = (part.input, *part.parameters)
    tensors = [make(each).requires_grad_(want) for each, want in zip(given, wanted, strict=True)]
    leaves = [tensor for tensor, want in zip(tensors, wanted, strict=True) if want]
    forward = functools.partial(_FORWARD[part.by](part, tensors), *tensors)
    if not leaves:
        return forward
    direction = torch.ones_like(forward())
    return lambda: torch.autograd.grad(forward(), leaves, direction)


def _tensor(part: Part, generator: torch.Generator, given: Given) -> Tensor:
    values = torch.randn(given.sizes, generator=generator, device=part.device, dtype=given.dtype)
    return values.contiguous(memory_format=format_named(part.layout, values.dim()))


def _by_pytorch(part: Part, tensors: list[Tensor]) -> Callable[..., Tensor]:
    conv = describe(part.block).conv
    assert conv is not None
    return functools.partial(_eager.convolve, conv)


def _by_onepass(part: Part, tensors: list[Tensor]) -> Callable[..., Tensor]:
    out_dtype = None if part.has_one_type else part.out_dtype
    how = (part.block, out_dtype, *part.words)
    return lambda input, *parameters: torch.ops.onepass.chain.default(input, parameters, *how)


def _by_inductor(part: Part, tensors: list[Tensor]) -> Callable[..., Tensor]:
    """Compiles the block as a graph of one call, which AOTAutograd looks into.

    The gradients' graph is compiled at once: the compilation that this is a part of would take it for its
    own otherwise.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def stages(*tensors: Tensor) -> Tensor:
        """Mixed types are autocast's: all is computed in fp32 then, and rounded."""
        if not part.has_one_type:
            tensors = tuple(tensor.float() for tensor in tensors)
        return _eager.run(part.block, tensors[0], tensors[1:]).to(part.out_dtype)

    graph = fx.Graph()
    given = [graph.placeholder(f"tensor{i}") for i in range(len(tensors))]
    graph.output((graph.call_function(stages, tuple(given)),))
    module = fx.GraphModule(torch.nn.Module(), graph)
    clean = torch._guards.tracing(None), torch._guards.compile_context(None)
    with clean[0], clean[1], config.patch(force_non_lazy_backward_lowering=True, donated_buffer=False):
        compiled = compile_fx(module, tensors)
    return lambda *tensors: compiled(*tensors)[0]


_FORWARD = {"pytorch": _by_pytorch, "onepass": _by_onepass, "inductor": _by_inductor}


def _seconds(call: Callable[[], Any]) -> float:
    """Of one call among many in a CUDA graph: the host's time is not in it, as in a stream of kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # has cuDNN choose, loads the kernels
        once = elapsed(call)
        count = max(1, min(_MOST_CALLS, round(_SPAN / once)))
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")  # torch.cuda.graph empties the memory's cache
        try:
            for _ in range(count):
                call()
        finally:
            graph.capture_end()
        graph.replay()
        taken = [elapsed(graph.replay) / count for _ in range(_REPLAYS)]
    torch.cuda.current_stream().wait_stream(stream)
    return min(taken)
