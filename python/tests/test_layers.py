"""A folder of src includes only the folders before it, in the order of the tables of docs/architecture.md."""

import pathlib
import re
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = {".h", ".cc", ".cuh", ".def"}
# A path in an #include line begins in one of these; pointwise.def is embedded under its bare name.
BASES = ("src", "src/cuda", "include", "include/onepass")
FILES_OF_CUDA = "src/cuda/*"

Include = tuple[str, str]  # the including file and the included one, from the root of the repository


def first_column(page: str, heading: str) -> list[str]:
    rows = page[page.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return [name.strip() for row in rows for name in row.split("|")[1].split(",")]


def order_of(page: str) -> list[str]:
    """The layers, lowest first. The files of src/cuda itself are one of them."""
    layers: list[str] = []
    for name in first_column(page, "folder"):
        if name != "src/cuda":
            layers += [name] if name.startswith(("src/", "include/")) else []
            continue
        for part in first_column(page, "folder of src/cuda"):
            layer = f"src/cuda/{part}" if "." not in part else FILES_OF_CUDA
            if layer not in layers and "/" not in part:
                layers.append(layer)
    return layers


def layer_of(path: str, order: list[str]) -> str:
    if pathlib.PurePath(path).parent.as_posix() == "src/cuda":
        return FILES_OF_CUDA
    return next((layer for layer in order if path.startswith(layer + "/")), "")


def resolve(file: pathlib.Path, name: str) -> str:
    for base in (file.parent, *(ROOT / base for base in BASES)):
        if (base / name).is_file():
            return (base / name).relative_to(ROOT).as_posix()
    return name


def includes() -> Iterable[Include]:
    for folder in ("include", "src"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in SOURCES:
                for name in re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE):
                    yield file.relative_to(ROOT).as_posix(), resolve(file, name)


def violations(found: Iterable[Include], order: list[str]) -> list[str]:
    wrong = []
    for file, included in found:
        own, other = layer_of(file, order), layer_of(included, order)
        if not own or not other:
            wrong.append(f"{file} includes {included}: docs/architecture.md has no line for its folder")
        elif order.index(other) > order.index(own):
            wrong.append(f"{file} includes {included}: {other} comes after {own}")
    return wrong


def test_a_folder_includes_only_the_folders_before_it() -> None:
    order = order_of((ROOT / "docs/architecture.md").read_text())
    found = list(includes())
    assert len(found) > 300
    assert not (wrong := violations(found, order)), "\n".join(wrong)


def test_an_include_of_a_later_folder_is_found() -> None:
    page = (
        "| folder | holds |\n| --- | --- |\n| include/onepass | a |\n| src/plan | b |\n| src/cuda | c |\n"
        "| tests, bench | d |\n\n"
        "| folder of src/cuda | holds |\n| --- | --- |\n| runtime | a |\n| source.*, notes.h | b |\n"
        "| tail, gemm | c |\n| gemm/store, hold | d |\n\n"
    )
    order = order_of(page)[:6]
    assert order == [
        "include/onepass",
        "src/plan",
        "src/cuda/runtime",
        FILES_OF_CUDA,
        "src/cuda/tail",
        "src/cuda/gemm",
    ]
    allowed = [("src/cuda/gemm/a.cc", "src/cuda/tail/b.h"), ("src/cuda/source.cc", "src/plan/c.h")]
    assert not violations(allowed, order)
    for file, included in [
        ("src/plan/a.cc", "src/cuda/runtime/b.h"),
        ("src/cuda/runtime/a.cc", "src/cuda/source.h"),
        ("src/cuda/tail/a.cc", "src/cuda/gemm/store/b.h"),
        ("src/plan/a.cc", "unknown.h"),
    ]:
        assert len(violations([(file, included)], order)) == 1
