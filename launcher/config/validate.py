"""From what Hydra composed to what the launcher works with: strict, resolved, frozen."""

import copy
import functools
import math
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

from omegaconf import MISSING, DictConfig, Node, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationToMissingValueError, OmegaConfBaseException
from yaml import YAMLError

from launcher.config.check_slurm import check_submit
from launcher.config.choices import BatchNormPatch, LossSpike
from launcher.config.compose import register
from launcher.config.decays import DECAYS, DecayConfig
from launcher.config.docker import check_docker
from launcher.config.messages import GROUPS, OPEN_SECTIONS, schema_keys
from launcher.config.places import ClusterConfig
from launcher.config.schema import SECTIONS, Config, GroupConfig, ModelPatchesConfig, RampConfig, TrainingConfig
from launcher.config.targets import check_targets
from launcher.config.times import is_time, seconds
from launcher.errors import ConfigError, LauncherError, WrongValueError, nearest

LARGEST = 3.4028234663852886e38
"""The largest number in single precision, in which parameters are held."""

_ROOT_KEYS = {*SECTIONS, *OPEN_SECTIONS, "model_weights"}


def validate(composed: DictConfig) -> Config:
    """The typed configuration. Raises LauncherError naming the key for what can't be right."""
    _check_root(composed)
    values: dict[str, Any] = {}
    for section, schema in SECTIONS.items():
        values[section] = _section(composed, section, schema)
    for section in OPEN_SECTIONS:
        values[section] = _open_section(composed, section)
    weights = _resolved(composed, "model_weights")
    config = Config(**values, model_weights=None if weights is None else str(weights))
    _check_targets(config)
    _check_optimizer(config.optimizer)
    _check_decay(config.schedule.decay)
    ramp = enumerate(config.batch.ramp)
    config.batch.ramp = [_item(value, f"batch.ramp[{index}]", RampConfig) for index, value in ramp]
    _check_numbers(config)
    return config


def _check_root(composed: DictConfig) -> None:
    for key in composed:
        name = str(key)
        if name in _ROOT_KEYS:
            continue
        close = nearest(name, _ROOT_KEYS)
        if close:
            raise ConfigError(name, OmegaConf.select(composed, name), "unknown key", hint=close)


def unread_keys(composed: DictConfig) -> list[str]:
    """Top-level keys of the user's own (``+name=…``) that no interpolation refers to: nothing reads them."""
    own = [str(key) for key in composed if str(key) not in _ROOT_KEYS]
    text = OmegaConf.to_yaml(composed, resolve=False) if own else ""
    return [key for key in own if not re.search(r"\$\{" + re.escape(key) + r"[.}\[]", text)]


def _section(composed: DictConfig, section: str, schema: type) -> Any:
    node = composed._get_node(section) if section in composed else None
    if not isinstance(node, DictConfig) or OmegaConf.get_type(node) is not schema:
        given = None if node is None or node._is_none() else node
        raise ConfigError(section, given, "must stay a section", hint=f"its keys: {', '.join(_names(schema))}")
    for name in node:
        if name not in _names(schema):
            key = f"{section}.{name!s}"
            raise ConfigError(key, node._get_node(name), "unknown key", hint=nearest(key, schema_keys()))
    try:
        return OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise _explain_value(error, section) from error


def _names(schema: type) -> list[str]:
    return [field.name for field in fields(schema)]


def _explain_value(error: OmegaConfBaseException, section: str) -> LauncherError:
    key = error.full_key or section
    if not key.startswith(section):
        key = f"{section}.{key}"
    text = str(error).splitlines()[0]
    if isinstance(error, InterpolationToMissingValueError):
        key = text.rpartition(": ")[2]  # the key that this one follows
    if isinstance(error, InterpolationKeyError):
        text += " (an interpolation that leads nowhere): give this key a value, or choose a group that has that one"
    elif "missing" in text.lower():
        name = key.replace(".", "/") if key.replace(".", "/") in GROUPS else key
        return ConfigError(key, "???", "must be given", hint=f"add {name}=… to the command")
    given = error.child_node._value() if isinstance(error.child_node, Node) else "?"
    if isinstance(wrong := _first(error), WrongValueError):
        for source in re.findall(r"\$\{([\w.]+)\}", str(given)):  # the user's own key
            if repr(OmegaConf.select(cast(Node, error.child_node)._get_root(), source)) == repr(wrong.value):
                return ConfigError(source, wrong.value, wrong.problem)
    return ConfigError(key, given, re.sub(r"^\w+ raised while resolving interpolation: ", "", text))


def _first(error: BaseException) -> BaseException:
    """What was raised at first."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def _open_section(composed: DictConfig, section: str) -> dict[str, Any]:
    node = composed._get_node(section) if section in composed else None
    if not isinstance(node, DictConfig):
        raise ConfigError(section, node, f"must be given: a choice of the group, as in {section}=custom")
    try:
        return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise _explain_value(error, section) from error


def _resolved(composed: DictConfig, key: str) -> Any:
    try:
        return composed.get(key)
    except OmegaConfBaseException as error:
        raise _explain_value(error, key) from error


def _check_targets(config: Config) -> None:
    named: list[tuple[str, Any]] = [(name, getattr(config, name)) for name in OPEN_SECTIONS]
    named += [("data.train", config.data.train)]
    named += [("data.validation", config.data.validation)] if config.data.validation is not None else []
    for key, value in named:
        target = value.get("_target_") if isinstance(value, dict) else None
        if not isinstance(target, str) or "." not in target:
            given = target if isinstance(value, dict) else value
            raise ConfigError(f"{key}._target_", given, "must be the dotted path of a class, as in mymodule.MyClass")


def _check_optimizer(optimizer: dict[str, Any]) -> None:
    numbers = {name: optimizer[name] for name in ("lr", "weight_decay") if name in optimizer}
    for name, value in ({"lr": None} | numbers).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
            problem = "must be a finite number of at least 0"
            if isinstance(value, int | float) and value > LARGEST:
                problem += f"; in single precision the largest is {LARGEST:.6g}"
            hint = f"~optimizer.{name} leaves it to the optimizer" if name in optimizer and name != "lr" else ""
            raise ConfigError(f"optimizer.{name}", value, problem, hint=hint)
    for name, value in optimizer.items():
        if any(isinstance(one, float) and math.isnan(one) for one in (value if isinstance(value, list) else [value])):
            raise ConfigError(f"optimizer.{name}", value, "must be a number, and nan is none")
    groups = optimizer.get("groups") or []
    if not isinstance(groups, list):
        raise ConfigError("optimizer.groups", groups, "must be a list of {match, lr_scale, weight_decay, warmup_from}")
    optimizer["groups"] = [_group(value, index) for index, value in enumerate(groups)]


def _check_decay(decay: DecayConfig) -> None:
    """That the keys of a decay are those of its name: the choice brings both. Raises ConfigError."""
    names = [one().name for one in DECAYS]
    if decay.name != type(decay)().name:
        hint = f"schedule/decay=…, one of {', '.join(names)}"
        raise ConfigError("schedule.decay.name", decay.name, "is said by choosing from the group", hint=hint)


def _check_numbers(config: Config) -> None:
    norm, most = config.training.max_grad_norm, config.training.max_skipped_in_a_row
    if norm is not None and not 0 < norm < float("inf"):
        raise ConfigError("training.max_grad_norm", norm, "must be above 0; null: not clipped")
    if most < 1:
        raise ConfigError("training.max_skipped_in_a_row", most, "must be at least 1")
    _check_times(config)
    check_targets(config.targets, is_validated=config.data.validation is not None)
    _check_patches(config.model_patches)
    check_submit(config)
    check_docker(config.submit.docker, config.checkpoint.stop_within)
    restarts = config.training.max_restarts
    if restarts != "auto" and (isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0):
        raise ConfigError("training.max_restarts", restarts, "must be a whole number of at least 0, or auto")
    _check_watches(config.training)
    if config.checkpoint.keep_last < 1:
        raise ConfigError("checkpoint.keep_last", config.checkpoint.keep_last, "must be at least 1")
    if config.data.workers < 0:
        raise ConfigError("data.workers", config.data.workers, "must be at least 0")
    if not 0 <= config.run.seed < 2**63:
        raise ConfigError("run.seed", config.run.seed, "must be a whole number from 0 to 2^63 - 1")


def _check_watches(training: TrainingConfig) -> None:
    """What is watched of losses and gradients, and how."""
    if not 0 < training.loss_spike_deviations < float("inf"):
        raise ConfigError("training.loss_spike_deviations", training.loss_spike_deviations, "must be a number above 0")
    if training.loss_spike_window < 10:
        raise ConfigError("training.loss_spike_window", training.loss_spike_window, "must be at least 10")
    memory, plain = training.noise_scale_memory, TrainingConfig()
    if not 1 < memory < float("inf"):
        problem = "must be a number above 1: a single measurement doesn't say how they scatter"
        raise ConfigError("training.noise_scale_memory", memory, problem)
    if training.noise_scale is None and memory != plain.noise_scale_memory:
        problem = "has no effect: training.noise_scale is null"
        raise ConfigError("training.noise_scale_memory", memory, problem, hint="training.noise_scale='10 updates'")
    for name in ("loss_spike_deviations", "loss_spike_window"):
        value = getattr(training, name)
        if training.loss_spike is LossSpike.none and value != getattr(plain, name):
            problem = "has no effect: training.loss_spike is none"
            raise ConfigError(f"training.{name}", value, problem, hint="training.loss_spike=skip or rollback")


def _check_times(config: Config) -> None:
    training = config.training
    for key, value in (("training.time_limit", training.time_limit), ("training.hang_after", training.hang_after)):
        if value is not None:
            seconds(value, key)
    if is_time(config.checkpoint.every):  # a duration else, which the plan counts
        seconds(config.checkpoint.every, "checkpoint.every")
    seconds(config.checkpoint.stop_within, "checkpoint.stop_within")
    wait = config.cluster.wait_for_nodes
    seconds(wait, "cluster.wait_for_nodes")
    if config.cluster.min_nodes is None and wait != ClusterConfig().wait_for_nodes:
        hint = "cluster.min_nodes=N, or leave it out"
        raise ConfigError("cluster.wait_for_nodes", wait, "has no effect: cluster.min_nodes is null", hint=hint)


def _check_patches(patches: ModelPatchesConfig) -> None:
    is_ghost, size, key = patches.batch_norm is BatchNormPatch.ghost, patches.ghost_size, "model_patches.ghost_size"
    if is_ghost and (size is None or size < 2):
        raise ConfigError(key, size, "model_patches.batch_norm=ghost needs a whole number of at least 2")
    if patches.precise_batch_norm is not None and patches.precise_batch_norm < 2:
        problem = "must be a whole number of at least 2, or null"
        raise ConfigError("model_patches.precise_batch_norm", patches.precise_batch_norm, problem)
    if not is_ghost and size is not None:
        problem = f"has no effect: model_patches.batch_norm is {patches.batch_norm.value}"
        raise ConfigError(key, size, problem, hint="model_patches.batch_norm=ghost")


def _item(value: Any, key: str, schema: type) -> Any:
    """An entry of a list, as an object of its schema. Raises ConfigError."""
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), value))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        problem, close = str(error).splitlines()[0], ""
        if isinstance(value, dict):
            unknown = [str(name) for name in value if str(name) not in _names(schema)]
            missing = [one.name for one in fields(schema) if one.default == MISSING and value.get(one.name) is None]
            problem = f"has no key '{unknown[0]}'" if unknown else problem
            problem = f"lacks {' and '.join(missing)}" if missing and not unknown else problem
            close = nearest(unknown[0], _names(schema)) if unknown else ""
        hint = f"{close} {key.partition('[')[0]} is a list of {{{', '.join(_names(schema))}}}".strip()
        raise ConfigError(key, value, problem, hint=hint) from error


def _group(value: Any, index: int) -> dict[str, Any]:
    key = f"optimizer.groups[{index}]"
    container = asdict(_item(value, key, GroupConfig))
    decay = container["weight_decay"]
    if not 0 <= container["lr_scale"] < float("inf"):
        raise ConfigError(f"{key}.lr_scale", container["lr_scale"], "must be a finite number of at least 0")
    start = container["warmup_from"]
    if start is not None and not 0 <= start <= LARGEST:
        raise ConfigError(f"{key}.warmup_from", start, "must be a finite number of at least 0, or null")
    if decay is not None and not 0 <= decay < float("inf"):
        raise ConfigError(f"{key}.weight_decay", decay, "must be a finite number of at least 0, or null")
    if container["match"] != "norms_and_biases":
        try:
            re.compile(container["match"])
        except re.error as error:
            raise ConfigError(f"{key}.match", container["match"], f"not a regular expression: {error}") from error
    return container


def parse(text: str) -> Config:
    """The configuration from the text of a config.yaml; ``${oc.env:…}`` is resolved here."""
    return validate(read(text))


def read(text: str) -> DictConfig:
    """The text of a config.yaml with the types and defaults of the schema; its interpolations stay open.

    Raises:
        LauncherError: a key that this version doesn't have, or a value of another type.
    """
    register()
    schema = copy.deepcopy(_schema())
    try:
        raw = OmegaConf.create(text)
        decays = {decay().name: decay for decay in DECAYS}
        schema.schedule.decay = decays[raw.schedule.decay.name]
        return cast(DictConfig, OmegaConf.merge(schema, raw))
    except (OmegaConfBaseException, YAMLError, KeyError, AttributeError) as error:
        raise LauncherError(f"config.yaml can't be read: {str(error).splitlines()[0]}") from error


@functools.cache
def _schema() -> DictConfig:
    return OmegaConf.create({**SECTIONS, "model_weights": None})


def load(path: Path) -> Config:
    """The configuration of a run from its config.yaml, as every rank reads it."""
    return parse(path.read_text(encoding="utf-8"))
