"""The operators and their gradients against PyTorch: values, types, layouts, transformations, errors."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading

import pytest
import torch
import torch.nn.functional as F
from block_cases import BLOCKS, SMALL, assert_as_exact, exact, example
from torch import Tensor, nn

import onepass
from onepass import _differentiable, _eager
from onepass._description import describe
from onepass._ops import apply
from onepass.optimizing import measure

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TAIL = "swish | group_norm(4) | hardswish"
REFUSED = (ValueError, RuntimeError)  # by an operator itself: the latter in PyTorch 2.15

pytestmark = pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason()))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


def with_gradients(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def gradients_by(run, x: Tensor, parameters: list[Tensor], output_gradient: Tensor | None) -> list[Tensor]:
    leaves = with_gradients([x, *parameters])
    output = run(leaves[0], leaves[1:])
    seed = torch.ones_like(output) if output_gradient is None else output_gradient.to(output.dtype)
    return list(torch.autograd.grad(output, leaves, seed))


# --- Values ---


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("text", BLOCKS)
def test_forward(text: str, dtype: torch.dtype) -> None:
    x, parameters = example(text, dtype=dtype)
    by_torch = _eager.run(text, x, parameters)
    assert_as_exact(apply(text, x, parameters), by_torch, exact(text, x, parameters))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("text", BLOCKS)
def test_gradients(text: str, dtype: torch.dtype) -> None:
    x, parameters = example(text, dtype=dtype)
    seed = torch.randn_like(exact(text, x, parameters))
    actual = gradients_by(lambda a, p: apply(text, a, p), x, parameters, seed)
    by_torch = gradients_by(lambda a, p: _eager.run(text, a, p), x, parameters, seed)
    doubles = [parameter.double() for parameter in parameters]
    expected = gradients_by(lambda a, p: _eager.run(text, a, p), x.double(), doubles, seed.to(dtype).double())
    for mine, theirs, judge in zip(actual, by_torch, expected, strict=True):
        assert_as_exact(mine, theirs, judge)


@pytest.mark.parametrize("text", BLOCKS)
def test_gradcheck(text: str) -> None:
    x, parameters = example(text, dtype=torch.float64, spatial=SMALL)
    leaves = with_gradients([x, *parameters])
    assert torch.autograd.gradcheck(lambda a, *p: apply(text, a, p), leaves)


@pytest.mark.parametrize("text", [BLOCKS[2], BLOCKS[3], TAIL, "conv2d(3,4,k=3)"])
def test_gradients_of_any_subset(text: str) -> None:
    x, parameters = example(text)
    everything = gradients_by(lambda a, p: apply(text, a, p), x, parameters, None)
    for wanted in itertools.product((False, True), repeat=1 + len(parameters)):
        leaves = [t.clone().requires_grad_(want) for t, want in zip((x, *parameters), wanted, strict=True)]
        output = apply(text, leaves[0], leaves[1:])
        assert output.requires_grad == any(wanted)
        if output.requires_grad:
            output.sum().backward()
        for leaf, gradient, want in zip(leaves, everything, wanted, strict=True):
            assert (leaf.grad is not None) == want
            if want:
                torch.testing.assert_close(leaf.grad, gradient)


@pytest.mark.parametrize("text", BLOCKS)
def test_empty_batch(text: str) -> None:
    x, parameters = example(text, batch=0)
    leaves = with_gradients([x, *parameters])
    with torch.no_grad():
        assert apply(text, x, parameters).shape == _eager.run(text, x, parameters).shape
    output = apply(text, leaves[0], leaves[1:])
    output.sum().backward()
    for leaf in leaves:
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_same_bits_with_and_without_gradients_and_for_any_thread_count() -> None:
    text = "conv2d(3,8,k=3,p=1) | swish | group_norm(4) | hardswish"
    x, parameters = torch.randn(3, 3, 64, 64), example(text)[1]
    threads = torch.get_num_threads()
    results = [apply(text, x, with_gradients(parameters)).detach()]
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(apply(text, x, parameters))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert torch.equal(result, results[1])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


# --- Layouts ---


def strided_views(x: Tensor) -> dict[str, Tensor]:
    """Tensors of x's values or at least sizes that lie in memory in other ways."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}
    views = {
        "transposed": x.transpose(1, -1).contiguous().transpose(1, -1),
        "sliced": torch.cat([x, x], dim=-1)[..., ::2],
        "offset": torch.cat([x, x])[x.shape[0] :],
        "expanded": x[:1].expand_as(x),
        "channels expanded": x[:, :1].expand_as(x),
    }
    if x.dim() in last:
        views["channels last"] = x.contiguous(memory_format=last[x.dim()])
    return views


@pytest.mark.parametrize("text", BLOCKS)
def test_any_strides(text: str) -> None:
    x, parameters = example(text)
    for name, view in strided_views(x).items():
        parameters = [strided_views(p)["transposed"] if p.dim() > 2 else p for p in parameters]
        output = apply(text, view, parameters)
        reference = apply(text, view.contiguous(), [p.contiguous() for p in parameters])
        torch.testing.assert_close(output, reference, rtol=1e-5, atol=1e-5, msg=name)
        leaf = view.detach().requires_grad_()
        apply(text, leaf, parameters).sum().backward()
        expected = gradients_by(lambda a, p: apply(text, a, p), view.contiguous(), parameters, None)[0]
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("stage", ["conv", "conv_transpose", "group_norm(4)", "relu"])
def test_channels_last_stays_as_in_pytorch(stage: str, dimensions: int) -> None:
    memory_format = torch.channels_last if dimensions == 2 else torch.channels_last_3d
    text = f"{stage}{dimensions}d(8,8,k=3)" if stage.startswith("conv") else stage
    x, parameters = torch.randn(2, 8, *(5,) * dimensions), []
    if text != "relu":
        parameters = example(text)[1]
    for last_input, last_weight in itertools.product((False, True), repeat=2):
        a = x.contiguous(memory_format=memory_format) if last_input else x
        p = [
            t.contiguous(memory_format=memory_format) if last_weight and t.dim() > 3 else t
            for t in parameters
        ]
        assert apply(text, a, p).stride() == _eager.run(text, a, p).stride()


def test_batch_of_one_with_a_stride_of_its_own() -> None:
    # What a slice of a channels-last batch leaves: the first stride is that of no memory format.
    text = "group_norm(8,eps=1e-6) | swish"
    x = torch.randn(4, 4, 64).as_strided((1, 64, 4, 4), (64, 1, 256, 64))
    parameters = [torch.randn(64), torch.randn(64)]
    seed = torch.randn_like(exact(text, x, parameters))
    actual = gradients_by(lambda a, p: apply(text, a.as_strided(x.shape, x.stride()), p), x, parameters, seed)
    by_torch = gradients_by(lambda a, p: _eager.run(text, a, p), x, parameters, seed)
    doubles = [parameter.double() for parameter in parameters]
    expected = gradients_by(lambda a, p: _eager.run(text, a, p), x.double(), doubles, seed.double())
    assert_as_exact(apply(text, x, parameters), _eager.run(text, x, parameters), exact(text, x, parameters))
    for mine, theirs, judge in zip(actual, by_torch, expected, strict=True):
        assert_as_exact(mine, theirs, judge)


def test_gradients_keep_channels_last() -> None:
    x = torch.randn(2, 8, 5, 6).contiguous(memory_format=torch.channels_last)
    leaf = x.requires_grad_()
    apply("swish | group_norm(4,affine=false)", leaf, []).sum().backward()
    assert leaf.grad.is_contiguous(memory_format=torch.channels_last)


# --- Types ---


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("text", BLOCKS)
def test_autocast_types(text: str, dtype: torch.dtype, low: torch.dtype) -> None:
    x, parameters = example(text, dtype=dtype)
    with torch.autocast("cpu", low):
        try:
            expected = _eager.run(text, x, parameters)
        except RuntimeError as error:
            pytest.skip(f"PyTorch refuses this mixture: {error}")
        with torch.no_grad():
            assert apply(text, x, parameters).dtype == expected.dtype
        leaves = with_gradients([x, *parameters])
        output = apply(text, leaves[0], leaves[1:])
    assert output.dtype == expected.dtype
    output.float().sum().backward()
    assert all(leaf.grad.dtype == leaf.dtype for leaf in leaves)


@pytest.mark.parametrize("text", BLOCKS)
def test_autocast_values(text: str) -> None:
    x, parameters = example(text)
    expected = exact(text, x, parameters)
    with torch.autocast("cpu", torch.bfloat16):
        by_torch = _eager.run(text, x, parameters)
        assert_as_exact(apply(text, x, parameters), by_torch, expected)
        leaves = with_gradients([x, *parameters])
        assert_as_exact(apply(text, leaves[0], leaves[1:]).detach(), by_torch, expected)


def test_autocast_residual_of_another_type_promotes() -> None:
    x, residual = torch.randn(2, 4, 5, 5), torch.randn(2, 4, 5, 5)
    weight = torch.randn(4, 4, 1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        output = apply("conv2d(4,4,k=1,bias=false) | residual_add", x, [weight, residual])
    assert output.dtype == torch.float32


def test_norm_weights_of_a_wider_type() -> None:
    x, (weight, bias) = torch.randn(2, 8, 5, 5), (torch.randn(8), torch.randn(8))
    output = apply("group_norm(4)", x.bfloat16(), [weight, bias])
    by_torch = F.group_norm(x.bfloat16(), 4, weight, bias)
    assert_as_exact(output, by_torch, F.group_norm(x.bfloat16().double(), 4, weight.double(), bias.double()))


@pytest.mark.parametrize("seed", range(60))
def test_random_mixtures_of_types(seed: int) -> None:
    """Each tensor of a type of its own: PyTorch's output type or a refusal, gradients of each one's type."""
    draw = random.Random(seed)
    text = draw.choice(BLOCKS)
    x, parameters = example(text, dtype=draw.choice(FLOATS))
    kinds = describe(text).parameters
    follows = [p.role.startswith("conv_") or p.name.startswith("prelu") for p in kinds]
    given = [
        p.to(x.dtype if follow and draw.random() < 0.9 else draw.choice(FLOATS))
        for p, follow in zip(parameters, follows, strict=True)
    ]
    mixture = f"seed {seed}: {text} of {x.dtype} with {[p.dtype for p in given]}"
    try:
        by_torch = _eager.run(text, x, given)
    except RuntimeError:
        # PyTorch also refuses what could be computed, such as norms of a half and a bfloat16.
        with contextlib.suppress(TypeError):
            assert apply(text, x, given).shape == exact(text, x, given).shape, mixture
        return
    output = apply(text, x, given)
    assert output.dtype == by_torch.dtype, mixture
    assert_as_exact(output, by_torch, exact(text, x, given))
    seed_gradient = torch.randn_like(by_torch)
    doubles = [p.double() for p in given]
    actual = gradients_by(lambda a, p: apply(text, a, p), x, given, seed_gradient)
    judges = gradients_by(lambda a, p: _eager.run(text, a, p), x.double(), doubles, seed_gradient.double())
    for tensor, mine, judge in zip((x, *given), actual, judges, strict=True):
        assert mine.dtype == tensor.dtype, mixture
        # Between convolution and tail, and behind each promotion, PyTorch rounds to the lower type.
        low = max(torch.finfo(t.dtype).eps for t in (x, *given))
        assert_close_to_scale(mine, judge, 8 * low, mixture)


def assert_close_to_scale(actual: Tensor, expected: Tensor, tolerance: float, message: str) -> None:
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    assert (actual.double() - expected).abs().max().item() <= tolerance * scale, message


# --- Transformations ---


@pytest.mark.parametrize("text", [BLOCKS[2], BLOCKS[5], TAIL, "relu | group_norm(4)"])
def test_operators_pass_opcheck(text: str) -> None:
    for dtype, last in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        x, parameters = example(text, dtype=dtype)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        torch.library.opcheck(torch.ops.onepass.forward, (x, parameters, text))
        torch.library.opcheck(torch.ops.onepass.forward, (x, parameters, text), {"out_dtype": torch.float16})
        torch.library.opcheck(torch.ops.onepass.forward_with_statistics, (x, parameters, text))
        output, statistics = torch.ops.onepass.forward_with_statistics(x, parameters, text)
        wanted = [True, *(i % 2 == 0 for i in range(len(parameters)))]
        arguments = (torch.randn_like(output), x, parameters, statistics, text, wanted)
        torch.library.opcheck(torch.ops.onepass.backward, arguments)
        if torch.ops.onepass.may_overwrite_input(arguments[0], x, parameters, text, wanted):
            # Compiled graphs do not have it: PyTorch knows no functional form of operators that return lists.
            checks = ("test_schema", "test_autograd_registration", "test_faketensor")
            torch.library.opcheck(torch.ops.onepass.backward_, arguments, test_utils=checks)


@pytest.mark.parametrize("text", [text for text in BLOCKS if text.startswith("conv")])
@pytest.mark.parametrize("alone", [False, True])
def test_block_operators(text: str, alone: bool) -> None:
    conv = describe(text).conv
    text = conv.text if alone else text
    x, parameters = example(text)
    kept = [parameters[0], *parameters[describe(text).conv_parameters :]]
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *parameters)]
    expected = _eager.run(text, leaves[0], leaves[1:])
    output, activation, statistics = torch.ops.onepass.block_forward(x, parameters, text)
    torch.testing.assert_close(output, expected.detach(), rtol=1e-4, atol=1e-5)
    assert (activation.numel() == 0) == (not describe(text).tail)
    torch.library.opcheck(torch.ops.onepass.block_forward, (x, parameters, text))
    gradient = torch.randn_like(output)
    arguments = (gradient, x, activation, kept, statistics, text)
    actual = torch.ops.onepass.block_backward(*arguments, [True] * len(leaves))
    for name, a, e in zip(
        ("input", *describe(text).names), actual, torch.autograd.grad(expected, leaves, gradient)
    ):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    for start in range(2):
        wanted = [i % 2 == start for i in range(len(leaves))]
        torch.library.opcheck(torch.ops.onepass.block_backward, (*arguments, wanted))


def test_block_operators_refuse_what_does_not_fit() -> None:
    text = "conv2d(3,4) | relu"
    x, parameters = example(text)
    with pytest.raises(REFUSED, match="must have a convolution"):
        torch.ops.onepass.block_forward(x, [], "relu")
    output, activation, statistics = torch.ops.onepass.block_forward(x, parameters, text)
    with pytest.raises(REFUSED, match="1 parameters and wanted of 2 values, must be"):
        torch.ops.onepass.block_backward(
            output, x, activation, parameters[:1], statistics, text, [True, True]
        )


def test_output_padding_of_a_stride_and_more() -> None:
    text = "conv_transpose2d(2,3,k=3,s=2,d=3,op=2,bias=false)"
    x, (weight,) = torch.randn(2, 2, 5, 6), example(text)[1]
    actual = gradients_by(lambda a, p: apply(text, a, p), x, [weight], None)
    expected = gradients_by(lambda a, p: _eager.run(text, a, p), x, [weight], None)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_every_remainder_of_a_strided_convolution() -> None:
    for size, stride, dilation in itertools.product(range(7, 12), (1, 2, 3), (1, 2)):
        text = f"conv2d(2,3,k=3x2,s={stride},p=1,d={dilation},bias=false) | relu"
        x, (weight,) = torch.randn(2, 2, size, size + 1), example(text)[1]
        actual = gradients_by(lambda a, p, text=text: apply(text, a, p), x, [weight], None)
        expected = gradients_by(lambda a, p, text=text: _eager.run(text, a, p), x, [weight], None)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", [BLOCKS[2], BLOCKS[5], BLOCKS[9], TAIL])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(text: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, p: apply(text, x, p), fullgraph=True, dynamic=dynamic)
    for batch in (2, 5) if dynamic else (2,):
        x, parameters = example(text, batch=batch)
        torch.testing.assert_close(compiled(x, parameters), apply(text, x, parameters))
        actual = gradients_by(compiled, x, parameters, None)
        expected = gradients_by(lambda a, p: apply(text, a, p), x, parameters, None)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_compile_meets_a_new_block() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: apply("mul(0.123) | relu", x, []), fullgraph=True)
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(compiled(x), F.relu(x * 0.123))


def test_export_with_dynamic_batch_holds_the_fused_operator() -> None:
    block = onepass.Block("conv2d(3,8,k=3,p=1) | swish | group_norm(4) | mean")
    batch = torch.export.Dim("batch")
    program = torch.export.export(block, (torch.randn(2, 3, 8, 8),), dynamic_shapes={"x": {0: batch}})
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.onepass.forward_for_training.default]
    for count in (1, 4):
        x = torch.randn(count, 3, 8, 8)
        torch.testing.assert_close(program.module()(x), block(x))


def test_meta_tensors_have_shapes() -> None:
    x = torch.empty(2, 8, 5, 6, device="meta")
    assert apply("relu | mean", x, []).shape == (2, 8)


@pytest.mark.parametrize(
    "block", ["swish | group_norm(4)", "conv2d(8,8,k=3) | swish | group_norm(4) | mean", "conv2d(8,8,k=3)"]
)
def test_gradients_of_gradients_are_pytorchs(block: str) -> None:
    x = torch.randn(2, 8, 5, 5, requires_grad=True)
    own = list(onepass.Block(block, channels=8).parameters())
    found = []
    for run in (apply, _eager.run):
        output = run(block, x, own)
        first = torch.autograd.grad(output.square().sum(), (x, *own), create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        found.append(torch.autograd.grad(penalty, (x, *own), allow_unused=True))
    for some, other in zip(*found, strict=True):
        assert (some is None) == (other is None)
        if some is not None:
            torch.testing.assert_close(some, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("block", ["swish | group_norm(4)", "conv2d(8,8,k=3) | swish | group_norm(4)"])
def test_many_gradients_at_once_are_pytorchs(block: str) -> None:
    x = torch.randn(1, 8, 4, 4, requires_grad=True)
    own = list(onepass.Block(block, channels=8).parameters())
    found = []
    for run in (apply, _eager.run):
        output = run(block, x, own)
        many = torch.randn(3, *output.shape, generator=torch.Generator().manual_seed(0))
        found.append(torch.autograd.grad(output, (x, *own), many, is_grads_batched=True))
    for some, other in zip(*found, strict=True):
        torch.testing.assert_close(some, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("text", ["relu", "conv1d(8,8,k=1,bias=false) | relu"])
def test_transforms_of_torch_func_run_the_stages(text: str) -> None:
    x, parameters = torch.randn(3, 2, 8, 5), example(text)[1]
    run, wanted = (lambda a, by=by: by(text, a, parameters) for by in (apply, _eager.run))
    torch.testing.assert_close(torch.vmap(run)(x), torch.vmap(wanted)(x))
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        found, expected = (transform(lambda a, by=by: by(a).tanh().sum())(x[0]) for by in (run, wanted))
        torch.testing.assert_close(found, expected)
        assert found.count_nonzero() > 0


@pytest.mark.parametrize("text", [TAIL, BLOCKS[2]])
def test_a_tensor_that_outlived_a_transform_has_its_gradient(text: str) -> None:
    x, parameters = example(text)
    x.requires_grad_()
    kept: list[Tensor] = []

    def loss(a: Tensor) -> Tensor:
        kept.append(a)
        return a.square().sum()

    torch.func.grad(loss)(x)
    found, wanted = (
        torch.autograd.grad(by(text, kept[0], parameters).tanh().sum(), x)[0] for by in (apply, _eager.run)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert found.count_nonzero() > 0


def test_checkpointing() -> None:
    text = BLOCKS[2]
    x, parameters = example(text)
    leaves = with_gradients([x, *parameters])
    output = torch.utils.checkpoint.checkpoint(lambda a, *p: apply(text, a, p), *leaves, use_reentrant=False)
    output.sum().backward()
    expected = gradients_by(lambda a, p: apply(text, a, p), x, parameters, None)
    torch.testing.assert_close([leaf.grad for leaf in leaves], expected)


def test_what_is_saved_for_backward() -> None:
    text = BLOCKS[2]
    x, parameters = example(text)
    saved: list[Tensor] = []
    leaves = with_gradients([x, *parameters])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = apply(text, leaves[0], leaves[1:])
    own = {leaf.data_ptr() for leaf in leaves}
    extra = [tensor.shape for tensor in saved if tensor.data_ptr() not in own]
    assert sorted(extra) == sorted([output.shape, torch.Size([2, 4, 2])])


def peak_of_a_step(text: str, in_channels: int) -> tuple[int, int]:
    """The most bytes of a forward and backward of a block with 8 output channels, and those of its output."""
    x = torch.randn(1, in_channels, 256, 256, requires_grad=True)
    parameters = with_gradients(example(text)[1])
    seed = torch.randn(1, 8, 256, 256)

    def step() -> Tensor:
        output = apply(text, x, parameters)
        output.backward(seed, inputs=[x, *parameters])
        return output

    step()
    x.grad = None
    return measure.peak_bytes(step, torch.device("cpu")), seed.nbytes


# Behind swish the norm's input waits in the gradient's memory; relu is computed again.
@pytest.mark.parametrize("activation, tensors", [("swish", 3), ("relu", 2)])
def test_the_convolutions_output_is_overwritten_by_its_gradient_where_it_can_be(
    activation: str, tensors: int
) -> None:
    peak, output = peak_of_a_step(f"conv2d(1,8,k=3,p=1) | {activation} | group_norm(4)", 1)
    # The output, the convolution's output, and its gradient where that has memory of its own.
    assert tensors * output <= peak < (tensors + 0.5) * output


def test_the_convolutions_output_is_freed_before_its_gradients_are_computed() -> None:
    peak, output = peak_of_a_step("conv2d(8,8,k=3,p=1) | swish | group_norm(4)", 8)
    # Output, the convolution's output and its gradient, which is there with the input's after that is freed.
    assert 3 * output <= peak < 3.5 * output


@pytest.mark.parametrize("holder", ["hook", "view", "node"])
def test_a_saved_tensor_that_someone_else_holds_is_not_overwritten(holder: str) -> None:
    text = "conv2d(3,8,k=3,p=1) | relu | group_norm(4)"
    leaves = with_gradients([torch.randn(1, 3, 300, 300), *example(text)[1]])
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if holder != "node" and not tensor.requires_grad:
            held.append(tensor if holder == "hook" else tensor.view(-1))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = apply(text, leaves[0], leaves[1:])
    if holder == "node":
        output = apply(text, leaves[0], leaves[1:])
        held += [tensor for tensor in output.grad_fn.saved_tensors if not tensor.requires_grad]
    assert any(tensor.nbytes >= _differentiable._LARGE_BYTES for tensor in held)
    before = [tensor.clone() for tensor in held]
    output.square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


@pytest.mark.parametrize("size", [6, 300])  # the convolution's output is small, or large enough to be freed
@pytest.mark.parametrize("activation", ["swish", "relu"])  # and not overwritten, or overwritten
def test_a_retained_graph_gives_its_gradients_again(size: int, activation: str) -> None:
    text = f"conv2d(3,8,k=3,p=1) | {activation} | group_norm(4)"
    leaves = with_gradients([torch.randn(1, 3, size, size), *example(text)[1]])
    loss = apply(text, leaves[0], leaves[1:]).square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


# --- Threads ---


def test_eight_threads_run_one_block() -> None:
    text = BLOCKS[2]
    _, parameters = example(text)
    inputs = [torch.randn(2, 3, 24 + i, 32) for i in range(8)]
    expected = [apply(text, x, parameters) for x in inputs]
    failures: list[str] = []

    def work(i: int) -> None:
        for _ in range(20):
            leaves = with_gradients(parameters)
            if not torch.equal(apply(text, inputs[i], parameters), expected[i]):
                failures.append(f"forward {i}")
            apply(text, inputs[i], leaves).sum().backward()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_more_problems_than_the_cache_holds() -> None:
    for size in itertools.chain(range(1, 1500), range(1, 1500, 100)):
        x = torch.randn(1, 1, size)
        assert torch.equal(apply("relu", x, []), F.relu(x))


# --- Errors ---


@pytest.mark.parametrize(
    ("text", "x", "parameters", "kind", "sentence"),
    [
        ("relu | foo", torch.ones(1, 2, 3), [], ValueError, "unknown stage 'foo'"),
        ("group_norm(5)", torch.ones(1, 8, 3), [torch.ones(8)] * 2, ValueError, "5 groups"),
        ("conv2d(3,8)", torch.ones(1, 4, 5, 5), [torch.ones(8, 3, 3, 3)] * 2, ValueError, "4 channels"),
        ("conv2d(3,8)", torch.ones(1, 3, 5, 5), [torch.ones(8, 3, 3, 3)], ValueError, "1 parameters"),
        ("channel_add", torch.ones(1, 3, 5), [torch.ones(4)], ValueError, "channel_add: the sizes are 4"),
        ("relu", torch.ones(1, 3, 5, dtype=torch.int32), [], TypeError, "input is int32"),
        ("prelu", torch.ones(1, 3, 5), [torch.ones(1).double()], TypeError, "prelu is float64"),
        ("residual_add", torch.ones(1, 3), [torch.ones(1, 3, device="meta")], RuntimeError, "device"),
    ],
)
def test_errors(text: str, x: Tensor, parameters: list[Tensor], kind: type, sentence: str) -> None:
    with pytest.raises(kind, match=sentence) as caught:
        apply(text, x, parameters)
    assert "\n" not in str(caught.value)


def test_statistics_of_a_wrong_size_are_refused() -> None:
    x = torch.randn(2, 8, 4)
    with pytest.raises(REFUSED, match="statistics"):
        torch.ops.onepass.backward(x, x, [], torch.ones(3), "group_norm(4,affine=false)", [True])


# --- PyTorch's own samples ---

# Those of softplus all have a beta, which the block language does not.
ACTIVATIONS = {
    "nn.functional.relu": lambda **_: "relu",
    "nn.functional.relu6": lambda **_: "relu6",
    "nn.functional.leaky_relu": lambda negative_slope=0.01, **_: f"leaky_relu({negative_slope})",
    "nn.functional.elu": lambda alpha=1.0, **_: f"elu({alpha})",
    "nn.functional.gelu": lambda approximate="none", **_: "gelu" if approximate == "none" else "gelu_tanh",
    "nn.functional.silu": lambda **_: "silu",
    "nn.functional.hardswish": lambda **_: "hardswish",
    "nn.functional.hardsigmoid": lambda **_: "hardsigmoid",
    "nn.functional.mish": lambda **_: "mish",
    "sigmoid": lambda **_: "sigmoid",
    "tanh": lambda **_: "tanh",
}


def samples_of(name: str):
    common = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    for op in common.op_db:
        if op.name == name and op.variant_test_name == "":
            yield from ((op, s) for s in op.sample_inputs("cpu", torch.float32, requires_grad=False))


def check_samples(name: str, run) -> None:
    """Runs every sample that a block can express; there must be one."""
    count = 0
    for op, sample in samples_of(name):
        actual = run(sample.input, *sample.args, **sample.kwargs)
        if actual is None:
            continue
        count += 1
        exactly = sample.transform(lambda v: v.double() if isinstance(v, Tensor) else v)
        expected = op(exactly.input, *exactly.args, **exactly.kwargs)
        assert_as_exact(actual, op(sample.input, *sample.args, **sample.kwargs), expected)
    assert count > 0


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_samples_of_activations(name: str) -> None:
    def run(x: Tensor, *args, **kwargs) -> Tensor | None:
        text = None if args or kwargs.get("inplace") else ACTIVATIONS[name](**kwargs)
        if text is None or x.numel() == 0:
            return None
        shaped = x if 2 <= x.dim() <= 5 else x.reshape(1, 1, -1)
        alone = apply(text, shaped, [])
        torch.testing.assert_close(apply(f"{text} | mul(2)", shaped, []), alone * 2)
        return alone.reshape(x.shape)

    check_samples(name, run)


def test_samples_of_prelu() -> None:
    def run(x: Tensor, weight: Tensor) -> Tensor | None:
        if not 2 <= x.dim() <= 5 or x.numel() == 0:
            return None
        per = "tensor" if weight.numel() == 1 else "channel"
        return apply(f"prelu(per={per})", x, [weight.reshape(-1)])

    check_samples("nn.functional.prelu", run)


def joined(value, rank: int) -> str:
    values = (value,) * rank if isinstance(value, int) else tuple(value)
    return "x".join(map(str, values * rank if len(values) == 1 else values))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_samples_of_convolutions(rank: int, transposed: bool) -> None:
    def text_of(weight: Tensor, bias: Tensor | None, **options) -> str:
        groups = options.get("groups", 1)
        ends = (weight.shape[0], weight.shape[1] * groups)
        first, second = ends if transposed else ends[::-1]
        numbers = {"s": "stride", "d": "dilation", "op": "output_padding"}
        given = [f"{key}={joined(options[o], rank)}" for key, o in numbers.items() if o in options]
        padding = options.get("padding", 0)
        if padding == "valid":
            padding = 0
        given.append(f"p={padding if padding == 'same' else joined(padding, rank)}")
        kernel = joined(tuple(weight.shape[2:]), rank)
        bias_text = "true" if bias is not None else "false"
        name = f"conv{'_transpose' if transposed else ''}{rank}d"
        return f"{name}({first},{second},k={kernel},groups={groups},bias={bias_text},{','.join(given)})"

    names = ("stride", "padding", "output_padding", "groups", "dilation")
    names = names if transposed else ("stride", "padding", "dilation", "groups")

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None, *args, **kwargs) -> Tensor | None:
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        bias = kwargs.pop("bias", bias)
        if x.dim() != rank + 2 or x.dtype != weight.dtype or x.is_complex():
            return None
        parameters = [weight] if bias is None else [weight, bias]
        text = text_of(weight, bias, **kwargs)
        alone = apply(text, x, parameters)
        torch.testing.assert_close(apply(f"{text} | tanh", x, parameters), torch.tanh(alone))
        return alone

    check_samples(f"nn.functional.conv{'_transpose' if transposed else ''}{rank}d", run)


def test_samples_of_group_norm() -> None:
    def run(x: Tensor, groups: int, weight=None, bias=None, eps: float = 1e-5) -> Tensor | None:
        if x.dim() > 5 or 0 in x.shape[1:] or eps < 0 or (weight is None) != (bias is None):
            return None
        parameters = [] if weight is None else [weight, bias]
        affine = "true" if parameters else "false"
        return apply(f"group_norm({groups},eps={eps!r},affine={affine})", x, parameters)

    check_samples("nn.functional.group_norm", run)


def test_samples_of_instance_norm() -> None:
    def run(x: Tensor, *args, weight=None, bias=None, eps: float = 1e-5, **options) -> Tensor | None:
        if args or not options.get("use_input_stats", True) or (weight is None) != (bias is None):
            return None
        parameters = [] if weight is None else [weight, bias]
        affine = "true" if parameters else "false"
        return apply(f"instance_norm(eps={eps!r},affine={affine})", x, parameters)

    check_samples("nn.functional.instance_norm", run)


def test_eager_is_what_the_modules_compute() -> None:
    """The judge above, judged by modules that share no code with it."""
    modules = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.GroupNorm(4, 8), nn.Hardswish())
    x = torch.randn(2, 3, 6, 7)
    parameters = list(modules.parameters())
    torch.testing.assert_close(_eager.run(BLOCKS[2], x, parameters), modules(x))
    assert describe(BLOCKS[2]).names == ("conv_weight", "conv_bias", "norm_weight", "norm_bias")


def test_depthwise_convolutions_are_the_librarys() -> None:
    """In both layouts, with and without gradients."""
    from onepass import _cpu

    block = "conv2d(64,64,k=3,groups=64) | group_norm(8) | relu"
    x = torch.empty(2, 64, 56, 56)
    last = x.to(memory_format=torch.channels_last)

    def is_left(input: torch.Tensor, gradients: bool = False) -> bool:
        return _cpu.leaves_convolution(block, _cpu.geometry_of(input), torch.get_num_threads(), gradients)

    assert not (is_left(last) or is_left(x) or is_left(last.bfloat16()) or is_left(x, gradients=True))
    # In a step the tail runs by itself, and oneDNN is faster than the library there.
    assert is_left(last, gradients=True) is _cpu.on_core(False, True)
