#!/usr/bin/env python3
"""Which convolutions PyTorch's default settings round to TF32: draws convolutions, runs each forward and
backward with TF32 allowed, and compares with fp64 on exact operands and on operands rounded to TF32.

    python3 scripts/probe_tf32.py --seconds 150 --out probe.json
    python3 scripts/probe_tf32.py --benchmark --out probe_benchmark.json

Writes one line of JSON for each convolution and prints how many were fp32, tf32 or neither. Needs a GPU and
PyTorch alone. cudnn.benchmark is for a whole run: PyTorch keeps the plan it has for given sizes.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

INPUT_CHANNELS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
OUTPUT_CHANNELS = (8, 16, 32, 64, 128)
SIZES = {
    1: ((64,), (250,), (1024,), (8192,)),
    2: ((7, 7), (14, 14), (32, 32), (33, 47), (56, 56), (128, 128), (224, 224)),
    3: ((4, 8, 8), (8, 8, 8), (16, 32, 32), (15, 17, 19), (32, 32, 32), (64, 64, 64)),
}
BATCHES = (1, 2, 4, 8, 16, 32, 128)
MOST_ELEMENTS = 1 << 26  # of the input and of the output: draws beyond it are replaced
JUDGED_SAMPLES = 2  # the reference computes these alone; the output gradient of the others is zero


def draw(rng: random.Random) -> dict[str, Any]:
    """One convolution whose tensors are of moderate size."""
    while True:
        dims = rng.choice((1, 2, 2, 3, 3))
        transposed = rng.random() < 0.35
        size = rng.choice(SIZES[dims])
        k = rng.choice((1, 2, 3, 3, 3, 4, 5, 7))
        stride = rng.choice((1, 1, 2))
        padding = rng.choice((0, k // 2))
        cin, cout = rng.choice(INPUT_CHANNELS), rng.choice(OUTPUT_CHANNELS)
        groups = rng.choice([g for g in (1, 1, 1, 1, 1, 1, 2, 4, cin) if cin % g == 0 and cout % g == 0])
        batch = rng.choice(BATCHES)
        last = rng.random() < 0.3 and dims > 1
        if transposed:
            out = [(s - 1) * stride - 2 * padding + k for s in size]
        else:
            out = [(s + 2 * padding - k) // stride + 1 for s in size]
        if min(out) < 1:
            continue
        pixels_in, pixels_out = batch, batch
        for a, b in zip(size, out):
            pixels_in, pixels_out = pixels_in * a, pixels_out * b
        if max(pixels_in * cin, pixels_out * cout) > MOST_ELEMENTS:
            continue
        return dict(
            dims=dims, transposed=transposed, cin=cin, cout=cout, k=k, stride=stride, padding=padding,
            groups=groups, size=list(size), batch=batch, channels_last=last,
        )  # fmt: skip


def rounded(x: Tensor) -> Tensor:
    """To TF32, to nearest even, as cvt.rn.tf32.f32 does."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def convolve(case: dict[str, Any], x: Tensor, w: Tensor) -> Tensor:
    names = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    name = names[case["dims"] - 1] if case["transposed"] else f"conv{case['dims']}d"
    return getattr(F, name)(x, w, stride=case["stride"], padding=case["padding"], groups=case["groups"])


def gradients(case: dict[str, Any], dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    n = case["dims"]
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy, x, w, None, [case["stride"]] * n, [case["padding"]] * n, [1] * n, case["transposed"], [0] * n,
        case["groups"], [True, True, False],
    )  # fmt: skip
    return dx, dw


def verdict(found: Tensor, exact: Tensor, tf32: Tensor) -> dict[str, Any]:
    """Which of both it is, with the three distances that say so."""
    found = found.double()
    norm = exact.norm().item() or 1.0
    to_exact = ((found - exact).norm() / norm).item()
    to_tf32 = ((found - tf32).norm() / norm).item()
    apart = ((exact - tf32).norm() / norm).item()
    kind = "fp32" if to_exact < apart / 8 else "tf32" if to_tf32 < apart / 8 else "neither"
    return {"is": kind, "to_exact": to_exact, "to_tf32": to_tf32, "apart": apart}


def kernels_of(call: Any) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return [event.key[:120] for event in seen.key_averages()]


def probe(case: dict[str, Any], names: bool) -> dict[str, Any]:
    n, groups = case["dims"], case["groups"]
    outer, inner = ("cin", "cout") if case["transposed"] else ("cout", "cin")
    shape = (case[outer], case[inner] // groups)
    x = torch.randn(case["batch"], case["cin"], *case["size"], device="cuda")
    w = torch.randn(*shape, *[case["k"]] * n, device="cuda")
    if case["channels_last"]:
        order = torch.channels_last if n == 2 else torch.channels_last_3d
        x, w = x.to(memory_format=order), w.to(memory_format=order)
    judged = min(case["batch"], JUDGED_SAMPLES)
    dy = torch.zeros_like(convolve(case, x, w))
    dy[:judged] = torch.randn_like(dy[:judged])
    sides = {}
    for name, change in (("exact", lambda t: t), ("tf32", rounded)):
        xs, ws, dys = (change(t).double() for t in (x[:judged], w, dy[:judged]))
        sides[name] = (convolve(case, xs, ws), *gradients(case, dys, xs, ws))
    record = dict(case)
    y = convolve(case, x, w)
    dx, dw = gradients(case, dy, x, w)
    for i, (what, found) in enumerate((("forward", y[:judged]), ("dx", dx[:judged]), ("dw", dw))):
        record[what] = verdict(found, sides["exact"][i], sides["tf32"][i])
    if names:
        record["kernels"] = kernels_of(lambda: convolve(case, x, w))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=150, help="stop drawing after so long")
    parser.add_argument("--cases", type=int, default=3000, help="at most so many convolutions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--benchmark", action="store_true", help="with cudnn.benchmark")
    parser.add_argument("--names-every", type=int, default=4, help="of so many, one with its kernels' names")
    parser.add_argument("--out", type=Path, default=Path("probe_tf32.json"))
    arguments = parser.parse_args()
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cudnn.benchmark = arguments.benchmark
    rng = random.Random(arguments.seed)
    torch.manual_seed(arguments.seed)
    device = torch.cuda.get_device_name()
    about = {"device": device, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    about["benchmark"] = arguments.benchmark
    print(about, "seed", arguments.seed, flush=True)
    counts: Counter[str] = Counter()
    end = time.monotonic() + arguments.seconds
    with arguments.out.open("w") as file:
        file.write(json.dumps(about) + "\n")
        for number in range(arguments.cases):
            if time.monotonic() > end:
                break
            case = draw(rng)
            try:
                record = probe(case, number % arguments.names_every == 0)
            except RuntimeError as error:
                record = {**case, "error": str(error).splitlines()[0]}
            counts[record["forward"]["is"] if "forward" in record else "error"] += 1
            file.write(json.dumps(record) + "\n")
    print(sum(counts.values()), "convolutions, forward:", dict(counts))


if __name__ == "__main__":
    main()
