"""The default numerics: convolution blocks agree with eager PyTorch at its default settings, which round some
convolutions to TF32 and others not.
"""

import os
import random
import unittest

import torch
from support import GpuTest, conv_precision, in_format, warm
from torch import Tensor

import onepass
from onepass import _eager, _numerics, _rounding
from onepass._description import describe

TAILS = (
    "",
    " | relu",
    " | silu | group_norm(4) | hardswish",
    " | group_norm(8) | relu",
    " | hardswish | group_norm(4) | mean",
    " | instance_norm | leaky_relu(0.01)",
    " | gelu",
    " | group_norm(1) | silu",
)
# Input channels, output channels and the rest of the convolution, sizes of the input.
CONVOLUTIONS = (
    ("conv1d({},{},k=3,p=1)", 8, 32, (16, 1024)),
    ("conv1d({},{},k=7,s=2,p=3)", 1, 64, (8, 8000)),
    ("conv1d({},{},k=5)", 12, 128, (4, 512)),
    ("conv_transpose1d({},{},k=4,s=2,p=1)", 16, 32, (8, 500)),
    ("conv2d({},{},k=3,p=1)", 1, 16, (16, 64, 64)),
    ("conv2d({},{},k=3,p=1)", 2, 32, (8, 56, 56)),
    ("conv2d({},{},k=3,p=1)", 3, 16, (32, 32, 32)),
    ("conv2d({},{},k=3,p=1)", 3, 64, (16, 112, 112)),
    ("conv2d({},{},k=7,s=2,p=3)", 3, 64, (16, 224, 224)),
    ("conv2d({},{},k=4,s=4)", 3, 96, (16, 128, 128)),
    ("conv2d({},{},k=3,p=1)", 4, 128, (4, 64, 64)),
    ("conv2d({},{},k=3,p=1)", 5, 32, (8, 33, 47)),
    ("conv2d({},{},k=5,p=2)", 6, 16, (8, 64, 64)),
    ("conv2d({},{},k=3,p=1)", 8, 16, (16, 64, 64)),
    ("conv2d({},{},k=3,p=1)", 8, 64, (16, 56, 56)),
    ("conv2d({},{},k=3,s=2,p=1)", 8, 32, (8, 128, 128)),
    ("conv2d({},{},k=1)", 12, 48, (8, 64, 64)),
    ("conv2d({},{},k=3,p=1)", 15, 32, (4, 40, 40)),
    ("conv2d({},{},k=3,p=1)", 16, 32, (16, 32, 32)),
    ("conv2d({},{},k=3,p=1)", 32, 32, (16, 56, 56)),
    ("conv2d({},{},k=3,p=1)", 64, 64, (16, 56, 56)),
    ("conv2d({},{},k=1)", 64, 128, (8, 28, 28)),
    ("conv2d({},{},k=3,p=1)", 128, 128, (8, 28, 28)),
    ("conv_transpose2d({},{},k=2,s=2)", 8, 16, (8, 32, 32)),
    ("conv_transpose2d({},{},k=4,s=2,p=1)", 16, 32, (8, 32, 32)),
    ("conv_transpose2d({},{},k=3)", 64, 64, (2, 64, 64)),
    ("conv3d({},{},k=3,p=1)", 1, 32, (2, 32, 32, 32)),
    ("conv3d({},{},k=3,p=1)", 2, 16, (2, 24, 32, 32)),
    ("conv3d({},{},k=3,p=1)", 3, 16, (8, 16, 32, 32)),
    ("conv3d({},{},k=4)", 3, 16, (32, 16, 32, 32)),
    ("conv3d({},{},k=3,p=1)", 4, 32, (2, 32, 32, 32)),
    ("conv3d({},{},k=3,p=1)", 8, 16, (4, 16, 32, 32)),
    ("conv3d({},{},k=3,s=2,p=1)", 8, 64, (2, 32, 32, 32)),
    ("conv3d({},{},k=3,p=1)", 12, 24, (2, 16, 24, 24)),
    ("conv3d({},{},k=3,p=1)", 32, 32, (1, 32, 32, 32)),
    ("conv3d({},{},k=1)", 16, 64, (2, 16, 32, 32)),
    ("conv_transpose3d({},{},k=3,s=2,p=1)", 3, 16, (16, 16, 32, 32)),
    ("conv_transpose3d({},{},k=2,s=2)", 16, 32, (2, 16, 16, 16)),
    ("conv_transpose3d({},{},k=3,bias=false)", 64, 128, (2, 16, 16, 16)),
    ("conv2d({},{},k=3,p=1,groups=2)", 32, 64, (8, 56, 56)),
)
DRAWN = 24
SEED = int(os.environ.get("ONEPASS_TEST_SEED", random.SystemRandom().randrange(1 << 31)))
# Blocks that may instead be as exact as eager against fp64, each with its reason; at most three.
NAMED: dict[str, str] = {}


def listed() -> list[tuple[str, tuple[int, ...], str]]:
    """Every convolution with two tails; a quarter of them with channels last."""
    found = []
    for index, (text, inner, outer, sizes) in enumerate(CONVOLUTIONS):
        for tail in (TAILS[index % len(TAILS)], TAILS[(index + 3) % len(TAILS)]):
            layout = "channels_last" if index % 4 == 3 and len(sizes) > 2 else "contiguous"
            block = text.format(inner, outer) + tail
            found.append((block, (sizes[0], inner, *sizes[1:]), layout))
    return found


def drawn(rng: random.Random) -> tuple[str, tuple[int, ...], str]:
    """A block that nobody chose."""
    rank = rng.choice((1, 2, 2, 3))
    k, s = rng.choice((1, 2, 3, 3, 4, 5)), rng.choice((1, 1, 2))
    p = rng.choice((0, k // 2))
    inner = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 14, 15, 16, 24, 32, 48, 64))
    outer = rng.choice((16, 24, 32, 48, 64, 96, 128))
    size = rng.choice({1: (200, 1000, 3000), 2: (17, 32, 56, 90), 3: (9, 16, 24)}[rank])
    name = "conv_transpose" if rng.random() < 0.3 else "conv"
    block = f"{name}{rank}d({inner},{outer},k={k},s={s},p={p}){rng.choice(TAILS)}"
    layout = "channels_last" if rank > 1 and rng.random() < 0.25 else "contiguous"
    return block, (rng.choice((1, 2, 8, 24)), inner, *(size + d for d in range(rank))), layout


class PytorchDefault(GpuTest):
    """In the default numerics, TF32 allowed."""

    def difference(self, block: str, sizes: tuple[int, ...], layout: str) -> str:
        """What is wrong with the block, as planned and with its convolution run here; "" if nothing is."""
        module = onepass.Block(block, device="cuda")
        x = in_format(torch.randn(sizes, device="cuda"), layout)
        parameters = [module._parameters[name] for name in describe(block).names]
        words = _numerics.forward_words("pytorch", describe(block).conv, x, parameters[0])
        whole = torch.ops.onepass.whole_forward.default
        with torch.no_grad():
            wanted = _eager.run(block, x, parameters)
            ways = {"planned": module(x)}
            if words is not None:
                ways[f"whole, {words}"] = whole(x, parameters, block, words)
            exact = _eager.run(block, x.double(), [p.double() for p in parameters])
        errors = {name: (y.double() - exact).abs().max().item() for name, y in ways.items()}
        eager = (wanted.double() - exact).abs().max().item()
        for name, found in ways.items():
            if torch.allclose(found, wanted, rtol=1e-4, atol=1e-4):
                continue
            if block in NAMED and errors[name] <= eager:
                continue
            apart = (found - wanted).abs().max().item()
            judged = f"{apart:.1e} apart, errors {errors[name]:.1e} and {eager:.1e}"
            return f"{block} @ {sizes} {layout}, {name}: {judged}"
        return ""

    def check(self, problems: list[tuple[str, tuple[int, ...], str]]) -> None:
        warm([lambda p=problem: self.difference(*p) for problem in problems])
        wrong = [words for problem in problems if (words := self.difference(*problem))]
        self.assertEqual(wrong, [], f"{len(wrong)} of {len(problems)}, seed {SEED}:\n" + "\n".join(wrong))

    def test_listed_blocks_agree_with_eager(self) -> None:
        self.assertLessEqual(len(NAMED), 3)
        self.assertGreaterEqual(len(listed()), 60)
        self.check(listed())

    def test_drawn_blocks_agree_with_eager(self) -> None:
        rng = random.Random(SEED)
        torch.manual_seed(SEED)
        self.check([drawn(rng) for _ in range(DRAWN)])


def rounded(x: Tensor) -> Tensor:
    """To TF32, to nearest even."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def rounded_away(x: Tensor) -> Tensor:
    """To TF32, to nearest, ties away from zero."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class Asking(GpuTest):
    """What PyTorch says of a convolution is what it does."""

    def test_answers_are_what_pytorch_computes(self) -> None:
        seen = set()
        for text, inner, outer, sizes in CONVOLUTIONS:
            conv = describe(text.format(inner, outer)).conv
            x = torch.randn(sizes[0], inner, *sizes[1:], device="cuda")
            module = onepass.Block(text.format(inner, outer), device="cuda")
            w = module._parameters["conv_weight"].detach()
            found = _eager.convolve(conv, x, w).double()
            apart = {}
            for kind, change in (("fp32", lambda t: t), ("tf32", rounded), ("tf32_away", rounded_away)):
                side = _eager.convolve(conv, change(x).double(), change(w).double())
                apart[kind] = (found - side).norm().item()
            answer = _rounding.rounds(conv, x, w, False)[0]
            with self.subTest(convolution=conv.text, sizes=sizes):
                self.assertEqual(answer, min(apart, key=apart.__getitem__), apart)
            seen.add(answer)
        self.assertEqual(seen, {"fp32", "tf32", "tf32_away"}, "the list has every kind")

    def test_a_capture_and_tf32_switched_off_are_not_asked(self) -> None:
        block = onepass.Block("conv2d(3,16,k=3,p=1) | relu", device="cuda")
        x = torch.randn(3, 3, 19, 23, device="cuda")
        with torch.no_grad(), conv_precision("ieee"):
            before = len(_rounding._known)
            block(x)
            self.assertEqual(len(_rounding._known), before)

    def test_numerics_of_one_model(self) -> None:
        torch.manual_seed(0)
        x = torch.rand(64, 3, 16, 32, 32, device="cuda")
        text = "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean"
        blocks = {name: onepass.Block(text, device="cuda", numerics=name) for name in _numerics.POLICIES}
        parameters = [blocks["strict"]._parameters[name] for name in describe(text).names]
        exact = _eager.run(text, x.double(), [p.double() for p in parameters])
        errors = {}
        for name, block in blocks.items():
            block.load_state_dict(blocks["strict"].state_dict())
            with torch.no_grad():
                errors[name] = (block(x).double() - exact).abs().max().item()
        print(errors)
        self.assertLess(errors["strict"], 5e-6)
        self.assertLess(errors["pytorch"], 1e-4)
        self.assertLess(errors["fast"], 1e-3)
        with self.assertRaisesRegex(ValueError, "must be"):
            onepass.Block(text, numerics="exact")


if __name__ == "__main__":
    unittest.main()
