"""Real models with random weights: the same outputs and gradients fused, and how many of their norms are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_support import Output, assert_same
from torch import nn

from onepass import fuse, report

_NORMS = (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)


def fused_norms(model: nn.Module) -> tuple[int, int]:
    """How many norms run inside blocks in the model's present mode, and how many there are."""
    mode = "train" if model.training else "eval"
    inside = {name for entry in report(model).fused if mode in entry.modes for name in entry.modules}
    norms = [name for name, module in model.named_modules() if isinstance(module, _NORMS)]
    return sum(name in inside for name in norms), len(norms)


def check_model(
    model: nn.Module,
    inputs: Callable[[], tuple[Any, ...]],
    least: int,
    total: int,
    output: Output = lambda y: y,
) -> None:
    torch.manual_seed(0)
    fused = fuse(copy.deepcopy(model))
    for training in (False, True):
        assert_same(fused.train(training), model.train(training), *inputs(), output=output)
        count, norms = fused_norms(fused)
        assert norms == total
        assert count >= least, report(fused)
    assert not [entry for entry in report(fused).skipped if "ran the original forward" in entry.reason]


def test_timm_resnet50_gn() -> None:
    timm = pytest.importorskip("timm")
    check_model(timm.create_model("resnet50_gn"), lambda: (torch.randn(2, 3, 64, 64),), least=53, total=53)


def test_monai_segresnet() -> None:
    nets = pytest.importorskip("monai.networks.nets")
    check_model(nets.SegResNet(out_channels=2), lambda: (torch.randn(1, 1, 16, 16, 16),), least=25, total=25)


def test_monai_dynunet() -> None:
    nets = pytest.importorskip("monai.networks.nets")
    model = nets.DynUNet(
        3, 1, 2, [3, 3, 3, 3], [1, 2, 2, 2], [2, 2, 2], filters=[8, 16, 16, 16], res_block=True
    )
    check_model(model, lambda: (torch.randn(1, 1, 16, 16, 16),), least=18, total=18)


def test_diffusers_unet() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 32, 64, 64),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    inputs = lambda: (torch.randn(2, 3, 16, 16), torch.tensor([3, 7]))  # noqa: E731
    check_model(model, inputs, least=40, total=51, output=lambda y: y.sample)


def test_diffusers_autoencoder() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.AutoencoderKL(
        block_out_channels=(32, 32, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        norm_num_groups=8,
    )
    check_model(model, lambda: (torch.randn(1, 3, 32, 32),), least=45, total=52, output=lambda y: y.sample)
