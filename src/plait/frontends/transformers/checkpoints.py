"""The state of a Trainer's engine, in Plait's own form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from plait.checkpoint import entries, load_into, open_checkpoint, save_checkpoint
from plait.config import to_dict
from plait.frontends.accelerate import groups_of, pack, restore_groups, unpack

if TYPE_CHECKING:
    from plait.frontends.transformers.accelerator import TrainerAccelerator

_HOOK = "trainer"


def save(accelerator: TrainerAccelerator, folder: Path) -> None:
    """Write weights and optimizer; every rank must call it."""
    engine, world = accelerator.engine, accelerator.world
    engine.agree_on_buffers()
    config = {**to_dict(accelerator.config), "optim": {"type": type(engine.optimizer).__name__}}
    groups = pack(groups_of(engine.optimizer), {}, "groups")
    with engine.weights_to_use():
        state = {"engine": engine.state(), "config": config, "hooks": {_HOOK: {"groups": groups}}}
        save_checkpoint(folder, engine.state_entries(), state, step=engine.steps, world=world)


def load(accelerator: TrainerAccelerator, folder: Path, *, weights_only: bool = False) -> None:
    """Go on from a checkpoint that any number of ranks wrote under any strategy; every rank must call it."""
    engine, world = accelerator.engine, accelerator.world
    checkpoint = open_checkpoint(folder)
    if not weights_only:
        engine.allocate_optimizer_state(entries(checkpoint.index, "optim."))
    tensors = engine.state_entries()
    if weights_only:
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    load_into(checkpoint, tensors, world=world, ignore=("optim.",) if weights_only else ())
    engine.state_loaded()
    if not weights_only:
        state = checkpoint.manifest.state
        engine.restore(state["engine"])
        restore_groups(engine.optimizer, unpack(state["hooks"][_HOOK]["groups"], {}))
