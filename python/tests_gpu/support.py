"""What the tests on a GPU share: tensors there, the judges of results, kernels compiled ahead in parallel."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import sys
import unittest
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
sys.path.append(str(ROOT / "python" / "tests"))

from block_cases import BLOCKS, STAGES, assert_as_exact, example, parameter_shape  # noqa: E402, F401
from kinks import ACTIVATIONS, FINITE, POINTS, assert_same, points  # noqa: E402, F401

from onepass import _cuda, _eager, _ops  # noqa: E402

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FORMATS = ("contiguous", "channels_last")
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class GpuTest(unittest.TestCase):
    """Skipped where PyTorch sees no GPU; where it sees one, a runtime that cannot use it is a failure."""

    @classmethod
    def setUpClass(cls) -> None:
        if not torch.cuda.is_available():
            raise unittest.SkipTest("PyTorch sees no GPU")
        reason = _cuda.unavailable_reason()
        assert reason is None, reason

    def setUp(self) -> None:
        torch.manual_seed(0)


def in_format(tensor: Tensor, memory_format: str) -> Tensor:
    """Images and volumes in this format; other tensors as they are."""
    if memory_format == "contiguous" or tensor.dim() not in _CHANNELS_LAST:
        return tensor
    return tensor.contiguous(memory_format=_CHANNELS_LAST[tensor.dim()])


def is_in_format(tensor: Tensor, memory_format: str) -> bool:
    """Whether the tensor lies dense in the format."""
    if memory_format == "contiguous" or tensor.dim() not in _CHANNELS_LAST:
        return tensor.is_contiguous()
    return tensor.is_contiguous(memory_format=_CHANNELS_LAST[tensor.dim()])


def gpu_example(
    text: str, *, batch: int = 2, dtype: torch.dtype = torch.float32, memory_format: str = "contiguous"
) -> tuple[Tensor, list[Tensor]]:
    """A random input of the block and random parameters, on the GPU."""
    x, parameters = example(text, batch=batch, dtype=dtype)
    return in_format(x.cuda(), memory_format), [in_format(p.cuda(), memory_format) for p in parameters]


def parameters_for(text: str, x: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Random parameters of the block for this input, of its type and order."""
    description = _ops.describe(text)
    shapes = [parameter_shape(description, i, x.shape) for i in range(len(description.parameters))]
    memory_format = "contiguous" if x.is_contiguous() else "channels_last"
    drawn = (torch.randn(shape, device="cuda").mul_(0.5).to(dtype or x.dtype) for shape in shapes)
    return [in_format(tensor, memory_format) for tensor in drawn]


Run = Callable[[str, Tensor, Sequence[Tensor]], Tensor]


def with_gradients(
    run: Run, text: str, x: Tensor, parameters: Sequence[Tensor], direction: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The output and the gradients of the input and of every parameter."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, *parameters)]  # strides as they are
    output = run(text, leaves[0], leaves[1:])
    output.backward(torch.ones_like(output) if direction is None else direction.to(output.dtype))
    return output.detach(), [leaf.grad for leaf in leaves]


def exactly(
    text: str, x: Tensor, parameters: Sequence[Tensor], direction: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The same in float64, of the operands as stored."""
    doubled = [parameter.double() for parameter in parameters]
    return with_gradients(
        _eager.run, text, x.double(), doubled, None if direction is None else direction.double()
    )


def factor_of(dtype: torch.dtype) -> float:
    """How many times PyTorch's error is allowed: in half precision one rounding replaces several. In float32
    both are the worst of some hundred roundings in other orders.
    """
    return 3.0 if dtype == torch.float32 else 1.0


def check_block(
    text: str, x: Tensor, parameters: Sequence[Tensor], *, gradients: bool = True, what: str = ""
) -> None:
    """Output and gradients are as exact as PyTorch's own stages, without TF32: where it is allowed, PyTorch
    uses it for some convolutions and not for others.
    """
    precision = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        _check_block(text, x, parameters, gradients, what)
    finally:
        torch.backends.cudnn.conv.fp32_precision = precision


def _check_block(text: str, x: Tensor, parameters: Sequence[Tensor], gradients: bool, what: str) -> None:
    with torch.no_grad():
        shape = _eager.run(text, x, parameters).shape
    direction = torch.randn(shape, device=x.device)
    ours = with_gradients(_ops.apply, text, x, parameters, direction)
    theirs = with_gradients(_eager.run, text, x, parameters, direction)
    exact = exactly(text, x, parameters, direction)
    names = ["input", *_ops.describe(text).names]
    rows = [("output", ours[0], theirs[0], exact[0])]
    if gradients:
        rows += zip((f"gradient of {name}" for name in names), ours[1], theirs[1], exact[1], strict=True)
    for name, mine, torchs, wanted in rows:
        try:
            assert_as_exact(mine, torchs, wanted, factor=factor_of(x.dtype))
        except AssertionError as error:
            found = [float((t.double() - wanted).abs().max()) for t in (mine, torchs)]
            raise AssertionError(
                f"{text} {what}: {name}: error {found[0]:.2e}, PyTorch's {found[1]:.2e}"
            ) from error


def check_close_to_exact(mine: Tensor, torchs: Tensor, exact: Tensor, eps: float) -> None:
    """The error against float64 is at most PyTorch's, and some roundings of the largest value."""
    found, allowed = ((t.double() - exact).abs().max().item() if t.numel() else 0.0 for t in (mine, torchs))
    largest = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    assert found <= allowed + 2 * eps * largest, f"error {found:.2e}, PyTorch's {allowed:.2e}"


def alone(test: Callable[[Any], None]) -> Callable[[Any], None]:
    """Marks a test that takes all memory or measures time: scripts/gpu_test.py runs nothing beside it."""
    test.alone = True
    return test


def warm(calls: Iterable[Callable[[], object]]) -> None:
    """Runs calls on all processors so that their kernels are compiled; what fails here fails in its test."""

    def run(call: Callable[[], object]) -> None:
        # Gradients by the thread that asks for them: PyTorch's own thread, one for each GPU, would compile
        # their kernels one by one.
        with contextlib.suppress(Exception), torch.autograd.set_multithreading_enabled(False):
            call()

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, calls))
    torch.cuda.synchronize()


def kernels_of(call: Callable[[], object]) -> list[str]:
    """The names of what the call ran on the GPU, in order; `call` has run before."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def launches_of(call: Callable[[], object]) -> list[str]:
    """The kernels alone, without copies and fills of memory."""
    return [name for name in kernels_of(call) if not name.lower().startswith(("memset", "memcpy"))]


@contextlib.contextmanager
def conv_precision(name: str) -> Iterator[None]:
    """PyTorch's switch for convolutions: "tf32" or "ieee". By its older name: torch.export fails with the
    newer.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
