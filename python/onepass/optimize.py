"""onepass optimize FILE.py: fuse a model file, verify it against the original, measure, report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
from typing import Any

import torch

from onepass import _output_file
from onepass._command_line import (
    BAD_REQUEST,
    FAILED,
    GOOD,
    WRONG,
    BadRequest,
    Number,
    Parser,
    complain,
    describe,
    output_is_for_results,
    run,
)
from onepass.optimizing import console, machine, measure, model_file, page
from onepass.optimizing.model_file import BadModelFile
from onepass.optimizing.study import Options, Study, study

MOST_THREADS = 1024
MOST_SECONDS = 3600


def main(argv: list[str]) -> int:
    """Runs the command; 0 where every result is right, 1 where one is wrong, else as --help says."""
    return run(_optimize, argv)


def _optimize(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    device = _device(arguments.device)
    batches = _batches(arguments.batch, len(arguments.files))
    if arguments.report is not None:
        _output_file.check("--report", arguments.report, arguments.files)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    with output_is_for_results():
        studies, status = _study_all(arguments, device, batches)
    if studies:
        _publish(studies, arguments, device, shlex.join(["python", "-m", "onepass", "optimize", *argv]))
    return status or (WRONG if any(found.wrong for found in studies) else GOOD)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("optimize", description=__doc__)
    parser.add_argument(
        "files", nargs="+", metavar="FILE.py", help="defines Model, get_inputs, get_init_inputs"
    )
    parser.add_argument("--train", action="store_true", help="also the training step: forward and backward")
    parser.add_argument("--batch", metavar="N", help="cut the inputs to N samples; N,M,... one for each file")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where PyTorch sees one, else cpu")
    parser.add_argument(
        "--threads",
        type=Number(int, 1, MOST_THREADS),
        metavar="N",
        help=f"CPU threads, 1 to {MOST_THREADS}; PyTorch's number unless given",
    )
    parser.add_argument(
        "--conv", choices=("fuse", "keep"), default="fuse", help="keep: PyTorch's convolutions stay"
    )
    parser.add_argument(
        "--seconds",
        type=Number(float, 0, MOST_SECONDS),
        default=2.0,
        help=f"measuring time for each variant, 0 to {MOST_SECONDS}; 2 unless given",
    )
    parser.add_argument("--json", action="store_true", help="print JSON alone, instead of the table")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--report", metavar="PATH", default="report.html", help="where the page goes: report.html"
    )
    where.add_argument("--no-report", dest="report", action="store_const", const=None, help="write no page")
    return parser


def _device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise BadRequest("--device cuda: PyTorch sees no CUDA device on this machine")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _batches(text: str | None, files: int) -> list[int | None]:
    if text is None:
        return [None] * files
    try:
        batches = [int(part) for part in text.split(",")]
    except ValueError:
        batches = [0]
    if min(batches) < 1 or len(batches) not in (1, files):
        raise BadRequest(f"--batch {text}: must be one positive number, or one for each of the {files} files")
    return batches * files if len(batches) == 1 else batches


def _study_all(
    arguments: argparse.Namespace, device: torch.device, batches: list[int | None]
) -> tuple[list[Study], int]:
    """Every file that can be studied, and the exit code of the last that cannot, which is said at once."""
    studies, status = [], GOOD
    for path, batch in zip(arguments.files, batches, strict=True):
        options = Options(device, batch, arguments.conv, arguments.train, arguments.seconds)
        try:
            file = model_file.load(path)
            with console.progress_bar() as progress:
                studies.append(
                    study(file, options, lambda what, done, n=file.name: progress(f"{n}: {what}", done))
                )
        except BadModelFile as error:
            complain(str(error))
            status = BAD_REQUEST
        except Exception as error:
            if sys.flags.dev_mode:
                raise
            complain(f"{path}: an error of onepass itself: {describe(error)}")
            status = FAILED
    return studies, status


def _publish(studies: list[Study], arguments: argparse.Namespace, device: torch.device, command: str) -> None:
    """The page first: the reader of the table may leave before its end."""
    facts = machine.describe(device)
    method = measure.MEMORY_METHOD[device.type]
    try:
        if arguments.report is not None:
            _output_file.publish(arguments.report, page.render(studies, facts, command, method))
            print(f"wrote {arguments.report}", file=sys.stderr)
    finally:
        if arguments.json:
            found = [dataclasses.asdict(one) | {"right": not one.wrong} for one in studies]
            _print_json({"machine": facts, "command": command, "memory": method, "studies": found})
        else:
            console.print_studies(studies)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(_finite(value), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
