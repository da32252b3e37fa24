"""What a call costs on tensors too small to matter: a tail within 1.2x of the modules it replaces."""

import statistics
import time
import unittest
from collections.abc import Callable

import torch
from support import GpuTest
from torch import nn

import onepass

CALLS, ROUNDS, LIMIT = 200, 9, 1.2


def seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS


def medians(*calls: Callable[[], object]) -> list[float]:
    for call in calls:
        seconds(call)
    rounds = [[seconds(call) for call in calls] for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


class Overhead(GpuTest):
    """Times of both ways alternate; the medians are compared."""

    alone = True

    def compare(self, original: nn.Module, block: nn.Module, sizes: tuple[int, ...], train: bool) -> None:
        x = torch.randn(sizes, device="cuda", requires_grad=train)
        direction = torch.randn_like(original(x))

        def step(model: nn.Module) -> Callable[[], object]:
            if not train:
                return lambda: model(x)
            leaves = [x, *model.parameters()]
            return lambda: torch.autograd.grad(model(x), leaves, direction)

        with torch.set_grad_enabled(train):
            theirs, ours = medians(step(original), step(block))
        print(f"\n{'training' if train else 'inference'}: {1e6 * ours:.1f} us, PyTorch {1e6 * theirs:.1f} us")
        self.assertLess(ours, LIMIT * theirs)

    def tail(self, train: bool) -> None:
        original = nn.Sequential(nn.SiLU(), nn.GroupNorm(4, 16), nn.Hardswish()).cuda()
        block = onepass.Block("swish | group_norm(4) | hardswish", channels=16, device="cuda")
        self.compare(original, block, (2, 16, 4, 4), train)

    def test_tail(self) -> None:
        self.tail(train=False)

    def test_tail_in_training(self) -> None:
        self.tail(train=True)

    def test_norm_and_activation(self) -> None:
        original = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU()).cuda()
        block = onepass.Block("group_norm(4) | swish", channels=16, device="cuda")
        self.compare(original, block, (2, 16, 4, 4), train=False)

    def test_convolution_and_tail(self) -> None:
        original = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU()).cuda()
        block = onepass.Block("conv2d(3,16,k=3) | group_norm(4) | swish", device="cuda")
        self.compare(original, block, (1, 3, 8, 8), train=False)


if __name__ == "__main__":
    unittest.main()
