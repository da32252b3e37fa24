"""What runs on the aten graphs before Inductor lowers them: layouts are marked, and the user's own pass runs.

Its uuid keys the caches of FX graphs and of AOTAutograd to this library.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from onepass import _library
from onepass.compiling.lowering import LAYOUT, takes_layout


@functools.cache
def library_hash() -> str:
    """Of the compiled operators and of the package's sources: what a cached graph depends on."""
    digest = hashlib.sha256()
    sources = sorted(pathlib.Path(_library.__file__).parent.rglob("*.py"))
    for path in (_library.PATH, *sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class LayoutPass(CustomGraphPass):
    """Marks the operators with the layout that was decided for the graph, then runs the user's pass."""

    def __init__(self, layout: str | None, then: Callable[[fx.Graph], None] | None) -> None:
        self.layout = layout
        self.then = then  # the slot holds one pass

    def __call__(self, graph: fx.Graph) -> None:
        """Runs on the forward's graph and on the backward's."""
        for node in graph.nodes:
            if self.layout is not None and takes_layout(node):
                node.meta[LAYOUT] = self.layout
        if self.then is not None:
            self.then(graph)

    def uuid(self) -> Any:
        """None, which turns caching off, where the user's pass has none."""
        theirs: Any = ""
        if self.then is not None:
            theirs = self.then.uuid() if isinstance(self.then, CustomGraphPass) else None
        return None if theirs is None else (library_hash(), self.layout, theirs)
