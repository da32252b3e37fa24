"""The exported file: the original's text, the CUDA source, and ModelNew with the fused forwards."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from onepass import __version__
from onepass._match import Chain
from onepass._stages import Attribute
from onepass._trace import parameters_of
from onepass.exporting import launcher
from onepass.exporting.chains import Found, Fused, Variant, read
from onepass.exporting.launcher import BACKWARD, FORWARD, STATISTICS, NotExported, Operator, Planner, Problem

_MODES = {torch.float32: ("tf32", "f32"), torch.float16: ("f16",), torch.bfloat16: ("bf16",)}
_TRAIN, _BACKWARD = "_train", "_backward"  # a training step's operators, behind the block's name
_MARK = "onepass_export_"  # before the names of the blocks in code that torch.fx writes


@dataclasses.dataclass
class Block:
    """A chain of the model with its operators."""

    name: str
    found: Found
    whole: dict[str, Operator]  # with the convolution, by mode
    whole_train: dict[str, tuple[Operator, Operator]]  # forward and backward of the same
    tail: Operator | None  # what follows PyTorch's convolution, or a block without one
    train: tuple[Operator, Operator] | None

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

    def write(self, fused: Sequence[Fused]) -> str:
        """The whole file; raises NotExported where nothing is left to export."""
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
        bindings = {key: launcher.binding_text(group, namespace) for key, group in groups.items()}
        pieces = [
            _heading(self.request, self.blocks),
            self.request.text.rstrip() + "\n",
            _IMPORTS,
            *(_string(f"_{name.upper()}", text) for name, text in parts.items()),
            *(_string(f"_BINDING{_upper(key)}", text) for key, text in bindings.items()),
            self._registration(namespace, groups, operators),
            _RUNTIME.replace("@CAPABILITY@", repr(_capability(self.request.architecture))),
            _TRAINING if any(block.train or block.whole_train for block in self.blocks) else "",
            *(text.replace("torch.ops.NAMESPACE.", f"torch.ops.{namespace}.") for text in self.functions),
            self._classes(forwards),
        ]
        _check_names(self.request.text, "\n\n".join(piece for piece in pieces[2:] if piece))
        return "\n\n".join(piece.rstrip() for piece in pieces if piece) + "\n"

    # --- Blocks -------------------------------------------------------------------------------------

    def _block(self, chain: Chain, fused: Fused) -> Block | None:
        found = read(chain, fused)
        given = not fused.path and chain.externals[0].op == "placeholder"  # whose gradient is rarely wanted
        if found is None or found.dtype not in _MODES:
            return None
        key = (found.block, found.sizes, found.dtype, found.layout, found.parameters, given)
        if key not in self.by_problem:
            block = self._plan(found, f"block_{len(self.by_problem) + 1}", given)
            if not block.operators:
                return None
            self.by_problem[key] = block
        return dataclasses.replace(self.by_problem[key], found=found)

    def _plan(self, found: Found, name: str, given: bool) -> Block:
        description, modes = found.description, _MODES[found.dtype]
        whole: dict[str, Operator] = {}
        whole_train: dict[str, tuple[Operator, Operator]] = {}
        if description.conv is not None:
            for mode in modes:
                problem = _problem(found, description.text, mode, whole=True)
                suffix = f"_{mode}" if len(modes) > 1 else ""
                if self.planner.is_worth_fusing(problem):
                    whole[mode] = self.planner.operator(name + suffix, FORWARD, problem)
                problem = dataclasses.replace(problem, wants_input=not given)
                if self.request.train and self.planner.is_worth_training(problem):
                    whole_train[mode] = self._pair(name + suffix, problem)
        text = description.tail if description.conv is not None else description.text
        if not text or (description.conv is not None and len(text.split(" | ")) < 2):
            return Block(name, found, whole, whole_train, None, None)
        suffix = "_tail" if description.conv is not None else ""
        problem = _problem(found, text, modes[-1], whole=False)
        tail = train = None
        if len(whole) < len(modes):
            tail = self.planner.operator(name + suffix, FORWARD, problem)
        if self.request.train:
            train = self._pair(name + suffix, problem)
        return Block(name, found, whole, whole_train, tail, train)

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
        return _forward_text(fused, bodies)

    def _body(self, variant: Variant, fused: Fused) -> list[str] | None:
        graph = variant.traced.graph
        written = False
        replaced: dict[fx.Node, fx.Node] = {}
        for chain in variant.chains:
            block = self._block(chain, fused)
            if block is None:
                continue
            written = True
            function = self._function(chain, block, replaced)
            _replace(graph, chain, function, replaced)
        if not written:
            return None
        return _statements(graph, self._global)

    def _function(self, chain: Chain, block: Block, replaced: dict[fx.Node, fx.Node]) -> str:
        text = _block_text(chain, block, replaced)
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
            "cuda_head": launcher.CUDA_HEAD,
            "device_code": launcher.shared_text(operators, self.planner.files),
            "host_code": launcher.HOST_CODE,
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
            lines += [f'    "{o.name}": ("{key or "common"}", "{launcher.schema(o)}"),' for o in group]
        lines += [
            "}",
            "# What each takes: type, sizes after the batch, order in memory; the same of its parameters.",
        ]
        lines += ["_FITTING = {", *(_fitting(o) for o in operators if o.what != BACKWARD), "}"]
        most = _limits(operators, lambda operator: operator.most_samples, min)
        lines += [f"_MOST_SAMPLES = {most!r}  # of those that do not take any batch"]
        least = _limits(operators, lambda operator: operator.least_multiprocessors, max)
        lines += [f"_LEAST_MULTIPROCESSORS = {least!r}  # of those that do not run on any such GPU"]
        lines += [f'_NVCC = ["-O3", "{_gencode(self.request.architecture)}"]', "", ""]
        fakes = [_fake(o) for o in operators]
        return "\n".join(lines) + _REGISTRATION.replace("@FAKES@", "\n\n".join(fakes))

    def _classes(self, forwards: Sequence[tuple[Fused, str]]) -> str:
        root = next((code for one, code in forwards if one.path == ""), None)
        inner = [(one, code) for one, code in forwards if one.path]
        codes = list(dict.fromkeys(code for _, code in inner))
        names = {one.path: f"_forward_{codes.index(code) + 1}" for one, code in inner}
        parts = [
            code.replace("def forward(", f"def _forward_{i + 1}(", 1).replace(
                "super().forward(", "super(type(self), self).forward("
            )
            for i, code in enumerate(codes)
        ]
        specialised = _specialised(forwards)
        lines = [
            "# What the kernels were written for: another model of the class runs as it was.",
            "_SPECIALISED = {",
            *(f"    {path!r}: {value!r}," for path, value in specialised.items()),
            "}",
            "",
            "",
            "class ModelNew(Model):",
            f'    """{_class_doc(self.blocks)}"""',
            "",
            "    @functools.wraps(Model.__init__)",
            "    def __init__(self, *args, **kwargs):",
            "        super().__init__(*args, **kwargs)",
            "        self._fused = _is_as_specialised(self)",
        ]
        for path, name in names.items():
            lines.append(f"        _replace_forward(self, {path!r}, {name})")
        if root is not None:
            lines += ["", *(f"    {line}".rstrip() for line in root.splitlines())]
        helper = [_REPLACE_FORWARD] if inner else []
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
        mode, train = operator.problem.mode, operator.what != FORWARD
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


# --- Code of chains ---------------------------------------------------------------------------------


def _replace(graph: fx.Graph, chain: Chain, name: str, replaced: dict[fx.Node, fx.Node]) -> None:
    """Puts one call in the place of the chain, as early as its operands allow."""
    function = _placeholder(name)
    externals = list(dict.fromkeys(replaced.get(node, node) for node in chain.externals))
    order = {node: index for index, node in enumerate(graph.nodes)}
    anchor = max((chain.nodes[0], *externals), key=order.__getitem__)
    with graph.inserting_before(anchor.next):
        result = graph.create_node("call_function", function, tuple(externals), name="fused")
    replaced[chain.nodes[-1]] = result
    chain.nodes[-1].replace_all_uses_with(result)
    for node in reversed(chain.nodes):
        graph.erase_node(node)


def _placeholder(name: str) -> Callable[..., Any]:
    def call(*_: Any) -> None:
        raise AssertionError

    call.__name__ = call.__qualname__ = f"{_MARK}{name}"
    call.__module__ = "builtins"
    return call


def _statements(graph: fx.Graph, name_of: Callable[[str, Any], str]) -> list[str]:
    """The graph as lines of a function that has `self`."""
    code = graph.python_code("self")
    lines = code.src.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("def forward("))
    body = [line[4:] for line in lines[first + 1 :] if line.strip()]
    text = "\n".join(re.sub(r"\s*#.*$", "", line) if "'" not in line else line for line in body)
    text = re.sub(rf"\w*{_MARK}(\w+)\(", r"\1(self, ", text)
    for name, value in code.globals.items():
        if _MARK in name or name in ("torch", "device", "inf", "nan", "NoneType"):
            continue
        if isinstance(getattr(value, "__name__", None), str) and value.__name__ == name == "torch":
            continue
        text = re.sub(rf"\b{re.escape(name)}\b", name_of(name, value), text)
    text = re.sub(r"\btorch\._C\._nn\.(\w+)", _functional, text)
    # One statement and its return are one line.
    text = re.sub(r"(?:^|(?<=\n))(\w+) = (.*?)(?:;  [\w =]* = None)?\nreturn \1$", r"return \2", text)
    return text.splitlines()


def _functional(match: re.Match[str]) -> str:
    public = hasattr(torch.nn.functional, match.group(1))
    return f"torch.nn.functional.{match.group(1)}" if public else match.group(0)


def _lines_of(chain_nodes: Sequence[fx.Node], result: fx.Node) -> list[str]:
    """Nodes of a chain as they were, without a return: what they read has the names of the nodes."""
    graph = fx.Graph()
    own = set(chain_nodes)
    copies: dict[fx.Node, fx.Node] = {}
    for node in chain_nodes:
        for outer in node.all_input_nodes:
            if outer not in own and outer not in copies:
                copies[outer] = graph.placeholder(outer.name)
    for node in chain_nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[result])
    lines = _statements(graph, lambda name, value: name)
    return [re.sub(r";  [\w =,]* = None$", "", line) for line in lines]


def _path(path: str) -> str:
    """A submodule as an expression of `self`."""
    text = "self"
    for part in path.split(".") if path else ():
        text = f"{text}.{part}" if part.isidentifier() else f'getattr({text}, "{part}")'
    return text


def _expression(parameter: Any, replaced: dict[fx.Node, fx.Node]) -> str:
    if isinstance(parameter, Attribute):
        return f"{_path(parameter.module)}.{parameter.name}"
    node, suffix = parameter
    return f"{replaced.get(node, node).name}{suffix}"


def _block_text(chain: Chain, block: Block, replaced: dict[fx.Node, fx.Node]) -> str:
    """A function of the module and what the chain reads: the kernel where it fits, else the original code."""
    found, description = block.found, block.found.description
    externals = list(dict.fromkeys(replaced.get(node, node).name for node in chain.externals))
    x = externals[0]
    lines = [f"def _run_N(self, {', '.join(externals)}):", f'    """{found.block}"""']
    expressions = [_expression(parameter, replaced) for parameter in found.expressions]
    lines += _list("parameters", expressions)
    trailing = "[" + ", ".join(["...", *["None"] * found.trailing]) + "]" if found.trailing else ""
    conv_nodes = list(chain.stages[0].nodes) if description.conv is not None else []
    rest = [node for node in chain.nodes if node not in conv_nodes]
    if block.whole:
        lines.append(f"    if not _wants_gradients({x}, parameters):")
        for mode, operator in block.whole.items():
            tests = [_fits(operator, x, "parameters")]
            if mode in ("tf32", "f32"):
                tests.insert(0, "_rounds_to_tf32()" if mode == "tf32" else "not _rounds_to_tf32()")
            call = f"torch.ops.{{NAMESPACE}}.{operator.name}({x}, parameters){trailing}"
            lines += _if(tests, call, "        ")
    if block.whole_train:
        lines.append(f"    if _wants_gradients({x}, parameters):")
        for mode, (forward, backward) in block.whole_train.items():
            tests = [_fits(forward, x, "parameters")]
            if not backward.problem.wants_input:
                tests.insert(0, f"not {x}.requires_grad")
            if mode in ("tf32", "f32"):
                tests.insert(0, "_rounds_to_tf32()" if mode == "tf32" else "not _rounds_to_tf32()")
            lines += _if(tests, f"{_trained(forward, backward, x)}{trailing}", "        ")
    if conv_nodes:
        *before, last = _lines_of(conv_nodes, conv_nodes[-1])
        x = conv_nodes[-1].name
        lines += [f"    {line}" for line in (*before, f"{x} = {last.removeprefix('return ')}")]
        if block.tail or block.train:
            lines.append(f"    parameters = parameters[{description.conv_parameters}:]")
    if block.train:
        forward, backward = block.train
        call = f"{_trained(forward, backward, x)}{trailing}"
        lines += _if([f"_wants_gradients({x}, parameters)", _fits(forward, x, "parameters")], call, "    ")
    if block.tail:
        call = f"torch.ops.{{NAMESPACE}}.{block.tail.name}({x}, parameters){trailing}"
        tests = [f"not _wants_gradients({x}, parameters)", _fits(block.tail, x, "parameters")]
        lines += _if(tests, call, "    ")
    if rest:
        lines += [f"    {line}" for line in _lines_of(rest, rest[-1])]
    else:
        lines.append(f"    return {x}")
    return "\n".join(lines).replace("{NAMESPACE}", "NAMESPACE") + "\n"


def _trained(forward: Operator, backward: Operator, x: str) -> str:
    return f'_Trained.apply("{forward.name}", "{backward.name}", {x}, *parameters)'


def _if(tests: Sequence[str], call: str, indent: str) -> list[str]:
    line = f"{indent}if {' and '.join(tests)}:"
    if len(line) <= 110:
        return [line, f"{indent}    return {call}"]
    return [
        f"{indent}if (",
        *(f"{indent}    {'and ' if i else ''}{test}" for i, test in enumerate(tests)),
        f"{indent}):",
        f"{indent}    return {call}",
    ]


def _list(name: str, items: Sequence[str]) -> list[str]:
    line = f"    {name} = [{', '.join(items)}]"
    if len(line) <= 110:
        return [line]
    return [f"    {name} = [", *(f"        {item}," for item in items), "    ]"]


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


def _fits(operator: Operator, x: str, parameters: str) -> str:
    return f'_fits("{operator.name}", {x}, {parameters})'


def _forward_text(fused: Fused, bodies: dict[bool, list[str]]) -> str:
    module = fused.rewriter.module
    signature, passed = _signature(module)
    conditions = ["not self._fused"] if not fused.path else []
    variant = fused.variants[0]
    for name, value in variant.pattern.constants:
        same = "is not" if value is None or isinstance(value, bool) else "!="
        conditions.append(f"{name} {same} {value!r}")
    modes = sorted(bodies)
    same_code = len(modes) == 2 and bodies[False] == bodies[True]
    if len(modes) == 1:
        conditions.append("self.training" if modes == [False] else "not self.training")
    lines = [f"def forward(self{signature}):"]
    if conditions:
        lines += [f"    if {' or '.join(conditions)}:", f"        return super().forward({passed})"]
    if len(modes) == 1 or same_code:
        lines += [f"    {line}" for line in bodies[modes[0]]]
    else:
        lines += ["    if self.training:", *(f"        {line}" for line in bodies[True])]
        lines += [f"    {line}" for line in bodies[False]]
    return "\n".join(lines)


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


def _specialised(forwards: Sequence[tuple[Fused, str]]) -> dict[str, Any]:
    """What must be so of each module that is left out: its class and what it was made with."""
    found: dict[str, Any] = {}
    for fused, _ in forwards:
        for path in fused.rewriter.watched:
            watched = fused.rewriter.watched_module(path)
            full = ".".join(part for part in (fused.path, path) if part)
            module = watched.module
            leaf = not list(module.children())
            text = f"{type(module).__name__}({module.extra_repr()})" if leaf and path else ""
            if text or watched.flags:
                found[full] = (text, dict(sorted(watched.flags.items())))
    return found


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


def _fitting(operator: Operator) -> str:
    problem = operator.problem
    dtype = {"f16": "torch.float16", "bf16": "torch.bfloat16"}.get(problem.mode, "torch.float32")
    parameters = [
        f"({sizes!r}, {_order(problem, len(sizes) if sizes[:1] == (launcher.BATCH,) else 0)})"
        for sizes in problem.parameters
    ]
    head = f'    "{operator.name}": ({dtype}, {problem.sizes[1:]!r}, {_order(problem, len(problem.sizes))}, ['
    return "\n".join([head, *(f"        {text}," for text in parameters), "    ]),"])


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
    lines = [f"def _fake_{operator.name}(input, parameters):"]
    if operator.what == STATISTICS:
        slabs = f"(input.shape[0], {problem.groups}, 2)" if problem.groups else "(0,)"
        lines.append(f"    statistics = input.new_empty({slabs}, dtype=torch.float32)")
        lines.append(f"    return {empty}, statistics")
    else:
        lines.append(f"    return {empty}")
    return "\n".join(lines)


_IMPORTS = """
# ----------------------------------------------------------------------------------------------------
# The kernels
import functools
import threading

import torch
import torch.utils.cpp_extension
"""

_REGISTRATION = '''
@FAKES@


_building = threading.RLock()
_stubs = {}  # of each extension that is not built yet: registrations that build it
_failed = set()  # extensions that could not be


def _build(extension):
    """Compiles and loads an extension, which registers its operators for CUDA."""
    with _building:
        stub = _stubs.pop(extension, None)
        if stub is None:
            return
        stub._destroy()
        binding, cuda = _EXTENSIONS[extension]
        try:
            torch.utils.cpp_extension.load_inline(
                name=f"{_NAMESPACE}_{extension}",
                cpp_sources=[binding],
                cuda_sources=list(cuda),
                extra_cuda_cflags=_NVCC,
                is_python_module=False,
                no_implicit_headers=True,
            )
        except Exception as error:
            _failed.add(extension)
            raise RuntimeError("the kernels cannot be built; later calls run the original code") from error


def _register():
    """Declares the operators, which torch.compile then knows; the first call of one builds its extension."""
    namespace = getattr(torch.ops, _NAMESPACE)
    if hasattr(namespace, "exported"):  # the same file, imported under another name
        return
    namespace.exported = library = torch.library.Library(_NAMESPACE, "FRAGMENT")  # kept
    for name, (extension, schema) in _OPERATORS.items():
        library.define(schema)
        torch.library.register_fake(f"{_NAMESPACE}::{name}", globals()[f"_fake_{name}"], lib=library)
        if extension not in _stubs:
            _stubs[extension] = torch.library.Library(_NAMESPACE, "IMPL", "CUDA")

        def build_and_run(*args, _name=name, _extension=extension):
            _build(_extension)
            return getattr(getattr(torch.ops, _NAMESPACE), _name)(*args)

        _stubs[extension].impl(name, build_and_run)


_register()
'''

_RUNTIME = '''
# ----------------------------------------------------------------------------------------------------
# When a kernel runs: every other call runs the original code.


_gpus = {}  # by index


@torch.compiler.assume_constant_result
def _is_built_for(device, name):
    if device not in _gpus:
        _gpus[device] = torch.cuda.get_device_properties(device)
    gpu = _gpus[device]
    if gpu.multi_processor_count < _LEAST_MULTIPROCESSORS.get(name, 1):
        return False
    return (gpu.major, gpu.minor) == @CAPABILITY@


@torch.compiler.assume_constant_result
def _rounds_to_tf32():
    """PyTorch's switch for convolutions at the call; torch.compile keeps what it is at the trace."""
    return torch.backends.cudnn.conv.fp32_precision == "tf32"


def _wants_gradients(x, parameters):
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters))


@torch.compiler.assume_constant_result
def _can_be_built(name):
    return _OPERATORS[name][0] not in _failed


def _fits(name, x, parameters):
    """Whether these are tensors of the type, the sizes and the order in memory that the kernel is for."""
    dtype, sizes, memory_format, wanted = _FITTING[name]
    if not _can_be_built(name):
        return False
    if not x.is_cuda or x.dtype != dtype or x.shape[1:] != sizes or torch.is_autocast_enabled("cuda"):
        return False
    if not x.is_contiguous(memory_format=memory_format) or not _is_built_for(x.device.index, name):
        return False
    if name in _MOST_SAMPLES and x.shape[0] > _MOST_SAMPLES[name]:
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    for parameter, (shape, order) in zip(parameters, wanted):
        first = x.shape[:1] if shape[:1] == (-1,) else shape[:1]
        if parameter.shape[:1] != first or parameter.shape[1:] != shape[1:] or parameter.dtype != dtype:
            return False
        if parameter.device != x.device or not parameter.is_contiguous(memory_format=order):
            return False
    return True


def _is_as_specialised(model):
    """Whether the model's modules are what the kernels were written for."""
    for path, (text, flags) in _SPECIALISED.items():
        try:
            module = model.get_submodule(path)
        except AttributeError:
            return False
        if text and f"{type(module).__name__}({module.extra_repr()})" != text:
            return False
        if any(getattr(module, name, None) != value for name, value in flags.items()):
            return False
    return True
'''

_TRAINING = '''
class _Trained(torch.autograd.Function):
    """A block whose gradients are wanted: keeps its input, its parameters and the statistics of its slabs."""

    @staticmethod
    def forward(ctx, forward, backward, x, *parameters):
        output, statistics = getattr(getattr(torch.ops, _NAMESPACE), forward)(x, parameters)
        ctx.forward_name, ctx.name = forward, backward
        ctx.save_for_backward(x, statistics, *parameters)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, output_gradient):
        x, statistics, *parameters = ctx.saved_tensors
        order = _FITTING[ctx.forward_name][2] if output_gradient.dim() == x.dim() else torch.contiguous_format
        output_gradient = output_gradient.contiguous(memory_format=order)
        operator = getattr(getattr(torch.ops, _NAMESPACE), ctx.name)
        gradients = operator(output_gradient, x, parameters, statistics)
        wanted = ctx.needs_input_grad[2:]
        return None, None, *(gradient if want else None for gradient, want in zip(gradients, wanted))
'''

_REPLACE_FORWARD = '''
def _replace_forward(model, path, forward):
    """Gives a module of the model a class of its own with this forward, where the kernels are for it."""
    if model._fused:
        module = model.get_submodule(path)
        module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})
'''
