"""Tuning: results stay, the choice is remembered."""

from __future__ import annotations

import os
import unittest

import torch
from support import GpuTest
from torch.nn import functional

import onepass
from onepass import tuning

DEVICE = torch.device("cuda")


class Tuning(GpuTest):
    """Blocks whose strategies are close."""

    def setUp(self) -> None:
        super().setUp()
        self.addCleanup(onepass.tune, False)

    def test_a_tail_is_tuned(self) -> None:
        """It is as exact as before, and what was chosen is kept."""
        onepass.tune()
        torch.manual_seed(3)
        weight, bias = torch.randn(2, 16, device=DEVICE)
        x = torch.randn(8, 16, 34, 34, device=DEVICE)
        found = onepass.functional.run("swish | group_norm(4)", x, norm_weight=weight, norm_bias=bias)
        exact = functional.group_norm(functional.silu(x.double()), 4, weight.double(), bias.double())
        torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)
        kept = os.listdir(torch.ops.onepass.cuda_cache_directory())
        self.assertTrue(any(name.startswith("tuned") for name in kept), kept)

    def test_what_was_measured_is_not_measured_again(self) -> None:
        """The faster of two ways, then from disk."""
        calls: list[str] = []

        def way(name: str, cycles: int) -> None:
            calls.append(name)
            torch.cuda._sleep(cycles)

        question = f"which of two in process {os.getpid()}"
        ways = {"slow": lambda: way("slow", 4_000_000), "quick": lambda: way("quick", 1000)}
        self.assertEqual(tuning.faster(DEVICE, question, ways), "quick")
        self.assertGreater(len(calls), 4)
        calls.clear()
        self.assertEqual(tuning.faster(DEVICE, question, ways), "quick")
        self.assertEqual(calls, [])

    def test_a_thin_block_agrees_however_it_is_run(self) -> None:
        """Whole or in parts."""
        onepass.tune()
        torch.manual_seed(4)
        block = onepass.Block("conv2d(3,8,k=3) | relu | group_norm(2)", device=DEVICE).eval()
        x = torch.randn(4, 3, 40, 40, device=DEVICE)
        with torch.no_grad():
            tuned = block(x)
            onepass.tune(False)
            torch.testing.assert_close(tuned, block(x), atol=2e-3, rtol=2e-3)


if __name__ == "__main__":
    unittest.main()
