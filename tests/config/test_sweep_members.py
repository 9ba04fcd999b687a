"""The configurations of a sweep's runs are those that Hydra composes for each by itself."""

from typing import Any

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from launcher.config.compose import Arguments, compose, hydra_session
from launcher.config.compose_members import MemberConfigs
from launcher.errors import LauncherError

pytestmark = pytest.mark.thorough

MEMBERS = [
    ["run.seed=1", "optimizer.lr=0.1"],
    ["run.seed=2", "optimizer.lr=1e-3"],
    ["run.seed=3", "optimizer.lr=${run.seed}"],
    ["run.seed=4", "optimizer.lr=0.1", "run.seed=5"],
    ["optimizer=sgd", "run.seed=1", "+optimizer.extra=true"],
    ["optimizer=sgd", "run.seed=2", "+optimizer.extra=true"],
    ["optimizer=sgd", "run.seed=2", "+optimizer.extra=false"],
    ["optimizer=adamw", "run.seed=2", "schedule.warmup=null"],
    ["optimizer=adamw", "run.seed=3", "schedule.warmup=5"],
    ["optimizer=adamw", "run.seed=3", "schedule.warmup='10%'"],
    ["submit.slurm.env=[one]", "run.seed=1"],
    ["submit.slurm.env=[two,three]", "run.seed=2"],
    ["data.validation={_target_: a.B}"],
    ["data.validation={_target_: a.C}"],
    ["hydra.verbose=true", "run.seed=1"],
    ["hydra.verbose=false", "run.seed=2"],
]


def whole(config: Any) -> Any:
    return OmegaConf.to_container(config, resolve=False, enum_to_str=True)


def test_each_is_as_hydra_composes_it_alone() -> None:
    arguments = Arguments(["hydra.mode=MULTIRUN"])
    with hydra_session(arguments) as hydra:
        sweep = compose(hydra, arguments, run_mode=RunMode.MULTIRUN)
        configs = MemberConfigs(hydra, arguments, sweep)
        for num, overrides in enumerate(MEMBERS):
            found, alone = configs.compose(overrides, num), hydra.config_loader.load_sweep_config(sweep, overrides)
            assert (found.hydra.job.num, found.hydra.job.id) == (num, str(num))
            for one in (found.hydra, alone.hydra):
                OmegaConf.set_struct(one, False)
                one.job.num, one.job.id, one.sweep.dir = 0, "0", "sweep"
            assert whole(found) == whole(alone), overrides
            assert OmegaConf.is_struct(found)
            found.run.seed = 77  # and nothing of it is another's
        assert len(configs._composed) < len(MEMBERS)


@pytest.mark.parametrize("wrong", ["run.seed=many", "run.sed=3", "optimizer.lr=${nowhere}"])
def test_a_mistake_is_said_alike_in_the_first_and_in_a_later_one(wrong: str) -> None:
    arguments = Arguments(["hydra.mode=MULTIRUN"])
    said = []
    for before in ([], [wrong.partition("=")[0] + "=3"]):
        with hydra_session(arguments) as hydra:
            configs = MemberConfigs(hydra, arguments, compose(hydra, arguments, run_mode=RunMode.MULTIRUN))
            try:
                for overrides in ([one] for one in before):
                    configs.compose(overrides, 0)
                configs.compose([wrong], 1)
                said.append("")
            except LauncherError as error:
                said.append(str(error))
    assert said[0] == said[1]
