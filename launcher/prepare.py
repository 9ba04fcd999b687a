"""From a composed configuration to a run that can start: the same for one run and for each run of a sweep."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from launcher.config.choices import Retry, SubmitKind, WandbMode
from launcher.config.compose import task_config
from launcher.config.freeze import freeze, open_keys
from launcher.config.schema import Config
from launcher.config.validate import parse, unread_keys, validate
from launcher.errors import ConfigError
from launcher.plan.facts import Facts, ask
from launcher.plan.plan import Plan, make_plan
from launcher.run_dir import RunDir
from launcher.submit.base import Backend
from launcher.submit.docker import Docker, variables_in
from launcher.submit.local import Local
from launcher.submit.slurm_here import choose_job

BACKENDS: dict[SubmitKind, Callable[[Config], Backend]] = {
    SubmitKind.local: Local,
    SubmitKind.slurm: choose_job,
    SubmitKind.docker: Docker,
}


_RENDERED = {
    "submit.slurm": "a secret: export it where the command is given, sbatch takes it along; else write the value",
    "submit.docker": "a secret: submit.docker.env=[NAME] hands it on; else write the value",
}
"""Sections whose values are rendered, and what to do instead of referring to an environment variable there."""


@dataclass(frozen=True)
class Draft:
    """A configuration that is right in itself; the model and the data were not asked yet."""

    config: Config
    text: str
    """The text of config.yaml."""
    notes: list[str]


@dataclass(frozen=True)
class Prepared:
    """A run that can start."""

    text: str
    """The text of config.yaml."""
    plan: Plan
    backend: Backend

    def plan_in(self, run: RunDir) -> Plan:
        """The plan with the commands that start this run in its folder."""
        launch, digest = asdict(self.backend.render(run, self.plan)), config_digest(self.text)
        return replace(self.plan, launch=launch, config_sha256=digest)


def config_digest(text: str) -> str:
    """The SHA-256 of the text of a config.yaml."""
    return hashlib.sha256(text.encode()).hexdigest()


def folder(composed: DictConfig, *keys: str) -> Path:
    """The folder of a run: the values of `keys`, one below the other, as ``hydra.sweep.dir``, ``hydra.sweep.subdir``.

    Raises:
        ConfigError: one of them is an interpolation that leads nowhere.
    """
    HydraConfig.instance().set_config(composed)  # for ${hydra:…} in it
    path = Path.cwd()
    for key in keys:
        try:
            path /= str(OmegaConf.select(composed, key, throw_on_missing=True))
        except OmegaConfBaseException as error:
            raise ConfigError(key, "?", str(error).splitlines()[0]) from error
    return path


def draft(composed: DictConfig, *keys: str) -> Draft:
    """Checks and freezes what Hydra composed for a run, whose folder is `folder(composed, *keys)`.

    Raises:
        LauncherError: what can't be right in the configuration.
    """
    try:
        where, nowhere = folder(composed, *keys), None
    except ConfigError as error:  # it often comes from a key that validation names
        where, nowhere = Path(), error
    with read_write(composed.hydra.runtime), open_dict(composed.hydra.runtime):
        composed.hydra.runtime.output_dir = str(where)
    HydraConfig.instance().set_config(composed)
    tasks = task_config(composed)
    if nowhere is not None:
        validate(tasks)
        raise nowhere
    drafted = draft_of(tasks)
    notes = [f"{key}: nothing reads this key" for key in unread_keys(tasks)]
    return replace(drafted, notes=[*notes, *drafted.notes])


def draft_of(tasks: DictConfig) -> Draft:
    """Checks and freezes a configuration without Hydra's node. Raises LauncherError."""
    sweep = validate(tasks).sweep
    if sweep.resume is not None:
        hint = "launcher train -m sweep.resume=FOLDER; launcher resume RUN_DIR goes on with one run"
        raise ConfigError("sweep.resume", sweep.resume, "goes on with a sweep, and this is one run", hint=hint)
    if sweep.retry is not Retry.unfinished:
        raise ConfigError("sweep.retry", sweep.retry, "is said of a sweep that goes on", hint="add sweep.resume=FOLDER")
    text = freeze(tasks)
    _check_rendered(text)
    config = parse(text)
    return Draft(config, text, [] if config.logging.wandb.mode is WandbMode.disabled else _tracker_notes(text))


def _check_rendered(text: str) -> None:
    """That no environment variable stands in a key whose value is written into a batch script or a command line.

    Raises:
        ConfigError: one does.
    """
    for key, value in open_keys(text):
        for section, hint in _RENDERED.items():
            if key.startswith(f"{section}."):
                problem = "would be written with its value: this key becomes part of a script or of a command line"
                raise ConfigError(key, value, problem, hint=hint)


def _tracker_notes(text: str) -> list[str]:
    """Words of the tracker that hold an environment variable, whose value isn't sent."""
    frozen: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    words = frozen["logging"]["wandb"]
    return [
        f"logging.wandb.{key}: ${{oc.env:…}} is recorded as this reference and not with its value; {name} is"
        for key, name in (("group", "WANDB_RUN_GROUP"), ("tags", "WANDB_TAGS"))
        if "${" in str(words[key])
    ]


def ask_here(drafted: Draft, pythonpath: Sequence[str], cwd: str | None = None) -> Facts:
    """The facts of a drafted run, where it runs here: see `asks_here`. Raises LauncherError."""
    return ask(drafted.text, pythonpath, cwd) if asks_here(drafted.config) else Facts()


def asks_here(config: Config) -> bool:
    """Whether the model and the data are asked where the command is given. A login node of Slurm is no place to load a
    model, and may not even see the data; those of a container are the image's."""
    return config.submit.kind is SubmitKind.local


def settle(drafted: Draft, facts: Facts, pythonpath: Sequence[str], cwd: str | None = None) -> Prepared:
    """The plan of a drafted run, and where its ranks start.

    Args:
        cwd: the folder that the ranks work in; None: the current one.

    Raises:
        ConfigError: the plan can't work.
    """
    made = make_plan(drafted.config, facts)
    made = replace(made, cwd=cwd or os.getcwd(), pythonpath=list(pythonpath), notes=[*made.notes, *drafted.notes])
    backend = BACKENDS[drafted.config.submit.kind](drafted.config)
    if isinstance(backend, Docker):
        backend = backend.with_variables(variables_in(drafted.text))
    return Prepared(drafted.text, made, backend)


def short(path: Path) -> str:
    """`path` relative to the current folder, where it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
