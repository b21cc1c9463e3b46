"""`PartialState`: rank and number of processes, and decorators for functions that only some of them run."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from plait.config import parse_sections
from plait.distributed import World, open_world

Function = Callable[..., Any]


class Processes:
    """The part of an `Accelerator` that concerns processes only."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._triggered = False

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.world.device

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return self.world.size

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its host."""
        return self.world.ranks.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.world.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its host."""
        return self.world.ranks.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.world.rank == self.world.size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world.size > 1

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this."""
        self.world.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each host only."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """A `with` block that the main process runs before the others."""
        yield from self._first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """A `with` block that the first process of each host runs before the others of that host."""
        yield from self._first(self.is_local_main_process)

    def _first(self, goes_first: bool) -> Iterator[None]:
        if not goes_first:
            self.wait_for_everyone()
        yield
        if goes_first:
            self.wait_for_everyone()

    def on_main_process(self, function: Function) -> Function:
        """Return a function that only the main process runs."""
        return _only(self.is_main_process, function)

    def on_local_main_process(self, function: Function) -> Function:
        """Return a function that only the first process of each host runs."""
        return _only(self.is_local_main_process, function)

    def on_last_process(self, function: Function) -> Function:
        """Return a function that only the last process runs."""
        return _only(self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """Return a function that only process `process_index` runs (default: 0)."""
        if function is None:
            return lambda decorated: self.on_process(decorated, process_index)
        return _only(self.process_index == (process_index or 0), function)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Function:
        """Return a function that only process `local_process_index` of each host runs (default: 0)."""
        if function is None:
            return lambda decorated: self.on_local_process(decorated, local_process_index)
        return _only(self.local_process_index == (local_process_index or 0), function)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's part of a list, tuple, mapping of lists or tensor.

        With `apply_padding`, shorter parts repeat their last entry, so that all have the same length.
        """
        yield self._share(inputs, apply_padding)

    def _share(self, inputs: Any, padded: bool) -> Any:
        if self.num_processes == 1:
            return inputs
        if isinstance(inputs, dict):
            return {key: self._share(value, padded) for key, value in inputs.items()}
        size, longer = divmod(len(inputs), self.num_processes)
        index = self.process_index
        start = index * size + min(index, longer)
        share = inputs[start : start + size + (1 if index < longer else 0)]
        missing = size + (1 if longer else 0) - len(share)
        if not padded or missing == 0:
            return share
        last = inputs[-1:]
        if isinstance(inputs, Tensor):
            return torch.cat([share, *([last] * missing)])
        return share + last * missing

    def set_trigger(self) -> None:
        """Set a flag that `check_trigger` sees on every process."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Return whether any process has called `set_trigger`; clear the flag. Every process must call it."""
        raised = self.world.any(self._triggered)
        if raised:
            self._triggered = False
        return raised


class PartialState(Processes):
    """Rank and number of processes, for scripts without an `Accelerator`."""

    def __init__(self, cpu: bool = False) -> None:
        super().__init__(open_world(parse_sections(**({"device": "cpu"} if cpu else {})).config))


def _only(runs_here: bool, function: Function) -> Function:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if runs_here else None

    return run
