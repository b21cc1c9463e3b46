"""`deepspeed.utils.zero_to_fp32`: full fp32 weights from a checkpoint, in one process.

Reads checkpoints of this front end and of DeepSpeed itself; no code in the files is executed. The command replaces
DeepSpeed's script: `python -m plait.frontends.deepspeed.utils.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.atomic_write import staging_path
from plait.checkpoint import Source, open_source
from plait.config import read_name
from plait.errors import CheckpointError, PlaitError
from plait.frontends.deepspeed.saving import LATEST

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

PathText = str | os.PathLike[str]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: PathText,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return all weights of a checkpoint, in host memory, shared ones under each name; floating-point ones in fp32."""
    if lazy_mode:
        raise CheckpointError("lazy_mode is not offered: tensors are read one after another, and kept")
    with open_source(_folder(checkpoint_dir, tag)) as source:
        return _weights(source, exclude_frozen=exclude_frozen_parameters, dtype=torch.float32)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: PathText, tag: str | None = None
) -> nn.Module:
    """Move a model to host memory, load the weights of a checkpoint into it, and return it."""
    model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: PathText,
    output_dir: PathText,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights to `pytorch_model.bin` or `model.safetensors`, or to several such files with an index."""
    with open_source(_folder(checkpoint_dir, tag)) as source:
        weights = _weights(source, exclude_frozen=exclude_frozen_parameters, dtype=dtype)
    if safe_serialization:
        weights = _without_aliases(weights)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    stem, ending = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    shards = _shards(weights, _bytes(max_shard_size))
    if len(shards) == 1:
        _write(shards[0], folder / f"{stem}.{ending}")
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.{ending}"
        _write(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(_size(tensor) for tensor in _without_aliases(weights).values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: PathText,
    output_dir: PathText,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Call `convert_zero_checkpoint_to_state_dict` with fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def _folder(checkpoint_dir: PathText, tag: str | None) -> Path:
    root = Path(checkpoint_dir)
    if tag is None:
        latest = root / LATEST
        if not latest.is_file():
            return root  # it may be the folder of a tag; if it is not, opening it raises
        tag = read_name(latest, CheckpointError)
    return root / tag


def _weights(source: Source, *, exclude_frozen: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    frozen: set[str] = set()
    if exclude_frozen:
        if "untrained" not in source.state:
            raise CheckpointError(f"{source.path} does not list the parameters that are not trained: leave it out")
        frozen = set(source.state["untrained"])
    weights: dict[str, Tensor] = OrderedDict()
    for key in source.entries:
        name = key.removeprefix("model.")
        if key.startswith("model.") and name not in frozen:
            tensor = source.read(key)
            weights[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor.clone()
    if not weights:
        raise CheckpointError(f"{source.path} has no weights")
    tied: dict[str, Any] = source.state.get("tied") or {}
    weights.update({name: weights[first] for name, first in tied.items() if first in weights})
    return weights


def _without_aliases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor under its first name alone: a safetensors file cannot have shared tensors."""
    seen: set[int] = set()
    return {name: tensor for name, tensor in weights.items() if not (id(tensor) in seen or seen.add(id(tensor)))}  # type: ignore[func-returns-value]


def _shards(weights: dict[str, Tensor], limit: int | None) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    shard_of: dict[int, dict[str, Tensor]] = {}
    used = 0
    for name, tensor in weights.items():
        if id(tensor) in shard_of:
            shard_of[id(tensor)][name] = tensor
            continue
        if limit is not None and shards[-1] and used + _size(tensor) > limit:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        shard_of[id(tensor)] = shards[-1]
        used += _size(tensor)
    return shards


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(size: str | int | None) -> int | None:
    """Return a size in bytes: `5GB` is 5 × 10⁹, `5GiB` 5 × 2³⁰; a number or None is returned unchanged."""
    if size is None or isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?)(i?)B\s*", size, re.IGNORECASE)
    if match is None:
        raise CheckpointError(f"max_shard_size {size!r} is not a size; write 5GB, 500MB or a number of bytes")
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _write(weights: dict[str, Tensor], path: Path) -> None:
    with staging_path(path) as temporary:
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file(
                {name: tensor.contiguous() for name, tensor in weights.items()}, temporary, metadata={"format": "pt"}
            )
        else:
            torch.save(weights, temporary)
        temporary.replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script; an error is printed without a traceback, with exit code 2."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32", description="Full fp32 weights from a checkpoint.")
    parser.add_argument("checkpoint_dir", help="folder of a checkpoint, or of several: then the latest")
    parser.add_argument("output_dir", help="folder to write to")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file (5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("--tag", "-t", help="which checkpoint of the folder")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="only what is trained")
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**vars(parser.parse_args(argv)))
    except PlaitError as error:
        print(f"plait: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
