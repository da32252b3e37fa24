"""How numbers and verdicts are written, the same in the table on the terminal and in the report."""

from __future__ import annotations

from onepass.optimizing import variants
from onepass.optimizing.measure import WIDE, Timing
from onepass.optimizing.study import WIN, Row, StepStudy, Study
from onepass.optimizing.variants import EAGER
from onepass.optimizing.verify import Check


def milliseconds(timing: Timing | None) -> str:
    """Median with the spread."""
    if timing is None:
        return ""
    return f"{_ms(timing.median)} ({_ms(timing.p10)} to {_ms(timing.p90)})"


def median(timing: Timing | None) -> str:
    """The median alone."""
    return "" if timing is None else _ms(timing.median)


def spread(timing: Timing | None) -> str:
    """From the 10% to the 90% quantile, as a share of the median."""
    return "" if timing is None else f"{100 * timing.spread:.0f}%"


def seconds_as_ms(seconds: float | None) -> str:
    """Milliseconds of one call."""
    return "" if seconds is None else _ms(seconds)


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def times(factor: float | None) -> str:
    """A factor such as 4.9x."""
    return "" if factor is None else f"{factor:.2f}x"


def speed(step: StepStudy, row: Row) -> str:
    """Against PyTorch's best; none where nothing of onepass runs, whose time then is PyTorch's."""
    return "" if row.idle else times(step.speed_to_best(row))


def mebibytes(size: int | None) -> str:
    """Bytes in MiB."""
    return "" if size is None else f"{size / 2**20:.1f}"


def worst_output(row: Row) -> Check | None:
    """The output that is furthest from fp64 in units of PyTorch's own error."""
    outputs = [check for check in row.checks if not check.is_gradient and not check.fault]
    return max(outputs, key=lambda check: check.ratio(), default=None)


def error(row: Row) -> str:
    """The largest error of the outputs against fp64, in units of PyTorch's own."""
    worst = worst_output(row)
    return "" if worst is None else times(worst.ratio())


def verdict(row: Row) -> str:
    """Whether the result is right; a reason where the variant could not run."""
    if row.reason:
        return f"not run: {row.reason}"
    if row.wrong:
        return f"{'WRONG' if variants.is_ours(row.variant) else 'not the same'}: {row.wrong}"
    if row.variant == EAGER:
        return "the original"
    if row.idle:
        return row.idle
    gradients = sum(check.is_gradient for check in row.checks)
    kept = "right" if row.keeps_rule else "close"
    return f"{kept}, with {gradients} gradients" if gradients else kept


# --- Sentences --------------------------------------------------------------------------------------


def outcome(step: StepStudy) -> str:
    """How onepass did against PyTorch's best: faster, even, slower, nothing fused, or no result."""
    speed = step.speed_up_of_best()
    if speed is not None and step.ours().idle:
        return "nothing fused"
    if speed is None:
        return "no result"
    return "faster" if speed >= WIN else "slower" if speed <= 1 / WIN else "even"


def exactness(row: Row) -> str:
    """How exact a variant is, as half a sentence."""
    worst = worst_output(row)
    if worst is None:
        return "nothing was compared"
    own = "as eager's is" if worst.error == worst.torch_error else f"{times(worst.ratio())} eager's"
    return f"error against fp64 {worst.error:.1e}, {own}"


def recommendation(study: Study, step: StepStudy) -> str:
    """Which variant to use, how much faster it is and how exact: one sentence."""
    ours, best = step.ours(), step.best_pytorch()
    where = f"{study.name}, {step.name}"
    if ours.timing is None or best is None:
        return f"{where}: onepass has no time here: {verdict(ours)}."
    speed = times(step.speed_up_of_best())
    if outcome(step) == "faster":
        how = f"use {variants.recipe(ours.variant)}: {speed} as fast as PyTorch's best ({best.variant})"
        return f"{where}: {how}; {exactness(ours)}."
    if ours.idle:
        how = f"use {variants.recipe(best.variant)}: onepass changes nothing of this model"
    else:
        other = "slower" if outcome(step) == "slower" else "no faster"
        how = (
            f"use {variants.recipe(best.variant)}: onepass is {other} here ({ours.variant}, {speed} as fast)"
        )
    return f"{where}: {how}; {exactness(best)}."


def coverage(study: Study) -> str:
    """How much of the model was fused."""
    count, covered = len(study.fused), study.coverage
    if count == 0:
        found = "nothing was fused"
    else:
        blocks = "1 block" if count == 1 else f"{count} blocks"
        found = f"{covered.fused} of {covered.layers} layers run in {blocks}"
    kept = sum(chain.kept for chain in study.chains)
    return f"{found}; the backend keeps {kept} of {len(study.chains)} chains" if study.chains else found


def advice(study: Study) -> str:
    """What to do where nothing or little was fused; empty where enough was."""
    if study.fused and not study.coverage.is_little:
        return ""
    if any(chain.kept for chain in study.chains):
        other = ' Try torch.compile(model, backend="onepass"), which also reads functional code.'
    else:
        other = " What to do: read the reasons under “not fused”, and change those places of the forward."
    if study.fused:
        share = f"{study.coverage.fused} of {study.coverage.layers} layers"
        return f"Little was fused, {share}: the rest runs as before and bounds the gain.{other}"
    if not study.skipped:
        other = " There is nothing to do for a model without such chains: use PyTorch's best."
    return (
        "Nothing was fused. onepass fuses a convolution or norm with the activations, norm and mean that "
        f"follow it.{other}"
    )


def warning(step: StepStudy) -> str:
    """What to know where repeats spread widely; empty where they do not."""
    unsteady = step.unsteady()
    if not unsteady:
        return ""
    names = ", ".join(row.variant for row in unsteady)
    return (
        f"The times of {names} spread by more than {WIDE:.0%} of their median, also when measured again. "
        "Something else used the machine: run the command again on an idle one, or with more --seconds."
    )
