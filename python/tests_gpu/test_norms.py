"""Norms at their limits on a GPU: means far from zero, equal values, single elements."""

import itertools
import unittest

import torch
from support import FLOATS, FORMATS, GpuTest, in_format, parameters_for, warm
from torch import Tensor

from onepass import _eager, _ops

# Slabs in a warp, a block, a cluster, and streamed.
SIZES = (
    (4, 8, 9, 7),
    (8, 32, 33, 35),
    (6, 8, 71, 73),
    (4, 4, 151, 153),
    (3, 3, 301, 303),
    (2, 16, 31, 63, 63),
)
GROUPS = {8: 2, 32: 8, 4: 2, 3: 1, 16: 4}


def normalised(text: str, x: Tensor, parameters: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return _ops.apply(text, x, parameters)


class Norms(GpuTest):
    """Against float64 and PyTorch's own norm; beta, where it is the result, exactly."""

    def test_means_far_from_zero_are_as_exact_as_pytorch(self) -> None:
        given = []
        for sizes, offset, memory_format in itertools.product(SIZES, (1e2, 1e4), FORMATS):
            x = in_format(torch.randn(sizes, device="cuda") + offset, memory_format)
            text = f"group_norm({GROUPS[sizes[1]]})"
            given.append((text, x, parameters_for(text, x), offset, memory_format))
        warm([lambda t=text, x=x, p=p: normalised(t, x, p) for text, x, p, _, _ in given])
        for text, x, parameters, offset, memory_format in given:
            with self.subTest(text=text, sizes=tuple(x.shape), offset=offset, memory_format=memory_format):
                exact = _eager.run(text, x.double(), [p.double() for p in parameters])
                mine, theirs = (
                    (run(text, x, parameters).double() - exact).abs().max().item()
                    for run in (normalised, _eager.run)
                )
                self.assertLessEqual(mine, 2 * theirs)

    def test_equal_values_give_beta_exactly(self) -> None:
        given = []
        for sizes, dtype, memory_format in itertools.product(SIZES, FLOATS, FORMATS):
            value = torch.rand(sizes[0], 1, *(1 for _ in sizes[2:]), device="cuda") + 0.7
            x = in_format(value.to(dtype).expand(sizes).contiguous(), memory_format)
            text = f"swish | group_norm({GROUPS[sizes[1]]})"
            given.append((text, x, parameters_for(text, x)))
        warm([lambda t=text, x=x, p=p: normalised(t, x, p) for text, x, p in given])
        for text, x, parameters in given:
            with self.subTest(text=text, sizes=tuple(x.shape), dtype=x.dtype):
                self.assert_beta(normalised(text, x, parameters), parameters[-1])

    def test_single_elements_give_beta_exactly(self) -> None:
        for sizes, dtype in itertools.product(((5, 24, 1, 1), (3, 7, 1), (64, 6, 1, 1, 1)), FLOATS):
            with self.subTest(sizes=sizes, dtype=dtype):
                x = (10 * torch.randn(sizes, device="cuda")).to(dtype)
                text = f"group_norm({sizes[1]})"
                parameters = parameters_for(text, x)
                self.assert_beta(normalised(text, x, parameters), parameters[-1])

    def assert_beta(self, found: Tensor, beta: Tensor) -> None:
        wanted = beta.to(found.dtype).reshape(1, -1, *(1 for _ in found.shape[2:])).expand_as(found)
        off = (found.double() - wanted.double()).abs().max().item()
        self.assertTrue(torch.equal(found, wanted), f"off by {off:.2e}")


if __name__ == "__main__":
    unittest.main()
