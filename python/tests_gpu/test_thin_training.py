"""Training steps of blocks whose convolution is thin: forward and all gradients by onepass's own kernels."""

from __future__ import annotations

import copy
import itertools
import unittest
from collections.abc import Callable
from unittest import mock

import torch
from support import FORMATS, GpuTest, conv_precision, in_format, is_in_format, parameter_shape, warm
from torch import Tensor

from onepass import _cuda, _eager, _ops
from onepass._description import describe

BLOCKS = (
    ("conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish", (2, 3, 4, 9, 8)),
    ("conv3d(3,16,k=4) | hardswish | group_norm(4) | mean", (9, 3, 7, 9, 8)),
    ("conv2d(3,12,k=3,s=2,p=1) | prelu(per=channel) | group_norm(3) | residual_add | gelu", (3, 3, 17, 15)),
)


def leaves_of(
    text: str, sizes: tuple[int, ...], dtype: torch.dtype, memory_format: str = "contiguous"
) -> list[Tensor]:
    """The input and the parameters, all of which want gradients; exact in TF32 and in 16 bits."""
    description = describe(text)
    count = len(description.parameters)
    shapes = [sizes, *(parameter_shape(description, i, sizes) for i in range(count))]
    leaves = []
    for shape in shapes:
        values = torch.randn(shape, device="cuda").to(torch.bfloat16).to(dtype) * 0.5
        leaves.append(in_format(values, memory_format).requires_grad_())
    return leaves


def gradients_of(
    run: Callable[..., Tensor], text: str, leaves: list[Tensor], upstream: Tensor
) -> list[Tensor]:
    output = run(text, leaves[0], leaves[1:])
    return list(torch.autograd.grad(output, leaves, upstream.to(output.dtype)))


class ThinTrainingTest(GpuTest):
    def always(self) -> mock._patch:
        """Small blocks too are run whole."""
        return mock.patch.object(_cuda, "_is_worth_training", lambda *_: True)

    def test_gradients_are_those_of_the_stages(self) -> None:
        tolerances = {torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
        given = []
        for (text, sizes), dtype, memory_format in itertools.product(BLOCKS, tolerances, FORMATS):
            leaves = leaves_of(text, sizes, dtype, memory_format)
            exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
            upstream = torch.randn_like(_eager.run(text, exact[0], exact[1:]))
            given.append((text, leaves, exact, upstream, memory_format))
        with self.always():
            warm([lambda t=t, x=x, u=u: gradients_of(_ops.apply, t, x, u) for t, x, _, u, _ in given])
        for text, leaves, exact, upstream, memory_format in given:
            dtype = leaves[0].dtype
            wanted = gradients_of(_eager.run, text, exact, upstream)
            with self.always():
                found = gradients_of(_ops.apply, text, leaves, upstream)
            for own, other in zip(found, wanted, strict=True):
                self.assertEqual(own.dtype, dtype)
                error = (own.double() - other).norm() / other.norm()
                self.assertLess(error.item(), tolerances[dtype], (text, dtype, memory_format))
            self.assertTrue(is_in_format(found[0], memory_format))

    def test_only_what_is_wanted_is_computed(self) -> None:
        text, sizes = BLOCKS[0]
        leaves = leaves_of(text, sizes, torch.float32)
        upstream = torch.randn_like(_eager.run(text, leaves[0], leaves[1:]))
        with self.always():
            everything = gradients_of(_ops.apply, text, leaves, upstream)
            for index, leaf in enumerate(leaves):
                for other in leaves:
                    other.requires_grad_(other is leaf)
                output = _ops.apply(text, leaves[0], leaves[1:])
                (gradient,) = torch.autograd.grad(output, [leaf], upstream)
                torch.testing.assert_close(gradient, everything[index], rtol=1e-4, atol=1e-5)

    def test_same_bits_every_time(self) -> None:
        for text, sizes in BLOCKS:
            leaves = leaves_of(text, sizes, torch.float32)
            with self.always():
                upstream = torch.randn_like(_ops.apply(text, leaves[0], leaves[1:]))
                once = gradients_of(_ops.apply, text, leaves, upstream)
                for _ in range(10):
                    for some, other in zip(
                        once, gradients_of(_ops.apply, text, leaves, upstream), strict=True
                    ):
                        self.assertTrue(torch.equal(some, other))

    def test_a_step_holds_nothing_of_the_convolutions_size(self) -> None:
        text, sizes = BLOCKS[0][0], (64, 3, 16, 32, 32)
        leaves = leaves_of(text, sizes, torch.float32)
        output_bytes = 0
        for attempt in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with self.always():
                output = _ops.apply(text, leaves[0], leaves[1:])
                output_bytes = output.numel() * output.element_size()
                upstream = torch.ones_like(output)
                gradients = torch.autograd.grad(output, leaves, upstream)
            peak = torch.cuda.max_memory_allocated() - before
            del output, upstream, gradients
            if attempt == 1:  # the first has whatever compiling and loading takes
                self.assertLess(peak - 2 * output_bytes, 0.5 * output_bytes)

    def test_second_gradients_are_pytorchs(self) -> None:
        text, sizes = BLOCKS[1]
        leaves = leaves_of(text, sizes, torch.float32)
        found = []
        with self.always(), conv_precision("ieee"):
            for run in (_ops.apply, _eager.run):
                output = run(text, leaves[0], leaves[1:])
                (gradient,) = torch.autograd.grad(output.square().sum(), leaves[0], create_graph=True)
                found.append(torch.autograd.grad(gradient.square().sum(), leaves[0])[0])
        error = (found[0] - found[1]).norm() / found[1].norm()
        self.assertLess(error.item(), 1e-3)

    def test_a_step_is_captured(self) -> None:
        text, sizes = BLOCKS[0]
        leaves = leaves_of(text, sizes, torch.float32)
        upstream = torch.randn_like(_eager.run(text, leaves[0], leaves[1:]))
        with self.always():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                wanted = copy.deepcopy(gradients_of(_ops.apply, text, leaves, upstream))
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = gradients_of(_ops.apply, text, leaves, upstream)
        graph.replay()
        torch.cuda.synchronize()
        for own, other in zip(found, wanted, strict=True):
            self.assertTrue(torch.equal(own, other))


if __name__ == "__main__":
    unittest.main()
