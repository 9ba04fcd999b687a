"""What differs between two frozen configurations, and would change what a run computes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from launcher.config.validate import read
from launcher.errors import shown

WHERE_AND_HOW = (
    "cluster",
    "strategy",
    "mesh",
    "pipeline",
    "submit",
    "activation_checkpoint",
    "logging",
    "checkpoint",
    "sweep",
    "batch.global_batch_size",
    "batch.micro_batch_size",
    "batch.gradient_accumulation_steps",
    "batch.micro_batch_tokens",
    "batch.layout",
    "data.workers",
    "run.name",
    "targets.device_hours",
    "targets.samples_per_s",
    "training.validate_every",
    "training.log_every",
    "training.noise_scale",
    "training.noise_scale_memory",
    "training.time_limit",
    "training.hang_after",
    "training.max_restarts",
    "training.max_skipped_in_a_row",
    "training.on_nonfinite",
)
"""Sections and keys that decide where and how a run computes, and not what. The global batch is compared as the plan
has solved it, since null follows from the ranks."""


@dataclass(frozen=True)
class Difference:
    """A key of a run that has another value than before."""

    key: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.old)} -> {shown(self.new)}"


class _Absent:
    def __str__(self) -> str:
        return "(not there)"


ABSENT = _Absent()
"""The value of a key that one of the two doesn't have."""


def differences(old: str, new: str) -> list[Difference]:
    """The keys whose values differ between two texts of config.yaml, but those of `WHERE_AND_HOW`, in their order.

    Environment variables are compared as references: what they hold is no part of the configuration.

    Raises:
        LauncherError: one of them can't be read.
    """
    before, after = _values(old), _values(new)
    keys = dict.fromkeys([*before, *after])
    both = [Difference(key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys]
    return [one for one in both if not _is_same(one.old, one.new) and not _is_free(one.key)]


def listed(found: Sequence[Difference]) -> str:
    """Differences as people read them, a line for each."""
    return "\n".join(f"  {one}" for one in found)


def _values(text: str) -> dict[str, Any]:
    return dict(_leaves(OmegaConf.to_container(read(text), resolve=False, enum_to_str=True)))


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, one in value.items():
            yield from _leaves(one, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _is_same(old: Any, new: Any) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_is_same, old, new))
    if old != old and new != new:  # NaN
        return True
    return isinstance(old, bool) == isinstance(new, bool) and bool(old == new)


def _is_free(key: str) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in WHERE_AND_HOW)
