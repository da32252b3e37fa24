"""torch.compile(backend="onepass") with symbolic sizes: blocks stay whole, no guard beyond Inductor's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass.compiling import record


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    record._compilations.clear()
    torch.manual_seed(3)
    yield
    torch._dynamo.reset()


class Thin(nn.Module):
    """Two blocks that a CPU's costs keep whole, by far, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.norm1(self.conv1(x)))
        return nn.functional.silu(self.norm2(self.conv2(x)) + x)


BLOCKS = [
    "conv2d(3,8,k=3,p=1) | group_norm(4) | swish",
    "conv2d(8,8,k=3,p=1) | group_norm(4) | residual_add | swish",
]
BATCHES = [(2, 16, 16), (3, 16, 16), (7, 16, 16)]
SPACES = [(2, 16, 20), (2, 18, 14), (2, 23, 31)]
BOTH = [(2, 16, 20), (5, 18, 14), (3, 23, 31)]


def graphs_of(backend: str, sizes: list[tuple[int, ...]], dims: tuple[int, ...], train: bool) -> int:
    """How many graphs Dynamo compiles for inputs whose dimensions are marked; results are eager's."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Thin().train(train)
    twin, run = copy.deepcopy(model), torch.compile(model, backend=backend)
    for n, h, w in sizes:
        x = torch.randn(n, 3, h, w)
        if train:
            marked = x.clone()
            for dim in dims:
                torch._dynamo.mark_dynamic(marked, dim)  # raises where a guard makes it constant
            result, wanted = run(marked), twin(x)
            torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
            result.square().mean().backward()
            wanted.square().mean().backward()
            for some, other in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(some.grad, other.grad, rtol=1e-3, atol=1e-4)
        else:
            for dim in dims:
                torch._dynamo.mark_dynamic(x, dim)
            with torch.no_grad():
                torch.testing.assert_close(run(x), twin(x), rtol=1e-4, atol=1e-5)
    if backend == "onepass":
        (compilation,) = record.compilations_of(model)
        assert [d.segment.block for d in compilation.plan.decisions] == BLOCKS
        assert all(d.kept and not d.kept.after_convolution for d in compilation.plan.decisions), (
            "not kept whole"
        )
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("dims", "sizes"), [((0,), BATCHES), ((2, 3), SPACES), ((0, 2, 3), BOTH)], ids=["batch", "space", "both"]
)
def test_marked_sizes_keep_whole_blocks_in_one_graph(
    dims: tuple[int, ...], sizes: list[tuple[int, ...]], train: bool
) -> None:
    assert graphs_of("onepass", sizes, dims, train) == 1
    if not train:  # with gradients Inductor makes the spatial sizes of this model constant
        assert graphs_of("inductor", sizes, dims, train) == 1


def test_automatic_dynamic_recompiles_as_often_as_inductor() -> None:
    """The first call is static, the second makes sizes symbolic, a batch of one is a case of its own."""
    sizes = [(2, 16, 16), (3, 16, 16), (4, 16, 16), (1, 16, 16), (4, 20, 24), (6, 22, 18)]
    counts = {}
    for backend in ("onepass", "inductor"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = Thin().eval()
        run = torch.compile(model, backend=backend)
        with torch.no_grad():
            for n, h, w in sizes:
                x = torch.randn(n, 3, h, w)
                torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
        counts[backend] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if backend == "onepass":
            plans = [compilation.plan for compilation in record.compilations_of(model)]
            assert all(decision.kept for plan in plans for decision in plan.decisions)
    assert counts["onepass"] == counts["inductor"]


def guards_of(backend: Any) -> set[str]:
    """The guards on sizes of a graph whose sizes are symbolic."""
    from torch._guards import TracingContext

    found: set[str] = set()

    def see(module: Any, inputs: Any) -> Any:
        compiled = backend(module, inputs)
        environment = TracingContext.get().fake_mode.shape_env
        found.update(str(guard.expr) for guard in environment.guards)
        return compiled

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Thin().eval(), backend=see, dynamic=True)(torch.randn(2, 3, 16, 20))
    return found


def test_no_guard_beyond_inductors() -> None:
    from torch._inductor.compile_fx import compile_fx

    from onepass.compiling import backend

    assert guards_of(backend) <= guards_of(compile_fx)
