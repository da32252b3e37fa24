"""What fuse promises: a call gives what eager gives, or the original forward ran and said so."""

from __future__ import annotations

import copy
import pickle
import statistics
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_snippets import EFFECTS, NAMES, READ, SURROUNDINGS, load, model_source, rows, user_source
from fuse_support import blocks
from fuse_twins import Edit, Twins, alike, bfloat16, differs, seed_all, snapshot
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.utils import parametrize, prune

import onepass
from onepass import fuse, report

pytestmark = [
    pytest.mark.skipif(not onepass.available(), reason=str(onepass.unavailable_reason())),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def classes_stay() -> Iterator[None]:
    """Whatever a test does, nn.Module is what it was; if not, the tests after it do not suffer."""
    before = {name: vars(nn.Module)[name] for name in ("__call__", "__getattr__")}
    yield
    changed = [name for name, value in before.items() if vars(nn.Module)[name] is not value]
    for name in changed:
        setattr(nn.Module, name, before[name])
    assert not changed, f"nn.Module has another {changed}"


def image(*sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(sizes or (2, 3, 5, 4), generator=generator)


def simple() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())


class Wrapped(nn.Module):
    """A user's module around a chain."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or simple()
        self.norm = nn.GroupNorm(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.inner(x)))


# --- 1. Names of arguments ----------------------------------------------------------------------------------

SIGNATURES = {
    "tensor": ("{0}", "x = {0}", [((), {})]),
    "second tensor": ("x, {0}", "y = y + {0}", [((image(2, 4, 5, 4),), {})]),
    "optional tensor": ("x, {0}=None", "y = y if {0} is None else y + {0}", [((), {}), ((1.0,), {})]),
    "flag": ("x, {0}=False", "y = -y if {0} else y", [((), {}), ((True,), {}), ((), {"{0}": True})]),
    "keyword": ("x, *, {0}=1.0", "y = y * {0}", [((), {}), ((), {"{0}": 0.5})]),
    "variadic": ("x, *{0}", "y = -y if {0} else y", [((), {}), ((1,), {})]),
    "keywords": ("x, **{0}", "y = -y if {0} else y", [((), {}), ((), {"a": 1})]),
    "many": ("x, z=2, /, *{0}, more=None, **rest", "y = y * z + bool({0})", [((), {}), ((3, 4), {"a": 1})]),
}
NAMED = """
import torch as pytorch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU()
    def forward(self, {arguments}):
        {first}
        y = self.act(self.norm(self.conv(x)))
        {then}
        return self.act(self.norm(y))
"""


@pytest.mark.parametrize("kind", SIGNATURES)
@pytest.mark.parametrize("name", NAMES.split())
def test_an_argument_may_have_any_name(name: str, kind: str) -> None:
    arguments, step, calls = SIGNATURES[kind]
    first, then = (step, "pass") if kind == "tensor" else ("pass", step)
    twins = Twins.of(NAMED.format(arguments=arguments, first=first, then=then).replace("{0}", name))
    assert blocks(twins.fused)
    for args, kwargs in calls:
        named = {key.format(name): value for key, value in kwargs.items()}
        for training in (True, False):
            twins.edit(lambda m, training=training: m.train(training))
            (twins.same if args or named else twins.same_on_the_fused_path)(image(), *args, **named)


def test_self_may_have_another_name() -> None:
    step = NAMED.format(arguments="self", first="x = self", then="pass").replace(
        "forward(self,", "forward(me,"
    )
    body, forward = step.split("def forward")
    twins = Twins.of(body + "def forward" + forward.replace("self.", "me."))
    twins.same_on_the_fused_path(image())


# --- 2. Side effects ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Model", "Parent"])
@pytest.mark.parametrize(("effect", "init", "step"), rows(EFFECTS, 3))
def test_a_side_effect_happens_as_in_eager(effect: str, init: str, step: str, name: str) -> None:
    twins = Twins.of(user_source(init, step), name)
    for training in (True, True, True, False, False):
        twins.edit(lambda m, training=training: m.train(training))
        twins.same(image())


def test_a_count_on_the_class_is_seen_by_other_models() -> None:
    user = load(user_source("", "type(self).total += 1"))
    model, other = fuse(user.Model()), user.Model()
    for _ in range(2):
        model(image())
    assert (user.Model.total, other.total, model.total) == (2, 2, 2)


@pytest.mark.parametrize("name", ["Model", "Parent"])
@pytest.mark.parametrize(
    "step", ["print('called', len(y.shape))", "print('called')", "warnings.warn('called')"]
)
def test_what_a_forward_says_is_said_at_each_call(step: str, name: str, capsys: Any) -> None:
    model = fuse(getattr(load(model_source(step=step)), name)())
    capsys.readouterr()
    for _ in range(3):
        if "warn" in step:
            with pytest.warns(UserWarning, match="called"):
                model(image())
        else:
            model(image())
            assert capsys.readouterr().out.startswith("called")


@pytest.mark.parametrize("name", ["Model", "Parent"])
@pytest.mark.parametrize(("read", "step"), rows(SURROUNDINGS, 2))
def test_a_forward_reads_its_surroundings_at_each_call(
    read: str, step: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.0)
    twins = Twins.of(model_source(step=step), name)
    for training in (True, False):
        twins.edit(lambda m, training=training: m.train(training))
        twins.same(image())
        twins.same(image(), leaf=False)
        twins.same(image(), context=torch.no_grad)
        twins.same(image(), context=torch.inference_mode)
        twins.same(image(), context=bfloat16, near=(0.05, 0.05))
        twins.same(image(), context=torch.no_grad, leaf=False)
    twins.edit("self.conv.train(not self.conv.training)")
    twins.same(image())
    twins.edit("self.requires_grad_(False)")
    twins.same(image(), leaf=False)
    monkeypatch.setattr(time, "time", lambda: 200.0)
    monkeypatch.setenv("ONEPASS_TEST_FLAG", "1")
    monkeypatch.setattr(threading.current_thread(), "_name", "other")
    twins.same(image())
    torch.set_default_dtype(torch.float64)
    try:
        twins.same(image().float())
    finally:
        torch.set_default_dtype(torch.float32)


NORMALISED = {
    "spectral_norm": torch.nn.utils.spectral_norm,
    "weight_norm": torch.nn.utils.weight_norm,
    "parametrized spectral_norm": torch.nn.utils.parametrizations.spectral_norm,
    "parametrized weight_norm": torch.nn.utils.parametrizations.weight_norm,
    "orthogonal": torch.nn.utils.parametrizations.orthogonal,
}


@pytest.mark.parametrize("around", [lambda m: m, Wrapped], ids=["sequential", "wrapped"])
@pytest.mark.parametrize("how", NORMALISED)
def test_a_normalised_weight_is_left_as_it_was(how: str, around: Callable[[nn.Module], nn.Module]) -> None:
    def make() -> nn.Module:
        model = around(simple())
        NORMALISED[how](model.get_submodule("inner.0" if around is Wrapped else "0"))
        return model.train()

    twins = Twins(make)  # checks that fuse changes no buffer, parameter or random state
    for training in (True, True, False, True):
        twins.edit(lambda m, training=training: m.train(training))
        twins.same(image())


def bent_convolution(conv: nn.Module) -> None:
    def _conv_forward(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return type(self)._conv_forward(self, x, weight, bias).tanh()

    conv._conv_forward = types.MethodType(_conv_forward, conv)


def bent_forward(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args: forward(*args).tanh()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("patch", "path"),
    [(bent_convolution, "0"), (bent_forward, "0"), (bent_forward, "1"), (bent_forward, "2")],
)
def test_a_patch_of_an_object_holds(patch: Callable[[nn.Module], None], path: str, after: bool) -> None:
    def make() -> nn.Module:
        model = Wrapped()
        if not after:
            patch(model.inner.get_submodule(path))
        return model

    twins = Twins(make)
    if after:
        before = twins.same(image())
        twins.edit(lambda m: patch(m.inner.get_submodule(path)))
        assert differs(twins.same(image())["output"], before["output"])
    twins.same(image())


# --- 3. Changes after fusing --------------------------------------------------------------------------------


def check_change(twins: Twins, x: Tensor, edit: Edit, undo: Edit | None, called: bool) -> None:
    """The edit counts, in both modes; once it is undone calls stay on the fused path."""
    before = twins.same(x) if called else None
    twins.edit(edit)
    after = twins.same(x)
    if before is not None:
        parts = ("error", "output", "inputs")
        assert differs([after.get(p) for p in parts], [before.get(p) for p in parts]), "the edit does nothing"
    for training in (False, True):
        twins.edit(lambda m, training=training: m.train(training))
        twins.same(x)
    if not undo:
        return
    twins.edit(undo)
    twins.same(x)
    twins.same_on_the_fused_path(x)


def chain(*parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(part() for part in parts))


def conv(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(4, 4, 3, **{"padding": 1, **options})


def norm() -> nn.Module:
    return nn.GroupNorm(2, 4)


def spread() -> nn.Module:
    """An affine norm whose weights matter."""
    module = nn.GroupNorm(2, 4)
    nn.init.normal_(module.weight)
    nn.init.normal_(module.bias)
    return module


HALVED = "self[0].groups = 2; self[0].weight = nn.Parameter(self[0].weight[:, :2].detach().clone())"
LEAVES = [
    (chain(conv(), norm, nn.SiLU), "self[1].eps = 0.5", "self[1].eps = 1e-5"),
    (chain(conv(), norm, nn.SiLU), "self[1].num_groups = 4", "self[1].num_groups = 2"),
    (chain(conv(), lambda: nn.InstanceNorm2d(4), nn.SiLU), "self[1].eps = 0.5", "self[1].eps = 1e-5"),
    (
        chain(conv(), lambda: nn.InstanceNorm2d(4), nn.SiLU),
        "self.eval(); self[1].track_running_stats = True",
        None,
    ),
    (chain(conv(), norm, nn.SiLU), "self[0].stride = (2, 2)", "self[0].stride = (1, 1)"),
    (chain(conv(), norm, nn.SiLU), "self[0].padding = (0, 2)", "self[0].padding = (1, 1)"),
    (chain(conv(), norm, nn.SiLU), "self[0].padding = 'valid'", "self[0].padding = (1, 1)"),
    (chain(conv(), norm, nn.SiLU), "self[0].dilation = (2, 2)", "self[0].dilation = (1, 1)"),
    (chain(conv(), norm, nn.SiLU), "self[0].padding_mode = 'circular'", "self[0].padding_mode = 'zeros'"),
    (chain(conv(padding_mode="reflect"), norm, nn.SiLU), "self[0].padding_mode = 'zeros'", None),
    (chain(conv(), norm, nn.SiLU), HALVED, None),
    (chain(conv(groups=2), norm, nn.SiLU), "self[0].groups = 4", "self[0].groups = 2"),  # raises
    (
        chain(conv(), lambda: nn.LeakyReLU(0.1), norm),
        "self[1].negative_slope = 0.5",
        "self[1].negative_slope = 0.1",
    ),
    (chain(conv(), nn.GELU, norm), "self[1].approximate = 'tanh'", "self[1].approximate = 'none'"),
    (chain(conv(), nn.ELU, norm), "self[1].alpha = 0.3", "self[1].alpha = 1.0"),
    (chain(conv(), nn.Softplus, norm), "self[1].beta = 3", "self[1].beta = 1"),
    (chain(conv(), nn.Hardtanh, norm), "self[1].max_val = 0.2", "self[1].max_val = 1.0"),
    (chain(nn.ReLU, conv(), norm), "self[0].inplace = True", "self[0].inplace = False"),
    (chain(nn.SiLU, norm, nn.SiLU), "self[0].inplace = True", "self[0].inplace = False"),
    (chain(conv(), nn.PReLU, norm), "self[1].weight = nn.Parameter(torch.full((1,), 3.0))", None),
    (chain(conv(), nn.PReLU, norm), "self[1].weight = nn.Parameter(torch.full((4,), 3.0))", None),
    (chain(conv(), norm, nn.SiLU), "self[0].bias = None", None),
    (chain(conv(bias=False), norm, nn.SiLU), "self[0].bias = nn.Parameter(torch.arange(1.0, 5.0))", None),
    (chain(conv(), spread, nn.SiLU), "self[1].weight = None; self[1].bias = None", None),
    (chain(conv(), spread, nn.SiLU), "self[1].weight = None", None),
    (chain(conv(), spread, nn.SiLU), "self[1].bias = None", None),
    (
        chain(conv(), lambda: nn.GroupNorm(2, 4, affine=False), nn.SiLU),
        "self[1].weight = nn.Parameter(torch.arange(1.0, 5.0))",
        "self[1].weight = None",
    ),
    (chain(conv(), lambda: nn.Dropout(0.0), nn.SiLU), "self[1].p = 0.5; self.train()", None),
    (
        chain(lambda: nn.ConvTranspose2d(4, 4, 3, stride=2), norm, nn.SiLU),
        "self[0].stride = (1, 1)",
        "self[0].stride = (2, 2)",
    ),
    (
        chain(lambda: nn.ConvTranspose2d(4, 4, 3, stride=2), norm, nn.SiLU),
        "self[0].output_padding = (1, 1)",
        "self[0].output_padding = (0, 0)",
    ),
]


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(
    ("make", "edit", "undo"), LEAVES, ids=[f"{i} {row[1]}" for i, row in enumerate(LEAVES)]
)
def test_an_attribute_of_a_leaf_counts(
    make: Callable[[], nn.Module], edit: str, undo: str | None, called: bool
) -> None:
    x = image(2, 4, 6, 5) * 2
    twins = Twins(make)
    assert blocks(twins.fused)
    check_change(twins, x, edit, undo, called)


def tile_both(model: nn.Module) -> None:
    """Seamless tiling by the mode alone."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "circular"


def tile_one_axis(model: nn.Module) -> None:
    """Seamless tiling in x, by a convolution of one's own."""

    def _conv_forward(self: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        p = self._reversed_padding_repeated_twice
        x = F.pad(F.pad(x, (p[0], p[1], 0, 0), mode="circular"), (0, 0, p[2], p[3]))
        return F.conv2d(x, weight, bias, self.stride, (0, 0), self.dilation, self.groups)

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module._conv_forward = types.MethodType(_conv_forward, module)


def untile(model: nn.Module) -> None:
    for module in model.modules():
        vars(module).pop("_conv_forward", None)
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "zeros"


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("tile", [tile_both, tile_one_axis])
def test_seamless_tiling_counts(tile: Callable[[nn.Module], None], called: bool) -> None:
    check_change(Twins(Wrapped), image(), tile, untile, called)


LISTED = """
self.steps = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.ReLU()])
self.named = nn.ModuleDict({"conv": nn.Conv2d(4, 4, 1), "act": nn.ReLU()})
self.chain = nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.ReLU())
self.extra = None
self.register_module("maybe", None)
self.skip = nn.Conv2d(4, 4, 1)
"""
CALLED = """
for step in self.steps: y = step(y)
for name, step in self.named.items(): y = step(y)
y = self.chain(y)
if self.extra is not None: y = self.extra(y)
if self.maybe is not None: y = self.maybe(y)
if self.skip is not None: y = y + self.skip(y)
"""
STRUCTURE = r"""
# edit | undo
self.chain.append(nn.Tanh()) | del self.chain[-1]
self.chain.append(nn.Conv2d(4, 4, 1)) | self.chain.pop(-1)
self.chain.extend([nn.Tanh(), nn.ELU()]) | del self.chain[-1]; del self.chain[-1]
self.chain.insert(1, nn.Tanh()) |
self.chain.insert(0, nn.Tanh()) |
self.chain.add_module('late', nn.Tanh()) | del self.chain.late
self.chain[2] = nn.Tanh() |
self.chain[0] = nn.Conv2d(4, 4, 1) |
del self.chain[2] |
del self.chain[0] |
self.chain = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh()) |
self.chain = self.chain[:2] |
m = self.chain._modules; m['0'] = m.pop('0') | m = self.chain._modules; m.update({k: m.pop(k) for k in '12'})
self.steps.append(nn.Tanh()) | del self.steps[-1]
self.steps.insert(0, nn.Tanh()) |
self.steps[1] = nn.Tanh() |
del self.steps[1] |
self.steps.extend([nn.Tanh(), nn.Conv2d(4, 4, 1)]) |
self.named['late'] = nn.Tanh() | del self.named['late']
del self.named['act'] |
self.named.update({'act': nn.Tanh()}) |
self.extra = nn.Tanh() | self.extra = None
self.maybe = nn.Tanh() | self.maybe = None
self.kept, self.skip = [self.skip], None | self.skip = self.kept.pop(); del self.kept
self.act = nn.ReLU() |
self.norm = nn.Identity() |
self.mix = nn.Conv2d(4, 4, 3, padding=1) |
self.mix.weight = nn.Parameter(torch.ones(4, 4, 1, 1)) |
self.mix.weight.data = torch.ones(4, 4, 1, 1) |
self.mix.weight = self.skip.weight |
"""


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name", ["Model", "Parent"])
@pytest.mark.parametrize(("edit", "undo"), rows(STRUCTURE, 2))
def test_an_edit_of_the_structure_counts(edit: str, undo: str, name: str, called: bool) -> None:
    check_change(Twins.of(model_source(LISTED, CALLED), name), image(), edit, undo, called)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name", ["Model", "Parent"])
@pytest.mark.parametrize(("init", "step", "edit", "undo"), rows(READ, 4))
def test_what_a_forward_reads_counts(
    init: str, step: str, edit: str, undo: str, name: str, called: bool
) -> None:
    twins = Twins.of(user_source(init, step), name)
    check_change(twins, image(), edit, undo, called)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("make", [simple, Wrapped])
@pytest.mark.parametrize(
    ("cls", "name"),
    [(nn.GroupNorm, "forward"), (nn.Conv2d, "forward"), (nn.Conv2d, "_conv_forward"), (nn.SiLU, "forward")],
)
def test_a_patch_of_pytorchs_class_counts(
    cls: type, name: str, make: Callable[[], nn.Module], called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(make)
    before = twins.same(image()) if called else None
    original = getattr(cls, name)
    with monkeypatch.context() as patched:
        patched.setattr(cls, name, lambda *args: 2 * original(*args).tanh())
        after = twins.same(image())
    assert before is None or differs(before["output"], after["output"])
    twins.same(image())
    twins.same_on_the_fused_path(image())


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("function", ["relu", "group_norm", "conv2d"])
def test_a_patch_of_pytorchs_functions_counts(
    function: str, called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = "y = F.relu(F.group_norm(F.conv2d(y, self.mix.weight), 2))"
    twins = Twins.of(model_source(step=step))
    if called:
        twins.same(image())
    original = getattr(F, function)
    with monkeypatch.context() as patched:
        patched.setattr(F, function, lambda *args, **kwargs: original(*args, **kwargs).tanh())
        twins.same(image())
    twins.same(image())
    twins.same_on_the_fused_path(image())


def test_a_change_and_its_undoing_can_be_repeated() -> None:
    twins = Twins.of(model_source("self.flag = False", "y = -y if self.flag else y"))
    for value in (True, False, True, False):
        twins.edit(f"self.flag = {value}")
        twins.same(image())
    assert blocks(twins.fused)


# --- 4. Derivatives -----------------------------------------------------------------------------------------


def pair(make: Callable[[], nn.Module] = Wrapped) -> tuple[nn.Module, nn.Module]:
    twins = Twins(make)
    return twins.fused, twins.eager


def close(found: Any, wanted: Any, rtol: float = 1e-4, atol: float = 1e-4) -> None:
    alike(snapshot(found), snapshot(wanted), rtol, atol)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("gradients", [torch.enable_grad, torch.no_grad])
def test_forward_mode(gradients: Any, frozen: bool) -> None:
    models = [model.requires_grad_(not frozen) for model in pair()]
    x, tangent = image(), torch.ones(2, 3, 5, 4)

    def dual(model: nn.Module) -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent))).tangent

    def of_weights(model: nn.Module) -> Tensor:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        with forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(p, torch.ones_like(p)) for name, p in weights.items()}
            return forward_ad.unpack_dual(torch.func.functional_call(model, duals, (x,))).tangent

    with gradients():
        for derive in (dual, of_weights, lambda m: torch.func.jvp(m, (x,), (tangent,))):
            close(*(derive(model) for model in models))
    with gradients():
        close(*(model(x) for model in models))


def test_function_transforms() -> None:
    fused, eager = pair()
    x, stack = image(), image(3, 2, 3, 5, 4)
    weights = {name: p.detach() * 2 for name, p in eager.named_parameters()}

    def loss(model: nn.Module) -> Callable[[Any], Tensor]:
        return lambda given: torch.func.functional_call(model, given, (x,)).square().sum()

    for derive in (
        lambda m: torch.func.grad(lambda v: m(v).square().sum())(x),
        lambda m: torch.vmap(m)(stack),
        lambda m: torch.func.functional_call(m, weights, (x,)),
        lambda m: torch.func.grad(loss(m))(weights),
        lambda m: torch.vmap(torch.func.grad(lambda v: m(v).square().sum()))(stack),
        lambda m: torch.func.jacrev(m)(x[:1, :, :2, :2]),
        lambda m: torch.func.jacfwd(m)(x[:1, :, :2, :2]),
        lambda m: torch.func.linearize(m, x)[1](x),
    ):
        close(derive(fused), derive(eager))


def test_models_are_stacked() -> None:
    pairs = [pair() for _ in range(3)]
    x, results = image(), []
    for models in zip(*pairs, strict=True):
        weights, buffers = torch.func.stack_module_state(list(models))
        base = copy.deepcopy(models[0]).to("meta")
        results.append(
            torch.vmap(lambda w, b, base=base: torch.func.functional_call(base, (w, b), (x,)))(
                weights, buffers
            )
        )
    close(*results)


@pytest.mark.parametrize("make", [simple, Wrapped])
def test_an_exported_program_has_gradients(make: Callable[[], nn.Module]) -> None:
    results = []
    for model in pair(make):
        exported = torch.export.export(model, (image(),)).module()
        out = exported(image())
        (out * torch.sin(torch.arange(out.numel())).view_as(out)).sum().backward()
        results.append({name: p.grad for name, p in exported.named_parameters()})
        assert all(gradient is not None for gradient in results[-1].values())
    close(*results, rtol=1e-3)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("first", [lambda: nn.Conv2d(3, 4, 3), nn.ReLU])
@pytest.mark.parametrize(
    ("norm", "sizes"),
    [
        (lambda c: nn.InstanceNorm2d(c), (2, 3, 3, 3)),
        (lambda c: nn.InstanceNorm2d(c, affine=True), (1, 3, 3, 3)),
        (lambda c: nn.InstanceNorm2d(c, track_running_stats=True), (2, 3, 3, 3)),
        (lambda c: nn.GroupNorm(c, c), (1, 3, 3, 3)),
        (lambda c: nn.GroupNorm(1, c), (1, 3, 3, 3)),
        (lambda c: nn.GroupNorm(c, c), (2, 3, 3, 3)),
    ],
)
def test_a_norm_of_one_element_raises_as_eager(
    norm: Callable[[int], nn.Module], sizes: tuple[int, ...], first: Any, training: bool
) -> None:
    convolved = first is not nn.ReLU
    x = image(*sizes) if convolved else image(*sizes)[..., :1, :1]
    twins = Twins(lambda: nn.Sequential(first(), norm(4 if convolved else 3), nn.SiLU()).train(training))
    twins.same(x, near=(1e-3, 1e-4))
    twins.same(image(2, 3, 5, 4))


KINKS = {
    "clamp(min=0)": (lambda y: torch.clamp(y, min=0), [0.0]),
    "clamp_min": (lambda y: y.clamp_min(0), [0.0]),
    "clamp(a, b)": (lambda y: torch.clamp(y, -1, 2), [-1.0, 2.0]),
    "clamp(max)": (lambda y: y.clamp(max=0.5), [0.5]),
    "relu": (torch.relu, [0.0]),
    "hardtanh": (F.hardtanh, [-1.0, 1.0]),
    "hardtanh(a, b)": (lambda y: F.hardtanh(y, -2, 3), [-2.0, 3.0]),
    "relu6": (F.relu6, [0.0, 6.0]),
    "leaky_relu": (lambda y: F.leaky_relu(y, 0.1), [0.0]),
    "elu": (lambda y: F.elu(y, 0.5), [0.0]),
    "hardswish": (F.hardswish, [-3.0, 3.0]),
    "hardsigmoid": (F.hardsigmoid, [-3.0, 3.0]),
    "abs": (torch.abs, [0.0]),
    "threshold": (lambda y: F.threshold(y, 0.5, 0.5), [0.5]),
    "softshrink": (lambda y: F.softshrink(y, 0.5), [-0.5, 0.5]),
    "hardshrink": (lambda y: F.hardshrink(y, 0.5), [-0.5, 0.5]),
    "maximum": (lambda y: torch.maximum(y, torch.zeros_like(y)), [0.0]),
}


class Acted(nn.Module):
    """A convolution and a function, the convolution with one value everywhere."""

    def __init__(self, act: Callable[[Tensor], Tensor], value: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        nn.init.zeros_(self.conv.weight)
        nn.init.constant_(self.conv.bias, value)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x)) * 2.0


@pytest.mark.parametrize("kink", KINKS)
def test_gradients_at_a_kink_are_pytorchs(kink: str) -> None:
    act, values = KINKS[kink]
    for value in values:
        Twins(lambda value=value: Acted(act, value)).same(image())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kink", KINKS)
def test_what_is_not_finite_is_treated_as_in_eager(kink: str, value: float) -> None:
    # PyTorch's own gradients of these at nan depend on where an element lies in memory (docs/numerics.md).
    context = (
        torch.no_grad if kink.startswith(("hardtanh", "relu6", "elu", "hardswish")) else torch.enable_grad
    )
    Twins(lambda: Acted(KINKS[kink][0], value)).same(image(), context=context)
    x = image()
    x[0, 0, 2, 2] = value
    Twins(lambda: Acted(KINKS[kink][0], 0.1)).same(x, context=context)


# --- 5. Threads ---------------------------------------------------------------------------------------------


def busy(model: nn.Module) -> nn.Module:
    return fuse(copy.deepcopy(model))


def duplicating(duplicate: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    fused: list[nn.Module] = []

    def run(model: nn.Module) -> nn.Module:
        fused[:] = fused or [fuse(copy.deepcopy(model))]
        return duplicate(fused[0])

    return run


@pytest.mark.parametrize(
    "work",
    [busy, duplicating(copy.deepcopy), duplicating(lambda m: pickle.loads(pickle.dumps(m)))],
    ids=["fuse", "deepcopy", "pickle"],
)
def test_other_threads_run_plain_models_meanwhile(work: Callable[[nn.Module], nn.Module]) -> None:
    model, x = Wrapped(), image()
    with torch.no_grad():
        wanted = model(x)
    plain = [copy.deepcopy(model) for _ in range(2)]
    errors: list[BaseException] = []
    done = threading.Event()

    def run(mine: nn.Module) -> None:
        try:
            while not done.is_set():
                with torch.no_grad():
                    torch.testing.assert_close(mine(x), wanted)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(mine,)) for mine in plain]
    for thread in threads:
        thread.start()
    try:
        until = time.monotonic() + 1.0
        while time.monotonic() < until and not errors:
            torch.testing.assert_close(work(model)(x), model(x), rtol=1e-4, atol=1e-5)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not errors, errors[0]


def test_threads_fuse_at_once() -> None:
    x, errors = image(), []
    models = [Wrapped() for _ in range(4)]

    def run(model: nn.Module) -> None:
        try:
            for _ in range(5):
                torch.testing.assert_close(busy(model)(x), model(x), rtol=1e-4, atol=1e-5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


# --- 6. What must not crash ---------------------------------------------------------------------------------


def flatten_weights(model: nn.Module) -> None:
    """As FSDP1: parameters become plain tensors, attributes of the module."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                delattr(module, name)
                setattr(module, name, parameter.detach().clone() * 2)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("make", [simple, Wrapped])
def test_weights_that_are_plain_tensors(make: Callable[[], nn.Module], called: bool) -> None:
    twins = Twins(make)
    if called:
        twins.same(image())
    twins.edit(flatten_weights)
    twins.same(image())
    twins.same(image(), context=torch.no_grad)


class Doubled(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


PARAMETRISED = {
    **NORMALISED,
    "registered": lambda m: parametrize.register_parametrization(m, "weight", Doubled()),
    "bias": lambda m: parametrize.register_parametrization(m, "bias", Doubled()),
    "pruned": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "pruned structure": lambda m: prune.ln_structured(m, "weight", 0.5, n=2, dim=0),
}


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("how", PARAMETRISED)
def test_parametrised_after_fusing(how: str, called: bool) -> None:
    twins = Twins(Wrapped)
    if called:
        twins.same(image())
    twins.edit(lambda m: PARAMETRISED[how](m.inner[0]) and None)
    for training in (True, True, False):
        twins.edit(lambda m, training=training: m.train(training))
        twins.same(image())


INFINITE = r"""
# init | step | arguments
self.limit = float('inf') | y = torch.clamp(y, max=self.limit) | x
self.limit = float('-inf') | y = torch.clamp(y, self.limit, 1.0) | x
self.limit = float('nan') | y = y if self.limit != self.limit else -y | x
self.limit = float('nan') | y = torch.clamp(y, max=self.limit) | x
self.limit = float('nan') | y = y * self.limit | x
self.limit = [float('nan'), float('inf')] | y = y.clamp(max=self.limit[1]) | x
 | y = y.clamp(max=limit) | x, limit=float('inf')
 | y = y * limit | x, limit=float('nan')
 | y = y if limit is None else y.clamp(limit) | x, limit=float('-inf')
 | y = y.clamp(-float('inf'), float('inf')) | x
 | y = F.hardtanh(y, -math.inf, math.inf) | x
 | y = F.leaky_relu(y, math.nan) | x
 | y = F.leaky_relu(y, math.inf) | x
 | y = F.elu(y, math.inf) | x
self.cap = nn.Hardtanh(-math.inf, math.inf) | y = self.cap(y) | x
self.gate = nn.LeakyReLU(math.nan) | y = self.gate(y) | x
self.norm.eps = math.inf | pass | x
self.norm.eps = math.nan | pass | x
 | y = y * math.inf | x
 | y = y + math.nan | x
 | y = y * 1e400 | x
 | y = y * 10**30 | x
 | y = y + 1e-320 | x
"""


@pytest.mark.parametrize("name", ["Model", "Parent"])
@pytest.mark.parametrize(("init", "step", "arguments"), rows(INFINITE, 3))
def test_numbers_that_are_not_finite(init: str, step: str, arguments: str, name: str) -> None:
    twins = Twins.of(model_source(init, step, arguments=arguments), name)
    twins.same(image())
    twins.edit(lambda m: m.eval())
    twins.same(image())


@pytest.mark.parametrize("count", [300, 1500])
def test_long_chains(count: int) -> None:
    twins = Twins.of(model_source(step=f"for _ in range({count}): y = F.leaky_relu(y, 0.999)"))
    twins.same(image())
    twins = Twins(lambda: nn.Sequential(nn.Conv2d(3, 4, 1), *(nn.LeakyReLU(0.999) for _ in range(count))))
    twins.same(image())


def test_sixty_levels_of_sequentials() -> None:
    def make() -> nn.Module:
        model: nn.Module = simple()
        for _ in range(60):
            model = nn.Sequential(model, nn.ReLU())
        return model

    twins = Twins(make)
    twins.same(image())
    twins.same_on_the_fused_path(image())


@pytest.mark.parametrize("make", [simple, Wrapped])
@pytest.mark.parametrize("when", ["before", "after"])
def test_meta_models(make: Callable[[], nn.Module], when: str) -> None:
    model = fuse(make().to("meta")) if when == "before" else fuse(make()).to("meta")
    x = image().to("meta").requires_grad_()
    for training in (True, False):
        out = model.train(training)(x)
        assert (out.shape, out.device.type, out.dtype) == ((2, 4, 5, 4), "meta", torch.float32)
        out.sum().backward()
        assert x.grad.device.type == "meta"
    if when == "before":
        seed_all(0)
        eager = make()
        model.to_empty(device="cpu").load_state_dict(eager.state_dict())
        close(model(image()), eager.eval()(image()))


@pytest.mark.parametrize("make", [simple, Wrapped])
def test_fake_tensors(make: Callable[[], nn.Module]) -> None:
    with FakeTensorMode():
        model = fuse(make())
        x = torch.empty(2, 3, 5, 4, requires_grad=True)
        out = model(x)
        out.sum().backward()
        assert out.shape == (2, 4, 5, 4)
        assert x.grad.shape == x.shape
        assert model(torch.empty(2, 3, 5, 4, dtype=torch.float32)).dtype == torch.float32
    real = fuse(make())
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert real(torch.empty(2, 3, 5, 4)).shape == (2, 4, 5, 4)


CLASSES = {
    "required argument": (
        """
        class Base(nn.Module):
            KINDS = []
            def __init_subclass__(cls, *, kind, **kwargs):
                super().__init_subclass__(**kwargs)
                Base.KINDS.append(kind)
        """,
        "Base, kind='net'",
        "Base.KINDS",
    ),
    "strict metaclass": (
        """
        class Final(type):
            MADE = []
            def __new__(meta, name, bases, body):
                if any(type(base) is Final for base in bases): raise TypeError("no subclasses")
                Final.MADE.append(name)
                return super().__new__(meta, name, bases, body)
        """,
        "nn.Module, metaclass=Final",
        "Final.MADE",
    ),
    "metaclass with arguments": (
        """
        class Meta(type):
            MADE = []
            def __new__(meta, name, bases, body, *, kind):
                return super().__new__(meta, name, bases, body)
            def __init__(cls, name, bases, body, *, kind):
                super().__init__(name, bases, body)
                Meta.MADE.append(kind)
        """,
        "nn.Module, metaclass=Meta, kind='net'",
        "Meta.MADE",
    ),
    "abstract": (
        """
        import abc
        class Base(nn.Module, abc.ABC):
            MADE = []
            @abc.abstractmethod
            def forward(self, x): ...
        """,
        "Base",
        "Base.MADE",
    ),
    "registry": (
        """
        class Base(nn.Module):
            REGISTRY = {}
            def __init_subclass__(cls, **kwargs):
                super().__init_subclass__(**kwargs)
                Base.REGISTRY[cls.__name__] = cls
        """,
        "Base",
        "list(Base.REGISTRY.values())",
    ),
    "registry that refuses names twice": (
        """
        class Base(nn.Module):
            REGISTRY = {}
            def __init_subclass__(cls, **kwargs):
                if cls.__name__ in Base.REGISTRY: raise ValueError("twice")
                Base.REGISTRY[cls.__name__] = cls
        """,
        "Base",
        "list(Base.REGISTRY.values())",
    ),
    "slots": ("", "nn.Module", "[]"),
    "own getattribute": (
        """
        class Base(nn.Module):
            def __getattribute__(self, name):
                return super().__getattribute__(name)
        """,
        "Base",
        "[]",
    ),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_classes_that_are_particular_about_subclasses(kind: str) -> None:
    header, bases, registry = CLASSES[kind]
    source = model_source(header=header).replace("class Model(nn.Module)", f"class Model({bases})")
    if kind == "slots":
        source = source.replace("def __init__", "__slots__ = ('extra',)\n    def __init__", 1)
    twins = Twins.of(source)
    user = load(source)
    for _ in range(2):
        model, before = user.Model(), list(eval(registry, vars(user)))
        fuse(model)
        copied = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert list(eval(registry, vars(user))) == before
        assert all(isinstance(m, user.Model) and type(m).__name__ == "Model" for m in (model, *copied))
    twins.same(image())
    twins.edit("self.eval()")
    twins.same(image())


def test_fused_modules_of_one_class_have_one_class() -> None:
    for make in (simple, Wrapped):
        some, other = fuse(make()), fuse(make())
        assert blocks(some) and blocks(other)
        assert type(some) is type(other)
        assert type(copy.deepcopy(some)) is type(some)
        assert type(pickle.loads(pickle.dumps(some))) is type(some)


def test_batched_gradients() -> None:
    fused, eager = pair()
    results = []
    for model in (fused, eager):
        x = image().requires_grad_()
        out = model(x)
        seeds = image(3, *out.shape)
        leaves = [x, *model.parameters()]
        results.append(torch.autograd.grad(out, leaves, seeds, is_grads_batched=True))
    close(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("vectorize", [False, True])
def test_jacobians_and_hessians(vectorize: bool) -> None:
    fused, eager = pair()
    x = image(1, 3, 2, 2)
    for derive in (
        lambda m: torch.autograd.functional.jacobian(m, x, vectorize=vectorize),
        lambda m: torch.autograd.functional.vhp(lambda v: m(v).square().sum(), x, x)[1],
        lambda m: torch.autograd.functional.jvp(m, x, x)[1],
    ):
        close(derive(fused), derive(eager), rtol=1e-3, atol=1e-3)
    models = (fused, eager) if not vectorize else pair(lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU()))
    results = [  # PyTorch has no vectorised one of a norm
        torch.autograd.functional.hessian(lambda v, m=m: m(v).square().sum(), x, vectorize=vectorize)
        for m in models
    ]
    close(*results, rtol=1e-3, atol=1e-3)
    if vectorize:
        options = {"vectorize": True, "strategy": "forward-mode"}
        close(*(torch.autograd.functional.jacobian(m, x, **options) for m in (fused, eager)))


def test_second_derivatives() -> None:
    results = []
    for model in pair():
        x = image().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    for found, wanted in zip(*results, strict=True):
        close(found, wanted, rtol=1e-2, atol=1e-3 * wanted.abs().max().item())


def test_a_trace_has_gradients() -> None:
    results = []
    for model in pair():
        traced = torch.jit.trace(model, image())
        x = image(3, 3, 6, 6).requires_grad_()
        out = traced(x)
        (out * torch.sin(torch.arange(out.numel())).view_as(out)).sum().backward()
        results.append([out, x.grad, *(p.grad for p in traced.parameters())])
    close(*results, rtol=1e-3, atol=1e-3)


def test_scripting_names_unfuse() -> None:
    for make in (simple, Wrapped):
        with pytest.raises(Exception, match=r"onepass\.unfuse"):
            torch.jit.script(fuse(make()))
        model = onepass.unfuse(fuse(make()))
        close(torch.jit.script(model)(image()), model(image()))


SIZES = [(0, 3, 5, 4), (2, 3, 0, 4), (2, 3, 5, 0), (0, 3, 0, 0), (2, 0, 5, 4), (2, 3, 1, 1), (1, 3, 2, 1)]


class Sized(nn.Module):
    """Asks for the sizes of what the convolution gives, or of the input where there is none."""

    def __init__(self, conv: nn.Module, channels: int, assertion: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.assertion = conv, nn.GroupNorm(1, channels), assertion

    def forward(self, x):
        x = self.conv(x)
        if self.assertion:
            torch._assert(x.ndim == 4, "four are wanted")
            return F.silu(self.norm(x))
        batch, channels, height, width = x.shape
        return F.silu(self.norm(x)).view(batch, channels, height * width)


MAKES = {
    "sized": lambda: Sized(nn.Conv2d(3, 4, 3, padding=1), 4, False),
    "asserted": lambda: Sized(nn.Conv2d(3, 4, 3, padding=1), 4, True),
    "unpacked": lambda: Sized(nn.Identity(), 3, False),
    "padded": simple,
    "wrapped": Wrapped,
    "valid": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()),
    "norm": lambda: nn.Sequential(nn.GroupNorm(1, 3), nn.SiLU(), nn.Tanh()),
    "instance": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4), nn.SiLU()),
    "pooled": lambda: nn.Sequential(simple(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU()),
    "acts": lambda: nn.Sequential(nn.ReLU(), nn.Tanh(), nn.SiLU()),
}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("make", MAKES)
def test_empty_and_tiny_inputs(make: str, sizes: tuple[int, ...]) -> None:
    twins, near = Twins(MAKES[make]), (1e-4, 5e-5)  # a norm of one element gives its bias here
    if make == "norm" and sizes[2:] == (1, 1):  # where ReLU has its kink
        twins.same(torch.randn(sizes), context=torch.no_grad, near=near)
        return
    twins.same(torch.randn(sizes), near=near)
    twins.same(torch.randn(sizes), context=torch.no_grad, near=near)
    twins.edit(lambda m: m.eval())
    twins.same(torch.randn(sizes), near=near)
    twins.same(image())


WRONG = {
    "channels": lambda: image(2, 5, 5, 4),
    "one dimension": lambda: image(3),
    "two dimensions": lambda: image(2, 3),
    "three dimensions": lambda: image(3, 5, 4),
    "five dimensions": lambda: image(2, 3, 5, 4, 2),
    "no dimension": lambda: torch.zeros(()),
    "float64": lambda: image().double(),
    "float16": lambda: image().half(),
    "bfloat16": lambda: image().bfloat16(),
    "integers": lambda: torch.ones(2, 3, 5, 4, dtype=torch.int64),
    "booleans": lambda: torch.ones(2, 3, 5, 4, dtype=torch.bool),
    "complex": lambda: image().to(torch.complex64),
    "meta": lambda: image().to("meta"),
    "sparse": lambda: image().to_sparse(),
    "list": lambda: [image()],
    "tuple": lambda: (image(), image()),
    "None": lambda: None,
    "number": lambda: 1.0,
    "string": lambda: "image",
    "array": lambda: image().numpy(),
    "expanded": lambda: image(1, 3, 5, 1).expand(2, 3, 5, 4),
    "strided": lambda: image(2, 3, 10, 8)[..., ::2, ::2],
    "transposed": lambda: image(2, 3, 4, 5).transpose(2, 3),
    "channels last": lambda: image().to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("make", MAKES)
def test_a_wrong_input_is_answered_as_by_eager(make: str, what: str) -> None:
    twins = Twins(MAKES[make])
    near = {"float16": (2e-3, 2e-3), "bfloat16": (2e-2, 2e-2)}.get(what, (1e-4, 1e-5))
    # The norm of equal values is 0 but for rounding, where ReLU has its kink.
    kinked = what in ("expanded", "two dimensions") and make in ("norm", "instance")
    for context in (torch.no_grad,) if kinked else (torch.enable_grad, torch.no_grad):
        twins.same(WRONG[what](), context=context, leaf=what != "sparse", near=near)
    twins.same_on_the_fused_path(image())


@pytest.mark.parametrize("call", ["self()", "self(x, x)", "self(x, y=x)", "self(input=x, x=x)", "self(y=x)"])
def test_a_wrong_call_is_answered_as_by_eager(call: str) -> None:
    errors = []
    for model in pair():
        with pytest.raises(Exception) as caught:
            eval(call, {"self": model, "x": image()})
        errors.append(caught.type)
    assert errors[0] is errors[1]


def in_a_list(parent: nn.Module, child: nn.Module) -> None:
    child.parent = [parent]


def behind_setattr(parent: nn.Module, child: nn.Module) -> None:
    object.__setattr__(child, "parent", parent)


def of_parent(duplicate: Callable[[Any], Any], model: nn.Module, child: str) -> nn.Module:
    return duplicate(model)


def of_child(duplicate: Callable[[Any], Any], model: nn.Module, child: str) -> nn.Module:
    kept = duplicate(model.get_submodule(child)).parent
    return kept[0] if isinstance(kept, list) else kept


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("copied", [of_parent, of_child])
@pytest.mark.parametrize("child", ["inner", "inner.0", "norm"])
@pytest.mark.parametrize("refer", [in_a_list, behind_setattr])
def test_copies_that_hold_their_parent_stay_fused(
    refer: Any, child: str, copied: Any, duplicate: Any
) -> None:
    def make() -> nn.Module:
        model = Wrapped()
        refer(model, model.get_submodule(child))
        return model

    fused, eager = pair(make)
    twin = copied(duplicate, fused, child)
    assert blocks(fused)
    assert blocks(twin) == blocks(fused)
    close(twin(image()), eager(image()))
    assert not report(twin).fallbacks
    with torch.no_grad():
        twin.inner[0].weight.zero_()
    close(fused(image()), eager(image()))
    kept = twin.get_submodule(child).parent
    assert (kept[0] if isinstance(kept, list) else kept) is twin


def test_a_model_that_holds_itself() -> None:
    def make() -> nn.Module:
        model = Wrapped()
        object.__setattr__(model, "me", model)
        model.all = [model, model.inner]
        return model

    fused, eager = pair(make)
    for twin in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert twin.me is twin and twin.all[0] is twin and twin.all[1] is twin.inner
        assert blocks(twin) == blocks(fused)
        close(twin(image()), eager(image()))


# --- 7. Cost ------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm1 = nn.GroupNorm(2, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(2, channels)
        self.act = nn.SiLU()
        self.drop_path = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm1(self.conv1(x)))
        return self.act(x + self.drop_path(self.norm2(self.conv2(y))))


class Deep(nn.Module):
    """Stages of residual blocks, as timm writes them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.stages = nn.Sequential(
            *(nn.Sequential(*(Residual() for _ in range(count // 5))) for _ in range(5))
        )
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """The median of the processor's time: other processes do not count."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def test_a_copy_costs_no_more_than_a_plain_one() -> None:
    plain = Deep(40)
    fused = fuse(copy.deepcopy(plain))
    assert len(blocks(fused)) >= 80
    copy.deepcopy(fused)
    ratios = [
        seconds(lambda: copy.deepcopy(fused), 3) / seconds(lambda: copy.deepcopy(plain), 3) for _ in range(5)
    ]
    assert statistics.median(ratios) < 1.5, ratios


def test_fusing_fifty_blocks_takes_less_than_three_seconds() -> None:
    models = [Deep(50) for _ in range(3)]
    fuse(Deep(5))
    taken = [seconds(lambda model=model: fuse(model), 1) for model in models]
    assert all(len(blocks(model)) >= 100 for model in models)
    assert min(taken) < 3.0, taken  # 1.7 on a Xeon at 2.5 GHz, 2.4 beside other work


# --- 8. torch.compile ---------------------------------------------------------------------------------------


@pytest.fixture
def compiler() -> Iterator[Callable[[nn.Module], Any]]:
    torch._dynamo.reset()
    yield lambda model: torch.compile(model, backend="eager", fullgraph=True)
    torch._dynamo.reset()


COMPILED = r"""
# init | step | edit
self.flag = False | y = -y if self.flag else y | self.flag = True
self.count = 1 | for _ in range(self.count): y = -y | self.count = 2
self.scale_ = 1.0 | y = y * self.scale_ | self.scale_ = 0.5
self.d = {'s': 1.0} | y = y * self.d['s'] | self.d['s'] = 0.5
self.l = [1.0] | for s in self.l: y = y * s | self.l.append(0.5)
self.c = Config() | y = y * self.c.inner.scale | self.c.inner.scale = 0.5
self.o = Options() | y = y * self.o.scale | self.o.scale = 0.5
self.fn = F.relu | y = self.fn(y) | self.fn = torch.tanh
 | y = -y if FLAG else y | user.FLAG = True
 | y = y * self.default | self.default = 0.5
 | y = y * getattr(self, 'late', 1.0) | self.late = 0.5
 | y = y | self.norm.eps = 0.5
 | y = y | self.conv.stride = (2, 2)
 | y = y | self.act = nn.ReLU()
self.chain = nn.Sequential(nn.ReLU()) | y = self.chain(y) | self.chain.append(nn.Tanh())
 | y = y if self.training else -y | self.eval()
"""


@pytest.mark.parametrize(("init", "step", "edit"), rows(COMPILED, 3))
def test_compiled_models_honour_changes(init: str, step: str, edit: str, compiler: Any) -> None:
    twins = Twins.of(user_source(init, step))
    assert blocks(twins.fused)
    compiled = compiler(twins.fused)
    before = twins.eager(image())
    close(compiled(image()), before)
    twins.edit(edit)
    after = twins.eager(image())
    assert differs(snapshot(after), snapshot(before))
    close(compiled(image()), after)
    close(compiled(image()), twins.fused(image()))


@pytest.mark.parametrize("kind", SIGNATURES)
def test_compiled_models_take_hostile_names(kind: str, compiler: Any) -> None:
    arguments, step, calls = SIGNATURES[kind]
    first, then = (step, "pass") if kind == "tensor" else ("pass", step)
    twins = Twins.of(NAMED.format(arguments=arguments, first=first, then=then).replace("{0}", "training"))
    compiled = compiler(twins.fused)
    for args, kwargs in calls:
        named = {key.format("training"): value for key, value in kwargs.items()}
        close(compiled(image(), *args, **named), twins.eager(image(), *args, **named))


def test_compiled_models_have_gradients(compiler: Any) -> None:
    fused, eager = pair()
    compiled = compiler(fused)
    results = []
    for model in (compiled, eager):
        x = image().requires_grad_()
        out = model(x)
        (out * torch.sin(torch.arange(out.numel())).view_as(out)).sum().backward()
        results.append([out, x.grad, *(p.grad for p in eager.parameters())])
        results[-1] = results[-1][:2] + [p.grad for p in model.parameters()]
    close(*results, rtol=1e-3, atol=1e-3)
