"""The library's device code as one readable text: headers merged, unused code removed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

_INCLUDE = re.compile(r'^#include "([^"]+)"$')
_NAMESPACE = re.compile(r"^(?:inline )?namespace ([\w:]+) \{$")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_TABLE = "pointwise.def"
_PARAMETERS = "device/parameters.cuh"  # macros alone
_AFTER_TEMPLATE = r"\n|struct|class|constexpr|using|__device__|static|inline"
_MEMBER_TABLE = re.compile(r"^ *static constexpr ([A-Z]\w*) (\w+) = (\w+)\(\);\n", re.MULTILINE)
_STAGE = re.compile(r"\bpointwise::(\w+)_stage<\d+>(?:::(\w+)\()?")
_SPECIALISATION = re.compile(r"(?://.*\n)*template <.*>\n(?:struct|class) \w+<[^\n]*>(?!::)")
# A nested class of a class template: its declaration, and its definition outside of it.
_FORWARD = re.compile(r"^ +struct \w+;", re.MULTILINE)
_NESTED = re.compile(r"(?:template <[^\n]*>\n)+struct (\w+)<[^\n]*>::(\w+) \{")
_OF_BITS = re.compile(r"^#define (\w+)\(x\) \1<Bits>\(x\)$", re.MULTILINE)  # functions of formulas


@dataclasses.dataclass
class Item:
    """One declaration of a header with the comment above it."""

    file: str
    namespace: str
    text: str
    names: frozenset[str]  # what it declares; nothing for what always stays
    uses: frozenset[str]
    owner: str = ""  # of a nested class that is defined outside of its class


def merge(files: Mapping[str, str], sources: Iterable[str]) -> str:
    """The declarations that the sources use, directly or not, from the headers that they include."""
    sources = list(sources)
    items: list[Item] = []
    seen: set[str] = set()
    openings: dict[str, str] = {}
    for source in sources:
        for name in _included(source):
            _read(name, files, sources, seen, items, openings)
    return _tables_outside(_write(_reachable(_of_known_stages(items), sources), openings))


def _of_known_stages(items: list[Item]) -> list[Item]:
    """Without specialisations for stages that the sources do not have."""
    known = {name for item in items for name in item.names}
    return [
        item
        for item in items
        if not _SPECIALISATION.match(item.text)
        or all(name in known for name in item.uses if name.endswith("_stage"))
    ]


def _tables_outside(text: str) -> str:
    """Tables that classes hold, as variables of the GPU: NVRTC has all variables there, NVCC has none."""
    while found := _MEMBER_TABLE.search(text):
        name, function = found[2], found[3]
        end = text.index("\n};\n", found.start()) + len("\n};\n")
        outside = f"template <class Owner>\n__device__ constexpr auto {name}_of = Owner::{function}();\n"
        text = text[: found.start()] + text[found.end() : end] + outside + text[end:]
        text = re.sub(rf"\b(\w+)::{name}\b", rf"{name}_of<\1>", text)
    return text


def shared_names(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Names that several headers declare: kernels of theirs cannot stand in one file."""
    declared: dict[str, set[str]] = {}
    for file, text in files.items():
        body = _expand_parameters(text.partition("#pragma once\n")[2])
        lines = [line for line in body.splitlines() if not _INCLUDE.match(line.strip())]
        for item in _items(file, lines):
            for name in item.names:
                scope = f"{item.namespace}::{item.owner}" if item.owner else item.namespace
                declared.setdefault(f"{scope}::{name}", set()).add(file)
    return {name: found for name, found in declared.items() if len(found) > 1}


def specialised(source: str) -> str:
    """A kernel's own text: its problem, its numbers and the kernel."""
    lines = [line for line in source.splitlines() if not _INCLUDE.match(line)]
    return "\n".join(lines).strip().replace('extern "C" __global__', "__global__")


def _included(text: str) -> list[str]:
    return [match.group(1) for line in text.splitlines() if (match := _INCLUDE.match(line.strip()))]


# --- Headers as declarations ------------------------------------------------------------------------


def _read(
    name: str,
    files: Mapping[str, str],
    sources: list[str],
    seen: set[str],
    items: list[Item],
    openings: dict[str, str],
) -> None:
    if name in seen:
        return
    seen.add(name)
    text = files[name]
    if name == _PARAMETERS:
        for inner in _included(text):
            _read(inner, files, sources, seen, items, openings)
        return
    opening, _, body = text.partition("#pragma once\n")
    openings[name] = opening.rstrip()
    body = _expand_parameters(body)
    if _TABLE in _included(body):
        body = _expand_table(body, files[_TABLE], sources)
    for inner in _included(body):
        _read(inner, files, sources, seen, items, openings)
    lines = [line for line in body.splitlines() if not _INCLUDE.match(line.strip())]
    items.extend(_items(name, lines))


def _items(file: str, lines: list[str]) -> Iterable[Item]:
    """Declarations begin and end at the beginning of a line: the sources are formatted."""
    namespaces: list[str] = []
    chunk: list[str] = []
    depth = 0
    for line in lines:
        if depth == 0 and (match := _NAMESPACE.match(line)):
            yield from _item(file, namespaces, chunk)
            chunk = []
            namespaces.append(match.group(1))
            continue
        # A short one may end without saying so.
        if depth == 0 and (line.startswith("}  // namespace") or line == "}"):
            yield from _item(file, namespaces, chunk)
            chunk = []
            namespaces.pop()
            continue
        if depth == 0 and line.startswith("#"):  # a condition of the preprocessor
            yield from _item(file, namespaces, chunk)
            chunk = []
            # NVCC also reads device code for the host, where templates must find what they name.
            line = re.sub(r"^#if (__CUDA_ARCH__ >= \d+)$", r"#if !defined(__CUDA_ARCH__) || \1", line)
            yield Item(file, "::".join(namespaces), line, frozenset(), frozenset())
            continue
        chunk.append(line)
        code = re.sub(r'"(?:\\.|[^"\\])*"|//.*', "", line)
        depth += sum(code.count(c) for c in "{(") - sum(code.count(c) for c in "})")
        ends = code.rstrip().endswith((";", "}"))
        if depth == 0 and ends and not _continues(chunk):
            yield from _item(file, namespaces, chunk)
            chunk = []
    yield from _item(file, namespaces, chunk)


def _continues(chunk: list[str]) -> bool:
    """Whether the declaration goes on: a comment ended in a semicolon, say."""
    return all(not line.strip() or line.strip().startswith("//") for line in chunk)


def _item(file: str, namespaces: list[str], chunk: list[str]) -> Iterable[Item]:
    text = "\n".join(chunk).strip("\n")
    code = re.sub(r"//.*", "", text)
    if not text.strip():
        return
    if not code.strip():  # a comment about what follows
        yield Item(file, "::".join(namespaces), text, frozenset(), frozenset())
        return
    uses = frozenset(_IDENTIFIER.findall(_FORWARD.sub("", code)))
    if match := _NESTED.match(code.strip()):
        yield Item(file, "::".join(namespaces), text, frozenset([match[2]]), uses, match[1])
        return
    yield Item(file, "::".join(namespaces), text, _declared(code), uses)


def _declared(code: str) -> frozenset[str]:
    head = re.sub(r"^\s*template\s*<.*?>\s*(?=" + _AFTER_TEMPLATE + ")", "", code, count=1, flags=re.DOTALL)
    head = head.strip()
    if match := re.match(r"(?:struct|class|union)\s+(?:alignas\(\w+\)\s*)?(\w+)", head):
        return frozenset([match.group(1)])
    if match := re.match(r"enum(?:\s+(?:class|struct))?\s+(\w+)[^{]*\{(.*)\}", head, re.DOTALL):
        enumerators = re.findall(r"(\w+)\s*(?:=[^,]*)?(?:,|$)", match.group(2).strip())
        return frozenset([match.group(1), *enumerators])
    if match := re.match(r"using\s+(\w+)\s*=", head):
        return frozenset([match.group(1)])
    before = re.split(r"[({=]", re.sub(r"__launch_bounds__\([^)]*\)", "", head), maxsplit=1)[0]
    before = re.sub(r"<[^<>]*>\s*$", "", before.rstrip())
    words = _IDENTIFIER.findall(before)
    return frozenset(words[-1:])


def _reachable(items: list[Item], sources: list[str]) -> list[Item]:
    needed = {word for source in sources for word in _IDENTIFIER.findall(re.sub(r"//.*", "", source))}
    kept: set[int] = set()
    grew = True
    while grew:
        grew = False
        for i, item in enumerate(items):
            if i not in kept and item.names & needed:
                kept.add(i)
                needed |= item.uses
                grew = True
    return [item for i, item in enumerate(items) if i in kept or not item.names]


def _write(items: list[Item], openings: dict[str, str]) -> str:
    """Items under their namespaces, each file's opening comment above its first."""
    items = _without_empty_conditions(items)
    parts: list[str] = []
    namespace, file = "", ""
    for item in items:
        if parts and item.file == file and _are_one_list(parts[-1], item):
            parts[-1] += "\n" + item.text
            continue
        if item.namespace != namespace:
            if namespace:
                parts.append(f"}}  // namespace {namespace}")
            if item.namespace:
                parts.append(_heading(item, file, openings) + f"namespace {item.namespace} {{")
                file = item.file
            namespace = item.namespace
        parts.append(_heading(item, file, openings) + item.text)
        file = item.file
    if namespace:
        parts.append(f"}}  // namespace {namespace}")
    return "\n\n".join(parts) + "\n"


def _are_one_list(before: str, item: Item) -> bool:
    """Whether a declaration of one line follows another: no empty line between them."""
    return all(re.match(r"(using \w+ = .*;|#\w+.*)$", text) for text in (before.splitlines()[-1], item.text))


def _heading(item: Item, file: str, openings: dict[str, str]) -> str:
    if item.file == file:
        return ""
    rule = "// " + "-" * 98 + "\n"
    return rule + openings[item.file] + "\n\n"


def _without_empty_conditions(items: list[Item]) -> list[Item]:
    """Leaves out comments and conditions of the preprocessor around which nothing was kept."""
    files = {item.file for item in items if item.names}
    items = [item for item in items if item.file in files]
    changed = True
    while changed:
        changed = False
        for i in range(len(items) - 1):
            first, second = items[i].text, items[i + 1].text
            if first.startswith("#if") and second.startswith("#endif"):
                del items[i : i + 2]
                changed = True
                break
            if first.startswith("#define") and second == f"#undef {first.split()[1].split('(')[0]}":
                del items[i : i + 2]
                changed = True
                break
    return items


def _expand_parameters(body: str) -> str:
    """Structs of parameters as kernels see them: the macros of device/parameters.cuh expanded."""
    body = re.sub(
        r"^ONEPASS_COUNTED_PARAMETERS\((\w+)\)", r"template <int Count>\nstruct \1", body, flags=re.MULTILINE
    )
    body = re.sub(r"^ONEPASS_PARAMETERS\((\w+)\)", r"struct \1", body, flags=re.MULTILINE)
    body = re.sub(r"^(  )ONEPASS_WORD\((.+), (\w+)\);", r"\1\2 \3;", body, flags=re.MULTILINE)
    return re.sub(
        r"^(  )ONEPASS_WORDS\((.+), (\w+)\);", r"\1\2 \3[Count > 0 ? Count : 1];", body, flags=re.MULTILINE
    )


# --- The table of activations -----------------------------------------------------------------------


def _expand_table(body: str, table: str, sources: list[str]) -> str:
    """The stages that the sources call, with the functions they call, in place of the table."""
    used: dict[str, set[str]] = {}
    for source in sources:
        for stage, function in _STAGE.findall(source):
            used.setdefault(stage, set()).update([function] if function else [])
    rows = dict(_rows(table))
    of_bits = _OF_BITS.findall(body)
    structs = [_struct(name, rows[name], functions, of_bits) for name, functions in used.items()]
    lines, result, skipping = body.splitlines(), [], False
    macros = "|".join(("K", "ONEPASS_POINTWISE", *of_bits))
    for line in lines:
        if skipping or re.match(rf"#(?:define|undef) (?:{macros})\b", line):
            skipping = line.endswith("\\")
            continue
        result.append("\n".join(structs) if _included(line) == [_TABLE] else line)
    return "\n".join(result)


def _rows(table: str) -> Iterable[tuple[str, list[str]]]:
    code = re.sub(r"//.*", "", table)
    for match in re.finditer(r"ONEPASS_POINTWISE\(", code):
        columns, depth, begin, at = [], 0, match.end(), match.end()
        while depth >= 0:
            c = code[at]
            depth += c == "("
            depth -= c == ")"
            if (c == "," and depth == 0) or depth < 0:
                columns.append(" ".join(code[begin:at].split()))
                begin = at + 1
            at += 1
        yield columns[0], columns


def _struct(name: str, columns: list[str], functions: set[str], of_bits: list[str]) -> str:
    formulas = dict(zip(("value", "gradient", "argument_gradient"), columns[5:8], strict=True))
    lines = ["template <int Bits>", f"struct {name}_stage {{"]
    for function, formula in formulas.items():
        if function not in functions:
            continue
        given = "" if function == "value" else ", float g"
        kind = "X" if function == "gradient" else "float"
        arguments = f"{kind} x, float p, float a, float b{given}"
        lines += ["  template <class X>"] if function == "gradient" else []
        lines += [
            f"  static __device__ __forceinline__ float {function}({arguments}) {{",
            f"    return {_with_literals(_with_bits(formula, of_bits))};",
            "  }",
        ]
    return "\n".join([*lines, "};\n"])


def _with_bits(formula: str, functions: list[str]) -> str:
    return re.sub(rf"\b({'|'.join(functions)})\(", r"\1<Bits>(", formula)


def _with_literals(formula: str) -> str:
    formula = re.sub(r"(\w)\* ", r"\1 * ", formula)
    formula = re.sub(r"\bK\((-?[\d.]+)\)", r"\1f", formula)
    return re.sub(r"\bK\(", "static_cast<float>(", formula)
