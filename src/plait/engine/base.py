"""What every engine offers, whichever library does the work."""

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
from plait.distributed import World
from plait.engine import checkpointing, evaluating
from plait.errors import NonFiniteError
from plait.launch import Phase

if TYPE_CHECKING:
    from plait.distributed import Bubble

# Steps that were left out because something in them was not finite: how many, and when there are too many.


_REMEDY = "Lower optim.lr, set train.clip_norm, or use precision: bf16 instead of fp16"


class Skips:
    """Counts skipped steps and stops a run that has too many of them.

    Overflows with which fp16 finds its loss scale are not counted: whoever counts leaves them out.
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
        """Count step number `step` as skipped; `seen` says where the first number was that is not finite."""
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
        """Refuse to call a run of `steps` steps finished of which so many were skipped, however short it was."""
        if skipped > self._guard.max_share * steps:
            raise self._error(f"{skipped} of the {steps} steps of this run", self._share())

    def _share(self) -> str:
        return f"train.guard.max_share sets which share is accepted, now {self._guard.max_share:g}"

    def _error(self, which: str, how: str) -> NonFiniteError:
        return NonFiniteError(f"{which} had a non-finite loss or gradient{self._last}. {_REMEDY}; {how}")

    def state(self) -> dict[str, Any]:
        """What a checkpoint carries."""
        return {"skips_in_a_row": self.in_a_row, "skipped": {"total": self.total, "recent": list(self._recent)}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of an engine; one that another program wrote has only the first number."""
        self.in_a_row = int(state["skips_in_a_row"])
        more = state.get("skipped", {})
        self.total = int(more.get("total", 0))
        self._recent = deque(int(step) for step in more.get("recent", ()))


Numbers = tuple[float, float, bool, float, bool]
"""The loss, the gradient norm, whether the step was skipped, the targets, whether to stop."""


class StepResult:
    """What one optimizer step did. The same on every rank.

    Where a device computes behind the host's back, the numbers are still on their way when a step returns. Whoever
    looks at one waits for it; a loop that looks at the step before keeps the device busy.
    """

    __slots__ = ("_read", "grad_norm", "late", "loss", "lr", "skipped", "stop", "targets")

    loss: float
    """Mean over all targets of the step: every micro-batch, every rank."""
    grad_norm: float
    """Norm of that mean's gradient over all parameters, before clipping."""
    skipped: bool
    """Whether the update was left out because something was not finite."""
    lr: float
    targets: float
    """How many targets the mean is over."""
    stop: bool
    """Whether some rank asked all of them to stop (`Engine.request_stop`)."""
    late: bool
    """Whether the numbers were on their way when the step returned. The same on every rank, and for good."""

    def __init__(
        self, loss: float, grad_norm: float, skipped: bool, lr: float, targets: float, stop: bool = False
    ) -> None:
        self.lr = lr
        self.late = False
        self._read: Callable[[], Numbers] | None = None
        self._fill((loss, grad_norm, skipped, targets, stop))

    @classmethod
    def on_its_way(cls, lr: float, read: Callable[[], Numbers]) -> StepResult:
        """One whose numbers `read` waits for; it is asked once, by the first look at any of them."""
        result = cls.__new__(cls)
        result.lr, result.late, result._read = lr, True, read
        return result

    def wait(self) -> None:
        """Wait until the numbers have come from the device."""
        if self._read is not None:
            self._fill(self._read())
            self._read = None  # and with it what the numbers came in

    def _fill(self, numbers: Numbers) -> None:
        self.loss, self.grad_norm, self.skipped, self.targets, self.stop = numbers

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Asked only for what is not there: a number that has not come yet, or a name that no result has.
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
    """What a model said about one micro-batch, without gradients. Zeros and None on a rank that only helped."""

    loss_sum: float
    loss_count: float
    outputs: Any
    """What the model returned, for metrics."""


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
    """Is told what this rank begins to do."""
    whose: Callable[[int], str] = staticmethod(lambda step: "")
    """Says which samples a step had that went wrong, as the end of a sentence; nothing where nobody knows."""
    _say: Callable[[str], None]

    @abstractmethod
    def train_step(self, micro_batches: Sequence[Any]) -> StepResult:
        """One optimizer step over this rank's micro-batches. Every rank must pass equally many."""

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

    def settle(self) -> None:  # noqa: B027  # most engines have nothing under way
        """Wait for the steps under way, and report what there is to report of them. Every rank must do so."""

    @abstractmethod
    def agree_on_buffers(self) -> None:
        """Make what each rank gathers for itself, such as running statistics, the same on all of them."""

    @property
    def optimizer_type(self) -> str:
        """The name under which a checkpoint has the optimizer."""
        return self.config.optim.type

    @property
    def pending(self) -> int:
        """Micro-batches of a step that is not complete: their gradients are collected and not applied yet."""
        return 0

    def evaluate(self, batches: Iterable[Any], metrics: Sequence[evaluating.Measures] = ()) -> dict[str, float]:
        """The mean `loss` over all targets of all ranks' micro-batches, without training on them; and the metrics.

        `batches` are this rank's micro-batches. Ranks may have unequal numbers of them, but each one at least.
        Every rank must call it.
        """
        self.agree_on_buffers()
        with self.weights_to_use():
            return evaluating.evaluate(self, batches, metrics)

    @abstractmethod
    def evaluate_micro_batch(self, batch: Any) -> Evaluation:
        """Forward one micro-batch without gradients, in evaluation mode. Nothing is summed over ranks.

        Where the model is spread, every rank must call it equally often.
        """

    def save(self, folder: str | Path, *, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint that any strategy on any number of ranks can `load`; returns its folder.

        `extra` are numbers, texts, lists and dicts of the user's own, rank 0's, which `load` returns. The folder
        appears when all is written; one that is there already is an error. Every rank must call it.
        """
        with self.weights_to_use():
            return checkpointing.save_engine(self, folder, extra)

    def load(self, folder: str | Path, *, partial: Sequence[str] = ()) -> dict[str, Any]:
        """Continue from a checkpoint that `save` or a Runner wrote; returns the `extra` that it was saved with.

        `folder` is a checkpoint, or holds several, of which the newest is taken. Names that fit a pattern of `partial`
        may differ, and stay as they are. Random state is restored where as many ranks have saved it. Every rank must
        call it.
        """
        return checkpointing.load_engine(self, folder, partial, self._say)

    @contextmanager
    def weights_to_use(self) -> Iterator[None]:
        """While this lasts, the model has the weights to evaluate, save and generate with.

        Some optimizers train others: those with `eval()` and `train()`, such as schedule-free ones. Every rank must
        enter it; within itself it changes nothing.
        """
        yield

    def bubble(self) -> Bubble | None:
        """How idle the ranks of this rank's pipeline were; None where there is none. Every rank must ask."""
        return None

    @abstractmethod
    def state_tensors(self) -> dict[str, Tensor]:
        """The logical state: `model.<name>`, `optim.<name>.<key>`; sharded ones as DTensor."""

    def state_entries(self) -> dict[str, Entry]:
        """The same for whoever saves or loads it: what is in another form while it trains may stay in that."""
        return {**self.state_tensors()}

    @abstractmethod
    def allocate_optimizer_state(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Make room for the optimizer state that a checkpoint is about to fill."""

    @abstractmethod
    def state_loaded(self) -> None:
        """The tensors of `state_tensors` were written to: bring everything derived from them up to date."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The state that is numbers, not tensors."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""

    @abstractmethod
    def parameter_count(self) -> tuple[int, int]:
        """How many numbers the whole model has, and how many of them are trained. Every rank must ask."""

    @abstractmethod
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that are not trained."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights that the optimizer updates, this rank's part of each, as plain tensors."""

    @abstractmethod
    def weights_changed(self) -> None:
        """Somebody wrote into `weights`: bring the model up to date."""

    @abstractmethod
    def as_whole(self, name: str, part: Tensor) -> Tensor:
        """A tensor shaped like this rank's part of a weight, as the logical whole that a checkpoint stores."""
