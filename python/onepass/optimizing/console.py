"""What the terminal shows: progress while a study runs, then a table for each step and one sentence."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from onepass.optimizing import text
from onepass.optimizing.study import Row, StepStudy, Study
from onepass.optimizing.variants import BENCH, is_ours

PLAIN_WIDTH = 80  # of a line where the output is not a terminal
COLUMNS = ("variant", "ms", "spread", "speed", "peak MiB", "error")
LEGEND = (
    "ms: median of the repeats. spread: from the 10% to the 90% quantile. speed: against PyTorch's best. "
    "error: against fp64, in units of eager's. nhwc: channels last."
)
LEGEND_OF_GPUS = " bench: torch.backends.cudnn.benchmark, shown where it is faster."


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
    """Prints a table for each step, what was fused and what was not, then which variant to use."""
    console = _Output(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    for study in studies:
        for step in study.steps:
            console.print(Text(f"{study.name}, {step.name}: {', '.join(study.inputs)}", style="bold"))
            console.print(_table(step))
            _print_faults(console, step)
        _print_coverage(console, study)
        console.print()
    has_bench = any(row.variant.endswith(BENCH) for s in studies for step in s.steps for row in step.rows)
    console.print(Text(LEGEND + LEGEND_OF_GPUS * has_bench, style="dim"))
    for study in studies:
        for step in study.steps:
            console.print(Text(text.recommendation(study, step), style="bold"))


def _table(step: StepStudy) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in step.shown():
        table.add_row(*map(Text, _cells(step, row)), style=_style(step, row))
    return table


def _cells(step: StepStudy, row: Row) -> tuple[str, ...]:
    if row.timing is None:
        return row.variant, "not run" if row.reason else "WRONG", "", "", "", text.error(row)
    return (
        row.variant,
        text.median(row.timing),
        text.spread(row.timing),
        text.speed(step, row),
        text.mebibytes(row.peak_bytes),
        text.error(row),
    )


def _style(step: StepStudy, row: Row) -> str:
    """Green is for wins alone."""
    if not is_ours(row.variant) or row.idle:
        return "" if row.timing else "dim"
    return "bold green" if step.wins(row) else "bold" if row.timing else "dim" if row.reason else "bold red"


def _print_faults(console: Console, step: StepStudy) -> None:
    """Why a row has no time or none of its own: once where several have one reason."""
    faults: dict[str, list[str]] = {}
    for row in step.shown():
        if row.timing is None or row.idle:
            faults.setdefault(text.verdict(row), []).append(row.variant)
    for fault, names in faults.items():
        console.print(Text(f"{', '.join(names)}: {fault}"))
    if warning := text.warning(step):
        console.print(Text(f"warning: {warning}", style="yellow"))


def _print_coverage(console: Console, study: Study) -> None:
    console.print(Text(f"fused: {text.coverage(study)}"))
    for block in study.fused:
        _print_item(console, f"{', '.join(block.modules) or block.name}: {block.block}")
    if advice := text.advice(study):
        console.print(Text(advice, style="yellow"))
    if study.skipped:
        console.print(Text("not fused:"))
    for name, reason in study.skipped:
        _print_item(console, f"{name}: {reason}")


def _print_item(console: Console, words: str) -> None:
    console.print(Padding(Text(words), (0, 0, 0, 2)))
