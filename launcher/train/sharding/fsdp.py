"""Parameters, gradients and optimizer states spread over ranks: torch's FSDP2."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor

from launcher.config.choices import Offload, ReduceEach
from launcher.config.parallel import StrategyConfig
from launcher.optim.local import local
from launcher.optim.norm import sum_of_squares
from launcher.train.parallel.mesh import Pipe
from launcher.train.sharding.base import Material, Sharding


class FullyShard(Sharding):
    """torch's FSDP2: each block and what lies outside them is gathered when it runs.

    Gradients are summed and not averaged, in fp32 at least. With `reduce_each` window they stay whole on each rank
    until the last micro-batch; with micro_batch each is reduced to this rank's part at once. Among copies of shards
    (dp_replicate) the parts are summed once a window either way.
    """

    forward_is_collective = True

    def __init__(
        self,
        material: Material,
        strategy: StrategyConfig,
        *,
        reduce_each: ReduceEach,
        replicate: int,
        shard: int,
        pipe: Pipe | None = None,
    ) -> None:
        super().__init__(material)
        self._reduces_each_time = reduce_each is ReduceEach.micro_batch
        self._device = material.device
        self._meshes = _Meshes(material.device.type, replicate, shard, pipe)
        offload = OffloadPolicy()
        if strategy.offload is Offload.cpu:
            offload = CPUOffloadPolicy(pin_memory=material.device.type == "cuda")
        reshard = strategy.reshard_after_forward
        self._roots = [material.model] if material.part is None else list(material.part.modules)
        for root in self._roots:
            inside = set(root.modules())
            for block in material.blocks.values():
                if block in inside:
                    self._shard(block, material, offload, reshard)
            self._shard(root, material, offload, reshard)
        self._sharded = [one for root in self._roots for one in root.modules() if isinstance(one, FSDPModule)]
        if material.part is not None:
            self.model = material.part.whole
        for module in self._sharded:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other sum with a factor
        for root in self._roots:
            assert isinstance(root, FSDPModule)
            root.set_reduce_scatter_unused_params(True)

    def _shard(self, module: nn.Module, material: Material, offload: OffloadPolicy, reshard: bool | None) -> None:
        """Gives a module its numbers, and leaves this rank its part of them."""
        material.fill(module)
        if offload.__class__ is OffloadPolicy:
            module.to(material.device)
        trainable = [one for one in module.parameters() if one.requires_grad and not isinstance(one, DTensor)]
        dtypes = list(dict.fromkeys(one.dtype for one in trainable))
        half = bool(dtypes) and all(one.itemsize < 4 for one in dtypes)
        fully_shard(
            module,
            mesh=self._meshes.main,
            reshard_after_forward=reshard,
            # gradients of one type travel together; those of a second type in groups of processes of their own
            shard_placement_fn=None if len(dtypes) < 2 else self._meshes.placement(dtypes),
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None),
            offload_policy=offload,
        )

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        (root,) = self._roots
        return self.stage_backward(root, last=last)

    def stage_backward(self, stage: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        assert isinstance(stage, FSDPModule)
        stage.set_is_last_backward(last)
        stage.set_requires_gradient_sync(last or self._reduces_each_time)
        stage.set_requires_all_reduce(last)
        return nullcontext()

    def sum_of_squares(self, gradients: Sequence[Tensor]) -> float:
        total = sum_of_squares([local(one) for one in gradients]).to(self._device)
        dist.all_reduce(total, group=self._meshes.main.get_group("dp_shard"))
        return float(total)

    def settle(self) -> None:
        for module in self._sharded:
            module.reshard()

    def full_items(self) -> Iterator[tuple[str, Tensor]]:
        self.settle()
        yield from super().full_items()


class _Meshes:
    """The ranks as dp_replicate x dp_shard, as often as parameters of several types need it."""

    def __init__(self, device_type: str, replicate: int, shard: int, pipe: Pipe | None) -> None:
        self._device_type = device_type
        stages = 1 if pipe is None else pipe.size
        self._all = torch.arange(stages * replicate * shard).view(stages, replicate, shard)
        self._ranks = self._all[0 if pipe is None else pipe.rank]
        self.main = self._make()
        self._others: dict[torch.dtype, FSDPMeshInfo] = {}

    def placement(self, dtypes: Sequence[torch.dtype]) -> Callable[[nn.Parameter], ShardPlacementResult | None]:
        """For `fully_shard`: parameters of the first type on the main mesh, those of others each on one of its own."""
        first, *others = dtypes
        for dtype in others:
            if dtype not in self._others:
                self._others[dtype] = self._info(self._make())

        def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
            if not parameter.requires_grad or parameter.dtype is first:
                return None
            return ShardPlacementResult(None, self._others[parameter.dtype])

        return place

    def _make(self) -> DeviceMesh:
        """A mesh with process groups that no other has."""
        rows, columns = self._all.flatten(0, 1), self._all.transpose(1, 2).flatten(0, 1)
        shard_group, _ = dist.new_subgroups_by_enumeration(rows.tolist())  # type: ignore[no-untyped-call]
        if len(self._ranks) == 1:
            return DeviceMesh.from_group(shard_group, self._device_type, mesh_dim_names=("dp_shard",))
        copies_group, _ = dist.new_subgroups_by_enumeration(columns.tolist())  # type: ignore[no-untyped-call]
        names = ("dp_replicate", "dp_shard")
        groups = [copies_group, shard_group]
        return DeviceMesh.from_group(groups, self._device_type, mesh=self._ranks, mesh_dim_names=names)

    def _info(self, mesh: DeviceMesh) -> FSDPMeshInfo:
        if mesh.ndim == 1:
            return FSDPMeshInfo(mesh, shard_mesh_dim=0)
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
