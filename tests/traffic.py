"""What one rank sends, counted: the one counter that theory is compared with."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode


class Message(NamedTuple):
    """One collective, or one tensor to a neighbour."""

    kind: str
    ranks: int
    through: int
    """Bytes of the tensor that goes through it: of an all-gather and a reduce-scatter, the whole."""
    sent: float
    """Bytes that this rank sends, as the best algorithm does it: an all-reduce goes around a ring twice."""


class SentBytes(TorchDispatchMode):
    """Takes down what this rank sends. A kind of communication that it does not know is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    @property
    def bytes(self) -> float:
        """All that was sent. Exact where the numbers of ranks are powers of two."""
        return sum(message.sent for message in self.messages)

    def through(self) -> dict[str, int]:
        """The bytes that went through each kind of communication."""
        counts: Counter[str] = Counter()
        for message in self.messages:
            counts[message.kind] += message.through
        return dict(counts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            message = _read(func._opname, args)
            if message is not None:
                self.messages.append(message)
        return func(*args, **(kwargs or {}))


def _read(name: str, args: Any) -> Message | None:
    match name:
        case "recv_" | "wait_tensor" | "_wrap_tensor_autograd":
            return None
        case "send":
            return Message("send", 2, args[0][0].nbytes, args[0][0].nbytes)
        case "allreduce_":
            return _whole("all_reduce", args[0][0], args[1], rounds=2)
        case "_allgather_base_":
            return _whole("all_gather", args[0], args[2])
        case "_reduce_scatter_base_":
            return _whole("reduce_scatter", args[1], args[2])
        case "alltoall_base_":
            return _exchange(args[1], dist.ProcessGroup.unbox(args[2]), args[4])
        case "all_to_all_single":
            return _exchange(args[0], _resolve_process_group(args[3]), args[2])
    raise AssertionError(f"{name} is not counted")


def _whole(kind: str, tensor: Tensor, group: Any, rounds: int = 1) -> Message:
    ranks = dist.ProcessGroup.unbox(group).size()
    return Message(kind, ranks, tensor.nbytes, rounds * tensor.nbytes * (ranks - 1) / ranks)


def _exchange(rows: Tensor, group: dist.ProcessGroup, splits: list[int]) -> Message:
    """Without `splits` every rank gets as many rows; what this rank sends itself stays where it is."""
    ranks, all_rows = group.size(), len(rows)
    away = all_rows - splits[group.rank()] if splits else all_rows * (ranks - 1) / ranks
    row_bytes = rows.nbytes / all_rows if all_rows else 0
    return Message("all_to_all", ranks, rows.nbytes, away * row_bytes)
