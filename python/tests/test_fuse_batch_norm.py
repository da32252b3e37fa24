"""Batch norms in evaluation as affine stages of fused models, judged by an eager twin."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import AFFINE, image, pair, resnet, simple, with_statistics
from fuse_support import blocks, check, reasons
from fuse_twins import Twins, bfloat16
from torch import Tensor, nn

import onepass
from onepass import fuse, report

pytestmark = [
    pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason())),
    pytest.mark.filterwarnings("ignore"),
]

CONV = "conv2d(3,8,k=3,p=1,bias=false)"
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check_modes(model: nn.Module, x: Tensor, expect: list[str]) -> nn.Module:
    """As check, for blocks of evaluation alone."""
    fused = check(with_statistics(model), x).eval()
    assert blocks(fused) == expect, blocks(fused)
    assert all(entry.modes == ("eval",) for entry in report(fused).fused)
    return fused


# --- 1. Chains ----------------------------------------------------------------------------------------------

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("affine", [True, False])
def test_a_convolution_and_its_batch_norm_are_one_block(rank: int, affine: bool) -> None:
    conv, norm = CONVS[rank - 1], BATCH_NORMS[rank - 1]
    model = nn.Sequential(conv(3, 4, 3), norm(4, affine=affine), nn.SiLU())
    text = f"conv{rank}d(3,4,k=3) | {AFFINE} | swish"
    check_modes(model, image(2, 3, *(6, 5, 4)[:rank]), [text])


class Between(nn.Module):
    """Batch norms between other stages: pre-activation, after a group norm, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1)
        self.group, self.norm = nn.GroupNorm(1, 3), nn.BatchNorm2d(3, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(F.relu(self.pre(x)))
        return torch.tanh(self.norm(F.silu(self.group(h))) + x) * 0.5


def test_batch_norms_between_tails() -> None:
    first, second = (
        f"{AFFINE} | relu",
        f"conv2d(3,3,k=3,p=1) | group_norm(1) | swish | {AFFINE} | residual_add | tanh | mul(0.5)",
    )
    fused = check(with_statistics(Between()), image())
    assert [e.block for e in report(fused).fused if "eval" in e.modes] == [first, second]


def test_a_mean_follows() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return F.adaptive_avg_pool2d(self.features(x), 1)

    fused = check(with_statistics(Pooled()), image())
    assert f"conv2d(3,8,k=3) | {AFFINE} | relu | mean" in blocks(fused)


class Functional(nn.Module):
    """The function, with statistics that are the module's own."""

    def __init__(self, weighted: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.register_buffer("mean", torch.linspace(-1, 1, 8))
        self.register_buffer("variance", torch.linspace(0.5, 2, 8))
        self.weight = nn.Parameter(torch.linspace(-2, 2, 8)) if weighted else None
        self.bias = nn.Parameter(torch.linspace(1, -1, 8)) if weighted else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return F.relu(
            F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, self.training, 0.1, 1e-3)
        )


@pytest.mark.parametrize("weighted", [True, False])
def test_the_function(weighted: bool) -> None:
    check_modes(Functional(weighted), image(), [f"{CONV} | {AFFINE} | relu"])


def test_a_batch_norm_of_vectors_is_fused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU())
    check_modes(model, image(5, 4), [f"{AFFINE} | gelu"])


@pytest.mark.parametrize(
    "norm", [nn.SyncBatchNorm(8), type("OwnBatchNorm", (nn.BatchNorm2d,), {})(8)], ids=str
)
def test_other_batch_norms_are_left_alone(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU()).eval()
    fused = fuse(copy.deepcopy(model))
    assert blocks(fused) == [] and f"1: {type(norm).__name__} is not a stage" in reasons(fused)
    torch.testing.assert_close(fused(image()), model(image()))


def test_a_lazy_batch_norm_is_fused_once_it_is_one() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    assert blocks(fuse(model).eval()) == []
    model.train()(image())
    assert blocks(fuse(model.eval())) == [f"conv2d(3,8,k=3) | {AFFINE} | relu"]


def test_a_batch_norm_without_statistics_is_left_alone() -> None:
    twins = Twins(lambda: simple(track_running_stats=False))
    assert blocks(twins.fused) == [] and "statistics of the batch" in reasons(twins.fused)
    for training in (False, True):
        twins.edit(lambda m, training=training: m.train(training))
        twins.same(image())


# --- 2. A ResNet --------------------------------------------------------------------------------------------


def test_a_resnet_runs_its_blocks_fused() -> None:
    twins = Twins(resnet)
    twins.edit(lambda m: m.eval())
    twins.same_on_the_fused_path(image(2, 3, 32, 32), near=(1e-3, 1e-4))
    found = [entry.block for entry in report(twins.fused).fused if "eval" in entry.modes]
    assert len(found) == 1 + 2 * 6 + 2  # the stem, two in each block, two shortcuts
    assert f"conv2d(8,8,k=3,p=1,bias=false) | {AFFINE} | residual_add | relu" in found
    assert not report(twins.fused).skipped


def test_training_a_resnet_updates_its_statistics_as_eager_does() -> None:
    twins = Twins(resnet)
    for training in (True, False, True, True, False):
        twins.edit(lambda m, training=training: m.train(training))
        twins.same(image(4, 3, 32, 32), near=(1e-3, 1e-4))
    eager, fused = (dict(model.named_buffers()) for model in twins.both)
    assert int(fused["bn1.num_batches_tracked"]) == 3
    for name in eager:
        torch.testing.assert_close(fused[name], eager[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_statistics_of_a_training_call_are_bit_for_bit(momentum: float | None) -> None:
    eager = simple(momentum=momentum)
    fused = fuse(copy.deepcopy(eager))
    for model in (eager, fused):
        model.train()
        for _ in range(3):
            model(image())
    for some, other in zip(fused.buffers(), eager.buffers(), strict=True):
        assert torch.equal(some, other)


# --- 3. Changes after fusing --------------------------------------------------------------------------------

EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "mean in place": lambda m: m[1].running_mean.add_(1),
    "variance in place": lambda m: m[1].running_var.mul_(3),
    "mean by data": lambda m: m[1].running_mean.data.fill_(0.5),
    "weight by data": lambda m: m[1].weight.data.mul_(-2),
    "bias by data": lambda m: m[1].bias.data.add_(1),
    "mean by numpy": lambda m: m[1].running_mean.numpy().__setitem__(0, 9.0),
    "load_state_dict": lambda m: m.load_state_dict(
        {name: tensor + 1 for name, tensor in m.state_dict().items()}
    ),
    "assigned state": lambda m: m.load_state_dict(
        {name: tensor * 2 for name, tensor in m.state_dict().items()}, assign=True
    ),
    "another buffer": lambda m: setattr(m[1], "running_mean", torch.ones(8)),
    "another weight": lambda m: setattr(m[1], "weight", nn.Parameter(torch.ones(8))),
    "reset": lambda m: m[1].reset_running_stats(),
    "eps": lambda m: setattr(m[1], "eps", 0.5),
    "eps of an integer": lambda m: setattr(m[1], "eps", 1),
    "no statistics": lambda m: (setattr(m[1], "running_mean", None), setattr(m[1], "running_var", None)),
    "no weight": lambda m: setattr(m[1], "weight", None),
    "momentum": lambda m: setattr(m[1], "momentum", None),
    "untracked": lambda m: setattr(m[1], "track_running_stats", False),
    "the norm trains": lambda m: m[1].train(),
    "another norm": lambda m: m.__setitem__(1, with_statistics(nn.BatchNorm2d(8))),
    "no norm": lambda m: m.__setitem__(1, nn.Identity()),
    "another class": lambda m: m.__setitem__(1, nn.SyncBatchNorm(8).eval()),
    "a hook": lambda m: m[1].register_forward_hook(lambda module, given, result: result + 1),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "mixed": lambda m: (m.bfloat16(), m[1].float()),
    "mixed wrongly": lambda m: m[1].bfloat16(),
    "mixed within": lambda m: (m.bfloat16(), setattr(m[1], "running_mean", m[1].running_mean.float())),
    "too few channels": lambda m: m.__setitem__(1, with_statistics(nn.BatchNorm2d(4)).eval()),
    "weight of one": lambda m: setattr(m[1], "weight", nn.Parameter(torch.ones(1))),
    "strided": lambda m: setattr(m[1], "running_var", torch.linspace(1, 4, 16)[::2]),
    "gradient of the mean": lambda m: m[1].running_mean.requires_grad_(),
}


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name", EDITS)
def test_a_change_after_fusing_counts(name: str, called: bool) -> None:
    twins = Twins(simple)
    twins.edit(lambda m: m.eval())
    if called:
        twins.same_on_the_fused_path(image())
        with torch.no_grad():
            twins.fused(image())
    with torch.no_grad():
        twins.edit(EDITS[name])
    for _ in range(2):
        dtype = next(twins.eager.parameters()).dtype
        near = (1e-4, 1e-5) if dtype.itemsize > 2 else (4e-2, 4e-2)
        twins.same(image().to(dtype), near=near)
        twins.same(image().to(dtype), near=near, context=torch.no_grad)
        twins.same(image().to(dtype), near=near, context=torch.inference_mode, leaf=False)


def test_the_mode_may_be_switched_at_any_time() -> None:
    twins = Twins(simple)
    for training in (False, True, False, False, True, False):
        twins.edit(lambda m, training=training: m.train(training))
        twins.same(image())


def test_a_frozen_batch_norm_in_training_is_as_eager() -> None:
    twins = Twins(resnet)

    def freeze(model: nn.Module) -> None:
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
                module.weight.requires_grad_(False)

    twins.edit(freeze)
    before = copy.deepcopy(twins.fused.state_dict())
    twins.same(image(2, 3, 32, 32), near=(1e-3, 1e-4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in twins.fused.state_dict().items())


def test_other_ways_to_lay_the_input_out() -> None:
    twins = Twins(simple)
    twins.edit(lambda m: m.eval())
    twins.same_on_the_fused_path(image().to(memory_format=torch.channels_last))
    twins.same_on_the_fused_path(image(2, 6, 5, 3).permute(0, 3, 1, 2))
    twins.same(image(3, 6, 5))  # without a batch
    twins.same(image(0, 3, 6, 5))
    for wrong in (image(2, 4, 6, 5), image(2, 3), image().double(), image().long()):
        twins.same(wrong)


def test_a_wrong_number_of_dimensions_is_answered_as_by_eager() -> None:
    twins = Twins(lambda: with_statistics(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())).eval())
    twins.same_on_the_fused_path(image(2, 3))
    twins.same_on_the_fused_path(image(2, 3, 7))
    twins.same(image(2, 3, 7, 2))


# --- 4. Types -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_dtype", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_keep_scale_and_shift_in_fp32(dtype: torch.dtype, norm_dtype: torch.dtype | None) -> None:
    """A large mean: with a shift of 16 bits the result would be off by 0.1 and more."""
    exact = simple().eval()
    with torch.no_grad():
        exact[0].weight.mul_(0.01)
        exact[1].running_mean.copy_(torch.linspace(30, 60, 8))
        exact[1].bias.copy_(exact[1].running_mean * exact[1].weight / (exact[1].running_var + 1e-5).sqrt())
        exact[1].to(norm_dtype or dtype).float()
    model = copy.deepcopy(exact).to(dtype)
    model[1].to(norm_dtype or dtype)
    fused, x = fuse(copy.deepcopy(model)), image().to(dtype)
    with torch.no_grad():
        result, wanted = fused(x), copy.deepcopy(model).float()(x.float())
    assert result.dtype == dtype and not report(fused).fallbacks
    assert (result - wanted).abs().max() < 0.02


def test_autocast() -> None:
    twins = Twins(simple)
    twins.edit(lambda m: m.eval())
    assert (
        twins.same(image(), context=bfloat16, near=(4e-2, 4e-2))["output"]["tensor"].dtype == torch.bfloat16
    )
    assert not twins.left


# --- 5. Gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", list(itertools.product([False, True], repeat=4)), ids=str)
def test_gradients_of_all_or_some(asked: tuple[bool, ...]) -> None:
    twins = Twins(simple)
    wants_input, *others = asked

    def ask(model: nn.Module) -> None:
        model.eval()
        for parameter, wanted in zip(model.parameters(), others, strict=True):
            parameter.requires_grad_(wanted)

    twins.edit(ask)
    twins.same_on_the_fused_path(image(), leaf=wants_input)


def test_gradients_in_float64() -> None:
    model = fuse(simple(activation=nn.SiLU()).double().eval())
    parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]

    def run(x: Tensor, *given: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), given, strict=True):
                parameter.copy_(value)
        return torch.func.functional_call(
            model, dict(zip(dict(model.named_parameters()), given, strict=True)), (x,)
        )

    x = image(1, 3, 3, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *parameters))
    assert torch.autograd.gradgradcheck(run, (x, *parameters))


def test_second_derivatives() -> None:
    results = []
    for model in pair(lambda: simple(activation=nn.SiLU())):
        x = image().requires_grad_()
        sources = [x, *model.parameters()]
        gradients = torch.autograd.grad(model(x).square().sum(), sources, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in gradients), sources))
    for some, other in zip(*results, strict=True):
        torch.testing.assert_close(some, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))
