"""Configurations for tests, composed as a user's command would be."""

from launcher.config.compose import Arguments, compose, hydra_session, task_config
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


def config_text(*overrides: str, config_dir: str | None = None) -> str:
    """The text of the config.yaml that a command with these overrides would write."""
    arguments = Arguments(overrides, config_dir=config_dir)
    with hydra_session(arguments) as hydra:
        composed = task_config(compose(hydra, arguments))
        validate(composed)
        return freeze(composed)


def own(model: str, task: str, data: str, **arguments: object) -> list[str]:
    """Overrides for a model, a task and data by dotted path; `arguments` are those of the data."""
    chosen = [f"{group}=custom" for group in ("model", "task", "data")]
    chosen += [f"model._target_={model}", f"task._target_={task}", f"data.train._target_={data}"]
    return chosen + [f"+data.train.{name}={value}" for name, value in arguments.items()]
