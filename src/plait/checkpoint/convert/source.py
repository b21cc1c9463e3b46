"""A checkpoint of any kind, opened for reading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from plait.checkpoint.manifest import NAME


class Entry(NamedTuple):
    """What is known of a tensor without reading it."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.shape.numel() * self.dtype.itemsize


class Source(ABC):
    """Names and shapes at once, values one tensor at a time: a conversion never holds the whole.

    Names are Plait's, whatever wrote the checkpoint: `model.<parameter>`, `optim.<parameter>.<key>` with the keys of
    torch's optimizers (`exp_avg`, `exp_avg_sq`, `step`). Parameter names stay as the writer had them.
    """

    kind: str
    """`plait`, `hf`, `torch`, `deepspeed`, `megatron` or `dcp`."""
    path: Path
    entries: Mapping[str, Entry]
    state: Mapping[str, Any]
    """What is no tensor and has a meaning in Plait: `engine` ({steps, skips_in_a_row, scaler}), `config`, … or {}."""
    facts: Mapping[str, str]
    """What a reader wants to know of it besides: who wrote it, at which step, for how many ranks."""

    @property
    def description(self) -> Path:
        """The file that `state` was read from, for messages; the checkpoint itself where it has no manifest."""
        manifest = self.path / NAME
        return manifest if manifest.is_file() else self.path

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One whole tensor, on the CPU. It may be a view of a file: never write to it."""

    def verify(self) -> str:
        """Read all of it, and say what that has shown. Damage is a `CheckpointError` that names the file."""
        for name in self.entries:
            self.read(name)
        return f"{len(self.entries)} tensors are there, to the last byte; there are no checksums to compare them with"

    @abstractmethod
    def close(self) -> None:
        """Let go of the files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
