"""The table of a report: a line for each configuration."""

from dataclasses import dataclass

from launcher.observe.text import value_text
from launcher.report.critical import critical_batch
from launcher.report.group import Configuration
from launcher.report.verdict import Judged, Judgement, Verdict, device_hours_to, samples_to
from launcher.report.words import difference, mean_text, time_text
from launcher.run_dir import State


@dataclass(frozen=True)
class Table:
    """Its headings, and for each configuration the cells and the word for its judgement."""

    headings: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], str], ...]
    is_text: tuple[bool, ...]
    """For each column whether it holds words, not numbers."""


def table(verdict: Verdict) -> Table:
    """The table of one family."""
    configurations = verdict.family.configurations
    has_settings = any(one.tuning for one in configurations)
    base = verdict.family.reference_batch if len(configurations) > 1 else None
    target = verdict.target
    headings: tuple[str, ...] = ("settings",) if has_settings else ()
    headings += ("global batch", "peak learning rate", "warmup updates", "updates", f"final {verdict.kind} loss", "n")
    headings += () if base is None else (f"against batch {base}",)
    headings += () if target is None else (f"samples to a loss of {target:.5g}", "device-hours to it")
    critical = {one: found for one in configurations if (found := critical_batch(one)) is not None}
    headings += ("critical batch",) if critical else ()
    headings += ("time", "samples/s", "runs")
    rows = []
    for one in configurations:
        cells: tuple[str, ...] = (" ".join(one.tuning),) if has_settings else ()
        cells += (_known(one.batch), *_of_plan(one), *_of_loss(one, verdict))
        cells += () if base is None else (_beside(verdict.of(one)),)
        cells += () if target is None else _to_target(one, verdict.kind, target)
        cells += (value_text(*critical[one]) if one in critical else "-",) if critical else ()
        judged = verdict.of(one)
        rows.append(
            ((*cells, *_speed(one, verdict.kind), _runs(one, verdict.kind)), judged.judgement.value if judged else "")
        )
    words = ("settings", f"against batch {base}", "runs")
    return Table(headings, tuple(rows), tuple(one in words for one in headings))


def _known(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _of_plan(one: Configuration) -> tuple[str, str, str]:
    run = next((run for run in one.runs if run.lr is not None), one.runs[0])
    rate = "-" if run.lr is None else f"{run.lr:.4g}"
    return rate, _known(run.warmup_updates), _known(run.num_updates)


def _of_loss(one: Configuration, verdict: Verdict) -> tuple[str, str]:
    sample = one.sample(verdict.kind)
    if sample is not None:
        return mean_text(sample), str(sample.n)
    return ("diverged" if one.diverged(verdict.kind) else "-"), "0"


def _beside(judged: Judged | None) -> str:
    if judged is None:
        return ""
    if judged.judgement is Judgement.reference or judged.comparison is None:
        return judged.judgement.value
    return f"{judged.judgement.value}: {difference(judged.comparison)}"


def _to_target(one: Configuration, kind: str, target: float) -> tuple[str, str]:
    runs = [run for run in one.runs if not run.has_diverged(kind)]
    reached, hours = samples_to(target, runs, kind), device_hours_to(target, runs, kind)
    if not reached:
        return ("not reached" if any(run.curves for run in runs) else "-"), "-"
    text = f"{sum(reached) / len(reached):,.0f}"
    taken = f"{sum(hours) / len(hours):.3g}" if hours else "-"
    return (text if len(reached) == len(runs) else f"{text} ({len(reached)} of {len(runs)})"), taken


def _speed(one: Configuration, kind: str) -> tuple[str, str]:
    """The mean time of the runs that finished, and the samples a second of all."""
    finished, timed = one.counted(kind), [run for run in one.runs if run.seconds > 0]
    time = time_text(sum(run.seconds for run in finished) / len(finished)) if finished else "-"
    seconds = sum(run.seconds for run in timed)
    return time, f"{sum(run.samples for run in timed) / seconds:,.4g}" if seconds else "-"


def _runs(one: Configuration, kind: str) -> str:
    """``2 finished``, ``1 finished, 1 diverged``."""
    words = ["diverged" if run.has_diverged(kind) else run.state for run in one.runs]
    words = ["not started" if word == State.planned.value else word for word in words]
    return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
