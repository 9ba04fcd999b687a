"""Hydra's door to the launcher: what starts the runs of a sweep, as ``hydra/launcher: launcher_submit``.

Hydra accepts a launcher from this namespace alone. The work is done in launcher/sweep, imported when it is called.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class SubmitLauncher(Launcher):
    """Hands each batch of a sweeper to the command that started the sweep."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._sweep: Any = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from launcher.sweep.run import Sweep

        if not isinstance(self._sweep, Sweep):
            raise RuntimeError("hydra/launcher=launcher_submit starts the runs of `launcher train -m` and no others")
        return self._sweep.launch(job_overrides, initial_job_idx)


@dataclass
class SubmitLauncherConfig:
    _target_: str = "hydra_plugins.launcher_submit.SubmitLauncher"


ConfigStore.instance().store(
    group="hydra/launcher", name="launcher_submit", node=SubmitLauncherConfig, provider="launcher"
)
