"""Scales of earlier steps: one reading, which cuts what is beyond and notes the largest number.

By the twins and, where Triton's interpreter runs, by the kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from plait.kernels.fp8 import (
    CURRENT_SCALES,
    E4M3,
    E5M2,
    GRADIENT,
    INPUT,
    WEIGHT,
    DelayedScales,
    amax_plain,
    fp8_cast,
    fp8_linears,
)
from plait.kernels.fp8_gated import cast_product, cast_slopes, fp8_feed_forward, gate_amax_plain
from plait.kernels.triton import interprets

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # numpy's words, in the interpreter

KINDS = (INPUT, WEIGHT, GRADIENT)


def blank(layers: int) -> Tensor:
    return torch.zeros(len(KINDS), layers, dtype=torch.int32)


def noted(notes: Tensor) -> Tensor:
    return notes.view(torch.float32)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_numbers_beyond_the_scale_are_cut_and_noted(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    tensors = [torch.randint(-8, 9, (40, width)).bfloat16() for width in (32, 16)]
    tensors[1][7, 3] = -4 * limit
    notes = torch.tensor([2.0**20, 1.0]).view(torch.int32)
    small = fp8_cast(
        tensors, torch.tensor([limit]), dtype, dim=1, rows=True, columns=True, amax_bits=notes, saturates=True
    )
    assert float(small.inverse) == 1.0
    whole = torch.cat(tensors, 1).float()
    assert torch.equal(small.rows.float(), whole.clamp(-limit, limit))
    assert torch.equal(small.columns[:, :40].float(), whole.clamp(-limit, limit).t())
    assert noted(notes).tolist() == [2.0**20, 4 * limit]  # a note only rises


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_cut_to_something_that_is(bad: float) -> None:
    x = torch.randn(40, 32).bfloat16()
    x[5, 3] = bad
    notes = torch.zeros(2, dtype=torch.int32)  # of two layers with this input
    small = fp8_cast([x], torch.tensor([4.0, 2.0]), E4M3, rows=True, columns=True, amax_bits=notes, saturates=True)
    assert not noted(notes).isfinite().any()
    if interprets():
        return  # which has no NaN in 8 bits
    assert small.rows.float().isnan().sum() == small.columns.float().isnan().sum() == 1
    assert small.rows.float()[5, 3].isnan()


def test_the_middle_of_a_feed_forward_notes_its_own_numbers() -> None:
    gate, up, grad = (torch.randn(45, 80).bfloat16() for _ in range(3))
    of_product, of_slopes = gate_amax_plain(gate, up), gate_amax_plain(gate, up, grad)
    notes = torch.zeros(3, dtype=torch.int32)
    low = of_product / 4, of_slopes / 4
    product = cast_product(gate, up, low[0], amax_bits=notes[:1], saturates=True)
    turned, slopes = cast_slopes(gate, up, grad, low, rows=True, amax_bits=notes[1:], saturates=True)
    torch.testing.assert_close(noted(notes), torch.cat((of_product, of_slopes)), rtol=2**-7, atol=0.0)
    for found, limit in ((product.rows, 448), (turned.columns, 448), (slopes.rows, 57344), (slopes.columns, 57344)):
        assert found.float().abs().max() == limit
        assert (found.float().abs() == limit).sum() > 1


def layers(x: Tensor, *weights: Tensor, earlier: DelayedScales) -> list[Tensor]:
    return list(fp8_linears(x, weights, [None] * 3, rowwise=False, emulated=True, earlier=earlier))


def feed_forward(*tensors: Tensor, earlier: DelayedScales) -> list[Tensor]:
    return [fp8_feed_forward(*tensors, emulated=True, earlier=earlier)]


CASES = pytest.mark.parametrize(
    ("function", "shapes"),
    [(layers, [(37, 48), (32, 48), (16, 48), (64, 48)]), (feed_forward, [(37, 48), (80, 48), (80, 48), (48, 80)])],
    ids=["layers", "feed-forward"],
)


def results(function: Callable[..., list[Tensor]], inputs: list[Tensor], earlier: DelayedScales) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = function(*leaves, earlier=earlier)
    generator = torch.Generator().manual_seed(7)
    ups = [torch.randn(y.shape, generator=generator).bfloat16() for y in outputs]
    torch.autograd.backward(outputs, ups)
    return [*(y.detach() for y in outputs), *(x.grad for x in leaves if x.grad is not None)]


@CASES
def test_with_the_peaks_that_it_would_have_found_it_is_the_same(
    function: Callable[..., list[Tensor]], shapes: list[tuple[int, int]]
) -> None:
    inputs = [(torch.randn(shape) * shape[1] ** -0.5).bfloat16() for shape in shapes]
    first, second = blank(3), blank(3)
    now = results(function, inputs, CURRENT_SCALES)
    noting = results(function, inputs, DelayedScales(None, first))
    again = results(function, inputs, DelayedScales(noted(first).clone(), second))
    for ours, once, wanted in zip(again, noting, now, strict=True):
        assert torch.equal(once, wanted)
        assert torch.equal(ours, wanted)
    assert torch.equal(first, second)
    peaks = noted(first)
    assert torch.equal(peaks[WEIGHT], amax_plain(inputs[1:]))
    assert (peaks[INPUT, :2] == inputs[0].float().abs().max()).all()
    assert (peaks[GRADIENT] > 0).all()


@CASES
def test_a_scale_that_is_too_small_or_too_large_costs_little(
    function: Callable[..., list[Tensor]], shapes: list[tuple[int, int]]
) -> None:
    inputs = [(torch.randn(shape) * shape[1] ** -0.5).bfloat16() for shape in shapes]
    first = blank(3)
    now = results(function, inputs, DelayedScales(None, first))
    worse = 3 if interprets() else 1  # it loses a carry where a device rounds up
    for factor, most in ((4.0, 0.01), (0.8, 0.3)):
        other = results(function, inputs, DelayedScales(noted(first) * factor))
        for ours, wanted in zip(other, now, strict=True):
            assert (ours - wanted).float().norm() < worse * most * wanted.float().norm()
