"""What runs on the aten graphs before Inductor lowers them: layouts are marked, and the user's own pass runs.

Its uuid keys the caches of FX graphs and of AOTAutograd to this library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from onepass import _library
from onepass.compiling.lowering import LAYOUT, takes_layout


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
        return None if theirs is None else (_library.content_hash(), self.layout, theirs)
