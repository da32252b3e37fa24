"""Trains a small U-Net with and without onepass on synthetic images, and compares the two.

    python examples/train_unet.py [--steps 60] [--batch 4] [--size 64]

Residual blocks of GroupNorm, SiLU and convolutions, as diffusion and segmentation nets have them; the
task is to find discs in noise. Both models start from the same weights, see the same images and step in turn.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass


class ResidualBlock(nn.Module):
    """norm -> silu -> conv, twice, around a shortcut."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, out_channels, 1) if channels != out_channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y)))
        return self.shortcut(x) + y


class UNet(nn.Module):
    """Two levels: full resolution, half of it, and back with a skip connection."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.down = ResidualBlock(channels, channels)
        self.shrink = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.middle = ResidualBlock(2 * channels, 2 * channels)
        self.grow = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.up = ResidualBlock(2 * channels, channels)
        self.head = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(self.stem(x))
        coarse = self.middle(self.shrink(fine))
        return self.head(self.up(torch.cat([self.grow(coarse), fine], dim=1)))


class Training:
    """A model on its way, with the loss and the seconds of every step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, image: Tensor, mask: Tensor) -> None:
        start = time.perf_counter()
        loss = F.binary_cross_entropy_with_logits(self.model(image), mask)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def final_loss(self) -> float:
        return statistics.mean(self.losses[-10:])


def discs(batch: int, size: int) -> tuple[Tensor, Tensor]:
    """Noisy images, and where in them a disc of random place and size is."""
    centre = torch.rand(batch, 2, 1, 1) * 0.6 + 0.2
    radius = torch.rand(batch, 1, 1) * 0.15 + 0.1
    line = (torch.arange(size) + 0.5) / size
    distance = (line[None, :, None] - centre[:, 0]).square() + (line[None, None, :] - centre[:, 1]).square()
    mask = (distance < radius.square()).float()[:, None]
    return mask + 0.5 * torch.randn(mask.shape), mask


def main() -> int:
    """Returns 0 where both models end at the same loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", type=int, default=64)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = UNet()
    plain, fused = Training(model), Training(onepass.fuse(copy.deepcopy(model)))
    for step in range(options.steps):
        image, mask = discs(options.batch, options.size)
        plain.step(image, mask)
        fused.step(image, mask)
        if step % 10 == 0:
            print(
                f"step {step:4}: loss {plain.losses[-1]:.6f} PyTorch, {fused.losses[-1]:.6f} onepass",
                flush=True,
            )

    print(f"\n{onepass.report(fused.model)}\n")
    same = abs(plain.final_loss() - fused.final_loss()) <= 0.01 * plain.final_loss()
    print(
        f"mean loss of the last steps: {plain.final_loss():.6f} PyTorch, {fused.final_loss():.6f} onepass: ",
        end="",
    )
    print("the same within 1%" if same else "NOT THE SAME")
    medians = [statistics.median(training.seconds) * 1e3 for training in (plain, fused)]
    print(f"a step takes {medians[0]:.1f} ms with PyTorch, {medians[1]:.1f} ms with onepass (medians)")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
