"""Collectives: of flat tensors, of small Python objects, and with gradients (all-reduce, all-gather, all-to-all, …)."""

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

# torch 2.13 has new names for these and deprecates the old ones, which are all that 2.11 has.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(output, input, group): write the inputs of all ranks, concatenated, to `output`."""
reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""(output, input, group): write this rank's chunk of the sum of all inputs to `output`."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error in a form that can be pickled, which an exception cannot if its `__init__` takes more than a text."""

    error_type: type[PlaitError]
    text: str
    fields: dict[str, Any]

    def error(self) -> PlaitError:
        error = self.error_type.__new__(self.error_type, self.text)
        error.__dict__.update(self.fields)
        return error


def on_main(world: World, action: Callable[[], T]) -> T:
    """Run `action` on rank 0, and return its result on every rank; if it fails, raise an error on every rank."""
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


class Channel:
    """Collectives of small Python objects. Every rank must create it, and call its methods in the same order.

    With `new_group` it creates a gloo process group, so that a thread may use it while training uses the default group,
    and so that it can send host tensors whatever the device is.
    """

    def __init__(self, world: World, *, new_group: bool = False) -> None:
        self.rank = world.rank
        self.size = world.size
        self.is_main = world.is_main
        self._group = None
        if world.mesh is not None and new_group:
            self._group = dist.new_group(backend="gloo")

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value, in rank order, on rank 0; None on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def scatter(self, values: list[Any] | None) -> Any:
        """Return this rank's element of `values`, which only rank 0 passes: one element per rank."""
        if self.size == 1:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, values, src=0, group=self._group)
        return box[0]

    def pass_on(self, tensor: Tensor, *, source: int, target: int) -> None:
        """Copy a host tensor from rank `source` into `tensor` of rank `target`; only those two call it."""
        if self.rank == source:
            wait_for([dist.isend(tensor, dst=target, group=self._group)], "an exchange of checkpoint files")
        else:
            wait_for([dist.irecv(tensor, src=source, group=self._group)], "an exchange of checkpoint files")

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on at least one rank."""
        if self.size == 1:
            return flag
        device = "cpu" if self._group is not None or dist.get_backend() != "nccl" else "cuda"
        box = torch.tensor([flag], dtype=torch.int32, device=device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._group)
        return bool(box.item())

    def close(self) -> None:
        """Destroy the process group, if it was created with `new_group`."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._group = None


# ---- collectives with gradients
#
# | function                | forward        | backward       | from → to                                          |
# |-------------------------|----------------|----------------|----------------------------------------------------|
# | `copy_to_region`        | –              | all-reduce     | replicated → replicated, for sharded work          |
# | `all_reduce`            | all-reduce     | –              | partial → replicated                               |
# | `all_gather`            | all-gather     | reduce-scatter | sharded → replicated, for sharded work             |
# | `reduce_scatter`        | reduce-scatter | all-gather     | partial → sharded                                  |
# | `split`                 | local chunk    | all-gather     | replicated → sharded                               |
# | `all_gather_replicated` | all-gather     | local chunk    | sharded → replicated, for the same work everywhere |
# | `all_to_all`            | all-to-all     | all-to-all     | sharded along one dimension → along another        |
#
# "Partial": each rank has a summand, and the tensor is the sum over ranks. "For sharded work": the ranks divide the
# computation that follows among them, so each has only a partial gradient. "For the same work": all ranks compute the
# same, so each has the full gradient. That is the difference between the two all-gathers.


_Operation = Callable[[Tensor, int, dist.ProcessGroup], Tensor]


def copy_to_region(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x`, replicated, for sharded work: its gradient is summed over ranks."""
    return _apply_collective(x, _identity, _all_reduce, 0, group)


def copy_param_to_region(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return what `copy_to_region` returns; partial gradients are summed in fp32, whatever their dtype."""
    return _apply_collective(x, _identity, _all_reduce_fp32, 0, group)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks; the gradient is passed on as it is."""
    return _apply_collective(x, _all_reduce, _identity, 0, group)


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return all shards, concatenated along `dim`, for sharded work: the gradient is summed over ranks and split."""
    return _apply_collective(x, _all_gather, _reduce_scatter, dim, group)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's chunk, along `dim`, of the sum over ranks."""
    return _apply_collective(x, _reduce_scatter, _all_gather, dim, group)


def split(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's chunk, along `dim`, of a replicated tensor."""
    return _apply_collective(x, _split, _all_gather, dim, group)


def all_gather_replicated(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return all shards, concatenated along `dim`, for work that is the same on every rank: the gradient is split."""
    return _apply_collective(x, _all_gather, _split, dim, group)


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row r of `x` (ranks, …) to rank r; return the rows that were received, row r from rank r."""
    return _apply_collective(x, _all_to_all, _all_to_all, 0, group)


def _apply_collective(
    x: Tensor, forward: _Operation, backward: _Operation, dim: int, group: dist.ProcessGroup
) -> Tensor:
    result: Tensor = _Collective.apply(x, forward, backward, dim % max(x.ndim, 1), group)  # type: ignore[no-untyped-call]
    return result


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: _Operation, backward: _Operation, dim: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.backward_op, ctx.dim, ctx.group = backward, dim, group
        return forward(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.backward_op(grad, ctx.dim, ctx.group), None, None, None, None


def _identity(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _all_reduce_fp32(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return _all_reduce(x.float(), dim, group).to(x.dtype)


def _all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    chunks = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    all_gather_flat(chunks, x.contiguous(), group=group)
    if dim == 0:
        return chunks
    if x.shape[0] == 1 and dim == 1:
        return chunks.flatten(0, 1)[None]  # already in order
    return torch.cat(chunks.chunk(group.size()), dim)


def _reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    chunks = x.contiguous() if dim == 0 else torch.cat(x.chunk(group.size(), dim))
    local = chunks.new_empty((chunks.shape[0] // group.size(), *chunks.shape[1:]))
    reduce_scatter_flat(local, chunks, group=group)
    return local


def _split(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    length = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * length, length).clone(memory_format=torch.contiguous_format)


def _all_to_all(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
