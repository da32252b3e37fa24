"""Training steps of blocks whose convolution is wide: it and its gradients by onepass's kernels."""

from __future__ import annotations

import contextlib
import itertools
import unittest
from collections.abc import Iterator
from unittest import mock

import torch
from support import FORMATS, GpuTest, is_in_format, warm
from test_thin_training import gradients_of, leaves_of

from onepass import _cuda, _eager, _ops, _rounding
from onepass._description import describe

BLOCKS = (
    ("conv_transpose2d(64,64,k=3) | gelu | group_norm(8)", (3, 64, 21, 20)),
    ("conv_transpose3d(64,128,k=3,bias=false) | relu | group_norm(8)", (2, 64, 5, 6, 7)),
    ("conv2d(24,72,k=3,p=1) | group_norm(4) | silu | residual_add", (3, 24, 17, 15)),
    ("conv2d(64,96,k=3,p=1,groups=2) | relu | group_norm(8)", (3, 64, 17, 15)),
)


class WideTrainingTest(GpuTest):
    @contextlib.contextmanager
    def always(self) -> Iterator[None]:
        """Small convolutions too are run here, alone, in TF32 whatever PyTorch would do."""
        alone = {describe(text).conv_alone.text for text, _ in BLOCKS}
        with (
            mock.patch.object(_cuda, "_is_worth_training", lambda block, *_: block in alone),
            mock.patch.object(_rounding, "rounds", lambda *_: ("tf32", "tf32", "tf32")),
        ):
            yield

    def test_gradients_are_those_of_the_stages(self) -> None:
        cases = itertools.product(
            BLOCKS, ((torch.float32, 5e-3), (torch.float16, 2e-2), (torch.bfloat16, 6e-2))
        )
        given = []
        # Both formats by turns: each meets every block, and every type.
        for index, ((text, sizes), (dtype, tolerance)) in enumerate(cases):
            memory_format = FORMATS[index % len(FORMATS)]
            leaves = leaves_of(text, sizes, dtype, memory_format)
            exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
            # As small as gradients of a mean are.
            scale = 1.0 if dtype == torch.float16 else 1e-7
            upstream = torch.randn_like(_eager.run(text, exact[0], exact[1:])) * scale
            given.append((text, leaves, exact, upstream, tolerance, memory_format))
        with self.always():
            warm([lambda t=t, x=x, u=u: gradients_of(_ops.apply, t, x, u) for t, x, _, u, _, _ in given])
        for text, leaves, exact, upstream, tolerance, memory_format in given:
            dtype = leaves[0].dtype
            with self.subTest(text=text, dtype=dtype, memory_format=memory_format):
                wanted = gradients_of(_eager.run, text, exact, upstream)
                with self.always():
                    found = gradients_of(_ops.apply, text, leaves, upstream)
                for own, other in zip(found, wanted, strict=True):
                    self.assertEqual(own.dtype, dtype)
                    error = (own.double() - other).norm() / other.norm()
                    self.assertLess(error.item(), tolerance)
                self.assertTrue(is_in_format(found[0], memory_format))

    def test_only_what_is_wanted_is_computed(self) -> None:
        text, sizes = BLOCKS[0]
        leaves = leaves_of(text, sizes, torch.float32)
        upstream = torch.randn_like(_eager.run(text, leaves[0], leaves[1:]))
        with self.always():
            everything = gradients_of(_ops.apply, text, leaves, upstream)
            for index, leaf in enumerate(leaves[:3]):
                for other in leaves:
                    other.requires_grad_(other is leaf)
                output = _ops.apply(text, leaves[0], leaves[1:])
                (gradient,) = torch.autograd.grad(output, [leaf], upstream)
                # What computes the convolution may depend on what is wanted: TF32 either way.
                error = (gradient - everything[index]).norm() / everything[index].norm()
                self.assertLess(error.item(), 5e-3)

    def test_the_convolution_runs_here(self) -> None:
        text, sizes = BLOCKS[0]
        leaves = leaves_of(text, sizes, torch.float32)
        forward = mock.patch.object(_cuda, "_is_worth_fusing", lambda *_: True)
        with self.always(), forward, mock.patch.object(_eager, "convolve", side_effect=AssertionError):
            output = _ops.apply(text, leaves[0], leaves[1:])
            output.sum().backward()
        self.assertTrue(all(leaf.grad is not None for leaf in leaves))

    def test_an_input_that_is_not_dense(self) -> None:
        text, sizes = BLOCKS[0]
        leaves = leaves_of(text, sizes, torch.float32)
        upstream = torch.randn_like(_eager.run(text, leaves[0], leaves[1:]))
        whole = torch.stack((leaves[0], leaves[0]), dim=-1).detach()
        with self.always():
            wanted = gradients_of(_ops.apply, text, leaves, upstream)
            apart = [whole[..., 1].requires_grad_(), *leaves[1:]]
            self.assertFalse(apart[0].is_contiguous())
            for own, other in zip(gradients_of(_ops.apply, text, apart, upstream), wanted, strict=True):
                # Another row may compute the convolution then: a few gradients round to TF32 the other way.
                self.assertLess(((own - other).norm() / other.norm()).item(), 1e-3)

    def test_strict_precision_is_not_rounded(self) -> None:
        text, sizes = BLOCKS[0]
        leaves = leaves_of(text, (64, *sizes[1:]), torch.float32)
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        upstream = torch.randn_like(_eager.run(text, exact[0], exact[1:]))
        wanted = gradients_of(_eager.run, text, exact, upstream)
        conv = torch.backends.cudnn.conv
        before = conv.fp32_precision
        try:
            conv.fp32_precision = "ieee"
            found = gradients_of(_ops.apply, text, leaves, upstream.float())
        finally:
            conv.fp32_precision = before
        for own, other in zip(found, wanted, strict=True):
            # Operands rounded to TF32 are 3e-4 off.
            self.assertLess(((own.double() - other).norm() / other.norm()).item(), 2e-5)


if __name__ == "__main__":
    unittest.main()
