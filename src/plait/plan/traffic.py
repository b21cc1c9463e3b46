"""What a collective sends, and along which axes of the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from plait.plan.hardware import Hardware

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
}
"""Names of torch's collectives, and what they do. Receiving is the other side's sending."""


@dataclass(frozen=True, slots=True)
class Message:
    """One collective, as one rank sees it."""

    kind: str
    bytes: int
    """Of the whole that is gathered, scattered, reduced or exchanged; of what is sent."""
    ranks: int
    stride: int
    """How far apart the ranks are that take part."""
    axis: str

    @property
    def overlaps(self) -> bool:
        """Whether it travels while others compute: between data-parallel ranks."""
        return "dp_" in self.axis

    @property
    def sent(self) -> int:
        """Bytes that leave this rank."""
        share = (self.ranks - 1) / self.ranks
        return int(
            self.bytes * {"gather": share, "scatter": share, "reduce": 2 * share, "exchange": share}.get(self.kind, 1)
        )

    def seconds(self, hardware: Hardware) -> float:
        """How long it takes where nothing else is under way."""
        link = hardware.link_between(self.ranks, self.stride)
        hops = {"reduce": 2 * (self.ranks - 1), "send": 1}.get(self.kind, self.ranks - 1)
        # Rings of many ranks are not waited for hop by hop: collectives switch to trees.
        return self.sent / (link.gbps * 1e9) + min(hops, 16) * link.latency_us * 1e-6


def message_of(func: Any, args: Any, out: Any) -> Message | None:
    """What a collective sends; None for other operations."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    kind = _KINDS.get(func._schema.name.split("::")[1].rstrip("_"), _KINDS.get(func._schema.name.split("::")[1], ""))
    if not kind:
        return None
    group = _group_of(args)
    if group is None or group.size() == 1:
        return None
    sizes = [each.numel() * each.element_size() for each in tree_leaves((args, out)) if isinstance(each, Tensor)]
    ranks = dist.get_process_group_ranks(group)
    return Message(kind, max(sizes, default=0), len(ranks), ranks[1] - ranks[0], group.group_desc or "")


def _group_of(args: Any) -> dist.ProcessGroup | None:
    for each in tree_leaves(args):
        if isinstance(each, dist.ProcessGroup):
            return each
        if isinstance(each, str) and each in dist.distributed_c10d._world.pg_names.values():
            found: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(each)  # type: ignore[attr-defined]
            return found
        if type(each).__name__ == "ScriptObject":
            return dist.ProcessGroup.unbox(each)
    return None
