"""Tensors in one file, by name, read one at a time into memory of their own.

Files are read and not mapped: pages of a mapped file stay with the process until somebody else needs the memory,
so a conversion would seem to, and under a limit really would, hold all that it has passed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.convert.source import Entry
from plait.checkpoint.tensorfile import as_bytes, read_all, read_slots
from plait.errors import CheckpointError


class SafetensorsFile:
    """A safetensors file, of any writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._slots = read_slots(path)
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"{path} is no whole safetensors file ({error}); copy it again") from error
        end = max((slot.begin + slot.bytes for slot in self._slots.values()), default=0)
        if size < end:
            raise CheckpointError(f"{path} is truncated: it has {size} bytes of {end}; copy it again")
        self.entries = {name: Entry(torch.Size(slot.shape), slot.dtype) for name, slot in self._slots.items()}
        self._file = os.open(path, os.O_RDONLY)

    def read(self, name: str) -> Tensor:
        """One whole tensor."""
        slot = self._slots[name]
        return read_bytes(self._file, slot.begin, Entry(torch.Size(slot.shape), slot.dtype), self.path)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


class TorchFile:
    """A file of `torch.save`, whose tensors are found, not loaded. No pickle in it is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = _structure(path)
        """What was saved, with tensors of the meta device in place of the real ones (see `read_tensor`)."""
        self._file = os.open(path, os.O_RDONLY)

    def read_tensor(self, tensor: Tensor) -> Tensor:
        """The values of a tensor of `content`."""
        if tensor.device.type != "meta":
            return tensor.detach()
        storage = tensor.untyped_storage()
        begin = storage._checkpoint_offset
        assert begin is not None
        if tensor.is_contiguous():
            inside = int(tensor.storage_offset()) * tensor.dtype.itemsize
            return read_bytes(self._file, begin + inside, Entry(tensor.shape, tensor.dtype), self.path)
        whole = Entry(torch.Size([storage.nbytes() // tensor.dtype.itemsize]), tensor.dtype)
        flat = read_bytes(self._file, begin, whole, self.path)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).contiguous()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


def _structure(path: Path) -> Any:
    try:
        # On meta, so that nothing is read but where each tensor lies.
        content = torch.load(path, map_location="meta", weights_only=True, mmap=True)
        if sys.byteorder == "little" and all(_is_placed(tensor) for tensor in tensors_in(content)):
            return content
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # torch raises whatever the unpickler and the archive reader did
        if "mmap can only be used with files saved with" in str(error):
            return _old_structure(path)
        raise refusal(path, error) from error


def _old_structure(path: Path) -> Any:
    """The format from before torch 1.6 can only be loaded as a whole."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise refusal(path, error) from error


def refusal(path: Path, error: Exception, what: str = "it") -> CheckpointError:
    """What to say where torch did not open a file, or a part of one."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    if found:
        return CheckpointError(
            f"{path} asks for {found[1]}, and from a checkpoint no code is executed; nothing of it was run. "
            "If you trust it, load it with the program that wrote it, and save its state dict alone"
        )
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CheckpointError(f"{path}: {what} is not whole, or not of torch.save ({first}); copy it again")


def _is_placed(tensor: Tensor) -> bool:
    # A tensor that was saved on the meta device has no values at all; older torch does not say where one lies.
    return tensor.untyped_storage()._checkpoint_offset is not None


def tensors_in(content: Any) -> list[Tensor]:
    """Every tensor in nested containers."""
    if isinstance(content, Tensor):
        return [content]
    if isinstance(content, Mapping):
        content = list(content.values())
    if isinstance(content, (list, tuple)):
        return [tensor for part in content for tensor in tensors_in(part)]
    return []


def read_bytes(file: int, begin: int, entry: Entry, path: Path) -> Tensor:
    """A tensor whose bytes lie in a file from `begin` on."""
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    if entry.bytes and not read_all(file, as_bytes(tensor), begin):
        raise CheckpointError(f"{path} is truncated: it ends before byte {begin + entry.bytes}; copy it again")
    return tensor
