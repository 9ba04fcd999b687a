"""What of a model lies on one rank of a pipeline, and what the ranks of a pipeline settle among each other."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.optim.local import local
from launcher.train.checkpoint.pieces import Named
from launcher.train.parallel.mesh import Place
from launcher.train.parallel.stages import Anatomy, Family, Span, merged, share_buffers, take_members


class Part:
    """The stages of one rank. Everything here is collective among the ranks of a pipeline."""

    def __init__(
        self,
        plain: nn.Module,
        anatomy: Anatomy,
        family: Family,
        spans: Sequence[Span],
        ranks: Sequence[int],
        place: Place,
    ) -> None:
        """
        Args:
            plain: the whole model, of which tensors that lie elsewhere may have no memory.
            spans: of all stages.
            ranks: for each of them the pipeline rank that it lies on.
        """
        assert place.pipe is not None
        self.plain, self._anatomy, self._pipe, self._place = plain, anatomy, place.pipe, place
        self.ranks = list(ranks)
        """For each stage the pipeline rank that it lies on."""
        self.spans = [one for one, rank in zip(spans, self.ranks, strict=True) if rank == place.pipe.rank]
        self.modules: Sequence[nn.Module] = [family.cut(plain, anatomy, one) for one in self.spans]
        share_buffers(self.modules, anatomy)
        self._holders = {name: self._ranks_with(name, spans) for name in plain.state_dict()}
        self._shared = self._groups_of_shared()

    @cached_property
    def whole(self) -> nn.Module:
        """One module that holds what the stages of this rank hold, under the plain model's names."""
        return merged(self.modules, self._anatomy, self.plain)

    def fill(self, module: nn.Module, fill: Callable[[nn.Module], None]) -> None:
        """Gives the tensors of a stage or of a part of one their numbers, by `fill` of the plain model."""
        fill(module)
        for stage in self.modules:
            if any(module is one for one in stage.modules()):  # another one may be sharded by now
                take_members(stage, self.plain, self._anatomy)

    def named(self) -> Iterator[Named]:
        """The parameters and buffers of this rank, each once, under the plain model's first name for it. Buffers that
        are no part of its state_dict are left out: which stage would have them isn't known."""
        for name, tensor in (*self.whole.named_parameters(), *self.whole.named_buffers()):
            if name in self._holders:
                first = self._names[self._tensors[name]][0]
                yield Named(first, tensor, is_owned=self._holders[name][0] == self._pipe.rank)

    def add_up_shared(self) -> None:
        """Gives parameters that lie on several ranks, as a tied embedding and head do, the sum of their gradients."""
        own = dict(self.whole.named_parameters(remove_duplicate=False)) if self._shared else {}
        for name, group in self._shared:
            parameter = own[name]
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local(parameter.grad), group=group)

    def counted(self, parameters: Sequence[Tensor]) -> list[bool]:
        """Which of these parameters count on this rank in a norm: a shared one on the first that holds it."""
        elsewhere = {
            id(one) for name, one in self.whole.named_parameters() if self._holders[name][0] != self._pipe.rank
        }
        return [id(one) not in elsewhere for one in parameters]

    def sum(self, value: float) -> float:
        """The sum over the ranks of the pipeline."""
        return self._pipe.sum([value])[0]

    def full_items(self, own: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The whole model's state, tensor by tensor, on every rank. `own`: the whole tensor of a name on this rank."""
        for name, sketch in self.plain.state_dict(keep_vars=True).items():
            owner = self._holders[name][0]
            if owner == self._pipe.rank:
                value = own(self._name_here(self._names[self._tensors[name]]))
            else:
                value = torch.empty(sketch.shape, dtype=sketch.dtype)
            if value.numel():
                dist.broadcast(value, group=self._pipe.host_group, group_src=owner)
            yield name, value

    def _ranks_with(self, name: str, spans: Sequence[Span]) -> list[int]:
        """The ranks that hold a tensor of the state under any of its names, the one of the first stage first."""
        names = self._names[self._tensors[name]]
        ranks = [
            rank
            for span, rank in zip(spans, self.ranks, strict=True)
            if any(self._anatomy.holds(one, span) for one in names)
        ]
        return list(dict.fromkeys(ranks))

    @cached_property
    def _tensors(self) -> dict[str, int]:
        return {name: id(one) for name, one in self.plain.state_dict(keep_vars=True).items()}

    @cached_property
    def _names(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = defaultdict(list)
        for name, tensor in self._tensors.items():
            found[tensor].append(name)
        return found

    def _groups_of_shared(self) -> list[tuple[str, dist.ProcessGroup]]:
        """For each parameter that lies on this rank and on others a name of it here and the group of those ranks."""
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        shared = []
        for names in self._names.values():
            ranks = tuple(sorted(self._holders[names[0]]))
            if len(ranks) < 2:
                continue
            if ranks not in groups:  # every rank of the run makes all of them, in the same order
                made = [
                    dist.new_group([rank * self._place.degree + other for rank in ranks])
                    for other in range(self._place.degree)
                ]
                groups[ranks] = made[self._place.rank]
            if self._pipe.rank in ranks:
                shared.append((self._name_here(names), groups[ranks]))
        return shared

    def _name_here(self, names: Sequence[str]) -> str:
        """The first of a tensor's names under which it lies on this rank."""
        return next(one for one in names if any(self._anatomy.holds(one, span) for span in self.spans))
