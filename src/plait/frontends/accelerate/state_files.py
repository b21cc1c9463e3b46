"""`save_state` and `load_state`: Plait's own checkpoint, so that it goes on under any strategy and number of ranks.

The first engine lies where a run's would; what a script has besides lies where hooks have their things.
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
from plait.frontends.accelerate.loader import GradientState, PreparedLoader
from plait.frontends.accelerate.plugins import ProjectConfiguration
from plait.frontends.accelerate.prepared import PreparedModel, PreparedOptimizer

# State dictionaries as JSON beside tensors: no pickle, so that a checkpoint can be read by anybody.


_MARK = "__plait__"


def pack(value: Any, tensors: MutableMapping[str, Tensor], path: str) -> Any:
    """`value` as JSON; its tensors go into `tensors` under their paths."""
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
        items = [pack(each, tensors, f"{path}.{index}") for index, each in enumerate(value)]
        return items if isinstance(value, list) else {_MARK: "tuple", "items": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: pack(each, tensors, f"{path}.{key}") for key, each in value.items()}
        pairs = [[pack(k, tensors, f"{path}.k{i}"), pack(v, tensors, f"{path}.v{i}")] for i, (k, v) in _pairs(value)]
        return {_MARK: "mapping", "pairs": pairs}
    raise CheckpointError(
        f"{path} is a {type(value).__name__}; a state_dict may hold numbers, texts, tensors, arrays, lists and "
        "mappings of those"
    )


def _pairs(value: Mapping[Any, Any]) -> Any:
    return enumerate(value.items())


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack` was given."""
    if isinstance(value, list):
        return [unpack(each, tensors) for each in value]
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
            return tuple(unpack(each, tensors) for each in value["items"])
        case "mapping":
            return {unpack(key, tensors): unpack(each, tensors) for key, each in value["pairs"]}
        case _:
            return {key: unpack(each, tensors) for key, each in value.items()}


_OWN = "accelerate"
PLACED = frozenset({"params", "param_names", "fused", "foreach"})
"""Keys of a group that belong to where it runs, not to what it trains."""


@dataclass(frozen=True, slots=True)
class Belongings:
    """Everything of a script that a checkpoint holds."""

    config: RunConfig
    world: World
    optimizers: Sequence[PreparedOptimizer]
    schedulers: Sequence[Any]
    loaders: Sequence[PreparedLoader]
    objects: Sequence[Any]
    """What `register_for_checkpointing` was given."""
    gradients: GradientState

    @property
    def engines(self) -> list[LoopEngine]:
        """One for each optimizer."""
        return [optimizer.engine for optimizer in self.optimizers]


def save(own: Belongings, folder: Path) -> None:
    """Write a checkpoint; every rank must call it."""
    on_main(own.world, lambda: _refuse_foreign(folder))
    for engine in own.engines:
        if engine.pending and not own.gradients.stepped:
            raise CheckpointError("save_state was called between backward and step: gradients are in no checkpoint")
        engine.agree_on_buffers()
    with ExitStack() as stack:
        for engine in own.engines:
            stack.enter_context(engine.weights_to_use())
        _save(own, folder)


def _save(own: Belongings, folder: Path) -> None:
    tensors, packed = own.world.broadcast(_things(own))  # rank 0's, where ranks differ
    for index, engine in enumerate(own.engines):
        tensors.update({_place(index, name): tensor for name, tensor in engine.state_entries().items()})
    for name, tensor in rng_state(own.world.device).items():
        tensors[f"rng.{own.world.rank}.{name}"] = tensor
    state = {
        "engine": own.engines[0].state() if own.engines else None,
        "epoch": own.loaders[0].iteration if own.loaders else 0,
        "step_in_epoch": own.loaders[0].position if own.loaders else 0,
        "config": _config(own),
        "hooks": {_OWN: packed, **{f"engine{i}": e.state() for i, e in enumerate(own.engines) if i}},
    }
    step = own.engines[0].steps if own.engines else 0
    save_checkpoint(folder, tensors, state, step=step, world=own.world)


def load(own: Belongings, folder: Path) -> None:
    """Go on from a checkpoint; every rank must call it."""
    world = own.world
    on_main(world, lambda: _opened(folder).manifest.step)  # what is wrong with it is said once
    checkpoint = _opened(folder)
    state = checkpoint.manifest.state
    packed = state["hooks"][_OWN]
    _check_counts(own, packed, folder)
    wanted: dict[str, Entry] = {}
    for index, engine in enumerate(own.engines):
        engine.discard()
        engine.allocate_optimizer_state(entries(checkpoint.index, _place(index, "optim.")))
        wanted.update({_place(index, name): tensor for name, tensor in engine.state_entries().items()})
    generators = rng_state(world.device)
    same_world = checkpoint.manifest.world_size == world.size
    if same_world:
        wanted.update({f"rng.{world.rank}.{name}": tensor for name, tensor in generators.items()})
    mine = _room(checkpoint)
    wanted.update(mine)
    load_into(checkpoint, wanted, world=world, ignore=("rng.",))
    if same_world:
        restore_rng_state(generators, world.device)
    for index, engine in enumerate(own.engines):
        engine.state_loaded()
        engine.restore(state["hooks"][f"engine{index}"] if index else state["engine"])
    _restore_things(own, packed, {name.removeprefix(f"hook.{_OWN}."): tensor for name, tensor in mine.items()})


def _opened(folder: Path) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    if _OWN not in checkpoint.manifest.state.get("hooks", {}):
        raise CheckpointError(
            f"{folder} was not written by Accelerator.save_state; `checkpoint.resume` of a run goes on with it"
        )
    return checkpoint


def _place(index: int, name: str) -> str:
    """The name in a checkpoint: the first engine's tensors are those of the run."""
    return name if index == 0 else f"hook.engine{index}.{name}"


def _config(own: Belongings) -> dict[str, Any]:
    config = to_dict(own.config)
    if own.optimizers:  # the one that was trained with, whatever the section says
        config["optim"] = {"type": type(own.optimizers[0].optimizer).__name__}
    return config


def _refuse_foreign(folder: Path) -> None:
    """A checkpoint takes the place of what was there; that must be a checkpoint too."""
    if folder.exists() and not (folder / "manifest.json").exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} holds other files already; name a folder of its own for the checkpoint")


# ---- what is neither a model nor an optimizer's state


def _things(own: Belongings) -> tuple[dict[str, Tensor], dict[str, Any]]:
    loaders = [loader.state() for loader in own.loaders]
    content = {
        "groups": [groups_of(optimizer) for optimizer in own.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in own.schedulers],
        "loaders": [state for state, _ in loaders],
        "orders": [order for _, order in loaders],
        "objects": [each.state_dict() for each in own.objects],
        "step": own.gradients.step,
    }
    tensors: dict[str, Tensor] = {}
    packed = pack(content, tensors, "state")
    return {f"hook.{_OWN}.{name}": tensor for name, tensor in tensors.items()}, packed


def _restore_things(own: Belongings, packed: Any, tensors: Mapping[str, Tensor]) -> None:
    content = unpack(packed, tensors)
    for optimizer, groups in zip(own.optimizers, content["groups"], strict=True):
        restore_groups(optimizer, groups)
    for scheduler, state in zip(own.schedulers, content["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    for loader, state, order in zip(own.loaders, content["loaders"], content["orders"], strict=True):
        loader.restore(state, order)
    for each, state in zip(own.objects, content["objects"], strict=True):
        each.load_state_dict(state)
    own.gradients.step = content["step"]


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What an optimizer's groups say, without their parameters."""
    return [
        {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items() if key not in PLACED}
        for group in optimizer.param_groups
    ]


def restore_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Have an optimizer's groups say what `groups_of` found."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved)


def _room(checkpoint: Checkpoint) -> dict[str, Tensor]:
    found = entries(checkpoint.index, f"hook.{_OWN}.")
    return {f"hook.{_OWN}.{name}": torch.empty(shape, dtype=dtype) for name, (shape, dtype) in found.items()}


def _check_counts(own: Belongings, packed: Mapping[str, Any], folder: Path) -> None:
    here = {
        "groups": ("optimizers", len(own.optimizers)),
        "schedulers": ("schedulers", len(own.schedulers)),
        "loaders": ("data loaders", len(own.loaders)),
        "objects": ("registered objects", len(own.objects)),
    }
    for key, (words, count) in here.items():
        if len(packed[key]) != count:
            raise CheckpointError(
                f"{folder} holds {len(packed[key])} {words}, and this script has prepared {count}: prepare the same "
                "objects, in the same order, before load_state"
            )


# Whole weights in files of other tools, and the folders of checkpoints.


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
