"""What a model has to be before a run starts."""

from collections.abc import Callable

import pytest
import torch
from configs import config_text
from torch import Tensor, nn

from launcher.config.schema import Config
from launcher.config.validate import parse
from launcher.errors import ConfigError, LauncherError
from launcher.train.parts import build_model, defer_model, sketch_model


class WithHistory(nn.Module):
    """A model whose state holds more than dense tensors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2) if kind != "large numpy" else nn.Linear(100, 100)
        self.kind = kind
        if kind == "wrong":
            raise ValueError("no such kind")
        if "numpy" in kind:
            self.scale = float(self.linear.weight.detach().numpy().std())
        if kind == "rates":  # the rising rates of stochastic depth, as many models make them
            self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        if kind == "sparse":
            self.register_buffer("graph", torch.eye(2).to_sparse())

    def get_extra_state(self) -> object:
        return {"dict": {"seen": 3}, "tensor": torch.zeros(1)}.get(self.kind, torch.zeros(0))

    def set_extra_state(self, state: object) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


def settings(kind: str) -> Config:
    target = "model._target_=test_build_model.WithHistory"
    return parse(config_text("model=custom", target, f"+model.kind='{kind}'"))


@pytest.mark.parametrize(("kind", "named"), [("dict", "a dict under '_extra_state'"), ("sparse", "under 'graph'")])
@pytest.mark.parametrize("build", [build_model, sketch_model])
def test_a_state_that_the_final_model_could_not_hold_is_refused(
    build: Callable[[Config], nn.Module], kind: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        build(settings(kind))


def test_an_extra_state_that_is_a_tensor_is_kept() -> None:
    assert "_extra_state" in build_model(settings("tensor")).state_dict()


def test_a_model_that_needs_numbers_while_it_is_made_is_sketched_with_memory() -> None:
    for kind in ("rates", "numpy"):
        assert next(sketch_model(settings(kind)).parameters()).device.type == "cpu"
    assert next(sketch_model(settings("tensor")).parameters()).device.type == "meta"


def test_what_the_model_itself_raises_is_said_once() -> None:
    with pytest.raises(LauncherError, match="raised ValueError: no such kind"):
        sketch_model(settings("wrong"))


def test_a_constructor_that_takes_large_numbers_to_numpy_is_made_whole(capsys: pytest.CaptureFixture[str]) -> None:
    model, fill = defer_model(settings("large numpy"))
    fill(model)
    assert not any(one.is_meta for one in model.parameters())
    assert "made whole on every rank" in capsys.readouterr().out
