"""Whole weights in files of other tools, and the folders of checkpoints."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import CheckpointError, ConfigError, Problem
from plait.frontends.accelerate.plugins import ProjectConfiguration
from plait.frontends.accelerate.prepared import PreparedModel
from plait.world import World, is_sharded, on_main

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_NAMED = re.compile(r"checkpoint_(\d+)")


class Removable:
    """A hook in its list, until it is removed."""

    def __init__(self, hooks: list[Any], hook: Any) -> None:
        self._hooks, self._hook = hooks, hook
        hooks.append(hook)

    def remove(self) -> None:
        """Take it out."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


def is_spread(model: nn.Module) -> bool:
    """Whether no rank alone has all of a model's weights."""
    module = model.module if isinstance(model, PreparedModel) else model
    return any(is_sharded(param) for param in module.parameters())


def whole(model: nn.Module, world: World, *, trained_only: bool = False) -> dict[str, Tensor]:
    """The whole weights of a model under its own names, on the host; empty on other ranks where they are spread."""
    module = model.module if isinstance(model, PreparedModel) else model
    values = module.state_dict(keep_vars=True)  # first: it lets go of wholes that a call past the engine has left
    updated: dict[int, Tensor] = {}
    if isinstance(model, PreparedModel) and model.engine is not None:
        tensors = model.engine.state_tensors()
        for name, param in model.engine.model.named_parameters():
            updated[id(param)] = tensors[f"model.{name}"]
    result: dict[str, Tensor] = {}
    spread = False
    for name, value in values.items():
        if trained_only and not value.requires_grad:
            continue
        tensor: Any = updated.get(id(value), value)
        if is_sharded(tensor):
            spread = True
            tensor = tensor.full_tensor()
        if not spread or world.is_main:
            result[name] = tensor.detach().cpu()
    return result if not spread or world.is_main else {}


def write(state: dict[str, Tensor], folder: Path, limit: int | str, *, safe: bool) -> None:
    """Write weights as Hugging Face tools read them; tensors that share their storage are written once."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    seen: dict[int, str] = {}
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if seen.setdefault(tensor.untyped_storage().data_ptr(), name) != name and tensor.numel():
            continue
        bytes_ = tensor.numel() * tensor.element_size()
        if parts[-1] and size + bytes_ > _size(limit):
            parts.append({})
            size = 0
        parts[-1][name] = tensor.contiguous()
        size += bytes_
    names = [f"{stem}.{ending}"]
    if len(parts) > 1:
        names = [f"{stem}-{number:05d}-of-{len(parts):05d}.{ending}" for number in range(1, len(parts) + 1)]
        places = {name: file for file, part in zip(names, parts, strict=True) for name in part}
        total = sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    for name, part in zip(names, parts, strict=True):
        write_object(part, folder / name, safe=safe)


def write_object(value: Any, path: Path, *, safe: bool) -> None:
    """Write one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if safe:
        from safetensors.torch import save_file

        save_file(value, path, metadata={"format": "pt"})
    else:
        torch.save(value, path)


def _size(limit: int | str) -> int:
    if isinstance(limit, int):
        return limit
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMG]?I?B?)\s*", limit.upper())
    if found is None or found[2] not in _UNITS:
        raise ConfigError(Problem("max_shard_size", f"{limit!r} is no size", "Write 10GB or 500MiB."))
    return int(float(found[1]) * _UNITS[found[2]])


# ---- folders that `ProjectConfiguration` names


def next_folder(project: ProjectConfiguration, given: str | Path | None, world: World) -> Path:
    """Where to save: the folder that was given, or the next one of the project; the oldest ones are removed."""
    if not project.automatic_checkpoint_naming:
        if given is None:
            raise ConfigError(Problem("output_dir", "save_state was given no folder", "Name one."))
        return Path(given)
    root = _root(project)
    kept = sorted(_numbered(root)) if world.is_main else []
    if world.is_main and project.total_limit is not None and len(kept) >= project.total_limit:
        for _, folder in kept[: len(kept) - project.total_limit + 1]:
            shutil.rmtree(folder)
    target = root / f"checkpoint_{project.iteration}"
    if on_main(world, target.exists):
        raise CheckpointError(f"{target} exists already; set ProjectConfiguration(iteration=…) to go on counting")
    return target


def last_folder(project: ProjectConfiguration, given: str | Path | None, world: World) -> Path:
    """Where to load from: the folder that was given, or the newest one of the project."""
    if given is not None:
        return Path(given)
    if not project.automatic_checkpoint_naming:
        raise ConfigError(Problem("input_dir", "load_state was given no folder", "Name one."))
    found = on_main(world, lambda: sorted(_numbered(_root(project))))
    if not found:
        raise CheckpointError(f"there is no checkpoint in {_root(project)}")
    return found[-1][1]


def _root(project: ProjectConfiguration) -> Path:
    if project.project_dir is None:
        raise ConfigError(Problem("project_dir", "automatic_checkpoint_naming needs one", "Name a folder."))
    return Path(project.project_dir) / "checkpoints"


def _numbered(root: Path) -> list[tuple[int, Path]]:
    found = [(_NAMED.fullmatch(each.name), each) for each in root.iterdir()] if root.is_dir() else []
    return [(int(match[1]), each) for match, each in found if match]
