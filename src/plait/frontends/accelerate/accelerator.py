"""`Accelerator`: Accelerate's loop on Plait's engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import TrainingError
from plait.frontends.accelerate.engine import backward
from plait.frontends.accelerate.gradients import step_count
from plait.frontends.accelerate.keeping import Keeping
from plait.frontends.accelerate.plugins import AutocastKwargs
from plait.frontends.accelerate.profiling import ProfileKwargs
from plait.strategy import LoopEngine


class Accelerator(Keeping):
    """The loop of an Accelerate script, spread as Plait spreads a run.

    Arguments are Accelerate's. `config_file` is an `accelerate` YAML; `sections` are sections of a run description
    in Plait's own words, over everything else (`sections={"strategy": "zero3"}`). `account` says what became of
    every key.
    """

    # ---- one step

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward through the mean loss of one micro-batch, divided by `gradient_accumulation_steps`."""
        models = [model for model in self._models if model.engine is not None and model.in_graph]
        engines: dict[int, tuple[LoopEngine, bool]] = {}
        for model in models:
            engine = model.engine
            assert engine is not None
            engine.accumulation = self.gradient_accumulation_steps
            engines[id(engine)] = (
                engine,
                self.sync_gradients and all(each.syncs for each in models if each.engine is engine),
            )
        if not engines:
            raise TrainingError(
                "backward was called, but no prepared model has been called since the last step; call what "
                "`prepare` returned, not the model that it was given"
            )
        parts = list(engines.values())
        self.gradient_state.stepped = False
        backward([engine for engine, _ in parts], loss, last=[last for _, last in parts], **kwargs)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch. Optimizers step after `gradient_accumulation_steps` of them, and after the last one."""
        self.gradient_state.advance()
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(nullcontext() if self.sync_gradients else self.no_sync(model))
            yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backward passes inside are added up on this rank, and summed over ranks by one that follows."""
        prepared = [each for each in self._models if each is model or each.module is model]
        before = [each.syncs for each in prepared]
        for each in prepared:
            each.syncs = False
        try:
            yield
        finally:
            for each, value in zip(prepared, before, strict=True):
                each.syncs = value

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip the global norm in the step that follows; returns the norm before, on the device, without waiting for
        it. Does nothing while accumulating."""
        if norm_type != 2:
            raise TrainingError(f"clip_grad_norm_ takes the 2-norm here, not norm_type={norm_type}")
        if not self.sync_gradients:
            return None
        engine = self._engine_of(parameters)
        return None if engine is None else engine.clip_grad_norm(float(max_norm))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element in the step that follows."""
        engine = self._engine_of(parameters) if self.sync_gradients else None
        if engine is not None:
            engine.clip_grad_value(clip_value)

    def _engine_of(self, parameters: Any) -> LoopEngine | None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        models = [model for model in self._models if model.engine is not None and model.owns(given)]
        engines = {id(model.engine): model.engine for model in models}
        if len(engines) != 1:
            raise TrainingError(
                f"these parameters belong to {len(engines)} optimizers: call this once for each prepared model, with "
                "its model.parameters()"
            )
        engine = next(iter(engines.values()))
        assert engine is not None
        if sum(param.requires_grad for param in given) < len(engine.views.params):
            raise TrainingError(
                "gradients are clipped together, over all parameters of an optimizer, and some are missing here: pass "
                "model.parameters() of every model that it trains"
            )
        return engine if engine.pending else None

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing is left to do: norms and clipping are of the unscaled gradients, and so is the update."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the gradients of the micro-batch at hand complete a step."""
        return self.gradient_state.sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches a step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, count: int) -> None:
        self.gradient_state.num_steps = step_count(count)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of an optimizer was left out because something was not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def mixed_precision(self) -> str:
        """`no`, `bf16` or `fp16`."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self._dtype, "no") if self._dtype else "no"

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """For computations outside the model, in the precision of the run."""
        handler = autocast_handler or self._autocast
        if self._dtype is None or not handler.enabled:
            return nullcontext()
        return torch.autocast(self.device.type, self._dtype, cache_enabled=handler.cache_enabled)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """torch's profiler around a block, as the handler says, or the one in `kwargs_handlers`."""
        handler = profile_handler or self._profile
        with handler.build() as profiler:
            yield profiler
        handler.export(profiler, self.process_index)

    # ---- over ranks

    def gather(self, tensor: Any) -> Any:
        """The tensors of all ranks, one after another along the first dimension."""
        return self._gatherer.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The same, without the samples that were repeated to fill up the last round of batches."""
        return self._gatherer.gather_for_metrics(input_data, self.gradient_state, as_objects=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over all ranks."""
        return self._gatherer.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors as long as the longest of all ranks."""
        return self._gatherer.pad(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Inside, loaders fill up their last round, or not, as `even_batches` says.

        Ranks must call backward equally often: what a rank without a batch would have to do depends on the
        strategy. So `even_batches=False` is for evaluation.
        """
        samplers: list[Any] = [loader.batch_sampler for loader in self._dataloaders]
        samplers = [each for each in samplers if hasattr(each, "even_batches")]
        before = [each.even_batches for each in samplers]
        if even_batches is False and self.num_processes > 1 and any(model.training for model in self._models):
            raise TrainingError(
                "join_uneven_inputs(even_batches=False) cannot train: a rank that has run out of batches would be "
                "missed by the others. Leave even_batches on; gather_for_metrics drops the repeated samples"
            )
        for each in samplers:
            each.even_batches = each.even_batches if even_batches is None else even_batches
        try:
            yield
        finally:
            for each, value in zip(samplers, before, strict=True):
                each.even_batches = value
