"""Random programs over few tensors, with writes in place and other names: fused, they compute the same."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from fuse_support import blocks
from torch import Tensor, nn

from onepass import fuse

CHANNELS = 4

# Each takes the module, a tensor and another tensor of the same shape.
OUT_OF_PLACE = [
    lambda m, a, b: m.conv(a),
    lambda m, a, b: m.other(a),
    lambda m, a, b: m.norm(a),
    lambda m, a, b: m.instance(a),
    lambda m, a, b: F.relu(a),
    lambda m, a, b: torch.sigmoid(a) * a,
    lambda m, a, b: a + b,
    lambda m, a, b: a * 0.5,
    lambda m, a, b: a / 1.0,
    lambda m, a, b: m.inner(a),
    lambda m, a, b: m.drop(a),
    lambda m, a, b: torch.exp(-a.abs()),
]
IN_PLACE = [
    lambda m, a, b: a.relu_(),
    lambda m, a, b: m.act(a),
    lambda m, a, b: a.add_(b),
    lambda m, a, b: a.__iadd__(b),
    lambda m, a, b: a.mul_(0.5),
    lambda m, a, b: F.silu(a, inplace=True),
    lambda m, a, b: m.writer(a),
    lambda m, a, b: a.view(a.shape).clamp_(-1, 1),
]


class Writer(nn.Module):
    """Writes its input and computes from it."""

    def forward(self, x: Tensor) -> Tensor:
        x *= 0.5
        return torch.tanh(x)


class Program(nn.Module):
    """A straight line of operations on three registers: operation, source, other source, target."""

    def __init__(self, steps: list[tuple[int, int, int, int]]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.other = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Identity())
        self.norm = nn.GroupNorm(2, CHANNELS)
        self.instance = nn.InstanceNorm2d(CHANNELS, affine=True)
        self.act = nn.LeakyReLU(0.1, inplace=True)
        self.drop = nn.Dropout(0.5)
        self.inner = nn.Sequential(nn.GroupNorm(1, CHANNELS), nn.ReLU(inplace=True))
        self.writer = Writer()
        self.steps = steps

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        registers = [x, y, x]
        for operation, source, second, target in self.steps:
            run = (OUT_OF_PLACE + IN_PLACE)[operation]
            registers[target] = run(self, registers[source], registers[second])
        return registers[0] + 2 * registers[1] + 3 * registers[2]


def program(seed: int) -> Program:
    draw = random.Random(seed)
    operations = len(OUT_OF_PLACE) + len(IN_PLACE)
    steps = [
        (draw.randrange(operations), draw.randrange(3), draw.randrange(3), draw.randrange(3))
        for _ in range(draw.randint(2, 12))
    ]
    torch.manual_seed(seed)
    return Program(steps)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(80))
def test_random_program(seed: int) -> None:
    original = program(seed).eval()
    fused = fuse(copy.deepcopy(original))
    tensors = [torch.randn(2, CHANNELS, 5, 4) for _ in range(2)]
    copies = [tensor.clone() for tensor in tensors]
    result, wanted = fused(*copies), original(*tensors)
    torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(copies, tensors, rtol=1e-3, atol=1e-4)


def test_random_programs_are_fused() -> None:
    fused = [bool(blocks(fuse(program(seed)))) for seed in range(80)]
    assert sum(fused) > 40
