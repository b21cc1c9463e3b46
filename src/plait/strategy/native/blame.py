"""Which module first made a number that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.strategy.native.views import Views
from plait.torch_internals import tree_leaves
from plait.world import local_part


class Culprit(NamedTuple):
    """What a rank found. The smallest one of all ranks says most: outputs come before gradients."""

    order: int
    what: str

    def __str__(self) -> str:
        return self.what


def find_culprit(
    model: nn.Module, views: Views, forward_again: Callable[[], Any], norms: Tensor | None = None
) -> Culprit:
    """The first module whose output is not finite, or else the last parameter whose gradient is not.

    Runs the forward pass once more under observation; with sharded parameters every rank must call it. `norms` are
    those of the gradients, where these are gone.
    """
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def check(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            if not found and not _finite(outputs):
                found.append(name)

        return check

    hooks = [module.register_forward_hook(watch(name or "the model")) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            forward_again()
    finally:
        for hook in hooks:
            hook.remove()
    if found:
        return Culprit(0, f"the output of {found[0]}")
    # The backward pass meets the last parameters first, so the last bad gradient is the first one made.
    gradients = [views.gradient(index) for index in range(len(views.names))] if norms is None else list(norms.cpu())
    bad = [name for name, gradient in zip(views.names, gradients, strict=True) if not _finite(gradient)]
    if bad:
        return Culprit(1, f"the gradient of {bad[-1]}")
    return Culprit(2, "the loss, though every output and gradient is finite")


def first_of(culprits: Sequence[Culprit]) -> str:
    """What says most of what the ranks found, and where there are several, which of them found it."""
    first = min(culprits)
    ranks = [rank for rank, culprit in enumerate(culprits) if culprit == first]
    if len(culprits) == 1:
        return str(first)
    if len(ranks) == len(culprits):
        return f"{first} on every rank"
    return f"{first} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _finite(value: Any) -> bool:
    return all(
        bool(torch.isfinite(local_part(leaf)).all())
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )
