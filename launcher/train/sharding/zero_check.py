"""What of a model, an optimizer and the expert's values DeepSpeed can't take, asked before a run starts."""

import torch
from torch import nn

from launcher.config.parallel import StrategyConfig
from launcher.errors import ConfigError


def check_zero_parts(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Raises ConfigError for a parameter or an optimizer that DeepSpeed can't take."""
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            problem = f"DeepSpeed trains in fp32 here, and the model's '{name}' is {kind}"
            raise ConfigError("strategy", strategy, problem, hint="strategy=fsdp or strategy=ddp")
    if isinstance(optimizer, torch.optim.Adagrad):
        problem = "DeepSpeed makes torch's Adagrad anew, without its parameter groups"
        raise ConfigError("strategy", strategy, problem, hint="strategy=fsdp")


def check_zero_values(strategy: StrategyConfig) -> None:
    """Raises ConfigError where DeepSpeed refuses a value of strategy.deepspeed. It is imported where there are any; a
    process that trains must have made its choice of a device before."""
    keys = strategy.deepspeed.get("zero_optimization")
    if not keys:
        return
    from pydantic import ValidationError

    from launcher.train.sharding.zero_engine import load_deepspeed

    load_deepspeed("cpu")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**keys)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        key, problem = f"strategy.deepspeed.zero_optimization.{where}", f"DeepSpeed: {first['msg']}"
        raise ConfigError(key, first["input"], problem) from error
