"""Calls on a GPU that leave the fused path: they warn once per reason and are counted; others say nothing."""

import unittest
import warnings
from collections.abc import Callable
from typing import Any

import torch
from support import GpuTest
from torch import nn
from torch.autograd import forward_ad

import onepass
from onepass import FallbackWarning, _eager

WORTH_IT = "conv2d(3,16,k=3,p=1) | silu | group_norm(4) | mean"  # whole on every GPU


def said(call: Callable[[], Any]) -> list[str]:
    """The fallback warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]


def given(dtype: torch.dtype = torch.float32) -> tuple[onepass.Block, torch.Tensor]:
    x = torch.randn(8, 3, 64, 64, device="cuda", dtype=dtype)
    return onepass.Block(WORTH_IT, device="cuda", dtype=dtype), x


class Fallback(GpuTest):
    """Types, autocast, transforms, tracers."""

    def test_nothing_is_said_where_kernels_run(self) -> None:
        block, x = given()
        tail = onepass.Block("conv2d(256,256,k=3) | group_norm(4)", device="cuda")
        images = torch.randn(2, 256, 9, 9, device="cuda")
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU()).cuda()
        onepass.fuse(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            for run, images_of in ((block, x), (tail, images), (model, x)):
                run(images_of).sum().backward()
                with torch.no_grad():
                    run(images_of)
                    torch.compile(run, fullgraph=True, backend="aot_eager")(images_of)
        self.assertEqual((block.fallbacks, tail.fallbacks, onepass.report(model).fallbacks), ({}, {}, []))

    def test_float64(self) -> None:
        block, x = given(torch.float64)
        (message,) = said(lambda: [block(x), block(x)])
        self.assertIn("float64 is not computed by the GPU kernels", message)
        self.assertEqual(list(block.fallbacks.values()), [2])

    def test_autocast_of_a_block_that_would_be_whole(self) -> None:
        block, x = given()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            (message,) = said(lambda: [block(x), block(x)])
        self.assertIn("PyTorch's own convolution: autocast is on; cast the model and its input to", message)
        self.assertEqual(list(block.fallbacks.values()), [2])

    def test_autocast_of_a_tail_is_fused(self) -> None:
        block = onepass.Block("swish | group_norm(4)", channels=8, device="cuda")
        x = torch.randn(2, 8, 9, 9, device="cuda")
        with torch.autocast("cuda", torch.float16):
            self.assertEqual(said(lambda: block(x).sum().backward()), [])

    def test_transforms_run_the_stages(self) -> None:
        block, x = given()
        parameters = list(block.parameters())

        def wanted(a: torch.Tensor) -> torch.Tensor:
            return _eager.run(WORTH_IT, a, parameters)

        for gradients in (False, True):
            with torch.set_grad_enabled(gradients), warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)
                torch.testing.assert_close(
                    torch.vmap(block)(x[None]), torch.vmap(wanted)(x[None]), rtol=1e-3, atol=1e-3
                )
                with forward_ad.dual_level():
                    dual = forward_ad.make_dual(x, torch.ones_like(x))
                    ours, theirs = (forward_ad.unpack_dual(run(dual)).tangent for run in (block, wanted))
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
                traced = torch.jit.trace(block, x)
                self.assertNotIn("onepass::", str(traced.inlined_graph))
        self.assertEqual(len(block.fallbacks), 3)


if __name__ == "__main__":
    unittest.main()
