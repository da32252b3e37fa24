"""onepass: convolution blocks in one pass over memory."""

from onepass import functional
from onepass._library import __version__, available, unavailable_reason
from onepass._redone import SlowPathWarning
from onepass.block import Block
from onepass.explain import explain
from onepass.fuse import fuse, unfuse
from onepass.report import report
from onepass.tuning import tune

__all__ = [
    "Block",
    "SlowPathWarning",
    "__version__",
    "available",
    "explain",
    "functional",
    "fuse",
    "report",
    "tune",
    "unavailable_reason",
    "unfuse",
]
