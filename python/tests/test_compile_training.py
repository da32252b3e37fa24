"""Training by torch.compile(backend="onepass"): autocast, checkpoints, accumulation; graph breaks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onepass.compiling import costs, record

ALL = {"onepass.keep": "all"}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    record._compilations.clear()
    torch.manual_seed(3)
    yield
    torch._dynamo.reset()


class Inside(nn.Module):
    """The middle runs under autocast, in a checkpoint where asked; the ends do not."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.enter, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.middle, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.leave = nn.Conv2d(8, 4, 1)

    def _lowered(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.silu(self.norm2(self.middle(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm1(self.enter(x)))
        x = checkpoint(self._lowered, x, use_reentrant=False) if self.checkpointed else self._lowered(x)
        return torch.sigmoid(self.leave(x.float()))


def kept(model: Any) -> list[str]:
    decisions = record.compilations_of(model)[-1].plan.decisions
    return [d.segment.block for d in decisions if d.kept is not None]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_accumulate_through_autocast_inside(checkpointed: bool) -> None:
    model = Inside(checkpointed)
    twin, run = copy.deepcopy(model), torch.compile(model, backend="onepass", options=ALL)
    for _ in range(3):
        x = torch.randn(2, 3, 8, 8)
        result, wanted = run(x), twin(x)
        assert result.dtype == wanted.dtype == torch.float32
        torch.testing.assert_close(result, wanted, rtol=2e-2, atol=2e-2)
        result.square().mean().backward()
        wanted.square().mean().backward()
    for some, other in zip(model.parameters(), twin.parameters(), strict=True):
        scale = other.grad.abs().max().item()
        torch.testing.assert_close(some.grad, other.grad, rtol=5e-2, atol=5e-2 * scale)
    assert sorted(kept(model)) == [
        "conv2d(3,8,k=3,p=1) | group_norm(2) | swish",
        "conv2d(8,4,k=1) | sigmoid",
        "conv2d(8,8,k=3,p=1) | group_norm(2) | swish",
    ]


def test_the_backward_of_a_checkpoint_computes_the_block_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the checkpoint would save nothing: what the block keeps is not held from the forward on."""
    monkeypatch.setattr(costs._Cpu, "convolution", lambda *_: 1.0)  # PyTorch's; so that the block is whole
    monkeypatch.setattr(costs, "_costs_on_cpu", costs._costs_on_cpu.__wrapped__)
    model = Inside(True)
    graphs: list[str] = []

    def count(graph: Any) -> None:
        graphs.append(str(graph))

    options = {**ALL, "post_grad_custom_pre_pass": count}
    torch.compile(model, backend="onepass", options=options)(torch.randn(2, 3, 8, 8)).sum().backward()
    forward, backward = graphs
    assert "block_forward" in forward and "block_backward" in backward
    assert "block_forward" in backward or "onepass.forward" in backward


class Broken(nn.Module):
    """A break between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        torch._dynamo.graph_break()
        return F.relu(self.norm(self.conv(x)))


def test_graphs_break_where_inductors_do() -> None:
    model, x = Broken(), torch.randn(2, 4, 6, 6)
    counts = {}
    for backend in ("onepass", "inductor"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        options = ALL if backend == "onepass" else None
        result = torch.compile(model, backend=backend, options=options)(x)
        torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-5)
        counters = torch._dynamo.utils.counters
        counts[backend] = (sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"])
    assert counts["onepass"] == counts["inductor"] == (1, 2)
