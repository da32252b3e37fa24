"""Samples whose values overflow f16: counted by the kernels that compute them again, and said by the host."""

import contextlib
import unittest
import warnings
from unittest import mock

import torch
from support import GpuTest, conv_precision
from torch import nn

import onepass
from onepass import _cuda, _eager


class Net(nn.Module):
    """A thin convolution and a wide one, each with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.thin = nn.Sequential(nn.Conv3d(3, 16, 4), nn.Hardswish(), nn.GroupNorm(4, 16))
        self.wide = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.GELU(), nn.GroupNorm(8, 64))

    def forward(self, volume: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.thin(volume).mean((2, 3, 4)), self.wide(image)


class Redone(GpuTest):
    """Products of halves come first, whatever is predicted."""

    def setUp(self) -> None:
        super().setUp()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(conv_precision("tf32"))
        stack.enter_context(torch.no_grad())
        stack.enter_context(mock.patch.object(_cuda, "_words_of_whole", lambda *how: ("tf32", "tf32")))
        self.volume = torch.randn(8, 3, 16, 32, 32, device="cuda")
        self.image = torch.randn(8, 64, 24, 24, device="cuda")

    def run_and_collect(self, model: nn.Module) -> list[str]:
        """The warnings of one call that has ended."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(self.volume, self.image)
        torch.cuda.synchronize()
        return [str(w.message) for w in caught if w.category is onepass.SlowPathWarning]

    def counts(self, model: nn.Module) -> dict[str, int]:
        return {layer.name: layer.samples for layer in onepass.report(model).redone}

    def test_ordinary_samples_are_not_counted(self) -> None:
        model = onepass.fuse(Net().cuda())
        for _ in range(3):
            self.assertEqual(self.run_and_collect(model), [])
        self.assertEqual(self.counts(model), {})

    def test_a_large_sample_of_a_layer_is_counted_and_said_once(self) -> None:
        for tensor, layer in ((self.volume, "thin.0"), (self.image, "wide.0")):
            with self.subTest(layer):
                model = onepass.fuse(Net().cuda())
                tensor[3] = 1e5 * tensor[3].sign()
                self.assertEqual(self.run_and_collect(model), [])
                self.assertEqual(self.counts(model), {layer: 1})
                (said,) = self.run_and_collect(model)
                self.assertTrue(said.startswith(f"{layer}: 1 sample had values that leave f16's range"), said)
                self.assertEqual([self.run_and_collect(model) for _ in range(70)], [[]] * 70)
                self.assertEqual(self.counts(model), {layer: 72})
                self.assertIn("72 samples had values", str(onepass.report(model)))
                tensor.copy_(torch.randn_like(tensor))

    def test_replays_of_a_graph_are_counted(self) -> None:
        """Also where the first call of the layer is the captured one."""
        text = "conv2d(64,64,k=3,p=1) | gelu | group_norm(8)"
        block = onepass.Block(text, device="cuda")
        self.image[::2] *= 1e5
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = block(self.image)
        for _ in range(3):
            graph.replay()
        self.assertEqual(block._site.samples(wait=True), 12)
        wanted = _eager.run(text, self.image, list(block.parameters()))
        torch.testing.assert_close(output, wanted, rtol=1e-2, atol=1e-2)

    def test_a_forward_for_training_counts(self) -> None:
        block = onepass.Block("conv2d(64,64,k=3,p=1) | gelu | group_norm(8)", device="cuda")
        self.image[5] *= 1e5
        with torch.enable_grad():
            self.assertTrue(block(self.image).requires_grad)
        self.assertEqual(block._site.samples(wait=True), 1)


if __name__ == "__main__":
    unittest.main()
