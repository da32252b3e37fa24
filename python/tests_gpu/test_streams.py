"""CUDA graphs, streams, threads, devices, memory that runs out; torch.compile and torch.export."""

import contextlib
import copy
import threading
import unittest
from unittest import mock

import torch
from support import (
    FORMATS,
    GpuTest,
    alone,
    conv_precision,
    gpu_example,
    in_format,
    launches_of,
    warm,
    with_gradients,
)
from torch import nn

import onepass
from onepass import _cuda, _eager, _ops

BLOCK = "conv2d(3,8,k=3,p=1) | swish | group_norm(4) | hardswish"
TAIL = "swish | group_norm(4) | hardswish"


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


class Graphs(GpuTest):
    """Capture and replay."""

    def replay_follows_changes(self, block: onepass.Block, x: torch.Tensor, warm_up: bool) -> None:
        """A captured forward reads weights and input anew at each replay."""
        with torch.no_grad():
            if warm_up:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    block(x)
                torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = block(x)
            for _ in range(3):
                x.copy_(torch.randn_like(x))
                for parameter in block.parameters():
                    parameter.copy_(torch.randn_like(parameter))
                graph.replay()
                torch.cuda.synchronize()
                close(output, _eager.run(block.text, x, list(block.parameters())))

    def test_replay_follows_changes_of_weights_and_input(self) -> None:
        for text, sizes in (
            (BLOCK, (2, 3, 20, 21)),
            ("swish | group_norm(4) | hardswish", (4, 16, 31, 63, 63)),
            ("hardswish | group_norm(4) | mean", (4, 16, 13, 29, 29)),
        ):
            for memory_format in FORMATS:
                x = in_format(torch.randn(sizes, device="cuda"), memory_format)
                channels = None if text == BLOCK else sizes[1]
                block = onepass.Block(text, channels=channels, device="cuda")
                self.replay_follows_changes(block, x, warm_up=True)

    def test_the_first_call_may_be_in_a_capture(self) -> None:
        """The kernel is compiled and loaded while the stream is captured."""
        block = onepass.Block("gelu | group_norm(2) | mul(0.0625) | tanh", channels=6, device="cuda")
        self.replay_follows_changes(block, torch.randn(3, 6, 11, 13, device="cuda"), warm_up=False)

    def test_a_capture_elsewhere_is_not_disturbed(self) -> None:
        """Another thread's first call compiles and loads while this one captures."""
        x = torch.randn(2, 8, 9, 9, device="cuda")
        parameters = [torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")]
        with torch.no_grad():
            _ops.apply(TAIL, x, parameters)
            stream = torch.cuda.Stream()
            failures = []

            def other() -> None:
                try:
                    with torch.cuda.stream(stream), torch.no_grad():
                        _ops.apply("mish | group_norm(4) | add(0.125)", x, parameters)
                except Exception as error:
                    failures.append(error)

            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                output = _ops.apply(TAIL, x, parameters)
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
            self.assertEqual(failures, [])
            graph.replay()
            torch.cuda.synchronize()
            close(output, _eager.run(TAIL, x, parameters))

    def test_a_whole_training_step_is_captured(self) -> None:
        torch.manual_seed(2)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8)
        ).cuda()
        reference = copy.deepcopy(model)
        fused = onepass.fuse(model)
        x, target = torch.randn(4, 3, 14, 14, device="cuda"), torch.randn(4, 8, 10, 10, device="cuda")

        def step() -> torch.Tensor:
            loss = (fused(x) - target).square().mean()
            loss.backward()
            return loss

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
                fused.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        x.copy_(torch.randn_like(x))
        with torch.no_grad():
            for some, other in zip(fused.parameters(), reference.parameters(), strict=True):
                some.mul_(1.25)
                other.copy_(some)
        graph.replay()
        (reference(x) - target).square().mean().backward()
        torch.cuda.synchronize()
        for some, other in zip(fused.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(some.grad, other.grad, rtol=2e-2, atol=2e-4)


class Streams(GpuTest):
    """Work lies on the current stream of the tensors' device."""

    def test_work_waits_for_its_stream(self) -> None:
        """Without the order of one stream the tail would read what the long work has not written yet."""
        parameters = [torch.ones(16, device="cuda"), torch.zeros(16, device="cuda")]
        stream = torch.cuda.Stream()
        for _ in range(5):
            x = torch.zeros(4, 16, 64, 64, device="cuda")
            fresh = torch.randn_like(x)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), torch.no_grad():
                torch.cuda._sleep(20_000_000)
                x.copy_(fresh)
                output = _ops.apply(TAIL, x, parameters)
            stream.synchronize()
            close(output, _eager.run(TAIL, fresh, parameters))

    def test_eight_threads_on_eight_streams(self) -> None:
        x, parameters = gpu_example(BLOCK)
        wanted, gradients = with_gradients(_ops.apply, BLOCK, x, parameters)
        torch.cuda.synchronize()
        failures = []

        def work() -> None:
            try:
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    for _ in range(20):
                        found, found_gradients = with_gradients(_ops.apply, BLOCK, x, parameters)
                        stream.synchronize()
                        close(found, wanted)
                        close(found_gradients[0], gradients[0])
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    @unittest.skipUnless(torch.cuda.device_count() > 1, "one GPU")
    def test_every_device_runs_its_own_tensors(self) -> None:
        for index in range(torch.cuda.device_count()):  # the current device stays cuda:0
            x, parameters = gpu_example(BLOCK)
            moved = [parameter.to(f"cuda:{index}") for parameter in parameters]
            found, _ = with_gradients(_ops.apply, BLOCK, x.to(f"cuda:{index}"), moved)
            self.assertEqual(found.device.index, index)
            close(found.to("cuda:0"), _eager.run(BLOCK, x, parameters))

    @alone
    def test_out_of_memory_leaves_the_process_usable(self) -> None:
        free, _ = torch.cuda.mem_get_info()
        parameters = [torch.ones(16, device="cuda"), torch.zeros(16, device="cuda")]
        x = torch.empty(int(free * 0.6) // (4 * 16 * 4096), 16, 64, 64, device="cuda")
        with self.assertRaises(torch.OutOfMemoryError), torch.no_grad():
            _ops.apply(TAIL, x, parameters)
        del x
        torch.cuda.empty_cache()
        small = torch.randn(2, 16, 9, 9, device="cuda")
        close(_ops.apply(TAIL, small, parameters), _eager.run(TAIL, small, parameters))


class Compilers(GpuTest):
    """torch.compile and torch.export, whose own compiler takes a process seconds to import."""

    together = True

    def setUp(self) -> None:
        super().setUp()
        torch._dynamo.reset()

    def test_compile_fullgraph(self) -> None:
        for text in (BLOCK, TAIL, "conv3d(2,4,k=2) | hardswish | group_norm(2) | mean"):
            for dynamic in (False, True):
                with self.subTest(text=text, dynamic=dynamic):
                    torch._dynamo.reset()
                    compiled = torch.compile(
                        lambda x, p, t=text: _ops.apply(t, x, p), fullgraph=True, dynamic=dynamic
                    )
                    for batch in (2, 5):
                        x, parameters = gpu_example(text, batch=batch)
                        found = with_gradients(lambda t, x, p: compiled(x, p), text, x, parameters)  # noqa: B023
                        wanted = with_gradients(_eager.run, text, x, parameters)
                        close(found[0], wanted[0])
                        for some, other in zip(found[1], wanted[1], strict=True):
                            torch.testing.assert_close(some, other, rtol=5e-3, atol=5e-3)

    def test_compile_channels_last(self) -> None:
        compiled = torch.compile(lambda x, p: _ops.apply(BLOCK, x, p), fullgraph=True)
        x, parameters = gpu_example(BLOCK, memory_format="channels_last")
        found, _ = with_gradients(lambda t, x, p: compiled(x, p), BLOCK, x, parameters)
        close(found, _eager.run(BLOCK, x, parameters))
        self.assertTrue(found.is_contiguous(memory_format=torch.channels_last))

    def test_reduce_overhead_mode(self) -> None:
        block = onepass.Block(BLOCK, device="cuda")
        compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            x = torch.randn(2, 3, 12, 12, device="cuda")
            with torch.no_grad():
                torch.compiler.cudagraph_mark_step_begin()
                close(compiled(x), block(x))

    def test_compiled_inference_is_whole_where_that_gains(self) -> None:
        block = onepass.Block("conv2d(3,8,k=3) | relu | group_norm(4)", device="cuda").eval()
        x = torch.randn(4, 3, 40, 40, device="cuda")
        with torch.no_grad(), mock.patch.object(_cuda, "_is_worth_fusing", lambda *_: True):
            wanted = _eager.run(block.text, x, list(block.parameters()))
            for mode in ("reduce-overhead", "default"):
                torch._dynamo.reset()
                compiled = torch.compile(block, fullgraph=True, mode=mode)
                for _ in range(3):
                    torch.compiler.cudagraph_mark_step_begin()
                    close(compiled(x), wanted)
            launched = launches_of(lambda: compiled(x))
            self.assertTrue(all(name.startswith("onepass_") for name in launched), launched)

    def test_compile_a_fused_model_under_autocast(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU()).cuda()
        x = torch.randn(2, 3, 12, 12, device="cuda")
        with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
            wanted = model(x)
            compiled = torch.compile(onepass.fuse(model), fullgraph=True)
            found = compiled(x)
        self.assertEqual(found.dtype, wanted.dtype)
        torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)

    def test_export_holds_the_fused_operator(self) -> None:
        block = onepass.Block(BLOCK, device="cuda").eval()
        x = torch.randn(2, 3, 12, 12, device="cuda")
        batch = torch.export.Dim("batch", min=1, max=64)
        program = torch.export.export(block, (x,), dynamic_shapes={"x": {0: batch}})
        targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        self.assertIn("onepass.forward_for_training.default", targets)
        for size in (1, 7):
            given = torch.randn(size, 3, 12, 12, device="cuda")
            close(program.module()(given), block(given))
        module = program.module()
        module(given).square().sum().backward()
        block(given).square().sum().backward()
        for name, parameter in module.named_parameters():
            close(parameter.grad, block.get_parameter(name).grad)

    def test_inference_runs_the_tail_as_one_kernel(self) -> None:
        x, parameters = gpu_example(TAIL)
        with torch.no_grad():
            _ops.apply(TAIL, x, parameters)
            launched = launches_of(lambda: _ops.apply(TAIL, x, parameters))
        self.assertEqual(len(launched), 1, launched)

    def test_checkpointing(self) -> None:
        x, parameters = gpu_example(BLOCK)

        def checkpointed(text: str, x: torch.Tensor, p: list[torch.Tensor]) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(
                lambda x, *p: _ops.apply(text, x, p), x, *p, use_reentrant=False
            )

        found = with_gradients(checkpointed, BLOCK, x, parameters)
        wanted = with_gradients(_ops.apply, BLOCK, x, parameters)
        for some, other in zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True):
            torch.testing.assert_close(some, other, rtol=1e-4, atol=1e-4)


_settings = contextlib.ExitStack()


def setUpModule() -> None:
    """Convolutions in full precision: compilers choose other algorithms, and TF32's differ by 1e-3."""
    _settings.enter_context(conv_precision("ieee"))
    if torch.cuda.is_available():
        warm([lambda: with_gradients(_ops.apply, BLOCK, *gpu_example(BLOCK))])


def tearDownModule() -> None:
    _settings.close()


if __name__ == "__main__":
    unittest.main()
