"""The arithmetic of a window: how many samples a rank takes, and in how many micro-batches.

A window is the samples of one optimizer update. Nothing else in the program divides samples among ranks and
micro-batches; `windows` divides epochs into windows.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite
from typing import Literal, overload

from launcher.errors import ConfigError, nearest

MICRO_BATCH_CAP = 16
"""The largest micro-batch, in samples, that `auto` chooses by itself: until memory is planned, a size that fits most
models on most devices. A larger one has to be asked for."""

GLOBAL = "batch.global_batch_size"
MICRO = "batch.micro_batch_size"
GAS = "batch.gradient_accumulation_steps"

# Bounded in its digits, so that no typed value can ask for a number of a billion digits.
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:[eE][+-]?[0-9]{1,2})?")

Auto = Literal["auto"]


def exact_number(value: object) -> Fraction | None:
    """The number that a typed value (integer, float or text such as `8` or `1e9`) shows; None where it shows none.

    A float counts as the decimal it is written as: 0.1 is one tenth. Booleans, NaN and infinity are no numbers.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Fraction(value)
    if isinstance(value, float):
        return Fraction(repr(value)) if isfinite(value) else None
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        return Fraction(value.strip())
    return None


@overload
def parse_count(key: str, value: object) -> int: ...
@overload
def parse_count(key: str, value: object, *, allow_auto: Literal[True]) -> int | Auto: ...
@overload
def parse_count(key: str, value: object, *, allow_null: Literal[True]) -> int | None: ...
@overload
def parse_count(key: str, value: object, *, allow_auto: bool, allow_null: bool) -> int | Auto | None: ...
def parse_count(key: str, value: object, *, allow_auto: bool = False, allow_null: bool = False) -> int | Auto | None:
    """The count of at least 1 that `value` of the key `key` stands for; `"auto"` and None where these are allowed.

    Whole numbers count however they were typed: 8, `"8"`, 8.0, `"1e1"`.

    Raises:
        ConfigError: for anything else; names the key, what was given and what is allowed.
    """
    if value is None and allow_null:
        return None
    if value == "auto" and allow_auto:
        return "auto"
    number = exact_number(value)
    if number is not None and number.denominator == 1 and number >= 1:
        return int(number)
    words = ["auto"] * allow_auto + ["null"] * allow_null
    hint = nearest(value, words) if isinstance(value, str) else ""
    given = "null" if value is None else repr(value)
    raise ConfigError(key, given, " or ".join(["must be a whole number of at least 1", *words]), hint=hint)


def rank_slice(n: int, degree: int, rank: int) -> range:
    """The positions of a window of `n` samples that belong to `rank` of `degree` data-parallel ranks, in arrival order.

    Contiguous; ranks differ by at most one sample, and the earlier ones hold it.
    """
    fewest, extra = divmod(n, degree)
    start = rank * fewest + min(rank, extra)
    return range(start, start + fewest + (rank < extra))


@dataclass(frozen=True)
class BatchPlan:
    """The four numbers of a full window, always with gas = ceil(ceil(global / degree) / micro)."""

    global_batch_size: int
    """Samples in one optimizer update, over all ranks and micro-batches."""
    micro_batch_size: int
    """Samples that one rank puts through one forward and backward, at most."""
    gradient_accumulation_steps: int
    """Micro-batches that a rank runs in one full window."""
    data_parallel_degree: int
    """Ranks that share a window; the stages of a pipeline count as one."""

    @classmethod
    def solve(
        cls,
        global_batch_size: object,
        micro_batch_size: object,
        gradient_accumulation_steps: object,
        data_parallel_degree: object,
    ) -> "BatchPlan":
        """The plan that the values of the configuration stand for, what is `auto` or null worked out.

        Any global batch size is legal on any degree. An automatic micro-batch is the largest that needs one step, at
        most MICRO_BATCH_CAP; where the steps are given, it is the smallest that needs exactly those.

        Raises:
            ConfigError: a value is no count, the three contradict each other, or too little was said.
        """
        total = parse_count(GLOBAL, global_batch_size, allow_null=True)
        micro = parse_count(MICRO, micro_batch_size, allow_auto=True)
        steps = parse_count(GAS, gradient_accumulation_steps, allow_auto=True)
        degree = parse_count("data_parallel_degree", data_parallel_degree)
        if total is None:
            if isinstance(micro, str) or isinstance(steps, str):
                problem = f"follows from the other two and needs both as numbers: {MICRO}={micro}, {GAS}={steps}"
                raise ConfigError(GLOBAL, "null", problem)
            return cls(micro * steps * degree, micro, steps, degree)
        share = _ceil(total, degree)
        if isinstance(micro, int):
            size = micro
        else:
            size = min(share, MICRO_BATCH_CAP) if isinstance(steps, str) else _micro_for(total, degree, steps)
        fitting = _ceil(share, size)
        if isinstance(steps, int) and steps != fitting:
            raise _contradiction(total, size, steps, degree)
        return cls(total, size, fitting, degree)

    @property
    def samples_per_rank(self) -> int:
        """Samples of a full window on the ranks that hold the most."""
        return _ceil(self.global_batch_size, self.data_parallel_degree)

    def num_micro_steps(self, n: int) -> int:
        """Micro-batches that every rank runs for a window of `n` samples: fewer in a short window."""
        return _ceil(_ceil(n, self.data_parallel_degree), self.micro_batch_size)

    def micro_slices(self, n: int, rank: int) -> list[range]:
        """The positions in a window of `n` samples that `rank` takes, one range for each of the num_micro_steps(n).

        Every sample stands in exactly one range of one rank. Only a rank's last ranges may be short or empty.
        """
        mine = rank_slice(n, self.data_parallel_degree, rank)
        size = self.micro_batch_size
        return [mine[step * size : (step + 1) * size] for step in range(self.num_micro_steps(n))]

    def lines(self) -> list[str]:
        """Each line of the arithmetic with its numbers, for people to read."""
        total, micro, steps, degree = (
            self.global_batch_size,
            self.micro_batch_size,
            self.gradient_accumulation_steps,
            self.data_parallel_degree,
        )
        share, places = self.samples_per_rank, micro * steps * degree
        product = f"{_many(micro, 'sample')} x {_many(steps, 'step')} x {_many(degree, 'rank')} = {places}"
        lines = [
            f"samples a rank = ceil({total} / {degree}) = {share}",
            f"gradient_accumulation_steps = ceil({share} / {micro}) = {steps}",
            product if places == total else f"{product}, {places - total} more than the {total} of the window:",
        ]
        fewer, short = -total % degree, -share % micro
        if fewer:
            most = _many(share, "sample")
            lines.append(f"  {_many(degree - fewer, 'rank')} with {most}, {_many(fewer, 'rank')} with one fewer")
        if short:
            also = " (one more on the ranks with one fewer)" if fewer else ""
            lines.append(f"  the last micro-batch is {_many(short, 'row')} short of {micro}{also}")
        return lines

    def advice(self) -> str | None:
        """What a larger micro-batch would do, where the window takes several steps; None where it takes one."""
        if self.gradient_accumulation_steps == 1:
            return None
        return (
            f"accumulation saves memory and not time: {MICRO}={self.samples_per_rank} makes the same update in 1 step "
            f"instead of {self.gradient_accumulation_steps}, where the device has the memory for it"
        )


def _ceil(a: int, b: int) -> int:
    """a / b rounded up, exactly, whatever the size."""
    return -(-a // b)


def _micro_for(total: int, degree: int, steps: int) -> int:
    """The smallest micro-batch that needs exactly `steps` steps; ConfigError where there is none."""
    share = _ceil(total, degree)
    micro = _ceil(share, steps)
    below = _ceil(share, micro)
    if below == steps:
        return micro
    choices = [f"{GAS}={below} with {MICRO}={micro}"]
    if micro > 1:
        choices.append(f"{GAS}={_ceil(share, micro - 1)} with {MICRO}={micro - 1}")
    raise ConfigError(
        GAS,
        steps,
        f"no micro-batch makes {_many(steps, 'step')} of the {_many(share, 'sample')} a rank has "
        f"(ceil({GLOBAL} / data_parallel_degree) = ceil({total} / {degree}) = {share})",
        hint="nearest: " + ", or ".join(choices),
    )


def _contradiction(total: int, micro: int, steps: int, degree: int) -> ConfigError:
    """The message for three given numbers that don't belong together, with what to change of each."""
    share = _ceil(total, degree)
    fitting = _ceil(share, micro)
    choices = [f"{GAS}={fitting}"]
    smallest = _ceil(share, steps)
    if _ceil(share, smallest) == steps:
        choices.append(f"{MICRO}={smallest}")
    full, fewest = micro * steps * degree, micro * (steps - 1) * degree + 1
    choices.append(f"{GLOBAL}={full}" + (f" (any from {fewest})" if fewest < full else ""))
    return ConfigError(
        GAS,
        steps,
        f"contradicts {GLOBAL}={total}, {MICRO}={micro} and data_parallel_degree={degree}: "
        f"ceil(ceil({total} / {degree}) / {micro}) = {fitting}",
        hint="nearest: " + ", or ".join(choices),
    )


def _many(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
