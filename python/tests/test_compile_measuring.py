"""Parts as they are timed for a plan, run on a CPU: the clock itself is a GPU's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass import _eager
from onepass.compiling import measuring, operators  # noqa: F401 (defines the operator)
from onepass.compiling.parts import Given, Part
from onepass.compiling.rewrite import Kept, Rewriting


def part(by: str, block: str, sizes: list[tuple[int, ...]], wanted: tuple[bool, ...] = ()) -> Part:
    given = [Given(each, torch.float32) for each in sizes]
    tensors = (given[0], tuple(given[1:]), torch.float32)
    return Part(block, by, ("", ""), *tensors, wanted, "nhwc", "cpu")


BLOCKS = {
    "pytorch": ("conv2d(4,8,k=3,bias=false)", [(2, 4, 9, 9), (8, 4, 3, 3)]),
    "inductor": ("group_norm(2) | residual_add | swish", [(2, 8, 9, 9), (8,), (8,), (2, 8, 9, 9)]),
    "onepass": ("channel_add | group_norm(2) | mean", [(2, 8, 9, 9), (8,), (8,), (8,)]),
}


def compare(by: str, training: bool) -> None:
    """A call of the part against its stages in eager PyTorch, with the very tensors of the call."""
    block, sizes = BLOCKS[by]
    seen: list[Tensor] = []

    def make(*args: Any) -> Tensor:
        tensor = _tensor(*args)
        assert tensor.dim() < 4 or tensor.is_contiguous(memory_format=torch.channels_last)
        seen.append(tensor)
        return tensor

    _tensor = measuring._tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_tensor", make)
        call = measuring._call(part(by, block, sizes, (True,) * len(sizes) if training else ()))
    found = call()
    wanted: Any = _eager.run(block, seen[0], seen[1:])
    if training:
        wanted = torch.autograd.grad(wanted, seen, torch.ones_like(wanted))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("by", BLOCKS)
def test_a_part_computes_its_block(by: str, training: bool) -> None:
    compare(by, training)


def test_parts_run_inside_a_compilation() -> None:
    """As a plan has them timed: Inductor compiles loops while it is about to compile the model."""

    def backend(module: Any, inputs: Any) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes(), measuring._as_outside():
            for by in BLOCKS:
                for training in (False, True):
                    compare(by, training)
        return compile_fx(module, inputs)

    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
    run, x = torch.compile(model, backend=backend), torch.randn(2, 3, 9, 9)
    result = run(x)
    result.sum().backward()
    torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-5)


def test_a_question_names_all_that_a_time_depends_on() -> None:
    convolution, loops = BLOCKS["pytorch"], BLOCKS["inductor"]
    one, step = part("pytorch", *convolution), part("pytorch", *convolution, (True, True))
    texts = set()
    for benchmark in (False, True):
        with torch.backends.cudnn.flags(benchmark=benchmark):
            texts |= {measuring._question(each) for each in (one, step, part("inductor", *loops))}
    assert len(texts) == 6


def test_a_bias_moves_behind_its_convolution() -> None:
    """As on a GPU, run on a CPU: the same values and gradients."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
    twin, x = copy.deepcopy(model), torch.randn(2, 3, 9, 9)

    def backend(module: Any, inputs: Any) -> Callable[..., Any]:
        rewriting = Rewriting(module)
        rewriting.apply([Kept("channel_add | group_norm(2) | swish", True, True)])
        (conv,) = [node for node in module.graph.nodes if "conv2d" in str(node.target)]
        assert conv.args[2] is None
        return module.forward

    torch._dynamo.reset()
    results = [torch.compile(model, backend=backend)(x), twin(x)]
    for result in results:
        result.square().sum().backward()
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    for some, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(some.grad, other.grad, rtol=1e-4, atol=1e-4)
