"""onepass export FILE.py -o NEW.py: a fused model as one file without onepass."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile

import torch

from onepass import _library, _output_file
from onepass._command_line import GOOD, WRONG, BadRequest, Parser, complain, output_is_for_results, run
from onepass.exporting import chains, summary, verify
from onepass.exporting.blocks import Request
from onepass.exporting.plans import NotExported
from onepass.exporting.writer import Writer
from onepass.optimizing import model_file
from onepass.optimizing.model_file import BadModelFile

DEFAULT_ARCHITECTURE = "sm_90a"


@dataclasses.dataclass(frozen=True)
class Exported:
    """The text of an exported file, and what it has fused, in lines for people."""

    text: str
    summary: list[str]


def main(argv: list[str]) -> int:
    """Runs the command; 0 where the file was written, 1 where it would be wrong, else as --help says."""
    return run(_export, argv)


def _export(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    if not arguments.output.endswith(".py"):
        raise BadRequest(f"-o {arguments.output}: must end in .py")
    _output_file.check("-o", arguments.output, [arguments.file])
    architecture = arguments.arch or _architecture()
    why_not = _why_not_verified(arguments.verify, architecture)
    name = pathlib.Path(arguments.output).name
    try:
        with output_is_for_results():
            found = exported(
                arguments.file, architecture, arguments.conv, arguments.train, name, arguments.numerics
            )
    except (BadModelFile, NotExported) as error:
        raise BadRequest(str(error)) from error
    if not arguments.arch and not torch.cuda.is_available():
        print(f"PyTorch sees no GPU: the file is for {architecture} (--arch names another)")
    print("\n".join(found.summary))
    good, said = _judged(found.text, arguments, why_not)
    print(said)
    if not good:
        complain(f"{arguments.output} was not written: the exported model is wrong")
        return WRONG
    _output_file.publish(arguments.output, found.text)
    print(f"wrote {arguments.output}", file=sys.stderr)
    return GOOD


def export(
    path: str, architecture: str, conv: str, train: bool, output: str, numerics: str = "pytorch"
) -> str:
    """The text of the exported file; raises NotExported or BadModelFile with one sentence."""
    return exported(path, architecture, conv, train, output, numerics).text


def exported(path: str, architecture: str, conv: str, train: bool, output: str, numerics: str) -> Exported:
    """The same with what was fused and what not."""
    if not _library.available():
        raise NotExported(f"onepass cannot run: {_library.unavailable_reason()}")
    file = model_file.load(path)
    _check_class(path, file.module.Model)
    _check_alone(path)
    model = file.build(torch.device("cpu"))
    if type(model) is not file.module.Model:
        raise NotExported(
            f"{path}: Model makes a {type(model).__name__}, must make a Model, for ModelNew derives from it"
        )
    fused, reasons = chains.find(file, model, conv)
    if not fused:
        raise NotExported(f"{path}: nothing to fuse{_first_reason(reasons)}")
    options = [
        *(["--train"] if train else []),
        *(["--conv", conv] if conv != "fuse" else []),
        *(["--numerics", numerics] if numerics != "pytorch" else []),
        *(["--arch", architecture]),
    ]
    name = pathlib.Path(path).name
    command = shlex.join(["python", "-m", "onepass", "export", name, "-o", output, *options])
    writer = Writer(Request(path, file.text, architecture, train, numerics, command), model)
    try:
        text = writer.write(fused)
    except NotExported as error:
        raise NotExported(f"{path}: {error}{_first_reason(writer.planned.left_out)}") from None
    return Exported(text, list(summary.lines(writer, reasons)))


def _parser() -> argparse.ArgumentParser:
    parser = Parser("export", description=__doc__)
    parser.add_argument("file", metavar="FILE.py", help="defines Model, get_inputs, get_init_inputs")
    parser.add_argument("-o", "--output", metavar="NEW.py", required=True, help="the file to write")
    parser.add_argument("--train", action="store_true", help="also the backward pass")
    parser.add_argument(
        "--conv", choices=("fuse", "keep"), default="fuse", help="keep: PyTorch's convolutions stay"
    )
    parser.add_argument(
        "--numerics",
        choices=("pytorch", "strict", "fast"),
        default="pytorch",
        help="pytorch: as PyTorch computes each convolution; strict: fp32 throughout; fast: coarser",
    )
    parser.add_argument(
        "--arch", metavar="sm_XX", help=f"the GPU to write for: the one present, else {DEFAULT_ARCHITECTURE}"
    )
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help="build it in a fresh process, compare with the original, time both: default with a GPU",
    )
    return parser


def _architecture() -> str:
    """That of the GPU PyTorch sees."""
    if not torch.cuda.is_available() or torch.ops.onepass.cuda_unavailable_reason():
        return DEFAULT_ARCHITECTURE
    return torch.ops.onepass.cuda_describe_device(torch.cuda.current_device()).split(", ")[1]


def _check_class(path: str, model: object) -> None:
    if not (isinstance(model, type) and issubclass(model, torch.nn.Module)):
        raise NotExported(
            f"{path}: Model is a {type(model).__name__}, must be a class derived from torch.nn.Module, "
            "for ModelNew derives from it"
        )


def _first_reason(reasons: dict[str, str]) -> str:
    return "".join(f" ({name}: {reason})" for name, reason in list(reasons.items())[:1])


def _check_alone(path: str) -> None:
    """The file will be copied into another: it must load without its neighbours."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "model_alone.py"
        shutil.copy(path, copy)
        process = subprocess.run(
            [sys.executable, "-c", "import model_alone; model_alone.Model"],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
        )
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotExported(f"{path}: does not load without the files beside it: {last}")


def _why_not_verified(asked: bool | None, architecture: str) -> str:
    """Why the file is not built and compared; "" where it is, which only the GPU that it is for can do."""
    if not torch.cuda.is_available():
        why = "PyTorch sees no CUDA device on this machine"
    elif (here := _architecture()) != architecture:
        why = f"the file is for {architecture}, the GPU here is {here}"
    else:
        return "" if asked is not False else "--no-verify"
    if asked:
        raise BadRequest(f"--verify: {why}")
    return why


def _judged(text: str, arguments: argparse.Namespace, why_not: str) -> tuple[bool, str]:
    """Whether the file may be written, and how far that was looked at: in a fresh process without onepass."""
    original = pathlib.Path(arguments.file)
    if not why_not:
        good, said = verify.run(original, text, arguments.train)
        return good, f"{said}\nverified on this GPU against the original" if good else said
    if wrong := verify.why_not_importable(original, text):
        return False, f"not verified: {why_not}; the exported file cannot be imported: {wrong}"
    return True, f"not verified: {why_not}; imported, and ModelNew made, in a process without onepass"
