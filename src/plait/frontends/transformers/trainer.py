"""`PlaitTrainer`: Hugging Face's Trainer and its training loop, on Plait's engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plait.checkpoint import (
    DeepSpeedSource,
    FileTensor,
    TensorEntry,
    TorchFile,
    entries,
    load_into,
    load_values,
    newest_tag,
    open_checkpoint,
    open_source,
    read_file_tensor,
    save_checkpoint,
)
from plait.config import read_json_object, to_dict
from plait.distributed import assign_full_tensor
from plait.errors import CheckpointError, ConfigError, ModelError, Problem
from plait.frontends.accelerate import PLACED, PreparedOptimizer, full_weights, groups_of, pack, restore_groups, unpack
from plait.frontends.deepspeed import Recipe, foreign_state, read_config
from plait.frontends.transformers.accelerator import TrainerAccelerator
from plait.frontends.transformers.arguments import config_of, deepspeed_of, refuse_mismatches
from plait.models import overrides

if TYPE_CHECKING:
    from plait.engine import LoopEngine

# Checkpoints of the engine, in Plait's own format.


_HOOK = "trainer"


def save(accelerator: TrainerAccelerator, folder: Path) -> None:
    """Write weights and optimizer state to a Plait checkpoint in `folder`. Every rank must call it."""
    engine, world = accelerator.engine, accelerator.world
    engine.sync_buffers()
    config = {**to_dict(accelerator.config), "optim": {"type": type(engine.optimizer).__name__}}
    groups = pack(groups_of(engine.optimizer), {}, "groups")
    with engine.evaluation_weights():
        state = {"engine": engine.state(), "config": config, "hooks": {_HOOK: {"groups": groups}}}
        save_checkpoint(folder, engine.state_entries(), state, step=engine.steps, world=world)


def load(accelerator: TrainerAccelerator, folder: Path, *, weights_only: bool = False) -> None:
    """Load a Plait checkpoint, saved with any number of ranks and any strategy. Every rank must call it."""
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


# Checkpoints that the Trainer itself wrote: optimizer, schedule and loss scale, resumed under any strategy.
#
# The Trainer's own code reads weights, the position in the data and random states; the functions here read the rest.
# They execute no pickle, and hold one full tensor in memory at a time.


OPTIMIZER, SCHEDULE, SCALER, STATE = "optimizer.pt", "scheduler.pt", "scaler.pt", "trainer_state.json"
ADAPTERS = "adapter_model.safetensors"
_SHOWN = 6


def deepspeed_folder(checkpoint: Path) -> Path | None:
    """Return the folder that DeepSpeed wrote inside a checkpoint of the Trainer; None if there is none."""
    return newest_tag(checkpoint, "deepspeed")


def load_trainer_checkpoint(accelerator: TrainerAccelerator, checkpoint: Path) -> Mapping[str, Any]:
    """Load the optimizer's state, and the weights that DeepSpeed sharded; return the state of the schedule.

    Every rank must call it.
    """
    schedule: Mapping[str, Any] = {}
    if (checkpoint / SCHEDULE).is_file():
        schedule = load_values(checkpoint / SCHEDULE)
    if (inside := deepspeed_folder(checkpoint)) is not None:
        schedule = schedule or foreign_state(inside).get("lr_scheduler") or {}
        _load_deepspeed(accelerator, checkpoint, inside, schedule)
    else:
        _load_optimizer(accelerator, checkpoint)
    if not schedule:
        raise CheckpointError(f"{checkpoint} has no {SCHEDULE}, so the learning rate to resume with is unknown")
    return schedule


def _load_optimizer(accelerator: TrainerAccelerator, checkpoint: Path) -> None:
    if not (checkpoint / OPTIMIZER).is_file():
        raise CheckpointError(
            f"{checkpoint} has neither the folder `plait` nor {OPTIMIZER}, so no optimizer state to "
            "resume from. Load its weights with from_pretrained, and train without resume_from_checkpoint"
        )
    engine, content = accelerator.engine, TorchFile(checkpoint / OPTIMIZER).content
    try:
        groups, states = content["param_groups"], content["state"]
    except (KeyError, TypeError):
        raise CheckpointError(f"{checkpoint / OPTIMIZER} is not a state_dict of an optimizer") from None
    _check_groups(checkpoint, groups, accelerator)
    tensors: dict[str, FileTensor] = {}
    for group, names in zip(groups, accelerator.trained_names, strict=True):
        for number, name in zip(group["params"], names, strict=True):
            for key, value in states.get(number, {}).items():
                tensors[f"{name}.{key}"] = value if isinstance(value, FileTensor) else torch.tensor(float(value))
    entries = {name: TensorEntry(value.shape, value.dtype) for name, value in tensors.items()}
    _fill(engine, checkpoint, entries, lambda name: read_file_tensor(tensors[name]))
    settings = [{key: value for key, value in group.items() if key not in PLACED} for group in groups]
    restore_groups(engine.optimizer, settings)
    _restore_counters(engine, checkpoint, {})


def _load_deepspeed(
    accelerator: TrainerAccelerator, checkpoint: Path, inside: Path, schedule: Mapping[str, Any]
) -> None:
    engine = accelerator.engine
    order = [name for names in accelerator.trained_names for name in names]
    with DeepSpeedSource(inside, order=order) as source:
        for name, tensor in engine.state_tensors().items():
            if name.startswith("model."):
                if name not in source.entries:
                    raise CheckpointError(f"{inside}, saved by DeepSpeed, does not have {name.removeprefix('model.')}")
                assign_full_tensor(tensor, source.read(name))
        states = {name.removeprefix("optim."): e for name, e in source.entries.items() if name.startswith("optim.")}
        _fill(engine, inside, states, lambda name: source.read(f"optim.{name}"))
        _restore_counters(engine, checkpoint, source.state["engine"])
    for group, rate in zip(engine.optimizer.param_groups, schedule.get("_last_lr", ()), strict=False):
        group["lr"] = rate  # of the next update; a schedule sets only later ones


def load_scale(accelerator: TrainerAccelerator, checkpoint: Path) -> None:
    """Restore the loss scale from a saved `GradScaler`, if this run has a scaler too."""
    scaler = accelerator.engine.scaler
    if scaler is not None and (checkpoint / SCALER).is_file():
        saved = load_values(checkpoint / SCALER)
        if saved:  # empty for a disabled scaler
            scaler.restore({**scaler.state(), "scale": saved["scale"], "clean_steps": saved["_growth_tracker"]})


def load_weights(accelerator: TrainerAccelerator, checkpoint: Path) -> None:
    """Load only the weights, from the files that `from_pretrained` reads. Every rank must call it."""
    engine, adapters = accelerator.engine, checkpoint / ADAPTERS
    tensors = {name: tensor for name, tensor in engine.state_tensors().items() if name.startswith("model.")}
    if adapters.is_file():  # an adapter file has only trained parameters
        tensors = {n: tensor for n, tensor in tensors.items() if n.removeprefix("model.") not in engine.frozen()}
    stored = {name: _name_in_adapter_file(name) if adapters.is_file() else name for name in tensors}
    with open_source(adapters if adapters.is_file() else checkpoint) as source:
        if absent := [name.removeprefix("model.") for name in stored.values() if name not in source.entries]:
            raise CheckpointError(
                f"{checkpoint}, written by the Trainer itself, does not have {_few(absent)}: load it with "
                "from_pretrained, or set load_best_model_at_end=False"
            )
        for name, tensor in tensors.items():
            assign_full_tensor(tensor, source.read(stored[name]))
    engine.state_loaded()


def _name_in_adapter_file(name: str) -> str:
    """Return the name in a `peft` file of a parameter of the adapter `default`."""
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".")


def _fill(
    engine: LoopEngine, checkpoint: Path, entries: Mapping[str, TensorEntry], read: Callable[[str], Tensor]
) -> None:
    """Allocate an optimizer's state, and load it with `read`, one tensor at a time."""
    weights = engine.state_tensors()
    if mismatches := list(_mismatches(weights, entries)):
        raise CheckpointError(f"the optimizer in {checkpoint} is not of this model: {_few(mismatches, '; ')}")
    shapes = {name: (entry.shape, _dtype(weights, name, entry)) for name, entry in entries.items()}
    engine.allocate_optimizer_state(shapes)
    tensors = engine.state_tensors()
    for name in entries:
        if f"optim.{name}" in tensors:  # else another rank updates that parameter
            assign_full_tensor(tensors[f"optim.{name}"], read(name))
    engine.state_loaded()


def _mismatches(weights: Mapping[str, Tensor], entries: Mapping[str, TensorEntry]) -> Iterator[str]:
    for name, entry in entries.items():
        weight = weights.get(f"model.{name.rpartition('.')[0]}")
        if weight is None:
            yield f"{name} has no parameter in this model"
        elif entry.shape not in (weight.shape, torch.Size()):
            yield f"{name} has shape {tuple(entry.shape)}, and the parameter {tuple(weight.shape)}"


def _dtype(weights: Mapping[str, Tensor], name: str, entry: TensorEntry) -> torch.dtype:
    """Return the dtype of a state as torch chooses it: that of the parameter for a tensor, its own for a number."""
    return weights[f"model.{name.rpartition('.')[0]}"].dtype if entry.shape else entry.dtype


def _check_groups(checkpoint: Path, groups: Sequence[Mapping[str, Any]], accelerator: TrainerAccelerator) -> None:
    current = accelerator.engine.optimizer.param_groups
    saved_sizes, sizes = [len(group["params"]) for group in groups], [len(names) for names in accelerator.trained_names]
    if saved_sizes != sizes:
        raise CheckpointError(
            f"the optimizer in {checkpoint} has groups of {saved_sizes} parameters, and this one of {sizes}: train the "
            "same parameters, with the same weight_decay rules"
        )
    for saved, group in zip(groups, current, strict=True):
        if unknown := sorted(saved.keys() - group.keys() - {"initial_lr"}):
            raise CheckpointError(
                f"{checkpoint} has the state of another optimizer, not {type(accelerator.engine.optimizer).__name__}: "
                f"its groups have {_few(unknown)}; set the `optim` that it was trained with"
            )


def _restore_counters(engine: LoopEngine, checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Restore the number of steps from the Trainer's own state file, and the engine's other counters from `state`."""
    steps = read_json_object(checkpoint / STATE, CheckpointError).get("global_step")
    if type(steps) is not int or steps < 0:
        raise CheckpointError(f"{checkpoint / STATE} has the global_step {steps!r}, expected a number of steps")
    engine.restore({"skips_in_a_row": 0, "scaler": None, **state, "steps": steps})


def _few(items: Sequence[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return separator.join(items[:_SHOWN]) + more


_trainer: Any = import_module("transformers.trainer")  # almost without types, and not always installed
_FOLDER = "plait"
"""The folder of Plait's own checkpoint inside a checkpoint of the Trainer."""


class TrainingArguments(_trainer.TrainingArguments):  # type: ignore[misc]
    """`transformers.TrainingArguments`, without the effect that DeepSpeed shards models that are loaded afterwards.

    With `deepspeed=` at stage 3, the class of `transformers` lets `from_pretrained` shard models. The file of
    `deepspeed=` may have comments, as everywhere in Plait.
    """

    deepspeed: Any

    def __post_init__(self) -> None:
        given = getattr(self, "deepspeed")  # noqa: B009  # mypy does not know what transformers gives it
        if isinstance(given, (str, os.PathLike)) and not str(given).startswith("{"):
            self.deepspeed = read_config(given)
        super().__post_init__()
        if self.deepspeed:
            import_module("transformers.integrations.deepspeed").unset_hf_deepspeed_config()


@overrides
class PlaitTrainer(_trainer.Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` whose model and optimizer Plait's engine parallelizes and updates.

    The arguments are those of the Trainer; they also decide the strategy (`fsdp`, `deepspeed`, `bf16`, …). `sections`
    of a run description take precedence: `sections={"strategy": "zero3"}`. `key_report` has the outcome of every key.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._sections = sections
        self._accelerator_args: dict[str, Any] = {}
        self._recipe = Recipe({})
        super().__init__(*args, **kwargs)
        _refuse_deepspeed_shards(self.model)
        if self.accelerator.world.layout.tp > 1 and vars(self)["compute_loss_func"] is None:
            self.compute_loss_func = loss_of_outputs(self.model)

    # ---- the accelerator

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_args = super()._build_accelerator_args(**kwargs)
        for name in ("deepspeed_plugin", "fsdp_plugin", "dynamo_plugin", "parallelism_config"):
            self._accelerator_args.pop(name, None)
        self._accelerator_args["mixed_precision"] = "no"
        return self._accelerator_args

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and replace it by a `TrainerAccelerator`."""
        config, self.key_report = config_of(self.args, self._sections)
        self._recipe = Recipe(deepspeed_of(self.args))
        fsdp, self.args.fsdp_plugin_args = self.args.fsdp_plugin_args, None  # so that no FSDP plugin is created
        try:
            super().create_accelerator_and_postprocess()
        finally:
            self.args.fsdp_plugin_args = fsdp
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False
        self.accelerator = TrainerAccelerator(config, **self._accelerator_args)
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def get_tp_size(self) -> int:
        """Return the number of ranks that read the same data (tensor parallelism and others)."""
        layout = self.accelerator.world.layout
        return int(layout.size // layout.data_parallel)

    # ---- the optimizer and schedule of a DeepSpeed configuration

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Return the Trainer's optimizer, or that of a DeepSpeed configuration, which has all parameters."""
        if self._recipe.has_optimizer:
            given = vars(self)["optimizer"]
            if given is None:
                bare = self.accelerator.unwrap_model(self.model if model is None else model)
                self.optimizer = self._recipe.optimizer(bare, bare.parameters())
            elif not isinstance(given, PreparedOptimizer):
                raise _given_twice("optimizer")
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the Trainer's schedule, or the one of a DeepSpeed configuration."""
        if not self._recipe.has_schedule:
            return super().create_scheduler(num_training_steps, optimizer)
        if vars(self)["lr_scheduler"] is not None:
            raise _given_twice("scheduler")
        deepspeed = self.args.hf_deepspeed_config
        deepspeed.fill_match("scheduler.params.total_num_steps", num_training_steps, "num_training_steps (calculated)")
        warmup = max(1, self.args.get_warmup_steps(num_training_steps))
        deepspeed.fill_match("scheduler.params.warmup_num_steps", warmup, "warmup_steps")
        refuse_mismatches(self.args)
        self.lr_scheduler = Recipe(deepspeed_of(self.args)).schedule(self.optimizer if optimizer is None else optimizer)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    # ---- the model

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        bare: nn.Module = self.accelerator.unwrap_model(model)
        trained: nn.Module | None = self.accelerator.trained
        if trained is not None and trained.module is bare:
            return trained  # not the bare model, which would bypass the engine's precision and sharding
        return bare

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self.accelerator.config.strategy.stage == 0:
            super()._move_model_to_device(model, device)
        # Else the engine shards the model first, so that no device has to hold all of it.

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        norm: Tensor = self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        if grad_norm is None:
            grad_norm = self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))
        assert grad_norm is not None
        return grad_norm  # a tensor; the Trainer converts it when it logs

    # ---- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the full weights as `save_pretrained` does; for a model with adapters, only the adapters."""
        trained = self.accelerator.trained
        if trained is None:
            super().save_model(output_dir, _internal_call)
            return
        output_dir = output_dir or self.args.output_dir
        adapters = hasattr(trained.module, "peft_config")
        state = full_weights(trained, self.accelerator.world, trained_only=adapters)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(self.accelerator, Path(output_dir) / _FOLDER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _trainer.SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / _FOLDER).is_dir():
            load(self.accelerator, folder / _FOLDER)
            schedule: Mapping[str, Any] = load_values(folder / _trainer.SCHEDULER_NAME)
        else:
            schedule = load_trainer_checkpoint(self.accelerator, folder)
        self.lr_scheduler.load_state_dict(schedule)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / _FOLDER).is_dir() or deepspeed_folder(folder) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        # Else weights are loaded later, with the optimizer's state: DeepSpeed may have sharded them.

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and not (Path(checkpoint) / _FOLDER).is_dir():
            load_scale(self.accelerator, Path(checkpoint))

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if (best / _FOLDER).is_dir():
            load(self.accelerator, best / _FOLDER, weights_only=True)
        else:
            load_weights(self.accelerator, best)


def _refuse_deepspeed_shards(model: nn.Module) -> None:
    if any(hasattr(param, "ds_id") for param in model.parameters()):
        raise ModelError(
            "DeepSpeed sharded this model when it was loaded. Take TrainingArguments from "
            "plait.frontends.transformers, or load the model before they are created"
        )


def _given_twice(key: str) -> ConfigError:
    message = "the configuration has one, and `optimizers` has one too"
    return ConfigError(Problem(f"deepspeed.{key}", message, "Leave out one of the two."))


def loss_of_outputs(model: nn.Module) -> Any:
    """Return a function that computes the loss of a `transformers` model from its outputs; None if it has no loss.

    If the model is sharded along the vocabulary, logits are a shard inside its forward, and complete in its outputs.
    """
    base: Any = model
    base = base.get_base_model() if hasattr(model, "get_base_model") else model
    loss_function: Any = getattr(base, "loss_function", None)
    config: Any = getattr(base, "config", None)
    if loss_function is None or not hasattr(config, "vocab_size"):
        return None

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        value: Tensor = loss_function(
            logits=outputs["logits"],
            labels=labels,
            vocab_size=config.get_text_config().vocab_size,
            num_items_in_batch=num_items_in_batch,
        )
        return value

    return loss
