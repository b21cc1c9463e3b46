"""The methods and attributes of a model that the rest of Plait uses.

A user's model needs none of them to train: a plain `nn.Module` that returns a loss is enough. Each one makes a feature
available:

- `block_classes` are the modules that the strategy shards, recomputes and compiles separately;
- `root_parameters` returns the weights that `forward` passes to modules other than their own, so that these weights are
  sharded with the root module and not with a block;
- `init_weights` allows building on the meta device and initializing one module at a time;
- `tensor_plan` allows tensor parallelism;
- `forward` with an argument `hidden` allows splitting the model into pipeline stages;
- `after_step(group, updated=…)` is called after every optimizer step, with the process group of the ranks that have the
  same parameters and other tokens, and whether the step changed the weights: a bool, or a scalar tensor on the device;
- `flops_per_token` allows reporting MFU;
- `data_group`, an attribute, is set to the process group of the ranks that read different samples (None: one rank), for
  losses that compare the samples of all of them.

Inputs of a language model, all of shape (batch, tokens):

- `input_ids`: the tokens;
- `labels`: the target *of the same index*: the data pipeline has shifted them; -100 is ignored;
- `positions`: position of each token within its document; absent: 0, 1, 2, …;
- `document_ids`: a token attends only to tokens of its row with the same id; absent: the row is one document.

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

    A model must not divide: the engine divides by the count over all micro-batches and ranks of the step. This is a
    named tuple and not a dataclass, because sharding hooks find the tensors in a module's output with torch's pytree,
    which looks into tuples but not into dataclasses.
    """

    sum: Tensor
    count: Tensor | int | float  # type: ignore[assignment]  # hides tuple.count, on purpose

    def mean(self) -> Tensor:
        """Return the mean of this loss term alone: for display only, as a backward pass needs the step's count."""
        return self.sum / self.count


@runtime_checkable
class Blocks(Protocol):
    """A model made of repeated blocks."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]]
    """The modules to shard, recompute and compile separately. Parameters outside of them belong to the root module."""


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
        """Return a style of `distributed/tensor_parallel.py` for each pattern of module names."""


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
        """Return the FLOPs of forward and backward for a token of a row of `seq_len`, without recomputation."""
