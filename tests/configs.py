"""Configurations for tests, composed as a user's command would be."""

import functools
import re

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from launcher.config.compose import Arguments, compose, conf_dir, hydra_session, task_config
from launcher.config.freeze import freeze
from launcher.config.validate import validate

PLAIN = (
    "data.shuffle=false",
    "schedule/decay=constant",
    "schedule.warmup=0",
    "training.max_grad_norm=null",
    "optimizer=sgd",
)
"""The settings under which an update is what a few lines of arithmetic say."""


def composed_text(*overrides: str) -> str:
    """The text of the config.yaml that a command with these overrides would write."""
    arguments = Arguments(overrides)
    with hydra_session(arguments) as hydra:
        composed = task_config(compose(hydra, arguments))
        validate(composed)
        return freeze(composed)


def config_text(*overrides: str) -> str:
    """The same, quicker: files are composed once for each choice of groups, and values of keys are set on a copy, by
    the function with which Hydra sets them."""
    choices = tuple(one for one in overrides if _is_choice(one))
    config = _of_choices(choices).copy()
    values = OverridesParser.create().parse_overrides([one for one in overrides if one not in choices])
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    validate(config)
    return freeze(config)


@functools.cache
def _of_choices(choices: tuple[str, ...]) -> DictConfig:
    arguments = Arguments(choices)
    with hydra_session(arguments) as hydra:
        return task_config(compose(hydra, arguments))


def _is_choice(override: str) -> bool:
    """Whether an override selects a file of a group, or is one of Hydra's own."""
    key = re.split(r"[=@]", override.lstrip("+~"))[0]
    return key.startswith("hydra") or (conf_dir() / key).is_dir()


def own(model: str, task: str, data: str, **arguments: object) -> list[str]:
    """Overrides for a model, a task and data by dotted path; `arguments` are those of the data."""
    chosen = [f"{group}=custom" for group in ("model", "task", "data")]
    chosen += [f"model._target_={model}", f"task._target_={task}", f"data.train._target_={data}"]
    return chosen + [f"+data.train.{name}={value}" for name, value in arguments.items()]
