"""Overrides of a configuration that was frozen: keys are set onto it, and a choice of a group replaces its section."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from launcher.config.compose import Arguments, compose, conf_dir
from launcher.config.messages import OPEN_SECTIONS, RUN_GROUPS, explain
from launcher.config.schema import SECTIONS
from launcher.config.validate import read
from launcher.errors import LauncherError


def override(hydra: Hydra, arguments: Arguments, frozen: str) -> DictConfig:
    """The configuration in `frozen`, the text of a config.yaml, with the overrides of a command set onto it.

    A choice such as ``strategy=fsdp`` is composed as for a new run, from conf/ and --config-dir, and its whole section
    takes the place of the old one before single keys are set.

    Raises:
        LauncherError: an override that can't be, in one message.
    """
    config = read(frozen)
    OmegaConf.set_struct(config, True)
    given = list(arguments.overrides)
    try:
        parsed = OverridesParser.create(config_loader=hydra.config_loader).parse_overrides(given)
        groups = [one for one in parsed if _chooses(hydra, one)]
        keys = [one for one in parsed if one not in groups]
        for one in parsed:
            _check(one, config, is_group=one in groups)
        for group, section in _composed(hydra, arguments, groups):
            OmegaConf.update(config, group.replace("/", "."), section, merge=False)
        ConfigLoaderImpl._apply_overrides_to_config(keys, config)
    except Exception as error:
        folders = [Path(arguments.config_dir)] if arguments.config_dir is not None else []
        raise explain(error, lambda _: config, given, [*folders, conf_dir()]) from error
    return config


def _chooses(hydra: Hydra, one: Override) -> bool:
    """Whether an override chooses a file of a group, as Hydra sees it."""
    loader: Any = hydra.config_loader
    return bool(loader.repository.group_exists(one.key_or_group)) and not isinstance(one.value(), dict)


def _check(one: Override, config: DictConfig, *, is_group: bool) -> None:
    name, said = one.key_or_group, one.input_line
    root = name.replace("/", ".").split(".")[0]
    if one.is_sweep_override():
        raise LauncherError(f"{said}: one run goes on with one value of each key")
    if root == "hydra":
        raise LauncherError(f"{said}: the run's folder and what Hydra did for it are settled; leave it out")
    if is_group and (name not in RUN_GROUPS or one.package is not None or one.is_delete()):
        problem = "can't be chosen anew for a run that is there: set its keys by value"
        raise LauncherError(f"{said}: {problem} (groups that can: {', '.join(RUN_GROUPS)})")
    if root in config and root not in (*SECTIONS, *OPEN_SECTIONS, "model_weights"):
        problem = "a key of your own, whose value was settled where others refer to it: set those"
        raise LauncherError(f"{said}: {problem}")


def _composed(hydra: Hydra, arguments: Arguments, groups: Sequence[Override]) -> list[tuple[str, Any]]:
    """The section of each group that is chosen, as a new run's would be."""
    if not groups:
        return []
    chosen = [one.input_line for one in groups if one.input_line is not None]
    composed = compose(hydra, Arguments(chosen, arguments.config_name, arguments.config_dir))
    HydraConfig.instance().set_config(composed)  # for ${hydra:…} in a section
    names = [one.key_or_group for one in groups]
    return [(name, OmegaConf.select(composed, name.replace("/", "."))) for name in names]
