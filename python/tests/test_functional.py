"""onepass.functional: parameters by name."""

import pytest
import torch
import torch.nn.functional as F

import onepass

pytestmark = pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))


def test_parameters_by_name_in_any_order() -> None:
    x, weight, bias = torch.randn(2, 8, 5, 6), torch.randn(8), torch.randn(8)
    expected = F.hardswish(F.group_norm(F.silu(x), 4, weight, bias))
    text = "swish | group_norm(4) | hardswish"
    actual = onepass.functional.run(text, x, norm_bias=bias, norm_weight=weight)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_gradients_reach_every_parameter() -> None:
    leaves = {"channel_add": torch.randn(8), "residual_add": torch.randn(2, 8, 5)}
    for leaf in leaves.values():
        leaf.requires_grad_()
    onepass.functional.run("channel_add | residual_add", torch.randn(2, 8, 5), **leaves).sum().backward()
    assert torch.equal(leaves["channel_add"].grad, torch.full((8,), 10.0))
    assert torch.equal(leaves["residual_add"].grad, torch.ones(2, 8, 5))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "misses norm_weight, norm_bias"),
        ({"norm_weight": 1}, "misses norm_bias"),
        ({"norm_weight": 1, "norm_bias": 1, "gamma": 1}, "does not take gamma"),
    ],
)
def test_wrong_names_are_refused(given: dict, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        onepass.functional.run("group_norm(4)", torch.randn(1, 8, 3), **given)


def test_repeated_operands_are_numbered() -> None:
    x = torch.randn(1, 2, 3)
    actual = onepass.functional.run(
        "channel_mul | channel_mul", x, channel_mul=x[0, :, 0], channel_mul_2=x[0, :, 1]
    )
    torch.testing.assert_close(actual, x * x[:, :, :1] * x[:, :, 1:2])


def test_compile_meets_blocks_that_were_never_described() -> None:
    """Two in one graph: what tracing the first adds must be seen when tracing the second."""

    def both(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for text in ("mul(0.375) | group_norm(4) | gelu", "mul(0.625) | group_norm(2) | gelu"):
            x = onepass.functional.run(text, x, norm_weight=weight, norm_bias=weight)
        return x

    torch._dynamo.reset()
    x, weight = torch.randn(2, 8, 5, 5), torch.ones(8, requires_grad=True)
    found = torch.compile(both, fullgraph=True)(x, weight)
    found.sum().backward()
    torch.testing.assert_close(found, both(x, weight), rtol=1e-5, atol=1e-5)
    assert weight.grad is not None
