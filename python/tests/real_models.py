"""The real models that are tested and timed, with random weights; building one needs its package."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class RealModel:
    """How a model is built and called, and how many of its norms must run inside blocks."""

    name: str
    package: str  # what must be importable
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]  # small ones, for tests
    timed_inputs: Callable[[], tuple[Any, ...]]  # of the smallest size the model is used at
    least_fused: int
    norms: int
    output: Callable[[Any], Tensor] = lambda y: y


def _resnet() -> nn.Module:
    return importlib.import_module("timm").create_model("resnet50_gn")


def _segresnet() -> nn.Module:
    return importlib.import_module("monai.networks.nets").SegResNet(out_channels=2)


def _dynunet() -> nn.Module:
    return importlib.import_module("monai.networks.nets").DynUNet(
        3, 1, 2, [3, 3, 3, 3], [1, 2, 2, 2], [2, 2, 2], filters=[8, 16, 16, 16], res_block=True
    )


def _unet() -> nn.Module:
    return importlib.import_module("diffusers").UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 32, 64, 64),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


def _autoencoder() -> nn.Module:
    return importlib.import_module("diffusers").AutoencoderKL(
        block_out_channels=(32, 32, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        norm_num_groups=8,
    )


def _randn(*sizes: int) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(*sizes),)


def _noisy(*sizes: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(*sizes), torch.arange(3, 3 + sizes[0]))


MODELS = (
    RealModel("timm resnet50_gn", "timm", _resnet, _randn(2, 3, 64, 64), _randn(1, 3, 224, 224), 53, 53),
    RealModel(
        "monai SegResNet",
        "monai.networks.nets",
        _segresnet,
        _randn(1, 1, 16, 16, 16),
        _randn(1, 1, 64, 64, 64),
        25,
        25,
    ),
    RealModel(
        "monai DynUNet",
        "monai.networks.nets",
        _dynunet,
        _randn(1, 1, 16, 16, 16),
        _randn(1, 1, 64, 64, 64),
        18,
        18,
    ),
    RealModel(
        "diffusers UNet2DModel",
        "diffusers",
        _unet,
        _noisy(2, 3, 16, 16),
        _noisy(2, 3, 64, 64),
        40,
        51,
        lambda y: y.sample,
    ),
    RealModel(
        "diffusers AutoencoderKL",
        "diffusers",
        _autoencoder,
        _randn(1, 3, 32, 32),
        _randn(1, 3, 128, 128),
        45,
        52,
        lambda y: y.sample,
    ),
)
