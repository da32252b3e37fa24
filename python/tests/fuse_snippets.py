"""Pieces of users' code: what a forward may read, what it may store, and what may be edited later."""

from __future__ import annotations

import importlib.util
import itertools
import pathlib
import sys
import tempfile
import textwrap
import types

_folder = tempfile.TemporaryDirectory(prefix="onepass_users_")
_numbers = itertools.count()


def rows(table: str, columns: int) -> list[list[str]]:
    """The lines of a table of statements; a backslash and n part two of them in one cell."""
    cells = [line.replace("\\n", "\n").split("|") for line in table.strip().splitlines()[1:]]
    return [[cell.strip() for cell in line] + [""] * (columns - len(line)) for line in cells]


# --- Files --------------------------------------------------------------------------------------------------

HEADER = """
import collections, dataclasses, enum, functools, itertools, logging, math, os, random, threading, time, types
import warnings
import numpy
import torch
import torch.nn.functional as F
from torch import nn
"""
DEFINITIONS = """
class Log:
    def __init__(self):
        self.items, self.calls, self.last = [], 0, None
SEEN, TABLE, CALLS = [], {}, 0
def remember(value, kept=SEEN):
    kept.append(value)
    return value
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.relu()
    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient
class Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * scale
    @staticmethod
    def backward(ctx, gradient):
        return -gradient * ctx.scale * ctx.saved_tensors[0], None
class Mode(enum.Enum):
    ONE = 1
    TWO = 2
@dataclasses.dataclass
class Options:
    scale: float = 1.0
    deep: dict = dataclasses.field(default_factory=lambda: {"scale": [1.0]})
class Config:
    def __init__(self):
        self.scale, self.flag, self.inner = 1.0, False, types.SimpleNamespace(scale=1.0, table={"scale": 1.0})
class Slotted:
    __slots__ = ("scale",)
    def __init__(self):
        self.scale = 1.0
class Descriptor:
    value = 1.0
    def __get__(self, instance, owner):
        return Descriptor.value
FLAG, SCALES, SETTINGS = False, {"scale": 1.0}, Config()
def helper(y):
    return y
def outer(y):
    return helper(y) * 1
"""
MEMBERS = """
shared = []
total = 0
default = 1.0
nothing = None
table = {"scale": 1.0}
described = Descriptor()
@property
def scale(self):
    return self._scale if hasattr(self, "_scale") else 1.0
def method(self, y):
    return y
@staticmethod
def fixed(y):
    return y
@classmethod
def of_class(cls, y):
    return y * cls.default
"""


def load(source: str) -> types.ModuleType:
    """Imports a user's file: a real one, so that its source can be read and its classes pickled."""
    name = f"onepass_user_{next(_numbers)}"
    path = pathlib.Path(_folder.name, f"{name}.py")
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def model_source(
    init: str = "", step: str = "", *, header: str = "", arguments: str = "x", members: str = ""
) -> str:
    """A file with a Model of two chains and a step of the user's between them; Parent calls it in its own."""
    return f"""{HEADER}
{textwrap.dedent(header)}
class Model(nn.Module):
{textwrap.indent(textwrap.dedent(members), "    ")}
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.act = nn.SiLU()
        self.mix = nn.Conv2d(4, 4, 1)
{textwrap.indent(textwrap.dedent(init), "        ")}
    def forward(self, {arguments}):
        y = self.act(self.norm(self.conv(x)))
{textwrap.indent(textwrap.dedent(step), "        ")}
        return self.act(self.norm(self.mix(y)))
class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Model()
        self.norm = nn.GroupNorm(1, 4)
    def forward(self, *args, **kwargs):
        return F.gelu(self.norm(self.inner(*args, **kwargs)))
"""


def user_source(init: str, step: str) -> str:
    """A Model in a file with all that the snippets below use."""
    return model_source(init, step, header=DEFINITIONS, members=MEMBERS)


# --- Names of arguments that the package itself might use ---------------------------------------------------

NAMES = """
training fused original note plain transforming type is_compiling m0 m1 type0 variant0 self_ torch tracing
forward_ad onepass_module getattr operator _onepass _onepass_state default_x default_flag module state
arguments _global_forward_hooks inf device fx input
"""


# --- What a forward stores or does besides computing --------------------------------------------------------

EFFECTS = r"""
# name | init | step
list of inputs | self.seen = [] | self.seen.append(x)
list of activations | self.seen = [] | self.seen.append(y)
list of detached | self.seen = [] | self.seen.append(y.detach())
list of shapes | self.seen = [] | self.seen.append(tuple(y.shape))
list, += | self.seen = [] | self.seen += [y]
list, extend | self.seen = [] | self.seen.extend([x, y])
list, item | self.seen = [None] | self.seen[0] = y
list, cleared | self.seen = [1, 2] | self.seen.clear()
list, popped | self.seen = list(range(9)) | self.seen.pop()
deque | self.seen = collections.deque(maxlen=2) | self.seen.append(y)
dict | self.seen = {} | self.seen['y'] = y
dict, update | self.seen = {} | self.seen.update(y=y)
dict, grows | self.seen = {} | self.seen[len(self.seen)] = y
dict of lists | self.seen = collections.defaultdict(list) | self.seen['y'].append(y)
nested list | self.seen = [[[]]] | self.seen[0][0].append(y)
list in a dict in a list | self.seen = [{'y': []}] | self.seen[0]['y'].append(y)
object's list | self.log = Log() | self.log.items.append(y)
object's attribute | self.log = Log() | self.log.last = y
namespace | self.log = types.SimpleNamespace(last=None) | self.log.last = y
global list | | SEEN.append(y)
global dict | | TABLE['y'] = y
function's default | | y = remember(y)
class's list | | self.shared.append(y)
child's list | self.norm.seen = [] | self.norm.seen.append(y)
attribute | self.last = None | self.last = y
new attribute | | self.late = y
setattr | | setattr(self, 'late', y)
object.__setattr__ | | object.__setattr__(self, 'late', y)
vars | | vars(self)['late'] = y
child's attribute | | self.norm.late = y
count | self.calls = 0 | self.calls += 1
count that is read | self.calls = 0 | self.calls += 1; y = y * self.calls
count in a list | self.calls = [0] | self.calls[0] += 1
count in a dict | self.calls = {'n': 0} | self.calls['n'] += 1
count in a dict that is read | self.calls = {'n': 0} | self.calls['n'] += 1; y = y * self.calls['n']
count in a global | | global CALLS; CALLS += 1; y = y * CALLS
count in an object | self.log = Log() | self.log.calls += 1
count on the class | | type(self).total += 1; y = y * type(self).total
buffer, add_ | self.register_buffer('sum', torch.zeros(4)) | self.sum.add_(y.detach().mean((0, 2, 3)))
buffer, set | self.register_buffer('sum', torch.zeros(())) | self.sum = self.sum + 1
buffer, item | self.register_buffer('sum', torch.zeros(3)) | self.sum[0] = 2; y = y + self.sum.sum()
buffer, read after | self.register_buffer('sum', torch.ones(())) | self.sum.mul_(2); y = y * self.sum
buffer, copy_ | self.register_buffer('sum', torch.zeros(2, 4, 5, 4)) | self.sum.copy_(y.detach())
plain tensor | self.sum = torch.zeros(()) | self.sum += 1
weight | | self.mix.weight.data.mul_(0.5)
input | | x.add_(1)
activation | | y.mul_(2)
numpy | | y = y * float(numpy.random.rand())
numpy, not used | | numpy.random.rand()
python | | y = y * random.random()
torch | | y = y * torch.rand(())
torch, number | | y = y * torch.rand(()).item()
torch, like | | y = y + torch.randn_like(y)
numpy's generator | self.draw = numpy.random.default_rng(0) | y = y * float(self.draw.random())
python's generator | self.draw = random.Random(0) | y = y * self.draw.random()
torch's generator | self.draw = torch.Generator() | y = y * torch.rand((), generator=self.draw)
torch's generator, number | self.draw = torch.Generator() | y = y * torch.rand((), generator=self.draw).item()
iterator | self.numbers = itertools.count(1) | y = y * next(self.numbers)
Function | | y = Doubled.apply(y)
Function with a number | | y = Flipped.apply(y, 3.0)
Function on the input | | y = y + self.conv(Doubled.apply(x))
gradient hook | | y.requires_grad and y.register_hook(lambda g: 3 * g)
detached | | y = y + y.detach() * 2
without gradients | | with torch.no_grad():\n    z = torch.relu(y)\ny = y * z
raises | self.calls = [] | self.calls.append(1)\nif len(self.calls) == 2: raise KeyError('two')
swallowed error | | try:\n    y = y.no_such_thing()\nexcept AttributeError:\n    y = -y
child made late | | if not hasattr(self, 'late'): self.late = nn.Conv2d(4, 4, 1)\ny = self.late(y)
mode switched | self.drop = nn.Dropout(0.5) | self.drop.train(False); y = self.drop(y)
"""


# --- What a forward reads around it -------------------------------------------------------------------------

SURROUNDINGS = r"""
# name | step
grad mode | y = y * 2 if torch.is_grad_enabled() else y
inference mode | y = y * 2 if torch.is_inference_mode_enabled() else y
autocast | y = y * 2 if torch.is_autocast_enabled('cpu') else y
any autocast | y = y * 2 if torch.is_autocast_cpu_enabled() else y
grad mode, swallowed | y = {True: y * 2, False: y}[torch.is_grad_enabled()]
input's gradient | y = y * 2 if x.requires_grad else y
activation's gradient | y = y * 2 if y.requires_grad else y
weight's gradient | y = y * 2 if self.conv.weight.requires_grad else y
default type | y = y * 2 if torch.get_default_dtype() == torch.float64 else y
environment | y = y * 2 if os.environ.get('ONEPASS_TEST_FLAG') else y
time | y = y * 2 if time.time() > 100 else y
thread | y = y * 2 if threading.current_thread().name == 'other' else y
mode | y = y * 2 if self.training else y
child's mode | y = y * 2 if self.conv.training else y
"""


# --- What a forward reads and a user may change later -------------------------------------------------------

READ = r"""
# init | step | edit | undo
self.flag = False | y = -y if self.flag else y | self.flag = True | self.flag = False
self.flag = False | y = -y if self.flag else y | self.flag = 1 | self.flag = False
self.flag = 0 | y = -y if self.flag is False else y | self.flag = False | self.flag = 0
self.count = 1 | for _ in range(self.count): y = -y | self.count = 2 | self.count = 1
self.scale_ = 1.0 | y = y * self.scale_ | self.scale_ = 0.5 | self.scale_ = 1.0
self.scale_ = 0.0 | y = y / math.copysign(1, self.scale_) | self.scale_ = -0.0 | self.scale_ = 0.0
self.which = 'mix' | y = getattr(self, self.which)(y) | self.which = 'act' | self.which = 'mix'
self.fn = F.relu | y = self.fn(y) | self.fn = torch.tanh | self.fn = torch.nn.functional.relu
self.fn = lambda y: y | y = self.fn(y) | self.fn = lambda y: 2 * y |
self.fn = functools.partial(F.leaky_relu, negative_slope=0.1) | y = self.fn(y) | self.fn = torch.tanh |
self.d = {'s': 1.0} | y = y * self.d['s'] | self.d['s'] = 0.5 | self.d['s'] = 1.0
self.d = {'s': 1.0} | y = y * self.d['s'] | self.d = {'s': 0.5} | self.d = {'s': 1.0}
self.d = {'s': 1.0} | y = -y if 'flag' in self.d else y | self.d['flag'] = 1 | del self.d['flag']
self.d = {'s': {'t': [1.0]}} | y = y * self.d['s']['t'][0] | self.d['s']['t'][0] = 0.5 |
self.d = {} | y = y * self.d.get('s', 1.0) | self.d['s'] = 0.5 | self.d.clear()
self.t = (1.0, 2) | y = y * self.t[0] | self.t = (0.5, 2) | self.t = (1.0, 2)
self.t = (1.0, [2.0]) | y = y * self.t[1][0] | self.t[1][0] = 0.5 | self.t[1][0] = 2.0
self.l = [1.0] | y = y * self.l[0] | self.l[0] = 0.5 | self.l[0] = 1.0
self.l = [1.0] | for s in self.l: y = y * s | self.l.append(0.5) | self.l.pop()
self.l = [] | y = -y if len(self.l) else y | self.l.append(0.5) | self.l.pop()
self.s = set() | y = -y if 'flag' in self.s else y | self.s.add('flag') | self.s.clear()
self.steps = [F.relu] | for f in self.steps: y = f(y) | self.steps.append(torch.tanh) |
self.mode = Mode.ONE | y = y * self.mode.value | self.mode = user.Mode.TWO | self.mode = user.Mode.ONE
self.mode = Mode.ONE | y = -y if self.mode is Mode.TWO else y | self.mode = user.Mode.TWO |
self.o = Options() | y = y * self.o.scale | self.o.scale = 0.5 | self.o.scale = 1.0
self.o = Options() | y = y * self.o.scale | self.o = user.Options(0.5) | self.o = user.Options()
self.o = Options() | y = y * self.o.deep['scale'][0] | self.o.deep['scale'][0] = 0.5 |
self.n = types.SimpleNamespace(s=1.0) | y = y * self.n.s | self.n.s = 0.5 | self.n.s = 1.0
self.c = Config() | y = y * self.c.scale | self.c.scale = 0.5 | self.c.scale = 1.0
self.c = Config() | y = -y if self.c.flag else y | self.c.flag = True | self.c.flag = False
self.c = Config() | y = y * self.c.inner.scale | self.c.inner.scale = 0.5 | self.c.inner.scale = 1.0
self.c = Config() | y = y * self.c.inner.table['scale'] | self.c.inner.table['scale'] = 0.5 |
self.c = Config() | c = self.c; d = c.inner; y = y * d.scale | self.c.inner.scale = 0.5 |
self.c = Config() | y = y * getattr(self.c, 'sca' + 'le') | self.c.scale = 0.5 |
self.c = Slotted() | y = y * self.c.scale | self.c.scale = 0.5 | self.c.scale = 1.0
self.norm.gain = 1.0 | y = y * self.norm.gain | self.norm.gain = 0.5 | self.norm.gain = 1.0
 | y = y * self.norm.eps * 1e5 | self.norm.eps = 1e-3 | self.norm.eps = 1e-5
 | y = y * self.scale | self._scale = 0.5 | del self._scale
self._scale = 1.0 | y = y * self.scale | self._scale = 0.5 | self._scale = 1.0
 | y = y * self.default | user.Model.default = 0.5 | user.Model.default = 1.0
 | y = y * self.default | self.default = 0.5 | del self.default
 | y = y if self.nothing is None else -y | user.Model.nothing = 1 | user.Model.nothing = None
 | y = y if self.nothing is None else -y | self.nothing = 1 | del self.nothing
 | y = y * type(self).default | user.Model.default = 0.5 | user.Model.default = 1.0
 | y = y * Model.default | user.Model.default = 0.5 | user.Model.default = 1.0
 | y = y * self.table['scale'] | user.Model.table['scale'] = 0.5 | user.Model.table['scale'] = 1.0
 | y = y * self.described | user.Descriptor.value = 0.5 | user.Descriptor.value = 1.0
 | y = self.of_class(y) | user.Model.default = 0.5 | user.Model.default = 1.0
 | y = y * getattr(self, 'late', 1.0) | self.late = 0.5 | del self.late
 | y = y * vars(self).get('late', 1.0) | self.late = 0.5 | del self.late
 | y = -y if hasattr(self, 'late') else y | self.late = None | del self.late
 | y = y * (0.5 if 'late' in self.__dict__ else 1.0) | self.late = None | del self.late
 | try: y = y * self.late\nexcept AttributeError: pass | self.late = 0.5 | del self.late
 | y = -y if FLAG else y | user.FLAG = True | user.FLAG = False
 | y = y * SCALES['scale'] | user.SCALES['scale'] = 0.5 | user.SCALES['scale'] = 1.0
 | y = y * SETTINGS.scale | user.SETTINGS.scale = 0.5 | user.SETTINGS.scale = 1.0
 | y = helper(y) | user.helper = lambda y: 2 * y |
 | y = outer(y) | user.helper = lambda y: 2 * y |
 | y = F.relu(y) | user.F = types.SimpleNamespace(relu=torch.tanh) | user.F = nn.functional
 | y = self.method(y) | user.Model.method = lambda self, y: 2 * y |
 | y = self.method(y) | self.method = lambda y: 2 * y | del self.method
 | y = self.fixed(y) | user.Model.fixed = staticmethod(lambda y: 2 * y) |
 | y = self.fixed(y) | user.Model.fixed.__code__ = (lambda y: 2 * y).__code__ |
 | y = y | user.Model.forward = lambda self, x: self.conv(x) |
 | y = y | self.forward = lambda x: self.conv(x) | del self.forward
 | y = y | user.Model.forward.__code__ = (lambda self, x: self.conv(x)).__code__ |
 | y = y | user.Model.__call__ = lambda self, x: self.conv(x) | del user.Model.__call__
self.t_ = torch.ones(()) | y = y * self.t_ | self.t_ = torch.full((), 0.5) |
self.t_ = torch.ones(()) | y = y * self.t_ | self.t_.mul_(0.5) | self.t_.fill_(1)
self.t_ = torch.ones(()) | y = y * self.t_.item() | self.t_.mul_(0.5) | self.t_.fill_(1)
self.t_ = [torch.ones(())] | y = y * self.t_[0] | self.t_[0] = torch.full((), 0.5) |
self.register_buffer('b', torch.ones(())) | y = -y if self.b > 1 else y | self.b.fill_(2) | self.b.fill_(1)
self.register_buffer('b', None) | y = -y if self.b is None else y | self.b = torch.ones(1) | self.b = None
self.p = None | y = y if self.p is None else y * self.p | self.p = nn.Parameter(torch.zeros(())) |
self.many = [nn.Tanh()] | for m in self.many: y = m(y) | self.many.append(nn.ReLU()) | self.many.pop()
self.size = (5, 4) | y = y.reshape(2, 4, *self.size) | self.size = (4, 5) | self.size = (5, 4)
"""
