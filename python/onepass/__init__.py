"""onepass: convolution blocks in one pass over memory."""

from onepass import _before_torch, functional  # noqa: F401  (before PyTorch, which functional imports)
from onepass._fallback import FallbackWarning
from onepass._library import __version__, available, unavailable_reason
from onepass._numerics import numerics
from onepass._redone import SlowPathWarning
from onepass.block import Block
from onepass.compiling import registration as _registration
from onepass.explain import explain
from onepass.freezing import freeze, unfreeze
from onepass.fuse import fuse, unfuse
from onepass.report import report
from onepass.tuning import tune

__all__ = [
    "Block",
    "FallbackWarning",
    "SlowPathWarning",
    "__version__",
    "available",
    "explain",
    "freeze",
    "functional",
    "fuse",
    "numerics",
    "report",
    "tune",
    "unavailable_reason",
    "unfreeze",
    "unfuse",
]

_registration.register()  # torch.compile(model, backend="onepass")
