"""Calls that leave the fused path: they warn once per reason, are counted, and give PyTorch's result."""

import copy
import json
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import onepass
from onepass import Block, FallbackWarning, _cuda, _fallback, _library, _ops, functional, fuse, report

pytestmark = pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))

TEXT = "conv2d(3,8,k=3) | relu | group_norm(4)"


class Inner(nn.Module):
    """One chain, behind an option that calls may give."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.relu(self.norm(self.conv(x))) * scale


class Outer(nn.Module):
    """Passes calls on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = self.inner(x, scale)
        return y.flip(0)


@pytest.fixture(autouse=True)
def no_counts_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fallback, "by_text", {})
    monkeypatch.setattr(_ops, "_unbuilt", {})


@contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: list[warnings.WarningMessage] = []
        yield found
    found += [warning for warning in caught if issubclass(warning.category, FallbackWarning)]


def said(call: Callable[[], Any]) -> list[str]:
    """The fallback warnings of a call."""
    with recorded() as found:
        call()
    return [str(warning.message) for warning in found]


def image(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes or (2, 3, 7, 7), dtype=dtype)


# --- Fused modules ---


def hook(model: Outer) -> None:
    model.inner.norm.register_forward_hook(lambda *_: None)


def patch_forward(model: Outer) -> None:
    model.inner.norm.forward = nn.GroupNorm.forward.__get__(model.inner.norm)


def parametrise(model: Outer) -> None:
    nn.utils.parametrizations.weight_norm(model.inner.conv)


def swap_class(model: Outer) -> None:
    model.inner.norm.__class__ = type("Noisy", (nn.GroupNorm,), {})


def other_groups(model: Outer) -> None:
    model.inner.norm = nn.GroupNorm(2, 8)


CHANGES = [
    (hook, "norm: a hook is on it; remove it to run fused", 3),
    (patch_forward, "norm: its forward is set on the object; delete it to run fused", 3),
    (parametrise, "conv: its class is now ParametrizedConv2d; it is traced again", 1),
    (swap_class, "norm: its class is now Noisy; it is traced again", 1),
    (other_groups, "norm: its attribute num_groups was changed after fusing; it is traced again", 1),
]


def test_another_module_of_the_same_kind_runs_fused() -> None:
    fused, x = fuse(Outer()), image()
    fused.inner.norm = nn.GroupNorm(4, 8)
    assert said(lambda: fused(x)) == []


@pytest.mark.parametrize(("change", "reason", "calls"), CHANGES)
def test_a_changed_condition_is_said_once_and_counted(
    change: Callable[[Outer], None], reason: str, calls: int
) -> None:
    fused, x = fuse(Outer()), image()
    assert said(lambda: fused(x)) == []
    change(fused)
    expected = f"inner left the fused path and ran the original forward: {reason}"
    assert said(lambda: fused(x)) == [expected]
    assert said(lambda: [fused(x), fused(x)]) == []
    found = report(fused)
    assert [(f.name, f.calls, f.reason) for f in found.fallbacks] == [
        ("inner", calls, f"the original forward: {reason}")
    ]
    counted = "1 call" if calls == 1 else f"{calls} calls"
    assert f"left the fused path:\n  inner  {counted} ran the original forward: {reason}" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["fallbacks"][0]["calls"] == calls


def test_a_mode_in_which_nothing_fuses_is_said() -> None:
    model = fuse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.ReLU()))
    assert said(lambda: model.eval()(image())) == []
    (message,) = said(lambda: model.train()(image()))
    assert message.startswith("(Sequential) left the fused path")
    assert "nothing fuses in training mode" in message


def test_nothing_is_said_or_counted_on_the_fused_path() -> None:
    fused, block, x = fuse(Outer()), Block(TEXT), image().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for training in (False, True):
            fused.train(training)
            fused(x).sum().backward()
            block(x).sum().backward()
            with torch.no_grad():
                fused(x)
                block(x)
            with torch.autocast("cpu", torch.bfloat16):
                fused(x)
                block(x)
    assert report(fused).fallbacks == []
    assert block.fallbacks == {}
    assert "left the fused path" not in str(report(fused))


def test_each_reason_is_said() -> None:
    fused, x = fuse(Inner()), image()
    handle = fused.norm.register_forward_hook(lambda *_: None)
    assert len(said(lambda: fused(x))) == 1
    handle.remove()
    assert said(lambda: fused(x)) == []
    (message,) = said(lambda: torch.vmap(fused)(x[None]))
    assert "inside a torch.func transform" in message
    assert [f.calls for f in report(fused).fallbacks] == [1, 1]


def test_another_number_is_no_other_reason() -> None:
    fused, x = fuse(Inner()), image()
    assert len(said(lambda: [fused(x, scale=0.5 + i) for i in range(5)])) == 1
    (found,) = report(fused).fallbacks
    assert found.calls == 5
    assert "not traced (x: Tensor, scale: float)" in found.reason


def test_the_warning_points_at_the_callers_line() -> None:
    fused = fuse(Outer())
    hook(fused)
    with recorded() as found:
        fused(image())
    assert found[0].filename == __file__
    block = Block(TEXT)
    with recorded() as found:
        torch.vmap(block)(image(1, 2, 3, 7, 7))
    assert found[0].filename == __file__


def test_a_warning_as_an_error_leaves_the_model_working() -> None:
    fused, original, x = fuse(Inner()), Inner(), image()
    original.load_state_dict(fused.state_dict())
    handle = fused.norm.register_forward_hook(lambda *_: None)
    block = Block(TEXT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FallbackWarning, match="a hook is on it"):
            fused(x)
        torch.testing.assert_close(fused(x), original(x))
        with pytest.raises(FallbackWarning, match=r"torch\.func"):
            torch.vmap(block)(x[None])
        torch.testing.assert_close(torch.vmap(block)(x[None])[0], block(x))
        handle.remove()
        torch.testing.assert_close(fused(x), original(x))
    assert [f.calls for f in report(fused).fallbacks] == [2]
    assert list(block.fallbacks.values()) == [2]


def test_chains_are_counted_by_name_and_warned_of_once_per_module() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(3, 3, 3) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.silu(self.second(nn.functional.silu(self.first(x)).flip(0)))

    fused, x = fuse(Two()), image(3, 7, 7)
    reason = "PyTorch's own stages: the input has 3 dimensions, must have 4"
    assert said(lambda: [fused.train(mode)(x) for mode in (False, True)]) == [
        f"(Two) left the fused path and ran {reason}"
    ]
    assert [(f.name, f.calls, f.reason) for f in report(fused).fallbacks] == [
        ("first", 2, reason),
        ("second", 2, reason),
    ]


def test_an_operand_that_fits_no_stage_is_said() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.norm(self.conv(x) + y)

    fused, x = fuse(Added()), image()
    assert said(lambda: fused(x, image(2, 8, 5, 5))) == []
    (message,) = said(lambda: fused(x, image(5, 5)))
    assert "neither of the input's shape nor one value per channel" in message
    assert [f.calls for f in report(fused).fallbacks] == [1]


# --- Transforms and tracers ---


def tangent(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@pytest.mark.parametrize("gradients", [nullcontext, torch.no_grad])
def test_forward_mode_has_its_tangent(gradients: Callable[[], AbstractContextManager]) -> None:
    block, x = Block(TEXT), image()
    stages = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.GroupNorm(4, 8))
    fused = fuse(copy.deepcopy(stages))
    block.load_state_dict(dict(zip(block.state_dict(), stages.state_dict().values(), strict=True)))
    with gradients():
        for model in (block, fused):
            with pytest.warns(FallbackWarning, match="dual_level"):
                torch.testing.assert_close(tangent(model, x), tangent(stages, x))
    assert said(lambda: [block(x), fused(x)]) == []


@pytest.mark.parametrize("gradients", [nullcontext, torch.no_grad])
def test_a_trace_records_the_original(gradients: Callable[[], AbstractContextManager]) -> None:
    fused, block, x = fuse(Outer()).eval(), Block(TEXT), image()
    for model in (fused, block):
        with gradients(), pytest.warns(FallbackWarning, match=r"torch\.jit\.trace"):
            traced = torch.jit.trace(model, x)
        assert "onepass::" not in str(traced.inlined_graph)
        assert "aten::group_norm" in str(traced.inlined_graph)
        other = image(3, 3, 9, 8)
        torch.testing.assert_close(traced(other), model(other), rtol=1e-4, atol=1e-5)


# --- torch.compile ---


@pytest.mark.parametrize("gradients", [nullcontext, torch.no_grad])
def test_compiling_says_nothing(gradients: Callable[[], AbstractContextManager]) -> None:
    fused, x = fuse(Outer()), image()
    cases: list[tuple[nn.Module, Tensor]] = [(fused, x), (Block(TEXT), x)]
    hooked = fuse(Outer())
    hook(hooked)
    unbatched = fuse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU()))
    cases += [(hooked, x), (unbatched, x[0]), (Block(TEXT).double(), x.double())]
    for model, given in cases:
        torch._dynamo.reset()
        with gradients(), warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            found = torch.compile(model, fullgraph=True, backend="aot_eager")(given)
        with recorded():
            torch.testing.assert_close(found, model(given), rtol=1e-4, atol=1e-5)
    assert report(fused).fallbacks == []
    assert [f.calls for f in report(hooked).fallbacks] == [1]  # the call outside


# --- Blocks ---


def test_a_block_counts_by_reason_and_the_report_shows_it() -> None:
    model, x = nn.ModuleDict({"stem": Block(TEXT)}), image(3, 2, 3, 7, 7)
    block = model["stem"]
    (message,) = said(lambda: [torch.vmap(block)(x), torch.vmap(block)(x)])
    reason = "PyTorch's own stages: inside a torch.func transform (vmap, grad, jvp and the like)"
    assert message == f"{TEXT} left the fused path and ran {reason}"
    assert block.fallbacks == {reason: 2}
    assert f"stem  2 calls ran {reason}" in str(report(model))


def test_float64_runs_the_reference_and_says_so() -> None:
    block, x = Block(TEXT, dtype=torch.float64), image(dtype=torch.float64)
    (message,) = said(lambda: block(x))
    assert "ran the library's reference: float64 is not computed by the CPU kernels" in message
    assert "use float32" in message
    fused = fuse(Inner().double())
    (message,) = said(lambda: fused(x))
    assert message.startswith("(Inner) left")
    assert [f.calls for f in report(fused).fallbacks] == [1]


def test_a_cpu_without_kernels_runs_the_reference_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ops, "_COMPUTED", ())
    (message,) = said(lambda: Block(TEXT)(image()))
    assert "ran the library's reference: this CPU has neither NEON nor AVX2" in message


def test_functional_counts_by_text() -> None:
    x = image(3, 2, 8, 5, 5)
    (message,) = said(lambda: [torch.vmap(lambda a: functional.run("relu", a))(x) for _ in range(2)])
    assert message.startswith("relu left the fused path")
    assert list(functional.fallbacks("relu").values()) == [2]
    assert functional.fallbacks("swish") == {}
    assert said(lambda: functional.run("relu", x[0])) == []


def test_threads_count_every_call_and_warn_once() -> None:
    fused, x = fuse(Inner()), image()
    fused.norm.register_forward_hook(lambda *_: None)
    with recorded() as found:
        threads = [threading.Thread(target=lambda: [fused(x) for _ in range(20)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 1
    assert [f.calls for f in report(fused).fallbacks] == [80]


# --- Copies ---


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_counts_from_zero(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    block, fused, x = Block(TEXT), fuse(Outer()), image()
    names = list(block.state_dict()), list(fused.state_dict())
    assert len(said(lambda: [torch.vmap(block)(x[None]), torch.vmap(fused)(x[None])])) >= 2
    assert (list(block.state_dict()), list(fused.state_dict())) == names
    other_block, other = duplicate(block), duplicate(fused)
    assert other_block.fallbacks == {}
    assert report(other).fallbacks == []
    assert len(said(lambda: [torch.vmap(other_block)(x[None]), torch.vmap(other)(x[None])])) >= 2
    assert list(block.fallbacks.values()) == list(other_block.fallbacks.values()) == [1]


def test_a_block_of_before_there_were_counts_runs() -> None:
    block, x = Block(TEXT), image()
    del vars(block)["_site"]
    assert said(lambda: block(x)) == []
    assert len(said(lambda: torch.vmap(block)(x[None]))) == 1
    assert list(functional.fallbacks(TEXT).values()) == [1]


def test_without_the_library_fusing_and_loading_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = pickle.dumps(fuse(Inner()))
    monkeypatch.setattr(_library, "_reason", "it is not built")
    assert said(lambda: fuse(Outer())) == ["(Outer) is not fused: onepass cannot run: it is not built"]
    (message,) = said(lambda: pickle.loads(stored)(image()))
    assert message == "a fused model is loaded unfused: onepass cannot run: it is not built"


def test_a_copy_that_cannot_be_fused_again_warns() -> None:
    fused = fuse(Inner())
    fused.forward = torch.relu
    (message,) = said(lambda: pickle.loads(pickle.dumps(fused)))
    assert message == "(Inner) is fused no more: its forward is set on the object"


# --- GPUs, as far as none is needed ---


def fakes(dtype: torch.dtype = torch.float32) -> tuple[Block, Tensor]:
    """Inside FakeTensorMode."""
    return Block(TEXT, device="cuda", dtype=dtype), torch.empty(2, 3, 7, 7, device="cuda", dtype=dtype)


@pytest.mark.parametrize(
    ("asked", "dtype", "reason"),
    [
        ("the compiler is missing", torch.float32, "the compiler is missing"),
        (None, torch.float64, "float64 is not computed by the GPU kernels"),
    ],
)
def test_stages_on_a_gpu_are_said(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, dtype: torch.dtype, reason: str
) -> None:
    monkeypatch.setattr(_cuda, "_asked", [asked])
    with FakeTensorMode(), torch.no_grad():
        block, x = fakes(dtype)
        (message,) = said(lambda: [block(x), block(x)])
    assert f"ran PyTorch's own stages: {reason}" in message
    assert list(block.fallbacks.values()) == [2]


def test_a_device_without_kernels_is_said() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 8, 5, 5, device="xpu")
        (message,) = said(lambda: [functional.run("relu | mul(2)", x) for _ in range(2)])
    assert message.endswith("ran PyTorch's own stages: the library has no kernels for xpu")
    assert list(functional.fallbacks("relu | mul(2)").values()) == [2]


def test_a_kernel_that_does_not_compile_is_said_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refuse(operator: Any) -> Any:
        tried.append(operator)
        raise ValueError("kernel tail does not compile: NVRTC_ERROR_COMPILATION\nlog")

    call = _cuda._call
    monkeypatch.setattr(_cuda, "_asked", [None])
    monkeypatch.setattr(_cuda, "_call", lambda operator, *_: call(lambda: refuse(operator)))
    with FakeTensorMode(), torch.no_grad():
        block, x = fakes()
        messages = said(lambda: [block(x), block(x)])
    assert messages == [
        f"{TEXT} left the fused path and ran PyTorch's own stages: "
        "kernel tail does not compile: NVRTC_ERROR_COMPILATION"
    ]
    assert list(block.fallbacks.values()) == [2]
    assert len(tried) == 1


def test_the_report_names_a_row_whose_kernel_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = fuse(Inner())
    fused(image())
    rows = (
        "gemm_pingpong              no: kernel gemm_pingpong does not compile: NVRTC_ERROR_COMPILATION",
        "gemm_fused              no: the block has no convolution",
        "* tail_slab             0.003 ms predicted",
    )
    text = "\n".join(("problem", "", *rows))
    monkeypatch.setattr(sys.modules["onepass.report"], "explain", lambda *_, **__: text)
    (entry,) = report(fused).fused
    left_out = "gemm_pingpong is left out: kernel gemm_pingpong does not compile: NVRTC_ERROR_COMPILATION"
    assert entry.plan == f"* tail_slab             0.003 ms predicted; {left_out}"


@pytest.mark.parametrize("gains", [False, True])
def test_a_convolution_that_autocast_leaves_to_pytorch_is_said_where_it_would_gain(
    monkeypatch: pytest.MonkeyPatch, gains: bool
) -> None:
    asked = []
    monkeypatch.setattr(_cuda, "_asked", [None])
    monkeypatch.setattr(_cuda, "FakeTensor", ())  # so that fakes are planned for
    monkeypatch.setattr(_cuda, "_is_worth_fusing", lambda *how: asked.append(how[2]) or gains)
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode(), torch.no_grad():
            block, x = fakes()
            messages = said(lambda: block(x))
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
    assert asked == ["bf16"]
    assert len(messages) == len(block.fallbacks) == gains
    assert not gains or "ran PyTorch's own convolution: autocast is on; cast the model" in messages[0]
