"""What a collective sends is read off its arguments, and its group tells the axes of the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.traffic import SentBytes

from plait.config import parse_sections
from plait.config.strategy import resolve_layout
from plait.distributed.fake import fake_world
from plait.plan.hardware import find_hardware
from plait.plan.timing import CollectiveCall, axes_of, kind_of

LAYOUT = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}
CONFIG = parse_sections(strategy={"layout": LAYOUT}).config
SIZE = 32


@pytest.fixture
def sent() -> Any:
    """Takes down what rank 3 of 8 sends."""
    config = parse_sections(strategy={"layout": {"dp_shard": 8}, "zero": 3}).config
    with fake_world(config, rank=3, size=8), SentBytes() as counter:
        yield counter


def test_an_all_reduce_goes_around_twice(sent: SentBytes) -> None:
    dist.all_reduce(torch.empty(160))
    assert sent.bytes == 2 * 640 * 7 / 8


def test_of_a_gather_and_a_scatter_the_whole_counts(sent: SentBytes) -> None:
    dist.all_gather_into_tensor(torch.empty(80), torch.empty(10))
    dist.reduce_scatter_tensor(torch.empty(10), torch.empty(80))
    assert sent.through() == {"all_gather": 320, "reduce_scatter": 320}
    assert sent.bytes == 2 * 320 * 7 / 8


def test_of_an_uneven_exchange_what_a_rank_sends_itself_stays(sent: SentBytes) -> None:
    splits = [1, 2, 3, 4, 5, 6, 7, 8]
    dist.all_to_all_single(torch.empty(16, 10), torch.empty(36, 10), [2] * 8, splits)
    assert sent.bytes == (36 - splits[3]) * 40
    dist.all_to_all_single(torch.empty(16, 10), torch.empty(16, 10))
    assert sent.bytes == (36 - splits[3]) * 40 + 14 * 40


def test_what_is_received_and_waited_for_sends_nothing(sent: SentBytes) -> None:
    dist.barrier()
    dist.recv(torch.empty(5), src=0)
    assert not sent.messages
    assert kind_of(torch.ops.c10d.monitored_barrier_.default) is None


@given(st.sets(st.sampled_from(list(LAYOUT)), min_size=1), st.integers(0, SIZE - 1))
def test_ranks_that_differ_along_some_axes_are_found_to_do_so(axes: set[str], rank: int) -> None:
    layout = resolve_layout(CONFIG.strategy, size=SIZE, local_size=8)
    strides, inner = {}, SIZE
    for axis, size in layout.sizes().items():
        inner //= size
        strides[axis] = (inner, size)
    group = {rank}
    for axis in axes:
        stride, size = strides[axis]
        group = {each + (i - each // stride % size) * stride for each in group for i in range(size)}
    assert set(axes_of(layout, sorted(group))) == axes


def test_a_message_to_another_host_goes_by_the_network() -> None:
    machine = find_hardware("h100")
    near = CollectiveCall("reduce", 10**9, 10**9 / 8, 8, 1, ("dp_shard",))
    far = CollectiveCall("reduce", 10**9, 10**9 / 8, 8, 8, ("dp_shard",))
    assert near.sent == far.sent == 2 * 10**9 * 7 / 8
    assert near.seconds(machine) == pytest.approx(near.sent / (machine.link.gbps * 1e9), rel=0.05)
    assert far.seconds(machine) == pytest.approx(far.sent / (machine.network.gbps * 1e9), rel=0.05)
