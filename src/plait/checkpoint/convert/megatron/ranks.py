"""The format `torch`: a file for each rank, in which layers are counted from 0 in each pipeline stage."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.convert.megatron.folder import Coordinates, rank_files
from plait.checkpoint.convert.megatron.whole import IGNORED, LAYER, Arguments, Whole
from plait.checkpoint.convert.pickled import Stored, open_file
from plait.checkpoint.convert.source import Entry
from plait.errors import CheckpointError

_ROWS = re.compile(r"(?:word_embeddings|output_layer|linear_qkv|linear_fc1)\.(?:weight|bias)$")
"""Cut along their first dimension."""
_COLUMNS = re.compile(r"(?:linear_proj|linear_fc2)\.weight$")
"""Cut along their second one."""
_EXPERT = re.compile(r"(\.mlp\.experts\.local_experts\.)(\d+)\.")

Parts = dict[str, list[Stored]]
"""Of each tensor, what the ranks along the tensor axis hold."""


def read_ranks(path: Path) -> Whole:
    """Open an iteration, and put together what its ranks hold."""
    files = rank_files(path)
    contents = {place: _content(file) for place, file in sorted(files.items())}
    args = Arguments(next(iter(contents.values())).get("args"), path)
    shape = _Shape(args)
    missing = [place for place in shape.places() if place not in contents]
    if missing:
        sizes = f"{shape.tensor} × {shape.pipeline} × {shape.experts} ranks (tensor, pipeline, experts)"
        raise CheckpointError(
            f"{path} was saved by {sizes}, and {_folder(missing[0])} is not there; copy all of its folders"
        )
    parts = _collect(contents, shape)
    gated = bool(args("swiglu", False))
    entries = {name: _entry(name, pieces) for name, pieces in parts.items()}

    def read(name: str) -> Tensor:
        return _join(name, [piece.read() for piece in parts[name]], gated=gated)

    step = str(next(iter(contents.values())).get("iteration", "unknown"))
    return Whole(path, entries, read, args, {"format": "torch", "step": step, "files": str(len(files))})


class _Shape:
    """How many ranks there are along each axis, and what their folders are called."""

    def __init__(self, args: Arguments) -> None:
        self.tensor = args.count("tensor_model_parallel_size")
        self.pipeline = args.count("pipeline_model_parallel_size")
        self.experts = args("expert_model_parallel_size", 1)
        split = args("expert_tensor_parallel_size", self.tensor)
        if args("num_experts") and split != self.tensor:
            raise CheckpointError(
                f"its experts are cut over {split} ranks and the rest over {self.tensor}; save it with "
                "--ckpt-format torch_dist, which can be read"
            )

    def place(self, tensor: int, stage: int, expert: int) -> Coordinates:
        """As the name of a rank's folder has them."""
        stages = (stage,) if self.pipeline > 1 else ()
        return (tensor, *stages, *((expert,) if self.experts > 1 else ()))

    def places(self) -> list[Coordinates]:
        """Those of all ranks."""
        return [
            self.place(tensor, stage, expert)
            for tensor in range(self.tensor)
            for stage in range(self.pipeline)
            for expert in range(self.experts)
        ]


def _folder(place: Coordinates) -> str:
    first, *others = place
    return "_".join([f"mp_rank_{first:02d}", *(f"{number:03d}" for number in others)])


def _content(file: Path) -> Mapping[str, Any]:
    found = open_file(file)
    if not isinstance(found, Mapping) or not _models(found):
        raise CheckpointError(f"{file} holds no model of Megatron: it lacks `model`")
    if any("language_model" in model for model in _models(found)):
        raise CheckpointError(
            f"{file} holds a model from before Megatron Core; convert it with Megatron-LM's tools/checkpoint/convert.py"
        )
    return found


def _models(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The model of a rank; with virtual stages, each of its pieces."""
    if isinstance(content.get("model"), Mapping):
        return [content["model"]]
    names = sorted((name for name in content if re.fullmatch(r"model\d+", name)), key=lambda name: int(name[5:]))
    return [content[name] for name in names]


def _collect(contents: Mapping[Coordinates, Mapping[str, Any]], shape: _Shape) -> Parts:
    parts: Parts = {}
    first_layer = 0
    pieces = len(_models(next(iter(contents.values()))))
    for piece in range(pieces):  # all ranks' first pieces come before any second one
        for stage in range(shape.pipeline):
            layers = 0
            for expert in range(shape.experts):
                ranks = [_models(contents[shape.place(t, stage, expert)])[piece] for t in range(shape.tensor)]
                found = _of_stage(ranks, first_layer, expert, shape)
                parts |= {name: held for name, held in found.items() if name not in parts}
                layers = _layers(ranks[0])
            first_layer += layers
    return parts


def _layers(model: Mapping[str, Any]) -> int:
    """How many layers a stage has."""
    return len({found[1] for name in model if (found := re.match(LAYER, name))})


def _of_stage(ranks: Sequence[Mapping[str, Any]], first_layer: int, expert: int, shape: _Shape) -> Parts:
    """What the ranks of one stage hold, under the names of the whole model."""
    here = {found[2] for name in ranks[0] if (found := _EXPERT.search(name))}

    def of_model(name: str) -> str:
        name = re.sub(LAYER, lambda found: f"decoder.layers.{first_layer + int(found[1])}.", name)
        return _EXPERT.sub(lambda found: f"{found[1]}{expert * len(here) + int(found[2])}.", name)

    named = [name for name, held in ranks[0].items() if isinstance(held, Stored) and not re.search(IGNORED, name)]
    return {of_model(name): [rank[name] for rank in ranks] for name in named}


def _entry(name: str, parts: Sequence[Stored]) -> Entry:
    first = parts[0]
    shape = list(first.shape)
    if _ROWS.search(name):
        shape[0] = sum(part.shape[0] for part in parts)
    elif _COLUMNS.search(name):
        shape[1] = sum(part.shape[1] for part in parts)
    return Entry(torch.Size(shape), first.dtype)


def _join(name: str, parts: Sequence[Tensor], *, gated: bool) -> Tensor:
    if _COLUMNS.search(name):
        return torch.cat(list(parts), dim=1)
    if not _ROWS.search(name):
        return parts[0]
    if gated and "linear_fc1" in name:  # each rank has its part of the gate, and below it its part of the rest
        return torch.cat([half for halves in zip(*(part.chunk(2) for part in parts), strict=True) for half in halves])
    return torch.cat(list(parts))
