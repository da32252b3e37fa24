"""Frozen models on a GPU: the same bits, changes of weights, CUDA graphs, streams and threads."""

import copy
import threading
import unittest
from collections.abc import Callable
from unittest import mock

import torch
from support import FORMATS, GpuTest, in_format
from torch import Tensor, nn

import onepass
from onepass import _cuda


def made(dtype: torch.dtype = torch.float32, channels: int = 96) -> nn.Module:
    """A fused model that runs whole, whatever is predicted."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(64, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.SiLU())
    return onepass.fuse(model.to("cuda", dtype).eval())


def drawn(dtype: torch.dtype = torch.float32, memory_format: str = "contiguous", batch: int = 2) -> Tensor:
    return in_format(torch.randn(batch, 64, 23, 24, device="cuda", dtype=dtype), memory_format)


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def captured(model: nn.Module, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        output = model(x)
    return graph, output


def double(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})


class Frozen(GpuTest):
    """Each result is compared with that of an unfrozen copy, bit by bit."""

    def setUp(self) -> None:
        super().setUp()
        patch = mock.patch.object(_cuda, "_is_worth_fusing", lambda *how: True)
        patch.start()
        self.addCleanup(patch.stop)

    def assert_right(self, model: nn.Module, x: Tensor) -> None:
        self.assertTrue(torch.equal(run(model, x), run(copy.deepcopy(model), x)))

    def assert_kept(self, model: nn.Module) -> None:
        kept = onepass.report(model).frozen
        self.assertGreater(sum(layer.bytes for layer in kept), 0)
        self.assertEqual([layer.packed_by_calls for layer in kept], [{}] * len(kept))

    def test_the_bits_are_those_of_calls_that_pack(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            for memory_format in FORMATS:
                model = onepass.freeze(made(dtype))
                for batch in (2, 2, 5):
                    self.assert_right(model, drawn(dtype, memory_format, batch))
                self.assert_kept(model)

    def test_changed_weights_are_packed_anew(self) -> None:
        x = drawn()
        for change in (double, load, nn.Module.bfloat16):
            model = onepass.freeze(made())
            run(model, x)
            change(model)
            given = x.to(model[0].weight.dtype)
            for _ in range(2):
                self.assert_right(model, given)
            self.assert_kept(model)

    def test_moving_frees_packed_weights(self) -> None:
        model, x = onepass.freeze(made()), drawn()
        run(model, x)
        model.cpu()
        self.assertEqual(sum(layer.bytes for layer in onepass.report(model).frozen), 0)
        self.assert_right(model.cuda(), x)

    def test_a_graph_reads_packed_weights_as_long_as_the_parameters_live(self) -> None:
        model, x = onepass.freeze(made()), drawn()
        wanted = run(model, x)
        graph, output = captured(model, x)
        self.assert_kept(model)
        for drop in (lambda: None, lambda: onepass.unfreeze(model)):
            drop()
            spoiled = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
            output.zero_()
            graph.replay()
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(output, wanted))
            del spoiled

    def test_a_first_call_in_a_capture_packs_in_the_graph(self) -> None:
        model, x = onepass.freeze(made(torch.bfloat16, channels=104)), drawn(torch.bfloat16)
        graph, output = captured(model, x)
        self.assertIn("call the model once", str(onepass.report(model)))
        double(model)
        graph.replay()
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(output, run(copy.deepcopy(model), x)))

    def test_streams_and_a_capture_of_another_thread(self) -> None:
        """Weights are packed on one stream and read on others, while another thread captures."""
        x, other = drawn(), made(channels=80)
        wanted = run(copy.deepcopy(other), x)
        model, results, failures = onepass.freeze(made()), [], []
        expected = run(copy.deepcopy(model), x)

        def freeze_and_run() -> None:
            try:
                for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
                    with torch.cuda.stream(stream):
                        results.append(run(model, x))
            except Exception as error:
                failures.append(error)

        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), torch.no_grad():
            output = other(x)
            thread = threading.Thread(target=freeze_and_run)
            thread.start()
            thread.join()
        graph.replay()
        torch.cuda.synchronize()
        self.assertEqual(failures, [])
        self.assertTrue(torch.equal(output, wanted))
        self.assertEqual([torch.equal(result, expected) for result in results], [True, True])

    def test_training_between_frozen_calls(self) -> None:
        model, x = onepass.freeze(made()), drawn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step: Callable[[], None] = optimizer.step
        for _ in range(2):
            run(model, x)
            model(x).float().square().mean().backward()
            step()
            self.assert_right(model, x)


if __name__ == "__main__":
    unittest.main()
