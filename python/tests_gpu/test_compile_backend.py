"""torch.compile(backend="onepass") on a GPU: numbers in all modes, with CUDA graphs, and in training."""

import copy
import unittest

import torch
import torch.nn.functional as F
from support import FORMATS, GpuTest, in_format
from torch import Tensor, nn

import onepass

ALL = {"onepass.keep": "all"}


class Network(nn.Module):
    """Thin and wide blocks with what lies between them in a diffusion model."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, 16), nn.GroupNorm(4, 64)
        self.wide, self.leave = nn.Conv2d(16, 64, 3, padding=1), nn.Conv2d(64, 16, 1)
        self.embed = nn.Linear(8, 64)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = F.silu(self.norm1(self.enter(x)))
        h = self.wide(x) + self.embed(F.silu(t))[:, :, None, None]
        h = self.leave(F.silu(self.norm2(h)))
        return F.interpolate((x + h) / 2.0, scale_factor=2.0)


def example(dtype: torch.dtype, memory_format: str) -> tuple[nn.Module, list[Tensor]]:
    model = Network().cuda().to(dtype)
    x = in_format(torch.randn(2, 3, 24, 24, device="cuda", dtype=dtype), memory_format)
    return model, [x, torch.randn(2, 8, device="cuda", dtype=dtype)]


class Backend(GpuTest):
    """Compared with eager PyTorch in fp32."""

    def setUp(self) -> None:
        super().setUp()
        torch._dynamo.reset()

    def check(self, model: nn.Module, inputs: list[Tensor], run: nn.Module, limit: float) -> None:
        exact = copy.deepcopy(model).float()
        with torch.no_grad():
            wanted = exact(*(tensor.float() for tensor in inputs))
            for _ in range(3):  # CUDA graphs are recorded at the second call
                found = run(*inputs)
        error = (found.float() - wanted).abs().max() / wanted.abs().max()
        self.assertLess(error.item(), limit)

    def test_forward(self) -> None:
        for memory_format in FORMATS:
            for dtype, limit in ((torch.float32, 5e-3), (torch.bfloat16, 3e-2)):
                for options in (ALL, {"onepass.keep": "faster"}, {**ALL, "triton.cudagraphs": True}):
                    with self.subTest(memory_format=memory_format, dtype=dtype, options=options):
                        torch._dynamo.reset()
                        model, inputs = example(dtype, memory_format)
                        run = torch.compile(model, backend="onepass", options=options)
                        self.check(model, inputs, run, limit)
                        self.assertTrue(onepass.report(run).chains)

    def test_modes(self) -> None:
        for mode in ("reduce-overhead", "max-autotune"):
            with self.subTest(mode=mode):
                torch._dynamo.reset()
                model, inputs = example(torch.bfloat16, "channels_last")
                self.check(model, inputs, torch.compile(model, backend="onepass", mode=mode), 3e-2)

    def test_training(self) -> None:
        for memory_format in FORMATS:
            for autocast in (False, True):
                with self.subTest(memory_format=memory_format, autocast=autocast):
                    torch._dynamo.reset()
                    model, inputs = example(torch.float32, memory_format)
                    twin = copy.deepcopy(model)
                    run = torch.compile(model, backend="onepass", options=ALL)
                    for each, call in ((model, run), (twin, twin)):
                        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                            result = call(*inputs)
                        result.float().square().mean().backward()
                        self.assertTrue(all(p.grad is not None for p in each.parameters()))
                    scale = max(p.grad.abs().max().item() for p in twin.parameters())
                    limit = (5e-2 if autocast else 5e-3) * scale
                    for some, other in zip(model.parameters(), twin.parameters(), strict=True):
                        torch.testing.assert_close(some.grad, other.grad, rtol=5e-2, atol=limit)

    def test_times_are_measured_once(self) -> None:
        """The second compilation, as one in another process, finds all times on disk."""
        from unittest import mock

        from onepass.compiling import measuring

        timed: list[str] = []
        measure = measuring._measure

        def note(part: measuring.Part) -> None:
            timed.append(part.by)
            measure(part)
            self.assertIsNotNone(measuring._remembered(part), f"{part} was not timed")

        model, inputs = example(torch.bfloat16, "channels_last")
        inputs = [inputs[0].repeat(16, 1, 8, 8), inputs[1].repeat(16, 1)]  # worth timing
        counts = []
        for _ in range(2):
            torch._dynamo.reset()
            measuring._known.clear()
            with mock.patch.object(measuring, "_measure", note):
                self.check(model, inputs, torch.compile(model, backend="onepass"), 3e-2)
            counts.append(len(timed))
        self.assertGreater(counts[0], 0)
        self.assertEqual(counts[1], counts[0])

    def test_declined_chains_are_inductors(self) -> None:
        model, inputs = example(torch.bfloat16, "contiguous")
        run = torch.compile(model, backend="onepass", options={"onepass.keep": "none"})
        with torch.no_grad():
            found, wanted = run(*inputs), torch.compile(model)(*inputs)
        self.assertTrue(torch.equal(found, wanted))


if __name__ == "__main__":
    unittest.main()
