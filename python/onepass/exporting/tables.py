"""The tables of an exported file: what each operator takes, and which one runs when."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from onepass.exporting import binding, block_code, templates
from onepass.exporting.blocks import BACKWARD_SUFFIX, TRAIN, Block, Blocks, Request
from onepass.exporting.plans import BACKWARD, BATCH, FORWARD, STATISTICS, Operator, Problem


def groups(operators: Iterable[Operator]) -> dict[str, list[Operator]]:
    """Operators by extension: of one precision, of inference or training, so that only what runs is built."""
    found: dict[str, list[Operator]] = {}
    for operator in operators:
        mode, train = operator.problem.mode.split()[0], operator.what != FORWARD
        of_mode = re.search(rf"_{mode}(_train|_backward)?$", operator.name)
        key = "_".join(([mode] if of_mode else []) + (["train"] if train else []))
        found.setdefault(key, []).append(operator)
    return found


def upper(key: str) -> str:
    """What the names of an extension's strings end in."""
    return f"_{key.upper()}" if key else ""


def registration(
    request: Request, namespace: str, operators: Sequence[Operator], blocks: Sequence[Block]
) -> str:
    """The names, schemas and limits of the operators, and what each block takes."""
    by_extension = groups(operators)
    lines = [
        f'_NAMESPACE = "{namespace}"',
        "# What each extension is built of, when one of its operators is first called.",
        "_EXTENSIONS = {",
    ]
    for key in by_extension:
        own = f"_KERNELS{upper(key)}, _HOST_CODE, _LAUNCHES{upper(key)}"
        lines.append(f'    "{key or "common"}": (_BINDING{upper(key)}, [_CUDA_HEAD, _DEVICE_CODE, {own}]),')
    lines += ["}", "_OPERATORS = {  # name: (extension, schema)"]
    for key, group in by_extension.items():
        lines += [f'    "{o.name}": ("{key or "common"}", "{binding.schema(o)}"),' for o in group]
    lines += [
        "}",
        "# What each block takes: type, sizes after the batch, order in memory; and of its parameters.",
        "_FITTING = {",
        *(_fitting(name, operator.problem) for name, operator in _by_part(blocks).items()),
        "}",
    ]
    most = _limits(operators, lambda operator: operator.most_samples, min)
    lines += [f"_MOST_SAMPLES = {most!r}  # of those that do not take any batch"]
    least = _limits(operators, lambda operator: operator.least_multiprocessors, max)
    lines += [f"_LEAST_MULTIPROCESSORS = {least!r}  # of those that do not run on any such GPU"]
    lines += [f'_NVCC = ["-O3", "{_gencode(request.architecture)}"]', "", ""]
    fakes = [_fake(o) for o in operators]
    return "\n".join(lines) + templates.REGISTRATION.replace("@FAKES@", "\n\n\n".join(fakes))


def _by_part(blocks: Sequence[Block]) -> dict[str, Operator]:
    """One operator for each part of the file's blocks: the whole, or what follows the convolution."""
    found: dict[str, Operator] = {}
    for block in blocks:
        parts = ((block.name, block.whole_forwards), (block.tail_name, block.tail_forwards))
        found |= {name: operators[0] for name, operators in parts if operators}
    return found


def runtime(planned: Blocks, blocks: Sequence[Block]) -> str:
    """The code that chooses between kernels and the original, and its tables."""
    request = planned.request
    lines = [
        '# For each part of a block, by the precision of its convolution ("": there is one): the',
        "# operator, those of a training step, and whether they give the input's gradient.",
        "_WAYS = {",
    ]
    for block in blocks:
        ways = {
            mode: (block.whole.get(mode), block.whole_train.get(mode))
            for mode in planned.modes(block.found.dtype)
            if mode in block.whole or mode in block.whole_train
        }
        lines += [_ways(block.name, ways)] if ways else []
        if block.tail or block.train:
            lines.append(_ways(block.tail_name, {"": (block.tail, block.train)}))
    trained = sorted(block.name for block in blocks if block.train and block.tail_name != block.name)
    lines += [
        "}",
        f"_TRAINED_TAILS = {trained!r}  # of these blocks the part after PyTorch's convolution",
    ]
    asks = [block for block in blocks if block.convolution and (block.whole or block.whole_train)]
    for number, block in enumerate(asks):
        lines += ["", "", f"def _convolve_{number + 1}{block.convolution}".rstrip()]
    named = [f'"{block.name}": _convolve_{number + 1}' for number, block in enumerate(asks)]
    batches = {block.name: block.found.sizes[0] for block in asks}
    transposed = {block.name: block.found.description.conv.transposed for block in asks}
    lines += ["", "", f"_CONVOLUTIONS = {{{', '.join(named)}}}"]
    if request.numerics == "pytorch":
        lines += [f"_BATCHES = {batches!r}", f"_IS_TRANSPOSED = {transposed!r}"]
    pairs = [pair for block in blocks for pair in (block.train, *block.whole_train.values()) if pair]
    orders = [f'"{f.name}": {_order(f.problem, len(f.problem.sizes))}' for f, _ in pairs]
    text = templates.RUNTIME.replace("@CAPABILITY@", repr(_capability(request.architecture)))
    mode = templates.MODE[request.numerics].replace("@ASKED@", block_code.asking_text())
    training = templates.TRAINING + f"\n\n_ORDERS = {{{', '.join(orders)}}}" if pairs else ""
    tables = "\n".join(lines)
    text = text.replace("@ARCHITECTURE@", request.architecture)
    return "\n\n\n".join(part.strip("\n") for part in (text, tables, mode, training) if part)


def original_stages(blocks: Sequence[Block]) -> Iterator[str]:
    """The original code of each part as a function of tensors, for gradients."""
    number, named = 0, []
    for block in blocks:
        is_conv = block.found.description.conv is not None
        for operators, code in (
            (block.whole_forwards, block.stages),
            (block.tail_forwards, block.tail_stages if is_conv else block.stages),
        ):
            if operators:
                number += 1
                yield f"def _stages_{number}{code}"
                named += [
                    f'    "{name}": _stages_{number},' for name in dict.fromkeys(o.name for o in operators)
                ]
    yield "\n".join(["# The original code of each operator.", "_STAGES = {", *named, "}", "_register()"])


def _capability(architecture: str) -> tuple[int, int]:
    number = int(re.sub(r"\D", "", architecture))
    return number // 10, number % 10


def _gencode(architecture: str) -> str:
    number = architecture.removeprefix("sm_")
    return f"-gencode=arch=compute_{number},code=sm_{number}"


def _limits(
    operators: Sequence[Operator],
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
                asked = asked.removesuffix(BACKWARD_SUFFIX) + TRAIN
            limits[asked] = stricter(own, limits.get(asked, own))
    return limits


_CONTIGUOUS = "torch.contiguous_format"


def _order(problem: Problem, dimensions: int) -> str:
    last = {4: "torch.channels_last", 5: "torch.channels_last_3d"}.get(dimensions)
    return last if problem.layout == "nhwc" and last else _CONTIGUOUS


def _fitting(name: str, problem: Problem) -> str:
    dtype = {"f16": "torch.float16", "bf16": "torch.bfloat16"}.get(problem.mode.split()[0], "torch.float32")
    parameters = [
        f"({sizes!r}, {_order(problem, len(sizes) if sizes[:1] == (BATCH,) else 0)})"
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


def _fake(operator: Operator) -> str:
    problem = operator.problem
    if operator.what == BACKWARD:
        first = "torch.empty_like(input)" if problem.wants_input else "input.new_empty(0)"
        body = f"    return [{first}, *(torch.empty_like(parameter) for parameter in parameters)]"
        return f"def _fake_{operator.name}(output_gradient, input, parameters, statistics):\n{body}"
    sizes = ", ".join(["input.shape[0]", *map(str, problem.output[1:])])
    last = _order(problem, len(problem.output))
    order = "" if last == _CONTIGUOUS else f", memory_format={last}"
    empty = f"torch.empty(({sizes}), dtype=input.dtype, device=input.device{order})"
    lines = [f"def _fake_{operator.name}(input, parameters):", "    _check_devices(input, parameters)"]
    if operator.what == STATISTICS:
        slabs = f"(input.shape[0], {problem.groups}, 2)" if problem.groups else "(0,)"
        lines.append(f"    statistics = input.new_empty({slabs}, dtype=torch.float32)")
        lines.append(f"    return {empty}, statistics")
    else:
        lines.append(f"    return {empty}")
    return "\n".join(lines)
