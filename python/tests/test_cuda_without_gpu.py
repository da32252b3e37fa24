"""Blocks of CUDA tensors as far as no GPU is needed: types, shapes, traced graphs, explanations."""

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_cases import BLOCKS, STAGES, example
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass import _alone, _cuda, _eager, _ops
from onepass._conv_gradients import conv_gradients_by_torch
from onepass._description import describe
from onepass.optimizing import variants

pytestmark = pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU that runs the kernels; fake tensors never reach it."""
    monkeypatch.setattr(_cuda, "_asked", [None])
    monkeypatch.setattr(_cuda, "_is_worth_fusing", lambda *how: False)


@pytest.fixture(params=[None, torch.float16, torch.bfloat16])
def low(request: pytest.FixtureRequest):
    """Autocast of CUDA, which torch.autocast refuses to turn on without a GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", request.param is not None)
    torch.set_autocast_dtype("cuda", request.param or before)
    yield request.param
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", before)


def fakes(text: str, dtype: torch.dtype, parameter_dtype: torch.dtype) -> tuple:
    """The block's tensors as fakes on a GPU; call it inside FakeTensorMode."""
    x, parameters = example(text)
    x = torch.empty(x.shape, dtype=dtype, device="cuda")
    return x, [torch.empty(p.shape, dtype=parameter_dtype, device="cuda") for p in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("text", STAGES)
def test_types_are_those_of_pytorch_stage_by_stage(with_kernels, text: str, dtype, low) -> None:
    with FakeTensorMode(), torch.no_grad():
        x, parameters = fakes(text, dtype, torch.float32 if low else dtype)
        found, wanted = (run(text, x, parameters) for run in (_ops.apply, _eager.run))
    assert (found.dtype, found.shape, found.device) == (wanted.dtype, wanted.shape, wanted.device)


def test_autocast_leaves_instance_norms_in_the_low_type(with_kernels) -> None:
    """What _eager is to a block is not what it is to a module: it has group_norm for both."""
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode(), torch.no_grad():
            x = torch.empty(2, 8, 5, 5, dtype=torch.float16, device="cuda")
            norms = {
                "instance_norm(affine=true)": torch.nn.InstanceNorm2d(8, affine=True, device="cuda"),
                "group_norm(4)": torch.nn.GroupNorm(4, 8, device="cuda"),
            }
            for text, norm in norms.items():
                assert _ops.apply(text, x, list(norm.parameters())).dtype == norm(x).dtype
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("text", BLOCKS)
def test_shapes_with_and_without_gradients(with_kernels, text: str) -> None:
    with FakeTensorMode():
        x, parameters = fakes(text, torch.float32, torch.float32)
        wanted = _eager.run(text, x, parameters)
        assert _ops.apply(text, x, parameters).shape == wanted.shape
        output = _ops.apply(text, x.requires_grad_(), parameters)
        assert output.shape == wanted.shape
        assert output.requires_grad


def test_gradients_of_large_operands_lie_as_the_input(with_kernels) -> None:
    with FakeTensorMode():
        x = torch.empty(2, 8, 5, 6, device="cuda", memory_format=torch.channels_last)
        residual = torch.empty(2, 8, 5, 6, device="cuda")
        gradients = torch.ops.onepass.backward(x, x, [residual], x.new_empty(0), "residual_add", [True, True])
    assert all(gradient.is_contiguous(memory_format=torch.channels_last) for gradient in gradients)


@pytest.mark.parametrize(
    ("gradients", "operators"),
    [
        (False, ["aten.conv2d.default", "onepass.forward.default"]),
        (True, ["onepass.forward_for_training.default"]),
    ],
)
def test_export_holds_operators(with_kernels, gradients: bool, operators: list[str]) -> None:
    with FakeTensorMode(), torch.set_grad_enabled(gradients):
        block = onepass.Block("conv2d(3,8,k=3) | swish | group_norm(4) | mean", device="cuda")
        program = torch.export.export(block, (torch.empty(2, 3, 9, 9, device="cuda"),))
    assert [str(node.target) for node in program.graph.nodes if node.op == "call_function"] == operators


def test_the_tail_adds_the_bias_of_pytorchs_convolution(with_kernels) -> None:
    with FakeTensorMode(), torch.no_grad():
        block = onepass.Block("conv2d(3,8,k=3) | swish | group_norm(4) | mean", device="cuda")
        program = torch.export.export(block, (torch.empty(2, 3, 9, 9, device="cuda"),))
    convolution, tail = (node for node in program.graph.nodes if node.op == "call_function")
    assert len(convolution.args) == 2 and len(tail.args[1]) == 3
    assert tail.args[2] == "channel_add | swish | group_norm(4) | mean"


@pytest.mark.parametrize(
    ("block", "sizes", "contiguous", "gains"),
    [
        ("group_norm(4)", (5, 8, 1721464), True, True),  # few slabs: PyTorch reads each with one block
        ("instance_norm", (64, 64, 128, 128), True, True),
        ("group_norm(256)", (27, 4096, 32, 64), False, True),
        ("group_norm(128)", (87, 1024, 16, 10), False, True),  # PyTorch turns them first
        ("group_norm(4)", (2, 16, 8, 8), True, False),  # a call costs more than the kernel
        ("group_norm(4)", (2, 16, 8, 8), False, False),
        ("group_norm(3)", (64, 64, 128, 128), True, False),  # refused, by PyTorch
    ],
)
def test_a_norm_alone_is_ours_where_pytorchs_is_slow(block, sizes, contiguous: bool, gains: bool) -> None:
    assert _alone.gains_on_gpu(block, sizes, "f32", contiguous, "cuda:sm_90a") is gains


@pytest.mark.parametrize("gains", [False, True])
def test_a_call_of_a_norm_alone_chooses(with_kernels, gains: bool, monkeypatch) -> None:
    monkeypatch.setattr(_alone, "gains_on_gpu", lambda *_: gains)
    _alone.takes_alone.cache_clear()
    with FakeTensorMode(), torch.no_grad():
        norm = torch.nn.GroupNorm(4, 8, device="cuda")
        fused = onepass.fuse(torch.nn.Sequential(torch.nn.MaxPool2d(2), norm, torch.nn.MaxPool2d(2)))
        x = torch.empty(2, 8, 12, 12, device="cuda", dtype=torch.float32)
        assert fused(x).shape == (2, 8, 3, 3)
        assert [call.block for call in fused._onepass.calls] == ["group_norm(4)"] * 2  # of both modes
        assert any(call.declined for call in fused._onepass.calls) is not gains
        assert ("PyTorch's own norm" in str(onepass.report(fused))) is not gains
        assert not _alone.is_computed(x.half(), list(norm.parameters()))  # PyTorch refuses mixed types
    _alone.takes_alone.cache_clear()


@pytest.mark.parametrize("ours", [(True, False), (False, True), (True, True)])
def test_each_gradient_of_a_convolution_is_computed_by_who_is_faster(
    with_kernels, monkeypatch: pytest.MonkeyPatch, ours: tuple[bool, bool]
) -> None:
    conv = describe("conv2d(3,4,k=3,s=2,bias=false)").conv
    asked: list[list[bool]] = []

    def kernels(_: object, gradient: torch.Tensor, x: torch.Tensor, parameters: Any, *how: Any) -> Any:
        asked.append(how[-1])
        given = conv_gradients_by_torch(conv, gradient, x, parameters[0], how[-1])
        return [torch.empty(0) if one is None else one for one in given]

    monkeypatch.setattr(_cuda, "_call", kernels)
    monkeypatch.setattr(_cuda, "_is_worth_fusing", lambda *how: False)
    monkeypatch.setattr(_cuda, "_is_worth_training", lambda *how: ours[how[-1].index(True)])
    x, weight = (torch.randn(sizes, requires_grad=True) for sizes in ((2, 3, 9, 8), (4, 3, 3, 3)))
    block = describe("conv2d(3,4,k=3,s=2) | relu")
    convolved = _cuda._convolve(block, x, [weight, torch.ones(4)], "strict", "a test")
    direction = torch.randn_like(convolved)
    found = torch.autograd.grad(convolved, [x, weight], direction)
    wanted = torch.autograd.grad(F.conv2d(x, weight, stride=2), [x, weight], direction)
    torch.testing.assert_close(found, wanted)
    assert asked == [list(ours)]


def test_compile_traces_one_graph(with_kernels) -> None:
    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad():
        block = onepass.Block("conv2d(3,8,k=3) | tanh | group_norm(8) | mean", device="cuda")
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        assert compiled(torch.empty(2, 3, 9, 9, device="cuda")).shape == (2, 8)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("gains", [False, True])
def test_a_compiled_block_is_whole_where_that_gains(
    with_kernels, monkeypatch: pytest.MonkeyPatch, gains: bool, dynamic: bool
) -> None:
    """Sizes that are symbols have no plan."""
    asked = []
    monkeypatch.setattr(_cuda, "_is_worth_fusing", lambda *how: asked.append(how) or gains)
    lowered = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        lowered.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad():
        block = onepass.Block("conv2d(3,8,k=3) | relu | group_norm(4)", device="cuda")
        backend = aot_autograd(fw_compiler=keep)
        compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=dynamic)
        assert compiled(torch.empty(2, 3, 9, 9, device="cuda")).shape == (2, 8, 7, 7)
    whole = gains and not dynamic
    assert ("onepass.whole_forward.default" in lowered) == whole
    assert ("aten.convolution.default" in lowered) == (not whole)
    assert all(how[1] == (2, 3, 9, 9) for how in asked)


def test_without_a_gpu_blocks_run_as_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, "_asked", ["the compiler is missing"])
    with FakeTensorMode(), torch.no_grad():
        x, parameters = fakes("swish | group_norm(4)", torch.float32, torch.float32)
        assert _ops.apply("swish | group_norm(4)", x, parameters).shape == x.shape
    explanation = onepass.explain("swish | group_norm(4)", (2, 8, 9, 9), device="cuda")
    assert "eager: " in explanation
    assert "the compiler is missing" in explanation


def test_explain_for_an_architecture() -> None:
    try:
        text = onepass.explain("conv2d(3,8,k=3) | group_norm(4) | relu", (2, 3, 20, 20), device="cuda:sm_90a")
    except ValueError as error:
        pytest.skip(f"no kernel can be compiled here: {error}")
    assert "* thin_" in text
    assert "on cuda:sm_90a" in text
    assert "PyTorch's own convolution" in onepass.explain(
        "conv2d(1280,1280,k=3,p=1)", (2, 1280, 16, 16), dtype=torch.bfloat16, device="cuda:sm_80"
    )
    with pytest.raises(ValueError, match="sm_12"):
        onepass.explain("relu", (2, 3, 9), device="cuda:sm_12")


def test_bench_is_set_while_a_variant_runs() -> None:
    settings = variants.Variant("eager bench", None, None).settings()
    assert not torch.backends.cudnn.benchmark
    with settings:
        assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark


def test_thin_convolutions_run_with_their_block_where_the_plan_predicts_a_gain() -> None:
    thin = onepass.explain(
        "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean", (1024, 3, 16, 32, 32), device="cuda:sm_90a"
    )
    assert "* thin_wgmma" in thin
    assert "where gradients are wanted: the same, then thin_backward" in thin
    gradients = onepass.explain(
        "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean",
        (1024, 3, 16, 32, 32),
        device="cuda:sm_90a",
        backward=True,
    )
    assert "* thin_backward" in gradients
    how: dict[str, Any] = {"dtype": torch.bfloat16, "layout": torch.channels_last, "device": "cuda:sm_90a"}
    other = onepass.explain("conv2d(1280,1280,k=3,p=1) | relu", (2, 1280, 16, 16), **how)
    assert "-> PyTorch's own convolution, then tail_" in other
    assert "backward" not in other and "channel_add | relu" in other  # the tail adds the bias
    forced = onepass.explain(
        "conv2d(3,8) | relu", (8, 3, 256, 256), device="cuda:sm_90a", strategy="thin_cores"
    )
    assert "* thin_cores" in forced


def test_gradients_of_wide_convolutions_run_here_where_the_plan_predicts_a_gain() -> None:
    text, sizes = "conv_transpose2d(64,64,k=3) | gelu | group_norm(8)", (128, 64, 256, 256)
    forward = onepass.explain(text, sizes, device="cuda:sm_90a")
    assert "its gradients by gemm_backward" in forward
    gradients = onepass.explain(text, sizes, device="cuda:sm_90a", backward=True)
    assert "* gemm_backward" in gradients
    assert "-> tail_backward" in gradients
    strided = onepass.explain(
        "conv2d(64,64,k=3,s=2) | relu", (8, 64, 99, 99), device="cuda:sm_90a", backward=True
    )
    assert "-> PyTorch's own convolution, then tail_backward" in strided
    older = onepass.explain(text, sizes, device="cuda:sm_80", backward=True)
    assert "-> PyTorch's own convolution" in older


def test_convolutions_in_groups_run_here_where_the_plan_predicts_a_gain() -> None:
    text, sizes = "conv2d(448,448,k=3,p=1,groups=4) | group_norm(32) | relu", (32, 448, 28, 28)
    forward = onepass.explain(text, sizes, device="cuda:sm_90a")
    assert "* gemm_" in forward
    assert "its gradients by gemm_backward" in forward
    assert "* gemm_backward" in onepass.explain(text, sizes, device="cuda:sm_90a", backward=True)
    alone = onepass.explain(text.split(" | ")[0], sizes, device="cuda:sm_90a")
    assert "where gradients are wanted: the same, then gemm_backward" in alone
    forced = onepass.explain(text, sizes, device="cuda:sm_90a", strategy="gemm_mma")
    assert "* gemm_mma" in forced
    depthwise = onepass.explain("conv2d(448,448,k=3,p=1,groups=448) | relu", sizes, device="cuda:sm_90a")
    assert "* narrow" in depthwise
    assert "-> PyTorch's own convolution" not in depthwise
    across = "conv2d(448,448,k=3,p=1,groups=4) | group_norm(2) | relu"  # slabs of two groups
    assert "* gemm_apart" in onepass.explain(across, sizes, device="cuda:sm_90a")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("conv3d(64,64,k=3,p=1,groups=64) | group_norm(8) | silu", (4, 64, 32, 32, 32)),
        ("conv2d(96,96,k=7,s=2,p=3,groups=96) | group_norm(8) | silu", (32, 96, 112, 112)),
        ("conv2d(64,64,k=3,p=1,groups=16) | group_norm(8) | silu", (32, 64, 112, 112)),
    ],
)
def test_gradients_of_few_channels_run_here_where_the_plan_predicts_a_gain(
    text: str, sizes: tuple[int, ...]
) -> None:
    for architecture in ("sm_80", "sm_90a"):
        how: dict[str, Any] = {"dtype": torch.bfloat16, "device": f"cuda:{architecture}"}
        assert "its gradients by narrow_backward" in onepass.explain(text, sizes, **how)
        gradients = onepass.explain(text, sizes, backward=True, **how)
        assert "* narrow_backward" in gradients
        assert "-> tail_backward" in gradients
        alone = onepass.explain(text.split(" | ")[0], sizes, **how)
        assert "where gradients are wanted: the same, then narrow_backward" in alone


def test_a_convolution_of_one_tap_a_channel_runs_as_the_tail_that_it_is() -> None:
    text, sizes = "conv2d(64,64,k=1,groups=64) | swish | group_norm(8)", (32, 64, 56, 56)
    for architecture in ("sm_80", "sm_90a"):
        how: dict[str, Any] = {"dtype": torch.bfloat16, "device": f"cuda:{architecture}"}
        forward = onepass.explain(text, sizes, layout=torch.channels_last, **how)
        assert "* scaled" in forward
        assert "runs: tail_" in forward
        assert "where gradients are wanted: the same, then scaled_backward" in forward
        assert "* scaled_backward" in onepass.explain(text, sizes, backward=True, **how)
    forced = onepass.explain(text, sizes, device="cuda:sm_90a", strategy="scaled")
    assert "operands of the convolution are rounded to tf32" in forced
    strict = onepass.explain(text, sizes, device="cuda:sm_90a", strategy="scaled", numerics="strict")
    assert "numerics:" not in strict


def test_gradients_stay_pytorchs_where_it_is_faster() -> None:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda:sm_90a", "backward": True}
    how["layout"] = torch.channels_last
    wide = onepass.explain("conv2d(320,320,k=3,p=1) | relu", (2, 320, 64, 64), **how)
    assert "-> PyTorch's own convolution, then tail_backward" in wide


def test_one_gradient_of_a_convolution_may_be_computed_here() -> None:
    text, sizes = "conv2d(2,1280,k=1) | tanh | gelu", (128, 2, 4, 5)
    forward = onepass.explain(text, sizes, device="cuda:sm_90a")
    assert "the convolution and the rest apart, its weights' gradient here, the other PyTorch's" in forward
    gradients = onepass.explain(text, sizes, device="cuda:sm_90a", backward=True)
    assert "the weights' gradient of the convolution here" in gradients


def test_tuning_is_off_until_asked_for() -> None:
    onepass.tune()
    assert torch.ops.onepass.cuda_set_tuning(True)
    onepass.tune(False)
    assert not torch.ops.onepass.cuda_set_tuning(False)


@pytest.mark.parametrize(
    "mode", ["f32", "tf32", "near_f32", "tf32 fast", "f32 strict", "f16", "f16 fast", "bf16 strict"]
)
def test_modes_are_those_of_problem_strings(mode: str) -> None:
    block, sizes = "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean", [64, 3, 16, 32, 32]
    how = (block, sizes, mode, "nchw", "cuda:sm_90a")
    plan = torch.ops.onepass.cuda_explain(*how, "", False)
    dtype, *numerics = mode.split()
    assert plan.startswith(" ".join([f"{block} @ 64x3x16x32x32 {dtype}", *numerics]) + "\n")
    assert torch.ops.onepass.cuda_is_worth_fusing(*how)
    assert torch.ops.onepass.cuda_predicted_gain(*how) > 1
    assert torch.ops.onepass.cuda_is_worth_training(*how, [True] * 5)


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("tf32 strict", "strict computes in f32 throughout, write f32 instead of tf32"),
        ("f32 fast", "fast is coarser than tf32, write tf32 instead of f32"),
        ("fp8", "'fp8' is not accepted"),
    ],
)
def test_modes_that_are_none_are_refused(mode: str, sentence: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        torch.ops.onepass.cuda_is_worth_fusing("conv2d(3,8)", [1, 3, 9, 9], mode, "nchw", "cuda:sm_90a")


def test_a_cpu_has_one_arithmetic_and_checks_the_words() -> None:
    x = torch.randn(2, 8, 5)
    for numerics in ("", "strict", "fast"):
        output = torch.ops.onepass.forward(x, [], "tanh | mean", None, numerics)
        assert torch.equal(output, _ops.apply("tanh | mean", x, []))
    with pytest.raises((ValueError, RuntimeError), match="'strickt' is not accepted"):
        torch.ops.onepass.forward(x, [], "tanh | mean", None, "strickt")


EXPLAINS = """
import onepass, torch
how = ("swish | group_norm(4)", [2, 8, 16, 16], "f32", "nchw", "cuda:sm_90a", "tail_resident", False)
print(torch.ops.onepass.cuda_explain(*how))
"""


def marker_of_a_killed_process(cache: pathlib.Path, environment: dict[str, str]) -> pathlib.Path:
    """Kills a process while it compiles; once more where it was too fast."""
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", EXPLAINS], env=environment, stdout=subprocess.DEVNULL
        )
        while process.poll() is None and not list(cache.glob(".compiling-*")):
            time.sleep(0.002)
        process.kill()
        process.wait()
        if markers := list(cache.glob(".compiling-*")):
            return markers[0]
        for file in cache.iterdir():
            file.unlink()
    raise AssertionError("five processes compiled the kernel before they were killed")


def test_kernels_of_killed_processes_are_compiled_in_a_process_of_their_own(tmp_path: pathlib.Path) -> None:
    environment = {**os.environ, "ONEPASS_CACHE_DIR": str(tmp_path)}
    marker = marker_of_a_killed_process(tmp_path, environment)
    name = marker.name[: marker.name.index(".cubin-") + len(".cubin-")]
    (tmp_path / f"{name}99999991").write_bytes(b"")  # as if there had been a second one
    next_one = subprocess.run(
        [sys.executable, "-c", EXPLAINS], env=environment, capture_output=True, text=True
    )
    assert (next_one.returncode, next_one.stderr) == (0, "")
    assert "tail_resident on cuda:sm_90a" in next_one.stdout
    assert [file.suffix for file in tmp_path.iterdir()] == [".cubin"]
