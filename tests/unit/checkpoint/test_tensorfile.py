"""A file of tensors: ordinary safetensors, written piece by piece and read in any rectangle."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.refusals import refused
from torch import Tensor

from plait.checkpoint.manifest import StoredPiece
from plait.checkpoint.read import DamagedError, PieceReader
from plait.checkpoint.tensorfile import BLOCK, DTYPES, TensorFileWriter, read_slots


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


def write(path: Path, tensors: dict[str, Tensor]) -> dict[str, StoredPiece]:
    with TensorFileWriter(path, [(name, t.dtype, t.shape) for name, t in tensors.items()]) as file:
        order = random.sample(sorted(tensors), len(tensors))
        digests = {name: tuple(file.write(name, tensors[name])) for name in order}
        return {
            name: StoredPiece(path.name, file.slots[name].begin, (0,) * t.ndim, tuple(t.shape), digests[name])
            for name, t in tensors.items()
        }


def test_the_safetensors_library_reads_what_is_written_and_the_other_way_round(tmp_path: Path) -> None:
    tensors = {word: some(dtype, 3, random.randint(1, 9)) for word, dtype in DTYPES.items() if word != "C64"}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "turned": torch.randn(4, 6).T}
    path = tmp_path / "a.safetensors"
    write(path, tensors)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    slots = read_slots(path)
    assert {name: (slot.dtype, slot.shape) for name, slot in slots.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    assert all(slot.begin % slot.dtype.itemsize == 0 for slot in slots.values())


@pytest.mark.parametrize("shape", [(), (7,), (5, 4), (3, 4, 5), (2, 1, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_any_rectangle_can_be_read(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = some(dtype, *shape) if dtype is torch.uint8 else torch.randn(shape).to(dtype)
    stored = write(tmp_path / "a.safetensors", {"pad": some(torch.uint8, 3), "x": tensor})["x"]
    with PieceReader(tmp_path) as reader:
        for _ in range(20):
            low = tuple(random.randint(0, n - 1) for n in shape)
            high = tuple(random.randint(a + 1, n) for a, n in zip(low, shape, strict=True))
            wanted = tensor[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] if shape else tensor
            found = torch.empty(wanted.shape, dtype=dtype)
            reader.copy(stored, dtype, low, high, found)
            assert torch.equal(found, wanted), (low, high)
            if dtype is torch.bfloat16:  # another dtype, and memory that is not in one row
                wider = torch.empty((*wanted.shape, 2), dtype=torch.float32)[..., 0]
                reader.copy(stored, dtype, low, high, wider)
                assert torch.equal(wider, wanted.float())


def test_a_piece_of_many_blocks_is_read_in_part_and_only_that_part_is_checked(tmp_path: Path) -> None:
    rows, width = 3 * BLOCK // 4096 + 5, 1024
    tensor = torch.randn(rows, width)
    path = tmp_path / "a.safetensors"
    stored = write(path, {"x": tensor})["x"]
    assert len(stored.digests) == 4
    damaged = stored.begin + 2 * BLOCK + random.randrange(BLOCK)
    with path.open("r+b") as file:
        file.seek(damaged)
        byte = file.read(1)[0]
        file.seek(damaged)
        file.write(bytes([byte ^ 1]))
    with PieceReader(tmp_path) as reader:
        for low, high in ((0, 2 * BLOCK // 4096), (100, 4099), (3 * BLOCK // 4096, rows)):
            for first, last in ((0, width), (3, 700)):
                found = torch.empty(high - low, last - first)
                reader.copy(stored, torch.float32, (low, first), (high, last), found)
                assert torch.equal(found, tensor[low:high, first:last])
        third = stored.begin + 2 * BLOCK
        with refused(DamagedError, path, third, third + BLOCK):
            reader.copy(stored, torch.float32, (0, 0), (rows, width), torch.empty(rows, width))
        with refused(DamagedError, path, third, third + BLOCK):
            reader.check(stored, torch.float32)
