"""torch.compile(backend="onepass"): eager's numbers, forward and backward, and traps of Dynamo's graph."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.metrics
import torch.nn.functional as F
from fuse_support import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.compiling import record

PACKAGE = Path(onepass.__file__).parents[1]
ALL = {"onepass.keep": "all"}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    record._compilations.clear()
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", onepass.FallbackWarning)
        yield


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="onepass", options=ALL, **options)


def kept(model: Any) -> list[str]:
    """The texts of the blocks that the last compilation of a model or function keeps."""
    decisions = record.compilations_of(model)[-1].plan.decisions
    return [d.segment.block for d in decisions if d.kept is not None]


class Residual(nn.Module):
    """A diffusion model's block, by functions and operators."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.embed = nn.Linear(6, channels)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.embed(F.silu(t))[:, :, None, None]
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return (x + h) / 2.0


def residual_inputs(n: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 8, 6, 6), torch.randn(n, 6)


# --- Registration ---


def run_python(code: str, tmp_path: Path, path: str) -> str:
    env = dict(os.environ, PYTHONPATH=path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


_LIST = "import torch, torch._dynamo as d; print('onepass' in d.list_backends())"
_LOOK_UP = """
import sys
from torch._dynamo.backends.registry import lookup_backend
print(lookup_backend("onepass").__module__)
import onepass
print(lookup_backend("onepass").__module__)
"""


def test_under_pythonpath_importing_onepass_registers_without_importing_dynamo(tmp_path: Path) -> None:
    code = f"import sys, onepass; print('torch._dynamo' in sys.modules)\n{_LIST}"
    assert run_python(code, tmp_path, str(PACKAGE)).split() == ["False", "True"]
    assert run_python(f"import torch._dynamo, onepass\n{_LIST}", tmp_path, str(PACKAGE)).split() == ["True"]


def installed(tmp_path: Path) -> str:
    """A path on which the package is found with its metadata, as after pip install."""
    metadata = tmp_path / "site" / "onepass-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: onepass\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(_entry_points())
    return f"{PACKAGE}{os.pathsep}{metadata.parent}"


def _entry_points() -> str:
    """As pyproject.toml declares them."""
    lines = (PACKAGE.parent / "pyproject.toml").read_text().splitlines()
    start = lines.index("[project.entry-points.torch_dynamo_backends]")
    return f"[torch_dynamo_backends]\n{lines[start + 1].replace(chr(34), '')}\n"


def test_installed_the_entry_point_alone_registers(tmp_path: Path) -> None:
    path = installed(tmp_path)
    assert run_python(_LOOK_UP, tmp_path, path).split() == ["onepass.compiling"] * 2
    code = "import onepass\n" + _LOOK_UP
    assert run_python(code, tmp_path, path).split() == ["onepass.compiling"] * 2


# --- Numbers ---


@pytest.mark.parametrize("training", [False, True])
def test_a_residual_block_has_eagers_result_and_gradients(training: bool) -> None:
    model = Residual().train(training)
    assert_same(compiled(model), copy.deepcopy(model), *residual_inputs())
    conv = "conv2d(8,8,k=3,p=1)"
    assert kept(model) == [
        "group_norm(4) | swish",
        f"{conv} | channel_add(per=sample) | group_norm(4) | swish",
        f"{conv} | residual_add | mul(0.5)",
    ]


def test_without_gradients_the_graph_holds_the_blocks_alone() -> None:
    model = Residual().eval()
    inputs = residual_inputs()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(model)(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
    assert len(kept(model)) == 3


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_and_layouts(mode: str, layout: torch.memory_format) -> None:
    model = Residual().eval().to(memory_format=layout)
    x, t = residual_inputs()
    x = x.to(memory_format=layout)
    with torch.no_grad():
        result = torch.compile(model, backend="onepass", mode=mode)(x, t)
        wanted = model(x, t)
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
    assert result.stride() == wanted.stride()
    assert kept(model)


def test_accumulated_gradients_are_eagers() -> None:
    model = Residual()
    twin = copy.deepcopy(model)
    step = compiled(model)
    for _ in range(3):
        inputs = residual_inputs()
        step(*inputs).square().mean().backward()
        twin(*inputs).square().mean().backward()
    for some, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(some.grad, other.grad, rtol=1e-3, atol=1e-5)


class BatchNormed(nn.Module):
    """Batch norms in evaluation, with and without weights, on a large mean."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.norm, self.plain = nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False)
        for tensor in (self.norm.running_mean, self.plain.running_mean, self.norm.weight, self.norm.bias):
            nn.init.normal_(tensor, std=2.0)
        nn.init.uniform_(self.norm.running_var, 0.2, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.conv(x)))
        return torch.sigmoid(self.plain(h) + h)


BATCH_NORMED = [
    "conv2d(4,8,k=3,p=1,bias=false) | channel_mul | channel_add | relu",
    "channel_mul | channel_add | residual_add | sigmoid",
]


def test_batch_norm_in_evaluation_is_an_affine_stage() -> None:
    model = BatchNormed().eval()
    x = torch.randn(2, 4, 8, 8)
    assert_same(compiled(model), copy.deepcopy(model), x)
    assert kept(model) == BATCH_NORMED
    before = model(x)
    with torch.no_grad():
        model.norm.running_mean.add_(1)  # read at each call, never folded
        assert not torch.allclose(model(x), before)
    torch.testing.assert_close(compiled(model)(x), model(x), rtol=1e-4, atol=1e-5)


def test_batch_norm_of_16_bits_keeps_its_scale_in_fp32() -> None:
    exact = BatchNormed().eval()
    model = copy.deepcopy(exact).bfloat16()
    x = torch.randn(2, 4, 8, 8).bfloat16()
    with torch.no_grad():
        result, eager, wanted = compiled(model)(x), model(x), copy.deepcopy(model).float()(x.float())
    assert result.dtype == torch.bfloat16 and kept(model) == BATCH_NORMED
    assert (result - wanted).abs().max() <= (eager - wanted).abs().max() + 1e-2


def test_batch_norm_in_training_is_left_alone() -> None:
    model = BatchNormed().train()
    assert_same(compiled(model), copy.deepcopy(model), torch.randn(2, 4, 8, 8))
    assert not any("channel_mul" in block for block in kept(model))


def test_bare_convolutions_and_norms_are_chains() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.MaxPool2d(2), nn.GroupNorm(2, 8), nn.MaxPool2d(2))
    assert_same(compiled(model), copy.deepcopy(model), torch.randn(2, 4, 12, 12))
    assert kept(model) == ["conv2d(4,8,k=3)", "group_norm(2)"]


# --- Layouts ---


def generated_code(model: Any, *inputs: Tensor) -> str:
    from torch._inductor.utils import run_and_get_code

    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch.no_grad(), uncached, torch._inductor.config.patch(fx_graph_cache=False):
        _, (code,) = run_and_get_code(compiled(model), *inputs)
    return code


# How generated code checks the result of an operator, after its strides; in PyTorch 2.15 its type too.
CHECKED = ", 'torch.ops.onepass.forward.default')"
CHECKED_TYPE = f", torch.float32{CHECKED}"


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_blocks_lie_in_one_layout_with_no_copy_between(
    monkeypatch: pytest.MonkeyPatch, layout: str, rank: int
) -> None:
    from onepass.compiling import costs

    monkeypatch.setattr(costs, "LAYOUTS", (layout,))
    # A block of PyTorch's convolution and a tail has no layout of its own: each is to run whole.
    monkeypatch.setattr(costs._Cpu, "convolution", lambda *_: 1.0)
    monkeypatch.setattr(costs, "_costs_on_cpu", costs._costs_on_cpu.__wrapped__)
    conv = nn.Conv2d if rank == 2 else nn.Conv3d
    blocks = [nn.Sequential(conv(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Flatten(2)).eval()
    x = torch.randn(2, 8, *(6,) * rank)
    code = generated_code(model, x)
    calls = [line for line in code.splitlines() if "onepass.forward.default(" in line]
    sizes = f"(2, 8, {', '.join(['6'] * rank)})"
    strides = f"({8 * 6**rank}, 1, {', '.join(str(8 * 6**d) for d in range(rank - 1, -1, -1))})"
    assert len(calls) == 3
    results = code.replace(CHECKED_TYPE, CHECKED).count(f", {sizes}, {strides}{CHECKED}")
    assert results == (3 if layout == "nhwc" else 0), code
    kernels = code.count("async_compile.cpp_pybinding(")
    assert kernels == (2 if layout == "nhwc" else 0)  # the entry, and Flatten, which wants space together
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_tail_follows_the_layout_of_its_input() -> None:
    norm = nn.GroupNorm(2, 8)

    def run(x: Tensor) -> Tensor:
        return F.relu(norm(x * 2)) + 1

    x = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    code = generated_code(run, x)
    assert f"(288, 1, 48, 8){CHECKED}" in code.replace(CHECKED_TYPE, CHECKED)
    with torch.no_grad():
        result = compiled(run)(x)
        torch.testing.assert_close(result, run(x), rtol=1e-4, atol=1e-5)
    assert result.is_contiguous(memory_format=torch.channels_last)


# --- Costs ---


def asked(
    block: str,
    sizes: tuple[int, ...],
    parameters: Sequence[tuple[int, ...]],
    wanted: tuple[bool, ...] = (),
    fused: tuple[bool, bool] = (False, False),
) -> Any:
    """The costs on an H200 in bf16."""
    from onepass.compiling.costs import Question, costs
    from onepass.compiling.parts import Given

    given = [Given(tuple(each), torch.bfloat16) for each in (sizes, *parameters)]
    words = (("", ""), ("", ""))
    tensors = (given[0], tuple(given[1:]), torch.bfloat16, torch.bfloat16)
    return costs(Question(block, *tensors, *words, "cuda:sm_90a", 1, wanted, *fused), "nchw")


def test_costs_of_a_gpu_that_is_not_there() -> None:
    own = [(320, 320, 3, 3), *[(320,)] * 3]
    wide = asked("conv2d(320,320,k=3,p=1) | group_norm(32) | swish", (2, 320, 64, 64), own)
    assert 1e-5 < wide.whole.seconds < wide.inductor.seconds < 1e-3
    assert [part.by for part in wide.tail.parts] == ["pytorch", "onepass"]
    assert [part.by for part in wide.inductor.parts] == ["pytorch", "inductor"]
    block, sizes = "group_norm(32) | residual_add | relu", (64, 256, 56, 56)
    own = [(256,), (256,), sizes]
    tail = asked(block, sizes, own)
    assert tail.whole == tail.tail and tail.tail.seconds < tail.inductor.seconds
    step = asked(block, sizes, own, (True,) * 4)
    assert step.whole.seconds > 2 * tail.whole.seconds
    assert step.inductor.seconds > 2 * tail.inductor.seconds


def test_a_fused_neighbour_counts_for_inductor() -> None:
    def found(*fused: bool) -> Any:
        return asked("group_norm(32) | swish", (8, 320, 64, 64), [(320,)] * 2, (), fused)  # type: ignore[arg-type]

    assert found(True, False).inductor.seconds < found(False, False).inductor.seconds
    assert found(False, True).whole.seconds > found(False, False).whole.seconds


# --- Traps ---


def test_in_place_calls_whose_result_is_unused_are_not_dropped() -> None:
    norm = nn.GroupNorm(2, 8)

    def run(x: Tensor, log: Tensor) -> Tensor:
        h = F.relu(norm(x))
        log.add_(1)
        h.mul_(2)
        return h

    x, log = torch.randn(2, 8, 4, 4), torch.zeros(3)
    result = compiled(run)(x, log)
    torch.testing.assert_close(result, 2 * F.relu(norm(x)))
    assert log.tolist() == [1.0] * 3
    assert kept(run)


def test_a_chain_does_not_read_what_is_written_in_between() -> None:
    norm = nn.GroupNorm(2, 8)

    def run(x: Tensor, y: Tensor) -> Tensor:
        h = norm(x)
        y.mul_(3)
        h = F.relu(h + y)
        y.zero_()
        return h

    x, y = torch.randn(2, 8, 4, 4), torch.randn(2, 8, 4, 4)
    mine, theirs = y.clone(), y.clone()
    with torch.no_grad():
        torch.testing.assert_close(compiled(run)(x, mine), run(x, theirs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine, theirs)


def test_foreach_and_custom_operators_that_write_end_a_chain() -> None:
    norm = nn.GroupNorm(2, 8)

    def run(x: Tensor, y: Tensor) -> Tensor:
        h = norm(x)
        torch._foreach_add_([h, y], 1.0)
        return F.relu(h)

    x, y = torch.randn(2, 8, 4, 4), torch.randn(2, 8, 4, 4)
    mine, theirs = y.clone(), y.clone()
    with torch.no_grad():
        torch.testing.assert_close(compiled(run)(x, mine), run(x, theirs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("training", [False, True])
def test_dynamic_shapes_compile_once(training: bool) -> None:
    model = Residual().train(training)
    twin = copy.deepcopy(model)
    compiled_model = compiled(model, dynamic=True)
    counter = torch._dynamo.utils.counters["stats"]
    before = None
    for n, size in ((2, 10), (3, 9), (5, 7), (4, 12)):
        inputs = torch.randn(n, 8, size, size), torch.randn(n, 6)
        assert_same(compiled_model, twin, *inputs)
        before = counter["unique_graphs"] if before is None else before
    assert counter["unique_graphs"] == before
    assert len(kept(model)) == 3


def test_an_eps_that_is_a_graph_input_is_no_constant() -> None:
    def run(x: Tensor, eps: float) -> Tensor:
        return F.relu(F.group_norm(x, 2, eps=eps))

    x = torch.randn(2, 8, 4, 4)
    run_compiled = compiled(run, dynamic=True)
    for eps in (1e-5, 0.1, 1.0):
        torch.testing.assert_close(run_compiled(x, eps), run(x, eps), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_autocast_outside(training: bool) -> None:
    model = Residual().train(training)
    twin = copy.deepcopy(model)
    inputs = residual_inputs()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = twin(*inputs)
        result = compiled(model)(*inputs)
    assert result.dtype == wanted.dtype
    torch.testing.assert_close(result, wanted, rtol=2e-2, atol=2e-2)
    result.float().square().mean().backward()
    wanted.float().square().mean().backward()
    for some, other in zip(model.parameters(), twin.parameters(), strict=True):
        scale = other.grad.abs().max().item()
        torch.testing.assert_close(some.grad, other.grad, rtol=5e-2, atol=5e-2 * scale)


def test_a_chain_ends_where_autocast_begins() -> None:
    conv, norm = nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8)

    def run(x: Tensor) -> Tensor:
        h = conv(x)
        with torch.autocast("cpu", torch.bfloat16):
            h = norm(h)
            h = conv(F.relu(h))
        return torch.sigmoid(h)

    x = torch.randn(2, 8, 9, 9)
    with torch.no_grad():
        result, wanted = compiled(run)(x), run(x)
    assert result.dtype == wanted.dtype
    torch.testing.assert_close(result, wanted, rtol=2e-2, atol=2e-2)
    conv = "conv2d(8,8,k=3)"
    assert kept(run) == [conv, "group_norm(2) | relu", conv]


def test_a_chain_ends_where_the_grad_mode_changes() -> None:
    norm = nn.GroupNorm(2, 8)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            h = norm(x)
        return F.relu(h) * x

    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    compiled(run)(x).sum().backward()
    gradient, x.grad = x.grad, None
    run(x).sum().backward()
    torch.testing.assert_close(gradient, x.grad)
    assert norm.weight.grad is None


@pytest.mark.parametrize("reentrant", [False])
def test_graphs_of_checkpoints_are_rewritten(reentrant: bool) -> None:
    class Checkpointed(Residual):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            x = checkpoint(super().forward, x, t, use_reentrant=reentrant)
            return checkpoint(super().forward, x, t, use_reentrant=reentrant)

    model = Checkpointed()
    assert_same(compiled(model), copy.deepcopy(model), *residual_inputs())
    assert len(kept(model)) == 6


def test_new_nodes_have_example_values() -> None:
    seen = []

    def backend(module: Any, inputs: Any) -> Any:
        from onepass.compiling.policy import plan
        from onepass.compiling.rewrite import Rewriting

        rewriting = Rewriting(module)
        rewriting.apply([d.kept for d in plan(rewriting.segments, "all", None).decisions])
        for node in module.graph.nodes:
            if node.op in ("call_function", "call_method"):
                value = node.meta["example_value"]
                seen.append((str(node.target), tuple(value.shape)))
        return module.forward

    def run(x: Tensor, s: Tensor) -> Tensor:
        return F.relu(F.group_norm(x, 2) * s[:, :, None, None]).mean((2, 3), keepdim=True)

    x, s = torch.randn(2, 8, 4, 4), torch.randn(2, 8)
    result = torch.compile(run, backend=backend)(x, s)
    torch.testing.assert_close(result, run(x, s), rtol=1e-4, atol=1e-5)
    assert ("onepass.chain.default", (2, 8)) in seen and ("reshape", (2, 8, 1, 1)) in seen


def test_freezing() -> None:
    model = Residual().eval()
    inputs = residual_inputs()
    options = {**ALL, "freezing": True}
    with torch.no_grad():
        result = torch.compile(model, backend="onepass", options=options)(*inputs)
        torch.testing.assert_close(result, model(*inputs), rtol=1e-4, atol=1e-5)
    assert len(kept(model)) == 3


# --- Declining ---


def generated(
    model: Any, inputs: tuple[Tensor, ...], backend: str, **options: Any
) -> tuple[int, list[Tensor]]:
    """How many kernels Inductor generates, and the results with the gradients."""
    torch._dynamo.reset()
    torch._inductor.metrics.reset()
    model.zero_grad()
    result = torch.compile(model, backend=backend, options={"fx_graph_cache": False, **options})(*inputs)
    result.square().mean().backward()
    found = [result.detach(), *(p.grad.clone() for p in model.parameters())]
    return torch._inductor.metrics.generated_kernel_count, found


def test_declining_everything_gives_inductors_code() -> None:
    model = Residual()
    inputs = residual_inputs()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        count, results = generated(model, inputs, "onepass", **{"onepass.keep": "none"})
        wanted_count, wanted = generated(model, inputs, "inductor")
        assert kept(model) == []
        fewer, _ = generated(model, inputs, "onepass", **ALL)
    assert count == wanted_count > fewer
    for some, other in zip(results, wanted, strict=True):
        assert torch.equal(some, other)


def test_the_reasons_for_declining_and_the_seconds_are_kept() -> None:
    model = Residual()
    torch.compile(model, backend="onepass", options={"onepass.keep": "none"})(*residual_inputs())
    decisions = record.compilations_of(model)[-1].plan.decisions
    assert all(d.reason and 0 < d.ours < 1 and 0 < d.inductor < 1 for d in decisions)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(Exception, match=r'"onepass.keep" is \'some\''):
        torch.compile(Residual(), backend="onepass", options={"onepass.keep": "some"})(*residual_inputs())


# --- A PyTorch with other internals ---


def test_other_internals_give_plain_inductor_and_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from onepass.compiling import policy

    def plan(*_: Any) -> None:
        raise AttributeError("module 'torch._inductor' has no attribute 'gone'")

    monkeypatch.setattr(policy, "plan", plan)
    model = Residual()
    inputs = residual_inputs()
    with pytest.warns(onepass.FallbackWarning, match="compiled by Inductor alone: PyTorch .* 'gone'"):
        result = compiled(model)(*inputs)
    torch.testing.assert_close(result, model(*inputs), rtol=1e-4, atol=1e-5)


# --- Report, fused models, caches ---


def test_chains_are_named_by_their_modules() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()))

    def function(x: Tensor) -> Tensor:
        return model(x)

    for what, name in ((model, "0.0"), (function, "model.0.0")):
        torch._dynamo.reset()
        run = compiled(what)
        run(torch.randn(2, 3, 8, 8))
        assert [chain.name for chain in onepass.report(run).chains] == [name]


def test_report_and_explain_show_both_sides() -> None:
    model = Residual().eval()
    run = compiled(model)
    assert "nothing was compiled" in onepass.explain(run)
    with torch.no_grad():
        run(*residual_inputs())
    found = onepass.report(run)
    assert [chain.name for chain in found.chains] == ["norm1", "conv1", "conv2"]
    assert all(c.kept and c.milliseconds > 0 and c.inductor_milliseconds > 0 for c in found.chains)
    assert "3 of 3 chains kept" in str(found) and "ms by Inductor" in str(found)
    assert len(found.as_dict()["chains"]) == 3
    text = onepass.explain(run)
    assert "conv_channel_lanes" in text and "conv1: conv2d(8,8,k=3,p=1)" in text
    torch._dynamo.reset()
    run = torch.compile(model, backend="onepass", options={"onepass.keep": "none"})
    with torch.no_grad():
        run(*residual_inputs())
    assert "left to Inductor: the option" in str(onepass.report(run))


def test_the_report_of_a_compiled_function() -> None:
    def run(x: Tensor) -> Tensor:
        return F.relu(F.group_norm(x, 2))

    def other(x: Tensor) -> Tensor:
        return F.relu(F.group_norm(x, 4))

    first, second = compiled(run), compiled(other)
    first(torch.randn(2, 8, 4, 4))
    second(torch.randn(2, 8, 4, 4))
    assert [chain.block for chain in onepass.report(first).chains] == ["group_norm(2,affine=false) | relu"]
    assert [chain.block for chain in onepass.report(second).chains] == ["group_norm(4,affine=false) | relu"]


def test_a_fused_model_is_unfused_for_the_backend_alone() -> None:
    model = Residual().eval()
    plain = copy.deepcopy(model)
    onepass.fuse(model)
    inputs = residual_inputs()
    with torch.no_grad():
        result = compiled(model)(*inputs)
        torch.testing.assert_close(result, plain(*inputs), rtol=1e-4, atol=1e-5)
    assert len(kept(model)) == 3
    assert len(onepass.report(model).fused) == 3
    graphs = []

    def see(module: Any, inputs: Any) -> Any:
        graphs.append(str(module.graph))
        return module.forward

    with torch.no_grad():
        torch.compile(model, backend=see)(*inputs)
    assert "onepass.forward" in graphs[0] or "onepass_forward" in graphs[0]


_CACHED = """
import sys, torch, torch.nn.functional as F
import torch._functorch.config
import onepass
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

class Own(CustomGraphPass):
    seen = 0
    def __call__(self, graph):
        Own.seen += 1
    def uuid(self):
        return "own"

torch.manual_seed(0)
conv, norm = torch.nn.Conv2d(4, 4, 3), torch.nn.GroupNorm(2, 4)
def run(x):
    return F.relu(norm(conv(x)))
options = {"onepass.keep": "all", "post_grad_custom_pre_pass": Own()}
torch._functorch.config.enable_autograd_cache = sys.argv[1] == "aot"
if len(sys.argv) > 2:
    from onepass import _library
    _library.content_hash = lambda: "another library"
x = torch.randn(2, 4, 8, 8)
result = torch.compile(run, backend="onepass", options=options)(x)
result.sum().backward()
torch.testing.assert_close(result, run(x), rtol=1e-4, atol=1e-5)
print(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"], Own.seen)
"""


@pytest.mark.parametrize("cache", ["aot", "fx"])
def test_caches_hit_across_processes_and_a_users_pass_runs(tmp_path: Path, cache: str) -> None:
    script = tmp_path / "cached.py"
    script.write_text(_CACHED)
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"), PYTHONPATH=str(PACKAGE))

    def run(*args: str) -> list[int]:
        command = [sys.executable, str(script), cache, *args]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return list(map(int, done.stdout.split()))

    hits = 0 if cache == "aot" else 1
    first, second, other = run(), run(), run("other")
    assert first[hits] == 0 and first[2] == 2  # forward's graph and backward's
    assert second[hits] > 0 and second[2] == 0
    assert other[hits] == 0 and other[2] == 2
