"""The verdict and its numbers in words."""

import math
from collections.abc import Sequence

from launcher.observe.text import duration_text
from launcher.report.critical import of_critical_batches
from launcher.report.group import Configuration, best
from launcher.report.noise import CONFIDENCE, Comparison, Sample
from launcher.report.read import Run, Source
from launcher.report.verdict import Judged, Judgement, Series, Verdict
from launcher.run_dir import State

RULE = (
    "A batch holds where its mean final loss isn't above that of the reference batch by more than the seeds' noise "
    f"explains: Welch's one-sided test at {1 - CONFIDENCE:.0%}, difference ≤ t({CONFIDENCE}, df) · "
    "√(s₁²/n₁ + s₂²/n₂) with the degrees of freedom of Welch and Satterthwaite (Welch, Biometrika 1947; Satterthwaite, "
    "Biometrics Bulletin 1946). A lower loss always holds; a batch with a seed that diverged doesn't. The verdict is "
    "the largest batch such that it and all smaller ones that were tried hold. With one seed there is no estimate of "
    "the noise, and no verdict. That a batch holds means that these seeds show no loss: with few of them the noise is "
    "wide and hides small ones. The tests of several batches aren't corrected for their number."
)
TIME = (
    "Samples are all that a run has seen; its time is the sum of its updates' seconds, without the start, validations "
    "and waiting for checkpoints."
)
TARGET = (
    "The target is targets.validation_loss where the runs state one, else the highest final loss of the reference's "
    "seeds. Samples to it are those seen until the {kind} loss{smoothing} first came to it, averaged over the seeds "
    "that did, and device-hours to it are the time of the updates until then times the ranks."
)


NEARLY = 1.02
"""Numbers of samples that differ by less are one: a training ends on a window."""


def headline(verdict: Verdict) -> str:
    """The verdict in one sentence."""
    base = verdict.family.reference_batch
    if base is None:
        return "No run has started yet."
    if verdict.reference is None:
        if any(one.diverged(verdict.kind) for one in verdict.family.configurations if one.batch == base):
            return f"No verdict: at the reference batch {base} training diverged."
        return f"No verdict: no run at the reference batch {base} has finished."
    if verdict.family.batches == [base]:
        return f"One global batch size was tried, {base}: there is no other to compare."
    if not verdict.is_judged:
        if verdict.sample is not None and verdict.sample.standard_error is None:
            return f"No verdict: of the reference batch {base} one seed alone has finished, which shows no noise."
        return f"No verdict: of no batch beside {base} have two seeds finished, and one shows no noise."
    if verdict.reached is None:
        return f"No batch above {base} reaches the loss of batch {base}."
    who = [_who(one) for one in verdict.series if one.reached == verdict.reached]
    return (
        f"The largest batch that reaches the loss of batch {base}, within the noise of the seeds, is "
        f"{verdict.reached}, with {' and with '.join(who)}."
    )


def details(verdict: Verdict) -> list[str]:
    """What there is to say of each series, and what to know of the comparison."""
    has_batches = verdict.reference is not None and len(verdict.family.batches) > 1
    lines = [_of_series(one, verdict) for one in verdict.series] if has_batches else []
    if any(len(ones) > 1 for ones in _at_batches(verdict).values()):
        lines += _best_at_batches(verdict)
    finished = [run for one in verdict.family.configurations for run in one.counted(verdict.kind)]
    seen = sorted({round(run.samples) for run in finished})
    if finished and seen[-1] > NEARLY * seen[0]:
        lines.append(
            f"The runs saw different numbers of samples, {seen[0]:,} to {seen[-1]:,}: a loss follows from that too."
        )
    lines += of_critical_batches(verdict.family.configurations)
    for one in verdict.family.configurations:
        for run in one.repeated(verdict.kind):
            lines.append(f"{run.name} repeats a seed and isn't counted.")
    waiting = [run for one in verdict.family.configurations for run in one.without_loss(verdict.kind)]
    if any(run.state.split(",")[0] not in _OVER for run in waiting):
        lines.append("Not all runs have finished: this is how it stands so far.")
    return lines


_OVER = tuple(state.value for state in (State.finished, State.failed, State.stopped, State.cancelled))


def _who(series: Series) -> str:
    """How a series follows the batch: its own overrides, or else the rule that all have."""
    if series.scaling:
        return " ".join(series.scaling)
    first = series.judged[0].configuration
    base = next((run.base_batch_size for run in first.runs if run.base_batch_size is not None), None)
    rule = f"scaling.rule={first.rule}"
    return rule if base is None or first.rule == "none" else f"{rule} from batch {base}"


def _of_series(series: Series, verdict: Verdict) -> str:
    others = [one for one in series.judged if one.judgement is not Judgement.reference]
    if not others:
        return f"{_who(series)}: the reference, at batch {verdict.family.reference_batch}."
    return f"{_who(series)}: {'; '.join(map(_of_batch, others))}."


def _of_batch(one: Judged) -> str:
    batch = " with ".join(filter(None, (str(one.configuration.batch), " ".join(one.configuration.chosen))))
    if one.judgement is Judgement.diverged:
        return f"batch {batch} diverged"
    if one.comparison is None:
        return f"batch {batch} has no final loss"
    text = f"batch {batch}"
    text += f" {one.judgement.value}" if one.judgement in (Judgement.holds, Judgement.higher) else ""
    return f"{text} ({difference(one.comparison)})"


def difference(comparison: Comparison) -> str:
    """``+0.031, noise 0.012``: how far a loss lies above the reference's, and how much of that noise explains."""
    if comparison.margin is None:
        return f"{signed(comparison.difference)}, one seed"
    return f"{signed(comparison.difference)}, noise {comparison.margin:.2g}"


def signed(value: float) -> str:
    return f"{value:+.2g}".replace("-", "\N{MINUS SIGN}", 1) if abs(value) >= 1e-12 else "0"


def _at_batches(verdict: Verdict) -> dict[int, list[Configuration]]:
    return {
        batch: [one for one in verdict.family.configurations if one.batch == batch] for batch in verdict.family.batches
    }


def _best_at_batches(verdict: Verdict) -> list[str]:
    """The setting with the lowest loss at each batch."""
    found = []
    for batch, ones in _at_batches(verdict).items():
        one = best(ones, verdict.kind)
        sample = None if one is None else one.sample(verdict.kind)
        if one is not None and sample is not None:
            found.append(f"{' '.join(one.tuning) or 'as configured'} at batch {batch} ({mean_text(sample)})")
    lines = [f"Lowest loss: {'; '.join(found)}."] if found else []
    if any(one.chosen for one in verdict.family.configurations) and len(found) > 1:
        lines.append("At each batch the best is judged, chosen by the same losses: that leans a little to its favour.")
    return lines


def mean_text(sample: Sample) -> str:
    """``3.327 ± 0.015``, with two digits of the standard error; ``3.3272`` where one seed gives none."""
    error = sample.standard_error
    if not error:
        return f"{sample.mean:.5g}" + ("" if error is None else " ± 0")
    digits = min(8, max(0, 1 - math.floor(math.log10(error))))
    return f"{sample.mean:.{digits}f} ± {error:.{digits}f}"


def time_text(seconds: float) -> str:
    """``0.75 s`` below a minute, ``2:10`` from there on."""
    return f"{seconds:.3g} s" if seconds < 60 else duration_text(seconds)


def ended(run: Run, kind: str) -> str:
    """What became of a run without a final loss, or how far it is."""
    if run.has_diverged(kind):
        text = "diverged"
    elif run.state == State.planned.value:
        return "not started"
    else:
        text = run.state
    if run.num_updates is not None and run.state != State.finished.value:
        text += f" at update {run.update} of {run.num_updates}"
    if run.exit_code:
        text += f" (exit {run.exit_code})"
    return text + (f": {run.reason}" if run.reason and not run.has_diverged(kind) else "")


def unfinished(configurations: Sequence[Configuration], kind: str) -> list[str]:
    """A line for each run that failed, diverged or isn't finished, in the order of the sweep."""
    runs = [run for one in configurations for run in (*one.diverged(kind), *one.without_loss(kind))]
    return [f"{run.name}: {ended(run, kind)}" for run in sorted(runs, key=lambda run: run.num)]


def title(source: Source) -> str:
    return f"{'Sweep' if source.is_sweep else 'Run'} {source.name}"
