"""What the terminal shows: progress while a study runs, then one table."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from onepass.optimizing import text
from onepass.optimizing.study import Row, StepStudy, Study
from onepass.optimizing.variants import is_ours

PLAIN_WIDTH = 140  # of a line where the output is not a terminal
COLUMNS = ("model", "variant", "ms, median (10% to 90%)", "speed", "peak MiB", "error against fp64", "result")
NUMERIC = (2, 3, 4, 5)


class _Output(Console):
    """Leaves a reader that went away to the command."""

    def on_broken_pipe(self) -> None:
        """Raises what was caught."""
        raise BrokenPipeError


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Yields a function (text, share done); shows nothing where standard error is not a terminal."""
    columns = (BarColumn(24), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda description, done: bar.update(task, description=description, completed=done)


def print_studies(studies: Sequence[Study]) -> None:
    """Prints the table, then a sentence for each step and what was left out."""
    console = _Output(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    console.print(_table(studies))
    for study in studies:
        for step in study.steps:
            console.print(Text(text.sentence(study, step)))
        if not study.fused:
            console.print(Text(f"{study.name}: nothing was fused"))
        for name, reason in study.skipped:
            console.print(Text(f"{study.name}: {name} is not fused: {reason}"))


def _table(studies: Sequence[Study]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if i in NUMERIC else "left", overflow="fold")
    for study in studies:
        for step in study.steps:
            for i, row in enumerate(step.rows):
                name = [study.name, step.name, *study.inputs][i : i + 1]
                table.add_row(*_cells("".join(name), step, row), style=_style(row))
            table.add_section()
    return table


def _cells(name: str, step: StepStudy, row: Row) -> list[Text]:
    cells = (
        name,
        row.variant,
        text.milliseconds(row.timing),
        text.times(step.speed_up(row)),
        text.mebibytes(row.peak_bytes),
        text.error(row),
        text.verdict(row),
    )
    return [Text(cell) for cell in cells]


def _style(row: Row) -> str:
    if not is_ours(row.variant):
        return "" if row.timing else "dim"
    return "bold green" if row.timing else "bold red"
