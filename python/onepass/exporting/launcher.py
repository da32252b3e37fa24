"""The C++ that launches an operator's kernels on plain pointers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from onepass.exporting import device_code
from onepass.exporting.plans import BACKWARD, FORWARD, STATISTICS, Kernel, Operator


def kernel_text(kernel: Kernel) -> str:
    """The kernel's problem, numbers and entry, in a namespace of its own."""
    inner = "namespace onepass {\nusing namespace ::onepass;\n}\n\n"
    text = device_code.specialised(kernel.source)
    # What its structs name from the global namespace is in this one.
    text = re.sub(r"(?<![\w>:])::(?=[A-Z]\w)", f"{kernel.namespace}::", text)
    return f"namespace {kernel.namespace} {{\n{inner}{text}\n\n}}  // namespace {kernel.namespace}\n"


def title_text(operator: Operator) -> str:
    """The block and the plan as comments."""
    lines = operator.explained.rstrip().splitlines()
    chosen = next(i for i, line in enumerate(lines) if line.startswith("* "))
    first = next(i for i in range(chosen, len(lines)) if not lines[i].strip())
    # What depends on the batch, or on the compiler, is in the launch.
    numbers = [
        line.strip()
        for line in lines[first + 2 :]
        if not line.strip().startswith(("blocks:", "lag:", "wave:", "workspace:"))
    ]
    what = {
        FORWARD: "forward",
        STATISTICS: "forward, keeping mean and 1 / deviation of each slab for the backward pass",
        BACKWARD: "backward: all gradients" + ("" if operator.problem.wants_input else " but the input's"),
    }[operator.what]
    text = f"{operator.name}: {what}\n\n{lines[0]}\n\nplan: {operator.strategy}\n" + "\n".join(
        f"  {line}" for line in numbers
    )
    rule = "// " + "=" * 98
    return "\n".join([rule, *(f"// {line}".rstrip() for line in text.splitlines()), rule]) + "\n"


def launch_text(operator: Operator) -> str:
    """The operator on pointers: bytes of its workspace, and its launches."""
    plan, renamed = operator.plan, _resident_names(operator)
    used = plan["workspace_bytes"]
    arguments = ["int64_t batch", "int device"]
    size = [f"int64_t {operator.name}_workspace_bytes({', '.join(arguments)}) {{"]
    size += _constants(operator, [used], renamed)
    size += [f"  return {_renamed(used, renamed)};", "}"]
    texts = [t for s in plan["steps"] for t in (s["blocks"], s["memory"], s["bytes"], *s["words"])]
    body = _constants(operator, texts, renamed)
    for step in plan["steps"]:
        body += _clear(step, renamed) if step["kernel"] < 0 else _launch(operator, step, renamed)
    return "\n".join([*size, "", f"{declaration(operator)} {{", *body, "}"]) + "\n"


def declaration(operator: Operator) -> str:
    """The launching function's declaration."""
    pointers = f"void {operator.name}({', '.join(_pointers(operator))},"
    indent = " " * (len(operator.name) + 6)
    if len(pointers) > 108:
        pointers = f",\n{indent}".join(pointers.removesuffix(",").split(", ")) + ","
    return f"{pointers}\n{indent}char* workspace, int64_t batch, int device, cudaStream_t stream)"


def kernel_objects(kernels: Sequence[Kernel]) -> str:
    """The kernels as the launches know them."""
    lines = ["namespace {", ""]
    for k in kernels:
        function = f"reinterpret_cast<const void*>(&{k.namespace}::{k.name})"
        numbers = f"{k.threads}, {k.cluster}, {k.shared_bytes}, {str(k.cooperative).lower()}"
        lines.append(f'Kernel {k.namespace}_kernel("{k.namespace}",\n    {function}, {numbers});')
    return "\n".join([*lines, "", "}  // namespace"]) + "\n"


def _pointers(operator: Operator) -> list[str]:
    if operator.what == BACKWARD:
        return [
            "const void* input",
            "const void* output_gradient",
            "const float* statistics",
            "const void* const* parameters",
            "void* input_gradient",
            "void* const* parameter_gradients",
        ]
    statistics = ["float* statistics"] if operator.what == STATISTICS else []
    return ["const void* input", "void* output", *statistics, "const void* const* parameters"]


def _resident_names(operator: Operator) -> dict[str, str]:
    """Shorter names for what the library calls by a hash."""
    kernels = list(zip(operator.plan["kernels"], operator.kernels, strict=True))
    if len(kernels) == 1:
        return {kernels[0][0]["resident"]: "resident"}
    return {
        described["resident"]: f"resident_{described['name'].removeprefix('onepass_')}"
        for described, _ in kernels
    }


def _renamed(text: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        text = text.replace(old, new)
    return text


def _constants(operator: Operator, texts: Sequence[str], renamed: Mapping[str, str]) -> list[str]:
    """The constants that these formulas use, and the residents that those use."""
    needed = set(re.findall(r"\w+", " ".join(texts)))
    kept: list[str] = []
    for name, formula in reversed(operator.plan["constants"]):
        if name in needed:
            needed |= set(re.findall(r"\w+", formula))
            kept.append(f"  const int64_t {name} = {_renamed(formula, renamed)};")
    residents = [
        f"  const int64_t {renamed[described['resident']]} = {kernel.namespace}_kernel.resident(device);"
        for described, kernel in zip(operator.plan["kernels"], operator.kernels, strict=True)
        if described["resident"] in needed
    ]
    return residents + kept[::-1]


def _clear(step: dict[str, Any], renamed: Mapping[str, str]) -> list[str]:
    memory, size = (_renamed(step[name], renamed) for name in ("memory", "bytes"))
    return [f'  check(cudaMemsetAsync({memory}, 0, {size}, stream), "clearing memory");']


def _launch(operator: Operator, step: dict[str, Any], renamed: Mapping[str, str]) -> list[str]:
    kernel = operator.kernels[step["kernel"]]
    texts = [f"word({_renamed(text, renamed)})," for text in step["words"]]
    texts = ["0," if text == "word(0)," else text for text in texts]
    short = [len(text) for text in texts if len(text) < 48]
    width = max(short, default=0)
    lines = ["  {", "    const uint64_t words[] = {"]
    for text, name in zip(texts, step["names"], strict=True):
        lines.append(f"        {text.ljust(width)}  // {name}")
    blocks = _renamed(step["blocks"], renamed)
    return [
        *lines,
        "    };",
        f"    static_assert(sizeof words == parameter_bytes(&{kernel.namespace}::{kernel.name}));",
        f"    const int64_t blocks = {blocks};",
        f"    {kernel.namespace}_kernel.launch(words, blocks, device, stream);",
        "  }",
    ]


def kernels_text(operators: Sequence[Operator]) -> str:
    """The kernels of these operators, each with its problem and its numbers."""
    parts: list[str] = []
    written: list[Kernel] = []
    for operator in operators:
        parts.append(title_text(operator))
        new = [kernel for kernel in operator.kernels if kernel not in written]
        parts += [kernel_text(kernel) for kernel in new]
        written += new
    return "\n".join(parts)


def launches_text(operators: Sequence[Operator]) -> str:
    """What puts the kernels of these operators on a stream."""
    kernels = {kernel.namespace: kernel for operator in operators for kernel in operator.kernels}
    return "\n".join([kernel_objects(list(kernels.values())), *(launch_text(o) for o in operators)])


def shared_text(operators: Sequence[Operator], files: Mapping[str, str]) -> str:
    """The device code that the kernels of these operators use."""
    sources = dict.fromkeys(kernel.source for operator in operators for kernel in operator.kernels)
    return device_code.merge(files, sources)
