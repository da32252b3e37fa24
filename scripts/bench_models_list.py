"""The networks of scripts/bench_models.py: random weights, sizes as their users run them, and small ones."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Network:
    """How a network is built and called. `small` is for a check of the script on any machine."""

    name: str
    package: str  # what must be importable
    build: Callable[[bool], nn.Module]  # of "small?"
    inputs: Callable[[bool], tuple[Tensor, ...]]
    trains: bool = False


class _Sample(nn.Module):
    """A network of diffusers whose result is a tensor."""

    def __init__(self, network: nn.Module, method: str = "forward") -> None:
        super().__init__()
        self.network = network
        self.method = method

    def forward(self, *inputs: Tensor) -> Tensor:
        """The first result."""
        return getattr(self.network, self.method)(*inputs, return_dict=False)[0]


def _diffusers(name: str, **options: Any) -> nn.Module:
    return getattr(importlib.import_module("diffusers"), name)(**options)


def _monai(name: str, *args: Any, **options: Any) -> nn.Module:
    return getattr(importlib.import_module("monai.networks.nets"), name)(*args, **options)


def _sd_unet(small: bool) -> nn.Module:
    """Stable Diffusion 1.5's."""
    return _Sample(
        _diffusers(
            "UNet2DConditionModel",
            sample_size=64,
            block_out_channels=(32, 64, 64, 64) if small else (320, 640, 1280, 1280),
            cross_attention_dim=32 if small else 768,
            attention_head_dim=8,
        )
    )


def _sd_inputs(small: bool) -> tuple[Tensor, ...]:
    size, width = (8, 32) if small else (64, 768)
    return torch.randn(2, 4, size, size), torch.tensor([10, 500]), torch.randn(2, 77, width)


def _ddpm_unet(small: bool) -> nn.Module:
    """google/ddpm-celebahq-256's."""
    channels = (32, 32, 64, 64) if small else (128, 128, 256, 256, 512, 512)
    plain = len(channels) - 2
    return _Sample(
        _diffusers(
            "UNet2DModel",
            sample_size=256,
            block_out_channels=channels,
            down_block_types=("DownBlock2D",) * plain + ("AttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * plain,
            layers_per_block=2,
            norm_num_groups=8 if small else 32,
            norm_eps=1e-6,
            downsample_padding=0,
            flip_sin_to_cos=False,
            freq_shift=1,
        )
    )


def _ddpm_inputs(small: bool) -> tuple[Tensor, ...]:
    batch, size = (2, 16) if small else (4, 256)
    return torch.randn(batch, 3, size, size), torch.arange(10, 10 + batch)


def _vae(small: bool) -> nn.Module:
    """Stable Diffusion's decoder."""
    channels = (32, 32, 64, 64) if small else (128, 256, 512, 512)
    network = _diffusers(
        "AutoencoderKL",
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=4,
        norm_num_groups=8 if small else 32,
    )
    network.encoder = nn.Identity()
    return _Sample(network, "decode")


def _segresnet(small: bool) -> nn.Module:
    """Of MONAI's BraTS tutorial."""
    return _monai(
        "SegResNet",
        blocks_down=[1, 2, 2, 4],
        blocks_up=[1, 1, 1],
        init_filters=8 if small else 16,
        in_channels=4,
        out_channels=3,
        dropout_prob=0.2,
    )


def _dynunet(small: bool) -> nn.Module:
    """nnU-Net's full-resolution network."""
    levels = 3 if small else 6
    kernels, strides = [3] * levels, [1] + [2] * (levels - 1)
    filters = [8, 16, 16] if small else [32, 64, 128, 256, 320, 320]
    return _monai("DynUNet", 3, 1, 3, kernels, strides, strides[1:], filters=filters)


def _unet(small: bool) -> nn.Module:
    channels = (8, 16, 16) if small else (16, 32, 64, 128, 256)
    return _monai("UNet", 3, 1, 2, channels, (2,) * (len(channels) - 1), num_res_units=2)


def _timm(name: str) -> Callable[[bool], nn.Module]:
    return lambda small: importlib.import_module("timm").create_model(name)


def _randn(full: tuple[int, ...], small: tuple[int, ...]) -> Callable[[bool], tuple[Tensor, ...]]:
    return lambda is_small: (torch.randn(*(small if is_small else full)),)


_VOLUME = (1, 4, 16, 16, 16)
NETWORKS = (
    Network("sd15_unet", "diffusers", _sd_unet, _sd_inputs),
    Network("ddpm_unet_256", "diffusers", _ddpm_unet, _ddpm_inputs),
    Network("sd_vae_decoder", "diffusers", _vae, _randn((1, 4, 64, 64), (1, 4, 8, 8))),
    Network("segresnet", "monai", _segresnet, _randn((1, 4, 128, 128, 128), _VOLUME), trains=True),
    Network("dynunet", "monai", _dynunet, _randn((2, 1, 128, 128, 128), (1, 1, 16, 16, 16)), trains=True),
    Network("monai_unet", "monai", _unet, _randn((4, 1, 96, 96, 96), (1, 1, 16, 16, 16)), trains=True),
    Network(
        "resnet50_gn", "timm", _timm("resnet50_gn"), _randn((64, 3, 224, 224), (1, 3, 64, 64)), trains=True
    ),
    Network("resnet50", "timm", _timm("resnet50"), _randn((64, 3, 224, 224), (1, 3, 64, 64)), trains=True),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A network as it is measured: element type, autocast or not, forward or a training step."""

    network: Network
    dtype: str  # "bf16" or "fp32"; of training, bf16 is autocast
    train: bool

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.network.name} {self.dtype} {'train' if self.train else 'forward'}"


def rows() -> list[Row]:
    """All of them, forward first."""
    forward = [Row(network, dtype, False) for network in NETWORKS for dtype in ("bf16", "fp32")]
    training = [
        Row(network, dtype, True) for network in NETWORKS if network.trains for dtype in ("bf16", "fp32")
    ]
    return forward + training
