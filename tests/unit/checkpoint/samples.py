"""A small model's state, and checkpoints of it as each framework would write them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from plait.checkpoint.convert.source import Source
from plait.checkpoint.manifest import MANIFEST_NAME
from plait.checkpoint.pieces import Piece
from plait.checkpoint.save import _make_manifest, _write_manifest, _write_rank_file, write_single_process
from plait.checkpoint.tensorfile import digest

DESCRIPTION = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
STEPS = 7


def some_state() -> dict[str, Tensor]:
    """Entries in Plait's names, fresh at every call: weights of several kinds, and an Adam state of each."""
    model = {
        "model.embed_tokens.weight": torch.randn(11, 6),
        "model.layers.0.mlp.up_proj.weight": torch.randn(8, 6),
        "model.layers.1.mlp.up_proj.weight": torch.randn(8, 6),
        "model.norm.weight": torch.randn(6).bfloat16(),
        "lm_head.weight": torch.randn(11, 6),
    }
    found = {f"model.{name}": tensor for name, tensor in model.items()}
    for name, tensor in model.items():
        found[f"optim.{name}.exp_avg"] = torch.randn(tensor.shape)
        found[f"optim.{name}.exp_avg_sq"] = torch.rand(tensor.shape)
        found[f"optim.{name}.step"] = torch.tensor(float(STEPS))
    return found


def model_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights, without `model.`."""
    return {name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.")}


def optimizer_of(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """As `get_optimizer_state_dict` gives it."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if name.startswith("optim."):
            parameter, _, key = name.removeprefix("optim.").rpartition(".")
            found.setdefault(parameter, {})[key] = tensor
    return {"state": found, "param_groups": [{"params": list(found), "lr": 0.1}]}


def write_hf(folder: Path, state: Mapping[str, Tensor]) -> Path:
    folder.mkdir()
    save_file(model_of(state), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(DESCRIPTION))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_torch_file(path: Path, state: Mapping[str, Tensor]) -> Path:
    torch.save({"model": model_of(state), "optimizer": optimizer_of(state), "step": STEPS}, path)
    return path


def write_dcp(folder: Path, content: Mapping[str, Any]) -> Path:
    from torch.distributed.checkpoint import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process, which it is
        save(dict(content), checkpoint_id=folder, no_dist=True)
    return folder


def write_fsdp(folder: Path, state: Mapping[str, Tensor]) -> Path:
    return write_dcp(folder, {"model": model_of(state), "optim": optimizer_of(state), "step": STEPS})


def write_plait(folder: Path, state: Mapping[str, Tensor], **more: Any) -> Path:
    entries = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
    about = {"engine": {"steps": STEPS, "skips_in_a_row": 0, "scaler": None}, **more}
    write_single_process(folder, entries, state.__getitem__, about, step=STEPS)
    return folder


def contents(source: Source) -> dict[str, Tensor]:
    """Everything in a source; what it said of each tensor must hold."""
    found = {name: source.read(name) for name in source.entries}
    for name, tensor in found.items():
        assert (tensor.shape, tensor.dtype) == tuple(source.entries[name]), name
    return found


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def reseal(
    folder: Path,
    change: Callable[[dict[str, Any]], object] | None = None,
    *,
    manifest: Callable[[dict[str, Any]], object] | None = None,
    text: str | None = None,
) -> None:
    """Change the index or the manifest of a checkpoint, and write valid digests: what only ill intent does."""
    index, about = json.loads((folder / "index.json").read_text()), json.loads((folder / MANIFEST_NAME).read_text())
    if change is not None:
        change(index)
    content = (text or json.dumps(index)).encode()
    (folder / "index.json").write_bytes(content)
    about["files"]["index.json"] = {"bytes": len(content), "digest": digest(content)}
    if manifest is not None:
        manifest(about)
    del about["digest"]
    own = digest(json.dumps(about, sort_keys=True).encode())
    (folder / MANIFEST_NAME).write_text(json.dumps({**about, "digest": own}))


def two_ranks_tensors() -> dict[str, Tensor]:
    return {"model.a": torch.randn(4, 6), "model.b": torch.randn(4, 6), "model.c": torch.tensor(1.5)}


def write_as_two_ranks(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """As two ranks write it: `model.a` in two halves of rows, `model.b` in four quarters."""
    folder.mkdir()

    def piece(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Piece:
        return Piece(name, torch.float32, tuple(tensors[name].shape), start, shape)

    ranks = [
        [piece("model.a", (0, 0), (2, 6)), piece("model.b", (0, 0), (2, 3)), piece("model.b", (2, 3), (2, 3))],
        [
            piece("model.a", (2, 0), (2, 6)),
            piece("model.b", (0, 3), (2, 3)),
            piece("model.b", (2, 0), (2, 3)),
            piece("model.c", (), ()),
        ],
    ]

    def part(piece: Piece) -> list[Tensor]:
        inside = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
        return [tensors[piece.name][inside].contiguous() if inside else tensors[piece.name]]

    written = [
        _write_rank_file(folder / f"rank-{rank:05d}.safetensors", [(piece, partial(part, piece)) for piece in pieces])
        for rank, pieces in enumerate(ranks)
    ]
    _write_manifest(folder, *_make_manifest(folder, written, {}, step=STEPS, world_size=2))
    return folder
