"""Collectives of flat tensors, under the names that the installed torch has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from plait.distributed.heartbeat import wait_for
from plait.distributed.world import World
from plait.errors import PlaitError, TrainingError

# torch 2.13 has them under new names and warns of the old ones, which are all that 2.11 knows.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(output, input, group): every rank's input, one after another."""
reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""(output, input, group): this rank's part of the sum of all inputs."""

# Work that rank 0 does for all, who then succeed or fail with it.


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error on its way to the other ranks. Errors with arguments of their own cannot be pickled as they are."""

    kind: type[PlaitError]
    text: str
    fields: dict[str, Any]

    def error(self) -> PlaitError:
        error = self.kind.__new__(self.kind, self.text)
        error.__dict__.update(self.fields)
        return error


def on_main(world: World, action: Callable[[], T]) -> T:
    """Do something on rank 0. Every rank gets its result or, if it fails, an error: none waits for the others."""
    if world.size == 1:
        return action()
    if not world.is_main:
        outcome: T | _Failure = world.broadcast(None)
        if isinstance(outcome, _Failure):
            raise outcome.error()
        return outcome
    try:
        result = action()
    except PlaitError as error:
        world.broadcast(_Failure(type(error), str(error), vars(error)))
        raise
    except Exception as error:
        world.broadcast(_Failure(TrainingError, f"rank 0 failed: {type(error).__name__}: {error}", {}))
        raise
    return world.broadcast(result)  # type: ignore[no-any-return]


# A line between the ranks for words, not for gradients.


class Channel:
    """Small messages between all ranks. Every rank must make it, and use it in the same order.

    With `own`, it has a process group of its own in host memory, so that a thread may talk over it while training
    goes on over the other one, and so that it carries tensors of the host whatever the device is.
    """

    def __init__(self, world: World, *, own: bool = False) -> None:
        self.rank = world.rank
        self.size = world.size
        self.is_main = world.is_main
        self._group = None
        if world.mesh is not None and own:
            self._group = dist.new_group(backend="gloo")

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value, on rank 0; None on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def scatter(self, values: list[Any] | None) -> Any:
        """To each rank its own of the values that rank 0 has."""
        if self.size == 1:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, values, src=0, group=self._group)
        return box[0]

    def pass_on(self, tensor: Tensor, *, source: int, target: int) -> None:
        """Copy a tensor of the host from one rank to another; only those two call it."""
        if self.rank == source:
            wait_for([dist.isend(tensor, dst=target, group=self._group)], "an exchange of checkpoint files")
        else:
            wait_for([dist.irecv(tensor, src=source, group=self._group)], "an exchange of checkpoint files")

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on at least one rank."""
        if self.size == 1:
            return flag
        device = "cpu" if self._group is not None or dist.get_backend() != "nccl" else "cuda"
        box = torch.tensor([flag], dtype=torch.int32, device=device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._group)
        return bool(box.item())

    def close(self) -> None:
        """End the group that was made for it."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._group = None
