"""A process of its own that asks the model and the data what a plan needs: ``python -m launcher.train.probe ANSWER``
reads a JSON list of configurations from standard input, and writes one of answers to the open file that ANSWER numbers.
The model is made on the meta device where it can be, so its size doesn't matter."""

import inspect
import json
import os
import signal
import sys
from dataclasses import asdict
from typing import Any

from launcher.config.schema import Config
from launcher.config.validate import parse
from launcher.errors import LauncherError
from launcher.plan.mesh import solve_mesh, solve_world
from launcher.process import end_with_parent
from launcher.train.build import raised, raised_at
from launcher.train.optim import build_optimizer
from launcher.train.parts import Parts, build_data, build_task, gather_facts, sketch_model
from launcher.train.sharding.zero_check import check_zero_parts, check_zero_values

KEPT = 4
"""Data sets that are kept for the next configuration: those of a sweep often have the same."""


class DataSets:
    """The data of configurations, each made once."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Any, Any | None]] = {}

    def of(self, config: Config) -> tuple[Any, Any | None]:
        """The training set and the validation set. Raises LauncherError as `build_data` does."""
        key = repr((config.data.train, config.data.validation))
        if key not in self._made:
            while len(self._made) >= KEPT:
                self._made.pop(next(iter(self._made)))
            self._made[key] = build_data(config)
        return self._made[key]


def answer(config_yaml: str, data: DataSets) -> dict[str, object]:
    """``{"facts": …}``, or ``{"refused": message}`` where something of the user's can't be made."""
    import torch

    from launcher.plan.plan import param_groups
    from launcher.plan.scaling import Scaled

    try:
        config = parse(config_yaml)
        train, validation = data.of(config)
        parts = Parts(sketch_model(config), build_task(config), train, validation)
        cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
        world = solve_world(config.cluster, config.strategy.name, cuda, config.submit)
        degree = solve_mesh(config.mesh, world.size, config.strategy.name).data_parallel_degree
        facts = gather_facts(config, parts, degree)
        unscaled = Scaled(float(config.optimizer["lr"]), config.optimizer.get("weight_decay"), 1.0)
        groups = param_groups(config.optimizer, unscaled, [])
        optimizer = build_optimizer(parts.model, config.optimizer, groups)
        if config.strategy.name.zero_stage and config.mesh.pp == 1:  # a pipeline does without DeepSpeed
            check_zero_parts(parts.model, optimizer, config.strategy.name.value)
            check_zero_values(config.strategy)
    except LauncherError as error:
        return {"refused": str(error)}
    except (Exception, SystemExit) as error:
        return {"refused": f"the model, the task or the data {raised(error)}\n  {raised_at(error)}"}
    return {"facts": asdict(facts)}


def without_the_compiler() -> None:
    """Lets optimizers be made in this process without torch's compiler, whose import takes as long as half of torch's.

    torch imports it where a parameter group is added, to keep that out of compiled code; nothing is compiled here.
    """
    import torch

    torch.optim.Optimizer.add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)  # type: ignore[method-assign]


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL)
    without_the_compiler()
    sets = DataSets()
    said = [answer(config, sets) for config in json.load(sys.stdin)]
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as file:
        json.dump(said, file)
