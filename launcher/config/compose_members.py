"""The configurations of a sweep's runs. Runs that differ in values of keys alone share what Hydra composed for the
first of them, since composing takes by far the longest."""

import copy
from collections.abc import Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, open_dict

from launcher.config.compose import Arguments, mistakes_explained

Kind = tuple[str | None, ...]
"""What members have in common that share a composition: their overrides, of those that only set a value the key."""


class MemberConfigs:
    """The members of the composed `sweep`."""

    def __init__(self, hydra: Hydra, arguments: Arguments, sweep: DictConfig) -> None:
        self._hydra, self._arguments, self._sweep = hydra, arguments, sweep
        self._parser = OverridesParser.create(config_loader=hydra.config_loader)
        self._composed: dict[Kind, DictConfig] = {}

    def compose(self, overrides: Sequence[str], num: int) -> DictConfig:
        """The configuration of run `num`, as Hydra composes it. Raises LauncherError for a user's mistake.

        Its folder lies in the sweep's, also where a key that the sweep's folder is named after is swept.
        """
        with mistakes_explained(self._hydra, self._arguments, overrides):
            config = self._compose(list(overrides))
        with open_dict(config.hydra):
            config.hydra.job.num = num
            config.hydra.job.id = str(num)
            config.hydra.sweep.dir = self._sweep.hydra.sweep.dir
        return config

    def _compose(self, overrides: list[str]) -> DictConfig:
        parsed = self._parser.parse_overrides(overrides)
        values = [one for one in parsed if self._sets_a_value(one)]
        kind = tuple(one.key_or_group if one in values else one.input_line for one in parsed)
        known = self._composed.get(kind)
        if known is None:
            config = self._hydra.config_loader.load_sweep_config(self._sweep, overrides)
            self._composed[kind] = copy.deepcopy(config)
            return config
        config = copy.deepcopy(known)
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        tasks = [one for one in parsed if not one.is_hydra_override()]
        config.hydra.overrides.task = [one.input_line for one in tasks]
        how = config.hydra.job.config.override_dirname
        config.hydra.job.override_dirname = get_overrides_dirname(
            overrides=tasks, kv_sep=how.kv_sep, item_sep=how.item_sep, exclude_keys=how.exclude_keys
        )
        return config

    def _sets_a_value(self, one: Override) -> bool:
        """Whether an override sets a key to something that replaces what was there, and does nothing else."""
        loader: Any = self._hydra.config_loader
        plain = not (one.is_add() or one.is_force_add() or one.is_delete() or one.is_hydra_override())
        is_value = plain and one.package is None and not isinstance(one.value(), dict | list)
        return is_value and not loader.repository.group_exists(one.key_or_group)
