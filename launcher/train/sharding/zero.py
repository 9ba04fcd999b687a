"""DeepSpeed's ZeRO: optimizer states, gradients too (stage 2), parameters too (stage 3) lie spread over all ranks."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from launcher.config.choices import StrategyName
from launcher.train.optim import set_rates
from launcher.train.sharding.base import LossModule, Material, Sharding, StepResult
from launcher.train.sharding.zero_check import check_zero_parts
from launcher.train.sharding.zero_engine import Reduction, make_engine


class Zero(Sharding):
    """DeepSpeed's engine, which is told which micro-batch is the last of a window and counts nothing by itself.

    Parameters, gradients and their sums are fp32; a half precision is the autocast of the forward alone. The model
    arrives whole on every rank, with the weights that its seed gives, and stage 3 divides it here: while it starts, a
    rank holds 4 bytes a parameter and its own part twice over.
    """

    def __init__(
        self,
        material: Material,
        strategy: StrategyName,
        *,
        keys: Mapping[str, Any],
        reduce_once: bool,
        group: ProcessGroup | None,
    ) -> None:
        """
        Args:
            keys: DeepSpeed's own configuration.
            reduce_once: reduce gradients once a window, which keeps whole ones until then; else after each micro-batch.
            group: where ranks ask each other on the host; None: the default group.

        Raises:
            ConfigError: a model or an optimizer that it can't take.
        """
        material.fill(material.model)
        material.model.to(material.device)
        super().__init__(material)
        stage = strategy.zero_stage
        self.stage, self.reduce_once = stage, reduce_once
        self.forward_is_collective = stage == 3
        self.loss_factor = float(material.degree)  # its reductions are averages
        trainable = [one for one in material.model.parameters() if one.requires_grad]
        self.optimizer = material.make_optimizer(material.model)
        check_zero_parts(material.model, self.optimizer, strategy.value)
        loss_module = self.module
        assert isinstance(loss_module, LossModule)
        loss_module.touches_all = stage < 3  # under stage 3 it matters which parameters a backward reaches
        self.engine = make_engine(self.module, self.optimizer, keys, material.device)
        self.module = self.engine
        self._zero = self.engine.optimizer
        self._reduction = Reduction(self.engine, trainable, stage, group)
        self._reduces = False

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(last)
        self._reduces = last or not self.reduce_once
        if self._reduces:
            with self._reduction.open():
                yield
        else:
            yield

    def backward(self, scaled: Tensor) -> None:
        if self._reduces and self.stage == 3:
            scaled.register_hook(self._reduction.agree)  # type: ignore[no-untyped-call]
        self.engine.backward(scaled, scale_wrt_gas=False)

    def step(self, lr: float, max_norm: float | None, *, finite: bool = True) -> StepResult:
        # fp32 gradients that aren't finite are asked for here: DeepSpeed's engine asks only where it scales the loss
        grad_norm = self._norm() * self._unscale
        applied = finite and math.isfinite(grad_norm)
        if not applied:
            self.clear_gradients()
            return self.result(grad_norm, applied=False, finite=finite)
        set_rates(self.optimizer, lr)
        self._zero.clip_grad = max_norm or 0.0
        if self.scaler is not None:
            self._zero.override_loss_scale(1 / self._unscale)
        self.engine.step()
        if self.scaler is not None:
            self._zero.override_loss_scale(1.0)  # what its backward multiplies a loss by
        if self._zero.overflow:
            raise RuntimeError(f"DeepSpeed skipped an update whose gradient norm is finite ({grad_norm:g})")
        return self.result(grad_norm, applied=True, finite=finite)

    def _norm(self) -> float:
        """The norm of the whole gradient as it is held; inf where it isn't finite."""
        if self.stage == 3:
            from deepspeed.runtime.utils import combine_grad_norm_groups

            return float(combine_grad_norm_groups(self._zero._get_norm_groups()))
        return float(self._zero.scaled_global_norm())

    def clear_gradients(self) -> None:
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        zero.averaged_gradients = {}
        if self.stage < 3:
            from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

            zero.all_grad_tensors = {}
            zero.micro_step_id = INITIAL_MICRO_STEP_ID
            zero._release_preflattened_grad_buffers()
            offloads = zero.cpu_offload
        else:
            offloads = zero.offload_optimizer
        if offloads:
            zero.reset_cpu_buffers()

    def close(self) -> None:
        self.engine.destroy()

    def whole(self, value: Tensor) -> Tensor:
        if self.stage < 3:
            return value
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([value]):  # a buffer or a whole parameter passes through as it is
            return value.detach().clone()
