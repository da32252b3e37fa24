"""Autocast on a GPU: types as PyTorch's own stages give them, stage by stage, and values no less exact."""

import itertools
import unittest
from collections.abc import Sequence

import torch
from support import BLOCKS, STAGES, GpuTest, check_close_to_exact, exactly, gpu_example, warm, with_gradients
from torch import nn

import onepass
from onepass import _eager, _ops

LOW = (torch.float16, torch.bfloat16)
# What the stages are in PyTorch, where _eager is no independent judge of a type.
MODULES = {
    "instance_norm(affine=true)": lambda: nn.InstanceNorm2d(8, affine=True),
    "instance_norm": lambda: nn.InstanceNorm2d(8),
    "group_norm(4)": lambda: nn.GroupNorm(4, 8),
    "softplus": nn.Softplus,
    "prelu(per=channel)": lambda: nn.PReLU(8),
    "conv2d(8,8,k=3)": lambda: nn.Conv2d(8, 8, 3),
}


def autocast(low: torch.dtype) -> torch.autocast:
    return torch.autocast("cuda", dtype=low)


def warm_autocast(texts: Sequence[str], dtypes: Sequence[torch.dtype], *, gradients: bool) -> None:
    def run(text: str, low: torch.dtype, dtype: torch.dtype) -> None:
        x, parameters = gpu_example(text)
        with autocast(low):
            if gradients:
                with_gradients(_ops.apply, text, x.to(dtype), parameters)
            else:
                _ops.apply(text, x.to(dtype), parameters)

    warm(lambda case=case: run(*case) for case in itertools.product(texts, LOW, dtypes))


class Autocast(GpuTest):
    """Every stage, every block."""

    def test_types_of_every_stage(self) -> None:
        warm_autocast(STAGES, (torch.float32, *LOW), gradients=False)
        for text, low, dtype in itertools.product(STAGES, LOW, (torch.float32, *LOW)):
            with self.subTest(text=text, low=low, dtype=dtype):
                x, parameters = gpu_example(text)
                x = x.to(dtype)
                with autocast(low):
                    found = _ops.apply(text, x, parameters)
                    wanted = _eager.run(text, x, parameters)
                self.assertEqual(found.dtype, wanted.dtype)

    def test_types_of_the_modules(self) -> None:
        for (text, make), low, dtype in itertools.product(MODULES.items(), LOW, (torch.float32, *LOW)):
            with self.subTest(text=text, low=low, dtype=dtype):
                module = make().cuda()
                x = torch.randn(2, 8, 6, 7, device="cuda", dtype=dtype)
                with autocast(low):
                    found = _ops.apply(text, x, list(module.parameters()))
                    wanted = module(x)
                self.assertEqual(found.dtype, wanted.dtype)
                torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)

    def test_values_and_gradients(self) -> None:
        warm_autocast(BLOCKS, (torch.float32,), gradients=True)
        for text, low in itertools.product(BLOCKS, LOW):
            with self.subTest(text=text, low=low):
                x, parameters = gpu_example(text)
                with autocast(low):
                    ours = with_gradients(_ops.apply, text, x, parameters)
                    theirs = with_gradients(_eager.run, text, x, parameters)
                wanted = exactly(text, x, parameters)
                self.assertEqual(ours[0].dtype, theirs[0].dtype)
                for mine, torchs, exact in zip(
                    (ours[0], *ours[1]), (theirs[0], *theirs[1]), (wanted[0], *wanted[1]), strict=True
                ):
                    self.assertEqual(mine.dtype, torchs.dtype)
                    check_close_to_exact(mine, torchs, exact, torch.finfo(low).eps)

    def test_a_tail_of_float32_stays_float32(self) -> None:
        x, parameters = gpu_example("swish | group_norm(4) | hardswish")
        plain = _ops.apply("swish | group_norm(4) | hardswish", x, parameters)
        with autocast(torch.float16):
            self.assertTrue(
                torch.equal(_ops.apply("swish | group_norm(4) | hardswish", x, parameters), plain)
            )

    def test_large_halves_do_not_overflow_inside(self) -> None:
        text = "group_norm(2) | relu"
        x = (torch.randn(2, 8, 9, 9, device="cuda") * 2e4).clamp(-6e4, 6e4).half()
        parameters = [torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")]
        found = _ops.apply(text, x, parameters)
        exact = _eager.run(text, x.double(), [parameter.double() for parameter in parameters])
        torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3)

    def test_training_with_a_scaler(self) -> None:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 1, 1)).cuda()
        fused = onepass.fuse(nn.Sequential(*model))
        scaler = torch.amp.GradScaler("cuda")
        optimizer = torch.optim.SGD(fused.parameters(), lr=0.1)
        x, target = torch.randn(8, 3, 16, 16, device="cuda"), torch.randn(8, 1, 14, 14, device="cuda")
        losses = []
        for _ in range(30):
            with autocast(torch.float16):
                loss = (fused(x) - target).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        self.assertLess(losses[-1], 0.99 * losses[0])


if __name__ == "__main__":
    unittest.main()
