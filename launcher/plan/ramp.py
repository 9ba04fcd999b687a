"""The ramp of the global batch: stages as the configuration says them, and what the learning rate makes of them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Any

from launcher.config.choices import Rule
from launcher.config.schema import Config, RampConfig, ScalingConfig
from launcher.errors import ConfigError
from launcher.plan.batch import parse_count
from launcher.plan.durations import TRAINING_DURATION, Clock, Duration, NeedsData
from launcher.plan.scaling import ADAM, scaled_rate
from launcher.plan.windows import RAMP, Stage, WindowTable, batches_at_most


def ramp_ends(config: Config) -> list[Duration]:
    """When each stage ends; a percentage as that part of the training, in its own unit.

    Raises:
        ConfigError: an end that is none.
    """
    whole = Duration.parse(config.training.duration, TRAINING_DURATION)
    if whole.unit == "%":
        Clock().updates(whole, TRAINING_DURATION)  # refuses it
    return [_end(stage, f"{RAMP}[{index}].until", whole) for index, stage in enumerate(config.batch.ramp)]


def _end(stage: RampConfig, key: str, whole: Duration) -> Duration:
    end = Duration.parse(stage.until, key)
    if end.unit == "%":
        value = end.value * whole.value / 100
        end = Duration(value if whole.unit == "epochs" else Fraction(floor(value + Fraction(1, 2))), whole.unit)
    if end.value == 0:
        raise ConfigError(key, stage.until, "must be above 0: until there windows have this size")
    return end


def ramp_stages(config: Config, updates_at_tokens: Mapping[str, int], count: int | None = None) -> tuple[Stage, ...]:
    """The stages of the ramp in order.

    Args:
        updates_at_tokens: for the end of a stage in tokens, as an exact fraction: the windows that reach it.
        count: how many of them; None: all.

    Raises:
        NeedsData: an end in tokens isn't among them.
        ConfigError: a stage that can't be.
    """
    both = list(zip(config.batch.ramp, ramp_ends(config), strict=True))[:count]
    return tuple(_stage(stage, end, index, updates_at_tokens) for index, (stage, end) in enumerate(both))


def _stage(stage: RampConfig, end: Duration, index: int, updates_at_tokens: Mapping[str, int]) -> Stage:
    key = f"{RAMP}[{index}]"
    size, grow_to = check_sizes(stage, index)
    if end.unit == "tokens":
        if str(end.value) not in updates_at_tokens:
            raise NeedsData(f"{key}.until", stage.until, "takes the number of tokens of every window")
        return Stage(Fraction(updates_at_tokens[str(end.value)]), "updates", size, str(stage.until))
    assert end.unit != "%", "settled above"
    return Stage(end.value, end.unit, size, str(stage.until), None if grow_to is None else Fraction(grow_to))


def check_sizes(stage: RampConfig, index: int) -> tuple[int, int | None]:
    """The sizes of a stage, in samples. Raises ConfigError."""
    size = parse_count(f"{RAMP}[{index}].global_batch_size", stage.global_batch_size)
    return size, parse_count(f"{RAMP}[{index}].grow_to", stage.grow_to, allow_null=True)


def check_ramp(config: Config) -> None:
    """That a ramp can be, as far as can be said without the data. Raises ConfigError."""
    ramp = config.batch.ramp
    if ramp and config.scaling.adam_betas_and_eps:
        problem = f"betas and eps would have to change with the windows of {RAMP}, which they don't"
        raise ConfigError(ADAM, "true", problem, hint=f"{ADAM}=false")
    reached: dict[str, Duration] = {}
    for index, (stage, end) in enumerate(zip(ramp, ramp_ends(config), strict=True)):
        _, grow_to = check_sizes(stage, index)
        key = f"{RAMP}[{index}].until"
        if grow_to is not None and end.unit not in ("samples", "epochs"):
            problem = f"windows that grow do so by samples, and the stage ends by {end.unit}"
            raise ConfigError(key, stage.until, problem, hint="give samples or epochs")
        before = reached.get(end.unit)
        if before is not None and end.value <= before.value:
            raise ConfigError(key, stage.until, f"holds no window: a stage before it ends after {before}")
        reached[end.unit] = end


@dataclass(frozen=True)
class FollowsRamp:
    """What the rule makes of the peak rate for the window of each update, as a share of that of a full window."""

    scaling: ScalingConfig
    windows: WindowTable

    def __call__(self, update: int) -> float:
        size, full = self.windows.size(update), self.windows.global_batch_size
        return scaled_rate(self.scaling.rule, 1.0, Fraction(size, full))


def follows_ramp(scaling: ScalingConfig, windows: WindowTable | None) -> Callable[[int], float] | None:
    """How the rate follows the ramp; None: it doesn't, without a ramp or a rule."""
    if windows is None or not windows.ramp or scaling.rule is Rule.none:
        return None
    return FollowsRamp(scaling, windows)


def ramp_table(config: Config, windows: WindowTable | None) -> list[dict[str, Any]] | None:
    """The stages of the ramp for plan.json; None: there is none."""
    rows: list[dict[str, Any]] = []
    for index, stage in enumerate(config.batch.ramp):
        size, grow_to = check_sizes(stage, index)
        last = None if windows is None else windows.stage_ends[index]
        first = None if windows is None else windows.stage_ends[index - 1] + 1 if index else 1
        row = {"global_batch_size": size, "grow_to": grow_to if batches_at_most(size, grow_to) > 1 else None}
        rows.append({**row, "until": str(stage.until), "first_update": first, "last_update": last})
    return rows or None


def ramp_lines(config: Config, windows: WindowTable | None, lr: float) -> Iterator[str]:
    """Each stage with its numbers, for people to read. `lr`: the peak rate of a full window."""
    full = "batch.global_batch_size" if windows is None else f"{windows.global_batch_size} samples"
    rows, follow = ramp_table(config, windows) or [], follows_ramp(config.scaling, windows)
    for stage, row in zip(config.batch.ramp, rows, strict=True):
        growth = "" if stage.grow_to is None else f" (grow_to={stage.grow_to} is below 1.5 times it: it doesn't grow)"
        growth = f", in multiples of it growing towards {row['grow_to']}" if row["grow_to"] else growth
        end, rate = f"until {row['until']}", ""
        if row["last_update"] is not None:
            end = f"updates {row['first_update']} to {row['last_update']} ({end})"
            rate = "" if follow is None else f", lr {lr * follow(row['last_update']):g}"
            rate += " at its end" if rate and row["grow_to"] else ""
        yield f"ramp: {row['global_batch_size']} samples{growth}, {end}{rate}"
    if rows:
        unchanged = "; weight decay is that of a full window throughout" if config.optimizer.get("weight_decay") else ""
        yield f"ramp: then {full}{unchanged}"
