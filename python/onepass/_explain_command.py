"""What PyTorch's calls of a block run as on this machine, and what the other strategies would cost."""

from __future__ import annotations

import torch

from onepass._command_line import GOOD, BadRequest, Number, Parser, run
from onepass._numerics import POLICIES
from onepass.explain import explain

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}
_LAYOUTS = ("nchw", "nhwc")
_MOST_THREADS = 1024


def main(argv: list[str]) -> int:
    """Prints the plan; exit codes as --help says."""
    return run(_explain, argv)


def _parser() -> Parser:
    parser = Parser("explain", description=__doc__)
    parser.add_argument("block", help='a block, or a problem: "BLOCK @ SIZES [DTYPE] [LAYOUT] [NUMERICS]"')
    parser.add_argument("--input", metavar="SIZES", help="batch x channels x space, as 8x3x32x32")
    parser.add_argument("--dtype", choices=_DTYPES, help="f32 unless given")
    parser.add_argument("--layout", choices=_LAYOUTS, help="nhwc: channels_last; nchw unless given")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 or an architecture: cuda:sm_90a")
    parser.add_argument(
        "--threads",
        type=Number(int, 1, _MOST_THREADS),
        metavar="N",
        help="CPU threads; PyTorch's number unless given",
    )
    parser.add_argument("--strategy", default="", metavar="NAME", help="force this row of the table")
    parser.add_argument("--numerics", choices=POLICIES, help="pytorch unless given")
    parser.add_argument("--backward", action="store_true", help="the gradients instead")
    return parser


def _explain(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    block, _, problem = arguments.block.partition("@")
    options = {name: getattr(arguments, name) for name in ("input", "dtype", "layout", "numerics")}
    for key, word in _words(problem):
        if options[key] not in (None, word):
            raise BadRequest(f"--{key} is {options[key]}, the problem says {word}: give one of them")
        options[key] = word
    if options["input"] is None:
        raise BadRequest('the input has no sizes: give --input 8x3x32x32 or "BLOCK @ 8x3x32x32"')
    sizes = _sizes(options["input"])
    try:
        text = explain(
            block.strip(),
            sizes,
            dtype=_DTYPES[options["dtype"] or "f32"],
            layout=_memory_format(options["layout"], len(sizes)),
            threads=arguments.threads,
            device=arguments.device,
            strategy=arguments.strategy,
            backward=arguments.backward,
            numerics=options["numerics"],
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise BadRequest(str(error).splitlines()[0]) from error
    print(text, end="" if text.endswith("\n") else "\n")
    return GOOD


def _words(problem: str) -> list[tuple[str, str]]:
    """The words of a problem behind its block, with the options that they stand for."""
    first, *others = problem.split() or [""]
    found = [("input", first)] if first else []
    for word in others:
        kinds = [("dtype", _DTYPES), ("layout", _LAYOUTS), ("numerics", POLICIES)]
        kind = next((name for name, words in kinds if word in words), None)
        if kind is None:
            known = ", ".join([*_DTYPES, *_LAYOUTS, *POLICIES])
            raise BadRequest(f"{word}: not a word of a problem here, there are {known}")
        found.append((kind, word))
    return found


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split("x")]
    except ValueError:
        raise BadRequest(f"{text}: must be whole numbers joined by x, as 8x3x32x32") from None


def _memory_format(layout: str | None, rank: int) -> torch.memory_format:
    if layout != "nhwc":
        return torch.contiguous_format
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if rank not in formats:
        raise BadRequest(f"nhwc needs an input of 4 or 5 sizes, this has {rank}")
    return formats[rank]
