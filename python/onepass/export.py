"""python -m onepass export FILE.py -o NEW.py: a fused model as one file without onepass."""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

import torch

from onepass import _library
from onepass._command_line import BAD_REQUEST, GOOD, WRONG, BadRequest, Parser
from onepass.exporting import chains, verify
from onepass.exporting.writer import NotExported, Request, Writer
from onepass.optimizing import model_file
from onepass.optimizing.model_file import BadModelFile

DEFAULT_ARCHITECTURE = "sm_90a"


def main(argv: list[str]) -> int:
    """Runs the command; 0 where the file was written, 1 where it would be wrong, 2 for a bad request."""
    try:
        arguments = _parser().parse_args(argv)
        output = pathlib.Path(arguments.output)
        _check_output(output)
        architecture = arguments.arch or _architecture()
        verifies = _verifies(arguments.verify, architecture)
        text = export(
            arguments.file, architecture, arguments.conv, arguments.train, output.name, arguments.numerics
        )
        if verifies:
            if not _verified(text, arguments, output):
                return WRONG
        else:
            _publish(text, output)
    except (BadRequest, BadModelFile, NotExported) as error:
        print(f"onepass: {error}", file=sys.stderr)
        return BAD_REQUEST
    print(f"wrote {output}", file=sys.stderr)
    return GOOD


def export(
    path: str, architecture: str, conv: str, train: bool, output: str, numerics: str = "pytorch"
) -> str:
    """The text of the exported file; raises NotExported or BadModelFile with one sentence."""
    if not _library.available():
        raise NotExported(f"onepass cannot run: {_library.unavailable_reason()}")
    file = model_file.load(path)
    text = pathlib.Path(path).read_text(encoding="utf-8")
    _check_alone(path, text)
    model = file.build(torch.device("cpu"))
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
    try:
        return Writer(Request(path, text, architecture, train, numerics, command), model).write(fused)
    except NotExported as error:
        raise NotExported(f"{path}: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m onepass export", description=__doc__)
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


def _check_output(path: pathlib.Path) -> None:
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise BadRequest(f"-o {path}: there is no such folder, or it is one")
    if path.suffix != ".py":
        raise BadRequest(f"-o {path}: must end in .py")


def _first_reason(reasons: dict[str, str]) -> str:
    return "".join(f" ({name}: {reason})" for name, reason in list(reasons.items())[:1])


def _check_alone(path: str, text: str) -> None:
    """The file will be copied into another: it must load without its neighbours."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "model_alone.py"
        copy.write_text(text, encoding="utf-8")
        run = subprocess.run(
            [sys.executable, "-c", "import model_alone; model_alone.Model"],
            cwd=folder,
            capture_output=True,
            text=True,
        )
    if run.returncode != 0:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotExported(f"{path}: does not load without the files beside it: {last}")


def _publish(text: str, output: pathlib.Path) -> None:
    """Writes beside the place and renames: a half-written file is never left behind."""
    handle, name = tempfile.mkstemp(dir=output.resolve().parent, prefix=f".{output.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, output)
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _verifies(asked: bool | None, architecture: str) -> bool:
    """Whether the file is built and compared; only the GPU that it is for can do that."""
    if asked and not torch.cuda.is_available():
        raise BadRequest("--verify: PyTorch sees no CUDA device on this machine")
    present = torch.cuda.is_available() and _architecture() == architecture
    if asked and not present:
        raise BadRequest(f"--verify: the file is for {architecture}, the GPU here is {_architecture()}")
    return present if asked is None else asked


def _verified(text: str, arguments: argparse.Namespace, output: pathlib.Path) -> bool:
    """Builds and compares in a fresh process; writes the file where it is right."""
    with tempfile.TemporaryDirectory() as folder:
        new = pathlib.Path(folder) / output.name
        new.write_text(text, encoding="utf-8")
        good, said = verify.run(pathlib.Path(arguments.file), new, arguments.train)
    print(said)
    if good:
        _publish(text, output)
    else:
        print(f"onepass: {output} was not written: the exported model is wrong", file=sys.stderr)
    return good
