"""Tensors rounded to 8 bits, by the twins and, where Triton's interpreter runs, by the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.kernels.fp8 import E4M3, E5M2, amax_of, fp8_cast

DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)


def on_the_grid(dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers that `dtype` holds exactly, the largest one among them: rounding, which the interpreter does not do
    as a device does, has nothing to do."""
    numbers = torch.arange(256).to(torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()]
    x = numbers[torch.randint(len(numbers), shape)]
    x.view(-1)[torch.randint(x.numel(), ())] = -numbers.max()
    return x


@DTYPES
@pytest.mark.parametrize(
    ("shapes", "dim"),
    [
        ([(37, 48)], 0),
        ([(300, 208)], 0),
        ([(1, 16)], 0),
        ([(32, 48), (16, 48), (160, 48)], 0),
        ([(45, 32), (45, 16), (45, 160)], 1),
    ],
    ids=str,
)
def test_matrices_lie_together_both_ways_and_come_back(
    dtype: torch.dtype, shapes: list[tuple[int, int]], dim: int
) -> None:
    power = 2.0 ** int(torch.randint(-12, 12, ()))
    tensors = [(power * on_the_grid(dtype, *shape)).bfloat16() for shape in shapes]
    whole = torch.cat(tensors, dim).float()
    peaks = amax_of(tensors)
    assert peaks.max() == whole.abs().max()
    small = fp8_cast(tensors, peaks, dtype, dim=dim, rows=True, columns=True)
    assert small.rows.dtype == small.columns.dtype == dtype
    assert torch.equal(small.rows.float() * small.inverse, whole)
    tokens = len(whole)
    assert small.columns.shape == (whole.shape[1], tokens + -tokens % 16)
    assert torch.equal(small.columns[:, :tokens].float() * small.inverse, whole.t())
    assert not small.columns[:, tokens:].float().any()
    one_way = fp8_cast(tensors, peaks, dtype, dim=dim, rows=False, columns=True)
    other_way = fp8_cast(tensors, peaks, dtype, dim=dim, rows=True, columns=False)
    assert one_way.rows.numel() == other_way.columns.numel() == 0
    assert torch.equal(one_way.columns.float(), small.columns.float())
    assert torch.equal(other_way.rows.float(), small.rows.float())


@DTYPES
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    zeros = torch.zeros(20, 16, dtype=torch.bfloat16)
    small = fp8_cast([zeros], amax_of([zeros]), dtype, rows=True, columns=True)
    assert torch.isfinite(small.inverse)
    assert not small.rows.float().any()


@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # numpy's words, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_every_number(bad: float) -> None:
    x = torch.randn(40, 32, dtype=torch.bfloat16)
    x[int(torch.randint(40, ())), 3] = bad
    small = fp8_cast([x], amax_of([x]), E4M3, rows=True, columns=True)
    assert not torch.isfinite(small.inverse)
    assert not torch.isfinite(small.rows.float() @ torch.ones(32) * small.inverse).any()
