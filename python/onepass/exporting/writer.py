"""The exported file: the original's text, the CUDA source, and ModelNew with the fused forwards."""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import io
import re
import tokenize
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from onepass._library import __version__
from onepass._match import Chain
from onepass.exporting import (
    batch_norm_code,
    binding,
    block_code,
    host_code,
    launcher,
    tables,
    templates,
)
from onepass.exporting.blocks import Block, Blocks, Request
from onepass.exporting.chains import Fused, Variant
from onepass.exporting.forward_code import forward_text
from onepass.exporting.guards import Guards, base_of
from onepass.exporting.plans import NotExported, Operator


class Writer:
    """Collects blocks while forwards are written, then writes the file."""

    def __init__(self, request: Request, model: nn.Module) -> None:
        self.request = request
        self.model = model
        self.planned = Blocks(request)
        self.blocks: list[Block] = []
        self.functions: list[str] = []
        self.guards = Guards(inspect.getmodule(type(model)))

    def write(self, fused: Sequence[Fused]) -> str:
        """The whole file; raises NotExported where nothing is left to export."""
        if hasattr(self.model, "why"):
            raise NotExported("has the name why, which ModelNew defines")
        forwards = [(one, code) for one in fused if (code := self._forward(one)) is not None]
        if not self.blocks:
            raise NotExported("no kernel of the library takes what could be fused")
        digest = hashlib.sha256(self.request.text.encode())
        operators = list({o.name: o for block in self.blocks for o in block.operators}.values())
        parts = self._sources(operators)
        for part in parts.values():
            digest.update(part.encode())
        namespace = f"onepass_{_identifier(self.request.path)}_{digest.hexdigest()[:8]}"
        groups = tables.groups(operators).items()
        bindings = {key: binding.binding_text(group, namespace) for key, group in groups}
        pieces = [
            _heading(self.request, self.blocks),
            self.request.text.rstrip() + "\n",
            templates.IMPORTS,
            *(_string(f"_{name.upper()}", text) for name, text in parts.items()),
            *(_string(f"_BINDING{tables.upper(key)}", text) for key, text in bindings.items()),
            tables.registration(self.request, namespace, operators, self.blocks),
            tables.runtime(self.planned, self.blocks),
            *tables.original_stages(self.blocks),
            *self._batch_norms(namespace),
            *self.functions,
            self.guards.text(),
            self._classes(forwards),
        ]
        pieces[2:] = [_with_literals(piece) for piece in pieces[2:]]
        _check_names(self.request.text, "\n\n".join(piece for piece in pieces[2:] if piece))
        return "\n\n\n".join(piece.strip("\n") for piece in pieces if piece) + "\n"

    # --- Forwards -----------------------------------------------------------------------------------

    def _forward(self, fused: Fused) -> str | None:
        """The body of the module's forward; None where nothing of it has a kernel."""
        bodies: dict[bool, list[str]] = {}
        for variant in fused.variants:
            body = self._body(variant, fused)
            if body is not None:
                bodies[variant.training] = body
        if not bodies:
            return None
        rewriter = fused.rewriter
        changed = self.guards.function(rewriter.module, rewriter.watched, rewriter.inlined)
        original = f"{self.guards.name(base_of(rewriter.module))}.forward" if fused.path else ""
        return forward_text(fused, bodies, changed, original)

    def _body(self, variant: Variant, fused: Fused) -> list[str] | None:
        graph = variant.traced.graph
        written = False
        replaced: dict[fx.Node, fx.Node] = {}
        for chain in variant.chains:
            block = self.planned.block(chain, fused, replaced)
            if block is None:
                continue
            written = True
            function = self._function(chain, block, replaced)
            block_code.replace(graph, chain, function, replaced)
        if not written:
            return None
        return block_code.statements(graph, self._global)

    def _function(self, chain: Chain, block: Block, replaced: dict[fx.Node, fx.Node]) -> str:
        name = block.name if block.whole or block.whole_train else ""
        tail = block.tail_name if block.tail or block.train else ""
        text = block_code.run_text(chain, block.found, name, tail, replaced)
        for number, known in enumerate(self.functions):
            if known.partition("(")[2] == text.partition("(")[2]:  # the same code for the other mode
                return f"_run_{number + 1}"
        self.functions.append(text.replace("_run_N(", f"_run_{len(self.functions) + 1}(", 1))
        if all(block.name != known.name for known in self.blocks):
            self.blocks.append(block)
        return f"_run_{len(self.functions)}"

    def _global(self, name: str, value: Any) -> str:
        """A name in the file for what traced code refers to."""
        qualified = getattr(value, "__qualname__", getattr(value, "__name__", ""))
        found: Any = inspect.getmodule(type(self.model))
        if getattr(builtins, qualified, None) is value and not hasattr(found, qualified):
            return qualified
        for part in qualified.split("."):
            found = getattr(found, part, None)
        if qualified and found is value:
            return qualified
        raise NotExported(f"its forward uses {qualified or value!r}, which the file does not name")

    # --- The file -----------------------------------------------------------------------------------

    def _sources(self, operators: Sequence[Operator]) -> dict[str, str]:
        parts = {
            "cuda_head": host_code.CUDA_HEAD,
            "device_code": launcher.shared_text(operators, self.planned.planner.files),
            "host_code": host_code.HOST_CODE,
        }
        for key, group in tables.groups(operators).items():
            parts[f"kernels{tables.upper(key).lower()}"] = launcher.kernels_text(group)
            parts[f"launches{tables.upper(key).lower()}"] = launcher.launches_text(group)
        return parts

    def _batch_norms(self, namespace: str) -> list[str]:
        if not any(block.found.has_batch_norm for block in self.blocks):
            return []
        texts = {
            "_BATCH_NORM_KERNEL": batch_norm_code.KERNEL,
            "_BATCH_NORM_LAUNCH": batch_norm_code.LAUNCH,
            "_BATCH_NORM_BINDING": batch_norm_code.binding_text(namespace),
        }
        return [*(_string(name, text) for name, text in texts.items()), batch_norm_code.PYTHON]

    def _classes(self, forwards: Sequence[tuple[Fused, str]]) -> str:
        root = next((code for one, code in forwards if one.path == ""), None)
        inner = [(one, code) for one, code in forwards if one.path]
        codes = list(dict.fromkeys(code for _, code in inner))
        names = {one.path: f"_forward_{codes.index(code) + 1}" for one, code in inner}
        parts = [code.replace("def forward(", f"def _forward_{i + 1}(", 1) for i, code in enumerate(codes)]
        lines = [
            "class ModelNew(Model):",
            f'    """{_class_doc(self.blocks)}"""',
        ]
        if inner:
            lines += ["", "    @functools.wraps(Model.__init__)", "    def __init__(self, *args, **kwargs):"]
            lines.append("        super().__init__(*args, **kwargs)")
        for one, _ in inner:
            cls = self.guards.name(base_of(one.rewriter.module))
            lines.append(f"        _replace_forward(self, {one.path!r}, {cls}, {names[one.path]})")
        if root is not None:
            lines += ["", *(f"    {line}".rstrip() for line in root.splitlines())]
        lines += [
            "",
            "    @staticmethod",
            "    def why():",
            '        """Why calls of this file\'s models ran the original code, and how many did."""',
            "        return dict(_reasons)",
        ]
        helper = [templates.REPLACE_FORWARD.strip("\n")] if inner else []
        return "\n\n\n".join([*helper, *parts, "\n".join(lines)])


def _identifier(path: str) -> str:
    stem = path.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    return re.sub(r"\W", "_", stem)


# --- Pieces of the file -----------------------------------------------------------------------------


def _check_names(original: str, added: str) -> None:
    """What is added must not define a name that the original has."""
    taken = {node.id for node in ast.walk(ast.parse(original)) if isinstance(node, ast.Name)}
    taken |= {getattr(node, "name", "") for node in ast.parse(original).body}
    defined: set[str] = set()
    for node in ast.parse(added).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        defined |= {node.name} if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else set()
    if both := sorted(taken & defined):
        raise NotExported(f"has the name {both[0]}, which the exported file defines")


def _with_literals(piece: str) -> str:
    """torch.fx and repr write inf and nan, which Python does not know: names become expressions."""
    if not re.search(r"\b(inf|nan)\b", piece):
        return piece
    lines = piece.splitlines(keepends=True)
    previous = ""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(piece).readline):
        if token.type == tokenize.NAME and token.string in ("inf", "nan") and previous != ".":
            found.append(token)
        previous = token.string
    for token in reversed(found):
        row, column = token.start
        line = lines[row - 1]
        lines[row - 1] = f'{line[:column]}float("{token.string}"){line[column + 3 :]}'
    return "".join(lines)


def _string(name: str, text: str) -> str:
    if '"""' in text:
        raise NotExported('its source has """ in it')
    return f'{name} = r"""\n{text.rstrip()}\n"""'


def _heading(request: Request, blocks: Sequence[Block]) -> str:
    name = request.path.rpartition("/")[2]
    lines = [
        f"# ModelNew: the Model of {name}, fused for {request.architecture} by onepass {__version__}:",
        f"#   {request.command}",
        "# It needs PyTorch and a CUDA toolkit: load_inline builds the kernels at the first call on a GPU.",
    ]
    for block in blocks:
        for operator in block.operators:
            lines.append(f"#   {operator.name}: {operator.strategy}, {operator.problem.block}")
    return "\n".join(
        [*lines, "#", "# The original file follows, then the kernels, then ModelNew at the end."]
    )


def _class_doc(blocks: Sequence[Block]) -> str:
    count = len(blocks)
    what = "its block" if count == 1 else f"{count} blocks"
    return f"Model with {what} in one pass over memory: same parameters, same results."
