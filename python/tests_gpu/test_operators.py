"""Blocks on a GPU against PyTorch's own stages and against float64: outputs and every gradient."""

import itertools
import unittest

import torch
from support import (
    BLOCKS,
    FLOATS,
    FORMATS,
    GpuTest,
    check_block,
    gpu_example,
    in_format,
    is_in_format,
    launches_of,
    parameters_for,
    warm,
    with_gradients,
)

from onepass import _eager, _ops

# Sizes that reach every strategy, odd rows, single elements and many slabs.
TAILS = (
    ("swish | group_norm(4) | hardswish", (4, 16, 31, 63, 63)),
    ("group_norm(8) | gelu", (2, 64, 34, 34, 33)),
    ("hardswish | group_norm(4) | mean", (3, 16, 13, 29, 29)),
    ("group_norm(32) | silu", (2, 64, 56, 57)),
    ("group_norm(1)", (3, 6, 17, 5)),
    ("instance_norm(affine=true) | leaky_relu(0.01)", (2, 32, 24, 25, 26)),
    ("group_norm(4) | residual_add | relu", (5, 12, 7, 9)),
    ("channel_add(per=sample) | group_norm(8) | mish", (3, 24, 33, 35)),
    ("prelu(per=channel) | group_norm(2) | channel_mul | residual_add | tanh | mean", (2, 10, 11, 13)),
    ("gelu | channel_mul(per=sample) | residual_add", (2, 5, 9, 1001)),
    # What is left of a single element is the rounding of its mean, divided by the square root of eps.
    ("group_norm(3,eps=0.01) | sigmoid", (4, 3, 1, 1)),
    ("group_norm(2)", (2, 4, 1)),
    ("softplus | mean", (3, 7, 5, 4, 3)),
    ("relu", (2, 3)),
)


def tail_tensors(text: str, sizes: tuple[int, ...], dtype: torch.dtype, memory_format: str) -> tuple:
    torch.manual_seed(1)
    x = in_format(torch.randn(sizes, device="cuda").to(dtype), memory_format)
    return x, parameters_for(text, x)


class Operators(GpuTest):
    """Small blocks of every kind, then tails of every size."""

    def test_blocks_are_as_exact_as_pytorch(self) -> None:
        # Half precisions in one of the orders each.
        given = [
            (text, dtype, memory_format)
            for i, (text, dtype, memory_format) in enumerate(itertools.product(BLOCKS, FLOATS, FORMATS))
            if dtype == torch.float32 or (i // 2 + i) % 2 == 0
        ]
        calls = []
        for text, dtype, memory_format in given:
            x, parameters = gpu_example(text, dtype=dtype, memory_format=memory_format)
            calls.append(lambda t=text, x=x, p=parameters: with_gradients(_ops.apply, t, x, p))
        warm(calls)
        for text, dtype, memory_format in given:
            with self.subTest(text=text, dtype=dtype, memory_format=memory_format):
                check_block(text, *gpu_example(text, dtype=dtype, memory_format=memory_format))

    def tails(self, dtype: torch.dtype) -> None:
        # Half precisions in one of the orders each.
        given = [
            (tail, memory_format)
            for (i, tail), (j, memory_format) in itertools.product(enumerate(TAILS), enumerate(FORMATS))
            if dtype == torch.float32 or (i + j) % 2 == (dtype == torch.float16)
        ]
        calls = []
        for (text, sizes), memory_format in given:
            x, parameters = tail_tensors(text, sizes, dtype, memory_format)
            calls.append(lambda t=text, x=x, p=parameters: with_gradients(_ops.apply, t, x, p))
        warm(calls)
        for (text, sizes), memory_format in given:
            with self.subTest(text=text, sizes=sizes, dtype=dtype, memory_format=memory_format):
                check_block(text, *tail_tensors(text, sizes, dtype, memory_format))

    def test_tails_are_as_exact_as_pytorch_in_float32(self) -> None:
        self.tails(torch.float32)

    def test_tails_are_as_exact_as_pytorch_in_float16(self) -> None:
        self.tails(torch.float16)

    def test_tails_are_as_exact_as_pytorch_in_bfloat16(self) -> None:
        self.tails(torch.bfloat16)

    def test_output_and_gradients_keep_the_order_of_the_input(self) -> None:
        text = "swish | group_norm(4) | residual_add"
        for sizes in ((2, 8, 6, 7), (2, 8, 3, 4, 5)):
            for memory_format in FORMATS:
                x, parameters = tail_tensors(text, sizes, torch.float32, memory_format)
                output, gradients = with_gradients(_ops.apply, text, x, parameters)
                for tensor in (output, gradients[0], gradients[3]):
                    self.assertTrue(is_in_format(tensor, memory_format))

    def test_forward_is_one_kernel_and_so_is_backward(self) -> None:
        """s27's tail: nothing but its own kernel runs, and no intermediate is stored."""
        text = "hardswish | group_norm(4) | mean"
        x, parameters = tail_tensors(text, (8, 16, 13, 29, 29), torch.float32, "contiguous")
        leaves = [tensor.requires_grad_() for tensor in (x, *parameters)]
        direction = torch.randn(8, 16, device="cuda")

        def step() -> None:
            torch.autograd.grad(_ops.apply(text, leaves[0], leaves[1:]), leaves, direction)

        step()
        self.assertEqual(len(launches_of(step)), 2, launches_of(step))
        with torch.no_grad():
            launched = launches_of(lambda: _ops.apply(text, x, parameters))
        self.assertEqual(len(launched), 1, launched)
        before = torch.cuda.memory_allocated()
        output = _ops.apply(text, leaves[0], leaves[1:])
        kept = torch.cuda.memory_allocated() - before
        self.assertLess(kept, x.numel() * x.element_size() // 10)
        del output

    def test_gradients_of_any_subset(self) -> None:
        text = "channel_mul | group_norm(2) | prelu | residual_add"
        x, parameters = tail_tensors(text, (2, 8, 5, 6), torch.float32, "contiguous")
        _, everything = with_gradients(_ops.apply, text, x, parameters)
        tensors = (x, *parameters)
        for chosen in [*((i,) for i in range(len(tensors))), (0, 2), (1, 3), (2, 3, 4, 5)]:
            leaves = [t.detach().clone().requires_grad_(i in chosen) for i, t in enumerate(tensors)]
            _ops.apply(text, leaves[0], leaves[1:]).sum().backward()
            for i, leaf in enumerate(leaves):
                self.assertEqual(leaf.grad is not None, i in chosen)
                if i in chosen:
                    torch.testing.assert_close(leaf.grad, everything[i], rtol=1e-5, atol=1e-5)

    def test_any_strides(self) -> None:
        text = "swish | group_norm(2) | residual_add"
        wide = torch.randn(2, 16, 12, 14, device="cuda")
        views = {
            "every other": wide[:, ::2, ::2, ::2],
            "transposed": wide[:, :8, :, :12].transpose(2, 3),
            "expanded": wide[:, :8, :1, :].expand(2, 8, 6, 14),
            "shifted": wide.flatten()[1:337].reshape(1, 8, 6, 7),
            "permuted": torch.randn(6, 2, 7, 8, device="cuda").permute(1, 3, 0, 2),
        }
        for name, x in views.items():
            parameters = parameters_for(text, x.contiguous())
            check_block(text, x, parameters, what=name)
            parameters[2] = parameters[2].transpose(2, 3).contiguous().transpose(2, 3)
            check_block(text, x.contiguous(), parameters, what=f"residual, {name}")

    def test_misaligned_rows(self) -> None:
        text = "group_norm(2) | relu"
        for dtype in FLOATS:
            memory = torch.randn(2 * 8 * 63 * 5 + 8, device="cuda").to(dtype)
            for offset in range(1, 5):
                x = memory[offset : offset + 2 * 8 * 63 * 5].view(2, 8, 5, 63)
                check_block(text, x, parameters_for(text, x.clone()), what=f"{dtype} at {offset}")

    def test_hard_statistics(self) -> None:
        text = "group_norm(2)"
        base = torch.randn(2, 8, 40, 41, device="cuda")
        for offset in (1e2, 1e4):
            x = base + offset
            check_block(text, x, parameters_for(text, x), gradients=False, what=f"mean {offset}")
        constant = torch.full((2, 8, 9, 9), 3.25, device="cuda")
        weight, bias = parameters_for(text, constant)
        expected = bias.reshape(1, 8, 1, 1).expand_as(constant)
        # A rounding of the mean and one of mean times scale, divided by the square root of eps.
        allowed = 2 * torch.finfo(torch.float32).eps * 3.25 / 1e-5**0.5 * weight.abs().max().item()
        found = _ops.apply(text, constant, [weight, bias])
        torch.testing.assert_close(found, expected, rtol=0, atol=allowed)

    def test_nan_stays_in_its_slab(self) -> None:
        text = "group_norm(4) | hardswish"
        x = torch.randn(2, 8, 15, 17, device="cuda")
        x[1, 3, 2, 2] = float("nan")
        parameters = parameters_for(text, x)
        found, expected = (run(text, x, parameters) for run in (_ops.apply, _eager.run))
        self.assertTrue(torch.equal(found.isnan(), expected.isnan()))

    def test_empty_batch(self) -> None:
        for text in BLOCKS:
            x, parameters = gpu_example(text, batch=0)
            output, gradients = with_gradients(_ops.apply, text, x, parameters)
            self.assertEqual(output.shape, _eager.run(text, x, parameters).shape)
            for gradient in gradients[1:]:
                self.assertFalse(gradient.count_nonzero().item())

    def test_float64_runs_as_stages(self) -> None:
        text = "conv2d(2,4,k=2) | swish | group_norm(2) | prelu(per=channel)"
        x, parameters = gpu_example(text, dtype=torch.float64)
        leaves = [tensor.requires_grad_() for tensor in (x, *parameters)]
        # PyTorch's gradient of a convolution's weight need not have the same bits twice.
        run = torch.autograd.gradcheck
        self.assertTrue(run(lambda x, *p: _ops.apply(text, x, p), leaves, nondet_tol=1e-9))

    def test_same_bits_every_time(self) -> None:
        for memory_format in FORMATS:
            text, sizes = TAILS[0]
            x, parameters = tail_tensors(text, sizes, torch.float32, memory_format)
            output, gradients = with_gradients(_ops.apply, text, x, parameters)
            for _ in range(20):
                again, gradients_again = with_gradients(_ops.apply, text, x, parameters)
                for some, other in zip((output, *gradients), (again, *gradients_again), strict=True):
                    self.assertTrue(torch.equal(some, other))

    def test_a_sample_does_not_depend_on_its_neighbours(self) -> None:
        for memory_format in FORMATS:
            text, sizes = "swish | group_norm(4) | hardswish", (7, 16, 31, 33)
            x, parameters = tail_tensors(text, sizes, torch.float32, memory_format)
            whole = _ops.apply(text, x, parameters)
            for i in (0, 3, 6):
                self.assertTrue(torch.equal(_ops.apply(text, x[i : i + 1], parameters), whole[i : i + 1]))

    def test_mixed_devices_are_one_sentence(self) -> None:
        x, parameters = gpu_example("group_norm(4)")
        sentence = "all tensors must be on the input's device, cuda:0: one is on cpu"
        with self.assertRaisesRegex(RuntimeError, sentence):
            _ops.apply("group_norm(4)", x, [parameter.cpu() for parameter in parameters])
        with self.assertRaisesRegex(RuntimeError, "the input's device, cpu: one is on cuda:0"):
            _ops.apply("group_norm(4)", x.cpu(), parameters)

    def test_the_operator_leaves_convolutions_to_pytorch(self) -> None:
        x, parameters = gpu_example("conv2d(3,4,k=3)")
        with self.assertRaisesRegex(ValueError, "PyTorch runs the convolution itself"):
            torch.ops.onepass.forward(x, parameters, "conv2d(3,4,k=3)")

    def test_second_gradients_are_pytorchs(self) -> None:
        text = "swish | group_norm(4)"
        x, parameters = gpu_example(text)
        x.requires_grad_()
        found = []
        for run in (_ops.apply, _eager.run):
            (gradient,) = torch.autograd.grad(run(text, x, parameters).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(gradient.square().sum(), x)[0])
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)

    def test_many_gradients_at_once_are_pytorchs(self) -> None:
        text = "swish | group_norm(4)"
        x, parameters = gpu_example(text)
        x.requires_grad_()
        found = []
        for run in (_ops.apply, _eager.run):
            output = run(text, x, parameters)
            many = torch.stack([torch.ones_like(output), torch.cos(torch.ones_like(output).cumsum(0))])
            found.append(torch.autograd.grad(output, x, many, is_grads_batched=True)[0])
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)

    def test_operators_pass_opcheck(self) -> None:
        for text in (
            "softplus | group_norm(2) | channel_mul | residual_add | sigmoid",
            "group_norm(4) | mean",
        ):
            for memory_format in FORMATS:
                x, parameters = tail_tensors(text, (2, 8, 6, 7), torch.float32, memory_format)
                operators = torch.ops.onepass
                torch.library.opcheck(operators.forward.default, (x, parameters, text))
                torch.library.opcheck(
                    operators.forward_with_statistics.default, (x, parameters, text, torch.bfloat16)
                )
                output, statistics = operators.forward_with_statistics(x, parameters, text)
                wanted = [True] * (1 + len(parameters))
                arguments = (torch.randn_like(output), x, parameters, statistics, text, wanted)
                torch.library.opcheck(operators.backward.default, arguments)
                # A residual in another order than the input: its gradient lies in the input's.
                moved = [in_format(p, "channels_last").clone() if p.dim() == 4 else p for p in parameters]
                torch.library.opcheck(operators.backward.default, (*arguments[:2], moved, *arguments[3:]))


if __name__ == "__main__":
    unittest.main()
