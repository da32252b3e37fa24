"""How numbers and verdicts are written, the same in the table on the terminal and in the report."""

from __future__ import annotations

from onepass.optimizing.measure import Timing
from onepass.optimizing.study import Row, StepStudy, Study
from onepass.optimizing.variants import EAGER, ONEPASS


def milliseconds(timing: Timing | None) -> str:
    """Median with the spread."""
    if timing is None:
        return ""
    return f"{_ms(timing.median)} ({_ms(timing.p10)} to {_ms(timing.p90)})"


def median(timing: Timing | None) -> str:
    """The median alone."""
    return "" if timing is None else _ms(timing.median)


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def times(factor: float | None) -> str:
    """A factor such as 4.9x."""
    return "" if factor is None else f"{factor:.2f}x"


def mebibytes(size: int | None) -> str:
    """Bytes in MiB."""
    return "" if size is None else f"{size / 2**20:.1f}"


def error(row: Row) -> str:
    """The largest error of the outputs against fp64, in units of PyTorch's own too."""
    outputs = [check for check in row.checks if not check.is_gradient and not check.fault]
    if not outputs:
        return ""
    worst = max(outputs, key=lambda check: check.ratio())
    return f"{worst.error:.1e} ({worst.ratio():.1f}x)"


def verdict(row: Row) -> str:
    """Whether the result is right; a reason where the variant could not run."""
    if row.reason:
        return f"not run: {row.reason}"
    if row.wrong:
        return f"{'WRONG' if row.variant == ONEPASS else 'not the same'}: {row.wrong}"
    if row.variant == EAGER:
        return "the original"
    gradients = sum(check.is_gradient for check in row.checks)
    kept = "right" if row.keeps_rule else "close"
    return f"{kept}, with {gradients} gradients" if gradients else kept


def sentence(study: Study, step: StepStudy) -> str:
    """What came out of one step, for people."""
    row = step.ours()
    if row.timing is None:
        return f"{study.name}, {step.name}: {verdict(row)}"
    best = step.best_pytorch()
    factors = f"{times(step.speed_up(row))} as fast as eager, {times(step.speed_up_of_best())} as fast as"
    return f"{study.name}, {step.name}: {factors} PyTorch's best here ({best.variant})"
