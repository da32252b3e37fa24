"""Blocks that the benchmark measures besides the four workloads: a sweep of thin convolutions, layers of real
models, and convolutions in groups.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch
from torch import Tensor, nn

CONVOLUTIONS = {
    (1, False): nn.Conv1d,
    (2, False): nn.Conv2d,
    (3, False): nn.Conv3d,
    (2, True): nn.ConvTranspose2d,
    (3, True): nn.ConvTranspose3d,
}
NORMS = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


class Mean(nn.Module):
    """Over space, of so many dimensions."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.dimensions = tuple(range(2, rank + 2))

    def forward(self, x: Tensor) -> Tensor:
        """N x C."""
        return x.mean(dim=self.dimensions)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A convolution and what follows it."""

    channels: tuple[int, int]  # in, out
    size: tuple[int, ...]  # of the input, without channels
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    transposed: bool = False
    batch: int = 1
    groups: int = 0  # of the norm; none: each channel by itself
    conv_groups: int = 1
    before: type[nn.Module] | None = None
    after: type[nn.Module] | None = nn.SiLU
    mean: bool = False

    def shape(self) -> tuple[int, ...]:
        """Of the input."""
        return (self.batch, self.channels[0], *self.size)

    def build(self) -> nn.Module:
        """The modules."""
        rank, (inside, outside) = len(self.size), self.channels
        convolution = CONVOLUTIONS[rank, self.transposed](
            inside,
            outside,
            self.kernel,
            stride=self.stride,
            padding=self.padding,
            groups=self.conv_groups,
        )
        norm = nn.GroupNorm(self.groups, outside) if self.groups else NORMS[rank](outside, affine=True)
        stages = [
            convolution,
            self.before and self.before(),
            norm,
            self.after and self.after(),
            Mean(rank) if self.mean else None,
        ]
        return nn.Sequential(*(stage for stage in stages if stage is not None))


def thin_layers() -> dict[str, Layer]:
    """Few channels: each number of input channels with each of output channels, the rest by turns."""
    found = {}
    kinds = ("images", "upsampled volumes", "averaged volumes")
    for i, (outside, inside) in enumerate(itertools.product((8, 16, 32, 64), (1, 2, 4, 8))):
        kernel, kind = 2 + (i + i // 4) % 4, kinds[i % 3]
        common = {"channels": (inside, outside), "kernel": kernel, "groups": 4, "before": nn.Hardswish}
        if kind == "images":
            layer = Layer(size=(256, 256), padding=kernel // 2, batch=16, after=nn.SiLU, **common)
        elif kind == "upsampled volumes":
            layer = Layer(size=(16, 32, 32), stride=2, transposed=True, batch=16, after=nn.ReLU, **common)
        else:
            layer = Layer(size=(16, 32, 32), padding=0, batch=128, after=None, mean=True, **common)
        found[f"{inside} to {outside}, kernel {kernel}, {kind}"] = layer
    return found


def real_layers() -> dict[str, Layer]:
    """Of a diffusion U-Net, decoders of images and of videos, and a segmentation net."""
    found = {}
    for inside, outside, size in (
        (320, 320, 64),
        (320, 640, 32),
        (640, 640, 32),
        (640, 1280, 16),
        (1280, 1280, 16),
        (2560, 1280, 16),
    ):
        found[f"U-Net {inside} to {outside} at {size}"] = Layer(
            (inside, outside), (size,) * 2, batch=8, groups=32
        )
    for inside, outside, size in (
        (512, 512, 64),
        (512, 512, 128),
        (512, 256, 256),
        (256, 256, 256),
        (256, 128, 512),
        (128, 128, 512),
    ):
        found[f"VAE {inside} to {outside} at {size}"] = Layer((inside, outside), (size,) * 2, groups=32)
    segmentation = functools.partial(Layer, batch=2, after=nn.LeakyReLU)
    for channels, size in ((32, 128), (64, 64), (128, 32), (256, 16), (320, 8)):
        found[f"segmentation {channels} at {size}"] = segmentation((channels, channels), (size,) * 3)
    found["upsampling 64 to 32 at 64, volumes"] = segmentation(
        (64, 32), (64,) * 3, kernel=2, stride=2, padding=0, transposed=True
    )
    found["upsampling 512 to 256 at 64"] = segmentation(
        (512, 256), (64,) * 2, kernel=2, stride=2, padding=0, transposed=True
    )
    found["video VAE 128 at 8x128x128"] = Layer((128, 128), (8, 128, 128), groups=32)
    return found


def grouped_layers() -> dict[str, Layer]:
    """Convolutions in groups of 16, 32 and 112 channels: ResNeXt-101 32x8d, RegNetY-16GF, volumes."""
    layer = functools.partial(Layer, batch=32, groups=32, after=nn.ReLU)
    return {
        "ResNeXt 512 in 32 groups at 28": layer((512, 512), (28,) * 2, conv_groups=32),
        "ResNeXt 1024 in 32 groups at 14": layer((1024, 1024), (14,) * 2, conv_groups=32),
        "RegNet 448 in 4 groups at 28": layer((448, 448), (28,) * 2, conv_groups=4),
        "volumes 128 in 4 groups at 32": Layer((128, 128), (32,) * 3, batch=4, groups=8, conv_groups=4),
    }


THIN_LAYERS = thin_layers()
REAL_LAYERS = real_layers()
GROUPED_LAYERS = grouped_layers()


def loaded_layer(name: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    """The modules and their input."""
    layer = (THIN_LAYERS | REAL_LAYERS | GROUPED_LAYERS)[name]
    torch.manual_seed(42)
    with device:
        return layer.build(), torch.randn(layer.shape())
