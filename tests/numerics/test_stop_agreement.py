"""All ranks stop after the window in which one of them was asked to, under any division of the ranks."""

from typing import Any

import pytest
from configs import PLAIN, config_text
from toys import assembled

from launcher.train import stopping

pytestmark = pytest.mark.slow

NEVER = -1


def stopped(rank: int, world_size: int, text: str, asked: int, after: int) -> tuple[int, bool, list[int]]:
    """The last update, whether it was a stop, and the validations, where rank `asked` is asked while it does update
    `after` (0: before the first)."""
    stopping._is_asked = rank == asked and after == 0
    fit = assembled(rank, world_size, text)
    get, validations = fit.windows.get, list[int]()

    def asks(update: int) -> Any:
        stopping._is_asked |= rank == asked and update == after
        return get(update)

    fit.windows.get = asks  # type: ignore[method-assign]
    fit.reporter.validation = lambda progress: validations.append(progress.update)  # type: ignore[method-assign]
    try:
        return fit.run().update, fit.stopped, validations
    finally:
        stopping._is_asked = False


def config(*more: str, data: str = "toys.Sequences", batch: int = 5) -> str:
    """A small model; of 17 sequences 4 updates, with a validation after each second one."""
    return config_text(
        *PLAIN,
        "model.hidden_size=8",
        "model.num_heads=2",
        "model.num_layers=2",
        "model.intermediate_size=8",
        "model.vocab_size=14",
        "task.vocab_size=14",
        "task.bos=13",
        "data=custom",
        f"data.train._target_={data}",
        "data.validation={_target_: toys.Sequences, count: 4}",
        "training.duration=4 updates",
        "training.validate_every=2 updates",
        f"batch.global_batch_size={batch}",
        *more,
    )


@pytest.mark.parametrize(
    ("degree", "division"),
    [
        (1, []),
        *[(2, [f"strategy={name}"]) for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")],
        (2, ["mesh.pp=2"]),
        (4, ["mesh.pp=2", "strategy=ddp"]),
    ],
)
def test_all_ranks_stop_after_the_same_window(ranks: Any, degree: int, division: list[str]) -> None:
    text = config(*division)
    last = degree - 1
    for asked, after, expected in [
        (NEVER, 0, (4, False, [2, 4])),
        (last, 0, (0, True, [])),
        (0, 1, (1, True, [])),
        (last, 2, (2, True, [])),  # its validation comes when it goes on
        (last, 4, (4, False, [2, 4])),  # it is finished
    ]:
        assert ranks.run(stopped, text, asked, after, world_size=degree) == [expected] * degree


def test_a_window_without_weight_is_one_to_stop_after(ranks: Any) -> None:
    text = config("data.shuffle=false", data="toys.Masked", batch=2)
    assert ranks.run(stopped, text, 1, 1, world_size=2) == [(1, True, [])] * 2
