"""Whole models on a GPU: the four workloads by the rules of each mode, and a small U-Net fused both ways."""

import copy
import dataclasses
import importlib.util
import itertools
import pathlib
import unittest
from collections.abc import Callable

import torch
from support import FORMATS, ROOT, GpuTest, conv_precision, in_format, warm
from torch import Tensor, nn

import onepass
from onepass.optimizing import model_file, verify

WORKLOADS = {"s60": 8, "s19": 4, "s61": 2, "s27": 16}  # name: batch


def load_unet() -> type[nn.Module]:
    spec = importlib.util.spec_from_file_location("train_unet", ROOT / "examples" / "train_unet.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.UNet


def load_workload(name: str) -> tuple[nn.Module, Tensor]:
    file = model_file.load(str(pathlib.Path(ROOT) / "examples" / f"{name}.py"))
    file.module.batch_size = WORKLOADS[name]  # instead of gigabytes from which samples are cut
    device = torch.device("cuda")
    return file.build(device, seed=42), file.inputs(device, 42, None).leaves[0]


def step(model: nn.Module, x: Tensor, direction: Tensor | None) -> dict[str, Tensor]:
    """The output and all gradients by name."""
    model.zero_grad(set_to_none=True)
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    output = model(x)
    output.backward(torch.ones_like(output) if direction is None else direction.to(output))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"output": output.detach(), "input": x.grad, **gradients}


def infer(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def warm_workloads(run: Callable[[nn.Module, Tensor], object], *dtypes: torch.dtype) -> None:
    """Compiles the kernels of the workloads of these types, in both formats."""
    calls = []
    for name, dtype, memory_format in itertools.product(WORKLOADS, dtypes, FORMATS):
        model, x = load_workload(name)
        fused = onepass.fuse(model.to(dtype))
        x = in_format(x.to(dtype), memory_format)
        calls.append(lambda model=fused, x=x: run(model, x))
    warm(calls)


class Models(GpuTest):
    """Everything is compared with PyTorch in the same mode and with the same model in float64."""

    def check(self, fused: nn.Module, original: nn.Module, x: Tensor, precision: str) -> None:
        rule = verify.RULES[precision]
        exact = copy.deepcopy(original).double()
        with torch.no_grad():
            direction = torch.randn(original(x).shape, device="cuda")
        ours, theirs = (step(model, x, direction) for model in (fused, original))
        wanted = step(exact, x.double(), direction)
        for name in theirs:
            is_gradient = name != "output"
            asked = dataclasses.replace(rule, ratio=2.0) if is_gradient else rule
            found = verify.compare(name, is_gradient, ours[name], theirs[name], wanted[name], asked)
            self.assertEqual(found.wrong(asked), "")

    def test_workloads_with_tf32(self) -> None:
        self.workloads("tf32")

    def test_workloads_without_tf32(self) -> None:
        self.workloads("fp32")

    def workloads(self, precision: str) -> None:
        with conv_precision("tf32" if precision == "tf32" else "ieee"):
            warm_workloads(lambda model, x: step(model, x, None), torch.float32)
            for name in WORKLOADS:
                for memory_format in FORMATS:
                    with self.subTest(workload=name, memory_format=memory_format):
                        original, x = load_workload(name)
                        fused = onepass.fuse(copy.deepcopy(original))
                        self.check(fused, original, in_format(x, memory_format), precision)
                        self.assertEqual(len(onepass.report(fused).fused), 1)

    def inference(self, dtype: torch.dtype, mode: str, memory_format: str) -> None:
        """Without gradients a thin convolution runs with its block."""
        for name in WORKLOADS:
            with self.subTest(workload=name, mode=mode, memory_format=memory_format):
                original, x = load_workload(name)
                original, x = original.to(dtype), in_format(x.to(dtype), memory_format)
                fused = onepass.fuse(copy.deepcopy(original))
                exact = copy.deepcopy(original).double()
                ours, theirs, wanted = infer(fused, x), infer(original, x), infer(exact, x.double())
                found = verify.compare("output", False, ours, theirs, wanted, verify.RULES[mode])
                self.assertEqual(found.wrong(verify.RULES[mode]), "")

    def test_inference_in_float32(self) -> None:
        for precision in ("tf32", "ieee"):
            with conv_precision(precision):
                warm_workloads(infer, torch.float32)
        for mode, memory_format in itertools.product(("tf32", "fp32"), FORMATS):
            with conv_precision("tf32" if mode == "tf32" else "ieee"):
                self.inference(torch.float32, mode, memory_format)

    def test_inference_in_half_precision(self) -> None:
        warm_workloads(infer, torch.float16, torch.bfloat16)
        for dtype, mode in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
            self.inference(dtype, mode, "contiguous")

    def test_unet_with_convolutions_fused_and_kept(self) -> None:
        unet = load_unet()
        torch.manual_seed(5)
        original = unet().cuda()
        fused, kept, *others = (
            onepass.fuse(copy.deepcopy(original), conv=conv) for conv in ("fuse", "keep", "fuse", "keep")
        )
        with conv_precision("ieee"):
            given = [in_format(torch.randn(2, 1, 64, 64, device="cuda"), name) for name in FORMATS]
            pairs = zip((fused, kept, *others), (given[0], given[0], given[1], given[1]), strict=True)
            warm([lambda model=model, x=x: step(model, x, None) for model, x in pairs])
            for model, x in itertools.product((fused, kept), given):
                self.check_close(model, original, x)

    def check_close(self, model: nn.Module, original: nn.Module, x: Tensor) -> None:
        found, wanted = step(model, x, None), step(original, x, None)
        for name in wanted:
            scale = wanted[name].abs().max().item()
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-4 * scale)

    def test_training_goes_the_same_way(self) -> None:
        unet = load_unet()
        torch.manual_seed(6)
        models = [unet().cuda()]
        models.append(onepass.fuse(copy.deepcopy(models[0])))
        losses: list[list[float]] = [[], []]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=2e-3) for model in models]
        for _ in range(30):
            x = torch.randn(4, 1, 32, 32, device="cuda")
            for model, optimizer, kept in zip(models, optimizers, losses, strict=True):
                loss = (model(x) - x.clamp(0, 1)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                kept.append(loss.item())
        final = [sum(kept[-10:]) / 10 for kept in losses]
        self.assertLess(abs(final[0] - final[1]), 0.02 * final[0])


if __name__ == "__main__":
    unittest.main()
