"""Doing again what a constructor did, where there is memory for its values.

[Note: the constructor is the initializer]
A constructor's steps were recorded on the meta device ([Note: what can be done again], `recording.py`). Done again,
module by module, they give every tensor values of the distribution that the constructor gave it: whatever it drew and
wrote, over whatever torch's layers had written before. They are not the numbers of one run of the constructor, since
each module draws from a seed of its own ([Note: initial values do not depend on the layout], `materialize.py`).
So nothing that was drawn may reach two modules: equal layers, made as copies of one, would become different. Such a
model is built for real, and so is one of whose parameters two share their memory without being one parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plait.parallel.recording import Place, Record, Step
from plait.torch_internals import tree_leaves, tree_map

Origin = tuple[Place, tuple[Step, ...]]
"""Where a tensor lay, and how its values came there."""


class Replay:
    """Gives one module of a model after another the values that its constructor gave it."""

    def __init__(self, model: nn.Module, origins: Mapping[str, Mapping[str, Origin]], built: Record) -> None:
        """`origins`: of the tensors of each module, by name."""
        self._origins, self._built = origins, built
        self._names = {id(module): name for name, module in model.named_modules()}

    def onto(self, model: nn.Module) -> Replay:
        """The same for another model whose modules have the same names, such as a part of the first."""
        return Replay(model, self._origins, self._built)

    def __call__(self, module: nn.Module) -> None:
        """Fill the parameters and buffers of one module, those that have memory."""
        known = self._origins.get(self._names[id(module)], {})
        targets = {key: tensor.detach() for key, tensor in direct_tensors(module).items() if key in known}
        targets = {key: tensor for key, tensor in targets.items() if not tensor.is_meta}
        if targets:
            with torch.no_grad():
                self._fill(targets, {key: known[key] for key in targets})

    def _fill(self, targets: Mapping[str, Tensor], origins: Mapping[str, Origin]) -> None:
        steps = {step.number: step for _, own in origins.values() for step in own}
        made = {place.storage for step in steps.values() for place in step.made if place is not None}
        room = _Room(self._built, next(iter(targets.values())).device)
        for key, (place, _) in origins.items():
            target = targets[key]
            assert target.shape == place.shape, f"{key} was built as {place.shape} and is {tuple(target.shape)}"
            # What is only ever written to is written where it is to be, and takes no memory beside that.
            if place.is_all and place.storage not in made and target.dtype == place.dtype and target.is_contiguous():
                room.flat[place.storage] = target.view(-1)
        finished = set(room.flat)
        for number in sorted(steps):
            room.do(steps[number])
        for key, (place, _) in origins.items():
            if place.storage not in finished:
                targets[key].copy_(room.at(place))


class _Room:
    """Storages on a real device, in the place of those that were recorded."""

    def __init__(self, built: Record, device: torch.device) -> None:
        self._built, self._device = built, device
        self.flat: dict[int, Tensor] = {}
        """All elements of a storage, by its number."""

    def do(self, step: Step) -> None:
        """One step again, with everything that it makes."""
        assert step.function is not None
        args, kwargs = tree_map(self._real, (step.args, dict(step.kwargs)))
        answer = step.function(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]
        for result, place in zip(results, step.made, strict=False):
            if place is not None:
                self._put(place, result)

    def _put(self, place: Place, tensor: Tensor) -> None:
        """Let a tensor be what lies at a place; it is copied only if it lies otherwise in its own storage."""
        bytes_ = self._built.bytes_of(place.storage)
        alike = tensor.stride() == place.stride and tensor.storage_offset() == place.offset == 0
        if alike and tensor.untyped_storage().nbytes() == bytes_:
            self.flat[place.storage] = tensor.as_strided((bytes_ // place.dtype.itemsize,), (1,))
        else:
            self.at(place).copy_(tensor)

    def at(self, place: Place) -> Tensor:
        """The tensor at a place."""
        if place.storage not in self.flat:
            count = self._built.bytes_of(place.storage) // place.dtype.itemsize
            self.flat[place.storage] = torch.empty(count, dtype=place.dtype, device=self._device)
        return self.flat[place.storage].view(place.dtype).as_strided(place.shape, place.stride, place.offset)

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return self._device
        return self.at(leaf) if isinstance(leaf, Place) else leaf


def find_replay(model: nn.Module, built: Record) -> Replay | None:
    """What does again what a model's constructor did, or None where that cannot be done.

    See [Note: the constructor is the initializer].
    """
    origins: dict[str, dict[str, Origin]] = {}
    drawn_for: dict[int, int] = {}
    owners: dict[int, int] = {}
    lies_at: dict[int, int] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, tensor in direct_tensors(module).items():
            place = built.place_of(tensor)
            steps = None if place is None else built.steps_to(place)
            if place is None or steps is None:
                return None
            origins.setdefault(name, {})[key] = place, steps
            owner = id(module)
            if isinstance(tensor, nn.Parameter):
                owner = owners.setdefault(id(tensor), owner)  # a tied one is made for the first that has it
                if lies_at.setdefault(place.storage, id(tensor)) != id(tensor):
                    return None
            if any(step.draws and drawn_for.setdefault(step.number, owner) != owner for step in steps):
                return None
    return Replay(model, origins, built)


def direct_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers, without those of the modules in it."""
    held = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in held.items() if tensor is not None}
