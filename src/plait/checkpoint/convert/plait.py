"""Plait's own checkpoints, opened for conversion."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.convert.source import Source, TensorEntry
from plait.checkpoint.folder import CheckpointFolder
from plait.checkpoint.load import verify
from plait.checkpoint.manifest import TensorRecord, open_checkpoint, remedy
from plait.checkpoint.read import PieceReader, try_to_read
from plait.errors import CheckpointError


class PlaitSource(Source):
    """A Plait checkpoint, or the newest one in a folder of several or in a run's work_dir."""

    kind = "plait"

    def __init__(self, path: Path) -> None:
        folder = CheckpointFolder(path).find(str(path.absolute()))
        assert folder is not None
        checkpoint = open_checkpoint(folder)
        manifest = checkpoint.manifest
        self.path = folder
        self._checkpoint = checkpoint
        self._tensors = checkpoint.index.tensors
        self._reader = PieceReader(folder, checkpoint=checkpoint)
        self.entries = {name: TensorEntry(torch.Size(r.shape), r.dtype) for name, r in self._tensors.items()}
        self.state = manifest.state
        plait, torch_version = (manifest.versions.get(name, "unknown") for name in ("plait", "torch"))
        self.facts = {
            "written by": f"Plait {plait}, torch {torch_version}",
            "step": str(manifest.step),
            "ranks": str(manifest.world_size),
        }

    def read(self, name: str) -> Tensor:
        """Return one whole tensor, assembled from its pieces."""
        record = self._tensors[name]
        whole = torch.empty(record.shape, dtype=record.dtype)
        problem = try_to_read(self._fill, whole, record)
        if problem is not None:
            raise CheckpointError(f"the checkpoint is damaged: {problem}\n{remedy(self.path)}")
        return whole

    def _fill(self, whole: Tensor, record: TensorRecord) -> None:
        for stored in record.pieces:
            inside = tuple(slice(a, a + n) for a, n in zip(stored.start, stored.shape, strict=True))
            target = whole[inside] if inside else whole
            self._reader.copy(stored, record.dtype, (0,) * len(inside), stored.shape, target)

    def verify(self) -> str:
        """Compare every byte with its checksum. Return a summary, or raise `CheckpointError` on damage."""
        verify(self._checkpoint)
        count = len(self._checkpoint.manifest.files) + 1  # the manifest itself was verified when it was opened
        return f"{count} files are as they were written: the checksum of every byte agrees"

    def close(self) -> None:
        """Close the files."""
        self._reader.close()
