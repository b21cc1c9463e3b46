"""The interface of every engine: Plait's own, and those that run DeepSpeed, ColossalAI or a user's code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plait.checkpoint import Entry
from plait.config import GuardConfig, RunConfig
from plait.data import MicroBatch
from plait.distributed import World
from plait.engine import checkpointing, evaluating
from plait.engine.loss import LossNormalizer, WeightedLoss
from plait.errors import NonFiniteError, TrainingError
from plait.launch import Phase

if TYPE_CHECKING:
    from plait.distributed import Bubble


_REMEDY = "Lower optim.lr, set train.clip_norm, or use precision: bf16 instead of fp16"


class Skips:
    """Counts skipped steps (non-finite loss or gradient), and raises `NonFiniteError` if there are too many.

    Overflows in fp16 that lower the loss scale are not counted: callers do not call `add` for them.
    """

    def __init__(self, guard: GuardConfig) -> None:
        self._guard = guard
        self.in_a_row = 0
        self.total = 0
        """Skipped steps since step 0; `restore` sets the number that the checkpoint holds."""
        self._recent: deque[int] = deque()
        """The step numbers of the skipped steps among the last `window` steps."""
        self._last = ""

    def add(self, step: int, seen: str, *, scale: float | None = None) -> None:
        """Count step number `step` as skipped; raise `NonFiniteError` if a limit is exceeded.

        `seen` describes where the first non-finite number was found, and `scale` is the loss scale, for the message.
        """
        self.in_a_row += 1
        self.total += 1
        self._recent.append(step)
        while self._recent[0] <= step - self._guard.window:
            self._recent.popleft()
        self._last = f"{'' if scale is None else f', at loss scale {scale:g}'}{seen}"
        if self.in_a_row >= self._guard.max_skips:
            raise self._error(f"{self.in_a_row} steps in a row", "train.guard.max_skips sets how many are accepted")
        if len(self._recent) > self._guard.max_share * self._guard.window:
            known = min(step + 1, self._guard.window)
            raise self._error(f"{len(self._recent)} of the last {known} steps", self._share())

    def end_of_run(self, skipped: int, steps: int) -> None:
        """Raise `NonFiniteError` if more than `max_share` of a run's `steps` steps were skipped.

        `add` compares with a window of steps, which a short run never fills; this check holds for any length.
        """
        if skipped > self._guard.max_share * steps:
            raise self._error(f"{skipped} of the {steps} steps of this run", self._share())

    def _share(self) -> str:
        return f"train.guard.max_share sets which share is accepted, now {self._guard.max_share:g}"

    def _error(self, which: str, how: str) -> NonFiniteError:
        return NonFiniteError(f"{which} had a non-finite loss or gradient{self._last}. {_REMEDY}; {how}")

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {"skips_in_a_row": self.in_a_row, "skipped": {"total": self.total, "recent": list(self._recent)}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set what `state` returned; a converted checkpoint has `skips_in_a_row` only, and the rest becomes zero."""
        self.in_a_row = int(state["skips_in_a_row"])
        more = state.get("skipped", {})
        self.total = int(more.get("total", 0))
        self._recent = deque(int(step) for step in more.get("recent", ()))


StepNumbers = tuple[float, float, bool, float, bool]
"""The loss, the gradient norm, whether the step was skipped, the number of targets, whether to stop."""


class StepResult:
    """The loss, gradient norm and other numbers of one optimizer step. The same on every rank.

    On CUDA, `train_step` may return before the device has computed them; reading an attribute then blocks until it has.
    A loop that reads the result of step n only after it has started step n + 1 keeps the device busy.

    A target is what the loss is summed over: a token with a label, or a sample. Losses are means over targets.
    """

    __slots__ = ("_read", "asynchronous", "grad_norm", "loss", "lr", "skipped", "stop", "targets")

    loss: float
    """Mean over all targets of the step: every micro-batch, every rank."""
    grad_norm: float
    """Norm of that mean's gradient over all parameters, before clipping."""
    skipped: bool
    """Whether the update was skipped because the loss or a gradient was not finite."""
    lr: float
    targets: float
    """The number of targets that `loss` is the mean of."""
    stop: bool
    """Whether some rank asked all ranks to stop (`Engine.request_stop`)."""
    asynchronous: bool
    """Whether the step returned before its numbers were computed. The same on every rank; reading does not reset it."""

    def __init__(
        self, loss: float, grad_norm: float, skipped: bool, lr: float, targets: float, stop: bool = False
    ) -> None:
        self.lr = lr
        self.asynchronous = False
        self._read: Callable[[], StepNumbers] | None = None
        self._fill((loss, grad_norm, skipped, targets, stop))

    @classmethod
    def deferred(cls, lr: float, read: Callable[[], StepNumbers]) -> StepResult:
        """Return a result whose numbers `read` waits for; the first access to one of them calls it, once."""
        result = cls.__new__(cls)
        result.lr, result.asynchronous, result._read = lr, True, read
        return result

    def wait(self) -> None:
        """Block until the numbers are on the host."""
        if self._read is not None:
            self._fill(self._read())
            self._read = None  # also frees the host copy that it refers to

    def _fill(self, numbers: StepNumbers) -> None:
        self.loss, self.grad_norm, self.skipped, self.targets, self.stop = numbers

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Called only for missing attributes: a number that was not read yet, or an unknown name.
            if name.startswith("_") or self._read is None:
                raise AttributeError(f"a StepResult has no {name!r}", name=name, obj=self)
            self.wait()
            return getattr(self, name)

    def __reduce__(self) -> tuple[type[StepResult], tuple[float, float, bool, float, float, bool]]:
        return StepResult, (self.loss, self.grad_norm, self.skipped, self.lr, self.targets, self.stop)

    def __repr__(self) -> str:
        shown = ("loss", "grad_norm", "skipped", "lr", "targets", "stop")
        return f"StepResult({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss and outputs of one micro-batch, without gradients. Zeros and None on ranks that do not have the outputs."""

    loss_sum: float
    loss_count: float
    outputs: Any
    """The model's outputs, for metrics."""


class Engine(ABC):
    """A model prepared for training on the ranks of a `World`; `prepare` returns one."""

    model: nn.Module
    world: World
    config: RunConfig
    """The run description that it was prepared with."""
    steps: int
    """Optimizer steps so far, skipped ones included."""
    skips: Skips
    """Counts the skipped ones."""
    on_phase: Callable[[Phase], None]
    """Called with each phase that this rank enters."""
    describe_samples: Callable[[int], str] = staticmethod(lambda step: "")
    """Describes the samples of a step that failed, as the end of a sentence; empty if they are not known."""
    _log: Callable[[str], None]

    @abstractmethod
    def train_step(self, micro_batches: Sequence[Any]) -> StepResult:
        """Run one optimizer step over this rank's micro-batches; return its loss and norm.

        Every rank must pass the same number of micro-batches.
        """

    @abstractmethod
    def __call__(self, batch: Any) -> Tensor:
        """Run the forward pass of one micro-batch; return its mean loss, to be passed to `backward`."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss that `engine(batch)` returned, or of one computed from it."""

    @abstractmethod
    def step(self) -> StepResult | None:
        """Update the weights and return the result if all micro-batches of the step are accumulated; else return None.

        Like `optimizer.step()`, it may be called after every `backward`.
        """

    @abstractmethod
    def request_stop(self) -> None:
        """Ask every rank to stop after the current step: its result has `stop` set on all ranks."""

    def settle(self) -> None:  # noqa: B027  # most engines have no pending steps
        """Wait for steps whose numbers were not read yet, and count and log skipped ones. Every rank must call it."""

    @abstractmethod
    def sync_buffers(self) -> None:
        """Make buffers that ranks update separately, such as running statistics, the same on all ranks."""

    @property
    def optimizer_type(self) -> str:
        """The name under which a checkpoint stores the optimizer's type."""
        return self.config.optim.type

    @property
    def pending(self) -> int:
        """The number of micro-batches whose gradients are accumulated and not applied yet."""
        return 0

    def evaluate(self, batches: Iterable[Any], metrics: Sequence[evaluating.Measures] = ()) -> dict[str, float]:
        """Return the mean `loss` over all targets of all ranks' micro-batches, without training, and the metrics.

        `batches` are this rank's micro-batches. Ranks may have different numbers of them, but each needs at least one.
        Every rank must call it.
        """
        self.sync_buffers()
        with self.evaluation_weights():
            return evaluating.evaluate(self, batches, metrics)

    @abstractmethod
    def evaluate_micro_batch(self, batch: Any) -> Evaluation:
        """Return this rank's loss and outputs for one micro-batch, without gradients, in evaluation mode.

        Nothing is summed over ranks. If the model is sharded, every rank must call it the same number of times.
        """

    def save(self, folder: str | Path, *, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint, which any strategy on any number of ranks can `load`; return its folder.

        `extra` holds the user's own numbers, strings, lists and dicts; those of rank 0 are saved, and `load` returns
        them. The folder appears under its name once everything is written; an existing folder raises an error. Every
        rank must call it.
        """
        with self.evaluation_weights():
            return checkpointing.save_engine(self, folder, extra)

    def load(self, folder: str | Path, *, partial: Sequence[str] = ()) -> dict[str, Any]:
        """Continue from a checkpoint that `save` or a Runner wrote; return the `extra` that it was saved with.

        `folder` is a checkpoint, or contains several, of which the newest is used. Tensors whose names match a pattern
        of `partial` may be missing in it or have another shape, and then keep their values. Random state is restored
        if the checkpoint was saved by the same number of ranks. Every rank must call it.
        """
        return checkpointing.load_engine(self, folder, partial, self._log)

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Within the block, the model has the weights to evaluate, save and generate with.

        They differ from the weights in training only for optimizers with `eval()` and `train()`, such as schedule-free
        ones. Every rank must enter it; a nested block has no further effect.
        """
        yield

    def bubble(self) -> Bubble | None:
        """Return how long the ranks of this rank's pipeline were idle; None without one. Every rank must call it."""
        return None

    @abstractmethod
    def state_tensors(self) -> dict[str, Tensor]:
        """Return every tensor that a checkpoint holds, as `model.<name>` and `optim.<name>.<key>`.

        Names and global shapes do not depend on the layout: sharded tensors are DTensors.
        """

    def state_entries(self) -> dict[str, Entry]:
        """Return the same tensors for saving and loading: 8-bit states may be `DeferredTensor`s, unpacked when read."""
        return {**self.state_tensors()}

    @abstractmethod
    def allocate_optimizer_state(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Allocate the optimizer state that a checkpoint will be loaded into: `<parameter>.<key>` → shape, dtype."""

    @abstractmethod
    def state_loaded(self) -> None:
        """Update the model after the tensors of `state_tensors` were written to."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the rest of the state, which is stored as JSON: step count, skipped steps, loss scale."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Set what `state` returned."""

    @abstractmethod
    def parameter_count(self) -> tuple[int, int]:
        """Return the number of parameters of the full model, and of the trained ones. Every rank must call it."""

    @abstractmethod
    def frozen(self) -> frozenset[str]:
        """Return the names of the parameters that are not trained."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return the fp32 weights that the optimizer updates: this rank's shard of each, as plain tensors."""

    @abstractmethod
    def weights_changed(self) -> None:
        """Update the model after the tensors of `weights` were written to."""

    @abstractmethod
    def as_global(self, name: str, local: Tensor) -> Tensor:
        """Return the global tensor whose shard on this rank is `local`; it has the shape and sharding of the weight."""


class SteppingEngine(Engine):
    """Implements gradient accumulation: counts micro-batches and normalizes their losses.

    A subclass implements forward pass, backward pass and update.
    """

    accumulation: int
    """The number of micro-batches per step, for loops that call `backward`."""
    _normalizer: LossNormalizer
    _pending = 0
    _awaits_backward = False

    @abstractmethod
    def _forward_loss(self, batch: Any) -> WeightedLoss:
        """Run the forward pass of one micro-batch; return its weighted loss."""

    @abstractmethod
    def _begin_backward(self, loss: Tensor, *, last: bool) -> None:
        """Run the backward pass of a normalized loss: the global mean is the sum of these over micro-batches and ranks.

        `last`: this is the last micro-batch of the step, so gradients may be reduced.
        """

    @abstractmethod
    def _finish_step(self) -> StepResult:
        """Update the weights with the accumulated gradients; return the result."""

    def train_step(self, micro_batches: Sequence[Any]) -> StepResult:
        """Run one optimizer step over this rank's micro-batches; return its result."""
        count = len(micro_batches)
        for index, batch in enumerate(micro_batches, 1):
            loss = self._forward_loss(batch)
            self._normalizer.add(loss, micro_batches=count)
            self._begin_backward(self._normalizer.scaled(loss), last=index == count)
        return self._finish_step()

    # ---- for custom loops

    def __call__(self, batch: Any) -> Tensor:
        """Run the forward pass of one micro-batch; return its mean loss."""
        if self._awaits_backward:
            raise TrainingError(
                "engine(batch) was called twice without engine.backward(loss) in between; "
                "engine.evaluate_micro_batch(batch) computes a loss without training on it"
            )
        if self._pending == self.accumulation:
            raise TrainingError(
                f"{self._pending} micro-batches are accumulated, as `accumulation` says: call engine.step() next"
            )
        loss = self._forward_loss(batch)
        self._normalizer.add(loss, micro_batches=self.accumulation)
        self._awaits_backward = True
        return loss.mean()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the loss that the last `engine(batch)` returned."""
        if not self._awaits_backward:
            raise TrainingError("engine.backward(loss) was called without engine(batch) before it")
        self._awaits_backward = False
        self._pending += 1
        self._begin_backward(self._normalizer.scaled_mean(loss), last=self._pending == self.accumulation)

    def step(self) -> StepResult | None:
        """Update the weights and return the result after `accumulation` micro-batches; return None before that."""
        if self._pending == 0:
            raise TrainingError("engine.step() was called without engine.backward(loss) before it")
        if self._pending < self.accumulation:
            return None
        self._pending = 0
        return self._finish_step()

    @property
    def pending(self) -> int:
        """The number of micro-batches of a step that is not complete."""
        return self._pending + self._awaits_backward

    def request_stop(self) -> None:
        """Ask every rank to stop after the current step: its result has `stop` set on all ranks."""
        self._normalizer.flag = True


def ignore_phase(phase: Phase) -> None:
    """The default of `Engine.on_phase`: do nothing."""


def inputs_and_samples(batch: Any) -> tuple[Any, int]:
    """Return the inputs of a micro-batch and its number of samples; a plain batch counts as one."""
    return (batch.inputs, batch.samples) if type(batch) is MicroBatch else (batch, 1)
