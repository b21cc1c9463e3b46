"""What checkpoints take of a host is what the code that writes and reads them takes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait.checkpoint import SavedTensor, checkpoint_memory, saved_tensor, write_single_process
from plait.checkpoint.manifest import open_checkpoint
from plait.checkpoint.memory import READERS, WRITERS, thread_count
from plait.checkpoint.pieces import Piece, Staging, assign_writes, copy_bytes, held_pieces
from plait.checkpoint.read import READ_BUFFER, PieceReader
from plait.checkpoint.tensorfile import BLOCK

HOST = {"cores": 64, "ranks": 8}


def some_tensors(count: int = 20) -> dict[str, Tensor]:
    shapes = ((random.randint(1, 40), random.randint(1, 40)) for _ in range(count))
    return {f"t{index}": torch.randn(shape) for index, shape in enumerate(shapes)}


def test_a_save_in_the_background_copies_what_is_needed_for_it() -> None:
    tensors = some_tensors()
    copies = Staging().copy(held_pieces(tensors))
    needed = checkpoint_memory([saved_tensor(tensor, 1) for tensor in tensors.values()], **HOST, background=True)
    assert sum(copy.tensor.nbytes for copy in copies) == needed.copied == needed.written


def test_ranks_that_hold_the_same_write_an_even_share_of_it_each() -> None:
    ranks = random.choice([2, 3, 4])
    sizes = [random.randint(1, 1000) for _ in range(200)]
    pieces = [Piece(f"t{index}", torch.float32, (size,), (0,), (size,)) for index, size in enumerate(sizes)]
    needed = checkpoint_memory([saved_tensor(torch.empty(size), ranks) for size in sizes], **HOST, background=False)
    for mine in assign_writes([pieces] * ranks):
        assert sum(pieces[index].bytes for index in mine) == pytest.approx(needed.written, abs=max(sizes) * 4)


def test_what_torch_pins_comes_in_powers_of_two() -> None:
    assert copy_bytes(5 * 2**20, pinned=True) == 8 * 2**20
    assert copy_bytes(8 * 2**20, pinned=True) == 8 * 2**20
    assert copy_bytes(5 * 2**20, pinned=False) == 5 * 2**20


def test_a_rectangle_that_is_cut_out_is_read_by_way_of_a_room(tmp_path: Path) -> None:
    whole = torch.randn(random.randint(2, 30), 8)
    write_single_process(tmp_path / "c", {"w": (whole.shape, whole.dtype)}, lambda _: whole, {}, step=1)
    record = open_checkpoint(tmp_path / "c").index.tensors["w"]
    target, straight = torch.empty(len(whole), 3), torch.empty_like(whole)
    with PieceReader(tmp_path / "c") as reader:
        reader.copy(record.pieces[0], record.dtype, (0, 0), tuple(whole.shape), straight)
        assert not hasattr(reader._thread_local, "buffer")
        reader.copy(record.pieces[0], record.dtype, (0, 2), (len(whole), 5), target)
        assert reader._thread_local.buffer.nbytes == READ_BUFFER
    assert torch.equal(straight, whole)
    assert torch.equal(target, whole[:, 2:5])


def test_tensors_of_a_device_pass_through_a_room_of_each_thread() -> None:
    on_device = [SavedTensor(4096, 1, on_device=True)] * 100
    needed = checkpoint_memory(on_device, **HOST, background=False)
    assert needed.writing == BLOCK * thread_count(WRITERS, **HOST)
    assert needed.reading == copy_bytes(READ_BUFFER, pinned=True) * thread_count(READERS, **HOST)
    on_host = checkpoint_memory([entry._replace(on_device=False) for entry in on_device], **HOST, background=False)
    assert (on_host.writing, on_host.reading) == (0, 0)
    assert checkpoint_memory(on_device, **HOST, background=True).writing == 0  # the copy is on the host
