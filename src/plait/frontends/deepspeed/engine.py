"""`DeepSpeedEngine`: DeepSpeed's loop around Plait's native engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import ModelError, TrainingError
from plait.frontends.deepspeed import progress
from plait.frontends.deepspeed.facts import EngineFacts
from plait.frontends.deepspeed.latest import Place
from plait.frontends.deepspeed.loader import RepeatingLoader
from plait.frontends.deepspeed.saving import groups_of, restore_groups, state_name, whole_weights
from plait.ops import drafting
from plait.precision import DTYPES
from plait.strategy import StepResult
from plait.world import on_main


class DeepSpeedEngine(EngineFacts):
    """A model under training. What the model itself offers can be asked of the engine, too."""

    # ---- the loop

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the model says; its arguments are brought to the device."""
        if self._clock is None:
            return self._native.forward(*inputs, **kwargs)
        with self._clock.measure("fwd"):
            return self._native.forward(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward through this rank's mean loss of one micro-batch; returns the loss as it counts in the step."""
        self._need_optimizer("backward")
        share = self._native.accumulation
        # The engine divides by the number of micro-batches, whoever did so before.
        counted = loss if scale_wrt_gas or share == 1 else loss * share
        last = self.is_gradient_accumulation_boundary() and not self._inside_no_sync
        if self._clock is None:
            self._native.backward(counted, last=last, retain_graph=retain_graph)
        else:
            with self._clock.measure("bwd"):
                self._native.backward(counted, last=last, retain_graph=retain_graph)
        return loss / share if scale_wrt_gas and share != 1 else loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count a micro-batch and, at a boundary, update the weights and step the scheduler."""
        self._need_optimizer("step")
        if self._inside_no_sync:
            raise TrainingError("engine.step() was called inside engine.no_sync(): leave the block first")
        self._updated = boundary = self.is_gradient_accumulation_boundary()
        if boundary:
            self._latest.settle()  # the rates of this update depend on it
            if self._clock is None:
                result = self._native.step()
            else:
                with self._clock.measure("step"):
                    result = self._native.step()
            self._count(result, lr_kwargs)
        if self._clock is not None:
            self._say(self._clock.take(boundary=boundary))
        self.micro_steps += 1
        self._within = 0 if boundary else self._within + 1

    def _count(self, result: StepResult, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Take note of an update, or of one that was skipped."""
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        scale = None
        if self._native.scaler is not None:
            self._show_scale(skipped=result.skipped)
            scale = self.cur_scale
        self._latest.take(result, Place(self.global_steps, self.global_samples, scale), lr_kwargs)
        self.tput_timer.count(self.train_batch_size(), self._native.accumulation)
        assert self.optimizer is not None
        if self._every and self.global_steps % self._every == 0:
            line = progress.progress_line(self.global_steps, self.skipped_steps, self.optimizer)
            self._say([f"[Rank 0] {line}", *self.tput_timer.lines()])

    def _say(self, lines: list[str]) -> None:
        if self.global_rank == 0:
            print("\n".join(lines), flush=True)

    def _need_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise TrainingError(
                f"engine.{what}() needs an optimizer: give one to initialize, or write `optimizer` in the configuration"
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last one of a step."""
        if self._boundary is not None:
            return self._boundary
        return self._within + 1 >= self._batch.accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide it by hand from now on; to be said before each backward pass."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside are not the last of their step, at any stage; `step` comes after the block."""
        if self._inside_no_sync:
            raise TrainingError("engine.no_sync() was entered twice")
        self._inside_no_sync = True
        try:
            yield
        finally:
            self._inside_no_sync = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do between steps, which clear gradients themselves; in the middle of one it is an error."""
        if self._native.pending:
            raise TrainingError(
                f"engine.zero_grad() would drop the gradients of {self._native.pending} micro-batches: leave it out, "
                "engine.step() clears gradients itself"
            )

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One step on as many micro-batches as accumulate, for a model that returns its loss; the mean over all ranks.

        Absent, the micro-batches come from the training data that `initialize` was given.
        """
        self.train()
        data, losses = self._data(data_iter), []
        for _ in range(self._batch.accumulation):
            loss = self._loss_of(next(data))
            self.backward(loss)
            self.step()
            losses.append(loss.detach().float())
        return self._mean(torch.stack(losses))

    def eval_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """The mean loss over as many micro-batches and all ranks, without gradients, in evaluation mode."""
        training = self.module.training
        self.eval()
        try:
            with torch.no_grad():
                losses = [self._loss_of(next(data_iter)).float() for _ in range(self._batch.accumulation)]
                return self._mean(torch.stack(losses))
        finally:
            self.train(training)

    def _data(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        """Where micro-batches come from: absent, the training data, again and again."""
        if data_iter is not None:
            return data_iter
        if self._training_iterator is None:
            if self.training_dataloader is None:
                raise TrainingError("train_batch() has no data: give it an iterator, or training_data to initialize")
            self._training_iterator = RepeatingLoader(self.training_dataloader)
        return self._training_iterator

    def _loss_of(self, batch: Any) -> Tensor:
        if isinstance(batch, Mapping):
            found = self(**batch)
        else:
            found = self(*batch) if isinstance(batch, (tuple, list)) else self(batch)
        found = found["loss"] if isinstance(found, Mapping) else getattr(found, "loss", found)
        if not isinstance(found, Tensor) or found.ndim != 0:
            raise ModelError(
                "train_batch and eval_batch need a model that returns its loss: a scalar, or one with .loss"
            )
        return found

    def _mean(self, losses: Tensor) -> Tensor:
        world, mean = self._native.world, losses.mean().double()
        if world.size > 1:
            dist.all_reduce(mean, group=world.everyone)
        return (mean / world.size).float()

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Training mode, of the model."""
        self.module.train(mode)
        self.training = mode
        return self

    def eval(self) -> DeepSpeedEngine:
        """Evaluation mode, of the model."""
        return self.train(False)

    # ---- state

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything that training goes on from; every rank must call it, with the same tag.

        It can be loaded under any stage, format and number of ranks. `client_state` is rank 0's, and holds plain values
        and tensors.
        """
        scheduler = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        own = {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "optimizer": None if self.optimizer is None else state_name(self.optimizer),
            "groups": None if self.optimizer is None else groups_of(self.optimizer),
            "lr_scheduler": scheduler,
            "client_state": dict(client_state or {}),
        }
        chosen = str(tag) if tag is not None else f"global_step{self.global_steps}"
        self._saver.save(save_dir, chosen, own, latest=save_latest, frozen=not exclude_frozen_parameters)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint of this front end, or of DeepSpeed itself: its path, and the client state.

        Without a tag it is the one that was saved last; where nothing says which that is, (None, None).
        """
        self._latest.settle()
        if custom_load_fn is not None:
            raise ModelError("custom_load_fn is not offered: load the weights into the model before initialize")
        path = self._saver.find(load_dir, tag)
        if path is None:
            self._say([f"there is no file {Path(load_dir) / 'latest'}, so nothing is loaded; give a tag"])
            return None, None
        optimizer = load_optimizer_states and not load_module_only and self.optimizer is not None
        loaded = self._saver.load(path, optimizer=optimizer, strict=load_module_strict)
        own = loaded.own
        if optimizer:
            self._native.restore(loaded.engine)
            if own.get("groups") is not None:
                assert self.optimizer is not None
                restore_groups(self.optimizer, own["groups"])
            self._show_scale(skipped=False)
        if not load_module_only:
            self.global_steps = int(own.get("global_steps", loaded.engine.get("steps", 0)))
            self.global_samples = int(own.get("global_samples", self.global_steps * self.train_batch_size()))
            self.skipped_steps = int(own.get("skipped_steps", 0))
            self.micro_steps, self._within = self.global_steps * self._batch.accumulation, 0
            state = own.get("lr_scheduler")
            if load_lr_scheduler_states and self.lr_scheduler is not None and state is not None:
                self.lr_scheduler.load_state_dict(state)
        return str(loaded.path), own.get("client_state", {})

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Gather the weights, in the format that the model computes with, into one file; every rank must call it."""
        weights, folder = self._weights(exclude_frozen_parameters), Path(save_dir)

        def write() -> None:
            with drafting(folder / save_filename) as draft:
                torch.save(weights, draft)
                draft.replace(folder / save_filename)

        on_main(self._native.world, write)
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The whole weights, in host memory, on rank 0, and {} elsewhere; every rank must ask."""
        return self._weights(exclude_frozen_parameters)

    def _weights(self, exclude_frozen: bool) -> dict[str, Tensor]:
        if self._native.world.layout.pp > 1:
            raise ModelError(
                "the stages of a pipeline are not gathered into one file: call save_checkpoint, and then "
                "utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict"
            )
        left_out = self._native.frozen() if exclude_frozen else frozenset[str]()
        compute = DTYPES[self._parts.config.precision.compute]
        return whole_weights(self._native, compute, lambda name: name not in left_out)

    def destroy(self) -> None:
        """See through what is being saved, and close the curves."""
        self._saver.close()
        self._latest.close()
