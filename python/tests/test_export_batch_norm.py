"""Exported models with batch norms: scale and shift follow the statistics, training is the original's."""

from __future__ import annotations

import copy
import os
import pathlib
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_support import replica_of
from test_export import compile_by_nvrtc, load, run_on_cpu
from torch import Tensor, nn

from onepass import available, export, unavailable_reason

pytestmark = [
    pytest.mark.skipif(not available(), reason=str(unavailable_reason())),
    pytest.mark.filterwarnings("ignore"),
]

RESNET = '''"""Two basic blocks of a ResNet, and the function."""
import torch
import torch.nn.functional as F
from torch import nn


class Basic(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs, affine=inputs == outputs)
        self.downsample = None
        if stride > 1:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.layers = nn.Sequential(Basic(8, 8, 1), Basic(8, 16, 2))
        self.register_buffer("mean", torch.linspace(-1, 1, 16))
        self.register_buffer("variance", torch.linspace(0.5, 2, 16))

    def forward(self, x):
        x = self.layers(F.relu(self.bn(self.stem(x))))
        return torch.tanh(F.silu(F.batch_norm(x, self.mean, self.variance, eps=1e-3)))


def get_inputs():
    return [torch.rand(2, 3, 12, 12)]


def get_init_inputs():
    return []
'''
BLOCKS = 6  # the stem, two of each basic block, the shortcut; the function is part of the last
INNER = 3  # those of the first basic block and the shortcut, whose forwards are their own


@pytest.fixture(scope="module")
def texts() -> dict[bool, str]:
    return {}


@pytest.fixture
def make(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, texts: dict[bool, str]
) -> Callable[..., types.ModuleType]:
    monkeypatch.setattr(export, "_check_alone", lambda path: None)

    def made(train: bool = False) -> types.ModuleType:
        if train not in texts:
            original = tmp_path / "resnet.py"
            original.write_text(RESNET)
            texts[train] = str(export.export(str(original), "sm_90a", "fuse", train, "resnet_new.py"))
        text = texts[train]
        namespace = re.search(r'^_NAMESPACE = "(\w+)"', text, re.MULTILINE).group(1)
        path = tmp_path / "resnet_new.py"
        path.write_text(text.replace(namespace, f"{namespace}_{os.urandom(4).hex()}"))
        return load(path)

    return made


@torch.no_grad()
def pair(module: types.ModuleType) -> tuple[nn.Module, nn.Module]:
    """The original in evaluation, with statistics as after training, and the exported model."""
    original, new = module.Model(), module.ModelNew()
    for part in original.modules():
        if isinstance(part, nn.BatchNorm2d):
            for tensor, low, high in (
                (part.running_mean, -1, 1),
                (part.running_var, 0.5, 2),
                (part.weight, 0.5, 1.5),
                (part.bias, -1, 1),
            ):
                if tensor is not None:
                    tensor.uniform_(low, high)
    new.load_state_dict(original.state_dict())
    return original.eval(), new.eval()


def same(module: types.ModuleType, original: nn.Module, new: nn.Module, calls: list[str], ran: int) -> None:
    """The results agree, and so many kernels ran."""
    (x,) = module.get_inputs()
    wanted = original(x)
    calls.clear()
    torch.testing.assert_close(new(x), wanted, rtol=1e-4, atol=1e-5)
    assert len(calls) == ran, (calls, module.ModelNew.why())


def test_every_batch_norm_is_part_of_a_block(
    make: Callable[..., types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make()
    calls = run_on_cpu(module, monkeypatch)
    original, new = pair(module)
    with torch.no_grad():
        same(module, original, new, calls, BLOCKS)
    blocks = re.findall(r'^    """(.*)"""$', pathlib.Path(module.__file__).read_text(), re.MULTILINE)
    assert "conv2d(8,8,k=3,p=1,bias=false) | channel_mul | channel_add | residual_add | relu" in blocks


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], int]] = {
    "mean in place": (lambda m: m.bn.running_mean.add_(1), BLOCKS),
    "variance by data": (lambda m: m.layers[0].bn1.running_var.data.mul_(2), BLOCKS),
    "weight by data": (lambda m: m.layers[0].bn2.weight.data.mul_(2), BLOCKS),
    "the function's": (lambda m: m.mean.add_(1), BLOCKS),
    "state": (lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}), BLOCKS),
    "another buffer": (lambda m: setattr(m.bn, "running_mean", torch.ones(8)), BLOCKS),
    "eps": (lambda m: setattr(m.bn, "eps", 0.5), INNER),
    "no weight": (lambda m: setattr(m.bn, "weight", None), INNER),
    "no statistics": (
        lambda m: (setattr(m.bn, "running_mean", None), setattr(m.bn, "running_var", None)),
        INNER,
    ),
    "training": (lambda m: m.bn.train(), INNER),
    "a hook": (lambda m: m.bn.register_forward_hook(lambda *given: given[2] + 1) and None, INNER),
    "half a norm": (lambda m: m.layers[0].double().float(), BLOCKS),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_counts(
    make: Callable[..., types.ModuleType], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    change, ran = CHANGES[name]
    module = make()
    calls = run_on_cpu(module, monkeypatch)
    original, new = pair(module)
    with torch.no_grad():
        same(module, original, new, calls, BLOCKS)
        for model in (original, new):
            change(model)
        same(module, original, new, calls, ran)


def test_training_updates_the_statistics_as_the_original_does(
    make: Callable[..., types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make()
    calls = run_on_cpu(module, monkeypatch)
    original, new = pair(module)
    for model in (original, new):
        model.train()
        torch.manual_seed(3)
        for _ in range(2):
            model(*module.get_inputs())
    assert len(calls) == 2 * 2  # in each call the sums with shortcuts, one with the function behind it
    for some, other in zip(new.buffers(), original.buffers(), strict=True):
        torch.testing.assert_close(some, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_the_originals(
    make: Callable[..., types.ModuleType], monkeypatch: pytest.MonkeyPatch, train: bool, frozen: bool
) -> None:
    module = make(train)
    calls = run_on_cpu(module, monkeypatch)
    original, new = pair(module)
    if frozen:
        for model in (original, new):
            for part in model.modules():
                if isinstance(part, nn.BatchNorm2d):
                    part.requires_grad_(False)
    (x,) = module.get_inputs()
    for some, other in zip(given_gradients(new, x), given_gradients(original, x), strict=True):
        torch.testing.assert_close(some, other, rtol=1e-3, atol=1e-4)
    assert calls


def given_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    parameters = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(model(x).square().sum(), [x, *parameters]))


def test_second_derivatives_are_the_originals(
    make: Callable[..., types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make()
    run_on_cpu(module, monkeypatch)
    results = []
    x = module.get_inputs()[0]
    for model in pair(module):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(model(x).square().sum(), parameters, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in gradients), parameters))
    for other, some in zip(*results, strict=True):
        torch.testing.assert_close(some, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()) + 1e-6)


def test_compiled(make: Callable[..., types.ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    module = make()
    calls = run_on_cpu(module, monkeypatch)
    original, new = pair(module)
    torch._dynamo.reset()
    compiled = torch.compile(new, backend="aot_eager")
    (x,) = module.get_inputs()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), original(x), rtol=1e-4, atol=1e-5)
            for model in (original, new):
                model.bn.running_mean.add_(1)
    assert calls


@pytest.mark.parametrize("duplicate", [copy.deepcopy, replica_of])
def test_a_copy_reads_its_own_statistics(
    make: Callable[..., types.ModuleType], monkeypatch: pytest.MonkeyPatch, duplicate: Any
) -> None:
    module = make()
    calls = run_on_cpu(module, monkeypatch)
    original, new = (duplicate(model) for model in pair(module))
    with torch.no_grad():
        for model in (original, new):
            model.bn.running_mean = model.bn.running_mean + 1
        same(module, original, new, calls, BLOCKS)


def test_a_norm_of_16_bits_is_left_to_pytorch(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_check_alone", lambda path: None)
    text = RESNET.replace(
        "torch.linspace(0.5, 2, 16))", "torch.linspace(0.5, 2, 16))\n        self.bfloat16()"
    )
    original = tmp_path / "halves.py"
    original.write_text(text.replace("12, 12)", "12, 12, dtype=torch.bfloat16)"))
    exported = export.exported(str(original), "sm_90a", "fuse", False, "new.py", "pytorch")
    said, written = "\n".join(exported.summary), exported.text
    assert "layers.0.bn1: its scale and shift are fp32, and exported kernels of 16 bits have one type" in said
    blocks = re.findall(r'^    """(.*)"""$', written, re.MULTILINE)
    assert "residual_add | relu" in blocks and not any("channel_mul" in block for block in blocks)
    assert "_scale_and_shift" not in written


def test_the_kernel_compiles(make: Callable[..., types.ModuleType]) -> None:
    module = make()
    assert "sqrt.rn" in compile_by_nvrtc(module._BATCH_NORM_KERNEL)
    assert module._EXTENSIONS["batch_norm"][1][1] == module._BATCH_NORM_KERNEL


def test_a_file_without_batch_norms_has_none_of_it() -> None:
    examples = pathlib.Path(__file__).resolve().parents[2] / "examples" / "exported"
    assert all("scale_and_shift" not in path.read_text() for path in examples.glob("*.py"))
