"""`save_state` and `load_state`: a Plait checkpoint, which loads under any strategy and on any number of ranks.

The first engine's tensors have the same names as in the checkpoint of a `plait train` run. Tensors of other engines,
and the state of schedulers, loaders and registered objects, are stored as the state of a hook.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.checkpoint import Checkpoint, Entry, entries, load_into, open_checkpoint, save_checkpoint
from plait.config import RunConfig, to_dict
from plait.distributed import World, is_sharded, on_main, restore_rng_state, rng_state
from plait.engine import LoopEngine
from plait.errors import CheckpointError, ConfigError, Problem
from plait.frontends.accelerate.data_loader import GradientState, PreparedLoader
from plait.frontends.accelerate.optimizer import PreparedOptimizer
from plait.frontends.accelerate.prepared import PreparedModel
from plait.frontends.accelerate.utils.dataclasses import ProjectConfiguration

# State dictionaries are stored as JSON and tensors, not with pickle: loading a checkpoint cannot run code from it.


_MARK = "__plait__"


def pack(value: Any, tensors: MutableMapping[str, Tensor], path: str) -> Any:
    """Return `value` as a JSON value; add its tensors to `tensors`, named by `path` and their keys."""
    if isinstance(value, np.ndarray):
        return {_MARK: "array", "name": pack(torch.from_numpy(value.copy()), tensors, path)["name"]}
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().clone()
        return {_MARK: "tensor", "name": path}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (float, np.generic)):
        plain = value.item() if isinstance(value, np.generic) else value
        finite = not isinstance(plain, float) or math.isfinite(plain)
        return plain if finite else {_MARK: "float", "text": str(plain)}
    if isinstance(value, (list, tuple)):
        items = [pack(item, tensors, f"{path}.{index}") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_MARK: "tuple", "items": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: pack(item, tensors, f"{path}.{key}") for key, item in value.items()}
        numbered = enumerate(value.items())
        pairs = [[pack(k, tensors, f"{path}.k{i}"), pack(v, tensors, f"{path}.v{i}")] for i, (k, v) in numbered]
        return {_MARK: "mapping", "pairs": pairs}
    raise CheckpointError(
        f"{path} is a {type(value).__name__}; a state_dict may hold numbers, strings, tensors, arrays, and lists and "
        "mappings of those"
    )


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the original value of what `pack` returned."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_MARK):
        case "tensor":
            return tensors[value["name"]]
        case "array":
            return tensors[value["name"]].numpy()
        case "float":
            return float(value["text"])
        case "tuple":
            return tuple(unpack(item, tensors) for item in value["items"])
        case "mapping":
            return {unpack(key, tensors): unpack(item, tensors) for key, item in value["pairs"]}
        case _:
            return {key: unpack(item, tensors) for key, item in value.items()}


_HOOK = "accelerate"
PLACED = frozenset({"params", "param_names", "fused", "foreach"})
"""Keys of a parameter group that depend on the device, and are not saved."""


@dataclass(frozen=True, slots=True)
class PreparedObjects:
    """Everything that a script has prepared or registered: the content of a checkpoint."""

    config: RunConfig
    world: World
    optimizers: Sequence[PreparedOptimizer]
    schedulers: Sequence[Any]
    loaders: Sequence[PreparedLoader]
    objects: Sequence[Any]
    """The objects of `register_for_checkpointing`."""
    gradients: GradientState

    @property
    def engines(self) -> list[LoopEngine]:
        """The engine of each optimizer."""
        return [optimizer.engine for optimizer in self.optimizers]


def save(prepared: PreparedObjects, folder: Path) -> None:
    """Write a checkpoint to a folder. Every rank must call it."""
    on_main(prepared.world, lambda: _refuse_foreign(folder))
    for engine in prepared.engines:
        if engine.pending and not prepared.gradients.stepped:
            raise CheckpointError("save_state was called between backward and step: a checkpoint holds no gradients")
        engine.sync_buffers()
    with ExitStack() as stack:
        for engine in prepared.engines:
            stack.enter_context(engine.evaluation_weights())
        _save(prepared, folder)


def _save(prepared: PreparedObjects, folder: Path) -> None:
    tensors, packed = prepared.world.broadcast(_pack_objects(prepared))  # rank 0's are saved
    for index, engine in enumerate(prepared.engines):
        tensors.update({_stored_name(index, name): tensor for name, tensor in engine.state_entries().items()})
    for name, tensor in rng_state(prepared.world.device).items():
        tensors[f"rng.{prepared.world.rank}.{name}"] = tensor
    state = {
        "engine": prepared.engines[0].state() if prepared.engines else None,
        "epoch": prepared.loaders[0].iteration if prepared.loaders else 0,
        "step_in_epoch": prepared.loaders[0].position if prepared.loaders else 0,
        "config": _config(prepared),
        "hooks": {_HOOK: packed, **{f"engine{i}": e.state() for i, e in enumerate(prepared.engines) if i}},
    }
    step = prepared.engines[0].steps if prepared.engines else 0
    save_checkpoint(folder, tensors, state, step=step, world=prepared.world)


def load(prepared: PreparedObjects, folder: Path) -> None:
    """Load a checkpoint. Every rank must call it."""
    world = prepared.world
    on_main(world, lambda: _opened(folder).manifest.step)  # so that only one rank reports an invalid checkpoint
    checkpoint = _opened(folder)
    state = checkpoint.manifest.state
    packed = state["hooks"][_HOOK]
    _check_counts(prepared, packed, folder)
    wanted: dict[str, Entry] = {}
    for index, engine in enumerate(prepared.engines):
        engine.discard()
        engine.allocate_optimizer_state(entries(checkpoint.index, _stored_name(index, "optim.")))
        wanted.update({_stored_name(index, name): tensor for name, tensor in engine.state_entries().items()})
    generators = rng_state(world.device)
    same_world = checkpoint.manifest.world_size == world.size
    if same_world:
        wanted.update({f"rng.{world.rank}.{name}": tensor for name, tensor in generators.items()})
    state_tensors = _empty_tensors(checkpoint)
    wanted.update(state_tensors)
    load_into(checkpoint, wanted, world=world, ignore=("rng.",))
    if same_world:
        restore_rng_state(generators, world.device)
    for index, engine in enumerate(prepared.engines):
        engine.state_loaded()
        engine.restore(state["hooks"][f"engine{index}"] if index else state["engine"])
    _restore_objects(
        prepared, packed, {name.removeprefix(f"hook.{_HOOK}."): tensor for name, tensor in state_tensors.items()}
    )


def _opened(folder: Path) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    if _HOOK not in checkpoint.manifest.state.get("hooks", {}):
        raise CheckpointError(
            f"{folder} was not written by Accelerator.save_state; set `checkpoint.resume` of a run to resume from it"
        )
    return checkpoint


def _stored_name(index: int, name: str) -> str:
    """Return the name of an engine's tensor in a checkpoint; for the first engine, the same as in a run's."""
    return name if index == 0 else f"hook.engine{index}.{name}"


def _config(prepared: PreparedObjects) -> dict[str, Any]:
    config = to_dict(prepared.config)
    if prepared.optimizers:  # name the script's optimizer, not the one of the section
        config["optim"] = {"type": type(prepared.optimizers[0].optimizer).__name__}
    return config


def _refuse_foreign(folder: Path) -> None:
    """Raise `CheckpointError` if the folder has files but no checkpoint: saving would replace them."""
    if folder.exists() and not (folder / "manifest.json").exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} already holds other files; give the checkpoint a folder of its own")


# ---- state of schedulers, loaders, random generators and registered objects


def _pack_objects(prepared: PreparedObjects) -> tuple[dict[str, Tensor], dict[str, Any]]:
    loaders = [loader.state() for loader in prepared.loaders]
    content = {
        "groups": [groups_of(optimizer) for optimizer in prepared.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in prepared.schedulers],
        "loaders": [state for state, _ in loaders],
        "orders": [order for _, order in loaders],
        "objects": [value.state_dict() for value in prepared.objects],
        "step": prepared.gradients.step,
    }
    tensors: dict[str, Tensor] = {}
    packed = pack(content, tensors, "state")
    return {f"hook.{_HOOK}.{name}": tensor for name, tensor in tensors.items()}, packed


def _restore_objects(prepared: PreparedObjects, packed: Any, tensors: Mapping[str, Tensor]) -> None:
    content = unpack(packed, tensors)
    for optimizer, groups in zip(prepared.optimizers, content["groups"], strict=True):
        restore_groups(optimizer, groups)
    for scheduler, state in zip(prepared.schedulers, content["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    for loader, state, order in zip(prepared.loaders, content["loaders"], content["orders"], strict=True):
        loader.restore(state, order)
    for value, state in zip(prepared.objects, content["objects"], strict=True):
        value.load_state_dict(state)
    prepared.gradients.step = content["step"]


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of an optimizer's groups, without their parameters."""
    return [
        {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items() if key not in PLACED}
        for group in optimizer.param_groups
    ]


def restore_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Set an optimizer's groups to what `groups_of` returned."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved)


def _empty_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    stored = entries(checkpoint.index, f"hook.{_HOOK}.")
    return {f"hook.{_HOOK}.{name}": torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored.items()}


def _check_counts(prepared: PreparedObjects, packed: Mapping[str, Any], folder: Path) -> None:
    counts = {
        "groups": ("optimizers", len(prepared.optimizers)),
        "schedulers": ("schedulers", len(prepared.schedulers)),
        "loaders": ("data loaders", len(prepared.loaders)),
        "objects": ("registered objects", len(prepared.objects)),
    }
    for key, (noun, count) in counts.items():
        if len(packed[key]) != count:
            raise CheckpointError(
                f"{folder} holds {len(packed[key])} {noun}, but this script has prepared {count}: prepare the same "
                "objects, in the same order, before load_state"
            )


# Full weights in files that other tools read, and the folders of checkpoints.


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_NAMED = re.compile(r"checkpoint_(\d+)")


class Removable:
    """The handle of a registered hook: adds it to a list; `remove` removes it."""

    def __init__(self, hooks: list[Any], hook: Any) -> None:
        self._hooks, self._hook = hooks, hook
        hooks.append(hook)

    def remove(self) -> None:
        """Remove the hook."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


def is_sharded_model(model: nn.Module) -> bool:
    """Whether no single rank has all of a model's weights."""
    module = model.module if isinstance(model, PreparedModel) else model
    return any(is_sharded(param) for param in module.parameters())


def full_weights(model: nn.Module, world: World, *, trained_only: bool = False) -> dict[str, Tensor]:
    """Return the full weights of a model under its own names, on the host; if sharded, on rank 0 only."""
    module = model.module if isinstance(model, PreparedModel) else model
    values = module.state_dict(
        keep_vars=True
    )  # first: it reshards parameters that were unsharded by calling the module directly
    updated: dict[int, Tensor] = {}
    if isinstance(model, PreparedModel) and model.engine is not None:
        tensors = model.engine.state_tensors()
        for name, param in model.engine.model.named_parameters():
            updated[id(param)] = tensors[f"model.{name}"]
    result: dict[str, Tensor] = {}
    sharded = False
    for name, value in values.items():
        if trained_only and not value.requires_grad:
            continue
        tensor: Any = updated.get(id(value), value)
        if is_sharded(tensor):
            sharded = True
            tensor = tensor.full_tensor()
        if not sharded or world.is_main:
            result[name] = tensor.detach().cpu()
    return result if not sharded or world.is_main else {}


def write(state: dict[str, Tensor], folder: Path, limit: int | str, *, safe: bool) -> None:
    """Write weights in files that Hugging Face tools read; tensors that share their storage are written once."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    seen: dict[int, str] = {}
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if seen.setdefault(tensor.untyped_storage().data_ptr(), name) != name and tensor.numel():
            continue
        bytes_ = tensor.numel() * tensor.element_size()
        if files[-1] and size + bytes_ > _size(limit):
            files.append({})
            size = 0
        files[-1][name] = tensor.contiguous()
        size += bytes_
    names = [f"{stem}.{ending}"]
    if len(files) > 1:
        names = [f"{stem}-{number:05d}-of-{len(files):05d}.{ending}" for number in range(1, len(files) + 1)]
        weight_map = {name: file for file, file_tensors in zip(names, files, strict=True) for name in file_tensors}
        total = sum(
            tensor.numel() * tensor.element_size() for file_tensors in files for tensor in file_tensors.values()
        )
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    for name, file_tensors in zip(names, files, strict=True):
        write_object(file_tensors, folder / name, safe=safe)


def write_object(value: Any, path: Path, *, safe: bool) -> None:
    """Write an object to a file: with safetensors if `safe`, else with `torch.save`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if safe:
        from safetensors.torch import save_file

        save_file(value, path, metadata={"format": "pt"})
    else:
        torch.save(value, path)


def _size(limit: int | str) -> int:
    if isinstance(limit, int):
        return limit
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMG]?I?B?)\s*", limit.upper())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(Problem("max_shard_size", f"{limit!r} is not a size", "Write for example 10GB or 500MiB."))
    return int(float(match[1]) * _UNITS[match[2]])


# ---- folders that `ProjectConfiguration` names


def next_folder(project: ProjectConfiguration, given: str | Path | None, world: World) -> Path:
    """Return the folder to save to: the given one, or the project's next; remove its oldest beyond `total_limit`."""
    if not project.automatic_checkpoint_naming:
        if given is None:
            raise ConfigError(Problem("output_dir", "save_state needs a folder", "Pass output_dir."))
        return Path(given)
    root = _root(project)
    kept = sorted(_numbered(root)) if world.is_main else []
    if world.is_main and project.total_limit is not None and len(kept) >= project.total_limit:
        for _, folder in kept[: len(kept) - project.total_limit + 1]:
            shutil.rmtree(folder)
    target = root / f"checkpoint_{project.iteration}"
    if on_main(world, target.exists):
        raise CheckpointError(
            f"{target} already exists; set ProjectConfiguration(iteration=…) to continue the numbering"
        )
    return target


def last_folder(project: ProjectConfiguration, given: str | Path | None, world: World) -> Path:
    """Return the folder to load from: the given one, or the project's newest."""
    if given is not None:
        return Path(given)
    if not project.automatic_checkpoint_naming:
        raise ConfigError(Problem("input_dir", "load_state needs a folder", "Pass input_dir."))
    folders = on_main(world, lambda: sorted(_numbered(_root(project))))
    if not folders:
        raise CheckpointError(f"no checkpoint in {_root(project)}")
    return folders[-1][1]


def _root(project: ProjectConfiguration) -> Path:
    if project.project_dir is None:
        raise ConfigError(Problem("project_dir", "automatic_checkpoint_naming needs a folder", "Set project_dir."))
    return Path(project.project_dir) / "checkpoints"


def _numbered(root: Path) -> list[tuple[int, Path]]:
    matches = [(_NAMED.fullmatch(path.name), path) for path in root.iterdir()] if root.is_dir() else []
    return [(int(match[1]), path) for match, path in matches if match]
