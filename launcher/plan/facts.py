"""What only the model and the data can say, asked of a process of its own: this one never imports torch."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from launcher.config.decays import StepDecay, WsdDecay
from launcher.config.schema import Config
from launcher.errors import ConfigError, LauncherError
from launcher.plan.durations import Duration
from launcher.plan.ramp import ramp_ends
from launcher.plan.windows import RAMP


@dataclass(frozen=True)
class Facts:
    """What the model and the data say; None where they were not asked."""

    samples: int | None = None
    """Samples of the training set."""
    validation_samples: int | None = None
    parameters: int | None = None
    """Elements of all parameters, shared ones once."""
    trainable_parameters: int | None = None
    half_parameters: dict[str, int] = field(default_factory=dict)
    """Elements of trainable parameters that the model itself holds in a half type, by its name in torch."""
    group_parameters: list[int] = field(default_factory=list)
    """Elements of each optimizer group: those of optimizer.groups in order, then the rest."""
    knows_lengths: bool | None = None
    """Whether the task can tell the length of a sample."""
    num_layers: int | None = None
    """Length of the model's `layers`, where it has them."""
    part_costs: list[int] = field(default_factory=list)
    """Multiply-adds a token of the parts that a pipeline cuts between: [embed, each layer, head]; []: no layers."""
    missing_parts: list[str] = field(default_factory=list)
    """What a pipeline needs of the model and it doesn't have: of layers, embed and head."""
    batch_norm_layers: int | None = None
    """Modules of batch norm in the model."""
    cuda_devices: int | None = None
    updates_at_tokens: dict[str, int] = field(default_factory=dict)
    """For each duration in tokens: the windows that reach it. Keys are the tokens as an exact fraction."""


def token_targets(config: Config) -> list[Fraction]:
    """The numbers of tokens that the durations of this configuration name."""
    return sorted({one.value for _, one in _in_tokens(config)})


def needing_tokens(config: Config) -> tuple[str, Duration]:
    """The first key of this configuration that names a number of tokens, and its value."""
    return next(_in_tokens(config))


def _in_tokens(config: Config) -> Iterator[tuple[str, Duration]]:
    return ((key, one) for key, one in _durations(config) if one.unit == "tokens" and one.value > 0)


def _durations(config: Config) -> Iterator[tuple[str, Duration]]:
    named: list[tuple[str, Any]] = [
        ("training.duration", config.training.duration),
        ("training.validate_every", config.training.validate_every),
        ("training.log_every", config.training.log_every),
        ("training.noise_scale", config.training.noise_scale),
        ("schedule.warmup", config.schedule.warmup),
    ]
    decay = config.schedule.decay
    if isinstance(decay, StepDecay):
        named += [(f"schedule.decay.at[{index}]", value) for index, value in enumerate(decay.at)]
    if isinstance(decay, WsdDecay):
        named.append(("schedule.decay.decay", decay.decay))
    for key, value in named:
        if value is not None:
            yield key, Duration.parse(value, key)
    yield from ((f"{RAMP}[{index}].until", end) for index, end in enumerate(ramp_ends(config)))


def torch_is_installed() -> bool:
    """Whether this Python has torch, found without importing it."""
    return importlib.util.find_spec("torch") is not None


def ask(config_yaml: str, pythonpath: Sequence[str], cwd: str | None = None) -> Facts:
    """The facts of the configuration in `config_yaml` (the text of config.yaml), from a process that imports torch.

    Args:
        cwd: the folder in which user code is asked; None: the current one.

    Raises:
        LauncherError: what that process refused, in its own words.
    """
    (said,) = ask_all([config_yaml], pythonpath, cwd)
    if isinstance(said, LauncherError):
        raise said
    return said


def ask_all(
    config_yamls: Sequence[str], pythonpath: Sequence[str], cwd: str | None = None
) -> list[Facts | LauncherError]:
    """The facts of each configuration, or why it was refused, all from one process.

    Raises:
        LauncherError: that process ended without an answer.
    """
    if not torch_is_installed():
        return [Facts() for _ in config_yamls]
    question, asked = json.dumps(list(config_yamls)), "the model and the data"
    text = ask_torch("launcher.train.probe", question, pythonpath, asked, cwd)
    answers = json.loads(text)
    return [LauncherError(one["refused"]) if "refused" in one else Facts(**one["facts"]) for one in answers]


def ask_torch(module: str, question: str, pythonpath: Sequence[str], asked: str, cwd: str | None = None) -> str:
    """What ``python -m module`` answers to `question`, in a process that may import torch. `asked`: whom, in words.

    Raises:
        LauncherError: that process ended without an answer.
    """
    # files without a name: nothing is left of them, however this process ends
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said, tempfile.TemporaryFile() as answer:
        said.write(question)
        said.seek(0)
        done = subprocess.run(
            [sys.executable, "-m", module, str(answer.fileno())],
            env={**rank_environment(pythonpath), "LAUNCHER_PARENT_PID": str(os.getpid())},
            stdin=said,
            cwd=cwd,
            pass_fds=[answer.fileno()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        answer.seek(0)
        text = answer.read().decode()
    if not text:
        code = done.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code} and no answer"
        printed = f":\n{done.stdout[-4000:].rstrip()}" if done.stdout.strip() else ""
        raise LauncherError(f"asking {asked} {how}{printed}")
    return text


def rank_environment(pythonpath: Sequence[str]) -> dict[str, str]:
    """This environment, with the user's folders and this package importable, and logs in UTF-8 whatever the terminal's
    letters are."""
    package = str(Path(__file__).resolve().parents[2])
    rest = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    folders = list(dict.fromkeys([*pythonpath, *rest, package]))
    own = {"PYTHONPATH": os.pathsep.join(folders), "PYTHONIOENCODING": "utf-8:backslashreplace"}
    return {**os.environ, **own}


def check_against(planned: Facts, seen: Facts) -> None:
    """That the data and the model are still what the plan was made for. Unplanned facts (None) are taken as seen.

    Raises:
        ConfigError: one of them differs.
    """
    for name, before, now in changed(planned, seen):
        raise ConfigError(name, now, f"the plan was made for {before}: the data or the model has changed since")


def changed(planned: Facts, seen: Facts) -> list[tuple[str, Any, Any]]:
    """The facts of the model and the data that were planned (not None or empty) and are different: name, both values.

    What a node has is none of them.
    """
    both = [
        (one.name, getattr(planned, one.name), getattr(seen, one.name))
        for one in fields(Facts)
        if one.name != "cuda_devices"
    ]
    return [(name, before, now) for name, before, now in both if before not in (None, [], {}) and before != now]


def to_dict(facts: Facts) -> dict[str, Any]:
    return asdict(facts)
