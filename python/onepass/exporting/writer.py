"""The exported file: the original's text, the CUDA source, and ModelNew with the fused forwards."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import io
import json
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from onepass import __version__
from onepass._match import Chain
from onepass._trace import is_variadic, parameters_of
from onepass.exporting import binding, block_code, host_code, launcher, templates
from onepass.exporting.chains import Found, Fused, Variant, read
from onepass.exporting.guards import Guards, base_of
from onepass.exporting.launcher import BACKWARD, FORWARD, STATISTICS, NotExported, Operator, Planner, Problem

# What a convolution of f32 tensors is planned for, by --numerics: the name in the file, and the plan's words.
_MODES = {
    "pytorch": {"tf32": "tf32", "tf32_away": "tf32_away", "near_f32": "near_f32", "f32": "f32"},
    "strict": {"f32": "f32 strict"},
    "fast": {"tf32": "tf32 fast"},
}
_WORDS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_TRAIN, _BACKWARD = "_train", "_backward"  # a training step's operators, behind the block's name


@dataclasses.dataclass
class Block:
    """A chain of the model with its operators."""

    name: str
    found: Found
    whole: dict[str, Operator]  # with the convolution, by mode
    whole_train: dict[str, tuple[Operator, Operator]]  # forward and backward of the same
    tail: Operator | None  # what follows PyTorch's convolution, or a block without one
    train: tuple[Operator, Operator] | None
    stages: str  # the original's code of the whole chain, as a function's parameters and body
    tail_stages: str  # of what follows the convolution
    convolution: str  # of the convolution alone; "" where there is no choice of precision

    @property
    def tail_name(self) -> str:
        """What the file calls the part after PyTorch's convolution; a block without one is its own."""
        return f"{self.name}_tail" if self.found.description.conv is not None else self.name

    @property
    def operators(self) -> list[Operator]:
        """All of them."""
        tail = [self.tail] if self.tail else []
        trained = [operator for pair in self.whole_train.values() for operator in pair]
        return [*self.whole.values(), *trained, *tail, *(self.train or ())]


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asked for."""

    path: str
    text: str  # of the original file
    architecture: str
    train: bool
    numerics: str
    command: str


class Writer:
    """Collects blocks while forwards are written, then writes the file."""

    def __init__(self, request: Request, model: nn.Module) -> None:
        self.request = request
        self.model = model
        self.planner = Planner(request.architecture)
        self.blocks: list[Block] = []
        self.by_problem: dict[Any, Block] = {}
        self.functions: list[str] = []
        self.guards = Guards(inspect.getmodule(type(model)))
        self.left_out: dict[str, str] = {}  # chains without a kernel, and why

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
        groups = _groups(operators)
        bindings = {key: binding.binding_text(group, namespace) for key, group in groups.items()}
        pieces = [
            _heading(self.request, self.blocks),
            self.request.text.rstrip() + "\n",
            templates.IMPORTS,
            *(_string(f"_{name.upper()}", text) for name, text in parts.items()),
            *(_string(f"_BINDING{_upper(key)}", text) for key, text in bindings.items()),
            self._registration(namespace, groups, operators),
            self._runtime(),
            *self._original_stages(),
            *self.functions,
            self.guards.text(),
            self._classes(forwards),
        ]
        pieces[2:] = [_with_literals(piece) for piece in pieces[2:]]
        _check_names(self.request.text, "\n\n".join(piece for piece in pieces[2:] if piece))
        return "\n\n\n".join(piece.strip("\n") for piece in pieces if piece) + "\n"

    # --- Blocks -------------------------------------------------------------------------------------

    def _block(self, chain: Chain, fused: Fused, replaced: dict[fx.Node, fx.Node]) -> Block | None:
        found = read(chain, fused)
        given = not fused.path and chain.externals[0].op == "placeholder"  # whose gradient is rarely wanted
        text = " | ".join(stage.text for stage in chain.written)
        if found is None or found.dtype not in _WORDS:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _WORDS)
            kind = f"its type is {found.dtype}" if found else "its tensors have other shapes or mixed types"
            self.left_out[text] = f"{kind}, kernels take the block language's in {known}"
            return None
        root = fused.rewriter.module
        is_conv = found.description.conv is not None
        codes = (
            block_code.stages_text(chain, found, root, replaced, tail=False),
            block_code.stages_text(chain, found, root, replaced, tail=True) if is_conv and found.tail else "",
            block_code.convolution_text(chain, found, root)
            if is_conv and found.dtype == torch.float32
            else "",
        )
        key = (found.block, found.sizes, found.dtype, found.layout, found.parameters, given, codes)
        if key not in self.by_problem:
            block = self._plan(found, f"block_{len(self.by_problem) + 1}", given, codes)
            if not block.operators:
                self.left_out[text] = "no kernel is predicted to be faster than PyTorch's"
                return None
            self.by_problem[key] = block
        return dataclasses.replace(self.by_problem[key], found=found)

    def modes(self, dtype: torch.dtype) -> dict[str, str]:
        """What the file calls the precisions of a convolution of this type, and the words of their plans."""
        numerics = self.request.numerics
        if dtype == torch.float32:
            return _MODES[numerics]
        return {"": _WORDS[dtype] + (" strict" if numerics == "strict" else "")}

    def _plan(self, found: Found, name: str, given: bool, codes: tuple[str, str, str]) -> Block:
        description, modes = found.description, self.modes(found.dtype)
        whole: dict[str, Operator] = {}
        whole_train: dict[str, tuple[Operator, Operator]] = {}
        if description.conv is not None:
            for mode, words in modes.items():
                problem = _problem(found, description.text, words, whole=True)
                own = f"{name}_{mode}" if mode else name
                if self.planner.is_worth_fusing(problem):
                    whole[mode] = self.planner.operator(own, FORWARD, problem)
                problem = dataclasses.replace(problem, wants_input=not given)
                if self.request.train and self.planner.is_worth_training(problem):
                    whole_train[mode] = self._pair(own, problem)
            _share(whole, lambda operator: (operator,))
            _share(whole_train, lambda pair: pair)
        text = description.tail if description.conv is not None else description.text
        if not text or (description.conv is not None and not found.tail):
            return Block(name, found, whole, whole_train, None, None, *codes)
        suffix = "_tail" if description.conv is not None else ""
        words = _WORDS[found.dtype] + (" strict" if self.request.numerics == "strict" else "")
        problem = _problem(found, text, words, whole=False)
        tail = train = None
        # PyTorch's convolution may round as no kernel here does.
        if len(whole) < len(modes) or len(modes) > 1:
            tail = self.planner.operator(name + suffix, FORWARD, problem)
        if self.request.train:
            train = self._pair(name + suffix, problem)
        return Block(name, found, whole, whole_train, tail, train, *codes)

    def _pair(self, name: str, problem: Problem) -> tuple[Operator, Operator]:
        """A training step's two operators."""
        forward = self.planner.operator(name + _TRAIN, STATISTICS, problem)
        return forward, self.planner.operator(name + _BACKWARD, BACKWARD, problem)

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
        return _forward_text(fused, bodies, changed, original)

    def _body(self, variant: Variant, fused: Fused) -> list[str] | None:
        graph = variant.traced.graph
        written = False
        replaced: dict[fx.Node, fx.Node] = {}
        for chain in variant.chains:
            block = self._block(chain, fused, replaced)
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
        for part in qualified.split("."):
            found = getattr(found, part, None)
        if qualified and found is value:
            return qualified
        raise NotExported(f"its forward uses {qualified or value!r}, which the file does not name")

    # --- The file -----------------------------------------------------------------------------------

    def _sources(self, operators: Sequence[Operator]) -> dict[str, str]:
        parts = {
            "cuda_head": host_code.CUDA_HEAD,
            "device_code": launcher.shared_text(operators, self.planner.files),
            "host_code": host_code.HOST_CODE,
        }
        for key, group in _groups(operators).items():
            parts[f"kernels{_upper(key).lower()}"] = launcher.kernels_text(group)
            parts[f"launches{_upper(key).lower()}"] = launcher.launches_text(group)
        return parts

    def _registration(
        self, namespace: str, groups: dict[str, list[Operator]], operators: Sequence[Operator]
    ) -> str:
        lines = [
            f'_NAMESPACE = "{namespace}"',
            "# What each extension is built of, when one of its operators is first called.",
            "_EXTENSIONS = {",
        ]
        for key in groups:
            own = f"_KERNELS{_upper(key)}, _HOST_CODE, _LAUNCHES{_upper(key)}"
            lines.append(
                f'    "{key or "common"}": (_BINDING{_upper(key)}, [_CUDA_HEAD, _DEVICE_CODE, {own}]),'
            )
        lines += ["}", "_OPERATORS = {  # name: (extension, schema)"]
        for key, group in groups.items():
            lines += [f'    "{o.name}": ("{key or "common"}", "{binding.schema(o)}"),' for o in group]
        lines += [
            "}",
            "# What each block takes: type, sizes after the batch, order in memory; and of its parameters.",
            "_FITTING = {",
            *(_fitting(name, operator.problem) for name, operator in self._by_part().items()),
            "}",
        ]
        most = _limits(operators, lambda operator: operator.most_samples, min)
        lines += [f"_MOST_SAMPLES = {most!r}  # of those that do not take any batch"]
        least = _limits(operators, lambda operator: operator.least_multiprocessors, max)
        lines += [f"_LEAST_MULTIPROCESSORS = {least!r}  # of those that do not run on any such GPU"]
        lines += [f'_NVCC = ["-O3", "{_gencode(self.request.architecture)}"]', "", ""]
        fakes = [_fake(o) for o in operators]
        return "\n".join(lines) + templates.REGISTRATION.replace("@FAKES@", "\n\n\n".join(fakes))

    def _by_part(self) -> dict[str, Operator]:
        """One operator for each part of the file's blocks: the whole, or what follows the convolution."""
        found: dict[str, Operator] = {}
        for block in self.blocks:
            whole = [*block.whole.values(), *(pair[0] for pair in block.whole_train.values())]
            tail = [*([block.tail] if block.tail else []), *(block.train or ())[:1]]
            found |= {block.name: whole[0]} if whole else {}
            found |= {block.tail_name: tail[0]} if tail else {}
        return found

    def _runtime(self) -> str:
        """When kernels run, and the tables that it is decided by."""
        lines = [
            '# For each part of a block, by the precision of its convolution ("": there is one): the',
            "# operator, those of a training step, and whether they give the input's gradient.",
            "_WAYS = {",
        ]
        for block in self.blocks:
            ways = {
                mode: (block.whole.get(mode), block.whole_train.get(mode))
                for mode in self.modes(block.found.dtype)
                if mode in block.whole or mode in block.whole_train
            }
            lines += [_ways(block.name, ways)] if ways else []
            if block.tail or block.train:
                lines.append(_ways(block.tail_name, {"": (block.tail, block.train)}))
        trained = sorted(block.name for block in self.blocks if block.train and block.tail_name != block.name)
        lines += [
            "}",
            f"_TRAINED_TAILS = {trained!r}  # of these blocks the part after PyTorch's convolution",
        ]
        asks = [block for block in self.blocks if block.convolution and (block.whole or block.whole_train)]
        for number, block in enumerate(asks):
            lines += ["", "", f"def _convolve_{number + 1}{block.convolution}".rstrip()]
        named = [f'"{block.name}": _convolve_{number + 1}' for number, block in enumerate(asks)]
        batches = {block.name: block.found.sizes[0] for block in asks}
        transposed = {block.name: block.found.description.conv.transposed for block in asks}
        lines += ["", "", f"_CONVOLUTIONS = {{{', '.join(named)}}}"]
        if self.request.numerics == "pytorch":
            lines += [f"_BATCHES = {batches!r}", f"_IS_TRANSPOSED = {transposed!r}"]
        pairs = [pair for block in self.blocks for pair in (block.train, *block.whole_train.values()) if pair]
        orders = [f'"{f.name}": {_order(f.problem, len(f.problem.sizes))}' for f, _ in pairs]
        text = templates.RUNTIME.replace("@CAPABILITY@", repr(_capability(self.request.architecture)))
        mode = templates.MODE[self.request.numerics].replace("@ASKED@", block_code.asking_text())
        training = templates.TRAINING + f"\n\n_ORDERS = {{{', '.join(orders)}}}" if pairs else ""
        tables = "\n".join(lines)
        text = text.replace("@ARCHITECTURE@", self.request.architecture)
        return "\n\n\n".join(part.strip("\n") for part in (text, tables, mode, training) if part)

    def _original_stages(self) -> Iterator[str]:
        """The original code of each part as a function of tensors, for gradients."""
        number, named = 0, []
        for block in self.blocks:
            whole = [*block.whole.values(), *(pair[0] for pair in block.whole_train.values())]
            tail = [*([block.tail] if block.tail else []), *(block.train or ())[:1]]
            is_conv = block.found.description.conv is not None
            for operators, code in (
                (whole, block.stages),
                (tail, block.tail_stages if is_conv else block.stages),
            ):
                if operators:
                    number += 1
                    yield f"def _stages_{number}{code}"
                    named += [
                        f'    "{name}": _stages_{number},'
                        for name in dict.fromkeys(o.name for o in operators)
                    ]
        yield "\n".join(["# The original code of each operator.", "_STAGES = {", *named, "}", "_register()"])

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


# --- Problems ---------------------------------------------------------------------------------------


def _problem(found: Found, block: str, mode: str, whole: bool) -> Problem:
    description = found.description
    sizes = found.sizes
    count = 0 if whole else description.conv_parameters
    shape = sizes if whole else tuple(description.conv_output_shape(sizes))
    norm = description.norm
    channels = description.conv_output_shape(sizes)[1]
    return Problem(
        block,
        shape,
        mode,
        found.layout,
        tuple(description.output_shape(sizes)),
        found.parameters[count:],
        norm.group_count(channels) if norm is not None else None,
    )


def _groups(operators: Iterable[Operator]) -> dict[str, list[Operator]]:
    """Operators by extension: of one precision, of inference or training, so that only what runs is built."""
    groups: dict[str, list[Operator]] = {}
    for operator in operators:
        mode, train = operator.problem.mode.split()[0], operator.what != FORWARD
        of_mode = re.search(rf"_{mode}(_train|_backward)?$", operator.name)
        key = "_".join(([mode] if of_mode else []) + (["train"] if train else []))
        groups.setdefault(key, []).append(operator)
    return groups


def _upper(key: str) -> str:
    return f"_{key.upper()}" if key else ""


def _identifier(path: str) -> str:
    stem = path.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    return re.sub(r"\W", "_", stem)


def _capability(architecture: str) -> tuple[int, int]:
    number = int(re.sub(r"\D", "", architecture))
    return number // 10, number % 10


def _gencode(architecture: str) -> str:
    number = architecture.removeprefix("sm_")
    return f"-gencode=arch=compute_{number},code=sm_{number}"


def _limits(
    operators: list[Operator],
    limit: Callable[[Operator], int | None],
    stricter: Callable[[int, int], int],
) -> dict[str, int]:
    """Those of the operators that have one; a training step's forward is asked for both."""
    limits: dict[str, int] = {}
    for operator in operators:
        own = limit(operator)
        if own is not None:
            asked = operator.name
            if operator.what == BACKWARD:
                asked = asked.removesuffix(_BACKWARD) + _TRAIN
            limits[asked] = stricter(own, limits.get(asked, own))
    return limits


def _forward_text(fused: Fused, bodies: dict[bool, list[str]], changed: str, original: str) -> str:
    """The forward; `original` is the function that it runs otherwise, "" for the class's own."""
    module = fused.rewriter.module
    signature, passed = _signature(module)
    name = f"{type(module).__name__}.forward" if fused.path else "forward"
    given = [part for part in ("self" if original else "", passed) if part]
    original = f"return {original or 'super().forward'}({', '.join(given)})"
    lines = [
        f"def forward(self{signature}):",
        f"    why = {changed}(self)",
        "    if why:",
        f'        _say("{name}", why)',
        f"        {original}",
    ]
    for condition, why in _argument_checks(fused):
        lines += [f"    if {condition}:", f'        _say("{name}", {json.dumps(why)})', f"        {original}"]
    modes = sorted(bodies)
    same_code = len(modes) == 2 and bodies[False] == bodies[True]
    if len(modes) == 1:
        other = "training" if modes == [False] else "evaluation"
        lines += [
            "    if self.training:" if modes == [False] else "    if not self.training:",
            f'        _say("{name}", "the model is in {other} mode")',
            f"        {original}",
        ]
    if len(modes) == 1 or same_code:
        lines += [f"    {line}" for line in bodies[modes[0]]]
    else:
        lines += ["    if self.training:", *(f"        {line}" for line in bodies[True])]
        lines += [f"    {line}" for line in bodies[False]]
    return "\n".join(lines)


def _argument_checks(fused: Fused) -> Iterator[tuple[str, str]]:
    """Conditions that a call is not as it was traced, and what to say then."""
    constants = dict(fused.variants[0].pattern.constants)
    for parameter in parameters_of(fused.rewriter.module):
        name = parameter.name
        if is_variadic(parameter):
            yield name, f"{name} is not empty"
        elif name not in constants:
            yield f"not isinstance({name}, torch.Tensor)", f"{name} is no tensor"
        else:
            value = constants[name]
            is_one = value is None or isinstance(value, bool)
            other = f"type({name}) is not {type(value).__name__} or {name} != {value!r}"
            yield f"{name} is not {value!r}" if is_one else other, f"{name} is not {value!r}"


def _signature(module: nn.Module) -> tuple[str, str]:
    """The forward's parameters as its source has them, and as they are passed on."""
    try:
        source = inspect.cleandoc("\n" + inspect.getsource(type(module).forward))
        function = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef))
    except (OSError, TypeError, SyntaxError, StopIteration):
        raise NotExported(f"the source of {type(module).__name__}.forward cannot be read") from None
    arguments = function.args
    (arguments.posonlyargs or arguments.args).pop(0)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    passed = []
    for parameter in parameters_of(module):
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        by_name = f"{parameter.name}=" if parameter.kind is parameter.KEYWORD_ONLY else ""
        passed.append(f"{star}{by_name}{parameter.name}")
    text = ast.unparse(arguments)
    return f", {text}" if text else "", ", ".join(passed)


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


def _order(problem: Problem, dimensions: int) -> str:
    last = {4: "torch.channels_last", 5: "torch.channels_last_3d"}.get(dimensions)
    return last if problem.layout == "nhwc" and last else "torch.contiguous_format"


def _fitting(name: str, problem: Problem) -> str:
    dtype = {"f16": "torch.float16", "bf16": "torch.bfloat16"}.get(problem.mode.split()[0], "torch.float32")
    parameters = [
        f"({sizes!r}, {_order(problem, len(sizes) if sizes[:1] == (launcher.BATCH,) else 0)})"
        for sizes in problem.parameters
    ]
    head = f'    "{name}": ({dtype}, {problem.sizes[1:]!r}, {_order(problem, len(problem.sizes))}, ['
    return "\n".join([head, *(f"        {text}," for text in parameters), "    ]),"])


def _ways(name: str, ways: dict[str, tuple[Operator | None, tuple[Operator, Operator] | None]]) -> str:
    lines = [f'    "{name}": {{']
    for mode, (forward, pair) in ways.items():
        names = tuple(operator.name for operator in pair or ())
        wants_input = pair[1].problem.wants_input if pair else True
        lines.append(f'        "{mode}": ({(forward.name if forward else "")!r}, {names!r}, {wants_input}),')
    return "\n".join([*lines, "    },"])


def _share(found: dict[str, Any], operators: Callable[[Any], tuple[Operator, ...]]) -> None:
    """Precisions whose plans are the same use the operators of the last one."""
    modes = list(found)
    for mode in modes[:-1]:
        for later in reversed(modes[modes.index(mode) + 1 :]):
            pairs = zip(operators(found[mode]), operators(found[later]), strict=True)
            if all(a.kernels == b.kernels and a.plan["steps"] == b.plan["steps"] for a, b in pairs):
                found[mode] = found[later]
                break


def _fake(operator: Operator) -> str:
    problem = operator.problem
    if operator.what == BACKWARD:
        first = "torch.empty_like(input)" if problem.wants_input else "input.new_empty(0)"
        body = f"    return [{first}, *(torch.empty_like(parameter) for parameter in parameters)]"
        return f"def _fake_{operator.name}(output_gradient, input, parameters, statistics):\n{body}"
    sizes = ", ".join(["input.shape[0]", *map(str, problem.output[1:])])
    last = {4: "torch.channels_last", 5: "torch.channels_last_3d"}.get(len(problem.output))
    order = f", memory_format={last}" if problem.layout == "nhwc" and last else ""
    empty = f"torch.empty(({sizes}), dtype=input.dtype, device=input.device{order})"
    lines = [f"def _fake_{operator.name}(input, parameters):", "    _check_devices(input, parameters)"]
    if operator.what == STATISTICS:
        slabs = f"(input.shape[0], {problem.groups}, 2)" if problem.groups else "(0,)"
        lines.append(f"    statistics = input.new_empty({slabs}, dtype=torch.float32)")
        lines.append(f"    return {empty}, statistics")
    else:
        lines.append(f"    return {empty}")
    return "\n".join(lines)
