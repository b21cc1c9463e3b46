"""Steps of a model whose layers follow each other over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from plait.parallel import Find, Gradients, Pipeline, Stage, is_legal
from plait.strategy.native.loss import LossNormalizer, WeightedLoss
from plait.torch_internals import tree_leaves

ReadLoss = Callable[[Any, int], WeightedLoss]
"""(the model's answer, the number of the micro-batch) → its loss."""


class StageSet(nn.Module):
    """Several stages of one model on one rank, under the names that their tensors have in the whole model."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The modules of all stages; those that hold layers of several stages come once for each."""
        for part in self.parts:
            yield from part.named_modules(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """A module of the first stage that has it."""
        *others, last = self.parts
        for part in others:
            with suppress(AttributeError):
                return part.get_submodule(target)
        return last.get_submodule(target)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of all stages; one that two of them hold comes once, as the first has it."""
        seen = set[str]()
        for part in self.parts:
            for name, param in part.named_parameters(*args, **kwargs):
                if name not in seen:
                    yield name, param
                seen.add(name)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers of all stages."""
        for part in self.parts:
            yield from part.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The tensors of all stages."""
        backwards = list(self.parts)[::-1]  # what two of them hold is the first one's
        return {name: value for part in backwards for name, value in part.state_dict(*args, **kwargs).items()}


class StagedSteps:
    """Runs micro-batches through a pipeline, and sees to their losses."""

    def __init__(self, pipeline: Pipeline, collectors: Mapping[int, Gradients], find_gradient: Find | None) -> None:
        """`collectors`: by stage, what collects its gradients, where that wants to be told of each pass.

        `find_gradient` finds a gradient that is not in its parameter's `.grad`.
        """
        self.pipeline = pipeline
        self._collectors = collectors
        self._find_gradient = find_gradient

    def at_least(self, count: int) -> int:
        """As many micro-batches, or the next larger number that the schedule can work with."""
        while not is_legal(self.pipeline.schedule, self.pipeline.ranks, count):
            count += 1
        return count

    def train(
        self,
        ready: Sequence[Any],
        inputs: Sequence[Any],
        read_loss: ReadLoss,
        normalizer: LossNormalizer,
        scale: Callable[[Tensor], Tensor],
    ) -> None:
        """Forward and backward over all micro-batches of a step; `inputs` is what of each the model gets."""
        count = len(ready)
        normalizer.expect(_targets(ready[0]) * count)

        def loss_of(outputs: Any, _inputs: Any, index: int) -> Tensor:
            loss = read_loss(outputs, index)
            normalizer.add(loss, micro_batches=count)
            return scale(normalizer.scaled(loss))

        def before_backward(stage: Stage, last: bool) -> None:
            self._collectors[stage.index].before_backward(last=last)

        self.pipeline.tied.refresh()
        self.pipeline.step(inputs, loss_of, before_backward if self._collectors else None)
        if not self.pipeline.has_last:
            normalizer.add_nothing()

    def finish(self) -> None:
        """Add up the gradients of weights that several stages hold."""
        self.pipeline.tied.sum(self._find_gradient)

    def answer(self, ready: Any) -> Any:
        """What the model says to one micro-batch, where the last stage is; None elsewhere."""
        self.pipeline.tied.refresh()
        answers = self.pipeline.forward([ready])
        return answers[0] if answers else None


def _targets(inputs: Any) -> int:
    """About how many targets a micro-batch has: as many as its largest tensor of whole numbers, or its first's rows."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    whole = [leaf.numel() for leaf in tensors if not leaf.is_floating_point()]
    return max(whole, default=len(tensors[0]) if tensors else 1)
