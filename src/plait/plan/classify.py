"""Classify the memory in use: parameters, gradients, optimizer state, activations, …"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from plait.distributed import StreamedGradients, is_sharded, replaced
from plait.engine import NativeEngine, OffloadedParams
from plait.launch import Phase
from plait.optim import leaves
from plait.plan.recorder import MemoryRecorder
from plait.torch_internals import (
    fsdp_all_gather_outputs,
    fsdp_param_group,
    fsdp_params,
    fsdp_unsharded_accumulated_grad,
    fsdp_unsharded_param,
    local_tensor,
    storage_key,
)

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered parameters",
    "activations",
    "communication",
    "temporaries",
    "kernel workspaces",
)
"""The categories of a rank's memory."""


class Owners:
    """Classifies the memory of one engine; can be used repeatedly."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._params = list(engine.model.parameters())
        self._buffers = list(engine.model.buffers())
        self._gathering = list(_gathering(engine))

    def share_out(self, recorder: MemoryRecorder) -> dict[str, int]:
        """Return category → bytes that are in use now."""
        owners: dict[int, str] = {}
        with torch.no_grad(), replaced(recorder, "paused", True):  # views made here are not part of the step
            for owner, tensor in self.known():
                owners.setdefault(_storage(tensor), owner)
        sizes: Counter[str] = Counter()
        for key, piece in recorder.pieces.items():
            category = owners.get(key)
            if category is None and piece.sent:
                category = "communication"
            if category is None:
                # Memory from the forward pass that still exists is needed by the backward pass.
                category = "activations" if piece.born is Phase.FORWARD else "temporaries"
                if piece.born is Phase.BUILD:
                    category = "kernel workspaces"
            sizes[category] += piece.size
        return {category: sizes[category] for category in CATEGORIES if sizes[category]}

    def known(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (category, tensor) for all tensors that the engine holds now."""
        engine = self._engine
        for param in self._params:
            yield "parameters", param
            if param.grad is not None:
                yield "gradients", param.grad
        for buffer in self._buffers:
            yield "parameters", buffer
        for state in engine.updater.optimizer.state.values():
            for tensor in leaves(state):
                yield "optimizer", tensor
        for master in engine.master_weights.updated if engine.master_weights.owned is not None else ():
            if master is not None:
                yield "optimizer", master
        for name, tensor in zip(engine.master_weights.names, engine.master_weights.tensors, strict=True):
            yield "parameters", tensor  # the fp32 weights behind rounded ones
            if tensor.grad is not None:
                yield "gradients", tensor.grad
            if engine.master_weights.buckets is not None:
                yield "gradients", engine.master_weights.gradient_of(name)
        for param in self._gathering:
            yield from _gathered(param)
        if isinstance(engine.master_weights, OffloadedParams):
            yield "optimizer", engine.master_weights.store.stand_in
        if isinstance(engine.gradients, StreamedGradients):
            yield from (("gradients", tensor) for tensor in engine.gradients.sums.values())


def classify(recorder: MemoryRecorder, engine: NativeEngine) -> dict[str, int]:
    """Return category → bytes that are in use now."""
    return Owners(engine).share_out(recorder)


def known_tensors(engine: NativeEngine) -> Iterator[tuple[str, Tensor]]:
    """Yield (category, tensor) for all tensors that the engine holds."""
    return Owners(engine).known()


def _gathering(engine: NativeEngine) -> Iterator[Any]:
    """Yield the parameters that `fully_shard` gathers, as its own `FSDPParam` objects."""
    for module in engine.model.modules():
        group = fsdp_param_group(module)
        yield from () if group is None else fsdp_params(group)


def _gathered(param: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (category, tensor) for what `fully_shard` holds of a parameter beside its shard."""
    for tensor in fsdp_all_gather_outputs(param):
        yield "gathered parameters", tensor
    unsharded = fsdp_unsharded_param(param)
    if unsharded is not None:
        yield "gathered parameters", unsharded
    accumulated = fsdp_unsharded_accumulated_grad(param)
    if accumulated is not None:
        yield "gradients", accumulated


def _storage(tensor: Tensor) -> int:
    while is_sharded(tensor):
        tensor = local_tensor(tensor)
    return storage_key(tensor)
