"""python -m onepass optimize FILE.py: fuse a model file, verify it against the original, measure, report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import shlex
import sys

import torch

from onepass._command_line import BAD_REQUEST, GOOD, INTERRUPTED, WRONG, BadRequest, Parser
from onepass.optimizing import console, machine, measure, model_file, page
from onepass.optimizing.model_file import BadModelFile
from onepass.optimizing.study import Options, Study, study


def main(argv: list[str]) -> int:
    """Runs the command; 0 where every result is right, 1 where one is wrong, 2 for a bad request."""
    try:
        arguments = _parser().parse_args(argv)
        device = _device(arguments.device)
        batches = _batches(arguments.batch, len(arguments.files))
        _check_report(arguments.report)
        if arguments.threads is not None:
            torch.set_num_threads(arguments.threads)
        studies, refused = _study_all(arguments, device, batches)
    except BadRequest as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        print("onepass: interrupted, nothing was written", file=sys.stderr)
        return INTERRUPTED
    if studies:
        _publish(studies, arguments, device, shlex.join(["python", "-m", "onepass", "optimize", *argv]))
    return BAD_REQUEST if refused else WRONG if any(found.wrong for found in studies) else GOOD


def _complain(sentence: str) -> int:
    print(f"onepass: {sentence}", file=sys.stderr)
    return BAD_REQUEST


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m onepass optimize", description=__doc__)
    parser.add_argument(
        "files", nargs="+", metavar="FILE.py", help="defines Model, get_inputs, get_init_inputs"
    )
    parser.add_argument("--train", action="store_true", help="also the training step: forward and backward")
    parser.add_argument("--batch", metavar="N", help="cut the inputs to N samples; N,M,... one for each file")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where PyTorch sees one, else cpu")
    parser.add_argument(
        "--threads", type=_positive(int), metavar="N", help="CPU threads, PyTorch's number unless given"
    )
    parser.add_argument(
        "--conv", choices=("fuse", "keep"), default="fuse", help="keep: PyTorch's convolutions stay"
    )
    parser.add_argument(
        "--seconds", type=_positive(float), default=2.0, help="measuring time for each variant"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--report", metavar="PATH", default="report.html", help="where the page goes: report.html"
    )
    where.add_argument("--no-report", dest="report", action="store_const", const=None, help="write no page")
    return parser


def _positive(kind: type) -> type:
    def number(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise ValueError
        return value

    number.__name__ = "positive number"
    return number


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


def _check_report(path: str | None) -> None:
    """Before anything is measured, not after."""
    if path is not None and (not pathlib.Path(path).parent.is_dir() or pathlib.Path(path).is_dir()):
        raise BadRequest(f"--report {path}: there is no such folder, or it is one")


def _study_all(
    arguments: argparse.Namespace, device: torch.device, batches: list[int | None]
) -> tuple[list[Study], bool]:
    """Every file that can be studied; whether one was refused, which is said at once."""
    studies, refused = [], False
    for path, batch in zip(arguments.files, batches, strict=True):
        options = Options(device, batch, arguments.conv, arguments.train, arguments.seconds)
        try:
            file = model_file.load(path)
            with console.progress_bar() as progress:
                studies.append(
                    study(file, options, lambda what, done, n=file.name: progress(f"{n}: {what}", done))
                )
        except BadModelFile as error:
            _complain(str(error))
            refused = True
    return studies, refused


def _publish(studies: list[Study], arguments: argparse.Namespace, device: torch.device, command: str) -> None:
    facts = machine.describe(device)
    method = measure.MEMORY_METHOD[device.type]
    if arguments.json:
        found = [dataclasses.asdict(one) | {"right": not one.wrong} for one in studies]
        print(
            json.dumps({"machine": facts, "command": command, "memory": method, "studies": found}, indent=1)
        )
    else:
        console.print_studies(studies)
    if arguments.report is not None:
        page.write(arguments.report, page.render(studies, facts, command, method))
        print(f"wrote {arguments.report}", file=sys.stderr)
