"""Which parameters are updated as one, and where their state lives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

Home = Literal["device", "cpu", "nvme"]
Sink = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class Span:
    """Parameters that are updated one after another, and the home of their state."""

    indices: tuple[int, ...]
    home: Home


def plan_spans(
    numels: Sequence[int], order: Sequence[int], *, limit: int, shares: Sequence[tuple[Home, float]]
) -> list[Span]:
    """Cut the parameters, taken in this order, into spans of at most `limit` numbers, or one that has more.

    Each home gets its share of all numbers, the fastest first: the next forward pass meets those first, and they are
    ready at once, while the CPU still works on the others. The last one takes the rest.
    """
    ends = [end * sum(numels) for end in accumulate(share for _, share in shares[:-1])]
    spans: list[Span] = []
    pending: list[int] = []
    size = passed = 0
    before = shares[-1][0]
    for index in order:
        numel = numels[index]
        passed += numel
        here = shares[next((place for place, end in enumerate(ends) if passed <= end), -1)][0]
        if pending and (size + numel > limit or here != before):
            spans.append(Span(tuple(pending), before))
            pending, size = [], 0
        before = here
        pending.append(index)
        size += numel
    if pending:
        spans.append(Span(tuple(pending), before))
    return spans


@dataclass(slots=True)
class Bucket:
    """Parameters that are updated as one."""

    span: Span
    targets: list[Tensor]
    """This rank's part of each parameter, as the model computes with it."""
    masters: list[nn.Parameter]
    """What the optimizer updates in their place."""
    sinks: list[Sink | None]
    """What takes the new weights of a parameter, where its target has no memory of its own."""
    optimizer: Optimizer | None = None
    """The optimizer, as if these were its only parameters."""
    update: Future[None] | None = None
    """The update in progress."""
    published: Any = None
    """A mark after the copies to the device of the last update."""
    home: Any = None
    """A mark: what the device updated is back in host memory."""

    @property
    def numel(self) -> int:
        """Numbers in all parameters."""
        return sum(target.numel() for target in self.targets)

    def items(self) -> Iterator[tuple[int, nn.Parameter, Tensor]]:
        """(index, master, target) of each parameter."""
        return zip(self.span.indices, self.masters, self.targets, strict=True)


def twin(optimizer: Optimizer, masters: Sequence[Tensor]) -> Optimizer:
    """The same optimizer for some of its parameters only. State is shared, options are copied (`copy_options`)."""
    other = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    mine = {id(master) for master in masters}
    other.param_groups = [
        {**group, "params": [param for param in group["params"] if id(param) in mine]}
        for group in optimizer.param_groups
    ]
    return other


def copy_options(source: Optimizer, target: Optimizer) -> None:
    """Bring a twin's options up to date: rates may change while an update is still running."""
    for group, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update({key: copy.copy(value) for key, value in group.items() if key not in ("params", "param_names")})
