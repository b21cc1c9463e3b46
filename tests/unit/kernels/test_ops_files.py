"""Tensors in files: what is read is what was written, whatever the alignment; trouble has a name."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from tests.refusals import refused

from plait.errors import TrainingError
from plait.kernels import pinned
from plait.kernels.direct_io import FileQueue, TensorFile
from plait.kernels.pinned import ALIGNMENT, host_empty, rounded

REQUEST = 8 * ALIGNMENT


@pytest.fixture
def queue() -> FileQueue:
    return FileQueue(in_flight=3, request_bytes=REQUEST)


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One that usually takes direct I/O, and one in memory, which may not."""
    if request.param == "disk":
        return tmp_path
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK):
        pytest.skip("no file system in memory")
    return place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("aligned", [True, False])
def test_a_tensor_comes_back_bit_for_bit(queue: FileQueue, folder: Path, dtype: torch.dtype, aligned: bool) -> None:
    file = TensorFile.scratch(queue, folder, 1 << 20)
    places, given = 0, []
    for numel in (1, 7, ALIGNMENT, REQUEST // dtype.itemsize, 3 * REQUEST // dtype.itemsize + 5):
        bits = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
        tensor = host_empty(numel, dtype=dtype) if aligned else torch.empty(numel + 1, dtype=dtype)[1:]
        tensor.view(torch.uint8).copy_(bits)
        given.append((places, tensor, file.write_from(tensor, places)))
        places += rounded(bits.numel())
    for at, tensor, written in given:
        written.wait()
        assert written.done()
        found = torch.empty_like(tensor)
        file.read_into(found, at).wait()
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    file.close()


def test_a_buffered_file_says_why(queue: FileQueue, folder: Path) -> None:
    file = TensorFile.scratch(queue, folder, ALIGNMENT)
    assert file.direct == (not file.buffered_because)
    assert file.direct or "direct I/O" in file.buffered_because
    file.close()


def test_a_scratch_file_leaves_nothing_behind_even_while_it_is_open(queue: FileQueue, tmp_path: Path) -> None:
    file = TensorFile.scratch(queue, tmp_path / "new" / "folder", 1 << 20)
    file.write_from(torch.ones(1 << 18), 0).wait()
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    file.close()


def test_a_named_file_is_kept_with_what_is_in_it(queue: FileQueue, tmp_path: Path) -> None:
    path, tensor = tmp_path / "states", torch.randn(3000)
    first = TensorFile.at(queue, path, 12_000)
    first.write_from(tensor, 0).wait()
    first.close()
    second = TensorFile.at(queue, path, 12_000)
    found = torch.empty(3000)
    second.read_into(found, 0).wait()
    second.close()
    assert torch.equal(found, tensor)


def test_more_than_the_disk_has_free_is_refused_before_anything_is_written(queue: FileQueue, tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with refused(TrainingError, tmp_path / "states", f"{(free + (1 << 40)) / 2**30:.2f} GiB"):
        TensorFile.at(queue, tmp_path / "states", free + (1 << 40))
    assert (tmp_path / "states").stat().st_size == 0


def test_space_is_reserved_when_the_file_is_made(queue: FileQueue, tmp_path: Path) -> None:
    TensorFile.at(queue, tmp_path / "states", 1 << 20).close()
    assert (tmp_path / "states").stat().st_blocks * 512 >= 1 << 20


def test_a_file_that_someone_shortened_is_named_in_the_error(queue: FileQueue, tmp_path: Path) -> None:
    file = TensorFile.at(queue, tmp_path / "states", 1 << 20)
    os.truncate(tmp_path / "states", REQUEST)
    transfer = file.read_into(torch.empty(1 << 18), 0)
    with refused(TrainingError, tmp_path / "states", f"byte {REQUEST}", "read"):
        transfer.wait()
    file.close()


def test_an_error_of_the_disk_is_named_and_waits_for_the_other_requests(queue: FileQueue, tmp_path: Path) -> None:
    file = TensorFile.at(queue, tmp_path / "states", 1 << 20)
    file.close()  # the descriptor is gone: every request fails
    transfer = file.write_from(torch.empty(1 << 18), 0)
    with refused(TrainingError, tmp_path / "states", "write", f"{REQUEST} bytes", "errno 9"):
        transfer.wait()
    assert transfer.done()


def test_many_transfers_share_the_same_few_threads(tmp_path: Path) -> None:
    with FileQueue(in_flight=2, request_bytes=REQUEST) as queue:
        file = TensorFile.scratch(queue, tmp_path, 64 * REQUEST)
        tensors = [torch.full((REQUEST,), index, dtype=torch.uint8) for index in range(64)]
        for transfer in [file.write_from(tensor, index * REQUEST) for index, tensor in enumerate(tensors)]:
            transfer.wait()
        found = torch.empty(64, REQUEST, dtype=torch.uint8)
        file.read_into(found, 0).wait()
        file.close()
    assert torch.equal(found, torch.stack(tensors))


def test_pages_are_there_before_they_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def resident(address: int, size: int) -> None:
        """Count the pages of a range that the system has made, as CUDA would find them."""
        libc = ctypes.CDLL(None, use_errno=True)
        pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
        seen.append(sum(page & 1 for page in pages))

    monkeypatch.setattr(pinned._Pages, "pin", lambda _, address, size: resident(address, size))
    for size in (random.randint(1, 1 << 16), random.randint(20 << 20, 40 << 20)):  # by one thread, and by several
        tensor = host_empty(size, dtype=torch.uint8, pinned=True)
        assert seen.pop() == rounded(size) // mmap.PAGESIZE
        assert not tensor.any()


def test_a_tensor_with_one_number_in_a_row_is_written_whatever_its_stride(queue: FileQueue, folder: Path) -> None:
    tensor = torch.randn(()).expand(1)
    assert tensor.is_contiguous()
    assert tensor.stride() == (0,)
    file = TensorFile.scratch(queue, folder, ALIGNMENT)
    file.write_from(tensor, 0).wait()
    found = torch.empty(1)
    file.read_into(found, 0).wait()
    assert torch.equal(found, tensor)
