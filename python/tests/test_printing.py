"""What a user reads: print(model), the report of a model that was never fused, and ONEPASS_VERBOSE."""

from __future__ import annotations

import copy
import os
import pathlib
import pickle
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import onepass

ROOT = pathlib.Path(__file__).resolve().parents[2]

needs_library = pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))


class Stem(nn.Module):
    """Has an extra_repr of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.GroupNorm(4, 8)
        self.scale = 2

    def extra_repr(self) -> str:
        return f"scale={self.scale}"

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


def model() -> nn.Sequential:
    return nn.Sequential(Stem(), nn.Conv2d(8, 8, 1), nn.InstanceNorm2d(8), nn.SiLU())


FUSED = [
    "(fused: 1, 2, 3): conv2d(8,8,k=1) | instance_norm | swish",
    "(fused: conv, norm): conv2d(3,8,k=3) | group_norm(4) | relu",
]


# --- print(model) ----------------------------------------------------------------


@needs_library
def test_printing_a_model_shows_its_fused_blocks_and_what_it_said_before() -> None:
    plain, fused = model(), onepass.fuse(model())
    lines = [line.strip() for line in str(fused).splitlines()]
    assert [line for line in lines if line.startswith("(fused")] == FUSED
    assert [line for line in lines if not line.startswith("(fused")] == [
        line.strip() for line in str(plain).splitlines()
    ]
    assert "scale=2" in lines
    assert str(onepass.unfuse(fused)) == str(plain)


@needs_library
@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_print_the_same(twin: object) -> None:
    fused = onepass.fuse(model())
    assert str(twin(fused)) == str(fused)  # type: ignore[operator]


@needs_library
def test_a_models_own_change_of_what_it_prints_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = onepass.fuse(model())
    monkeypatch.setattr(Stem, "extra_repr", lambda self: "changed later")
    assert "changed later" in str(fused) and FUSED[1] in str(fused)
    fused[0].extra_repr = lambda: "of this one"
    assert "of this one" in str(fused) and FUSED[1] not in str(fused)
    fused(torch.rand(1, 3, 8, 8))


# --- report ----------------------------------------------------------------


def test_report_says_that_fuse_was_not_called() -> None:
    plain = model()
    said = "onepass.fuse was not called for this model"
    assert str(onepass.report(plain)).startswith(said)
    assert onepass.report(plain).as_dict()["was_fused"] is False
    nothing = onepass.fuse(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))))
    for part in (nothing, nothing[1]):
        assert said not in str(onepass.report(part))
    assert str(onepass.report(onepass.unfuse(nothing))).startswith(said)


@needs_library
def test_report_of_a_fused_model_its_parts_and_copies_does_not_say_so() -> None:
    fused = onepass.fuse(model())
    for part in (fused, fused[0], fused[1], copy.deepcopy(fused)):
        assert onepass.report(part).was_fused


# --- ONEPASS_VERBOSE ----------------------------------------------------------------

SCRIPT = """
import torch, onepass
from torch import nn
model = onepass.fuse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU()))
torch.set_num_threads(1)
for _ in range(2):
    y = model(torch.rand(2, 3, 16, 16))
y.sum().backward()
"""


def lines_at(level: str | None) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "ONEPASS_VERBOSE"}
    environment |= {"PYTHONPATH": str(ROOT / "python")}
    if level is not None:
        environment["ONEPASS_VERBOSE"] = level
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == ""
    return [line for line in result.stderr.splitlines() if "onepass" in line]


NUMBER = r"[0-9.e-]+ ms"


@needs_library
@pytest.mark.parametrize(("level", "measured"), [("1", ""), ("2", f"; measured {NUMBER}")])
def test_verbose_prints_a_line_for_each_call(level: str, measured: str) -> None:
    lines = lines_at(level)
    rows = (
        r"conv2d\(3,8,k=3\) @ 2x3x16x16 f32; cpu, 1 thread; conv_\w+",
        r"group_norm\(4\) \| relu @ .*; tail_slabs",
    )
    calls = [re.compile(f"onepass verbose: {row}; predicted {NUMBER}{measured}$") for row in rows]
    assert [sum(bool(call.match(line)) for line in lines) for call in calls] == [2, 2], lines
    backward = [line for line in lines if "backward" in line]
    assert backward and len(lines) == 4 + len(backward)


@needs_library
@pytest.mark.parametrize("level", [None, "0"])
def test_nothing_is_printed_unless_asked(level: str | None) -> None:
    assert lines_at(level) == []


@needs_library
def test_a_level_that_there_is_not_is_said_once() -> None:
    assert lines_at("yes") == [
        'onepass: warning: ONEPASS_VERBOSE is "yes", must be 0, 1 or 2; no call is printed'
    ]
