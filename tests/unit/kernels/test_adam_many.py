"""AdamW over many tensors, by its twin and, where Triton's interpreter runs, by the kernel; against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from plait.kernels.adam import AdamNumbers, adam_step_plain
from plait.kernels.fused_adam import PIECE, Tables, WeightPointers, adam_many
from plait.kernels.triton import interprets

EPS = 1e-3  # far above rounding: see the tests of one tensor
SHAPES = ((3,), (16, 5), (0, 4), (PIECE + 1,), (1024,))
CASES = list(product((torch.float32, torch.bfloat16), (None, torch.bfloat16, torch.float16), (True, False)))


def entries_of(grads: list[Tensor], publish: torch.dtype | None) -> list[WeightPointers]:
    return [
        WeightPointers(
            torch.randn_like(grad, dtype=torch.float32),
            grad,
            torch.zeros_like(grad, dtype=torch.float32),
            torch.zeros_like(grad, dtype=torch.float32),
            None if publish is None else torch.zeros_like(grad, dtype=publish),
        )
        for grad in grads
    ]


@pytest.mark.parametrize(("grad_dtype", "publish", "decoupled"), CASES, ids=str)
def test_steps_are_those_of_float64_and_the_rounded_weights_follow(
    grad_dtype: torch.dtype, publish: torch.dtype | None, decoupled: bool
) -> None:
    entries = entries_of([torch.empty(shape, dtype=grad_dtype) for shape in SHAPES], publish)
    exact = [[tensor.double() for tensor in (e.weight, e.mean, e.square)] for e in entries]
    steps = [torch.zeros(()) for _ in entries]
    tables, numbers = Tables(), AdamNumbers(1, 1e-2, (0.9, 0.95), EPS, 0.1, decoupled)
    for step in range(1, 5):
        grads = [torch.randn(shape).to(grad_dtype) for shape in SHAPES]
        wide = [grad.double() for grad in grads]
        now = [entry._replace(grad=grad) for entry, grad in zip(entries, grads, strict=True)]
        adam_many(numbers, now, steps, scale=torch.tensor(4.0), found_inf=torch.tensor(0.0), tables=tables)
        for (weight, mean, square), grad in zip(exact, wide, strict=True):
            adam_step_plain(
                AdamNumbers(step, 1e-2, (0.9, 0.95), EPS, 0.1, decoupled, 0.25), [weight], [grad], [mean], [square]
            )
    for entry, reference in zip(entries, exact, strict=True):
        for found, wanted in zip((entry.weight, entry.mean, entry.square), reference, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=1e-6)
        if entry.rounded is not None:
            # The interpreter cuts digits off where a device rounds.
            near = 2**-7 if interprets() else 0.0
            torch.testing.assert_close(entry.rounded, entry.weight.to(entry.rounded.dtype), rtol=near, atol=0.0)
    assert [float(step) for step in steps] == [4.0] * len(SHAPES)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    entries = entries_of([torch.full((100,), float("nan"))], torch.bfloat16)
    before = [tensor.clone() for tensor in entries[0]]
    steps = [torch.tensor(3.0)]
    adam_many(AdamNumbers(1, 0.1), entries, steps, found_inf=torch.tensor(1.0), tables=Tables())
    assert all(torch.equal(now, then) for now, then in zip(entries[0][2:], before[2:], strict=True))
    assert torch.equal(entries[0].weight, before[0])
    assert float(steps[0]) == 3.0


def test_a_launch_for_each_kind_and_none_is_made_anew_while_nothing_moves() -> None:
    wide, narrow = entries_of([torch.randn(64), torch.randn(7)], None), entries_of([torch.randn(16).bfloat16()], None)
    entries = [wide[0], *narrow, wide[1]]
    tables = Tables()
    first = tables.of(entries)
    assert [launch.lengths for launch in first] == [[64], [16], [7]]  # 7 numbers end where no wide access does
    assert [launch.group.aligned for launch in first] == [True, True, False]
    assert [launch.chosen.tolist() for launch in first if launch.chosen is not None] == [[0], [1], [2]]
    assert tables.of(entries) is first
    moved = [entry._replace(grad=entry.grad.clone()) for entry in entries]
    second = tables.of(moved)
    assert [launch.table[1].item() for launch in second] == [entry.grad.data_ptr() for entry in moved]
    assert all(now.pieces is then.pieces for now, then in zip(second, first, strict=True))
    assert tables.of(wide[:1])[0].chosen is None
