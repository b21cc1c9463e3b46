"""The layouts of ZeRO: which rank keeps which elements of a parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch

from plait.checkpoint.convert.deepspeed.parts import Cuts, Parts, flat_group
from plait.errors import CheckpointError

Pickled = Mapping[str, Any]
"""What a file of a checkpoint holds."""


def stage_1_and_2(model: Pickled, shards: Sequence[Pickled]) -> Parts:
    """Trained parameters of stages 1 and 2.

    All parameters of a group lie one after the other in a flat tensor, which is cut evenly among the ranks: a
    boundary may fall into the middle of a parameter. What fills up the end is left off the last rank's part.

    [Note: addresses that are not trusted]
    Every rank also notes where in its part each parameter lies (`param_slice_mappings`). With `round_robin_gradients`
    these addresses are of another order than that of the tensors: DeepSpeed 0.19.8 then gives scrambled values from
    `safe_get_full_fp32_param`, and `ds_to_universal` writes them. The order of `param_shapes` is right in all cases.
    """
    parts: Parts = {}
    paddings = shards[0].get("param_alignment_paddings")
    for group, shapes in enumerate(model["param_shapes"]):
        masters = [shard["single_partition_of_fp32_groups"][group] for shard in shards]
        states = [_state_of_group(shard, group) for shard in shards]
        step = _step_of_group(shards[0], group)
        length = max(master.numel for master in masters)
        begin = 0
        for (name, given), padding in zip(shapes.items(), paddings[group] if paddings else repeat(0), strict=False):
            shape = torch.Size(given)
            cuts = _across(begin, begin + shape.numel(), length)
            parts |= flat_group(name, shape, masters, states, step, cuts)
            begin += shape.numel() + padding
    return parts


def _state_of_group(shard: Pickled, group: int) -> Mapping[str, Any]:
    base = shard.get("base_optimizer_state") or {}
    if isinstance(base, Mapping):
        groups = base.get("param_groups")
        found = base["state"].get(groups[group]["params"][0], {}) if groups else {}
    else:
        found = base[group]  # an elastic checkpoint: a list, without the padding
    return found if isinstance(found, Mapping) else {}


def _step_of_group(shard: Pickled, group: int) -> Any:
    base = shard.get("base_optimizer_state")
    groups = base.get("param_groups") if isinstance(base, Mapping) else None
    return groups[group].get("step") if groups else shard.get("base_optimizer_state_step")


def _across(begin: int, end: int, length: int) -> Cuts:
    """From element `begin` to `end` of what the ranks have, `length` elements each."""

    def cuts() -> Iterator[tuple[int, int, int]]:
        at = begin
        while at < end:
            rank, start = divmod(at, length)
            count = min(end - at, length - start)
            yield rank, start, count
            at += count

    return cuts


def stage_3(model: Pickled, shards: Sequence[Pickled]) -> Parts:
    """Trained parameters of stage 3: each one is cut evenly among the ranks, and padded at its end."""
    parts: Parts = {}
    for group, shapes in enumerate(model["param_shapes"]):
        masters = [shard["fp32_flat_groups"][group] for shard in shards]
        states = [_state_of_subgroup(shard, group) for shard in shards]
        begin = 0
        for name, given in shapes.items():
            shape = torch.Size(given)
            each = math.ceil(shape.numel() / len(shards))
            parts |= flat_group(name, shape, masters, states, None, evenly(begin, shape.numel(), each, len(shards)))
            begin += each
        if masters[0].numel < begin:
            raise CheckpointError(
                f"the fp32 weights of parameter group {group} have {masters[0].numel} of {begin} elements: "
                "DeepSpeed kept them on NVMe, in files that only it can read back. Load the checkpoint once with "
                "`offload_optimizer` on the CPU or off, and save it again"
            )
    return parts


def _state_of_subgroup(shard: Pickled, index: int) -> Mapping[str, Any]:
    inner = shard.get("optimizer_state_dict")
    if not isinstance(inner, Mapping):
        return {}
    numbered = [number for group in inner["param_groups"] for number in group["params"]]
    found = inner["state"].get(numbered[index] if index < len(numbered) else index, {})
    return found if isinstance(found, Mapping) else {}


def evenly(begin: int, size: int, each: int, ranks: int) -> Cuts:
    """Every rank has `each` elements from `begin` on, until `size` of them are given out."""

    def cuts() -> Iterator[tuple[int, int, int]]:
        for rank in range(ranks):
            yield rank, begin, max(0, min(each, size - rank * each))

    return cuts
