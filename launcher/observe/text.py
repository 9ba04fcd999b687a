"""Numbers as people read them; a dash where there is none."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any


def duration_text(seconds: float | None) -> str:
    """``2:10``, ``1:02:03``, ``3 days 1:02:03``."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{rest:02}" if days or hours else f"{minutes}:{rest:02}"
    return f"{days} {'day' if days == 1 else 'days'} {clock}" if days else clock


def loss_text(loss: float | None) -> str:
    """Four digits; metrics.jsonl has null where a loss wasn't finite."""
    return "not finite" if loss is None else f"{loss:.4g}"


def lr_text(lr: float | None) -> str:
    """``1.0e-3``."""
    if lr is None:
        return "-"
    digits, _, exponent = f"{lr:.1e}".partition("e")
    return f"{digits}e{int(exponent)}" if lr else "0"


def rate_text(samples_per_s: float | None) -> str:
    """``61 samples/s``."""
    if samples_per_s is None:
        return "-"
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 10 else f"{samples_per_s:.2g} samples/s"


def critical_batch_text(batch: float | None, error: float | None) -> str:
    """``critical batch 51,200 ± 1,200``, in samples; empty where it isn't known."""
    return "" if batch is None or error is None else f"critical batch {value_text(batch, error)}"


def value_text(value: float, error: float) -> str:
    """A number with its standard error, to two digits of that.

    >>> value_text(51234.5, 1234.5), value_text(3.14159, 0.0321)
    ('51,200 ± 1,200', '3.142 ± 0.032')
    """
    digits = min(8, 1 - math.floor(math.log10(error))) if error > 0 else 1
    return " ± ".join(f"{round(one, digits):,.{max(0, digits)}f}" for one in (value, error))


def reached_text(reached: Mapping[str, Any]) -> str:
    """``reached its target at update 300: validation loss 2.4 (target: …)``, as status.json has it."""
    return f"reached its target at update {reached['update']}: {reached['what']}"


def some(numbers: Sequence[Any], most: int = 10) -> str:
    """The first of many numbers, and how many there are.

    >>> some([4, 2]), some(range(64), most=3)
    ('[4, 2]', '[0, 1, 2, …] (64 in all)')
    """
    first = ", ".join(str(one) for one in numbers[:most])
    return f"[{first}]" if len(numbers) <= most else f"[{first}, …] ({len(numbers)} in all)"


def short_numbers(text: str) -> str:
    """`text` with each long fraction in it at five digits.

    >>> short_numbers('optimizer.lr=0.00031622776601683794 run.seed=1234567')
    'optimizer.lr=0.00031623 run.seed=1234567'
    """
    return re.sub(r"\d+\.\d{6,}(e[+-]?\d+)?", lambda found: f"{float(found[0]):.5g}", text)
