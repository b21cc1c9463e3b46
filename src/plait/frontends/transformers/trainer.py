"""`PlaitTrainer`: Hugging Face's Trainer, its loop untouched, on Plait's engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint import load_values
from plait.errors import ConfigError, ModelError, Problem
from plait.frontends.accelerate import PreparedOptimizer, whole
from plait.frontends.deepspeed import Recipe, read_config
from plait.frontends.transformers import checkpoints, foreign
from plait.frontends.transformers.accelerator import TrainerAccelerator
from plait.frontends.transformers.arguments import config_of, deepspeed_of, refuse_mismatches
from plait.transformers_internals import overrides

_trainer: Any = import_module("transformers.trainer")  # barely typed, and not everywhere installed
_FOLDER = "plait"
"""Beside the weights in a checkpoint of the Trainer: the whole state, as any run of Plait's has it."""


class TrainingArguments(_trainer.TrainingArguments):  # type: ignore[misc]
    """`transformers.TrainingArguments` that do not make DeepSpeed itself cut the models that are loaded from now on.

    With `deepspeed=` at stage 3, those of `transformers` have `from_pretrained` do so. The file that `deepspeed=` names
    may have comments, as everywhere in Plait.
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
    """A `transformers.Trainer` whose model and optimizer are spread by Plait.

    Takes what the Trainer takes. How training is spread is read from the arguments (`fsdp`, `deepspeed`, `bf16`, …);
    `sections` of a run description stand over them: `sections={"strategy": "zero3"}`. `account` says what became
    of every key.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._sections = sections
        self._given: dict[str, Any] = {}
        self._recipe = Recipe({})
        super().__init__(*args, **kwargs)
        _refuse_cut(self.model)
        if self.accelerator.world.layout.tp > 1 and vars(self)["compute_loss_func"] is None:
            self.compute_loss_func = loss_outside(self.model)

    # ---- the accelerator

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._given = super()._build_accelerator_args(**kwargs)
        for name in ("deepspeed_plugin", "fsdp_plugin", "dynamo_plugin", "parallelism_config"):
            self._given.pop(name, None)
        self._given["mixed_precision"] = "no"
        return self._given

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and put one of Plait's in its place."""
        config, self.account = config_of(self.args, self._sections)
        self._recipe = Recipe(deepspeed_of(self.args))
        fsdp, self.args.fsdp_plugin_args = self.args.fsdp_plugin_args, None  # the plugin would ask for FSDP's own way
        try:
            super().create_accelerator_and_postprocess()
        finally:
            self.args.fsdp_plugin_args = fsdp
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False
        self.accelerator = TrainerAccelerator(config, **self._given)
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def get_tp_size(self) -> int:
        """How many ranks see the same data."""
        layout = self.accelerator.world.layout
        return int(layout.size // layout.data_parallel)

    # ---- what a DeepSpeed configuration describes

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The Trainer's optimizer; or, as with DeepSpeed, the one of its configuration, over all that is trained."""
        if self._recipe.has_optimizer:
            given = vars(self)["optimizer"]
            if given is None:
                bare = self.accelerator.unwrap_model(self.model if model is None else model)
                self.optimizer = self._recipe.optimizer(bare, bare.parameters())
            elif not isinstance(given, PreparedOptimizer):
                raise _given_twice("optimizer")
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The Trainer's schedule, or the one of a DeepSpeed configuration."""
        if not self._recipe.has_schedule:
            return super().create_scheduler(num_training_steps, optimizer)
        if vars(self)["lr_scheduler"] is not None:
            raise _given_twice("scheduler")
        theirs = self.args.hf_deepspeed_config
        theirs.fill_match("scheduler.params.total_num_steps", num_training_steps, "num_training_steps (calculated)")
        warmup = max(1, self.args.get_warmup_steps(num_training_steps))
        theirs.fill_match("scheduler.params.warmup_num_steps", warmup, "warmup_steps")
        refuse_mismatches(self.args)
        self.lr_scheduler = Recipe(deepspeed_of(self.args)).schedule(self.optimizer if optimizer is None else optimizer)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    # ---- the model in use

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        bare: nn.Module = self.accelerator.unwrap_model(model)
        trained: nn.Module | None = self.accelerator.trained
        if trained is not None and trained.module is bare:
            return trained  # called by itself, it would do without the engine's precision and sharding
        return bare

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self.accelerator.config.strategy.stage == 0:
            super()._move_model_to_device(model, device)
        # Otherwise it is cut first: no device need hold the whole.

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        norm: Tensor = self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        if grad_norm is None:
            grad_norm = self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))
        assert grad_norm is not None
        return grad_norm  # the Trainer makes a number of it where it logs

    # ---- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole weights as `save_pretrained` does; of adapters, these alone."""
        trained = self.accelerator.trained
        if trained is None:
            super().save_model(output_dir, _internal_call)
            return
        output_dir = output_dir or self.args.output_dir
        adapters = hasattr(trained.module, "peft_config")
        state = whole(trained, self.accelerator.world, trained_only=adapters)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoints.save(self.accelerator, Path(output_dir) / _FOLDER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _trainer.SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / _FOLDER).is_dir():
            checkpoints.load(self.accelerator, folder / _FOLDER)
            schedule: Mapping[str, Any] = load_values(folder / _trainer.SCHEDULER_NAME)
        else:
            schedule = foreign.load(self.accelerator, folder)
        self.lr_scheduler.load_state_dict(schedule)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / _FOLDER).is_dir() or foreign.deepspeed_folder(folder) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        # Otherwise weights come with the optimizer's state, once the model is spread: DeepSpeed may have cut them.

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and not (Path(checkpoint) / _FOLDER).is_dir():
            foreign.load_scale(self.accelerator, Path(checkpoint))

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if (best / _FOLDER).is_dir():
            checkpoints.load(self.accelerator, best / _FOLDER, weights_only=True)
        else:
            foreign.load_weights(self.accelerator, best)


def _refuse_cut(model: nn.Module) -> None:
    if any(hasattr(param, "ds_id") for param in model.parameters()):
        raise ModelError(
            "DeepSpeed has cut this model as it was loaded. Take TrainingArguments from plait.frontends.transformers, "
            "or load the model before they are made"
        )


def _given_twice(word: str) -> ConfigError:
    message = "the configuration describes one, and `optimizers` has one too"
    return ConfigError(Problem(f"deepspeed.{word}", message, "Leave out one of the two."))


def loss_outside(model: nn.Module) -> Any:
    """The loss of a `transformers` model, computed from its answer; None where the model has no such function.

    Inside, a model cut along the vocabulary has a part of its logits; its answer is whole.
    """
    base: Any = model
    base = base.get_base_model() if hasattr(model, "get_base_model") else model
    own: Any = getattr(base, "loss_function", None)
    config: Any = getattr(base, "config", None)
    if own is None or not hasattr(config, "vocab_size"):
        return None

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        found: Tensor = own(
            logits=outputs["logits"],
            labels=labels,
            vocab_size=config.get_text_config().vocab_size,
            num_items_in_batch=num_items_in_batch,
        )
        return found

    return loss
