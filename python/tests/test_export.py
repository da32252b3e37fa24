"""The export command: the file it writes is the model it was given, and what it refuses leaves no file."""

from __future__ import annotations

import collections
import copy
import ctypes
import functools
import importlib.util
import inspect
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass import _output_file, available, export, unavailable_reason
from onepass.exporting import device_code, plans, verify
from onepass.exporting.writer import Writer

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKLOADS = ("s60", "s19", "s61", "s27")
EXAMPLES = ROOT / "examples" / "exported"

pytestmark = pytest.mark.skipif(not available(), reason=str(unavailable_reason()))

LOADED_ALONE = (
    "test_command_writes_the_file",
    "test_refusal_is_one_sentence_and_writes_nothing[a neighbour]",
)

NESTED = '''"""Blocks inside blocks: a stem, residual blocks with an embedding, dropout, a head."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, channels: int, embedding: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.SiLU()
        )
        self.project = nn.Linear(embedding, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, channels)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, e, scale: float = 1.0):
        h = self.body(x) + self.project(e)[:, :, None, None]
        h = self.drop(h)
        h = F.relu(self.norm(self.conv(h)) + x)
        return h * scale


class Model(nn.Module):
    def __init__(self, width: int = 16, depth=2, *, classes: int = 3):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.stem_norm = nn.InstanceNorm2d(width, affine=True)
        self.blocks = nn.ModuleList(Residual(width, 8) for _ in range(depth))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x, e, mask=None):
        h = F.leaky_relu(self.stem_norm(self.stem(x)), 0.2)
        for block in self.blocks:
            h = block(h, e)
        h = self.head(h)
        if mask is not None:
            h = h * mask
        return h.mean((2, 3), keepdim=True)


def get_inputs():
    return [torch.rand(4, 3, 32, 32), torch.rand(4, 8)]


def get_init_inputs():
    return []
'''

SMALL = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, channels=8, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, stride=stride)
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


def get_inputs():
    return [torch.rand(4, 3, 12, 12)]


def get_init_inputs():
    return []
"""

LIMITS = (
    SMALL.replace("channels)\n\n", "channels)\n        self.act = nn.Hardtanh(0.0, float('inf'))\n\n")
    .replace("torch.relu(self.norm(self.conv(x)))", "self.act(self.norm(self.conv(x).clamp(-1e30, LARGEST)))")
    .replace("\n\nclass", '\nLARGEST = float("inf")\n\n\nclass', 1)
)

HALVES = (
    SMALL.replace("channels)\n\n", "channels)\n        self.to(torch.bfloat16)\n\n")
    .replace("torch.relu(self.norm(self.conv(x)))", "gelu(self.norm(silu(self.conv(x))))")
    .replace("12, 12)", "12, 12, dtype=torch.bfloat16)")
    .replace("from torch import nn", "from torch import nn\nfrom torch.nn.functional import gelu, silu")
)


@pytest.fixture(autouse=True)
def loads_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a file loads alone takes a process that imports PyTorch, two seconds: the tests of it look."""
    if request.node.name not in LOADED_ALONE:
        monkeypatch.setattr(export, "_check_alone", lambda path: None)


def load(path: pathlib.Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"exported_{path.stem}_{os.urandom(4).hex()}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def text_of(name: str, *options: str) -> str:
    """What the command writes for a workload or for a text above."""
    conv = "keep" if "keep" in options else "fuse"
    if name in WORKLOADS:
        path = ROOT / "examples" / f"{name}.py"
    else:
        folder = pathlib.Path(os.environ.get("TMPDIR", "/tmp")) / f"onepass_export_{os.getpid()}"
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.py"
        path.write_text({"nested": NESTED, "small": SMALL, "limits": LIMITS}[name])
    return export.export(str(path), "sm_90a", conv, "train" in options, f"{name}_new.py")


def exported(tmp_path: pathlib.Path, name: str, *options: str) -> types.ModuleType:
    """The exported file, loaded."""
    path = tmp_path / f"{name}_new.py"
    # A namespace of its own: operators are registered once in a process.
    namespace = re.search(r'^_NAMESPACE = "(\w+)"', text_of(name, *options), re.MULTILINE).group(1)
    text = text_of(name, *options).replace(namespace, f"{namespace}_{os.urandom(4).hex()}")
    path.write_text(text)
    return load(path)


def small_inputs(module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Inputs of two samples of the sizes that the kernels are for."""
    if hasattr(module, "batch_size"):
        monkeypatch.setattr(module, "batch_size", 2)
    return module.get_inputs()


def run_on_cpu(module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets the exported operators run on CPU tensors, by the library's own; returns the list of calls."""
    blocks = dict(
        re.findall(r"^#   (\w+): \w+, (.*)$", pathlib.Path(module.__file__).read_text(), re.MULTILINE)
    )
    assert blocks.keys() == module._OPERATORS.keys() - {"scale_and_shift"}  # which batch norms have besides
    calls: list[str] = []

    def fits(block: str, x: Tensor, parameters: list[Tensor]) -> bool:
        dtype, sizes, _, wanted = module._FITTING[block]
        same = [
            p.dtype == dtype and p.shape[1:] == s[1:] and (s[:1] == (-1,) or p.shape == s)
            for p, (s, _) in zip(parameters, wanted)
        ]
        return x.dtype == dtype and x.shape[1:] == sizes and len(parameters) == len(wanted) and all(same)

    def unlike(block: str, x: Tensor, parameters: list[Tensor]) -> str:
        why = module._unusual(x, parameters)
        return why or ("" if fits(block, x, parameters) else "another type or size")

    def implementation(name: str) -> Any:
        part = re.sub(r"_(tf32|tf32_away|near_f32|f32)?(_?train|_?backward)?$", "", name)

        def run(*tensors: Any) -> Any:
            given = tensors[1:3] if name.endswith("_backward") else tensors
            if not fits(part, *given):  # as the operators of a GPU look at their tensors
                raise RuntimeError(f"{name}: another type or size")
            calls.append(name)
            if name.endswith("_backward"):
                gradient, x, parameters, statistics = tensors
                wanted = [True] * (len(parameters) + 1)
                return torch.ops.onepass.backward(gradient, x, parameters, statistics, blocks[name], wanted)
            operator = "forward_with_statistics" if name.endswith("_train") else "forward"
            return getattr(torch.ops.onepass, operator)(*tensors, blocks[name], None)

        return run

    library = torch.library.Library(module._NAMESPACE, "IMPL", "CPU")
    for name in blocks:
        library.impl(name, implementation(name))
    monkeypatch.setattr(module, "_unlike", unlike)
    monkeypatch.setattr(module, "_unable", lambda name, device: "")
    monkeypatch.setattr(module, "_precision", lambda *_: "tf32")
    monkeypatch.setattr(module, "_precision_compiled", lambda *_: "tf32")
    monkeypatch.setattr(module, "_cpu_library", library, raising=False)
    return calls


@pytest.mark.parametrize("name", [*WORKLOADS, "nested"])
def test_model_is_made_as_the_original(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = exported(tmp_path, name)
    torch.manual_seed(3)
    old = module.Model(*module.get_init_inputs())
    torch.manual_seed(3)
    new = module.ModelNew(*module.get_init_inputs())
    assert vars(new).keys() == vars(old).keys()
    assert [n for n, _ in new.named_modules()] == [n for n, _ in old.named_modules()]
    assert list(new.state_dict()) == list(old.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(new.parameters(), old.parameters(), strict=True))
    new.load_state_dict(old.state_dict())
    assert inspect.signature(module.ModelNew) == inspect.signature(module.Model)
    names = [inspect.signature(cls.forward).parameters for cls in (module.ModelNew, module.Model)]
    assert list(names[0]) == list(names[1])
    assert [p.default for p in names[0].values()] == [p.default for p in names[1].values()]
    assert "onepass" not in re.findall(r"^\s*(?:import|from) (\w+)", text_of(name), re.MULTILINE)


@pytest.mark.parametrize("name", ["small", "nested"])
def test_cpu_tensors_run_the_original_code_and_say_so_once(tmp_path: pathlib.Path, name: str) -> None:
    module = exported(tmp_path, name)
    new = module.ModelNew().eval()
    old = module.Model().eval()
    old.load_state_dict(new.state_dict())
    inputs = module.get_inputs()
    assert module.ModelNew.why() == {}
    with pytest.warns(RuntimeWarning, match="runs the original code: the input is not on a GPU"):
        assert torch.equal(new(*inputs), old(*inputs))
    assert set(module.ModelNew.why().values()) <= {1, 2}  # equal blocks share their kernels
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new(*inputs)
    assert all("not on a GPU" in reason for reason in module.ModelNew.why())
    assert set(module.ModelNew.why().values()) <= {2, 4}


def test_blocks_compute_what_the_original_does(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WORKLOADS:
        module = exported(tmp_path, name)
        monkeypatch.setattr(module, "height", 16, raising=False)
        calls = run_on_cpu(module, monkeypatch)
        names = ["block_1_tf32"]
        dtype, sizes, *rest = module._FITTING["block_1"]  # of a smaller image
        monkeypatch.setitem(module._FITTING, "block_1", (dtype, (*sizes[:-2], 16, sizes[-1]), *rest))
        inputs = small_inputs(module, monkeypatch)
        new = module.ModelNew(*module.get_init_inputs())
        old = module.Model(*module.get_init_inputs())
        old.load_state_dict(new.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(new(*inputs), old(*inputs), rtol=1e-4, atol=1e-5)
        assert calls == names, name
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mine = gradients_of(new, inputs)  # the forward pass is fused all the same
        assert calls == [*names, *names], name
        for found, wanted in zip(mine, gradients_of(old, inputs), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert module.ModelNew.why() == {}


def gradients_of(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """The output, the inputs' gradients and the parameters'."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    model.zero_grad(set_to_none=True)
    output = model(*inputs)
    output.backward(torch.linspace(-1, 1, output.numel()).reshape(output.shape))
    return [output.detach(), *(x.grad for x in inputs), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("options", [(), ("train",)])
def test_infinite_limits_are_written_as_code(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    module = exported(tmp_path, "limits", *options)
    calls = run_on_cpu(module, monkeypatch)
    new, old = module.ModelNew(), module.Model()
    old.load_state_dict(new.state_dict())
    inputs = module.get_inputs()
    for mine, theirs in zip(gradients_of(new, inputs), gradients_of(old, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert calls


@pytest.mark.parametrize("options", [(), ("train",)])
def test_second_derivatives_are_the_originals(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    module = exported(tmp_path, "nested", *options)
    run_on_cpu(module, monkeypatch)
    new, old = module.ModelNew().double().eval(), module.Model().double().eval()
    monkeypatch.setattr(module, "_FITTING", {k: (torch.float64, *v[1:]) for k, v in module._FITTING.items()})
    old.load_state_dict(new.state_dict())
    penalties = []
    for model in (new, old):
        torch.manual_seed(1)
        inputs = [x.double().requires_grad_() for x in module.get_inputs()]
        gradients = torch.autograd.grad(model(*inputs).pow(2).sum(), inputs, create_graph=True)
        sum(g.pow(2).sum() for g in gradients).backward()
        penalties.append([x.grad for x in inputs] + [p.grad for p in model.parameters()])
    for mine, theirs in zip(*penalties, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-9)


def test_compiled_with_gradients_without_a_backward_kernel(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = exported(tmp_path, "nested")
    calls = run_on_cpu(module, monkeypatch)
    new = module.ModelNew().eval()
    old = module.Model().eval()
    old.load_state_dict(new.state_dict())
    compiled = torch.compile(new, fullgraph=True, backend="aot_eager")
    inputs = module.get_inputs()
    mine, theirs = gradients_of(compiled, inputs), gradients_of(old, inputs)
    for found, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert len(calls) == 6 and module.ModelNew.why() == {}
    torch._dynamo.reset()


@pytest.mark.parametrize("training", [False, True])
def test_nested_model_trains_as_the_original(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    module = exported(tmp_path, "nested", "train")
    calls = run_on_cpu(module, monkeypatch)
    new = module.ModelNew().train(training)
    old = module.Model().train(training)
    old.load_state_dict(new.state_dict())
    gradients = []
    for model in (new, old):
        torch.manual_seed(5)
        inputs = [x.requires_grad_() for x in module.get_inputs()]
        output = model(*inputs)
        output.backward(torch.linspace(-1, 1, output.numel()).reshape(output.shape))
        gradients.append([output, *(x.grad for x in inputs), *(p.grad for p in model.parameters())])
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    assert sum(name.endswith("_train") for name in calls) == 6
    assert sum(name.endswith("_backward") for name in calls) == 6
    calls.clear()
    with torch.no_grad():
        new(*module.get_inputs())
    assert len(calls) == 6 and "block_2_tf32" in calls
    calls.clear()
    inputs = module.get_inputs()
    new(*inputs, mask=torch.ones(1))  # not as it was traced: the blocks inside it still are
    assert len(calls) == 4


def test_exported_model_compiles_whole(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = exported(tmp_path, "nested", "train")
    calls = run_on_cpu(module, monkeypatch)
    new = module.ModelNew().eval()
    compiled = torch.compile(new, fullgraph=True, backend="aot_eager")
    inputs = module.get_inputs()
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), new(*inputs))
    assert len(calls) == 12
    x = [t.requires_grad_() for t in module.get_inputs()]
    compiled(*x).sum().backward()
    assert x[0].grad is not None and any(name.endswith("_backward") for name in calls)
    torch._dynamo.reset()


def test_other_models_of_the_class_run_the_original_code(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = exported(tmp_path, "small")
    calls = run_on_cpu(module, monkeypatch)
    x = module.get_inputs()[0]
    with torch.no_grad():
        module.ModelNew()(x)
        assert len(calls) == 1
        strided = module.ModelNew(stride=2)
        with pytest.warns(RuntimeWarning, match=r"conv.stride is \(2, 2\), not \(1, 1\)"):
            assert strided(x).shape == (4, 8, 5, 5)
        module.ModelNew()(torch.rand(4, 3, 13, 12))
        module.ModelNew().double()(x.double())
        assert len(calls) == 1
        copy.deepcopy(module.ModelNew())(x)
        assert len(calls) == 2


def test_kernels_that_cannot_be_built_leave_the_original_code(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(**_: object) -> None:
        tried.append(1)
        raise OSError("no compiler")

    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", fail)
    module = exported(tmp_path, "small", "train")
    gpu = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    unable = module._unable
    run_on_cpu(module, monkeypatch)
    monkeypatch.setattr(module, "_unable", lambda name, device: unable(name, 0))
    new = module.ModelNew()
    x = module.get_inputs()[0]
    with pytest.warns(RuntimeWarning, match=r"could not be built \(no compiler\)"):
        first = new(x)
    assert torch.equal(new(x), first) and torch.equal(module.Model.forward(new, x), first)
    extensions = {extension for extension, _ in module._OPERATORS.values()}
    assert len(tried) <= len(extensions)


def test_tables_of_classes_are_variables_of_the_gpu() -> None:
    text = "struct A {\n  static constexpr Table table = make();\n};\nint i = A::table.count;\n"
    wanted = (
        "struct A {\n};\ntemplate <class Owner>\n__device__ constexpr auto table_of = Owner::make();\n"
        "int i = table_of<A>.count;\n"
    )
    assert device_code._tables_outside(text) == wanted


def test_shapes_of_a_model_that_looks_at_values(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "looks.py"
    path.write_text(
        NESTED.replace("for block in self.blocks:", "for block in self.blocks[: 1 + int(x.sum() > 0)]:")
    )
    text = export.export(str(path), "sm_90a", "fuse", False, "new.py")
    assert "group_norm(2) | residual_add | relu @ 4x16x16x16" in text  # the blocks, of the whole batch
    assert "leaky_relu" not in re.findall(r"^#   (.*)", text)  # not the model's own forward


def test_a_forward_may_read_sizes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sizes.py"
    line = "return torch.relu(self.norm(self.conv(x)))"
    assert line in SMALL
    reads = f"""x = {line[7:]}
        torch._assert(x.ndim == 4, "four")
        n, c, h, w = x.shape
        return x.reshape(n, c, h * w)"""
    path.write_text(SMALL.replace(line, reads))
    path.with_name("new.py").write_text(export.export(str(path), "sm_90a", "fuse", False, "new.py"))
    module = load(path.with_name("new.py"))
    calls = run_on_cpu(module, monkeypatch)
    old, new = module.Model(), module.ModelNew()
    old.load_state_dict(new.state_dict())
    for samples in (4, 3):
        x = torch.rand(samples, 3, 12, 12)
        with torch.no_grad():
            torch.testing.assert_close(new(x), old(x), rtol=1e-4, atol=1e-5)
    assert len(calls) == 2 and module.ModelNew.why() == {}


def test_exported_unpacking_takes_as_many_values_as_the_originals(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sizes.py"
    reads = "n, c, h, w = x.shape\n        return torch.relu(self.norm(self.conv(x))) * h"
    path.write_text(SMALL.replace("return torch.relu(self.norm(self.conv(x)))", reads))
    path.with_name("new.py").write_text(export.export(str(path), "sm_90a", "fuse", False, "new.py"))
    module = load(path.with_name("new.py"))
    run_on_cpu(module, monkeypatch)
    x = torch.rand(4, 3, 12, 12)
    old, new = module.Model(), module.ModelNew()
    old.load_state_dict(new.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(new(x), old(x), rtol=1e-4, atol=1e-4)
    for model in (old, new):
        with pytest.raises(ValueError, match="not enough values to unpack .expected 4, got 3"):
            model(x[0])


def test_headers_declare_different_names() -> None:
    """Kernels of all headers stand in one namespace of an exported file."""
    files = dict(json.loads(torch.ops.onepass.cuda_device_code()))
    assert device_code.shared_names(files) == {}
    twice = {
        name: "#pragma once\nnamespace onepass {\n\nstruct Twice {};\n\n}  // namespace onepass\n"
        for name in "ab"
    }
    assert device_code.shared_names(twice) == {"onepass::Twice": {"a", "b"}}
    nested = {
        name: "#pragma once\nnamespace onepass {\n\n"
        f"template <class T>\nstruct {owner}<T>::Piece {{}};\n\n}}  // namespace onepass\n"
        for name, owner in {"a": "First", "b": "Second", "c": "Second"}.items()
    }
    assert device_code.shared_names(nested) == {"onepass::Second::Piece": {"b", "c"}}


def test_nested_classes_that_nothing_reaches_are_left_out() -> None:
    header = (
        "// A header.\n#pragma once\n\nnamespace onepass {\n\n"
        "template <class T>\nstruct Kernel {\n  struct Used;\n  struct Unused;\n};\n\n"
        "template <class T>\nstruct Kernel<T>::Used {\n  int used;\n};\n\n"
        "template <class T>\nstruct Kernel<T>::Unused {\n  int unused;\n};\n\n}  // namespace onepass\n"
    )
    merged = device_code.merge({"kernel.cuh": header}, ['#include "kernel.cuh"\nKernel<int>::Used used;\n'])
    assert "int used;" in merged
    assert "int unused;" not in merged


def test_namespaces_end_where_they_do() -> None:
    header = (
        "// A header.\n#pragma once\n\nnamespace onepass {\n\n"
        "namespace inner {\nconstexpr int four = 4;\n}\n\n"
        "template <class T>\nstruct Outer {\n  int four[inner::four];\n};\n\n}  // namespace onepass\n"
    )
    text = device_code.merge({"a.cuh": header}, ['#include "a.cuh"\nusing Own = onepass::Outer<int>;\n'])
    assert re.findall(r"^namespace .*", text, re.MULTILINE) == [
        "namespace onepass::inner {",
        "namespace onepass {",
    ]
    assert text.index("namespace onepass {") < text.index("template <class T>\nstruct Outer {")


def test_specialisations_are_of_stages_that_are_there() -> None:
    files = dict(json.loads(torch.ops.onepass.cuda_device_code()))
    source = '#include "device/pointwise.cuh"\nusing Own = pointwise::Folded<pointwise::relu_stage<32>>;\n'
    text = device_code.merge(files, [source])
    assert "struct Folded {" in text
    assert "struct relu_stage" in text
    assert "hardswish_stage" not in text
    text = device_code.merge(files, [source.replace("relu", "hardswish")])
    assert "struct Folded<hardswish_stage<Bits>> {" in text
    assert text.index("struct hardswish_stage") < text.index("struct Folded<hardswish_stage<Bits>>")


def test_file_is_imported_twice(tmp_path: pathlib.Path) -> None:
    first = exported(tmp_path, "small")
    again = load(pathlib.Path(first.__file__))
    x = again.get_inputs()[0]
    assert not again._changed_1(again.ModelNew()) and again.ModelNew()(x).shape == first.ModelNew()(x).shape
    assert hasattr(getattr(torch.ops, again._NAMESPACE), "block_1_tail")


def test_kept_convolutions_are_left_alone(tmp_path: pathlib.Path) -> None:
    module = exported(tmp_path, "s27", "keep", "train")
    assert set(module._OPERATORS) == {"block_1", "block_1_train", "block_1_backward"}
    text = text_of("s27", "keep", "train")
    assert "hardswish | group_norm(4) | mean" in text and "conv3d(" not in text
    for operator in ("block_1_train", "block_1_backward"):
        body = re.search(rf"^void {operator}\(.*?^}}", text, re.DOTALL | re.MULTILINE).group(0)
        assert body.count(".launch(") == 1


# --- The judge, on a CPU that says it is a GPU --------------------------------------------------------

PRETEND = """
import runpy, sys, types
import torch
torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_: self
torch.cuda.synchronize = lambda *_: None
torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(L2_cache_size=1 << 20)
empty = torch.empty
torch.empty = lambda *sizes, device=None, **options: empty(*sizes, **options)
sys.argv = ["judge.py", "--train"]
runpy.run_path("judge.py", run_name="__main__")
"""
JUDGED = {
    "right": ("", []),
    "a wrong output": ("\nModelNew.forward = lambda self, x: Model.forward(self, x) * 1.001\n", ["output 0"]),
    "no gradient": (
        "\nModelNew.forward = lambda self, x: Model.forward(self, x) + self.norm.bias.sum() * 0.1"
        " - (self.norm.bias.sum() * 0.1).detach()\n",
        ["gradient of norm.bias"],
    ),
}


@pytest.mark.parametrize("case", list(JUDGED))
def test_judge(tmp_path: pathlib.Path, case: str) -> None:
    addition, faults = JUDGED[case]
    (tmp_path / "original.py").write_text(SMALL)
    (tmp_path / "exported.py").write_text(text_of("small") + addition)
    shutil.copy(verify._JUDGE, tmp_path / "judge.py")
    shutil.copy(verify.rules.__file__, tmp_path / "rules.py")
    (tmp_path / "pretend.py").write_text(PRETEND)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "pretend.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    wrong = json.loads(run.stdout.splitlines()[-1])["wrong"]
    assert bool(wrong) == bool(faults) and all(any(fault in line for line in wrong) for fault in faults), (
        wrong
    )
    assert ("times as fast" in run.stdout) == (not faults)


def test_judge_refuses_a_file_that_imports_onepass(tmp_path: pathlib.Path) -> None:
    (tmp_path / "original.py").write_text(SMALL)
    good, said = verify.run(tmp_path / "original.py", "import onepass\n" + SMALL, train=False)
    assert not good and "imports onepass" in said


# --- What is refused --------------------------------------------------------------------------------

REFUSED = {
    "nothing to fuse": (
        SMALL.replace("torch.relu(self.norm(self.conv(x)))", "self.conv(x)"),
        "nothing to fuse",
    ),
    "a neighbour": ("import beside_it\n" + SMALL, "does not load without the files beside it"),
    "an error": (SMALL.replace("self.norm = ", "self.norm = undefined + "), "raises NameError"),
    "no inputs": (SMALL.replace("get_inputs", "get_other"), "misses get_inputs"),
    "a value": (
        SMALL.replace(
            "torch.relu(self", "torch.relu(self.norm(x[:, :2].repeat(1, 4, 1, 1)) if x.sum() > 0 else self"
        ),
        "branches or loops",
    ),
    "a name": (SMALL + "\n\ndef _attempt():\n    return 1\n", "has the name _attempt"),
    "a method": (
        SMALL.replace("    def forward", "    def why(self):\n        pass\n\n    def forward"),
        "the name why",
    ),
    "not Python": ("class Model(", "not Python"),
    "not UTF-8": (SMALL.encode() + "# café\n".encode("latin-1"), "is not text in UTF-8"),
    "a function": (
        SMALL.replace("class Model", "class Own") + "\n\ndef Model():\n    return Own()\n",
        "Model is a function, must be a class",
    ),
    "a lambda": (SMALL.replace("class Model", "class Own") + "\n\nModel = lambda: Own()\n", "is a function"),
    "another class": (
        SMALL.replace("class Model", "class Own") + "\n\nclass Model(Own):\n    def __new__(cls):\n"
        "        return Own()\n",
        "Model makes a Own, must make a Model",
    ),
    "a dict": (
        SMALL.replace("[torch.rand(4, 3, 12, 12)]", "[{'a': torch.rand(4, 3, 12, 12)}]").replace(
            "self.conv(x)", "self.conv(x['a'])"
        ),
        "x is a dict, must be a tensor",
    ),
    "an end": (SMALL.replace("torch.rand(4, 3, 12, 12)", "exit(5)"), "get_inputs() raises SystemExit: 5"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refusal_is_one_sentence_and_writes_nothing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    text, said = REFUSED[case]
    path, output = tmp_path / "model.py", tmp_path / "out" / "new.py"
    output.parent.mkdir()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "beside_it.py").write_text("")
    assert export.main([str(path), "-o", str(output), "--no-verify"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("onepass: ") and said in error and error.count("\n") == 1, error
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "nowhere/new.py"], "no such folder"),
        (["-o", "/proc/new.py"], "cannot be written"),
        (["-o", "model.py"], "is the model file model.py itself"),
        (["-o", "../{folder}/model.py"], "is the model file model.py itself"),
        (["-o", "new.txt"], "must end in .py"),
        (["-o", "new.py", "--arch", "sm_75"], "sm_75"),
        ([], "required"),
        (["-o", "new.py", "--verify"], "no CUDA device"),
    ],
)
def test_bad_requests(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
) -> None:
    if "--verify" in options and torch.cuda.is_available():
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(SMALL)
    assert export.main(["model.py", *(option.format(folder=tmp_path.name) for option in options)]) == 2
    assert said in capsys.readouterr().err
    assert (tmp_path / "model.py").read_text() == SMALL
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"model.py"}


def test_failed_write_leaves_the_old_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "new.py"
    output.write_text("old")

    def refuse(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="full"):
        _output_file.publish(output, "new")
    assert output.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_command_writes_the_file(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "model.py", tmp_path / "new.py"
    path.write_text(SMALL)
    assert export.main([str(path), "-o", str(output), "--arch", "sm_80", "--no-verify"]) == 0
    said = capsys.readouterr().out
    assert "fused for sm_80:\n  block_1: conv2d(3,8,k=3) | group_norm(2) | relu @ 4x3x12x12\n" in said
    assert "not verified: " in said and "imported, and ModelNew made" in said
    text = output.read_text()
    assert SMALL.rstrip() in text and "(8, 0)" in text and "arch=compute_80,code=sm_80" in text
    assert output.stat().st_mode & 0o777 == path.stat().st_mode & 0o777


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_links_to_the_model_file_are_not_written(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], link: str
) -> None:
    path, output = tmp_path / "model.py", tmp_path / "new.py"
    path.write_text(SMALL)
    getattr(output, link)(path)
    assert export.main([str(path), "-o", str(output), "--no-verify"]) == 2
    assert "is the model file" in capsys.readouterr().err
    assert path.read_text() == SMALL and output.samefile(path)


BROKEN = {
    "on import": ("\nclass ModelNew(lambda: 0):\n    pass\n", "TypeError"),
    "when called": ("\ndef _run_99(x):\n    return x * inf\n", "it uses inf, which it does not define"),
    "when made": ("\nModelNew.__init__ = lambda self: 1 / 0\n", "ZeroDivisionError"),
    "with onepass": ("\nimport onepass\n", "imports onepass"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_broken_does_not_take_the_place_of_a_good_one(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    addition, said = BROKEN[case]
    path, output = tmp_path / "model.py", tmp_path / "new.py"
    path.write_text(SMALL)
    output.write_text("old")
    write = Writer.write
    monkeypatch.setattr(Writer, "write", lambda self, fused: write(self, fused) + addition)
    assert export.main([str(path), "-o", str(output), "--no-verify"]) == 1
    captured = capsys.readouterr()
    assert said in captured.out and "was not written" in captured.err
    assert output.read_text() == "old" and len(list(tmp_path.glob("*.py"))) == 2


NO_NUMBERS = {
    "a default": SMALL.replace("def forward(self, x)", "def forward(self, x, most=float('inf'))").replace(
        "(self.conv(x)))", "(self.conv(x))) * min(most, 3.0)"
    ),
    "behind the block": SMALL.replace("return torch.relu", "y = torch.relu").replace(
        "(self.conv(x)))",
        "(self.conv(x)))\n        return y.masked_fill(y < 1, -float('inf')) + 'inf'.count('i')",
    ),
    "a limit": SMALL.replace(
        "torch.relu(self.norm(self.conv(x)))", "self.norm(self.conv(x)).clamp(0, torch.inf)"
    ),
}


@pytest.mark.parametrize("case", NO_NUMBERS)
def test_constants_that_are_no_numbers(tmp_path: pathlib.Path, case: str) -> None:
    path, output = tmp_path / "model.py", tmp_path / "new.py"
    path.write_text(NO_NUMBERS[case])
    output.write_text(export.export(str(path), "sm_90a", "fuse", False, "new.py"))
    assert verify.why_not_importable(path, output.read_text()) == ""
    module = load(output)
    new, old = module.ModelNew(), module.Model()
    old.load_state_dict(new.state_dict())
    x = module.get_inputs()[0]
    with pytest.warns(RuntimeWarning, match="not on a GPU"):
        assert torch.equal(new(x), old(x))


@pytest.mark.parametrize("constant", ["float('inf')", "-float('inf')", "float('nan')", "10**400"])
def test_stages_with_constants_that_are_no_numbers_stay(tmp_path: pathlib.Path, constant: str) -> None:
    path = tmp_path / "model.py"
    leaky = f"torch.nn.functional.leaky_relu(self.conv(x), {constant})"
    path.write_text(SMALL.replace("self.norm(self.conv(x))", f"self.norm({leaky})"))
    module = load(path)
    report = onepass.report(onepass.fuse(module.Model()))
    assert all("leaky_relu" not in entry.block for entry in report.fused)


@pytest.mark.parametrize("old", ["[torch.rand(4, 3, 12, 12)]", "[]"])
def test_inputs_by_name(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], old: str) -> None:
    path, output = tmp_path / "model.py", tmp_path / "new.py"
    new = {"[]": "{'channels': 16}"}.get(old, "{'x': torch.rand(4, 3, 12, 12)}")
    path.write_text(SMALL.replace(f"return {old}", f"return {new}"))
    assert export.main([str(path), "-o", str(output), "--no-verify"]) == 0
    assert "block_1" in capsys.readouterr().out


def test_a_declared_encoding_is_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.py"
    path.write_bytes(f"# coding: latin-1\nNAME = 'café'\n{SMALL}".encode("latin-1"))
    (tmp_path / "new.py").write_text(export.export(str(path), "sm_90a", "fuse", False, "new.py"), "utf-8")
    assert load(tmp_path / "new.py").NAME == "café"


def test_what_is_not_fused_is_said_with_the_reason(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "nested.py"
    path.write_text(
        NESTED.replace(
            "for block in self.blocks:",
            "if x.sum() > 0:\n            h = h + 1\n        for block in self.blocks:",
        )
    )
    said = export.exported(str(path), "sm_90a", "fuse", False, "new.py", "pytorch").summary
    at = said.index("not fused:")
    assert any("group_norm(2) | residual_add | relu @ 4x16x16x16" in line for line in said[:at])
    assert any(line.startswith("  (Model): ") and "branches" in line for line in said[at:]), said


# --- The committed examples ---------------------------------------------------------------------------


def test_examples_are_what_the_command_writes() -> None:
    paths = sorted(EXAMPLES.glob("*.py"))
    assert {path.stem for path in paths} >= set(WORKLOADS)
    for path in paths:
        command = shlex.split(path.read_text().splitlines()[1].removeprefix("#"))
        options = command[4:]
        original = ROOT / "examples" / options[0]
        conv = "keep" if "keep" in options else "fuse"
        text = export.export(str(original), "sm_90a", conv, "--train" in options, path.name)
        assert text == path.read_text(), f"{path}: run make examples"


def extensions() -> list[tuple[str, str]]:
    found = []
    for path in sorted(EXAMPLES.glob("*.py")):
        keys = re.findall(r'^    "(\w+)": \(_BINDING', path.read_text(), re.MULTILINE)
        found += [(path.name, key) for key in keys]
    return found


@pytest.mark.parametrize(("file", "extension"), extensions())
def test_examples_compile(tmp_path: pathlib.Path, file: str, extension: str) -> None:
    module = load(EXAMPLES / file) if not hasattr(load, file) else getattr(load, file)
    setattr(load, file, module)
    head, device_code, kernels, host_code, launches = module._EXTENSIONS[extension][1]
    source = tmp_path / "cuda.cu"
    if nvcc := shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc"):
        source.write_text("\n".join([head, device_code, kernels, host_code, launches]))
        command = [nvcc, "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-c", str(source)]
        run = subprocess.run([*command, "-o", str(tmp_path / "cuda.o")], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
    else:
        compile_by_nvrtc(device_code + kernels)


def compile_by_nvrtc(text: str, target: str = "sm_90a", headers: Mapping[str, str] | None = None) -> str:
    """Its PTX, of compute_90a."""
    headers = headers or {}
    folders = [pathlib.Path(folder) / "nvidia" for folder in sys.path]
    paths = [
        os.environ.get("ONEPASS_NVRTC"),
        *(p for f in folders for p in f.glob("*/lib/libnvrtc.so.1[23]")),
    ]
    nvrtc = ctypes.CDLL(str(next(path for path in paths if path)))
    program = ctypes.c_void_p()
    source = text.encode()
    strings = ctypes.c_char_p * len(headers)
    names, texts = (strings(*(text.encode() for text in side)) for side in (headers.keys(), headers.values()))
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"cuda.cu", len(headers), texts, names)
    assert created == 0
    options = [
        f"--gpu-architecture={target}".encode(),
        b"--std=c++17",
        b"--device-as-default-execution-space",
    ]
    result = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert result == 0, log.value.decode()
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx.value.decode()


def instructions(ptx: str) -> collections.Counter[str]:
    """How often each occurs."""
    return collections.Counter(re.findall(r"^\t(?:@!?%p\d+ )?([a-z][\w.:]*)", ptx, re.MULTILINE))


def test_functions_of_16_bits_are_those_of_the_library(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "halves.py"
    path.write_text(HALVES)
    text = export.export(str(path), "sm_90a", "keep", False, "new.py")
    (tmp_path / "new.py").write_text(text)
    (extension,) = load(tmp_path / "new.py")._EXTENSIONS.values()
    _, device_code, kernels, _, _ = extension[1]
    found = instructions(compile_by_nvrtc(device_code + kernels, "compute_90a"))
    planner = plans.Planner("sm_90a")
    tail, sizes = "swish | group_norm(2) | gelu", (4, 8, 10, 10)
    problem = plans.Problem(tail, sizes, "bf16", "nchw", sizes, ((8,), (8,)), 2)
    (kernel,) = planner.operator("block_1", plans.FORWARD, problem).kernels
    assert found == instructions(compile_by_nvrtc(kernel.source, "compute_90a", planner.files))
    assert found["tanh.approx.f32"] > 0  # the short sigmoid


def test_wide_blocks_of_16_bits_are_those_of_the_library(tmp_path: pathlib.Path) -> None:
    text = (ROOT / "examples" / "s19.py").read_text()
    text = text.replace("\n\n    def forward", "\n        self.to(torch.bfloat16)\n\n    def forward", 1)
    (tmp_path / "wide.py").write_text(
        re.sub(r"torch\.rand\((.*)\)\]", r"torch.rand(\1, dtype=torch.bfloat16)]", text)
    )
    new = tmp_path / "new.py"
    new.write_text(export.export(str(tmp_path / "wide.py"), "sm_90a", "fuse", False, "new.py"))
    (extension,) = load(new)._EXTENSIONS.values()
    _, device_code, kernels, _, _ = extension[1]
    found = instructions(compile_by_nvrtc(device_code + kernels, "compute_90a"))
    block, sizes = "conv_transpose2d(64,64,k=3) | gelu | group_norm(8)", (128, 64, 256, 256)
    parameters = ((64, 64, 3, 3), (64,), (64,), (64,))
    problem = plans.Problem(block, sizes, "bf16", "nchw", (128, 64, 258, 258), parameters, 8)
    planner = plans.Planner("sm_90a")
    of_library: collections.Counter[str] = collections.Counter()
    for kernel in planner.operator("block_1", plans.FORWARD, problem).kernels:
        of_library += instructions(compile_by_nvrtc(kernel.source, "compute_90a", planner.files))
    assert found == of_library
    assert found["tanh.approx.f32"] > 0


def test_modules_of_the_exported_file_are_checked(tmp_path: pathlib.Path) -> None:
    """A module that is not what the kernels were written for: the model is not fused."""
    module = exported(tmp_path, "nested")

    class Other(nn.GroupNorm):
        pass

    model = module.ModelNew()
    model.blocks[0].norm = Other(2, 16)
    assert module._changed_2(model.blocks[0]) == "norm is Other, not GroupNorm"


def test_a_row_that_does_not_take_any_batch_is_left_at_its_limit(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.py"
    text = (ROOT / "examples" / "s61.py").read_text()
    path.write_text(text.replace("out_channels = 16, 64, 128", "out_channels = 2, 64, 128"))
    written = export.export(str(path), "sm_90a", "fuse", False, path.name)
    assert "plan: gemm_packed" in written
    limits = dict(re.findall(r"'(\w+)': (\d+)", re.search(r"^_MOST_SAMPLES = (.*)$", written, re.M)[1]))
    outputs = 128 * 34**3
    assert int(limits["block_1_tf32"]) * outputs < 2**31 <= (int(limits["block_1_tf32"]) + 1) * outputs


def test_a_training_step_is_left_at_the_limit_of_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {plans.STATISTICS: 9, plans.BACKWARD: 7}
    monkeypatch.setattr(plans.Operator, "most_samples", property(lambda self: limits.get(self.what)))
    written = export.export(str(ROOT / "examples" / "s27.py"), "sm_90a", "keep", True, "s27_new.py")
    assert "_MOST_SAMPLES = {'block_1_train': 7}" in written


def test_a_kernel_that_holds_a_sample_is_left_to_gpus_with_room_for_it(tmp_path: pathlib.Path) -> None:
    module = exported(tmp_path, "s19")
    # In tf32 a block for each tile of a sample, all at a time; the strict one computes tiles twice instead.
    least = module._LEAST_MULTIPROCESSORS["block_1_tf32"]
    assert dict.fromkeys(("block_1_tf32", "block_1_tf32_away"), least) == module._LEAST_MULTIPROCESSORS
    assert 100 < least <= 132
    gpu = module._gpus[0] = types.SimpleNamespace(major=9, minor=0, multi_processor_count=least - 1)
    module._built |= {extension: "" for extension in module._EXTENSIONS}
    assert module._unable("block_1_tf32", 0) == (
        f"the GPU has {least - 1} multiprocessors, the kernel needs {least}"
    )
    assert module._unable("block_1_f32", 0) == ""
    gpu.multi_processor_count = least
    assert module._unable("block_1_tf32", 0) == ""
    gpu.major = 10
    assert module._unable("block_1_tf32", 0) == "the GPU is sm_100, the kernels are for sm_90a"
