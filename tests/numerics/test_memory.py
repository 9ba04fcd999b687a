"""What sharding and recomputation save, measured by counting the memory of live tensors."""

from typing import Any

import pytest
import torch
from configs import PLAIN, config_text
from torch.distributed._tools.mem_tracker import MemTracker
from toys import assembled

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 64, "num_layers": 8, "num_heads": 4, "intermediate_size": 176, "vocab_size": 14}


def config(micro: int, *more: str) -> str:
    return config_text(
        *PLAIN,
        *[f"model.{name}={value}" for name, value in SIZES.items()],
        *("task.vocab_size=14", "task.bos=13", "data=custom", "data.train._target_=toys.Sequences"),
        *("+data.train.count=16", "+data.train.longest=64"),
        f"batch.micro_batch_size={micro}",
        "training.duration=2 updates",
        *more,
    )


def peaks(rank: int, world_size: int, texts: list[str]) -> list[dict[str, int]]:
    """For each configuration the peak bytes of a window on this rank, whole and of what a backward keeps."""
    found = []
    for text in texts:
        fit = assembled(rank, world_size, text)
        fit.sharding.prepare()
        fit.runner.run(fit.windows.get(1))  # what is made once and stays
        fit.sharding.clear_gradients()
        window, kept = fit.windows.get(2), _Kept()
        tracker = MemTracker()
        tracker.track_external(fit.sharding.model)
        forward = fit.sharding.forward

        def afresh(*args: Any, tracker: MemTracker = tracker, forward: Any = forward) -> Any:
            tracker.reset_mod_stats()  # it takes one forward of each module otherwise
            return forward(*args)

        fit.sharding.forward = afresh  # type: ignore[method-assign]
        with tracker, torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            fit.runner.run(window)
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        found.append({"whole": int(snapshot["Total"]), "kept": kept.peak})
    return found


class _Kept:
    """Bytes of tensors that are kept for the backward, parameters left out."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def pack(self, tensor: torch.Tensor) -> "_Packed":
        base = tensor if tensor._base is None else tensor._base
        return _Packed(self, tensor, 0 if isinstance(base, torch.nn.Parameter) else tensor.nbytes)

    def unpack(self, packed: "_Packed") -> torch.Tensor:
        return packed.tensor


class _Packed:
    def __init__(self, kept: _Kept, tensor: torch.Tensor, size: int) -> None:
        self.kept, self.tensor, self.size = kept, tensor, size
        kept.now += size
        kept.peak = max(kept.peak, kept.now)

    def __del__(self) -> None:
        self.kept.now -= self.size


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_full_recomputation_keeps_less_than_half(ranks: Any, strategy: str) -> None:
    more = [f"strategy={strategy}", "batch.global_batch_size=16"]
    texts = [config(8, *more, f"activation_checkpoint={one}") for one in ("none", "selective", "full")]
    none, selective, full = ranks.run(peaks, texts, world_size=2, timeout=180)[0]
    assert full["kept"] < 0.5 * none["kept"]
    assert full["whole"] < 0.5 * none["whole"]
    assert full["whole"] < selective["whole"] < none["whole"]


def test_d03_a_gradient_that_is_reduced_each_time_is_never_whole(ranks: Any) -> None:
    text = ["strategy=fsdp", "activation_checkpoint=full"]
    texts = [
        config(1, *text, "batch.global_batch_size=2"),
        config(1, *text, "batch.global_batch_size=8"),
        config(1, *text, "batch.global_batch_size=8", "strategy.reduce_each=window"),
    ]
    once, four, window = [one["whole"] for one in ranks.run(peaks, texts, world_size=2, timeout=180)[0]]
    assert four <= 1.05 * once
    assert window > 1.2 * once  # as large as the model's own parameters, from the first micro-batch on
