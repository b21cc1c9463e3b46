"""Linear layers in 8 bits, by the twin that rounds as the device does, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from plait.kernels.fp8 import E4M3, E5M2, fp8_linear, rounded, scale_of


def both(x: Tensor, weight: Tensor, up: Tensor, rowwise: bool) -> list[tuple[Tensor, Tensor]]:
    """Output and gradients in 8 bits, each beside the same in float64."""
    small = [t.bfloat16().requires_grad_() for t in (x, weight)]
    exact = [t.detach().double().requires_grad_() for t in small]
    y = fp8_linear(small[0], small[1], None, rowwise=rowwise, emulated=True)
    z = F.linear(exact[0], exact[1])
    y.backward(up.to(y.dtype))
    z.backward(up.double())
    assert y.dtype == torch.bfloat16
    pairs = zip((y, *(t.grad for t in small)), (z, *(t.grad for t in exact)), strict=True)
    return [(found.detach().double(), wanted.detach()) for found, wanted in pairs]


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("shape", [(2, 24, 32), (7, 32)], ids=str)
def test_output_and_gradients_are_those_of_float64_up_to_the_rounding(rowwise: bool, shape: tuple[int, ...]) -> None:
    x, weight = 30.0 * torch.randn(shape), 0.02 * torch.randn(48, 32)
    y, grad_x, grad_weight = (off(*pair) for pair in both(x, weight, torch.randn(*shape[:-1], 48), rowwise))
    # e4m3 keeps 3 bits behind the point and e5m2 keeps 2; the errors of a sum partly cancel.
    assert y < 0.06
    assert max(grad_x, grad_weight) < (0.06 if rowwise else 0.10)


def test_a_large_number_costs_its_own_row_only_when_rows_have_scales() -> None:
    x, weight, up = torch.randn(64, 32), torch.randn(48, 32), torch.randn(64, 48)
    x[0, 0] = 1e6
    errors = [off(*(part[1:] for part in both(x, weight, up, rowwise)[0])) for rowwise in (False, True)]
    assert errors[1] < 0.06 < 0.5 < errors[0]


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_the_largest_number_fills_the_range_and_nothing_leaves_it(dtype: torch.dtype) -> None:
    x = torch.randn(100) * 10.0 ** torch.randint(-6, 6, ())
    small = rounded(x, scale_of(x, dtype), dtype).float()
    assert small.abs().max() == torch.finfo(dtype).max
    assert torch.isfinite(small).all()
    assert torch.equal(rounded(torch.zeros(4), scale_of(torch.zeros(4), dtype), dtype).float(), torch.zeros(4))


def test_what_is_not_finite_stays_visible() -> None:
    x, weight = torch.randn(16, 16, dtype=torch.bfloat16), torch.randn(16, 16, dtype=torch.bfloat16)
    x[3, 3] = float("inf")
    for rowwise in (False, True):
        assert not torch.isfinite(fp8_linear(x, weight, None, rowwise=rowwise, emulated=True)).all()
