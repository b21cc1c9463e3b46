"""What every style of tensor parallelism has in common."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from plait.errors import Problem
from plait.parallel.tensor.dropout import OwnRandom
from plait.parallel.tensor.parameters import SIZE_KEY, Placed

PLAN_KEY = "strategy.tensor.plan"
"""The setting that holds a user's own plan."""
SEQUENCE_KEY = "strategy.tensor.sequence_parallel"
"""The setting that asks for sequence parallelism."""


@dataclass(frozen=True, slots=True)
class Site:
    """One module of the plan, and what is known of its surroundings."""

    name: str
    module: nn.Module
    parent: nn.Module
    words: dict[str, str]
    """The whole plan: the word of each module name."""
    mesh: DeviceMesh
    group: dist.ProcessGroup
    """The ranks that share the work."""
    size: int
    """How many they are."""
    rank: int
    """This rank's place among them."""
    placed: Placed
    sequence: bool
    """Whether sequence parallelism was asked for."""
    split: bool
    """Whether activations are split along the sequence here."""
    region: str | None
    """The outer module that has brought the input into tensor-parallel work already, if any."""
    random: dict[str, OwnRandom]
    """The random numbers of regions that need their own, by name."""

    def siblings(self, word: str) -> list[nn.Module]:
        """The parent's direct children that the plan gives a word to."""
        prefix = self.name.rpartition(".")[0]
        names = [name for name, child in self.parent.named_children()]
        return [
            self.parent.get_submodule(name)
            for name in names
            if self.words.get(f"{prefix}.{name}" if prefix else name) == word
        ]


class Style(ParallelStyle):
    """One word of a plan at one site."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def problems(self) -> list[Problem]:
        """What makes it impossible here; asked before anything is changed."""
        return []

    @abstractmethod
    def place(self) -> None:
        """Place the module's parameters and change its forward."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """What `parallelize_module` calls."""
        assert module is self.site.module
        assert device_mesh == self.site.mesh
        self.place()
        return module

    def wrong_module(self, wanted: str) -> list[Problem]:
        """The problem of a word that does not suit its module."""
        word = self.site.words[self.site.name]
        found = type(self.site.module).__name__
        return [Problem(PLAN_KEY, f"`{word}` works on {wanted}, but {self.site.name!r} is a {found}")]

    def indivisible(self, what: str, count: int) -> list[Problem]:
        """The problem of a count that the ranks cannot share evenly; none where they can."""
        if count % self.site.size == 0:
            return []
        sizes = [str(n) for n in range(1, min(count, 64) + 1) if count % n == 0]
        message = f"{self.site.size} ranks cannot share {count} {what} of {self.site.name!r}"
        return [Problem(SIZE_KEY, message, f"sizes that can: {', '.join(sizes)}")]


def around(
    module: nn.Module,
    *,
    enter: Callable[[Tensor], Tensor] | None = None,
    leave: Callable[[Tensor], Tensor] | None = None,
    context: Callable[[Tensor], AbstractContextManager[Any]] | None = None,
) -> None:
    """Change a module's main input and main output, and run it within a context.

    The main input is the first argument of its forward, by place or by name; the main output is what it returns,
    or the first element of that. `forward` is replaced on this one module, so no name changes.
    """
    inner = module.forward
    names = list(inspect.signature(inner).parameters)
    first = names[0] if names else ""

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get(first)
        assert isinstance(given, Tensor), f"{type(module).__name__} was called without its first input, {first!r}"
        if enter is not None:
            entered = enter(given)
            if args:
                args = (entered, *args[1:])
            else:
                kwargs[first] = entered
        with nullcontext() if context is None else context(given):
            output = inner(*args, **kwargs)
        if leave is None:
            return output
        if isinstance(output, tuple):
            return (leave(output[0]), *output[1:])
        return leave(output)

    module.forward = forward


def while_training(site: Site, random: OwnRandom) -> Callable[[Tensor], AbstractContextManager[Any]]:
    """The context of a rank's own random numbers for a module of the plan, while it trains."""

    def context(given: Tensor) -> AbstractContextManager[Any]:
        return random.within(given.device) if site.module.training else nullcontext()

    return context
