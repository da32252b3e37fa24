"""What the backend makes of CUDA graphs, shown on fake tensors: no GPU is needed, and nothing is computed."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from onepass import _cuda, _numerics
from onepass._description import describe
from onepass.compiling import building, measuring, operators, policy
from onepass.compiling.parts import Part, predicted
from onepass.compiling.rewrite import Kept, Rewriting


@pytest.fixture(autouse=True)
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_cuda, "_asked", [None])
    monkeypatch.setattr(policy, "device_text", lambda device: "cuda:sm_90a")
    torch._dynamo.reset()
    with FakeTensorMode():
        yield


class Network(nn.Module):
    """A thin block, a wide one, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.wide, self.norm2 = nn.Conv2d(16, 64, 3, padding=1), nn.GroupNorm(4, 64)
        self.leave = nn.Conv2d(64, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm1(self.enter(x)))
        return x + self.leave(F.silu(self.norm2(self.wide(x))))


def network(dtype: torch.dtype) -> nn.Module:
    """Made on the GPU: fake parameters cannot be moved."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            return Network()
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _autocast() -> Iterator[None]:
    """torch.autocast wants a GPU."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def planned(model: nn.Module, x: Tensor, keep: str) -> tuple[policy.Plan, Tensor, list[str]]:
    """The plan, the result of the rewritten graph and the calls in it."""
    found: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        rewriting = Rewriting(module)
        plan = policy.plan(rewriting.segments, keep, None)
        rewriting.apply([decision.kept for decision in plan.decisions])
        calls = [str(n.target) for n in module.graph.nodes if n.op == "call_function"]
        found.extend((plan, calls))
        return module.forward

    result = torch.compile(model, backend=backend)(x)
    return found[0], result, found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
def test_kept_chains_have_the_shapes_types_and_gradients_of_eager(dtype: torch.dtype, training: bool) -> None:
    model = network(dtype)
    x = torch.empty(4, 3, 64, 64, device="cuda", dtype=dtype)
    with torch.set_grad_enabled(training):
        plan, result, calls = planned(model, x, "all")
        wanted = model(x)
    assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
    assert sum("onepass.chain" in call for call in calls) == len(plan.decisions) == 3
    assert result.requires_grad == training


def test_a_convolution_that_is_pytorchs_stays_in_the_graph() -> None:
    model = network(torch.float32)
    x = torch.empty(4, 3, 64, 64, device="cuda")
    with torch.no_grad(), _autocast():
        plan, result, calls = planned(model, x, "all")
        wanted = model(x)
    assert all(torch.float16 in decision.segment.types for decision in plan.decisions)
    assert all(decision.kept.after_convolution for decision in plan.decisions if decision.kept)
    assert sum("conv2d" in call for call in calls) == 3 and plan.layout in ("nchw", "nhwc")
    assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)


@pytest.mark.parametrize("given", [torch.contiguous_format, torch.channels_last])
def test_chains_are_decided_for_the_layout_that_runs(
    given: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast leaves tails alone to be kept: they have no say where their tensors come from."""
    asked = set()
    costs = policy.costs.costs

    def asking(question: Any, layout: str, *others: Any) -> Any:
        asked.add(layout)
        return costs(question, layout, *others)

    monkeypatch.setattr(policy.costs, "costs", asking)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU())
    x = torch.empty(16, 32, 128, 128, device="cuda").contiguous(memory_format=given)
    with torch.no_grad(), _autocast():
        plan, _, _ = planned(model, x, "all")
    assert all(decision.kept and decision.kept.after_convolution for decision in plan.decisions)
    if given == torch.channels_last:
        assert asked == {"nhwc"} and plan.layout == "nhwc"
    else:
        assert asked == {"nchw", "nhwc"} and plan.layout is not None


def test_both_sides_are_predicted() -> None:
    model = network(torch.bfloat16)
    with torch.no_grad():
        plan, _, _ = planned(
            model, torch.empty(16, 3, 256, 256, device="cuda", dtype=torch.bfloat16), "faster"
        )
    for decision in plan.decisions:
        assert 0 < decision.ours < 1e-2 and 0 < decision.inductor < 1e-2
        assert (decision.kept is not None) == (decision.ours < 0.97 * decision.inductor)
    assert any(decision.kept for decision in plan.decisions)


@pytest.mark.parametrize("block", ["group_norm(4) | swish", "conv2d(3,16,k=3,p=1) | group_norm(4)"])
def test_gradients_have_the_sizes_of_their_tensors(block: str) -> None:
    """The autograd engine asks for a GPU, so the backward is called by hand."""
    channels = 16 if block.startswith("group") else 3
    x = torch.empty(2, channels, 8, 8, device="cuda")
    parameters = [torch.empty(16, device="cuda") for _ in range(2)]
    if channels == 3:
        parameters = [torch.empty(16, 3, 3, 3, device="cuda"), torch.empty(16, device="cuda"), *parameters]
    needs = (False,) * 3 + (True,) * (len(parameters) + 1)
    context = types.SimpleNamespace(needs_input_grad=needs)
    context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
    output = operators._Differentiable.forward(context, block, None, ("", ""), x, *parameters)
    gradients = operators._Differentiable.backward(context, torch.empty_like(output))
    assert gradients[:3] == (None, None, None)
    assert [g.shape for g in gradients[3:]] == [t.shape for t in (x, *parameters)]


def test_kernels_of_kept_chains_are_built_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(torch.bfloat16)
    x = torch.empty(4, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
    plan, _, _ = planned(model, x, "all")
    wanted = building.kernels_of(policy.parts_of(plan))
    assert len(set(wanted)) == len(wanted) == 6  # of three blocks, forward and backward
    meeting = threading.Barrier(2, timeout=60)  # broken where one kernel waits for another
    built: list[building.Kernels] = []

    def build(kernels: building.Kernels) -> None:
        if kernels in wanted[:2]:
            meeting.wait()
        built.append(kernels)

    monkeypatch.setattr(building, "_build", build)
    monkeypatch.setattr(building.os, "cpu_count", lambda: 2)
    with building.ahead(policy.parts_of(plan)):
        pass
    assert set(built) == set(wanted)


def test_what_is_built_ahead_is_what_a_call_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(torch.bfloat16)
    with torch.no_grad():
        x = torch.empty(4, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
        plan, _, _ = planned(model, x, "all")
    explained: list[str] = []
    explain = torch.ops.onepass.cuda_explain.default
    monkeypatch.setattr(
        building.torch.ops.onepass, "cuda_explain", lambda *how: explained.append(explain(*how))
    )
    with building.ahead(policy.parts_of(plan)):
        pass
    assert len(explained) == 3 and all("predicted" in text for text in explained)


def test_symbolic_sizes_keep_whole_blocks_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch cannot be asked how it rounds convolutions of sizes that are not known."""
    monkeypatch.setattr(_numerics, "allows_tf32", lambda: True)
    x = torch.empty(4, 3, 64, 64, device="cuda")
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        plan, result, _ = planned(network(torch.float32), x, "all")
    whole = [d.kept for d in plan.decisions if d.kept and not d.kept.after_convolution]
    assert whole and all(kept.forward_words == "near_f32" for kept in whole)
    assert result.shape == (4, 16, 64, 64)
    x = torch.empty(4, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        plan, _, _ = planned(network(torch.bfloat16), x, "all")
    assert any(d.kept and not d.kept.after_convolution for d in plan.decisions)


def test_a_bias_moves_behind_the_convolution_that_stays() -> None:
    """Inductor adds it in the next loop; the operator is none, so it adds the bias itself."""
    model = network(torch.bfloat16)
    x = torch.empty(4, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
    segments: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        rewriting = Rewriting(module)
        segments.extend(rewriting.segments)
        kept = [Kept(f"channel_add | {describe(s.block).tail}", True, True) for s in segments]
        rewriting.apply(kept)
        convs = [n for n in module.graph.nodes if "conv2d" in str(n.target)]
        assert [n.args[2] for n in convs] == [None] * 3
        chains = [n.args[2] for n in module.graph.nodes if "onepass.chain" in str(n.target)]
        assert chains == [*["channel_add | group_norm(4) | swish"] * 2, "channel_add | residual_add"]
        return module.forward

    with torch.no_grad():
        result, wanted = torch.compile(model, backend=backend)(x), model(x)
    assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype) and len(segments) == 3


def test_a_plan_is_made_anew_with_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was predicted to be fast and is not is left to Inductor; each part is timed once."""
    timed: list[Part] = []
    factor = [10.0]

    def seconds_of(parts: Sequence[Part]) -> dict[Part, float]:
        timed.extend(parts)
        slow = {"onepass": factor[0], "pytorch": 1.0, "inductor": 1.0}
        return {part: slow[part.by] * predicted(part) for part in parts}

    monkeypatch.setattr(measuring, "seconds_of", seconds_of)
    x = torch.empty(16, 3, 256, 256, device="cuda", dtype=torch.bfloat16)

    def plan_of(measure: bool) -> policy.Plan:
        found: list[policy.Plan] = []

        def backend(module: Any, inputs: Any) -> Any:
            found.append(policy.plan(Rewriting(module).segments, "faster", None, measure))
            return module.forward

        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(network(torch.bfloat16), backend=backend)(x)
        return found[0]

    assert any(decision.kept for decision in plan_of(False).decisions) and not timed
    assert not any(decision.kept for decision in plan_of(True).decisions)
    assert timed and len(set(timed)) == len(timed) and {part.by for part in timed} >= {"onepass", "inductor"}
    factor[0] = 0.5
    predicted_, measured = plan_of(False), plan_of(True)
    assert sum(bool(d.kept) for d in measured.decisions) >= sum(bool(d.kept) for d in predicted_.decisions)
    assert sum(d.ours for d in measured.decisions if d.kept) < sum(
        d.ours for d in predicted_.decisions if d.kept
    )


def test_autocast_rounds_what_convolutions_alone_read() -> None:
    """A norm's result is fp32 under autocast; where only convolutions read it, it is written in 16 bits."""
    model = network(torch.float32)
    x = torch.empty(4, 3, 64, 64, device="cuda")
    with torch.no_grad(), _autocast():
        plan, result, _ = planned(model, x, "all")
        wanted = model(x)
    written = [decision.segment.out_dtype for decision in plan.decisions]
    # The first is also added to the result; the second is what the last convolution reads.
    assert written == [torch.float32, torch.float16, torch.float32]
    assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
