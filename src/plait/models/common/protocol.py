"""What the rest of the framework may ask of a model.

A user's own model needs none of this to train: a plain `nn.Module` that returns a loss is enough.
Each member adds one ability:

- `block_classes` lets the strategy shard, recompute and compile block by block;
- `root_parameters` names the weights that it hands to other modules than their own, so that no block keeps them;
- `init_weights` lets it build on the meta device and fill one module at a time;
- `tensor_plan` lets ranks share the work of its layers;
- `forward` with an argument `hidden` lets it be cut into pipeline stages;
- `after_step(group, updated=…)` is called after every optimizer step, with the ranks that saw other data, and whether
  the step changed the weights: a bool, or a scalar of the device that decided it;
- `flops_per_token` lets reports speak of hardware use.

Inputs of a language model, all of shape (batch, tokens):

- `input_ids`: the tokens;
- `labels`: the target *of the same index*, shifted already by the data pipeline; -100 counts for nothing;
- `positions`: place of each token within its document; absent means 0, 1, 2, …;
- `document_ids`: tokens of a row attend to earlier tokens of the same id only; absent means one document.

With labels the answer is a `LossTerm` (cross-entropy summed in fp32, number of targets), without them the
logits. An image classifier takes `image` and `label` and answers `{"loss": LossTerm, "logits": Tensor}`.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

IGNORE_INDEX = -100
"""The label that counts for nothing."""


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
    """A model made of repeated units."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]]
    """The units to shard, recompute and compile. Whatever lies outside them belongs to the root."""


@runtime_checkable
class Initializable(Protocol):
    """A model that can be built on the meta device and filled later."""

    def init_weights(self, module: nn.Module) -> None:
        """Fill the direct parameters and buffers of one module of this model, in place.

        They are whole (not sharded) tensors at that time. The result depends on the module and torch's
        random state only, so modules may be filled in any order, on any rank, each under its own seed.
        It has to be called for every module with direct parameters *or buffers*.
        """


@runtime_checkable
class TensorPlanned(Protocol):
    """A model whose layers the ranks of a tensor-parallel group can share."""

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
        """Loss where labels are given, logits where not."""

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of forward and backward for one token of a row of `seq_len`; recomputation excluded."""
