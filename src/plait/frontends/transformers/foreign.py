"""Checkpoints that the Trainer itself wrote: optimizer, schedule and loss scale go on under any of Plait's strategies.

Weights, the place in the data and random numbers are read by the Trainer's own code, as they always are. What is read
here is found in the files, not loaded: no pickle is executed, and a rank has one whole tensor in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.checkpoint import DeepSpeedSource, Entry, Found, TorchFile, load_values, newest_tag, open_source, read_found
from plait.config import read_json_object
from plait.errors import CheckpointError
from plait.frontends.accelerate import PLACED, restore_groups
from plait.frontends.deepspeed import foreign_state
from plait.parallel import assign_whole

if TYPE_CHECKING:
    from plait.frontends.transformers.accelerator import TrainerAccelerator
    from plait.strategy import LoopEngine

OPTIMIZER, SCHEDULE, SCALER, STATE = "optimizer.pt", "scheduler.pt", "scaler.pt", "trainer_state.json"
ADAPTERS = "adapter_model.safetensors"
_SHOWN = 6


def deepspeed_folder(checkpoint: Path) -> Path | None:
    """What DeepSpeed wrote inside a checkpoint of the Trainer; None where it had no part in it."""
    return newest_tag(checkpoint, "deepspeed")


def load(accelerator: TrainerAccelerator, checkpoint: Path) -> Mapping[str, Any]:
    """Take the optimizer's state, and what DeepSpeed has cut also the weights; returns the state of the schedule.

    Every rank must call it.
    """
    schedule: Mapping[str, Any] = {}
    if (checkpoint / SCHEDULE).is_file():
        schedule = load_values(checkpoint / SCHEDULE)
    if (inside := deepspeed_folder(checkpoint)) is not None:
        schedule = schedule or foreign_state(inside).get("lr_scheduler") or {}
        _take_from_deepspeed(accelerator, checkpoint, inside, schedule)
    else:
        _take(accelerator, checkpoint)
    if not schedule:
        raise CheckpointError(f"{checkpoint} has no {SCHEDULE}, so the learning rate to go on with is not known")
    return schedule


def _take(accelerator: TrainerAccelerator, checkpoint: Path) -> None:
    if not (checkpoint / OPTIMIZER).is_file():
        raise CheckpointError(
            f"{checkpoint} has neither the folder `plait` nor {OPTIMIZER}, so there is no optimizer state to go on "
            "from. Load its weights with from_pretrained, and train without resume_from_checkpoint"
        )
    engine, content = accelerator.engine, TorchFile(checkpoint / OPTIMIZER).content
    try:
        groups, states = content["param_groups"], content["state"]
    except (KeyError, TypeError):
        raise CheckpointError(f"{checkpoint / OPTIMIZER} is no state_dict of an optimizer") from None
    _check_groups(checkpoint, groups, accelerator)
    found: dict[str, Found] = {}
    for group, names in zip(groups, accelerator.trained_names, strict=True):
        for number, name in zip(group["params"], names, strict=True):
            for key, value in states.get(number, {}).items():
                found[f"{name}.{key}"] = value if isinstance(value, Found) else torch.tensor(float(value))
    entries = {name: Entry(value.shape, value.dtype) for name, value in found.items()}
    _fill(engine, checkpoint, entries, lambda name: read_found(found[name]))
    settings = [{key: value for key, value in group.items() if key not in PLACED} for group in groups]
    restore_groups(engine.optimizer, settings)
    _count(engine, checkpoint, {})


def _take_from_deepspeed(
    accelerator: TrainerAccelerator, checkpoint: Path, inside: Path, schedule: Mapping[str, Any]
) -> None:
    engine = accelerator.engine
    order = [name for names in accelerator.trained_names for name in names]
    with DeepSpeedSource(inside, order=order) as source:
        for name, tensor in engine.state_tensors().items():
            if name.startswith("model."):
                if name not in source.entries:
                    raise CheckpointError(f"{inside}, saved by DeepSpeed, does not have {name.removeprefix('model.')}")
                assign_whole(tensor, source.read(name))
        entries = {n.removeprefix("optim."): e for n, e in source.entries.items() if n.startswith("optim.")}
        _fill(engine, inside, entries, lambda name: source.read(f"optim.{name}"))
        _count(engine, checkpoint, source.state["engine"])
    for group, rate in zip(engine.optimizer.param_groups, schedule.get("_last_lr", ()), strict=False):
        group["lr"] = rate  # a schedule sets it for the update after the next


def load_scale(accelerator: TrainerAccelerator, checkpoint: Path) -> None:
    """Go on with the loss scale of a `GradScaler`, where this run has one too."""
    scaler = accelerator.engine.scaler
    if scaler is not None and (checkpoint / SCALER).is_file():
        theirs = load_values(checkpoint / SCALER)
        if theirs:  # a scaler that was off says nothing
            scaler.restore({**scaler.state(), "scale": theirs["scale"], "clean_steps": theirs["_growth_tracker"]})


def load_weights(accelerator: TrainerAccelerator, checkpoint: Path) -> None:
    """Take the weights alone from the files that `from_pretrained` reads; every rank must call it."""
    engine, adapters = accelerator.engine, checkpoint / ADAPTERS
    tensors = {name: each for name, each in engine.state_tensors().items() if name.startswith("model.")}
    if adapters.is_file():  # what is not trained is not in there
        tensors = {name: each for name, each in tensors.items() if name.removeprefix("model.") not in engine.frozen()}
    stored = {name: _in_adapters(name) if adapters.is_file() else name for name in tensors}
    with open_source(adapters if adapters.is_file() else checkpoint) as source:
        if absent := [name.removeprefix("model.") for name in stored.values() if name not in source.entries]:
            raise CheckpointError(
                f"{checkpoint}, written by the Trainer itself, does not have {_few(absent)}: load it with "
                "from_pretrained, or set load_best_model_at_end=False"
            )
        for name, tensor in tensors.items():
            assign_whole(tensor, source.read(stored[name]))
    engine.state_loaded()


def _in_adapters(name: str) -> str:
    """What `peft` calls a parameter of the adapter `default` in its file."""
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".")


def _fill(engine: LoopEngine, checkpoint: Path, entries: Mapping[str, Entry], read: Callable[[str], Tensor]) -> None:
    """Make room for an optimizer's state, and read it, a tensor at a time."""
    weights = engine.state_tensors()
    if wrong := list(_misfits(weights, entries)):
        raise CheckpointError(f"the optimizer in {checkpoint} is not of this model: {_few(wrong, '; ')}")
    room = {name: (entry.shape, _dtype(weights, name, entry)) for name, entry in entries.items()}
    engine.allocate_optimizer_state(room)
    tensors = engine.state_tensors()
    for name in entries:
        if f"optim.{name}" in tensors:  # else another rank updates that parameter
            assign_whole(tensors[f"optim.{name}"], read(name))
    engine.state_loaded()


def _misfits(weights: Mapping[str, Tensor], entries: Mapping[str, Entry]) -> Iterator[str]:
    for name, entry in entries.items():
        weight = weights.get(f"model.{name.rpartition('.')[0]}")
        if weight is None:
            yield f"{name} belongs to no parameter here"
        elif entry.shape not in (weight.shape, torch.Size()):
            yield f"{name} is {tuple(entry.shape)}, and the parameter {tuple(weight.shape)}"


def _dtype(weights: Mapping[str, Tensor], name: str, entry: Entry) -> torch.dtype:
    """As torch does it: what is shaped like a parameter is kept as the parameter is, numbers stay as they are."""
    return weights[f"model.{name.rpartition('.')[0]}"].dtype if entry.shape else entry.dtype


def _check_groups(checkpoint: Path, groups: Sequence[Mapping[str, Any]], accelerator: TrainerAccelerator) -> None:
    here = accelerator.engine.optimizer.param_groups
    theirs, ours = [len(group["params"]) for group in groups], [len(names) for names in accelerator.trained_names]
    if theirs != ours:
        raise CheckpointError(
            f"the optimizer in {checkpoint} has groups of {theirs} parameters, and this one of {ours}: train the same "
            "parameters, with the same weight_decay rules"
        )
    for group, own in zip(groups, here, strict=True):
        if unknown := sorted(group.keys() - own.keys() - {"initial_lr"}):
            raise CheckpointError(
                f"{checkpoint} has the state of another optimizer than {type(accelerator.engine.optimizer).__name__}: "
                f"its groups have {_few(unknown)}; set the `optim` that it was trained with"
            )


def _count(engine: LoopEngine, checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Go on counting steps, as the Trainer itself does."""
    steps = read_json_object(checkpoint / STATE, CheckpointError).get("global_step")
    if type(steps) is not int or steps < 0:
        raise CheckpointError(f"{checkpoint / STATE} has the global_step {steps!r}, expected a number of steps")
    engine.restore({"skips_in_a_row": 0, "scaler": None, **state, "steps": steps})


def _few(words: Sequence[str], between: str = ", ") -> str:
    more = f"{between}and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return between.join(words[:_SHOWN]) + more
