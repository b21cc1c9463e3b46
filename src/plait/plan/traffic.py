"""What a collective sends, and along which axes of the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from plait.config import Layout
from plait.plan.hardware import Hardware
from plait.torch_internals import group_by_name, is_group_name, schema_of, tree_leaves

_KINDS = {
    "allgather": "gather",
    "_allgather_base": "gather",
    "allgather_into_tensor_coalesced": "gather",
    "all_gather_into_tensor": "gather",
    "reduce_scatter": "scatter",
    "_reduce_scatter_base": "scatter",
    "reduce_scatter_tensor_coalesced": "scatter",
    "reduce_scatter_tensor": "scatter",
    "allreduce": "reduce",
    "allreduce_coalesced": "reduce",
    "all_reduce": "reduce",
    "alltoall": "exchange",
    "alltoall_base": "exchange",
    "all_to_all_single": "exchange",
    "broadcast": "send",
    "send": "send",
    "recv_": "",
    "recv_any_source_": "",
    "barrier": "",
    "wait_tensor": "",
    "_wrap_tensor_autograd": "",
}
"""Names of torch's collectives, and what they do. Receiving is the other side's sending."""


@dataclass(frozen=True, slots=True)
class Message:
    """One collective, as one rank sees it."""

    kind: str
    bytes: int
    """Of the whole that is gathered, scattered, reduced or exchanged; of what is sent."""
    kept: float
    """Of these, what does not leave this rank."""
    ranks: int
    stride: int
    """How far apart the ranks are that take part."""
    axes: tuple[str, ...]

    @property
    def axis(self) -> str:
        """The axes of the layout that it goes along, as one word."""
        return "+".join(self.axes)

    @property
    def is_data_parallel(self) -> bool:
        """Whether it brings parameters or gradients together, between ranks that see other data."""
        others = set(self.axes) - {"dp_replicate", "dp_shard"}
        return len(others) < len(self.axes) or (others <= {"cp", "ep"} and self.kind in ("gather", "scatter", "reduce"))

    @property
    def sent(self) -> float:
        """Bytes that leave this rank, as the best algorithm does it: a reduction goes around a ring twice."""
        return (2 if self.kind == "reduce" else 1) * (self.bytes - self.kept)

    def seconds(self, hardware: Hardware) -> float:
        """How long it takes where nothing else is under way."""
        link = hardware.link_between(self.ranks, self.stride)
        hops = {"reduce": 2 * (self.ranks - 1), "send": 1}.get(self.kind, self.ranks - 1)
        # Rings of many ranks are not waited for hop by hop: collectives switch to trees.
        return self.sent / (link.gbps * 1e9) + min(hops, 16) * link.latency_us * 1e-6


def kind_of(func: Any) -> str | None:
    """What kind of message a collective is; empty where it sends nothing, None where it is not known."""
    name = schema_of(func).name.split("::")[1]
    return _KINDS.get(name.rstrip("_"), _KINDS.get(name))


def message_of(func: Any, args: Any, out: Any, layout: Layout | None = None) -> Message | None:
    """What a collective sends; None for other operations. Its axes are known where the layout is."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    kind = kind_of(func)
    group = _group_of(args) if kind else None
    if not kind or group is None or group.size() == 1:
        return None
    ranks = dist.get_process_group_ranks(group)
    if kind == "exchange":
        size, kept = _exchanged(func, args, group)
    else:
        size = max(each.nbytes for each in tree_leaves((args, out)) if isinstance(each, Tensor))
        kept = 0.0 if kind == "send" else size / len(ranks)
    axes = () if layout is None else axes_of(layout, ranks)
    return Message(kind, size, kept, len(ranks), ranks[1] - ranks[0], axes)


def _exchanged(func: Any, args: Any, group: dist.ProcessGroup) -> tuple[int, float]:
    """Bytes that a rank puts into an exchange, and those that it sends to itself: without splits, its even share."""
    named = {each.name: value for each, value in zip(schema_of(func).arguments, args, strict=False)}
    given = named["input"] if "input" in named else named["input_tensors"]
    splits = named.get("input_split_sizes")
    if isinstance(given, Tensor):
        rows = len(given)
        own = splits[group.rank()] if splits else rows / group.size()
        return given.nbytes, given.nbytes * own / rows if rows else 0.0
    return sum(each.nbytes for each in given), float(given[group.rank()].nbytes)


def axes_of(layout: Layout, ranks: Sequence[int]) -> tuple[str, ...]:
    """The axes along which these ranks differ."""
    found, inner = [], layout.size
    for axis, size in layout.sizes().items():
        inner //= size
        if len({rank // inner % size for rank in ranks}) > 1:
            found.append(axis)
    return tuple(found)


def _group_of(args: Any) -> dist.ProcessGroup | None:
    for each in tree_leaves(args):
        if isinstance(each, dist.ProcessGroup):
            return each
        if isinstance(each, str) and is_group_name(each):
            return group_by_name(each)
        if type(each).__name__ == "ScriptObject":
            return dist.ProcessGroup.unbox(each)
    return None
