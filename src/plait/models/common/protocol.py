"""What the rest of Plait may ask of a model.

A user's model needs none of this to train: a plain `nn.Module` that returns a loss is enough. Each member adds one
ability:

- `block_classes` lets the strategy shard, recompute and compile block by block;
- `root_parameters` lists weights that `forward` passes to other modules than their own, so that no block shards them;
- `init_weights` allows building on the meta device and initializing one module at a time;
- `tensor_plan` allows tensor parallelism;
- `forward` with an argument `hidden` allows splitting into pipeline stages;
- `after_step(group, updated=…)` is called after every optimizer step, with the ranks that saw other data, and whether
  the step changed the weights: a bool, or a scalar on the device;
- `flops_per_token` allows reporting MFU.

Inputs of a language model, all of shape (batch, tokens):

- `input_ids`: the tokens;
- `labels`: the target *of the same index*, shifted already by the data pipeline; -100 is ignored;
- `positions`: position of each token within its document; absent: 0, 1, 2, …;
- `document_ids`: tokens of a row attend to earlier tokens of the same id only; absent: one document.

With labels the model returns a `LossTerm` (cross-entropy summed in fp32, number of targets), without them the
logits. An image classifier takes `image` and `label` and returns `{"loss": LossTerm, "logits": Tensor}`.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

IGNORE_INDEX = -100
"""The label that the loss ignores."""


class LossTerm(NamedTuple):
    """A loss summed over its targets, and how many targets there were.

    Only the strategy divides, by the count over all micro-batches and ranks of the step.
    It is a named tuple, not a dataclass, because sharding hooks look for tensors inside a
    module's output with pytree, which sees through tuples only.
    """

    sum: Tensor
    count: Tensor | int | float  # type: ignore[assignment]  # hides tuple.count, on purpose

    def mean(self) -> Tensor:
        """The mean of this one part; use it for display, never for a backward pass."""
        return self.sum / self.count


@runtime_checkable
class Blocks(Protocol):
    """A model made of repeated blocks."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]]
    """The modules to shard, recompute and compile. Parameters outside of them belong to the root."""


@runtime_checkable
class Initializable(Protocol):
    """A model that can be built on the meta device and initialized later."""

    def init_weights(self, module: nn.Module) -> None:
        """Initialize the direct parameters and buffers of one module of this model, in place.

        They are full (not sharded) tensors at that time. The result depends on the module and torch's random state
        only, so modules may be initialized in any order, on any rank, each under its own seed. It has to be called for
        every module with direct parameters *or buffers*.
        """


@runtime_checkable
class TensorPlanned(Protocol):
    """A model that supports tensor parallelism."""

    def tensor_plan(self) -> dict[str, str]:
        """Words for patterns of module names, as `distributed/tensor_parallel.py` knows them."""


@runtime_checkable
class LanguageModel(Blocks, Initializable, Protocol):
    """Blocks, initialisation, and the forward described at the top of this module."""

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor | LossTerm:
        """Return the loss with labels, logits without."""

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of forward and backward for one token of a row of `seq_len`, without recomputation."""
