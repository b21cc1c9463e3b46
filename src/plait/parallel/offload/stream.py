"""A model larger than its device, for generation and evaluation: weights come unit by unit, and go again.

[Note: one unit ahead] While a unit computes, the next one travels: from pinned host memory, or from a file, which is
read one unit earlier still. So the device holds two units and what belongs to none, the host of the `nvme` tier two
units more. Units are called in the same order for every token, so the order of the last pass says which is next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plait.ops import FileQueue, Transfer, host_empty
from plait.parallel.offload.lanes import Lanes
from plait.parallel.offload.shelf import Shelf
from plait.parallel.units import Unit


@dataclass(slots=True)
class _Held:
    """The weights of one unit."""

    names: list[str]
    params: list[nn.Parameter]
    """Without memory between their uses."""
    copies: list[Tensor] = field(default_factory=list)
    """In host memory; none where they lie in a file."""
    shelf: Shelf | None = None
    room: Tensor | None = None
    reading: Transfer | None = None
    here: list[Tensor] | None = None
    """On the device, or on the way there."""
    mark: Any = None


class WeightStream:
    """The weights of a model's units, in host memory or files. Made by `stream_weights`, filled through `tensors`."""

    def __init__(self, model: nn.Module, device: torch.device, folder: Path | None) -> None:
        self._model = model
        self._lanes = Lanes(device, fake=False)
        self._folder = folder
        self._queue = FileQueue() if folder is not None else None
        self._held: list[_Held] = []
        self._before: list[int] = []
        self._now: list[int] = []

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter by name, to be filled; those of units in host memory, or as memory of their files."""
        found: dict[str, Tensor] = {name: param.detach() for name, param in self._model.named_parameters()}
        for held in self._held:
            copies = held.copies if held.shelf is None else list(held.shelf.mapped().values())
            found.update(zip(held.names, copies, strict=True))
        return found

    def filled(self) -> None:
        """The tensors have their values: see that the files do."""
        for held in self._held:
            if held.shelf is not None:
                held.shelf.sync()

    def device_bytes(self) -> int:
        """What weights take on the device now."""
        resting = sum(p.nbytes for p in self._model.parameters() if p.untyped_storage().nbytes() >= p.nbytes)
        return resting + sum(each.nbytes for held in self._held for each in held.here or ())

    def hold(self, names: Sequence[str], module: nn.Module) -> None:
        """Take over the weights of a unit, with these names in the model."""
        device = self._lanes.device
        params: dict[int, nn.Parameter] = {}
        for inner in module.modules():
            for key, param in inner._parameters.items():
                if param is not None:
                    empty = torch.empty((), dtype=param.dtype, device=device).expand(param.shape)
                    if id(param) not in params:
                        params[id(param)] = nn.Parameter(empty, requires_grad=False)
                    inner._parameters[key] = params[id(param)]
        held = _Held(list(names), list(params.values()))
        if self._queue is None:
            held.copies = [self._lanes.room(param.shape, param.dtype) for param in held.params]
        else:
            assert self._folder is not None
            layout = [((number, "param"), param.dtype, param.shape) for number, param in enumerate(held.params)]
            held.shelf = Shelf(self._queue, self._folder, layout)
        number = len(self._held)
        self._held.append(held)
        module.register_forward_pre_hook(lambda _module, _inputs: self._arrive(number))
        module.register_forward_hook(lambda _module, _inputs, _outputs: self._leave(number), always_call=True)

    def _arrive(self, number: int) -> None:
        if not self._now or number in self._now:  # a new pass
            self._before, self._now = self._now or self._before, []
        self._now.append(number)
        held = self._held[number]
        self._bring(held)
        assert held.here is not None
        self._lanes.follow(held.mark)
        for param, tensor in zip(held.params, held.here, strict=True):
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            param.data = tensor
        following = [self._held[each] for each in self._next(2)]
        for each in following[:1]:
            self._bring(each)
        for each in following[1:]:
            self._read(each)

    def _leave(self, number: int) -> None:
        held = self._held[number]
        for param in held.params:
            param.data = torch.empty((), dtype=param.dtype, device=param.device).expand(param.shape)
        held.here = held.mark = None

    def _next(self, count: int) -> list[int]:
        """The units that come next: as in the last pass, which begins anew after its end."""
        at = len(self._now)
        if not self._before or self._before[:at] != self._now:
            return []
        around = self._before[at:] + self._before
        return [each for each in dict.fromkeys(around[:count]) if each != self._now[-1]]

    def _read(self, held: _Held) -> None:
        if held.shelf is not None and held.room is None and held.here is None:
            held.room = host_empty(held.shelf.size, dtype=torch.uint8)
            held.reading = held.shelf.read(held.room)

    def _bring(self, held: _Held) -> None:
        if held.here is not None:
            return
        copies: Sequence[Tensor] = held.copies
        if held.shelf is not None:
            self._read(held)
            assert held.reading is not None
            assert held.room is not None
            held.reading.wait()
            copies = list(held.shelf.views(held.room).values())
        if not self._lanes.separate:
            held.here = list(copies)  # a CPU computes with them where they are
        else:
            with torch.no_grad(), self._lanes.backwards():
                held.here = [copy.to(self._lanes.device, non_blocking=held.shelf is None) for copy in copies]
            held.mark = self._lanes.mark_back()
        held.room = held.reading = None


def stream_weights(
    model: nn.Module,
    units: Sequence[Unit],
    *,
    device: torch.device,
    tier: Literal["cpu", "nvme"],
    folder: Path | None = None,
) -> WeightStream:
    """Make a model run on a device that its weights do not fit: those of `units` live on the host or in `folder`.

    The model may lie on the meta device; weights are then filled through the stream's `tensors`, and its buffers have
    memory and no values yet. For forward passes only.
    """
    stream = WeightStream(model, device, folder if tier == "nvme" else None)
    names = {id(param): name for name, param in model.named_parameters()}
    values = {name: param.data for name, param in model.named_parameters() if not param.is_meta}
    for unit in units:
        seen = {id(param): param for param in unit.module.parameters()}
        stream.hold([names[key] for key in seen], unit.module)
    inside = {id(inner) for unit in units for inner in unit.module.modules()}
    moved: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for module in model.modules():
            _settle(module, device, moved if id(module) not in inside else None)
    model.requires_grad_(False)
    if values:
        with torch.no_grad():
            for name, tensor in stream.tensors().items():
                if name in values:
                    tensor.copy_(values[name])
        stream.filled()
    return stream


def _settle(module: nn.Module, device: torch.device, moved: dict[int, nn.Parameter] | None) -> None:
    """Bring a module's buffers to the device, and, where it is in no unit, its parameters; tied ones stay tied."""
    for key, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[key] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
    for key, param in module._parameters.items() if moved is not None else ():
        if param is None:
            continue
        assert moved is not None
        if id(param) not in moved:
            data = torch.empty_like(param, device=device) if param.is_meta else param.data.to(device)
            moved[id(param)] = nn.Parameter(data, requires_grad=False)
        module._parameters[key] = moved[id(param)]
