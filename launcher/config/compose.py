"""Hydra's composition, once, into a validated configuration; and one clear message for a user's mistake."""

import os
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from launcher import slurm_job
from launcher.config.decays import DECAYS
from launcher.config.messages import explain
from launcher.config.schema import SECTIONS
from launcher.errors import LauncherError, WrongValueError

JOB_NAME = "launcher"


@dataclass(frozen=True)
class Arguments:
    """What Hydra's own parser found on the command line."""

    overrides: Sequence[str]
    config_name: str = "config"
    config_dir: str | None = None


def conf_dir() -> Path:
    """The folder of configuration groups."""
    return shipped("conf")


def shipped(name: str) -> Path:
    """A folder that comes with the package: inside it where it is installed, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def register() -> None:
    """Makes the schema and the resolvers known to Hydra and OmegaConf. May be called again."""
    store = ConfigStore.instance()
    if "config_schema.yaml" not in store.repo:  # a session that ends leaves the store as it was before
        store.store(name="config_schema", node={**SECTIONS, "model_weights": None})
        for decay in DECAYS:
            store.store(group="schedule/decay", name=f"{decay().name}_schema", node=decay)
    resolver = OmegaConf.register_new_resolver
    resolver("launcher.path_name", path_name, replace=True)
    resolver("launcher.stamp", _stamp, use_cache=True, replace=True)
    resolver("launcher.accumulate", accumulate, replace=True)
    resolver("launcher.accumulated", lambda nominal, size: accumulate(nominal, size) * size, replace=True)


def path_name(name: object) -> str:
    """`name` made safe as one component of a path: no separators, no leading dot, at most 100 bytes.

    >>> path_name("big run #1; $(id)/..")
    'big_run_1_id'
    """
    safe = re.sub(r"[^\w.+=-]+", "_", str(name)).strip("._")
    safe = safe.encode()[:100].decode(errors="ignore")
    return safe or "run"


def accumulate(nominal: int, size: int) -> int:
    """How many batches of `size` samples come nearest to a nominal batch, at least one.

    Raises:
        WrongValueError: one of them is no whole number of at least 1.
    """
    for value in (nominal, size):  # as they were typed
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise WrongValueError(value, "must be a whole number of at least 1")
    return max(round(nominal / size), 1)


def _stamp() -> str:
    job = slurm_job.around()
    if job is not None:  # which finds its folder again when it is queued again
        return f"job_{job}"
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S") + "-" + secrets.token_hex(3)


@contextmanager
def hydra_session(arguments: Arguments) -> Iterator[Hydra]:
    """A Hydra instance whose search path is conf/, then --config-dir before it, as `hydra.main` would make it.

    Hydra's and OmegaConf's mistakes of the user leave as LauncherError with one message.
    """
    version.setbase("1.3")
    register()
    search_path = create_config_search_path(str(conf_dir()))
    if arguments.config_dir is not None:
        folder = Path(arguments.config_dir).resolve()
        if not folder.is_dir():
            raise LauncherError(f"--config-dir {arguments.config_dir}: no such folder")
        search_path.prepend(provider="command-line", path=f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
    state = Singleton.get_state()
    GlobalHydra.instance().clear()
    try:
        hydra = Hydra.create_main_hydra2(JOB_NAME, search_path)
        _hide_schemas(hydra)
        yield hydra
    finally:
        Singleton.set_state(state)


def _hide_schemas(hydra: Hydra) -> None:
    """Leaves schemas out of the choices of a group, as help, completion and glob() see them: they are no choices."""
    loader: Any = hydra.config_loader
    all_options = loader.get_group_options

    def options(*which: Any, **more: Any) -> list[str]:
        return [one for one in all_options(*which, **more) if not one.endswith("_schema")]

    loader.get_group_options = options


def compose(hydra: Hydra, arguments: Arguments, *, run_mode: RunMode = RunMode.RUN) -> DictConfig:
    """The composed configuration with its `hydra` node. Raises LauncherError for a user's mistake.

    `run_mode`: that of a sweep composes what its runs have in common, without the keys that are swept.
    """
    with mistakes_explained(hydra, arguments, arguments.overrides):
        config = hydra.compose_config(
            config_name=arguments.config_name,
            overrides=list(arguments.overrides),
            run_mode=run_mode,
            with_log_configuration=True,
        )
    if config.hydra.job.chdir:
        raise LauncherError("hydra.job.chdir=true: ranks share one folder, where the command was given; leave it out")
    return config


def is_sweep(hydra: Hydra, arguments: Arguments) -> bool:
    """Whether the configuration itself asks for a sweep (``hydra.mode=MULTIRUN``)."""
    return bool(hydra.get_mode(arguments.config_name, list(arguments.overrides)) is RunMode.MULTIRUN)


@contextmanager
def mistakes_explained(hydra: Hydra, arguments: Arguments, overrides: Sequence[str]) -> Iterator[None]:
    """While inside, what Hydra and OmegaConf say of a user's mistake leaves as LauncherError with one message."""

    def known_keys(kept: Sequence[str]) -> DictConfig:
        return hydra.config_loader.load_configuration(
            config_name=arguments.config_name, overrides=list(kept), run_mode=RunMode.MULTIRUN
        )

    try:
        yield
    except Exception as error:
        folders = [Path(arguments.config_dir)] if arguments.config_dir is not None else []
        raise explain(error, known_keys, overrides, [*folders, conf_dir()]) from error


def make_importable(arguments: Arguments) -> list[str]:
    """Puts the current folder and --config-dir first on sys.path; returns the folders for the ranks' PYTHONPATH."""
    folders = [os.getcwd()]
    if arguments.config_dir is not None:
        folders.append(str(Path(arguments.config_dir).resolve()))
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return folders


def task_config(config: DictConfig) -> DictConfig:
    """`config` without Hydra's own node."""
    copy: Any = config.copy()
    with read_write(copy), open_dict(copy):
        copy.pop("hydra", None)
    return copy  # type: ignore[no-any-return]
