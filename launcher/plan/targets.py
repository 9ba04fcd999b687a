"""What targets ask of a run: the rate that a budget needs, and what a rate comes to in device-hours."""

from launcher.config.schema import Config
from launcher.config.targets import HOUR, TargetsConfig
from launcher.plan.timing import Timing
from launcher.run_dir import RunDir


def spent(run: RunDir, hours: float | None) -> float | None:
    """The device-hours that a run has had, where those are all that it may use; None: there is something left."""
    used = run.device_seconds() / HOUR
    return used if hours is not None and used >= hours else None


def needed_rate(samples: float, hours: float, world_size: int) -> float:
    """Samples a second at which so many fit into so many device-hours; infinite where none are left."""
    return samples * world_size / (hours * HOUR) if hours > 0 else float("inf")


def target_lines(targets: TargetsConfig, world_size: int, samples: int | None) -> list[str]:
    """The targets as the plan shows them. `samples`: of the whole training; None: not known yet."""
    then = ", which ends the run" if targets.stop_when_reached else ""
    lines = [f"{' and '.join(targets.quality())}{then}"] if targets.states_quality else []
    hours = targets.device_hours
    if hours is not None:
        line = f"at most {hours:g} device-hours, {hours / world_size:.3g} hours on {world_size} ranks"
        if samples is not None:
            line += f": {samples:,} samples need {needed_rate(samples, hours, world_size):.4g} samples/s"
        lines.append(line)
    if targets.samples_per_s is not None:
        lines.append(f"at least {targets.samples_per_s:g} samples/s")
    return lines


def target_notes(config: Config, timing: Timing) -> list[str]:
    """What of the targets has no effect, for people to read."""
    given, every, last = config.training.validate_every, timing.validate_every, timing.num_updates
    is_late = given is None or (every is not None and last is not None and not every.count(last - 1))
    if not config.targets.stop_when_reached or not is_late:
        return []
    validated = "null" if given is None else given
    return [
        f"targets.stop_when_reached has no effect: with training.validate_every={validated} the run is validated after "
        "its last update alone, where it ends anyway"
    ]
