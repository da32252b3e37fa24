"""Activations at their kinks, at infinities and at NaN are PyTorch's on the GPU, forward and backward."""

import unittest

import torch
from support import (
    ACTIVATIONS,
    FINITE,
    POINTS,
    GpuTest,
    assert_same,
    in_format,
    points,
    warm,
    with_gradients,
)
from torch import Tensor

from onepass import _eager, _ops

CHANNELS = len(POINTS)
KINDS = ((torch.float32, "contiguous"), (torch.bfloat16, "channels_last"))
STAGES = (*ACTIVATIONS, "prelu")

# Block, input, parameters, and whether its gradient of the input is looked at.
Case = tuple[str, Tensor, list[Tensor], bool]


def slopes(text: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.tensor([0.25], dtype=dtype, device="cuda")] if text == "prelu" else []


def tails() -> list[Case]:
    cases = []
    for text in STAGES:
        for dtype, memory_format in KINDS:
            x = in_format(points(3, 5, 9, 14, dtype=dtype).cuda(), memory_format)
            cases.append((text, x, slopes(text, dtype), True))
    return cases


def zero_convolutions() -> list[Case]:
    """Zero weights, and the points as biases: a channel is one of them everywhere."""
    cases = []
    for text in STAGES:
        for (dtype, memory_format), of, channels in zip(KINDS, (FINITE, POINTS), (3, 24), strict=True):
            x = torch.randint(-2, 3, (2, channels, 9, 10), device="cuda").to(dtype)
            block = f"conv2d({channels},{len(of)},k=3,p=1) | {text}"
            weight = torch.zeros(len(of), channels, 3, 3, dtype=dtype, device="cuda")
            bias = points(len(of), dtype=dtype, of=of).cuda()
            parameters = [in_format(weight, memory_format), bias, *slopes(text, dtype)]
            # The gradient of the input adds NaN times zero up over all channels.
            cases.append((block, in_format(x, memory_format), parameters, of is FINITE))
    return cases


def passing_convolutions() -> list[Case]:
    """Every element is passed on as it is."""
    cases = []
    for text in STAGES:
        for dtype, memory_format in KINDS:
            x = points(3, 7, 5, CHANNELS, dtype=dtype).permute(0, 3, 1, 2).cuda()
            block = f"conv2d({CHANNELS},{CHANNELS},k=1,groups={CHANNELS}) | {text}"
            weight = torch.ones(CHANNELS, 1, 1, 1, dtype=dtype, device="cuda")
            bias = torch.zeros(CHANNELS, dtype=dtype, device="cuda")
            parameters = [weight, bias, *slopes(text, dtype)]
            cases.append((block, in_format(x.contiguous(), memory_format), parameters, True))
    return cases


class Kinks(GpuTest):
    """Against PyTorch's own stages on the same GPU."""

    def check(self, cases: list[Case]) -> None:
        warm([lambda c=case: with_gradients(_ops.apply, *c[:3]) for case in cases])
        for text, x, parameters, looks_at_input in cases:
            with self.subTest(text=text, dtype=x.dtype):
                shape = torch.Size(_ops.describe(text).output_shape(x.shape))
                values = torch.tensor([1.0, -2.0, 0.5], device="cuda")
                direction = values.repeat(shape.numel() // 3 + 1)[: shape.numel()].reshape(shape)
                ours, theirs = (
                    with_gradients(run, text, x, parameters, direction) for run in (_ops.apply, _eager.run)
                )
                assert_same(f"{text}: output", ours[0], theirs[0])
                if looks_at_input:
                    assert_same(f"{text}: gradient of the input", ours[1][0], theirs[1][0])
                terms = shape.numel() if text.endswith("prelu") else shape.numel() // shape[1]
                names = _ops.describe(text).names
                for name, mine, torchs in zip(names, ours[1][1:], theirs[1][1:], strict=True):
                    assert_same(f"{text}: gradient of {name}", mine, torchs, terms)

    def test_activations(self) -> None:
        self.check(tails())

    def test_zero_initialised_convolutions(self) -> None:
        self.check(zero_convolutions())

    def test_convolutions_that_pass_the_points_on(self) -> None:
        self.check(passing_convolutions())


if __name__ == "__main__":
    unittest.main()
