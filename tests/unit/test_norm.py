"""The norm of a gradient of any size, against float64."""

import pytest
import torch

from launcher.train.parallel.norm import clip, sum_of_squares


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 100_000, 3_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_norm_is_exact_to_rounding(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = (torch.randn(size) * torch.rand(size) ** 4).to(dtype)
    tensors = [values[: size // 3], values[size // 3 :].view(1, -1), torch.ones((), dtype=dtype)]
    exact = float(values.double().square().sum()) + 1
    # the runs' norms are rounded to 24 bits each
    assert float(sum_of_squares(tensors)) == pytest.approx(exact, rel=2e-7)


def test_what_is_not_contiguous_and_what_is_not_finite() -> None:
    values = torch.randn(2000, 30)
    assert float(sum_of_squares([values.t()])) == pytest.approx(float(values.double().square().sum()), rel=2e-7)
    values[7, 7] = float("nan")
    assert not float(sum_of_squares([values])) < float("inf")
    values[7, 7] = float("inf")
    assert float(sum_of_squares([values])) == float("inf")


def test_clipping_is_that_of_torch() -> None:
    values = torch.randn(5000)
    parameter = torch.nn.Parameter(values)
    for max_norm in (0.5, 1e3):
        parameter.grad = values.clone()
        mine = values.clone()
        torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        clip([mine], max_norm, float(values.double().norm()))
        assert torch.allclose(mine, parameter.grad, rtol=1e-6, atol=0)
