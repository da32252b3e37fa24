"""Batch norms in evaluation on a GPU: scale and shift by one kernel, fused models as eager ones, captures."""

import copy
import itertools
import unittest

import torch
import torch.nn.functional as F
from support import FLOATS, FORMATS, GpuTest, in_format, launches_of
from torch import Tensor, nn

import onepass


def network(channels: int) -> nn.Module:
    """A convolution, a batch norm, a skip."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            self.bn1, self.relu = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
            self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            self.bn2 = nn.BatchNorm2d(channels)

        def forward(self, x: Tensor) -> Tensor:
            out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            out += x
            return self.relu(out)

    torch.manual_seed(3)
    model = Block().cuda()
    for norm in (model.bn1, model.bn2):
        for tensor, low, high in (
            (norm.running_mean, -2, 2),
            (norm.running_var, 0.3, 3),
            (norm.weight, -1.5, 1.5),
            (norm.bias, -1, 1),
        ):
            nn.init.uniform_(tensor, low, high)
    return model.eval()


class BatchNorms(GpuTest):
    """Against PyTorch's own batch norm, in float64 where exactness is meant."""

    def assert_near(self, found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
        scale = wanted.abs().max().item()
        near = 2e-3 if dtype == torch.float32 else 3e-2  # convolutions of f32 may be TF32
        self.assertLessEqual((found.double() - wanted.double()).abs().max().item(), near * scale)

    def test_scale_and_shift_are_those_of_the_cpu(self) -> None:
        for dtype, channels, weighted, biased in itertools.product(
            FLOATS, (1, 37, 128, 129, 2048), (False, True), (False, True)
        ):
            with self.subTest(dtype=dtype, channels=channels, weighted=weighted, biased=biased):
                mean, variance, weight, bias = torch.rand(4, channels, device="cuda").to(dtype)
                given = (mean, variance, weight if weighted else None, bias if biased else None)
                operator = torch.ops.onepass.scale_and_shift
                found = operator(*given, 1e-5)
                wanted = operator(*(None if t is None else t.cpu() for t in given), 1e-5)
                for some, other in zip(found, wanted, strict=True):
                    self.assertEqual(some.dtype, torch.float32)
                    torch.testing.assert_close(some.cpu(), other, rtol=1e-6, atol=1e-6)

    def test_fused_models_are_as_eager(self) -> None:
        for channels, dtype, memory_format in itertools.product((8, 64), FLOATS, FORMATS):
            with self.subTest(channels=channels, dtype=dtype, memory_format=memory_format):
                exact = network(channels)
                fused = onepass.fuse(copy.deepcopy(exact)).to(dtype)
                x = in_format(torch.randn(4, channels, 28, 28, device="cuda").to(dtype), memory_format)
                wanted = copy.deepcopy(fused).double()(x.double())
                with torch.no_grad():
                    found = fused(x)
                self.assertEqual(found.dtype, dtype)
                self.assert_near(found, wanted, dtype)
                self.assertEqual(onepass.report(fused).fallbacks, [])

    def test_autocast_and_norms_of_fp32(self) -> None:
        model = onepass.fuse(network(16))
        x = torch.randn(4, 16, 28, 28, device="cuda")
        with torch.no_grad():
            wanted = model(x)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                found = model(x)
            mixed = copy.deepcopy(model).bfloat16()
            mixed.bn1.float(), mixed.bn2.float()
            other = mixed(x.bfloat16())
        self.assertEqual(found.dtype, torch.bfloat16)
        self.assertEqual(other.dtype, torch.bfloat16)
        self.assert_near(found, wanted, torch.bfloat16)
        self.assert_near(other, wanted, torch.bfloat16)

    def test_gradients_are_those_of_eager(self) -> None:
        eager = network(16)
        fused = onepass.fuse(copy.deepcopy(eager))
        results = []
        for model in (eager, fused):
            x = torch.ones(2, 16, 20, 20, device="cuda").cumsum(-1).div(20).requires_grad_()
            sources = [x, *model.parameters()]
            results.append(torch.autograd.grad(model(x).square().mean(), sources))
        for some, other in zip(*results, strict=True):
            self.assert_near(other, some, torch.float32)

    def test_a_captured_call_reads_the_statistics_at_each_replay(self) -> None:
        model = onepass.fuse(network(16))
        x = torch.randn(4, 16, 28, 28, device="cuda")
        with torch.no_grad():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    model(x)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = model(x)
            graph.replay()
            before = captured.clone()
            model.bn1.running_mean.add_(1)
            graph.replay()
            self.assertFalse(torch.allclose(before, captured))
            torch.testing.assert_close(captured, model(x))

    def test_a_block_takes_two_kernels_besides_its_convolution(self) -> None:
        model = onepass.fuse(nn.Sequential(nn.BatchNorm2d(64), nn.ReLU()).cuda().eval())
        x = torch.randn(8, 64, 56, 56, device="cuda")
        with torch.no_grad():
            model(x)
            self.assertEqual(len(launches_of(lambda: model(x))), 2)
            torch.testing.assert_close(model(x), F.relu(model[0](x)), rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    unittest.main()
