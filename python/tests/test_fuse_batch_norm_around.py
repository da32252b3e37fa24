"""Fused batch norms under compilers, transforms and copies; their operator; the choice of kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import image, pair, resnet, simple
from fuse_support import replica_of
from fuse_twins import Twins
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import onepass
from onepass import _batch_norm, _cpu, _cuda, fuse, report

pytestmark = [
    pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason())),
    pytest.mark.filterwarnings("ignore"),
]

# --- 1. Compilers, transforms, copies -----------------------------------------------------------------------


@pytest.mark.parametrize("make", [simple, resnet])
def test_compiled_models(make: Callable[[], nn.Module]) -> None:
    torch._dynamo.reset()
    eager, fused = pair(make)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    x = image(2, 3, 32, 32)
    for _ in range(2):
        for model in (eager, compiled):
            model.zero_grad()
        torch.testing.assert_close(compiled(x), eager(x), rtol=1e-3, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), eager(x), rtol=1e-3, atol=1e-4)
        for model in (eager, compiled):
            model(x).square().mean().backward()
        for some, other in zip(fused.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(some.grad, other.grad, rtol=1e-3, atol=1e-4)
        for model in (eager, fused):
            next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)).running_mean.add_(1)
    for model in (eager, fused):
        model.train()
    torch.testing.assert_close(compiled(x), eager(x), rtol=1e-3, atol=1e-4)
    for some, other in zip(fused.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(some, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
def test_exported_programs_read_the_statistics_at_each_call(grad: bool, dtype: torch.dtype) -> None:
    eager, fused = (model.to(dtype) for model in pair())
    x, near = image().to(dtype), {"rtol": 4e-2, "atol": 4e-2} if dtype == torch.bfloat16 else {}
    with torch.set_grad_enabled(grad):
        exported = torch.export.export(fused, (x,)).module()
        for _ in range(2):
            out = exported(x)
            assert out.dtype == dtype
            torch.testing.assert_close(out, eager(x), **near)
            for model, prefix in ((eager, "1."), (exported, "1.")):
                dict(model.named_buffers())[f"{prefix}running_mean"].add_(1)


def test_a_trace_with_symbolic_sizes_holds_the_operator() -> None:
    _, fused = pair()
    with torch.no_grad():
        traced = make_fx(lambda x: fused(x), tracing_mode="symbolic", _allow_non_fake_inputs=True)(image())
        assert "onepass.forward" in traced.code
        torch.testing.assert_close(traced(image(3, 3, 7, 9)), fused(image(3, 3, 7, 9)))


def test_transforms_run_the_original() -> None:
    eager, fused = pair()
    stack = image(3, 2, 3, 6, 5)
    for call in (
        lambda m: torch.vmap(m)(stack),
        lambda m: torch.func.grad(lambda x: m(x).square().sum())(stack[0]),
        lambda m: torch.func.jvp(m, (stack[0],), (stack[1],))[1],
        lambda m: torch.jit.trace(m, stack[0])(stack[1]),
    ):
        torch.testing.assert_close(call(fused), call(eager), rtol=1e-4, atol=1e-4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(stack[0], stack[1])
        some, other = (forward_ad.unpack_dual(m(dual)).tangent for m in (fused, eager))
    torch.testing.assert_close(some, other, rtol=1e-4, atol=1e-4)


def test_replicas_of_data_parallel_read_their_own_statistics() -> None:
    eager, fused = pair()
    some, other = (replica_of(model) for model in (fused, eager))
    for model in (some, other):
        model[1].running_mean = model[1].running_mean + 1
    torch.testing.assert_close(some(image()), other(image()), rtol=1e-4, atol=1e-5)


def test_a_copy_reads_its_own_statistics() -> None:
    twins = Twins(simple)
    twins.edit(lambda m: m.eval())
    twins.same_on_the_fused_path(image())
    twins.replace(copy.deepcopy)
    with torch.no_grad():
        twins.edit(lambda m: m[1].running_mean.add_(1))
    twins.same_on_the_fused_path(image())


# --- 2. The operator, and the choice on the CPU -------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_scale_and_shift(dtype: torch.dtype, weighted: bool, biased: bool) -> None:
    mean, variance, weight, bias = (image(4, 37)[i].abs().to(dtype) for i in range(4))
    given = (mean, variance, weight if weighted else None, bias if biased else None)
    scale, shift = torch.ops.onepass.scale_and_shift(*given, 1e-3)
    zeros = torch.zeros(1, 37, dtype=torch.float64)
    wide = [None if tensor is None else tensor.double() for tensor in given]
    wanted = [F.batch_norm(zeros + value, *wide, False, 0.0, 1e-3)[0] for value in (0, 1)]
    assert scale.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(shift.double(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((scale + shift).double(), wanted[1], rtol=1e-5, atol=1e-5)
    torch.library.opcheck(torch.ops.onepass.scale_and_shift.default, (*given, 1e-3))


@pytest.mark.parametrize(
    "wrong", [image(5), image(4).double(), image(2, 2)], ids=["length", "type", "dimensions"]
)
def test_scale_and_shift_refuses_tensors_that_do_not_belong_together(wrong: Tensor) -> None:
    with pytest.raises((ValueError, RuntimeError), match="vectors of one length and one type"):
        torch.ops.onepass.scale_and_shift(image(4), wrong, None, None, 1e-5)


def test_a_convolution_that_pytorch_computes_faster_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpu, "_ARM", {"f32": dict.fromkeys(("wide", "thin", "tap"), 1e15)})
    monkeypatch.setattr(_cpu, "_X86", _cpu._ARM)
    monkeypatch.setattr(_cpu._onednn, "leaves_forward", lambda *_: True)
    monkeypatch.setattr(_cpu, "_is_pointwise", lambda *_: True)
    _cpu.leaves_convolution.cache_clear()
    try:
        twins = Twins(resnet)
        twins.edit(lambda m: m.eval())
        twins.same_on_the_fused_path(image(8, 3, 64, 64), near=(1e-3, 1e-4))
        plans = [entry.plan for entry in report(twins.fused).fused if "eval" in entry.modes]
        left = [plan.startswith("-> PyTorch's own convolution, then tail") for plan in plans]
        assert sum(left) > len(left) / 2, plans  # the smallest blocks are faster in one call
    finally:
        _cpu.leaves_convolution.cache_clear()


def test_wide_convolutions_of_16_bits_are_pytorchs_and_thin_ones_are_not() -> None:
    def is_left(channels: int, dtype: torch.dtype) -> bool:
        text = f"conv2d({channels},{channels},k=3,p=1) | relu"
        x = torch.empty(2, channels, 28, 28, dtype=dtype)
        return _cpu.leaves_convolution(text, _cpu.geometry_of(x), torch.get_num_threads(), False)

    assert is_left(256, torch.bfloat16) and not is_left(16, torch.bfloat16)
    assert not is_left(16, torch.float32) and not is_left(64, torch.float64)


# --- 3. CUDA tensors, as fakes ------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_dtype", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, norm_dtype: torch.dtype | None
) -> None:
    """As if there were a GPU that runs the kernels; fake tensors never reach it."""
    monkeypatch.setattr(_cuda, "_asked", [None])
    with FakeTensorMode(), torch.device("cuda"):
        conv = nn.Conv2d(3, 8, 3, padding=1, bias=False, dtype=dtype)
        norm = nn.BatchNorm2d(8, dtype=norm_dtype or dtype)
        model = fuse(nn.Sequential(conv, norm, nn.SiLU())).eval()
        x = torch.empty(2, 3, 8, 8, dtype=dtype)
        with torch.no_grad():
            assert model(x).dtype == dtype
        assert model(x.requires_grad_()).dtype == dtype
    assert not report(model).fallbacks


@pytest.mark.parametrize("whole", [False, True])
def test_a_convolution_and_its_batch_norm_alone_are_one_kernel_or_pytorchs(
    monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr(_cuda, "_asked", [None])
    monkeypatch.setattr(_cuda, "is_whole", lambda *how: whole)
    ran: list[str] = []
    monkeypatch.setattr(_batch_norm, "_operator", lambda *given: ran.append("ours") or given[:2])
    with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
        model = fuse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).eval()
        assert model(torch.empty(2, 3, 8, 8)).shape == (2, 8, 6, 6)
    assert ran == (["ours"] if whole else []) and not report(model).fallbacks


def test_autocast_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, "_asked", [None])
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
            model = fuse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())).eval()
            assert model(torch.empty(2, 3, 8, 8)).dtype == torch.bfloat16
        assert not report(model).fallbacks
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
