"""Tensors that training holds in another form are made a few rows at a time, and taken apart so."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.refusals import refused
from torch import Tensor

from plait.checkpoint import CheckpointWriter, load_into, open_checkpoint, save_checkpoint
from plait.checkpoint.convert.detect import open_source
from plait.checkpoint.pieces import DeferredTensor, Entry
from plait.checkpoint.tensorfile import TensorFileWriter
from plait.config import parse_sections
from plait.distributed import World, open_world
from plait.errors import CheckpointError


@pytest.fixture
def world() -> World:
    return open_world(parse_sections(device="cpu").config)


class Turned:
    """Rows of the matrix it stands for are columns here. Remembers how many came and went at a time."""

    def __init__(self, values: Tensor) -> None:
        self.columns = values.t().clone()
        self.at_once: list[int] = []

    def later(self) -> DeferredTensor:
        like = torch.empty(self.columns.shape[::-1], dtype=torch.uint8, device="meta")
        return DeferredTensor(like, self.columns.dtype, make_rows=self._make, store_rows=self._take)

    def _make(self, begin: int, end: int) -> Tensor:
        self.at_once.append(end - begin)
        return self.columns[:, begin:end].t()

    def _take(self, begin: int, rows: Tensor) -> None:
        self.at_once.append(len(rows))
        self.columns[:, begin : begin + len(rows)] = rows.t()


@pytest.mark.parametrize("background", [False, True])
def test_rows_come_and_go_some_at_a_time(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    rows, width, strip = random.randint(20, 60), random.randint(3, 40), random.randint(200, 900)
    monkeypatch.setattr("plait.checkpoint.pieces.STRIP", strip)
    values, beside = torch.randn(rows, width), torch.randn(5)
    held, target = Turned(values), tmp_path / "checkpoint"
    entries: dict[str, Entry] = {"packed": held.later(), "plain": beside}
    writer = CheckpointWriter(tmp_path, world, background=background)
    writer.save(target, entries, {}, step=1)
    writer.wait()
    writer.close()
    with open_source(target) as source:
        assert torch.equal(source.read("packed"), values)
        assert torch.equal(source.read("plain"), beside)
    assert sum(held.at_once) == rows
    assert max(held.at_once) <= max(1, strip // (4 * width))

    other, room = Turned(torch.zeros(rows, width)), torch.zeros(5)
    load_into(open_checkpoint(target), {"packed": other.later(), "plain": room}, world=world)
    assert torch.equal(other.columns, held.columns)
    assert torch.equal(room, beside)
    assert max(other.at_once) <= max(1, strip // (4 * width))


def test_what_is_damaged_is_not_taken(world: World, tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    save_checkpoint(target, {"packed": Turned(torch.ones(6, 8)).later()}, {}, step=1, world=world)
    file = next(target.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    other = Turned(torch.zeros(6, 8))
    with refused(CheckpointError, file):
        load_into(open_checkpoint(target), {"packed": other.later()}, world=world)
    assert not other.columns.any()


@pytest.mark.parametrize("shape", [(1, 5), (7, 3, 2), (40,), (3, 0)])
def test_strips_of_any_length_give_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr("plait.checkpoint.tensorfile.BLOCK", random.randint(3, 60))
    whole = torch.randn(shape)
    cuts = sorted(random.sample(range(1, shape[0]), random.randint(0, shape[0] - 1)))
    strips = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, shape[0]], strict=True)]
    found = []
    for name, parts in (("one", [whole]), ("many", strips)):
        with TensorFileWriter(tmp_path / name, [("x", whole.dtype, shape)]) as file:
            found.append(file.write_strips("x", iter(parts)))
    assert found[0] == found[1]
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()
