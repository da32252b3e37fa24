"""Exported models that are changed after they were made: the original code runs, is warned of and counted."""

from __future__ import annotations

import copy
import pathlib
import re
import shutil
import types
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.utils.cpp_extension
from test_export import exported, gradients_of, load, run_on_cpu
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from onepass import available, export, unavailable_reason

pytestmark = pytest.mark.skipif(not available(), reason=str(unavailable_reason()))

GUARDED = '''"""Chains over leaves, an inner module and attributes of the model."""
import types

import torch
import torch.nn.functional as F
from torch import nn

GAIN = 1


def doubled(x):
    return x * 2 if GAIN == 1 else x * 3


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, 8)
        self.half = False

    def forward(self, x):
        h = self.norm(self.conv(x))
        return h / 2 if self.half else h


class Model(nn.Module):
    shift = 0.25

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.leaky = nn.LeakyReLU(0.1)
        self.norm = nn.GroupNorm(2, 8)
        self.gelu = nn.GELU()
        self.bounded = nn.Hardtanh(-1.5, 1.5)
        self.inner = Inner()
        self.more = nn.ModuleList([nn.Conv2d(8, 8, 1)])
        self.last = None
        self.scale, self.flag, self.sizes, self.act = 2.0, True, (1, 2), F.silu
        self.options, self.settings = {"power": 1}, types.SimpleNamespace(power=1)

    def tripled(self, x):
        return x * 3

    def forward(self, x):
        h = self.bounded(self.gelu(self.norm(self.leaky(self.conv(x)))))
        h = torch.relu(self.inner(h))
        for layer in self.more:
            h = layer(h)
        h = self.tripled(doubled(h)) * self.scale * sum(self.sizes) + self.shift
        h = h ** self.options["power"] ** self.settings.power
        h = self.act(h) if self.flag else h
        return h if self.last is None else self.last(h)


def get_inputs():
    return [torch.rand(2, 3, 8, 8)]


def get_init_inputs():
    return []
'''


BLOCKS = 3  # fused of it


@pytest.fixture(scope="module")
def texts() -> dict[bool, str]:
    return {}


@pytest.fixture
def guarded(
    request: pytest.FixtureRequest,
    texts: dict[bool, str],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> types.SimpleNamespace:
    """The exported model on the CPU, the calls of its operators, and the original with the same weights."""
    train = bool(getattr(request, "param", False))
    if train not in texts:
        monkeypatch.setattr(export, "_check_alone", lambda path: None)
        (tmp_path / "guarded.py").write_text(GUARDED)
        texts[train] = export.export(str(tmp_path / "guarded.py"), "sm_90a", "fuse", train, "new.py")
    namespace = re.search(r'^_NAMESPACE = "(\w+)"', texts[train], re.MULTILINE).group(1)
    path = tmp_path / "new.py"
    path.write_text(texts[train].replace(namespace, f"{namespace}_{tmp_path.name}"))
    module = load(path)
    calls = run_on_cpu(module, monkeypatch)
    torch.manual_seed(1)
    new, old = module.ModelNew(), module.Model()
    old.load_state_dict(new.state_dict())
    x = module.get_inputs()[0]
    return types.SimpleNamespace(module=module, calls=calls, new=new, old=old, x=x)


def set_to(path: str, value: Any) -> Callable[..., None]:
    """Sets an attribute of the model, by its path."""

    def change(model: Any, *_: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            model = getattr(model, parent)
        setattr(model, name, value() if callable(value) and isinstance(value, type(lambda: 0)) else value)

    return change


def hooked(register: str, path: str) -> Callable[..., None]:
    """Registers a hook that changes the output, or the gradients of the input."""

    def change(model: Any, *_: Any) -> None:
        given = lambda module, value, *_: (value[0] * 2,)  # noqa: E731
        output = lambda module, args, result: result * 2  # noqa: E731
        hook = output if register == "register_forward_hook" else given
        getattr(model.get_submodule(path), register)(hook)

    return change


def patched(owner: Callable[[Any], Any], name: str, make: Callable[[Any], Any]) -> Callable[..., None]:
    """Replaces something for all models; once, for it is changed for the original too."""

    def change(model: Any, module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        place = owner(module)
        if not getattr(getattr(place, name), "is_new", False):
            replacement = make(getattr(place, name))
            if callable(replacement):
                replacement.is_new = True
            monkeypatch.setattr(place, name, replacement)

    return change


def times_two(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def on_object(path: str, name: str) -> Callable[..., None]:
    def change(model: Any, *_: Any) -> None:
        module = model.get_submodule(path)
        setattr(module, name, times_two(getattr(module, name)))

    return change


CHANGES: dict[str, Callable[..., None]] = {
    "forward hook": hooked("register_forward_hook", "conv"),
    "forward hook, last leaf": hooked("register_forward_hook", "bounded"),
    "forward pre-hook": hooked("register_forward_pre_hook", "norm"),
    "backward hook": hooked("register_full_backward_hook", "gelu"),
    "backward pre-hook": hooked("register_full_backward_pre_hook", "leaky"),
    "hook on an inner module": hooked("register_forward_hook", "inner"),
    "hook on an inner leaf": hooked("register_forward_hook", "inner.norm"),
    "eps": set_to("norm.eps", 0.5),
    "num_groups": set_to("norm.num_groups", 4),
    "stride": set_to("conv.stride", (2, 2)),
    "padding": set_to("conv.padding", (2, 2)),
    "padding_mode": set_to("conv.padding_mode", "circular"),
    "dilation": set_to("conv.dilation", (2, 2)),
    "negative_slope": set_to("leaky.negative_slope", 0.7),
    "approximate": set_to("gelu.approximate", "tanh"),
    "inplace": set_to("leaky.inplace", True),
    "min_val": set_to("bounded.min_val", 0.125),
    "no bias": set_to("conv.bias", None),
    "a bias": set_to("inner.conv.bias", lambda: nn.Parameter(torch.ones(8))),
    "no affine": lambda model, *_: (set_to("norm.weight", None)(model), set_to("norm.bias", None)(model)),
    "another leaf": set_to("gelu", lambda: nn.Tanh()),
    "no leaf of its class": set_to("gelu", lambda: type("GELU", (nn.GELU,), {"forward": lambda _, x: x})()),
    "another inner module": set_to("inner", lambda: nn.Identity()),
    "forward of a leaf": on_object("norm", "forward"),
    "_conv_forward of a leaf": on_object("conv", "_conv_forward"),
    "forward of an inner module": on_object("inner", "forward"),
    "method of the model": on_object("", "tripled"),
    "flag of an inner module": set_to("inner.half", True),
    "number": set_to("scale", 0.5),
    "flag": set_to("flag", False),
    "tuple": set_to("sizes", (5, 6)),
    "function": set_to("act", lambda: torch.tanh),
    "dictionary": lambda model, *_: model.options.update(power=2),
    "object": lambda model, *_: setattr(model.settings, "power", 0),
    "attribute of the class": set_to("shift", 4.0),
    "appended child": lambda model, *_: model.more.append(nn.Softplus()),
    "child that was None": set_to("last", lambda: nn.Softplus()),
    "forward of a leaf's class": patched(lambda _: nn.GroupNorm, "forward", times_two),
    "_conv_forward of the class": patched(lambda _: nn.Conv2d, "_conv_forward", times_two),
    "forward of the model's class": patched(lambda module: module.Model, "forward", times_two),
    "forward of an inner class": patched(lambda module: module.Inner, "forward", times_two),
    "method of the class": patched(lambda module: module.Model, "tripled", times_two),
    "global function": patched(lambda module: module, "doubled", times_two),
    "global number": patched(lambda module: module, "GAIN", lambda _: 2),
    "call of all modules": patched(lambda _: nn.Module, "__call__", times_two),
}


@pytest.mark.parametrize("case", list(CHANGES))
def test_what_was_changed_runs_the_original_code(
    guarded: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    new, old, calls, x = guarded.new, guarded.old, guarded.calls, guarded.x
    before = gradients_of(new, [x])
    assert len(calls) == BLOCKS and guarded.module.ModelNew.why() == {}
    torch.manual_seed(2)
    CHANGES[case](new, guarded.module, monkeypatch)
    torch.manual_seed(2)
    CHANGES[case](old, guarded.module, monkeypatch)
    with pytest.warns(RuntimeWarning, match="ModelNew: forward runs the original code: "):
        found = gradients_of(new, [x])
    assert len(calls) == BLOCKS
    for mine, theirs in zip(found, gradients_of(old, [x]), strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    if case != "inplace":
        same = [
            len(a.shape) == len(b.shape) and a.shape == b.shape and torch.allclose(a, b)
            for a, b in zip(before, found)
            if a is not None and b is not None
        ]
        assert not all(same) or len(before) != len(found), "the change changes nothing"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new(x)
    assert list(guarded.module.ModelNew.why().values()) == [2]


def test_hooks_on_all_modules_fire(guarded: types.SimpleNamespace) -> None:
    for register in (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    ):
        seen = []
        handle = register(lambda module, *_, seen=seen: seen.append(type(module)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                guarded.new(guarded.x.clone().requires_grad_()).sum().backward()
        finally:
            handle.remove()
        assert nn.GELU in seen and nn.GroupNorm in seen
    assert guarded.calls == []
    guarded.new(guarded.x)
    assert len(guarded.calls) == BLOCKS


def test_inner_module_in_another_mode(guarded: types.SimpleNamespace) -> None:
    guarded.new.inner.eval()
    with pytest.warns(RuntimeWarning, match="inner.training differs"):
        assert torch.equal(guarded.new(guarded.x), guarded.old(guarded.x))
    assert guarded.calls == []


@pytest.mark.parametrize("name", ["stride", "weight"])
def test_what_was_deleted_fails_as_the_original(guarded: types.SimpleNamespace, name: str) -> None:
    for model in (guarded.new, guarded.old):
        delattr(model.conv, name)
        with warnings.catch_warnings(), pytest.raises(AttributeError, match=name):
            warnings.simplefilter("ignore")
            model(guarded.x)


def test_tensors_are_looked_at_by_the_operators(guarded: types.SimpleNamespace) -> None:
    """A call that is like one before but for its parameters."""
    new, old, x = guarded.new, guarded.old, guarded.x
    with torch.no_grad():
        new(x)
        assert len(guarded.calls) == BLOCKS
        for model in (new, old):
            model.conv.weight.data = torch.ones(8, 3, 1, 1)
        with pytest.warns(RuntimeWarning, match="another type or size"):
            assert torch.equal(new(x), old(x))
        for model in (new, old):
            model.conv.weight.data = torch.ones(8, 3, 3, 3).double()
            with pytest.raises(RuntimeError, match="type"):
                model(x)


def test_a_call_like_one_before_asks_nothing_again(
    guarded: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes time is asked once for each kind of call, and again after a setting was changed."""
    settings = (torch.no_grad, torch.enable_grad)
    outputs = []
    for mode in settings:
        with mode():
            outputs.append(guarded.new(guarded.x))
    asked = []
    for name in ("_unlike", "_mode", "_unable"):
        monkeypatch.setattr(guarded.module, name, lambda *_, name=name: asked.append(name) or "asked again")
    for mode, output in zip(settings, outputs, strict=True):
        with mode():
            assert torch.equal(guarded.new(guarded.x), output)
    assert asked == [] and len(guarded.calls) == 4 * BLOCKS
    before = torch.backends.cudnn.deterministic
    torch._C._set_cudnn_deterministic(not before)
    try:
        with pytest.warns(RuntimeWarning, match="asked again"):
            guarded.new(guarded.x)
    finally:
        torch._C._set_cudnn_deterministic(before)
    assert asked


def test_a_replica_has_its_tensors_as_plain_attributes(guarded: types.SimpleNamespace) -> None:
    """As torch.nn.DataParallel makes them."""
    wanted = guarded.new(guarded.x)
    for module in guarded.new.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                delattr(module, name)
                setattr(module, name, parameter * 1)
    torch.testing.assert_close(guarded.new(guarded.x), wanted)
    assert len(guarded.calls) == 2 * BLOCKS and guarded.module.ModelNew.why() == {}


def test_compiled_code_sees_changes(guarded: types.SimpleNamespace) -> None:
    compiled = torch.compile(guarded.new, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(guarded.x), guarded.old(guarded.x), rtol=1e-4, atol=1e-4)
        assert len(guarded.calls) == BLOCKS
        for model in (guarded.new, guarded.old):
            model.norm.eps, model.scale = 0.5, 3.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(compiled(guarded.x), guarded.old(guarded.x))
    assert len(guarded.calls) == BLOCKS
    torch._dynamo.reset()


# --- Ways of calling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_tangents_are_kept(guarded: types.SimpleNamespace, frozen: bool) -> None:
    guarded.new(guarded.x)
    tangents = []
    for model in (guarded.new, guarded.old):
        model.requires_grad_(not frozen)
        with torch.set_grad_enabled(frozen), forward_ad.dual_level(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = model(forward_ad.make_dual(guarded.x, torch.ones_like(guarded.x)))
            tangents.append(forward_ad.unpack_dual(output).tangent)
    assert torch.equal(*tangents)
    assert "forward-mode" in " ".join(guarded.module.ModelNew.why())


@pytest.mark.parametrize("guarded", [False, True], indirect=True)
def test_batched_gradients_are_the_originals(guarded: types.SimpleNamespace) -> None:
    directions = torch.randn(3, *guarded.old(guarded.x).shape)
    found, jacobians = [], []
    for model in (guarded.new, guarded.old):
        x = guarded.x.clone().requires_grad_()
        leaves = [x, *model.parameters()]
        found.append(torch.autograd.grad(model(x), leaves, directions, is_grads_batched=True))
        x = guarded.x[:1]
        jacobians.append(
            torch.autograd.functional.jacobian(lambda x, m=model: m(x).mean((0, 2, 3)), x, vectorize=True)
        )
    assert guarded.calls
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(*jacobians, rtol=1e-3, atol=1e-4)


def test_traced_by_jit_with_gradients(guarded: types.SimpleNamespace) -> None:
    with pytest.warns(RuntimeWarning, match=r"torch\.jit traces"):
        traced = torch.jit.trace(guarded.new, guarded.x, check_trace=False)
    other = torch.rand_like(guarded.x)
    for mine, theirs in zip(gradients_of(traced, [other]), gradients_of(guarded.old, [other]), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert guarded.calls == []


def test_tensors_without_values(tmp_path: pathlib.Path) -> None:
    module = exported(tmp_path, "small")
    new = module.ModelNew()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert copy.deepcopy(new).to("meta")(torch.empty(4, 3, 12, 12, device="meta")).shape == (4, 8, 10, 10)
        with FakeTensorMode(allow_non_fake_inputs=True):
            with torch.device("cuda"):
                fake = module.ModelNew()
            assert fake(torch.empty(4, 3, 12, 12, device="cuda")).shape == (4, 8, 10, 10)
            assert fake(torch.empty(0, 3, 12, 12, device="cuda")).shape == (0, 8, 10, 10)
    assert "the input is a FakeTensor" in " ".join(module.ModelNew.why())


@pytest.mark.parametrize("guarded", [False, True], indirect=True)
def test_no_samples(guarded: types.SimpleNamespace) -> None:
    for mine, theirs in zip(
        *(gradients_of(model, [guarded.x[:0]]) for model in (guarded.new, guarded.old)), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


class Marked(Tensor):
    """A subclass that notes what is called with it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(function, "__name__", ""))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_subclasses_of_tensors_see_the_original_calls(guarded: types.SimpleNamespace) -> None:
    with pytest.warns(RuntimeWarning, match="Marked"):
        found = guarded.new(guarded.x.as_subclass(Marked))
    assert {"conv2d", "group_norm", "gelu"} <= set(Marked.seen)
    assert torch.equal(found.as_subclass(Tensor), guarded.old(guarded.x))
    assert guarded.calls == []


@pytest.mark.parametrize(
    "given",
    [
        torch.rand(2, 4, 8, 8),
        torch.rand(2, 3, 8),
        torch.rand(8),
        torch.tensor(1.0),
        torch.ones(2, 3, 8, 8, dtype=torch.int64),
        torch.rand(2, 3, 8, 8).to_sparse(),
        torch.nested.nested_tensor([torch.rand(3, 8, 8), torch.rand(3, 4, 8)]),
        None,
        [1.0],
    ],
    ids=["channels", "three", "one", "number", "integers", "sparse", "nested", "None", "list"],
)
def test_what_does_not_fit_fails_as_the_original(guarded: types.SimpleNamespace, given: Any) -> None:
    guarded.new(guarded.x)
    raised = []
    for model in (guarded.new, guarded.old):
        with warnings.catch_warnings(), pytest.raises(Exception) as caught:
            warnings.simplefilter("ignore")
            model(given)
        raised.append((type(caught.value), str(caught.value)))
    assert raised[0] == raised[1]


def test_a_slab_of_one_element_is_left_to_pytorch(tmp_path: pathlib.Path) -> None:
    """Of one sample its norm is an error there."""
    path = tmp_path / "model.py"
    path.write_text(
        GUARDED.replace("torch.rand(2, 3, 8, 8)", "torch.rand(2, 3, 1, 1)").replace(
            "GroupNorm(2, 8)", "GroupNorm(8, 8)"
        )
    )
    text = export.export(str(path), "sm_90a", "fuse", False, "new.py")
    assert "group_norm(8)" not in text


def test_values_that_cannot_be_compared_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(GUARDED.replace("(1, 2), F.silu\n", "(1, 2), lambda x: F.silu(x)\n"))
    with pytest.raises(export.NotExported, match="its forward reads act, a function that the file cannot"):
        export.export(str(path), "sm_90a", "fuse", False, "new.py")


# --- The operators' own checks ------------------------------------------------------------------------------


def cpu_binding(binding: str, namespace: str) -> str:
    """The C++ around the kernels with CPU tensors and no kernels."""
    text = re.sub(r"#include <c10/cuda/.*>\n", "", binding)
    text = text.replace(
        "#include <torch/library.h>\n", "#include <torch/library.h>\nusing cudaStream_t = void*;\n"
    )
    text = re.sub(r".*c10::cuda::CUDAGuard.*\n", "", text)
    text = text.replace("c10::cuda::getCurrentCUDAStream(device).stream()", "nullptr")
    text = text.replace("input.is_cuda()", "input.is_cpu()").replace(
        f"({namespace}, CUDA,", f"({namespace}, CPU,"
    )
    text = re.sub(r"^(int64_t \w+_workspace_bytes\([^;{]*\));", r"\1 { return 0; }", text, flags=re.MULTILINE)
    return re.sub(r"^(void \w+\([^;{]*\));", r"\1 {}", text, flags=re.MULTILINE)


@pytest.mark.skipif(not shutil.which("ninja"), reason="PyTorch builds extensions with ninja")
def test_operators_refuse_what_they_are_not_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are all that looks at the tensors of a call that is like one before."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    module = exported(tmp_path, "small", "train")
    binding, _ = module._EXTENSIONS["train"]
    name, namespace = "block_1_tail_train", re.search(r"TORCH_LIBRARY_IMPL\((\w+),", binding)[1]
    torch.utils.cpp_extension.load_inline(
        name=f"{namespace}_checked",
        cpp_sources=[cpu_binding(binding, namespace)],
        is_python_module=False,
        no_implicit_headers=True,
    )
    operator = getattr(getattr(torch.ops, namespace), name)
    x, parameters = torch.rand(4, 8, 10, 10), [torch.rand(8), torch.rand(8)]
    assert operator(x, parameters)[0].shape == x.shape
    for given, other in (
        (torch.rand(4, 8, 10, 9), parameters),
        (torch.rand(4, 8, 10), parameters),
        (torch.rand(4, 8, 10, 10, dtype=torch.float64), parameters),
        (torch.rand(4, 8, 10, 10).to(memory_format=torch.channels_last), parameters),
        (x, [torch.rand(7), torch.rand(8)]),
        (x, [torch.rand(8, 1), torch.rand(8)]),
        (x, [torch.rand(8), torch.rand(8).half()]),
        (x, [torch.rand(16)[::2], torch.rand(8)]),
        (x, [torch.rand(8)]),
        (x, [torch.rand(8), torch.rand(8, device="meta")]),
    ):
        with pytest.raises(RuntimeError, match=f"{name}: |a parameter is on meta"):
            operator(given, other)
