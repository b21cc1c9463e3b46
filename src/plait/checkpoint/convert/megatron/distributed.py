"""The format `torch_dist`: files of `torch.distributed.checkpoint`, in which layers and experts lie in stacks."""

from __future__ import annotations

import re
from pathlib import Path

from plait.checkpoint.convert.chunks import Chunks
from plait.checkpoint.convert.megatron.whole import IGNORED, Arguments, Whole
from plait.checkpoint.convert.pickled import open_file
from plait.checkpoint.convert.source import Entry

COMMON = "common.pt"
"""What is no tensor, and the same on all ranks."""
_STACK = re.compile(r"decoder\.layers\.(?!\d)")
_EXPERTS = ".mlp.experts.experts."
_NOT_MODEL = re.compile(rf"^(?:optimizer|rng_state|rerun_state_machine|chained_\d+)\b|{IGNORED}")

Place = tuple[str, tuple[int, ...]]
"""The tensor that was saved, and where in its first dimensions one of ours lies."""


def read_distributed(path: Path) -> Whole:
    """Open an iteration; each layer and each expert is a tensor of its own, wherever it lies."""
    chunks = Chunks(path)
    common = open_file(path / COMMON)
    places: dict[str, Place] = {}
    for stored, entry in chunks.tensors.items():
        if not _NOT_MODEL.search(stored):
            places |= _unstacked(stored, entry)
    entries = {
        name: Entry(chunks.tensors[stored].shape[len(index) :], chunks.tensors[stored].dtype)
        for name, (stored, index) in places.items()
    }
    facts = {"format": "torch_dist", "step": str(common.get("iteration", "unknown")), "files": str(chunks.files)}
    args = Arguments(common.get("args"), path / COMMON)
    return Whole(path, entries, lambda name: chunks.read(*places[name]), args, facts)


def _unstacked(stored: str, entry: Entry) -> dict[str, Place]:
    """Our tensors in one that was saved."""
    if _STACK.match(stored):
        rest = stored.removeprefix("decoder.layers.")
        layers: list[Place] = [(f"decoder.layers.{layer}.{rest}", (layer,)) for layer in range(entry.shape[0])]
    else:
        layers = [(stored, ())]
    found: dict[str, Place] = {}
    for name, index in layers:
        if _EXPERTS not in name:
            found[name] = stored, index
            continue
        before, after = name.split(_EXPERTS)
        for expert in range(entry.shape[len(index)]):
            found[f"{before}.mlp.experts.local_experts.{expert}.{after}"] = stored, (*index, expert)
    return found
