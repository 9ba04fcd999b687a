"""What `launcher verify` is refused for before a rank starts."""

import pytest


@pytest.mark.parametrize("given", [["sweep=linear_scaling"], ["hydra.mode=MULTIRUN"], ["sweep.resume=x"], ["-m"]])
def test_a_sweep_is_not_verified(command, given: list[str]):
    said = command("verify", "cluster.device=cpu", "submit=slurm", *given)  # where nothing starts in any case
    assert said.code == 2
    assert "a sweep can't be verified: leave out" in said.err
