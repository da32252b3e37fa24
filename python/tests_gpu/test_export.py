"""Exported files on a GPU: built by load_inline, compared with the originals, trained, compiled, timed."""

import functools
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types
import unittest
from collections.abc import Callable, Iterator

import torch
from support import ROOT, GpuTest, alone, conv_precision, kernels_of, launches_of, warm
from torch import Tensor, nn

import onepass
from onepass import export
from onepass.exporting import judge
from onepass.optimizing import verify

WORKLOADS = {
    "s60": (8, 128),
    "s19": (4, 128),
    "s61": (2, 16),
    "s27": (24, 1024),
}  # batches: small, the file's
EXAMPLES = pathlib.Path(ROOT) / "examples"
BUILD_SECONDS = 90
# In the build folder: what one test has built, the next one loads.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(pathlib.Path(ROOT) / "build" / "gpu" / "extensions"))
pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"]).mkdir(parents=True, exist_ok=True)


def load(path: pathlib.Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def examples() -> Iterator[tuple[str, types.ModuleType]]:
    """The committed files."""
    for name in WORKLOADS:
        known = sys.modules.get(f"exported_{name}")
        yield name, known or load(EXAMPLES / "exported" / f"{name}.py", f"exported_{name}")


@functools.cache
def written(name: str, conv: str, train: bool, dtype: str = "float32") -> types.ModuleType:
    """A file written now, for the GPU that is here."""
    title = f"{name}_{conv}_{'train' if train else 'infer'}_{dtype}"
    text = (EXAMPLES / f"{name}.py").read_text()
    text = text.replace("\n\n    def forward", f"\n        self.to(torch.{dtype})\n\n    def forward", 1)
    text = re.sub(r"torch\.rand\((.*)\)\]", rf"torch.rand(\1, dtype=torch.{dtype})]", text)
    with tempfile.TemporaryDirectory() as folder:
        original, path = (pathlib.Path(folder) / name for name in ("original.py", f"{title}.py"))
        original.write_text(text)
        path.write_text(export.export(str(original), export._architecture(), conv, train, path.name))
        return load(path, f"exported_now_{title}")


def models(module: types.ModuleType, batch: int) -> tuple[nn.Module, nn.Module, Tensor]:
    """Both models with the same weights, and an input."""
    module.batch_size = batch
    made = []
    for cls in (module.ModelNew, module.Model):
        torch.manual_seed(42)
        made.append(cls(*module.get_init_inputs()).cuda())
    torch.manual_seed(7)
    with torch.device("cuda"):
        x = module.get_inputs()[0]
    return made[0], made[1], x


def step(model: nn.Module, x: Tensor, direction: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    output = model(x)
    output.backward(direction)
    return [output.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def milliseconds(calls: list[Callable[[], object]]) -> list[float]:
    """Medians of calls in turn, with the second-level cache overwritten before each."""
    flush = torch.empty(
        2 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.int8, device="cuda"
    )
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(34):
        for call, taken in zip(calls, times, strict=True):
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = call()
            end.record()
            end.synchronize()
            del result
            if turn >= 3:
                taken.append(start.elapsed_time(end))
    return [sorted(taken)[len(taken) // 2] for taken in times]


def infer(module: types.ModuleType, batch: int) -> Tensor:
    """What the exported model gives; the first call of a precision builds its extension."""
    new, _, x = models(module, batch)
    with torch.no_grad():
        return new(x)


class Examples(GpuTest):
    """The committed files; built side by side, once for all tests, which one process runs."""

    together = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        if torch.cuda.get_device_capability() != (9, 0):
            raise unittest.SkipTest("the examples are for sm_90a")
        for precision in ("tf32", "ieee"):
            with conv_precision(precision):
                warm([lambda m=module, n=name: infer(m, WORKLOADS[n][0]) for name, module in examples()])

    def test_outputs_are_the_originals(self) -> None:
        for tolerance, precision in ((1e-4, "tf32"), (1e-5, "ieee")):
            with conv_precision(precision), torch.no_grad():
                for name, module in examples():
                    for batch in (WORKLOADS[name][0], 1, 0, WORKLOADS[name][0] + 3):
                        with self.subTest(workload=name, precision=precision, batch=batch):
                            new, old, x = models(module, batch)
                            torch.testing.assert_close(new(x), old(x), rtol=tolerance, atol=tolerance)

    def test_kernels_run(self) -> None:
        with torch.no_grad():
            for name, module in examples():
                with self.subTest(workload=name):
                    new, _, x = models(module, WORKLOADS[name][0])
                    new(x)
                    self.assertIn("block_1", " ".join(kernels_of(lambda new=new, x=x: new(x))))

    def test_other_calls_run_the_original_code(self) -> None:
        _, module = next(examples())
        new, old, x = models(module, 4)
        with torch.no_grad():
            shifted = torch.cat([x.flatten(), x.flatten()[:1]])[1:].view_as(x)
            for given in (shifted, x.transpose(3, 4), x[..., :-1], x[:, :, ::2]):
                torch.testing.assert_close(new(given), old(given), rtol=1e-4, atol=1e-4)
            half = new.half()(x.half())
            torch.testing.assert_close(half, old.half()(x.half()), rtol=1e-2, atol=1e-2)
            with torch.autocast("cuda", torch.bfloat16):
                torch.testing.assert_close(new.float()(x), old.float()(x), rtol=3e-2, atol=3e-2)
        self.assertIsNotNone(new(x).grad_fn)

    def test_compiled_captured_and_on_another_stream(self) -> None:
        for name, module in examples():
            with self.subTest(workload=name), torch.no_grad():
                new, old, x = models(module, WORKLOADS[name][0])
                wanted = old(x)
                compiled = torch.compile(new, fullgraph=True, backend="aot_eager")
                torch.testing.assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-4)
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    new(x)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=stream):
                        output = new(x)
                for _ in range(2):
                    output.zero_()
                    graph.replay()
                    torch.cuda.synchronize()
                    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)

    @alone
    def test_as_fast_as_the_library(self) -> None:
        for name, module in examples():
            with self.subTest(workload=name), torch.no_grad():
                new, old, x = models(module, WORKLOADS[name][1])
                fused = onepass.fuse(old)
                exported, library = milliseconds([lambda n=new, x=x: n(x), lambda f=fused, x=x: f(x)])
                print(f"{name}: exported {exported:.3f} ms, library {library:.3f} ms")
                self.assertLess(exported, 1.05 * library)


class Trained(GpuTest):
    """Files written now, for training; one process runs the tests, of which the second finds a file built."""

    together = True

    def test_training_steps_are_the_originals(self) -> None:
        given = (("s61", "fuse"), ("s60", "fuse"), ("s27", "keep"))
        files = [written(name, conv, train=True) for name, conv in given]

        def train(module: types.ModuleType, name: str) -> None:
            new, _, x = models(module, WORKLOADS[name][0])
            new(x.requires_grad_()).sum().backward()

        with conv_precision("ieee"):
            warm([lambda m=m, n=name: train(m, n) for m, (name, _) in zip(files, given, strict=True)])
        for module, (name, conv) in zip(files, given, strict=True):
            with self.subTest(workload=name, conv=conv), conv_precision("ieee"):
                module.batch_size = WORKLOADS[name][0]
                self.assertEqual(judge._faults(verify, module, module, True), [])

    def test_kept_convolution_adds_one_launch_each_way(self) -> None:
        module = written("s27", "keep", train=True)
        new, _, x = models(module, 24)
        direction = torch.randn_like(new(x).detach())
        step(new, x, direction)
        names = [name for name in launches_of(lambda: step(new, x, direction)) if "block_1" in name]
        self.assertEqual(len(names), 2, names)


class Exported(GpuTest):
    """Files written now."""

    def test_16_bits_are_the_librarys(self) -> None:
        given = (("s60", "keep"), ("s19", "fuse"))
        files = [written(name, conv, train=False, dtype="bfloat16") for name, conv in given]
        batches = [WORKLOADS[name][0] for name, _ in given]
        with torch.no_grad():
            warm([lambda m=m, n=n: infer(m, n) for m, n in zip(files, batches, strict=True)])
            for module, batch, (name, conv) in zip(files, batches, given, strict=True):
                with self.subTest(workload=name, conv=conv):
                    new, old, x = models(module, batch)
                    self.assertTrue(torch.equal(new(x), onepass.fuse(old, conv=conv)(x)))

    def test_command_verifies_what_it_writes(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = pathlib.Path(folder) / "model.py"
            text = (
                (EXAMPLES / "s61.py")
                .read_text()
                .replace(
                    "batch_size, in_channels, out_channels = 16, 64, 128",
                    "batch_size, in_channels, out_channels = 2, 64, 128",
                )
            )
            model.write_text(text)
            command = [
                sys.executable,
                "-m",
                "onepass",
                "export",
                str(model),
                "-o",
                f"{folder}/new.py",
                "--train",
            ]
            package = {"PYTHONPATH": str(pathlib.Path(ROOT) / "python")}
            run = subprocess.run(command, env={**os.environ, **package}, capture_output=True, text=True)
            self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
            self.assertIn("times as fast", run.stdout)
            seconds = float(run.stdout.split("built in ")[1].split()[0])
            self.assertLess(seconds, BUILD_SECONDS)
            self.assertTrue((pathlib.Path(folder) / "new.py").is_file())


if __name__ == "__main__":
    unittest.main()
