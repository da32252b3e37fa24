"""Batch norms in evaluation as affine stages of fused models, judged by an eager twin."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_support import blocks, check, reasons, replica_of
from fuse_twins import Twins, bfloat16
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

AFFINE = "channel_mul | channel_add"
CONV = "conv2d(3,8,k=3,p=1,bias=false)"
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def image(*sizes: int) -> Tensor:
    return torch.randn(sizes or (2, 3, 6, 5), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def with_statistics(model: nn.Module) -> nn.Module:
    """Statistics and weights as after some training: none is 0 or 1."""
    generator = torch.Generator().manual_seed(11)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            tensors = (module.running_mean, module.running_var, module.weight, module.bias)
            for tensor, low, high in zip(tensors, (-2, 0.3, -1.5, -1), (2, 3, 1.5, 1), strict=True):
                if tensor is not None:
                    tensor.uniform_(low, high, generator=generator)
    return model


def simple(activation: nn.Module | None = None, **options: Any) -> nn.Sequential:
    conv, norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, **options)
    return with_statistics(nn.Sequential(conv, norm, activation or nn.ReLU(inplace=True)))


class Basic(nn.Module):
    """The basic block of a ResNet, as torchvision writes it."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A narrow ResNet-18."""

    def __init__(self, width: int = 8, blocks: tuple[int, ...] = (2, 2, 2)) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        layers, channels = [], width
        for number, count in enumerate(blocks):
            for i in range(count):
                layers.append(Basic(channels, width << number, 2 if number and not i else 1))
                channels = width << number
        self.layers = nn.Sequential(*layers)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))


def resnet() -> nn.Module:
    return with_statistics(ResNet())


def pair(make: Callable[[], nn.Module] = simple) -> tuple[nn.Module, nn.Module]:
    """A model in evaluation, and its fused copy."""
    eager = make().eval()
    return eager, fuse(copy.deepcopy(eager))


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


def test_gradients_of_statistics_that_changed_since_are_those_of_the_forward() -> None:
    results = []
    for model in pair():
        out = model(image())
        with torch.no_grad():
            model[1].running_var.mul_(
                1.0
            )  # written after the forward: eager refuses, or it is not read again
        try:
            out.sum().backward()
            results.append([p.grad for p in model.parameters()])
        except RuntimeError as error:
            results.append(str(type(error)))
    if not isinstance(results[0], str):
        for some, other in zip(*results, strict=True):
            torch.testing.assert_close(some, other, rtol=1e-4, atol=1e-4)


# --- 6. Compilers, transforms, copies -----------------------------------------------------------------------


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


# --- 7. The operator, and the choice on the CPU -------------------------------------------------------------


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
    with pytest.raises(ValueError, match="vectors of one length and one type"):
        torch.ops.onepass.scale_and_shift(image(4), wrong, None, None, 1e-5)


def test_a_convolution_that_pytorch_computes_faster_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpu, "_ARM", {"f32": dict.fromkeys(("wide", "thin", "tap"), 1e15)})
    monkeypatch.setattr(_cpu, "_X86", _cpu._ARM)
    _cpu.is_left.cache_clear()
    try:
        twins = Twins(resnet)
        twins.edit(lambda m: m.eval())
        twins.same_on_the_fused_path(image(8, 3, 64, 64), near=(1e-3, 1e-4))
        plans = [entry.plan for entry in report(twins.fused).fused if "eval" in entry.modes]
        left = [plan.startswith("-> PyTorch's own convolution, then tail") for plan in plans]
        assert sum(left) > len(left) / 2, plans  # the smallest blocks are faster in one call
    finally:
        _cpu.is_left.cache_clear()


def test_wide_convolutions_of_16_bits_are_pytorchs_and_thin_ones_are_not() -> None:
    def is_left(channels: int, dtype: torch.dtype) -> bool:
        text = f"conv2d({channels},{channels},k=3,p=1) | relu"
        return _cpu.leaves_convolution(text, torch.empty(2, channels, 28, 28, dtype=dtype))

    assert is_left(256, torch.bfloat16) and not is_left(16, torch.bfloat16)
    assert not is_left(16, torch.float32) and not is_left(64, torch.float64)


# --- 8. CUDA tensors, as fakes ------------------------------------------------------------------------------


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
