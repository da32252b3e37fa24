"""The optimize command on a GPU, with CUDA graphs, and ONEPASS_VERBOSE on streams and in captures."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import torch
from support import ROOT, GpuTest

from onepass.optimizing import model_file, study, variants

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels)
        self.leave = nn.Conv2d(channels, 3, 1)

    def forward(self, x):
        return self.leave(nn.functional.silu(self.norm(self.enter(x))))

def get_inputs():
    return [torch.rand(4, 3, 64, 64)]

def get_init_inputs():
    return [16]
"""

VERBOSE = """
import torch, onepass
from torch import nn
model = onepass.fuse(nn.Sequential(nn.GroupNorm(4, 8), nn.ReLU()).cuda()).eval()
x = torch.rand(2, 8, 32, 32, device="cuda")
with torch.no_grad():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        model(x)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, torch.relu(model[0](x)))
"""


class Optimize(GpuTest):
    """Without max-autotune, which compiles for minutes."""

    def test_graphs_are_right_and_timed_in_both_layouts(self) -> None:
        ways = variants._ways

        def kept(conv: str, is_gpu: bool) -> dict:
            return {name: way for name, way in ways(conv, is_gpu).items() if name != variants.MAX_AUTOTUNE}

        with tempfile.TemporaryDirectory() as folder, mock.patch.object(variants, "_ways", kept):
            path = pathlib.Path(folder, "model.py")
            path.write_text(MODEL)
            options = study.Options(torch.device("cuda"), None, "fuse", True, 0.05)
            found = study.study(model_file.load(str(path)), options, lambda what, done: None)
        self.assertEqual(found.wrong, [])
        for step in found.steps:
            for base in ("compile graphs", "onepass backend", "onepass backend graphs", "onepass fuse"):
                for name in (base, f"{base} nhwc", f"{base} nhwc bench"):
                    row = step.row(name)
                    self.assertIsNotNone(row.timing, f"{step.name}, {name}: {row.reason or row.wrong}")
        for block in found.fused:
            self.assertGreater(block.measured, 0)
            self.assertLess(block.predicted, 1e-3)


class Verbose(GpuTest):
    """In processes of their own: the variable is read once."""

    def test_calls_are_measured_but_for_those_that_are_captured(self) -> None:
        for level in ("1", "2"):
            environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "ONEPASS_VERBOSE": level}
            result = subprocess.run(
                [sys.executable, "-c", VERBOSE], env=environment, capture_output=True, text=True, timeout=300
            )
            self.assertEqual(result.returncode, 0, result.stderr)
            lines = [line for line in result.stderr.splitlines() if line.startswith("onepass verbose: ")]
            self.assertGreaterEqual(len(lines), 2, result.stderr)
            for line in lines:
                self.assertRegex(line, r"group_norm\(4\).* @ 2x8x32x32 f32; cuda:0; tail_\w+; predicted ")
            captured = [line for line in lines if line.endswith("; captured, not measured")]
            measured = [line for line in lines if re.search("; measured [0-9.e-]+ ms$", line)]
            self.assertEqual(len(captured), int(level == "2"))
            self.assertEqual(len(measured), (len(lines) - 1) * (level == "2"))


if __name__ == "__main__":
    unittest.main()
