"""Gradient buckets: each gradient once, in the format of sums, whatever takes part."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from plait.distributed.ddp import GradientBuckets


def made(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def buckets_of(params: list[nn.Parameter], reduce: torch.dtype = torch.float32, size: int = 64) -> GradientBuckets:
    return GradientBuckets(params, dtype_of=lambda _param: reduce, group_of=lambda _param: None, bucket_bytes=size)


@pytest.mark.parametrize("size", [1, 64, 10**9])
@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
def test_gradients_of_all_micro_batches_add_up_in_their_place(size: int, reduce: torch.dtype) -> None:
    params = made([(3, 4), (5,), (2, 2, 2), (1,)])
    buckets = buckets_of(params, reduce, size)
    for _ in range(2):  # a second step starts from nothing
        expected = [torch.zeros_like(p, dtype=reduce) for p in params]
        count = random.randint(1, 4)
        for index in range(count):
            buckets.before_backward(last=index == count - 1)
            slopes = [torch.randn(p.shape).to(reduce).float() for p in params]
            sum((p * slope).sum() for p, slope in zip(params, slopes, strict=True)).backward()  # type: ignore[union-attr]
            for total, slope in zip(expected, slopes, strict=True):
                total.add_(slope)
        buckets.finish()
        for index, total in enumerate(expected):
            assert buckets.view_of(index).dtype == reduce
            torch.testing.assert_close(buckets.view_of(index), total)
        for p in params:
            p.grad = None


def test_a_parameter_that_took_no_part_has_zeros_also_after_a_step_in_which_it_did() -> None:
    used, idle = made([(4,), (4,)])
    buckets = buckets_of([used, idle])
    for both in (True, False):
        buckets.before_backward(last=True)
        (used.sum() + idle.sum() if both else used.sum()).backward()
        buckets.finish()
        assert torch.equal(buckets.view_of(0), torch.ones(4))
        assert torch.equal(buckets.view_of(1), torch.full((4,), float(both)))
        used.grad = idle.grad = None


def test_micro_batches_that_use_different_parameters_all_count() -> None:
    one, two = made([(2,), (3,)])
    buckets = buckets_of([one, two])
    for index, param in enumerate((one, two, one)):
        buckets.before_backward(last=index == 2)
        param.sum().backward()
    buckets.finish()
    assert buckets.view_of(0).tolist() == [2.0, 2.0]
    assert buckets.view_of(1).tolist() == [1.0, 1.0, 1.0]


def test_small_formats_are_summed_in_the_larger_one() -> None:
    (param,) = made([(1,)], torch.bfloat16)
    buckets = buckets_of([param])
    slopes = [256.0] + [1.0] * 7
    for index, slope in enumerate(slopes):
        buckets.before_backward(last=index == len(slopes) - 1)
        (param * slope).sum().backward()
    buckets.finish()
    assert buckets.view_of(0).item() == 263.0  # in bf16 it would have stayed 256


def test_a_bucket_holds_whole_parameters_in_backward_order_up_to_its_size() -> None:
    params = made([(4,), (4,), (4,), (4,), (4,)])
    buckets = buckets_of(params, size=32)  # two of 16 bytes each
    places = [buckets.view_of(i).untyped_storage().data_ptr() for i in range(5)]
    assert places[4] == places[3] != places[2]
    assert places[2] == places[1] != places[0]
