"""The interface of every engine, whichever library does the work."""

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
    """Counts skipped steps and stops a run that has too many of them.

    Overflows with which fp16 finds its loss scale are not counted: the callers leave them out.
    """

    def __init__(self, guard: GuardConfig) -> None:
        self._guard = guard
        self.in_a_row = 0
        self.total = 0
        """Since the run began, checkpoints before it included."""
        self._recent: deque[int] = deque()
        """The numbers of the skipped steps among the last `window` ones."""
        self._last = ""

    def add(self, step: int, seen: str, *, scale: float | None = None) -> None:
        """Count step number `step` as skipped; `seen` describes where the first non-finite number was."""
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
        """Raise `NonFiniteError` if too large a share of a run's `steps` steps was skipped, however short it was."""
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
        """Continue from the state of an engine; a state written by another program has only the first number."""
        self.in_a_row = int(state["skips_in_a_row"])
        more = state.get("skipped", {})
        self.total = int(more.get("total", 0))
        self._recent = deque(int(step) for step in more.get("recent", ()))


StepNumbers = tuple[float, float, bool, float, bool]
"""The loss, the gradient norm, whether the step was skipped, the targets, whether to stop."""


class StepResult:
    """The numbers of one optimizer step. The same on every rank.

    On CUDA the numbers may still be computed when a step returns. Reading one waits for it; a loop that reads the
    result of the step before keeps the device busy.
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
    """How many targets the mean is over."""
    stop: bool
    """Whether some rank asked all ranks to stop (`Engine.request_stop`)."""
    asynchronous: bool
    """Whether the step returned before its numbers were computed. The same on every rank, and it never changes."""

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
        """Wait until the numbers have come from the device."""
        if self._read is not None:
            self._fill(self._read())
            self._read = None  # and with it what the numbers came in

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
    """A model made ready for training on a world. Made by `prepare`."""

    model: nn.Module
    world: World
    config: RunConfig
    """What it was prepared with."""
    steps: int
    """Optimizer steps so far, skipped ones included."""
    skips: Skips
    """Those of them that were skipped."""
    on_phase: Callable[[Phase], None]
    """Called with each phase that this rank enters."""
    describe_samples: Callable[[int], str] = staticmethod(lambda step: "")
    """Describes the samples of a step that failed, as the end of a sentence; empty if they are not known."""
    _log: Callable[[str], None]

    @abstractmethod
    def train_step(self, micro_batches: Sequence[Any]) -> StepResult:
        """Do one optimizer step over this rank's micro-batches. Every rank must pass equally many."""

    @abstractmethod
    def __call__(self, batch: Any) -> Tensor:
        """Forward one micro-batch; returns its mean loss, for `backward`."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Backward through a loss that this engine returned, or one made from it."""

    @abstractmethod
    def step(self) -> StepResult | None:
        """Update the weights when the accumulation is complete; None before that."""

    @abstractmethod
    def request_stop(self) -> None:
        """Ask every rank to stop after the step in progress; the answer is in that step's result."""

    def settle(self) -> None:  # noqa: B027  # most engines have no pending steps
        """Wait for pending steps, and report skipped ones. Every rank must call it."""

    @abstractmethod
    def sync_buffers(self) -> None:
        """Make buffers that ranks update separately, such as running statistics, the same on all ranks."""

    @property
    def optimizer_type(self) -> str:
        """The name of the optimizer in a checkpoint."""
        return self.config.optim.type

    @property
    def pending(self) -> int:
        """Micro-batches of an incomplete step, whose gradients are accumulated and not applied yet."""
        return 0

    def evaluate(self, batches: Iterable[Any], metrics: Sequence[evaluating.Measures] = ()) -> dict[str, float]:
        """Return the mean `loss` over all targets of all ranks' micro-batches, without training, and the metrics.

        `batches` are this rank's micro-batches. Ranks may have unequal numbers of them, but each one at least.
        Every rank must call it.
        """
        self.sync_buffers()
        with self.evaluation_weights():
            return evaluating.evaluate(self, batches, metrics)

    @abstractmethod
    def evaluate_micro_batch(self, batch: Any) -> Evaluation:
        """Forward one micro-batch without gradients, in evaluation mode. Nothing is summed over ranks.

        If the model is sharded, every rank must call it equally often.
        """

    def save(self, folder: str | Path, *, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint that any strategy on any number of ranks can `load`; returns its folder.

        `extra` holds the user's numbers, strings, lists and dicts, taken from rank 0, which `load` returns. The folder
        appears when everything is written; an existing folder is an error. Every rank must call it.
        """
        with self.evaluation_weights():
            return checkpointing.save_engine(self, folder, extra)

    def load(self, folder: str | Path, *, partial: Sequence[str] = ()) -> dict[str, Any]:
        """Continue from a checkpoint that `save` or a Runner wrote; returns the `extra` that it was saved with.

        `folder` is a checkpoint, or holds several, of which the newest is used. Tensors whose names match a pattern of
        `partial` may be missing or of another shape, and keep their values. Random state is restored if as many ranks
        saved it. Every rank must call it.
        """
        return checkpointing.load_engine(self, folder, partial, self._log)

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Within the block, the model has the weights to evaluate, save and generate with.

        Optimizers with `eval()` and `train()`, such as schedule-free ones, train other weights than these. Every rank
        must enter it; nested blocks change nothing.
        """
        yield

    def bubble(self) -> Bubble | None:
        """Return how idle the ranks of this rank's pipeline were; None without a pipeline. Every rank must call it."""
        return None

    @abstractmethod
    def state_tensors(self) -> dict[str, Tensor]:
        """Return the logical state: `model.<name>`, `optim.<name>.<key>`; sharded tensors as DTensor."""

    def state_entries(self) -> dict[str, Entry]:
        """Return the same for saving and loading: tensors in another form during training (8-bit) may stay in it."""
        return {**self.state_tensors()}

    @abstractmethod
    def allocate_optimizer_state(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Allocate the optimizer state that a checkpoint is about to fill."""

    @abstractmethod
    def state_loaded(self) -> None:
        """Update everything derived from the tensors of `state_tensors`, which were written to."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state that is not tensors."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""

    @abstractmethod
    def parameter_count(self) -> tuple[int, int]:
        """Return the parameter counts of the full model: all, and trained. Every rank must call it."""

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
        """Return a tensor shaped like this rank's shard of a weight as the global tensor that a checkpoint stores."""


class SteppingEngine(Engine):
    """Counts micro-batches and divides their losses; forward, backward and update are a subclass's."""

    accumulation: int
    """How many micro-batches `backward` counts to a step."""
    _normalizer: LossNormalizer
    _pending = 0
    _awaits_backward = False

    @abstractmethod
    def _forward_loss(self, batch: Any) -> WeightedLoss:
        """Forward one micro-batch; return its weighted loss."""

    @abstractmethod
    def _begin_backward(self, loss: Tensor, *, last: bool) -> None:
        """Backward through a loss that is this rank's share of the global mean; `last` of a step."""

    @abstractmethod
    def _finish_step(self) -> StepResult:
        """Update with the accumulated gradients."""

    def train_step(self, micro_batches: Sequence[Any]) -> StepResult:
        """One optimizer step over this rank's micro-batches."""
        count = len(micro_batches)
        for index, batch in enumerate(micro_batches, 1):
            loss = self._forward_loss(batch)
            self._normalizer.add(loss, micro_batches=count)
            self._begin_backward(self._normalizer.scaled(loss), last=index == count)
        return self._finish_step()

    # ---- for custom loops

    def __call__(self, batch: Any) -> Tensor:
        """Forward one micro-batch; return its mean loss."""
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
        """Backward through the loss of the forward pass just done."""
        if not self._awaits_backward:
            raise TrainingError("engine.backward(loss) was called without engine(batch) before it")
        self._awaits_backward = False
        self._pending += 1
        self._begin_backward(self._normalizer.scaled_mean(loss), last=self._pending == self.accumulation)

    def step(self) -> StepResult | None:
        """Update the weights when the accumulation is complete; None before that."""
        if self._pending == 0:
            raise TrainingError("engine.step() was called without engine.backward(loss) before it")
        if self._pending < self.accumulation:
            return None
        self._pending = 0
        return self._finish_step()

    @property
    def pending(self) -> int:
        """Micro-batches of a step that is not complete."""
        return self._pending + self._awaits_backward

    def request_stop(self) -> None:
        """Ask every rank to stop after the step in progress; the answer is in that step's result."""
        self._normalizer.flag = True


def ignore_phase(phase: Phase) -> None:
    """The default of `Engine.on_phase`: do nothing."""


def inputs_and_samples(batch: Any) -> tuple[Any, int]:
    """Return the inputs of a micro-batch and its number of samples; a plain batch counts as one."""
    return (batch.inputs, batch.samples) if type(batch) is MicroBatch else (batch, 1)
