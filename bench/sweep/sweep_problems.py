"""Problems of the sweep: drawn by a seeded generator from the space of convolution blocks and tails.

A seed and a number give one problem, whatever else is drawn: lists of one seed are prefixes of each other.
"""

from __future__ import annotations

import dataclasses
import math
import random

CHANNELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 512, 640, 1280)
KERNELS = (1, 2, 3, 4, 5, 7)
KINDS = ("ordinary", "strided", "transposed", "1x1", "depthwise", "grouped")
PRECISIONS = ("tf32", "bf16", "strict", "fp16")
LAYOUTS = ("contiguous", "channels_last")
ENDS = ("none", "norm", "mean")
# Names of the block language. Gradients of those with a kink jump where values are rounded, so that no two
# honest results agree: problems with gradients have smooth ones.
SMOOTH = ("gelu", "swish", "mish", "tanh", "sigmoid", "softplus", "elu")
KINKED = ("relu", "leaky_relu", "hardswish", "relu6", "hardsigmoid")
BATCHES = tuple(2**i for i in range(9))  # 1 to 256
MEBI = 2**20
# One of this many problems each.
SHARES = {"block": 9, "block_step": 5, "tail": 3, "tail_backward": 3}
MOST_WEIGHTS = 2**24
MOST_GROUPS = 4096
MOST_CHANNELS = 8192


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a device has time for."""

    least_bytes: float
    most_bytes: float  # of the input and of the output
    most_products: float  # multiply-adds of a convolution
    precisions: tuple[str, ...]


LIMITS = {
    "cuda": Limits(MEBI, 1024 * MEBI, 1e12, PRECISIONS),
    "cpu": Limits(MEBI, 16 * MEBI, 1e9, ("strict",)),
}


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution; the same numbers in every dimension."""

    kind: str  # of KINDS
    channels: tuple[int, int]  # in, out
    kernel: int
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    groups: int = 1
    transposed: bool = False
    bias: bool = True

    def output_size(self, size: int) -> int:
        """Of one dimension."""
        if self.transposed:
            return (size - 1) * self.stride + self.kernel - 2 * self.padding + self.output_padding
        return (size + 2 * self.padding - self.kernel) // self.stride + 1

    def text(self, rank: int) -> str:
        """As a stage of the block language."""
        words = [*map(str, self.channels), f"k={self.kernel}"]
        words += [f"s={self.stride}"] if self.stride > 1 else []
        words += [f"p={self.padding}"] if self.padding else []
        words += [f"op={self.output_padding}"] if self.output_padding else []
        words += [f"groups={self.groups}"] if self.groups > 1 else []
        words += [] if self.bias else ["bias=false"]
        return f"conv{'_transpose' if self.transposed else ''}{rank}d({','.join(words)})"

    def weights(self, rank: int) -> int:
        """How many there are."""
        return self.channels[0] * self.channels[1] // self.groups * self.kernel**rank


@dataclasses.dataclass(frozen=True)
class Problem:
    """A block or a tail with its sizes, its precision and its layout, forward or with gradients."""

    group: str  # of SHARES
    conv: Conv | None
    before: str  # an activation, or none: ""
    norm: int  # its groups; 0: no norm
    after: str
    mean: bool
    shape: tuple[int, ...]  # of the input
    precision: str
    layout: str

    @property
    def rank(self) -> int:
        """Of space."""
        return len(self.shape) - 2

    @property
    def gradients(self) -> bool:
        """Whether they are wanted."""
        return self.group in ("block_step", "tail_backward")

    @property
    def element_bytes(self) -> int:
        """Of every tensor."""
        return 2 if self.precision in ("bf16", "fp16") else 4

    def convolved(self) -> tuple[int, ...]:
        """The shape before the tail."""
        if self.conv is None:
            return self.shape
        return (self.shape[0], self.conv.channels[1], *map(self.conv.output_size, self.shape[2:]))

    def output(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.convolved()[:2] if self.mean else self.convolved()

    def products(self) -> float:
        """Multiply-adds of the convolution."""
        if self.conv is None:
            return 0
        positions = self.shape if self.conv.transposed else self.convolved()
        terms = self.conv.weights(self.rank)
        return float(positions[0]) * math.prod(positions[2:]) * terms

    def bytes(self) -> float:
        """Of the larger of the input and what the norm sees."""
        return float(max(math.prod(self.shape), math.prod(self.convolved()))) * self.element_bytes

    def slab(self) -> int:
        """Elements of one; 0 without a norm."""
        return math.prod(self.convolved()[1:]) // self.norm if self.norm else 0

    def block(self) -> str:
        """In the block language."""
        stages = [self.conv.text(self.rank)] if self.conv else []
        stages += [self.before] if self.before else []
        stages += [f"group_norm({self.norm})"] if self.norm else []
        stages += [self.after] if self.after else []
        stages += ["mean"] if self.mean else []
        return " | ".join(stages)

    def key(self) -> str:
        """A line that names it."""
        sizes = "x".join(map(str, self.shape))
        return f"{self.group}: {self.block()} @ {sizes} {self.precision} {self.layout}"


def draw(seed: int, number: int, device: str = "cuda") -> Problem:
    """One problem."""
    random_ = random.Random(f"{seed}/{number}/{device}")
    group = random_.choices(list(SHARES), list(SHARES.values()))[0]
    limits = LIMITS[device]
    while True:
        of_block = group.startswith("block")
        found = _block(random_, group, limits) if of_block else _tail(random_, group, limits)
        if found is not None:
            return found


def problems(seed: int, count: int, device: str = "cuda") -> list[Problem]:
    """The first ones of a seed."""
    return [draw(seed, number, device) for number in range(count)]


def _log_uniform(random_: random.Random, least: float, most: float) -> float:
    return math.exp(random_.uniform(math.log(least), math.log(most)))


def _activation(random_: random.Random, gradients: bool, share: float) -> str:
    if random_.random() > share:
        return ""
    return random_.choice(SMOOTH if gradients else SMOOTH + KINKED)


def _conv(random_: random.Random, rank: int) -> Conv | None:
    """None where the numbers do not go together."""
    kind = random_.choice(KINDS)
    inside, outside = random_.choice(CHANNELS), random_.choice(CHANNELS)
    kernel = 1 if kind == "1x1" else random_.choice(KERNELS)
    padding = random_.choice((0, kernel // 2, kernel // 2))
    conv = Conv(kind, (inside, outside), kernel, padding=padding)
    if kind == "strided":
        conv = dataclasses.replace(conv, stride=random_.choice((2, 2, 3)))
    elif kind == "transposed":
        stride = random_.choice((1, 2, 2, 3))
        padded = random_.randrange(stride)
        conv = dataclasses.replace(conv, stride=stride, output_padding=padded, transposed=True)
    elif kind == "depthwise":
        conv = dataclasses.replace(conv, channels=(inside, inside), groups=inside)
    elif kind == "grouped":
        groups = [g for g in (2, 4, 8, 16, 32) if inside % g == 0 and outside % g == 0]
        groups = [g for g in groups if g < inside]
        if not groups:
            return None
        conv = dataclasses.replace(conv, groups=random_.choice(groups))
    if (kind == "depthwise" and inside == 1) or conv.weights(rank) > MOST_WEIGHTS:
        return None
    return conv


def _block(random_: random.Random, group: str, limits: Limits) -> Problem | None:
    rank = random_.choice((1, 2, 2, 3, 3))
    conv = _conv(random_, rank)
    if conv is None:
        return None
    gradients = group == "block_step"
    end = random_.choice(ENDS)
    outside = conv.channels[1]
    groups = [g for g in (1, 2, 4, 8, 16, 32, outside) if outside % g == 0]
    norm = random_.choice(groups) if end != "none" else 0
    before = _activation(random_, gradients, 0.6)
    after = _activation(random_, gradients, 0.6)
    if not norm and not before:
        before = _activation(random_, gradients, 1)
    if norm and not before:  # a norm takes most of a bias away again
        conv = dataclasses.replace(conv, bias=False)
    if end == "mean" and norm == outside and not after:
        after = _activation(random_, gradients, 1)
    precision, layout = random_.choice(limits.precisions), random_.choice(LAYOUTS)
    layout = "contiguous" if rank == 1 else layout
    target = _log_uniform(random_, limits.least_bytes, limits.most_bytes)
    batch, even = random_.choice(BATCHES), random_.random() < 0.5
    stretch = [random_.uniform(0.7, 1.4) for _ in range(rank - 1)]
    element = 2 if precision in ("bf16", "fp16") else 4
    while True:
        found = None
        size = _size_of(conv, target / batch / element, rank)
        if size >= max(conv.kernel, 4):
            sizes = _sizes(size, rank, stretch, even)
            shape = (batch, conv.channels[0], *sizes)
            found = Problem(group, conv, before, norm, after, end == "mean", shape, precision, layout)
            fits = limits.least_bytes * 0.5 <= found.bytes() <= limits.most_bytes * 1.1
            if fits and min(found.convolved()) > 0 and found.products() <= limits.most_products:
                return found
        if found is not None and found.products() > limits.most_products:
            target *= 0.7  # fewer positions
            if target < limits.least_bytes * 0.5:
                return None
        elif batch > 1:
            batch //= 2
        else:
            return None


def _size_of(conv: Conv, elements: float, rank: int) -> float:
    """Of one dimension of the input, so that a sample of the larger tensor has so many elements."""
    inside, outside = conv.channels
    scale = conv.stride**rank
    most = max(inside, outside * scale) if conv.transposed else max(inside, outside / scale)
    return (elements / most) ** (1 / rank)


def _sizes(size: float, rank: int, stretch: list[float], even: bool) -> tuple[int, ...]:
    """Sizes with this geometric mean; even ones are multiples of eight where that changes little."""
    last = size ** len(stretch) / math.prod(size * s for s in stretch) if stretch else 1.0
    exact = [size * factor for factor in (*stretch, last)][:rank]
    step = 8 if even and size >= 16 else 1
    return tuple(max(step, round(x / step) * step) for x in exact)


def _tail(random_: random.Random, group: str, limits: Limits) -> Problem | None:
    """Slabs of 32 to 16 million elements, 1 to 4096 of them a sample."""
    gradients = group == "tail_backward"
    rank = random_.choice((1, 2, 2, 3))
    most = min(16 * MEBI, limits.most_bytes / 4)
    slab = _log_uniform(random_, 32, most)
    groups = 2 ** random_.randrange(13)
    width = random_.choice((1, 1, 2, 4, 8, 16, 32))  # channels of a slab
    norm, mean = True, random_.random() < 0.2
    before, after = (_activation(random_, gradients, 0.7) for _ in range(2))
    if random_.random() < 0.1:
        norm, before = False, before or _activation(random_, gradients, 1)
    elif mean and width == 1 and not after:  # means of a normalised channel are its bias
        after = _activation(random_, gradients, 1)
    precisions = tuple(p for p in limits.precisions if p != "strict") or limits.precisions
    precision, layout = random_.choice(precisions), random_.choice(LAYOUTS)
    layout = "contiguous" if rank == 1 else layout
    element = 2 if precision in ("bf16", "fp16") else 4
    target = _log_uniform(random_, limits.least_bytes, limits.most_bytes)
    stretch = [random_.uniform(0.7, 1.4) for _ in range(rank - 1)]
    sizes = _sizes((slab / width) ** (1 / rank), rank, stretch, random_.random() < 0.5)
    channels = groups * width
    sample = channels * math.prod(sizes) * element
    batch = round(target / sample)
    if not 1 <= batch <= BATCHES[-1] or channels > MOST_CHANNELS or math.prod(sizes) * width < 32:
        return None
    shape = (batch, channels, *sizes)
    found = Problem(group, None, before, groups if norm else 0, after, mean, shape, precision, layout)
    return found if 0.5 * limits.least_bytes <= found.bytes() <= 1.1 * limits.most_bytes else None
