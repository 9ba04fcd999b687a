"""What ranks leave of a run, for tests that start none."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def checkpoint(run: Path, update: int, *, size: int = 3) -> None:
    """A complete checkpoint, as far as files go. `size`: what its manifest says of a file of three bytes."""
    folder = run / "checkpoints" / f"update_{update:010d}"
    folder.mkdir(parents=True)
    (folder / "state").write_text("abc")
    files = {"state": {"size": size, "sha256": hashlib.sha256(b"abc").hexdigest()}}
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "update": update, "files": files}))


def run(
    folder: Path,
    *,
    batch: int,
    seed: int = 0,
    losses: Sequence[float | None] = (),
    training: Sequence[float | None] | None = None,
    lr: float = 0.1,
    rule: str = "none",
    base: int | None = None,
    updates: int = 4,
    state: str = "finished",
    exit_code: int | None = 0,
    reason: str | None = None,
    seconds: float = 0.5,
) -> Path:
    """The files of a run whose validations, as far as it came, found `losses`, one after each of the first updates.

    `training`: the losses of its updates, where they aren't those. Without `losses` it is one without validation.
    """
    (folder / "logs").mkdir(parents=True)
    trained = list(losses if training is None else training)
    plan = {"global_batch_size": batch, "seed": seed, "lr": lr, "warmup_updates": 1, "num_updates": updates}
    plan |= {"scaling_rule": rule, "facts": {"validation_samples": 8 if losses else None}}
    (folder / "plan.json").write_text(json.dumps(plan))
    scaling = {"rule": rule, "base_batch_size": base}
    (folder / "config.yaml").write_text(json.dumps({"schedule": {"decay": {"name": "constant"}}, "scaling": scaling}))
    error = None if reason is None else {"rank": 1, "reason": reason, "log": None}
    status = {"state": state, "exit_code": exit_code, "update": len(trained), "error": error}
    (folder / "status.json").write_text(json.dumps(status))
    lines = []
    for index, loss in enumerate(trained):
        what = {"samples": batch, "seconds": seconds, "loss": loss}
        lines.append({"kind": "train", "attempt": 0, "update": index + 1} | what)
        if index < len(losses):
            lines.append({"kind": "validation", "attempt": 0, "update": index + 1, "loss": losses[index]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if state == "finished":
        result = {"train_loss": trained[-1], "validation_loss": losses[-1] if losses else None}
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def sweep(folder: Path, members: Sequence[tuple[str, dict[str, Any] | None]]) -> Path:
    """A sweep: of each member its overrides and what `run` makes of it; None: it hasn't started."""
    listed = []
    for num, (overrides, how) in enumerate(members):
        folder.mkdir(parents=True, exist_ok=True)
        if how is not None:
            run(folder / str(num), **how)
        state = "planned" if how is None else how.get("state", "finished")
        record = {"num": num, "overrides": overrides.split(), "dir": str(folder / str(num)), "state": state}
        listed.append(record | {"exit_code": None, "error": None, "metric": None})
    (folder / "sweep.json").write_text(json.dumps({"members": listed}))
    return folder
