"""Whose a piece of memory is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from plait.ops.blockwise import Packed
from plait.plan.recorder import Recorder
from plait.spec.phase import Phase
from plait.strategy.native.engine import NativeEngine
from plait.world import is_sharded

PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered parameters",
    "activations",
    "communication",
    "temporaries",
    "kernel workspaces",
)
"""What the memory of a rank consists of."""


def classify(recorder: Recorder, engine: NativeEngine) -> dict[str, int]:
    """Bytes in use now, by whose they are."""
    owners: dict[int, str] = {}
    for owner, tensor in known_tensors(engine):
        owners.setdefault(_storage(tensor), owner)
    found: Counter[str] = Counter()
    for key, piece in recorder.pieces.items():
        part = owners.get(key)
        if part is None and piece.sent:
            part = "communication"
        if part is None:
            # What the forward pass made and is still there, the backward pass will need.
            part = "activations" if piece.born is Phase.FORWARD else "temporaries"
            if piece.born is Phase.BUILD:
                part = "kernel workspaces"
        found[part] += piece.size
    return {part: found[part] for part in PARTS if found[part]}


def known_tensors(engine: NativeEngine) -> Iterator[tuple[str, Tensor]]:
    """The tensors that belong to someone."""
    for param in engine.model.parameters():
        yield "parameters", param
        if param.grad is not None:
            yield "gradients", param.grad
    for buffer in engine.model.buffers():
        yield "parameters", buffer
    for state in engine.updater.optimizer.state.values():
        for value in state.values():
            for part in value if isinstance(value, Packed) else (value,):
                if isinstance(part, Tensor):
                    yield "optimizer", part
    for name, tensor in zip(engine.views.names, engine.views.tensors, strict=True):
        yield "parameters", tensor  # the fp32 weights behind rounded ones
        if tensor.grad is not None:
            yield "gradients", tensor.grad
        if engine.views.in_buckets:
            yield "gradients", engine.views.gradient_of(name)
    yield from _gathered(engine)


def _gathered(engine: NativeEngine) -> Iterator[tuple[str, Tensor]]:
    """What `fully_shard` holds beside the shards."""
    for module in engine.model.modules():
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        group = getattr(state, "_fsdp_param_group", None)
        for each in getattr(group, "fsdp_params", ()):
            for tensor in getattr(each, "all_gather_outputs", ()):
                yield "gathered parameters", tensor
            whole = getattr(each, "_unsharded_param", None)
            if whole is not None:
                yield "gathered parameters", whole
            accumulated = getattr(each, "unsharded_accumulated_grad", None)
            if accumulated is not None:
                yield "gradients", accumulated


def _storage(tensor: Tensor) -> int:
    with torch.no_grad():
        while is_sharded(tensor):
            tensor = tensor._local_tensor
        return int(tensor.untyped_storage()._cdata)
