"""Folders of `torch.distributed.checkpoint`, as FSDP writes them: model and optimizer, found by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.checkpoint.convert.chunks import Chunks
from plait.checkpoint.convert.names import STEP_WORDS, engine_state, guessed_paths, plait_name, without_wrapper
from plait.checkpoint.convert.source import Source
from plait.config import read_json_object
from plait.errors import CheckpointError


class DcpSource(Source):
    """A checkpoint of `torch.distributed.checkpoint`: model and optimizer under the names that torch gives them.

    The folders that Plait itself wrote before it had a format of its own are of this kind too.
    """

    kind = "dcp"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._chunks = chunks = Chunks(path)
        manifest = _old_manifest(path)
        if manifest is None:
            guessed = guessed_paths(chunks.names) if not chunks.paths else {}
            names = {n: plait_name(chunks.paths.get(n) or guessed.get(n, (n,))) for n in chunks.tensors}
        else:
            names = {stored: stored for stored in chunks.tensors}
        self._stored = _ours(names)
        self.entries = {name: chunks.tensors[stored] for name, stored in self._stored.items()}
        self.state = {} if manifest is None else dict(manifest.get("state") or {})
        left = sorted(stored for stored, name in names.items() if name is None)
        self.facts = self._facts(manifest, left)
        if not self.state:
            self.state = engine_state(self, self._steps())

    def _facts(self, manifest: Mapping[str, Any] | None, left: Sequence[str]) -> dict[str, str]:
        facts = {"files": str(self._chunks.files)}
        if manifest is not None:
            facts["written by"] = f"Plait {manifest.get('versions', {}).get('plait', '?')}, format 1"
            facts["step"] = str(manifest.get("step"))
            facts["ranks"] = str(manifest.get("world_size"))
        if left:
            facts["left out"] = f"{len(left)} tensors of neither model nor optimizer: {', '.join(left[:3])}" + (
                ", …" if len(left) > 3 else ""
            )
        return facts

    def read(self, name: str) -> Tensor:
        """One whole tensor; of its chunks, one is in memory at a time."""
        return self._chunks.read(self._stored[name])

    def _steps(self) -> int | None:
        """What a number beside the tensors says."""
        for word in STEP_WORDS:
            value = self._chunks.value(word)
            if value is not None:
                return value if isinstance(value, int) else None
        return None

    def close(self) -> None:
        """Nothing is open between two reads."""


def _ours(names: Mapping[str, str | None]) -> dict[str, str]:
    """Our name → the stored one."""
    known = {stored: name for stored, name in names.items() if name is not None}
    model = {stored: name for stored, name in known.items() if name.startswith("model.")}
    optim = {stored: name for stored, name in known.items() if name.startswith("optim.")}
    return {name: stored for stored, name in {**known, **without_wrapper(model), **without_wrapper(optim)}.items()}


def _old_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest that Plait wrote beside such a checkpoint."""
    file = path / "manifest.json"
    if not file.is_file():
        return None
    found = read_json_object(file, CheckpointError)
    return found if found.get("format") == 1 else None
