"""A graph whose chains are all declined is Inductor's own: the very same code, forward and backward."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from onepass.compiling import record


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    record._compilations.clear()
    torch.manual_seed(3)
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with uncached, torch._inductor.config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


class Mixed(nn.Module):
    """What the matcher rewrites where it keeps: in-place calls, a batch norm, views, a hand-written swish."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(self.conv1(x))
        h = h * torch.sigmoid(h)
        h = F.relu(self.norm2(self.conv2(h)), inplace=True) + 1
        h.mul_(0.5)
        return h.flatten(2).mean(-1)


def code_of(model: nn.Module, x: Tensor, backend: str, train: bool, **options: Any) -> list[str]:
    """The code of all graphs, without what names files and kernels."""
    torch._dynamo.reset()

    def call(x: Tensor) -> None:
        run = torch.compile(model, backend=backend, options=options or None)
        if train:
            run(x).square().mean().backward()
        else:
            with torch.no_grad():
                run(x)

    _, codes = run_and_get_code(call, x)
    return [re.sub(r"^# AOT ID.*$|/\S+", "", code, flags=re.MULTILINE) for code in codes]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_declined_chains_give_inductors_very_code(train: bool, dynamic: bool) -> None:
    model, x = Mixed().train(train), torch.randn(2, 4, 10, 10)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    declined = code_of(model, x, "onepass", train, **{"onepass.keep": "none"})
    decisions = record.compilations_of(model)[-1].plan.decisions
    assert len(decisions) >= 2 and not any(decision.kept for decision in decisions)
    wanted = code_of(model, x, "inductor", train)
    assert len(wanted) == (2 if train else 1)
    assert declined == wanted
    kept = code_of(model, x, "onepass", train, **{"onepass.keep": "all"})
    assert kept != wanted and any("onepass" in code for code in kept)
