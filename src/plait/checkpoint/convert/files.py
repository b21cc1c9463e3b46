"""Tensors in one file, by name, read one at a time into memory of their own.

Files are read and not mapped: pages of a mapped file stay with the process until somebody else needs the memory,
so a conversion would seem to, and under a limit really would, hold all that it has passed.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.convert.pickled import Stored, asks_for, open_file
from plait.checkpoint.convert.source import Entry
from plait.checkpoint.tensorfile import as_bytes, read_all, read_slots
from plait.errors import CheckpointError


class SafetensorsFile:
    """A safetensors file, of any writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._slots = read_slots(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is not a whole safetensors file ({error}); copy it again") from error
        self.entries = {name: Entry(torch.Size(slot.shape), slot.dtype) for name, slot in self._slots.items()}
        self._file = os.open(path, os.O_RDONLY)

    def read(self, name: str) -> Tensor:
        """One whole tensor."""
        slot = self._slots[name]
        return read_bytes(self._file, slot.begin, Entry(torch.Size(slot.shape), slot.dtype), self.path)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


Found = Stored | Tensor
"""A tensor of a file of `torch.save`: where it lies, or, in the oldest format, itself."""


class TorchFile:
    """A file of `torch.save`, whose tensors are found, not loaded. No pickle in it is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = open_file(path, strict=True) if zipfile.is_zipfile(path) else load_values(path)
        """What was saved, with a `Found` in place of each tensor."""

    def close(self) -> None:
        """Nothing is open between two reads."""


def read_found(found: Found) -> Tensor:
    """The values of a tensor."""
    return found.detach() if isinstance(found, Tensor) else found.read()


def load_values(path: Path) -> Any:
    """All of a file of `torch.save` that holds numbers, texts and tensors. One that asks for code is refused by name.

    The format from before torch 1.6, which was no archive, can only be loaded so.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # torch raises whatever the unpickler did
        raise refusal(path, error) from error


def refusal(path: Path, error: Exception, what: str = "it") -> CheckpointError:
    """What to say where torch did not open a file, or a part of one."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    if found:
        return asks_for(path, found[1])
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CheckpointError(f"{path}: {what} is not whole, or not of torch.save ({first}); copy it again")


def tensors_in(content: Any) -> list[Found]:
    """Every tensor in nested containers."""
    if isinstance(content, Found):
        return [content]
    if isinstance(content, Mapping):
        content = list(content.values())
    if isinstance(content, (list, tuple)):
        return [tensor for part in content for tensor in tensors_in(part)]
    return []


def read_bytes(file: int, begin: int, entry: Entry, path: Path) -> Tensor:
    """A tensor whose bytes lie in a file from `begin` on."""
    if begin < 0 or begin + entry.bytes > os.fstat(file).st_size:  # looked at before there is memory for it
        raise CheckpointError(f"{path} is truncated: it ends before byte {begin + entry.bytes}; copy it again")
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    if entry.bytes and not read_all(file, as_bytes(tensor), begin):
        raise CheckpointError(f"{path} is truncated: it ends before byte {begin + entry.bytes}; copy it again")
    return tensor
