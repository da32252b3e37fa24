"""What the package says about a GPU: doctor, explain, report, and where its runtime is missing."""

import os
import re
import subprocess
import sys
import unittest

import torch
from support import ROOT, GpuTest
from torch import nn

import onepass

BLOCK = "conv2d(3,8,k=3) | swish | group_norm(4)"
# What an explanation says runs: a row that takes the whole block, or PyTorch's convolution and a tail.
CHOSEN = re.compile(r"(?m)^(-> PyTorch's own convolution, then tail_|\* (?P<whole>(?!tail_)\w+))")


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


class Package(GpuTest):
    """Commands run in processes of their own."""

    def test_doctor_names_gpu_driver_compiler_and_cache(self) -> None:
        result = python("-m", "onepass", "doctor", ONEPASS_CACHE_DIR="/tmp/onepass_doctor")
        self.assertEqual(result.returncode, 0, result.stderr)
        name = torch.cuda.get_device_name(0)
        for found in ("cuda:0", name, "sm_", "driver ", "NVRTC ", "/tmp/onepass_doctor"):
            self.assertIn(found, result.stdout)

    def test_explain(self) -> None:
        text = onepass.explain(BLOCK, (2, 3, 20, 20), device="cuda")
        self.assertRegex(text, CHOSEN)
        self.assertIn("on cuda:0", text)
        for device in ("cuda:0", torch.device("cuda"), "cuda:sm_80"):
            self.assertIn("* tail_", onepass.explain("group_norm(4)", (2, 8, 9, 9), device=device))
        self.assertIn("float64", onepass.explain(BLOCK, (2, 3, 20, 20), device="cuda", dtype=torch.float64))

    def test_report_names_the_plan(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU()).cuda()
        onepass.fuse(model)(torch.randn(2, 3, 9, 9, device="cuda"))
        (entry,) = onepass.report(model).fused
        text = onepass.explain("conv2d(3,8,k=3) | group_norm(4) | silu", (2, 3, 9, 9), device="cuda")
        chosen = CHOSEN.search(text)
        self.assertIsNotNone(chosen, text)
        self.assertIn(chosen["whole"] or "PyTorch's own convolution, then tail_", entry.plan)

    def test_without_a_compiler_blocks_run_as_stages(self) -> None:
        program = """
import torch, onepass
from onepass import _cuda, _eager
block = onepass.Block("conv2d(3,8,k=3) | swish | group_norm(4)", device="cuda")
x = torch.randn(2, 3, 9, 9, device="cuda")
assert "NVRTC" in _cuda.unavailable_reason(), _cuda.unavailable_reason()
torch.testing.assert_close(block(x), _eager.run(block.text, x, list(block.parameters())))
block(x).sum().backward()
((reason, calls),) = block.fallbacks.items()
assert "NVRTC" in reason and calls == 2, block.fallbacks
print(onepass.explain(block, x.shape, device="cuda"))
"""
        missing = {"ONEPASS_NVRTC": "/no/libnvrtc.so"}
        result = python("-c", program, **missing)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr.count("FallbackWarning"), 1, result.stderr)
        self.assertIn("eager: ", result.stdout)
        self.assertIn("/no/libnvrtc.so", result.stdout)
        self.assertIn("/no/libnvrtc.so", python("-m", "onepass", "doctor", **missing).stdout)

    def test_importing_leaves_the_gpu_alone(self) -> None:
        """A process that imports onepass and builds blocks can fork and use the GPU in the child."""
        program = """
import os, onepass
onepass.Block("group_norm(2)", channels=4)
child = os.fork()
if child == 0:
    import torch
    x = torch.randn(1, 4, 5, device="cuda")
    onepass.functional.run("group_norm(2,affine=false)", x).sum().item()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
"""
        result = python("-c", program)
        self.assertEqual(result.returncode, 0, result.stderr)


if __name__ == "__main__":
    unittest.main()
