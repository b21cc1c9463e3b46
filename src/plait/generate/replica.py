"""A whole copy of a model that is spread over ranks, for as long as it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.parallel import Record, find_initializer
from plait.strategy import NativeEngine
from plait.world import is_sharded, local_part, same_kind


def whole_weights(engine: NativeEngine, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the live model in the format it computes in, gathered one at a time. Every rank must go along.

    Rounded before it is gathered: that is what the trainer computes with, and half of what would be sent.
    """
    device = engine.world.device
    with torch.no_grad(), engine.views.revealed():
        for name, param in engine.model.named_parameters():
            part = local_part(param.detach())
            part = part.to(device, dtype if part.dtype == torch.float32 else part.dtype)
            whole = same_kind(part, param.detach())
            yield name, whole.full_tensor() if is_sharded(whole) else whole


class Replica:
    """The same module without the parallelism, empty until it is filled.

    Built on the meta device, so that while it is empty it takes no memory; buffers that are not part of the state get
    their values from the model's own initializer, or as its constructor made them.
    """

    def __init__(self, build: Callable[[], nn.Module], dtype: torch.dtype, device: torch.device) -> None:
        with torch.device("meta"), Record() as built:
            self.module = build()
        self._dtype, self._device = dtype, device
        self._holders: dict[str, list[tuple[nn.Module, str]]] = {}
        names: dict[int, str] = {}
        for prefix, part in self.module.named_modules():
            for key, param in part._parameters.items():
                if param is not None:
                    name = names.setdefault(id(param), f"{prefix}.{key}" if prefix else key)
                    self._holders.setdefault(name, []).append((part, key))
        self._make_buffers(built)
        self.module.eval().requires_grad_(False)

    @property
    def bytes(self) -> int:
        """What it takes when it is full."""
        return sum(param.numel() for param in self.module.parameters()) * self._dtype.itemsize

    def fill(self, engine: NativeEngine) -> None:
        """Take the weights that the engine has now. Every rank must call it."""
        missing, params = set(self._holders), dict(engine.model.named_parameters())
        for name, whole in whole_weights(engine, self._dtype):
            if name not in self._holders:
                raise ModelError(
                    f"the model in training has {name}, and the one built for writing has not: build it the same way, "
                    "adapters included"
                )
            missing.discard(name)
            # A parameter that is whole already, and in the right format, is copied: it is the trainer's to change.
            its_own = whole.data_ptr() != local_part(params[name].detach()).data_ptr()
            self._put(name, whole if its_own else whole.clone())
        if missing:
            raise ModelError(f"the model built for writing has {min(missing)}, and the one in training has not")
        live = dict(engine.model.named_buffers())
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name in live:
                    buffer.copy_(live[name])

    def empty(self) -> None:
        """Let go of the weights."""
        for name, [(part, key), *_] in self._holders.items():
            held = part._parameters[key]
            assert held is not None
            self._put(name, torch.empty_like(held, device="meta"))

    def _put(self, name: str, value: Tensor) -> None:
        param = nn.Parameter(value, requires_grad=False)
        for part, key in self._holders[name]:
            part._parameters[key] = param

    def _make_buffers(self, built: Record) -> None:
        holders = [part for part in self.module.modules() if any(b is not None for b in part._buffers.values())]
        if not holders:
            return
        initializer = find_initializer(self.module) or find_initializer(self.module, built)
        if initializer is None:
            raise ModelError(
                f"the {type(self.module).__name__} has buffers, and nothing can give them values after a build on the "
                "meta device: add init_weights(module) to the model, or use mode sharded"
            )
        for part in holders:
            for key, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[key] = torch.empty_like(buffer, device=self._device)
            initializer(part)
