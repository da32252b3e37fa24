"""Which code fuse recognises: each pattern gives the expected block and the original's results."""

from __future__ import annotations

import copy
import math
import pathlib
import runpy

import pytest
import torch
import torch.nn.functional as F
from fuse_support import blocks, check, reasons
from torch import Tensor, nn

from onepass import _alone, _cpu, _eager, fuse, report

# By its gradient at the limits.
CLAMP = "clamp" if _eager.CLAMP_PASSES_LIMITS else "hardtanh"
WORKLOADS = pathlib.Path(__file__).resolve().parents[2] / "examples"


class Lambda(nn.Module):
    """conv, norm and a function that combines them."""

    def __init__(self, function, rank: int = 2, **layers: nn.Module) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        self.conv = conv(4, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


CONV = "conv2d(4,8,k=3,p=1)"


def image(*sizes: int) -> Tensor:
    return torch.randn(*(sizes or (2, 4, 6, 5)))


# --- Sizes that are asked for on the way ---------------------------------------------------------------------

BLOCK = f"{CONV} | group_norm(2) | relu"


def _unpacked(m: Lambda, x: Tensor) -> Tensor:
    x = m.conv(x)
    batch, channels = x.size()[:2]
    x = m.norm(x)
    height, width = x.shape[-2:]
    return F.relu(x).view(batch, channels, height * width)


def _asserted(m: Lambda, x: Tensor) -> Tensor:
    x = m.conv(x)
    torch._assert(x.ndim == 4, f"{x.ndim} dimensions")
    x = m.norm(x)
    torch._assert(x.dim() == 4, "four dimensions")
    return F.relu(x)


def _counted(m: Lambda, x: Tensor) -> Tensor:
    x = m.norm(m.conv(x))
    values = x.numel() / x.size(dim=-1) / x.size(2)
    return F.relu(x, inplace=True) / values


def _functional(m: Lambda, x: Tensor) -> Tensor:
    x = F.conv2d(x, m.conv.weight, m.conv.bias, padding=1)
    return F.relu(m.norm(x)).reshape(x.shape)


@pytest.mark.parametrize("function", [_unpacked, _asserted, _counted, _functional])
def test_sizes_may_be_asked_for_on_the_way(function) -> None:
    fused = check(Lambda(function), image(), expect=[BLOCK])
    model = fuse(Lambda(function).eval())
    with torch.no_grad():
        small, wide = image(1, 4, 3, 3), image(3, 4, 8, 9)
        for x in (small, wide):
            torch.testing.assert_close(model(x), function(model, x), rtol=1e-4, atol=1e-5)
    assert not report(fused).fallbacks


def test_sizes_after_a_sum_cut_the_block() -> None:
    """Its operands may make it larger."""

    def forward(m: Lambda, x: Tensor) -> Tensor:
        y = m.conv(x)
        y = y + torch.tanh(y)
        return F.relu(m.norm(y)).view(y.shape)

    check(Lambda(forward), image(), expect=["tanh | residual_add", "group_norm(2) | relu"])


def test_timms_convolutions_with_batch_norm_are_one_block() -> None:
    layers = pytest.importorskip("timm.layers")
    model = layers.ConvNormAct(4, 8, 3).eval()
    fused = fuse(copy.deepcopy(model))
    with torch.no_grad():
        for sizes in ((2, 4, 6, 5), (1, 4, 9, 9)):
            x = image(*sizes)
            torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
    assert blocks(fused) == ["conv2d(4,8,k=3,p=1,bias=false) | channel_mul | channel_add | relu"]
    assert not report(fused).skipped
    for wrong in (image(4, 6, 5), image(2, 5, 6, 5)):
        errors = []
        for each in (fused, model):
            with pytest.raises(Exception) as caught:
                each(wrong)
            errors.append(caught.type)
        assert errors[0] is errors[1]


def test_sizes_asked_for_on_the_way_compile() -> None:
    model = fuse(Lambda(_unpacked).eval())
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for sizes in ((2, 4, 6, 5), (3, 4, 8, 9)):
        x = image(*sizes)
        torch.testing.assert_close(compiled(x), _unpacked(model, x), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


# --- Activations --------------------------------------------------------------------------------------------

ACTIVATION_MODULES = [
    (nn.ReLU(), "relu"),
    (nn.ReLU(inplace=True), "relu"),
    (nn.ReLU6(), "relu6"),
    (nn.LeakyReLU(0.2), "leaky_relu(0.2)"),
    (nn.PReLU(), "prelu"),
    (nn.PReLU(8), "prelu(per=channel)"),
    (nn.ELU(0.5), "elu(0.5)"),
    (nn.GELU(), "gelu"),
    (nn.GELU("tanh"), "gelu_tanh"),
    (nn.SiLU(), "swish"),
    (nn.Hardswish(), "hardswish"),
    (nn.Hardsigmoid(), "hardsigmoid"),
    (nn.Sigmoid(), "sigmoid"),
    (nn.Tanh(), "tanh"),
    (nn.Mish(), "mish"),
    (nn.Softplus(), "softplus"),
    (nn.Hardtanh(-0.5, 2.0), "hardtanh(-0.5,2)"),
    (nn.Hardtanh(0.0, float("inf")), "hardtanh(0,inf)"),
    (nn.Threshold(0, 0), "relu"),
]


@pytest.mark.parametrize(("activation", "text"), ACTIVATION_MODULES, ids=lambda value: str(value))
def test_activation_module(activation: nn.Module, text: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), activation, nn.GroupNorm(2, 8))
    check(model, image(), expect=[f"{CONV} | {text} | group_norm(2)"])


ACTIVATION_CODE = [
    (lambda x: torch.sigmoid(x) * x, "swish"),
    (lambda x: x * torch.sigmoid(x), "swish"),
    (lambda x: x.mul(x.sigmoid()), "swish"),
    (lambda x: x.mul_(x.sigmoid()), "swish"),
    (lambda x: x * torch.tanh(F.softplus(x)), "mish"),
    (lambda x: F.silu(x), "swish"),
    (lambda x: F.silu(x, inplace=True), "swish"),
    (lambda x: x.relu_(), "relu"),
    (lambda x: torch.relu(x), "relu"),
    (lambda x: torch.relu_(x), "relu"),
    (lambda x: F.relu(x, True), "relu"),
    (lambda x: F.relu_(x), "relu"),
    (lambda x: F.threshold(x, 0, 0.0), "relu"),
    (lambda x: torch.threshold(x, 0, 0), "relu"),
    (lambda x: torch.threshold_(x, 0, 0), "relu"),
    (lambda x: x.clamp(min=0), f"{CLAMP}(0,inf)"),
    (lambda x: x.clamp_(max=0.5), f"{CLAMP}(-inf,0.5)"),
    (lambda x: x.clamp_min(-0.5), f"{CLAMP}(-0.5,inf)"),
    (lambda x: torch.clamp_min_(x, 0), f"{CLAMP}(0,inf)"),
    (lambda x: torch.clamp_max(x, 0.5), f"{CLAMP}(-inf,0.5)"),
    (lambda x: x.clamp_max_(max=1), f"{CLAMP}(-inf,1)"),
    (lambda x: torch.clip(x, 0.5, -0.5), "clamp(0.5,-0.5)"),
    (lambda x: x.clip(float("-inf"), 1), f"{CLAMP}(-inf,1)"),
    (lambda x: F.hardtanh(x), "hardtanh(-1,1)"),
    (lambda x: F.hardtanh(x, -0.5, max_val=0.25, inplace=True), "hardtanh(-0.5,0.25)"),
    (lambda x: F.hardtanh_(x, 0, 1), "hardtanh(0,1)"),
    (lambda x: F.leaky_relu_(x, 0.1), "leaky_relu(0.1)"),
    (lambda x: F.elu_(x), "elu(1)"),
    (lambda x: F.leaky_relu(x, 0.1), "leaky_relu(0.1)"),
    (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"),
    (lambda x: F.softplus(x), "softplus"),
    (lambda x: F.elu(x), "elu(1)"),
    (lambda x: F.tanh(x), "tanh"),
    (lambda x: x.clamp(-1, 0.5), f"{CLAMP}(-1,0.5)"),
    (lambda x: torch.clamp(x, min=-1, max=1), f"{CLAMP}(-1,1)"),
    (lambda x: x * 0.5, "mul(0.5)"),
    (lambda x: 3 + x, "add(3)"),
    (lambda x: x - 0.25, "add(-0.25)"),
    (lambda x: x / 4, "mul(0.25)"),
    (lambda x: -x, "mul(-1)"),
]


@pytest.mark.parametrize(("code", "text"), ACTIVATION_CODE)
def test_activation_code(code, text: str) -> None:
    model = Lambda(lambda m, x: m.norm(code(m.conv(x))))
    check(model, image(), expect=[f"{CONV} | {text} | group_norm(2)"])


@pytest.mark.parametrize(
    "code", [lambda x: x / 1.0, lambda x: x * 1, lambda x: x + 0, lambda x: F.dropout(x, 0.0)]
)
def test_what_changes_nothing_drops_out(code) -> None:
    model = Lambda(lambda m, x: m.norm(code(m.conv(x))))
    check(model, image(), expect=[f"{CONV} | group_norm(2)"])


@pytest.mark.parametrize(
    "activation", [nn.Softplus(beta=2), nn.Softplus(threshold=5), nn.RReLU(), nn.CELU(), nn.Hardshrink()]
)
def test_an_activation_outside_the_language_ends_the_chain(activation: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), activation).eval()
    assert blocks(fuse(model)) == [f"{CONV} | group_norm(2)"]


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    "code",
    [
        lambda m, x: x.clamp(NAN, 1),
        lambda m, x: x.clamp(max=NAN),
        lambda m, x: x.clamp(m.norm.bias[0], m.norm.weight[0]),
        lambda m, x: x.clamp_min(m.norm.bias[0]),
        lambda m, x: F.threshold(x, 1, 0),
        lambda m, x: F.threshold(x, 0, 0.5),
        lambda m, x: F.leaky_relu(x, INF),
        lambda m, x: F.elu(x, NAN),
        lambda m, x: x * INF,
        lambda m, x: x + NAN,
        lambda m, x: x / 1e-310,
    ],
)
def test_constants_outside_the_language_end_the_chain(code) -> None:
    model = Lambda(lambda m, x: code(m, m.norm(m.conv(x)))).eval()
    fused = fuse(copy.deepcopy(model))
    assert blocks(fused) == [f"{CONV} | group_norm(2)"]
    x = image()
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_limits_that_pytorch_refuses_are_refused_by_pytorch() -> None:
    fused = fuse(Lambda(lambda m, x: F.hardtanh(m.norm(m.conv(x)), 1, -1)))
    with pytest.raises(ValueError, match="min_val cannot be greater than max_val"):
        fused(image())


# --- Convolutions -------------------------------------------------------------------------------------------

PLANE = (2, 4, 6, 5)
CONVS = [
    (nn.Conv1d(4, 8, 3), (2, 4, 9), "conv1d(4,8,k=3)"),
    (
        nn.Conv2d(4, 8, (3, 1), stride=(2, 1), padding=(1, 0), bias=False),
        PLANE,
        "conv2d(4,8,k=3x1,s=2x1,p=1x0,bias=false)",
    ),
    (
        nn.Conv2d(4, 8, 3, dilation=2, groups=2, padding="same"),
        PLANE,
        "conv2d(4,8,k=3,p=same,d=2,groups=2)",
    ),
    (nn.Conv2d(4, 8, 2, padding="same"), PLANE, "conv2d(4,8,k=2,p=same)"),
    (nn.Conv2d(4, 8, 3, padding="valid"), PLANE, "conv2d(4,8,k=3)"),
    (nn.Conv3d(4, 8, 3, padding=1), (1, 4, 4, 5, 3), "conv3d(4,8,k=3,p=1)"),
    (nn.ConvTranspose1d(4, 8, 4, stride=2), (2, 4, 5), "conv_transpose1d(4,8,k=4,s=2)"),
    (
        nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1, output_padding=1, groups=2),
        PLANE,
        "conv_transpose2d(4,8,k=3,s=2,p=1,groups=2,op=1)",
    ),
    (
        nn.ConvTranspose3d(4, 8, 3, dilation=2, bias=False),
        (1, 4, 3, 2, 3),
        "conv_transpose3d(4,8,k=3,d=2,bias=false)",
    ),
]


@pytest.mark.parametrize(("conv", "sizes", "text"), CONVS, ids=[text for _, _, text in CONVS])
def test_convolution(conv: nn.Module, sizes: tuple[int, ...], text: str) -> None:
    check(
        nn.Sequential(conv, nn.GroupNorm(2, 8), nn.ReLU()),
        image(*sizes),
        expect=[f"{text} | group_norm(2) | relu"],
    )


def test_functional_convolution() -> None:
    model = Lambda(lambda m, x: F.relu(F.conv2d(x, m.conv.weight, m.conv.bias, padding=1, stride=2)))
    check(model, image(), expect=["conv2d(4,8,k=3,s=2,p=1) | relu"])


@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
def test_other_padding_stays_with_pytorch(mode: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, padding_mode=mode), nn.GroupNorm(2, 8), nn.ReLU())
    check(model, image(), expect=["group_norm(2) | relu"])


def test_output_size_passed_stays_with_pytorch() -> None:
    up = nn.ConvTranspose2d(4, 8, 3, stride=2)
    model = Lambda(lambda m, x: m.norm(F.relu(m.up(x, output_size=(14, 12)))), up=up)
    check(model, image(), expect=["relu | group_norm(2)"])


def test_unbatched_input_runs_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Sigmoid())
    check(model, image(4, 6, 5))


# --- Norms --------------------------------------------------------------------------------------------------

NORMS = [
    (nn.GroupNorm(4, 8, eps=1e-3), "group_norm(4,eps=0.001)"),
    (nn.GroupNorm(4, 8, eps=1e-6), "group_norm(4,eps=1e-6)"),
    (nn.GroupNorm(1, 8, affine=False), "group_norm(1,affine=false)"),
    (nn.InstanceNorm2d(8), "instance_norm"),
    (nn.InstanceNorm2d(8, affine=True, eps=1e-4), "instance_norm(eps=0.0001,affine=true)"),
]


@pytest.mark.parametrize(("norm", "text"), NORMS, ids=[text for _, text in NORMS])
def test_norm(norm: nn.Module, text: str) -> None:
    check(
        nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), norm, nn.ReLU()),
        image(),
        expect=[f"{CONV} | {text} | relu"],
    )


def test_running_statistics_stay_with_pytorch() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.InstanceNorm2d(8, track_running_stats=True), nn.ReLU()
    )
    fused = check(model, image(), expect=[])
    assert "options that the block language has not" in reasons(fused)


def test_functional_norms() -> None:
    model = Lambda(lambda m, x: F.relu(F.group_norm(F.instance_norm(m.conv(x)), 4)))
    check(model, image(), expect=[f"{CONV} | instance_norm", "group_norm(4,affine=false) | relu"])


def test_a_second_norm_begins_a_new_block() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.GroupNorm(4, 8), nn.Tanh()
    )
    check(model, image(), expect=[f"{CONV} | group_norm(2) | relu", "group_norm(4) | tanh"])


def around(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 1), nn.MaxPool2d(1), norm, nn.MaxPool2d(1))


def test_a_lone_batch_norm_is_not_fused() -> None:
    assert "3: " in reasons(check(around(nn.BatchNorm2d(8)), image(), expect=[]))


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_lone_norm_on_a_cpu_is_a_call_that_chooses(channels_last: bool, monkeypatch) -> None:
    x = image().contiguous(memory_format=torch.channels_last) if channels_last else image()
    for taken in (False, True):
        monkeypatch.setattr(_alone, "takes_alone", lambda *_, taken=taken: taken)
        fused = check(around(nn.GroupNorm(2, 8)), x, expect=["group_norm(2)"])
        assert ("PyTorch's own norm" in (report(fused).fused[0].plan or "")) is not taken


@pytest.mark.parametrize(
    "activation, text",
    [
        (nn.ELU(), "elu(1)"),
        (nn.ELU(0.5, inplace=True), "elu(0.5)"),
        (nn.Mish(), "mish"),
        (nn.Softplus(), "softplus"),
        (nn.GELU("tanh"), "gelu_tanh"),
    ],
    ids=str,
)
def test_a_lone_costly_activation_on_a_cpu_is_a_call_that_chooses(activation, text, monkeypatch) -> None:
    for taken in (False, True):
        monkeypatch.setattr(_alone, "takes_alone", lambda *_, taken=taken: taken)
        fused = check(around(activation), image(), expect=[text])
        assert ("PyTorch's own activation" in (report(fused).fused[0].plan or "")) is not taken


def test_other_lone_activations_stay_as_they_are() -> None:
    for activation in (nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Softplus(beta=2)):
        check(around(activation), image(), expect=[])


def test_lone_activations_of_other_dimensions_say_nothing(recwarn) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Mish(), nn.Linear(8, 8))
    fused = fuse(copy.deepcopy(model))
    assert blocks(fused) == ["mish"]
    for shape in ((8,), (1, 1, 1, 1, 2, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(fused(x), model(x))
    assert not recwarn.list


def test_small_lone_activations_are_pytorch_s() -> None:
    device = torch.device("cpu")
    for pixels, taken in ((2, False), (64, True)):
        shape = torch.Size((1, 8, pixels, pixels))
        geometry = (shape, torch.empty(shape).stride(), torch.float32, device)
        assert _alone.takes_alone("mish", geometry, False) is (taken and _cpu.on_core(False, True))


def test_a_lone_norm_elsewhere_stays_as_it_is() -> None:
    fused = fuse(around(nn.GroupNorm(2, 8)).to("meta"))
    assert blocks(fused) == []
    assert "3: nothing before or after it fuses with it" in reasons(fused)


# --- Operands -----------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """conv, norm, + skip, act."""

    def __init__(self, add) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.add(self.norm(self.conv(x)), x))


def _iadd(a: Tensor, b: Tensor) -> Tensor:
    a += b
    return a


RESIDUAL = "conv2d(4,4,k=3,p=1) | group_norm(2) | residual_add | relu"


@pytest.mark.parametrize(
    "add",
    [lambda a, b: a + b, lambda a, b: b + a, _iadd, torch.add, lambda a, b: a.add_(b), lambda a, b: b.add(a)],
)
def test_residual_add(add) -> None:
    check(Residual(add), image(), expect=[RESIDUAL])


@torch.no_grad()
def test_adding_to_the_input_in_place_still_writes_the_input() -> None:
    model, x = Residual(lambda a, b: _iadd(b, a)), image()
    y = x.clone()
    torch.testing.assert_close(fuse(copy.deepcopy(model))(y), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.5, 2])
def test_scaled_add_stays_with_pytorch(alpha: float) -> None:
    check(
        Residual(lambda a, b: torch.add(a, b, alpha=alpha)),
        image(),
        expect=["conv2d(4,4,k=3,p=1) | group_norm(2)"],
    )


class Embedding(nn.Module):
    """A diffusion block: conv + an embedding per sample and channel, norm, act."""

    def __init__(self, widen) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.project = nn.Linear(5, 8)
        self.norm = nn.GroupNorm(2, 8)
        self.widen = widen

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x) + self.widen(self.project(F.silu(t)))))


@pytest.mark.parametrize(
    "widen",
    [
        lambda t: t[:, :, None, None],
        lambda t: t.unsqueeze(-1).unsqueeze(-1),
        lambda t: t.view(-1, 8, 1, 1),
        lambda t: t[..., None, None],
    ],
)
def test_embedding_is_added_per_sample_and_channel(widen) -> None:
    check(
        Embedding(widen),
        image(),
        torch.randn(2, 5),
        expect=[f"{CONV} | channel_add(per=sample) | group_norm(2) | swish"],
    )


def test_scale_and_shift_per_sample() -> None:
    class ScaleShift(Embedding):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            scale, shift = t[:, :, None, None].chunk(2, dim=1)
            return F.silu(self.norm(self.conv(x)) * (1 + scale) + shift)

    text = f"{CONV} | group_norm(2) | channel_mul(per=sample) | channel_add(per=sample) | swish"
    model = ScaleShift(None)
    del model.project
    check(model, image(), torch.randn(2, 16), expect=[text])


def test_layer_scale_is_a_vector_per_channel() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 8, 3, padding=1)
            self.gamma = nn.Parameter(torch.randn(1, 8, 1, 1))
            self.beta = nn.Parameter(torch.randn(8, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.conv(x)) * self.gamma + self.beta

    check(Scale(), image(), expect=[f"{CONV} | relu | channel_mul | channel_add"])


@pytest.mark.parametrize("sizes", [(2, 8, 6, 1), (1, 8, 6, 5), (2, 1, 6, 5), (6, 5), (1,), ()])
def test_operands_of_other_shapes_run_as_they_were(sizes: tuple[int, ...]) -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 8, 3, padding=1)
            self.norm = nn.GroupNorm(2, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.relu(self.norm(self.conv(x)) + y)

    check(Add(), image(), torch.randn(sizes))


# --- Mean ---------------------------------------------------------------------------------------------------

MEANS = [
    lambda x: x.mean((2, 3, 4)),
    lambda x: x.mean([-1, -2, -3]),
    lambda x: torch.mean(x, dim=[2, 3, 4]),
    lambda x: torch.mean(x, (2, 3, 4), keepdim=True),
    lambda x: x.mean(dim=(4, 2, 3), keepdim=True),
]


@pytest.mark.parametrize("mean", MEANS)
def test_mean_over_space(mean) -> None:
    model = Lambda(lambda m, x: mean(m.norm(F.hardswish(m.conv(x)))), rank=3)
    check(model, image(2, 4, 3, 4, 5), expect=["conv3d(4,8,k=3,p=1) | hardswish | group_norm(2) | mean"])


@pytest.mark.parametrize(
    "mean", [lambda x: x.mean(1), lambda x: x.mean((2,)), lambda x: x.mean(), lambda x: x.mean((0, 2, 3))]
)
def test_other_means_end_the_chain(mean) -> None:
    model = Lambda(lambda m, x: mean(m.norm(F.hardswish(m.conv(x)))))
    check(model, image(), expect=[f"{CONV} | hardswish | group_norm(2)"])


# --- Chains -------------------------------------------------------------------------------------------------


def test_conv_keep_leaves_a_tail() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.GroupNorm(2, 8), nn.Hardswish())
    check(model, image(), conv="keep", expect=["swish | group_norm(2) | hardswish"])


@pytest.mark.parametrize("conv", ["", "Fuse", None])
def test_another_value_of_conv_is_refused(conv) -> None:
    with pytest.raises(ValueError, match='must be "fuse" or "keep"'):
        fuse(nn.Identity(), conv=conv)


def test_dropout_counts_in_training_only() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.Dropout(0.5), nn.GroupNorm(2, 8), nn.Identity(), nn.ReLU()
    )
    check(model, image(), expect=[f"{CONV} | group_norm(2) | relu", "group_norm(2) | relu"])


def test_a_tensor_used_twice_ends_the_chain() -> None:
    def forward(m: Lambda, x: Tensor) -> Tensor:
        a = m.conv(x)
        return F.relu(m.norm(a)) + a

    check(Lambda(forward), image(), expect=["group_norm(2) | relu | residual_add"])


def test_a_shared_activation_is_fused_everywhere() -> None:
    act = nn.ReLU()
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), act, nn.GroupNorm(2, 8), act, nn.Conv2d(8, 4, 1), act
    )
    check(model, image(), expect=[f"{CONV} | relu | group_norm(2) | relu", "conv2d(8,4,k=1) | relu"])


def test_a_shared_block_runs_twice() -> None:
    block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
    check(nn.Sequential(block, block), image(), expect=["conv2d(4,4,k=3,p=1) | group_norm(2) | relu"])


def test_preactivation_fuses_as_a_tail() -> None:
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 8, 3, padding=1))
    check(model, image(), expect=["group_norm(2) | swish"])


def test_in_place_on_the_input_stays_in_place() -> None:
    check(
        nn.Sequential(nn.ReLU(inplace=True), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)),
        image(),
        expect=["group_norm(2) | relu"],
    )


def test_a_write_between_two_stages_is_seen() -> None:
    def forward(m: Lambda, x: Tensor) -> Tensor:
        a = m.conv(x)
        y = x * 2
        z = m.norm(a)
        y.add_(1)
        return F.relu(z + y[:, :1])

    check(Lambda(forward), image())


def test_a_write_to_the_operand_is_seen() -> None:
    class Model(Residual):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            z = self.norm(self.conv(x))
            w = z + y
            y.add_(1)
            return F.relu(w) + y

    check(Model(None), image())


def test_a_chain_across_modules_belongs_to_the_parent() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(4, 8, 3, padding=1)), nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU())
    )
    check(model, image(), expect=[f"{CONV} | group_norm(2) | relu"])


class StandardisedConv(nn.Conv2d):
    """A convolution whose weight is computed at each call."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(
            x, weight / math.sqrt(2), self.bias, self.stride, self.padding, self.dilation, self.groups
        )


def test_a_subclass_is_traced_through() -> None:
    model = nn.Sequential(StandardisedConv(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
    check(model, image(), expect=[f"{CONV} | group_norm(2) | relu"])


def test_a_subclass_with_another_meaning_is_not_taken_for_its_base() -> None:
    class Doubled(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            return torch.maximum(x, 2 * x)

    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), Doubled())
    check(model, image(), expect=[f"{CONV} | group_norm(2)"])


@pytest.mark.parametrize("name", ["s19", "s27", "s60", "s61"])
def test_workload(name: str) -> None:
    source = runpy.run_path(str(WORKLOADS / f"{name}.py"))
    expected = {
        "s19": ("conv_transpose2d(64,64,k=3) | gelu | group_norm(8)", (1, 64, 6, 7)),
        "s27": ("conv3d(3,16,k=4) | hardswish | group_norm(4) | mean", (2, 3, 6, 7, 8)),
        "s60": ("conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish", (2, 3, 3, 4, 5)),
        "s61": ("conv_transpose3d(64,128,k=3,bias=false) | relu | group_norm(8)", (1, 64, 3, 2, 4)),
    }
    text, sizes = expected[name]
    check(source["Model"](*source["get_init_inputs"]()), torch.rand(sizes), expect=[text])


def test_functions_alone_are_a_chain() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(8, 4, 3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(F.group_norm(F.conv2d(x, self.kernel, padding=1), 2))

    text = "conv2d(4,8,k=3,p=1,bias=false) | group_norm(2,affine=false) | relu"
    check(Functional(), image(), expect=[text])


class Branch(nn.Module):
    """Runs a second module on the input after the first convolution read it."""

    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        a = self.conv(x)
        b = self.second(x)
        return F.relu(self.norm(a) + b)


class Writing(nn.Module):
    """Writes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x.mul_(2))


class WritingSometimes(Writing):
    """The same, and cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[0] else x


@torch.no_grad()
@pytest.mark.parametrize("second", [Writing(), WritingSometimes()])
def test_a_module_that_writes_its_input_is_seen(second: nn.Module) -> None:
    model, x = Branch(second), image()
    fused = fuse(copy.deepcopy(model))
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
    assert blocks(fused) == ["group_norm(2) | residual_add | relu"]


def test_a_module_that_only_reads_does_not_end_the_chain() -> None:
    second = nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(1, 4))
    check(Branch(second), image(), expect=[RESIDUAL, "conv2d(4,4,k=1) | group_norm(1)"])


def test_another_name_of_a_tensor_sees_what_is_written() -> None:
    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)
            self.norm = nn.GroupNorm(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            before = out = self.norm(self.conv(x))
            out += x
            out *= 2
            return F.relu(out) + before

    check(Aliased(), image(), expect=["conv2d(4,4,k=3,p=1) | group_norm(2)", "relu | residual_add"])


def test_setting_a_tensors_data_is_not_traced() -> None:
    def forward(m: Lambda, x: Tensor) -> Tensor:
        y = m.norm(m.conv(x))
        y.data = y.data * 2
        return F.relu(y)

    fused = check(Lambda(forward), image(), expect=[])
    assert "sets the attribute data of a tensor" in reasons(fused)
