"""PyTorch's convolutions alone, without bias: what the choice between them and our rows is fitted to.

Problems are those of the sweep, and layers as common networks have them. Of each: seconds of the forward pass
and of both gradients, cudnn.benchmark off, as a user's model runs without settings.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import sweep_calls
import torch
from sweep_clock import digits
from sweep_problems import MEBI, Conv, Problem, draw

Entry = dict[str, Any]
LEAST_BYTES, MOST_BYTES = 8 * MEBI, 1200 * MEBI  # of input and output together
MOST_PRODUCTS = 1e12
WIDTHS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280)
PLANES = (7, 8, 14, 16, 28, 32, 56, 64, 96, 112, 128, 224, 256, 512)
VOLUMES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MOST_SECONDS = 0.03  # gradients of slower ones are left out
SLOW_SECONDS = 5e-3  # measured three times, not nine


def layer(seed: int, number: int) -> Problem:
    """One of a common network."""
    random_ = random.Random(f"{seed}/{number}/layer")
    while True:
        found = _layer(random_)
        if LEAST_BYTES <= moved_bytes(found) <= MOST_BYTES and found.products() <= MOST_PRODUCTS:
            return found


def _layer(random_: random.Random) -> Problem:
    rank = random_.choice((2, 2, 3))
    inside = random_.choice(WIDTHS)
    outside = random_.choice((inside, inside, 2 * inside, max(8, inside // 2)))
    kind = random_.choices(("ordinary", "1x1", "depthwise", "grouped", "transposed"), (10, 5, 3, 1, 3))[0]
    stride = random_.choice((1, 1, 1, 2))
    if kind == "depthwise":
        kernel = random_.choice((3, 5, 7))
        conv = Conv(kind, (inside, inside), kernel, stride, kernel // 2, groups=inside)
    elif kind == "grouped":
        conv = Conv(kind, (inside, inside), 3, stride, 1, groups=min(32, inside // 4))
    elif kind == "transposed":
        kernel, padding, more = random_.choice(((2, 0, 0), (4, 1, 0), (3, 1, 1)))
        conv = Conv(kind, (inside, outside), kernel, 2, padding, more, transposed=True)
    else:
        kernel = 1 if kind == "1x1" else random_.choice((3, 3, 3, 3, 5, 7))
        conv = Conv(kind, (inside, outside), kernel, stride, kernel // 2)
    size = random_.choice(PLANES if rank == 2 else VOLUMES)
    shape = (2 ** random_.randrange(8), inside, *(size,) * rank)
    precision = random_.choices(("tf32", "bf16", "fp16", "strict"), (7, 8, 3, 1))[0]
    layout = random_.choice(("contiguous", "channels_last"))
    return Problem("block", conv, "relu", 0, "", False, shape, precision, layout)


def moved_bytes(problem: Problem) -> float:
    """Of input and output."""
    elements = math.prod(problem.shape) + math.prod(problem.convolved())
    return float(elements) * problem.element_bytes


def problem_of(entry: Entry) -> Problem:
    """What an entry is of."""
    if entry["of"] == "layer":
        return layer(entry["seed"], entry["number"])
    return draw(entry["seed"], entry["number"])


def places(seed: int, count: int) -> Iterator[Entry]:
    """Drawn problems and layers by turns, as entries without figures."""
    for number, of in itertools.product(range(count), ("drawn", "layer")):
        entry = {"of": of, "seed": seed, "number": number}
        problem = problem_of(entry)
        is_block = problem.group.startswith("block")
        if is_block and LEAST_BYTES <= moved_bytes(problem) <= MOST_BYTES:
            yield entry


def measure(seed: int, count: int, end: float, seconds: Callable[[Callable[[], Any]], float]) -> list[Entry]:
    """Entries with their figures, until the time is up."""
    found: list[Entry] = []
    for entry in places(seed, count):
        if time.monotonic() > end:
            break
        problem = problem_of(entry)
        try:
            with sweep_calls.settings(problem), torch.no_grad():
                entry |= _measured(problem, seconds)
        except Exception as error:  # an algorithm that has no memory: the others are measured all the same
            entry["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        found.append(entry)
        if len(found) % 50 == 0:
            gc.collect()
            torch.cuda.empty_cache()
            print(f"{len(found)} convolutions", flush=True)
    return found


def _measured(problem: Problem, seconds: Callable[[Callable[[], Any]], float]) -> Entry:
    conv, rank = problem.conv, problem.rank
    assert conv is not None
    order = sweep_calls.memory_format(problem.layout, rank)
    dtype = sweep_calls.TYPES[problem.precision]
    weight = sweep_calls.build(problem)[0].weight.detach().to("cuda", dtype).contiguous(memory_format=order)
    x = torch.randn(problem.shape, dtype=dtype, device="cuda").contiguous(memory_format=order)
    how = ((conv.stride,) * rank, (conv.padding,) * rank, (1,) * rank, conv.transposed)
    how = (*how, (conv.output_padding,) * rank, conv.groups)

    def forward() -> torch.Tensor:
        return torch.convolution(x, weight, None, *how)

    taken: Entry = {"forward": _median(forward, seconds)}
    if taken["forward"] > MOST_SECONDS:
        return taken
    gradient = torch.randn_like(forward())
    for name, wanted in (("input", (True, False, False)), ("weight", (False, True, False))):

        def backward(wanted: tuple[bool, ...] = wanted) -> Any:
            return torch.ops.aten.convolution_backward(gradient, x, weight, None, *how, wanted)

        taken[name] = _median(backward, seconds)
    return taken


def _median(call: Callable[[], Any], seconds: Callable[[Callable[[], Any]], float]) -> float:
    first = [seconds(call), seconds(call)][1]
    taken = sorted(seconds(call) for _ in range(3 if first > SLOW_SECONDS else 9))
    return digits(taken[len(taken) // 2])
