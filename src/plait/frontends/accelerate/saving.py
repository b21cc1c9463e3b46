"""`save_state` and `load_state`: Plait's own checkpoint, so that it goes on under any strategy and number of ranks.

The first engine lies where a run's would; what a script has besides lies where hooks have their things.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.checkpoint import Checkpoint, entries, load_into, open_checkpoint, save_checkpoint
from plait.config import RunConfig, to_dict
from plait.errors import CheckpointError
from plait.frontends.accelerate.gradients import GradientState
from plait.frontends.accelerate.loader import PreparedLoader
from plait.frontends.accelerate.packing import pack, unpack
from plait.frontends.accelerate.prepared import PreparedOptimizer
from plait.spec import Entry
from plait.strategy import LoopEngine
from plait.world import World, on_main, restore_rng_state, rng_state

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
