"""The native engine: runs optimizer steps with plain PyTorch, on any layout (FSDP, tensor, pipeline, …)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.checkpoint import Entry
from plait.config import RunConfig
from plait.distributed import Gradients, UnshardedParams, World, average_buffers, to_local
from plait.engine import state
from plait.engine.audit import Audit
from plait.engine.base import Evaluation, SteppingEngine, StepResult, ignore_phase, inputs_and_samples
from plait.engine.forward import Forward, LogFunction, Select
from plait.engine.graphs import RecordedPasses, Recording
from plait.engine.loss import LossFunction, LossNormalizer, StepLoss, WeightedLoss, read_loss
from plait.engine.master_weights import MasterWeights
from plait.engine.update import Updater, refuse_different_gradients
from plait.errors import ModelError, TrainingError
from plait.launch import Phase
from plait.optim import is_builtin, merge_records
from plait.precision import AmaxHistory, Policy
from plait.torch_internals import tree_leaves

if TYPE_CHECKING:
    from plait.distributed import Bubble, Pipeline
    from plait.engine.parallelize import StagedSteps


class NonFiniteSource(NamedTuple):
    """Where one rank found the first non-finite number: `order` 0 for an output, 1 for a gradient, 2 for the loss.

    Of all ranks' sources the smallest is reported.
    """

    order: int
    what: str

    def __str__(self) -> str:
        return self.what


def find_non_finite(
    model: nn.Module, master_weights: MasterWeights, forward_again: Callable[[], Any], norms: Tensor | None = None
) -> NonFiniteSource:
    """Return the first module whose output is not finite, else the last parameter whose gradient is not.

    Calls `forward_again` with hooks on all modules; if parameters are sharded, every rank must call it. `norms` are the
    norms of the gradients, if the gradients themselves have been freed.
    """
    names: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def check(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            if not names and not _finite(outputs):
                names.append(name)

        return check

    hooks = [module.register_forward_hook(watch(name or "the model")) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            forward_again()
    finally:
        for hook in hooks:
            hook.remove()
    if names:
        return NonFiniteSource(0, f"the output of {names[0]}")
    # The backward pass computes the gradients of the last parameters first, so the last non-finite one is the earliest.
    gradients = (
        [master_weights.gradient(index) for index in range(len(master_weights.names))]
        if norms is None
        else list(norms.cpu())
    )
    bad = [name for name, gradient in zip(master_weights.names, gradients, strict=True) if not _finite(gradient)]
    if bad:
        return NonFiniteSource(1, f"the gradient of {bad[-1]}")
    return NonFiniteSource(2, "the loss, though every output and gradient is finite")


def first_of(sources: Sequence[NonFiniteSource]) -> str:
    """Return the text for the smallest source of all ranks, with the ranks that found it."""
    first = min(sources)
    ranks = [rank for rank, culprit in enumerate(sources) if culprit == first]
    if len(sources) == 1:
        return str(first)
    if len(ranks) == len(sources):
        return f"{first} on every rank"
    return f"{first} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _finite(value: Any) -> bool:
    return all(
        bool(torch.isfinite(to_local(leaf)).all())
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )


class FinishedStep(NamedTuple):
    """A completed step, kept until its numbers are read, with what the search for the cause of a skip needs."""

    result: StepResult
    step: int
    again: Callable[[], Any]
    """Runs the step's last forward pass again."""
    norms: Tensor | None
    """The norm of each gradient, if the gradients are freed before the numbers are read."""


class NativeEngine(SteppingEngine):
    """Trains with plain PyTorch. `prepare_native` has sharded, compiled, … the model; this class runs the steps."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        config: RunConfig,
        *,
        policy: Policy,
        gradients: Gradients | None,
        master_weights: MasterWeights,
        updater: Updater,
        loss_function: LossFunction | None,
        accumulation: int,
        compiled: Sequence[nn.Module],
        cut: Callable[[Any], Any] | None = None,
        staged: StagedSteps | None = None,
        scales: AmaxHistory | None = None,
        recording: Recording | None = None,
        select: Select | None = None,
        audit: Audit | None = None,
        log: LogFunction,
    ) -> None:
        """`master_weights` are the tensors that the optimizer of `updater` updates; `gradients` collects gradients.

        `cut` returns this rank's shard of a micro-batch along `cp`. `recording`: when forward and backward pass are
        captured as a CUDA graph; see `engine.graphs`. `select` selects the fields of a micro-batch that the model
        receives; see `engine.forward`. `scales` are the fp8 amax histories. `compiled` are the modules that
        `torch.compile` was applied to. `audit` checks the first step.
        """
        self.model = model
        self.world = world
        self.config = config
        self.steps = 0
        self.accumulation = accumulation
        self.master_weights = master_weights
        self.updater = updater
        self.skips = updater.skips
        self._gradients = gradients
        self._unsharded = UnshardedParams(model)
        self._loss_function = loss_function
        self._staged = staged
        self._scales = scales
        # Ranks along `tp` compute the same losses, so only the first of them counts. In a pipeline, only ranks with the
        # last stage have losses.
        self._counts = world.coordinate("tp") == 0 and (staged is None or staged.pipeline.has_last)
        self._normalizer = LossNormalizer(world.everyone, world.device, counts=self._counts)
        self._forward = Forward(
            model,
            world.device,
            policy,
            compiled=compiled,
            cut=cut,
            before=master_weights.before_forward,
            select=select,
            log=log,
        )
        self._recorded: RecordedPasses | None = None
        if recording is not None:
            self._recorded = RecordedPasses(self._both_passes, model, gradients, world.device, recording, log)
        self._log = log
        self._compares = world.layout.tp > 1 and master_weights.shows_gradients
        """Whether the gradients of replicated parameters must still be compared between the ranks along `tp`.

        This is done in the first step or steps, until one comparison was conclusive (`refuse_different_gradients`)."""
        self._audit = audit
        """What checks the first step before its update; None when that is done."""
        self._last_batch: Any = None
        self._pending_step: FinishedStep | None = None
        """The latest step, if its numbers have not been read yet."""
        self._peers = world.group("dp_replicate", "dp_shard", "ep", "cp")
        """The process group of the ranks that read other data and train the same parameters."""
        self.on_phase: Callable[[Phase], None] = ignore_phase
        """Called with each phase that this rank enters."""
        modules = [model] if staged is None else [stage.module for stage in staged.pipeline.stages]
        self._after_step: list[Any] = [module.after_step for module in modules if hasattr(module, "after_step")]
        model.train()

    # ---- one step

    def train_step(self, micro_batches: Sequence[Any]) -> StepResult:
        """Run one optimizer step over this rank's micro-batches; return its result."""
        if not micro_batches:
            raise TrainingError("train_step was called without micro-batches; every rank needs at least one")
        if self._staged is not None:
            self.on_phase(Phase.FORWARD)
            self._train_pipeline(self._staged, micro_batches)
            return self._finish_step()
        if self._recorded is not None and len(micro_batches) == 1:
            self._train_recorded(self._recorded, micro_batches[0])
            return self._finish_step()
        return super().train_step(micro_batches)

    def _train_pipeline(self, staged: StagedSteps, micro_batches: Sequence[Any]) -> None:
        self._last_batch = micro_batches[-1]
        given = [inputs_and_samples(batch) for batch in micro_batches]
        # The last step of an epoch may have fewer micro-batches than the pipeline schedule allows: it is filled up with
        # copies of the first one, with 0 samples, so that they have no weight.
        if len(given) < self.accumulation:
            given += [(given[0][0], 0)] * (staged.at_least(len(given)) - len(given))
        ready = [self._forward.ready(inputs) for inputs, _ in given]
        scaler = self.updater.scaler

        def read(outputs: Any, index: int) -> WeightedLoss:
            return self._read_loss(outputs, ready[index], given[index][1])

        def scale(loss: Tensor) -> Tensor:
            return loss if scaler is None else loss * scaler.scale

        with self._forward.context():
            staged.train(ready, [self._forward.model_fields(inputs) for inputs in ready], read, self._normalizer, scale)

    def _train_recorded(self, recorded: RecordedPasses, batch: Any) -> None:
        self.on_phase(Phase.FORWARD)
        self._last_batch = batch
        inputs, samples = inputs_and_samples(batch)
        scaler = self.updater.scaler
        loss = recorded(self._forward.ready(inputs), samples, None if scaler is None else scaler.scale)
        self._normalizer.add(loss, micro_batches=1)

    def _both_passes(self, inputs: Any, samples: float, scale: Tensor | float | None) -> WeightedLoss:
        """Run forward and backward pass of a step with one micro-batch, on one process; return its loss, detached.

        The mean over the micro-batch is the mean over the step, so no normalization is needed.
        """
        loss = self._read_loss(self._forward(inputs), inputs, samples)
        self._backward(loss.mean(), scale, last=True)
        weight = loss.weight.detach() if isinstance(loss.weight, Tensor) else loss.weight
        return WeightedLoss(loss.value.detach(), weight, loss.is_mean)

    def _forward_loss(self, batch: Any) -> WeightedLoss:
        self.on_phase(Phase.FORWARD)
        self._last_batch = batch
        inputs, samples = inputs_and_samples(batch)
        forward = self._forward
        if not forward.plain:
            inputs = forward.ready(inputs)
        return self._read_loss(forward(inputs), inputs, samples)

    def _read_loss(self, outputs: Any, inputs: Any, samples: float) -> WeightedLoss:
        loss = read_loss(outputs, inputs, samples, self._loss_function)
        if loss.is_mean and self.world.layout.cp > 1:
            raise ModelError(
                "the model returned a mean over its tokens, but the ranks of strategy.layout.cp have different numbers "
                "of tokens: return a LossTerm(sum, count)"
            )
        return loss

    def _begin_backward(self, loss: Tensor, *, last: bool) -> None:
        scaler = self.updater.scaler
        self._backward(loss, None if scaler is None else scaler.scale, last=last)

    def _backward(self, loss: Tensor, scale: Tensor | float | None, *, last: bool) -> None:
        if self._gradients is not None:
            self._gradients.before_backward(last=last)
        self.on_phase(Phase.BACKWARD)
        torch.autograd.backward(loss if scale is None else loss * scale)

    def _finish_step(self) -> StepResult:
        self._complete_gradients()
        return self._update(self._normalizer.finish())

    def _complete_gradients(self) -> None:
        self.on_phase(Phase.REDUCE)
        if self._gradients is not None:
            self._gradients.finish()
        if self._staged is not None:
            self._staged.finish()
        if self._compares:
            self._compares = not refuse_different_gradients(self.master_weights, self.world)

    def _update(self, sums: StepLoss) -> StepResult:
        if self._audit is not None:
            with self._unsharded.shards_shown():
                conclusive = self._audit.run(float(sums.count))
            self._audit = None if conclusive else self._audit
        self.on_phase(Phase.STEP)
        result = self.updater.apply(sums, self.steps)
        if self.updater.scaler is not None:  # the numbers were already read in `apply`, to update the loss scale
            self._normalizer.learn(result.targets)
        done = None
        if result.asynchronous or result.skipped or self.skips.in_a_row:
            done = FinishedStep(result, self.steps, self._repeat_forward(), self.updater.norms)
        if done is not None and not result.asynchronous:
            self._handle_skip(done)
        self.master_weights.clear_gradients()
        self._refresh_unsharded()
        for after_step in self._after_step:
            after_step(self._peers, updated=self.updater.updated)
        if self._scales is not None:
            self._scales.after_step(self._peers)
        self.steps += 1
        if result.asynchronous:  # read the numbers of the previous step, now that this one is queued on the device
            self.settle()
            self._pending_step = done
        self.on_phase(Phase.IDLE)
        return result

    def settle(self) -> None:
        """Wait for the pending step, and count and log it if it was skipped. Every rank must call it."""
        if self._pending_step is not None:
            done, self._pending_step = self._pending_step, None
            self._handle_skip(done)

    def _handle_skip(self, done: FinishedStep) -> None:
        """Count and log the step if it was skipped. [Note: one step behind]"""
        if not done.result.skipped:
            self.skips.in_a_row = 0
            return
        scaler = self.updater.scaler
        if scaler is not None and not scaler.at_minimum:
            return  # the scaler lowers the scale after an overflow, until it fits: not a failure
        sources = self.world.gather(find_non_finite(self.model, self.master_weights, done.again, done.norms))
        self._unsharded.reshard()
        seen = f"{first_of(sources)}{self.describe_samples(done.step)}"
        self._log(f"step {done.step} skipped on every rank: not finite, first seen in {seen}")
        scale = None if scaler is None else scaler.scale
        self.skips.add(done.step, f"; first seen in {seen}", scale=scale)

    def _repeat_forward(self) -> Callable[[], Any]:
        """Return a function that runs the latest forward pass again."""
        batch = self._last_batch
        return lambda: self._outputs(self._forward.ready(inputs_and_samples(batch)[0]))

    def _outputs(self, ready: Any) -> Any:
        """Return the model's outputs for inputs from `Forward.ready`; None on ranks without the last pipeline stage."""
        if self._staged is None:
            return self._forward(ready)
        with self._forward.context():
            return self._staged.forward(self._forward.model_fields(ready))

    def keep_unsharded(self) -> None:
        """Below ZeRO stage 3, keep unsharded weights allocated between steps, too. Every rank must call it."""
        self._unsharded.keep()

    def _refresh_unsharded(self) -> None:
        if self._unsharded.kept:
            self.master_weights.settle()
        self._unsharded.refresh()

    @contextmanager
    def sharded_params_registered(self) -> Iterator[None]:
        """Within the block, the modules hold their sharded parameters.

        Without it, direct calls of the model (`generate`) may have left unsharded ones.
        """
        if not self._within_step:
            self._unsharded.reshard()
        with self._unsharded.shards_shown():
            yield

    @property
    def _within_step(self) -> bool:
        """Whether a step is incomplete, so that unsharded weights must stay until it ends; see `ManualEngine`."""
        return False

    def __call__(self, batch: Any) -> Tensor:
        """Run the forward pass of one micro-batch; return its mean loss."""
        if self._staged is not None:
            raise TrainingError(
                "engine(batch) cannot be used with strategy.layout.pp: a pipeline runs several micro-batches at once; "
                "call engine.train_step(micro_batches)"
            )
        if self._recorded is not None and self._recorded.asked_for:
            raise TrainingError(
                "engine(batch) cannot be used with strategy.graphs, which captures forward and backward pass as one; "
                "call engine.train_step(micro_batches)"
            )
        self._recorded = None  # this loop calls forward and backward separately, and a graph contains both
        return super().__call__(batch)

    def sync_buffers(self) -> None:
        """Average running statistics over the ranks; copy other buffers from rank 0."""
        if self._peers is not None:
            average_buffers(self.model, self._peers, self.world.layout.replicas)

    def evaluate_micro_batch(self, batch: Any) -> Evaluation:
        """Return this rank's loss and outputs for one micro-batch, without gradients, in evaluation mode."""
        with self.evaluation_weights():
            return self._evaluate(batch)

    def _evaluate(self, batch: Any) -> Evaluation:
        inputs, samples = inputs_and_samples(batch)
        inputs = self._forward.ready(inputs)
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                outputs = self._outputs(inputs)
                if not self._counts:
                    return Evaluation(0.0, 0.0, None)
                loss = self._read_loss(outputs, inputs, samples)
                return Evaluation(float(loss.total()), float(loss.weight), outputs)
        finally:
            self.model.train(training)
            self._unsharded.reshard()

    def bubble(self) -> Bubble | None:
        """Return how long the ranks of this rank's pipeline were idle; None without a pipeline."""
        return None if self._staged is None else self._staged.pipeline.bubble()

    @property
    def pipeline(self) -> Pipeline | None:
        """This rank's pipeline stages; None without a pipeline."""
        return None if self._staged is None else self._staged.pipeline

    @property
    def gradients(self) -> Gradients | None:
        """The gradient collector, which reduces gradients; None if they stay in `.grad` as autograd computes them."""
        return self._gradients

    # ---- state

    def state_tensors(self) -> dict[str, Tensor]:
        """Return every tensor that a checkpoint holds: `model.<name>`, `optim.<name>.<key>`."""
        with self.sharded_params_registered():
            return state.collect(self.model, self.master_weights, self.updater.optimizer)

    def weight_of(self, param: nn.Parameter) -> Tensor:
        """Return the current fp32 weights of one parameter, also if it is offloaded or its update is pending."""
        return state.weight(self.master_weights, param)

    def state_entries(self) -> dict[str, Entry]:
        """Return the same tensors for saving and loading: packed 8-bit states stay packed until they are read."""
        with self.sharded_params_registered():
            return state.collect_entries(self.model, self.master_weights, self.updater.optimizer)

    def allocate_optimizer_state(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Allocate the optimizer state that a checkpoint will be loaded into."""
        state.allocate(self.master_weights, self.updater.optimizer, shapes)

    def state_loaded(self) -> None:
        """Update the model from the loaded weights."""
        self.master_weights.publish()
        self.master_weights.publish_frozen()
        self._refresh_unsharded()
        if self._audit is not None:
            self._audit.note_buffers()

    def state(self) -> dict[str, Any]:
        """Return the state besides tensors: step count, skipped steps, loss scale, fp8. Every rank must call it."""
        self.settle()
        scaler = self.updater.scaler
        values: dict[str, Any] = {
            "steps": self.steps,
            **self.skips.state(),
            "scaler": None if scaler is None else scaler.state(),
        }
        if numbers := merge_records(self._numbers(), type(self.updater.optimizer).__name__):
            values["optimizer"] = numbers
        if scaler is not None or self._scales is not None:  # the loss scale and fp8 scales fit gradients divided by it
            values["divisor"] = self._normalizer.divisor
        return values if self._scales is None else {**values, "fp8": {"peaks": self._amax_histories(self._scales)}}

    def _numbers(self) -> list[dict[str, Any] | None]:
        """Return the values besides tensors that each rank's optimizer keeps; empty for torch's and Plait's own."""
        if is_builtin(self.updater.optimizer):
            return []
        mine = self.updater.numbers.state(self._updated())
        return self.world.gather(mine)

    def _updated(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that this rank's optimizer updates, by name."""
        pairs = zip(self.master_weights.names, self.master_weights.updated, strict=True)
        return [(name, tensor) for name, tensor in pairs if tensor is not None]

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Within the block, the model has the weights to evaluate, save and generate with."""
        self.settle()
        with self.updater.evaluation_weights() as changed:
            if changed:
                self._refresh_unsharded()
            yield
        if changed:
            self._refresh_unsharded()

    def _amax_histories(self, scales: AmaxHistory) -> dict[str, Any]:
        """Return the fp8 amax histories of the full model."""
        states = [scales.state()] if self.world.layout.pp == 1 else self.world.gather(scales.state())
        return {name: numbers for state in states for name, numbers in state.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set what `state` returned."""
        self._pending_step = None
        self.steps = int(state["steps"])
        self.skips.restore(state)
        if self.updater.scaler is not None and state["scaler"] is not None:
            self.updater.scaler.restore(state["scaler"])
        self._normalizer.learn(state.get("divisor") or 0.0)
        if state.get("optimizer") is not None:
            self.updater.numbers.restore(state["optimizer"], self._updated())
            self.updater.train()
            self._refresh_unsharded()
        if self._scales is not None:
            self._scales.restore((state.get("fp8") or {"peaks": {}})["peaks"])

    def parameter_count(self) -> tuple[int, int]:
        """Return the number of parameters of the full model, and of the trained ones."""
        sizes = {name: (param.numel(), param.requires_grad) for name, param in self.model.named_parameters()}
        if self.world.layout.pp > 1:
            sizes = {name: entry for rank_sizes in self.world.gather(sizes) for name, entry in rank_sizes.items()}
        return sum(size for size, _ in sizes.values()), sum(size for size, trained in sizes.values() if trained)

    def frozen(self) -> frozenset[str]:
        """Return the names of the parameters that are not trained."""
        return frozenset(name for name, _ in self.model.named_parameters()) - frozenset(self.master_weights.names)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that the optimizer updates: this rank's shard of each, as plain tensors."""
        return {name: self.master_weights.local(index).detach() for index, name in enumerate(self.master_weights.names)}

    def as_global(self, name: str, local: Tensor) -> Tensor:
        """Return the global tensor whose shard on this rank is `local`; it has the shape and sharding of the weight."""
        return self.master_weights.logical(self.master_weights.names.index(name), local)

    def weights_changed(self) -> None:
        """Update the model after the tensors of `weights` were written to."""
        self.master_weights.publish()
        self._refresh_unsharded()
