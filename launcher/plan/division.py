"""How a window is divided: in micro-batches of a number of samples or of tokens, by length or in order of arrival."""

from dataclasses import dataclass
from typing import Any

from launcher.config.choices import Layout
from launcher.config.schema import BatchConfig
from launcher.errors import ConfigError
from launcher.plan.batch import BatchPlan, parse_count

_TOKENS = "batch.micro_batch_tokens"


@dataclass(frozen=True)
class Division:
    """The batch section, solved."""

    batch: BatchPlan
    """With micro-batches of tokens: one step of all a rank's samples, the most a micro-batch could hold."""
    micro_batch_tokens: int | None
    layout: str | None
    """length or arrival; None: not known before the ranks see the task."""

    def fields(self) -> dict[str, Any]:
        """The fields of the plan that follow from it: sizes in samples are None where tokens bound a micro-batch."""
        by_tokens = self.micro_batch_tokens is not None
        return {
            "global_batch_size": self.batch.global_batch_size,
            "micro_batch_size": None if by_tokens else self.batch.micro_batch_size,
            "micro_batch_tokens": self.micro_batch_tokens,
            "gradient_accumulation_steps": None if by_tokens else self.batch.gradient_accumulation_steps,
            "data_parallel_degree": self.batch.data_parallel_degree,
            "layout": self.layout,
        }

    def lines(self) -> list[str]:
        """Each line of the arithmetic, with its numbers."""
        if self.micro_batch_tokens is None:
            return self.batch.lines()
        return [
            f"micro-batches of as many samples as fit {self.micro_batch_tokens} tokens, padding included; "
            "their number differs between windows",
        ]


def divide(config: BatchConfig, degree: int, knows_lengths: bool | None) -> Division:
    """The batch section for this degree. `knows_lengths`: whether the task does; None: it was not asked.

    Raises:
        ConfigError: sizes that contradict each other, or lengths that are needed and not known.
    """
    tokens = parse_count(_TOKENS, config.micro_batch_tokens, allow_null=True)
    micro, steps = config.micro_batch_size, config.gradient_accumulation_steps
    if tokens is not None:
        for key, value in (("batch.micro_batch_size", micro), ("batch.gradient_accumulation_steps", steps)):
            if value != "auto":
                raise ConfigError(key, value, f"can't be given beside {_TOKENS}={tokens}, which takes its place")
        if config.layout is Layout.arrival:
            raise ConfigError("batch.layout", "arrival", f"{_TOKENS} needs a layout by length")
        steps = 1
    batch = BatchPlan.solve(config.global_batch_size, micro, steps, degree)
    return Division(batch, tokens, _layout(config, knows_lengths, tokens))


def _layout(config: BatchConfig, knows_lengths: bool | None, tokens: int | None) -> str | None:
    if config.layout is Layout.arrival:
        return "arrival"
    if knows_lengths is None:
        return None
    if knows_lengths:
        return "length"
    problem = "the task has no length(sample), so lengths aren't known"
    if tokens is not None:
        raise ConfigError(_TOKENS, tokens, problem, hint="batch.micro_batch_size, or add length to the task")
    if config.layout is Layout.length:
        raise ConfigError("batch.layout", "length", problem, hint="batch.layout=arrival, or add length to the task")
    return "arrival"
