"""What an optimizer keeps from step to step besides tensors, in a form that a checkpoint's manifest can hold.

[Note: state of any shape] torch's optimizers and Plait's keep tensors and nothing else, one level deep. Others keep
Python numbers for each parameter, lists and dictionaries of tensors, numbers in their groups, and numbers of their own.
Tensors go where tensors go, under the path to them (`GG/0`); everything else is an outline in which they are gaps. What
neither can hold is an error that names it; nothing is left out in silence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from plait.errors import CheckpointError
from plait.kernels import Packed
from plait.optim.base import is_known

_PLAIN = (bool, int, float, str, type(None))
_FEW = 64
"""Numbers of a tensor that may stand in a manifest."""
_GROUP = frozenset({"params", "param_names", "initial_lr", "lr"})
"""Keys of a group that are no state of the optimizer: a schedule, or whoever wrote the run, decides them."""


def flatten(name: str, value: Any) -> tuple[dict[str, Tensor | Packed], Any]:
    """The tensors of a state by their paths, and the outline of the rest; None where it is one tensor and no more.

    Raises `TypeError`, with the path, for what cannot be stored.
    """
    tensors: dict[str, Tensor | Packed] = {}
    if isinstance(value, Tensor | Packed):
        return {name: value}, None
    return tensors, _outline(name, value, tensors)


def _outline(path: str, value: Any, tensors: dict[str, Tensor | Packed]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if type(value) in _PLAIN:
        return {"plain": value}
    if type(value) in (list, tuple):
        inner = [_outline(f"{path}/{index}", each, tensors) for index, each in enumerate(value)]
        return {type(value).__name__: inner}
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int) or "/" in str(key) or "." in str(key):
                raise TypeError(f"the key {key!r} in its state {path!r}")
        return {"dict": [[key, _outline(f"{path}/{key}", each, tensors)] for key, each in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise TypeError(f"a {type(value).__name__} in its state {path!r}")


def leaves(value: Any) -> Iterator[Tensor]:
    """Every tensor of a state, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):  # `Packed` is a tuple of tensors
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)


def unflatten(outline: Mapping[str, Any], tensor_at: Callable[[str], Any]) -> Any:
    """The state again, from its outline and its tensors."""
    ((kind, inner),) = outline.items()
    match kind:
        case "tensor":
            return tensor_at(inner)
        case "plain":
            return inner
        case "dtype":
            return getattr(torch, inner)
        case "dict":
            return {key: unflatten(each, tensor_at) for key, each in inner}
        case "list" | "tuple":
            found = [unflatten(each, tensor_at) for each in inner]
            return tuple(found) if kind == "tuple" else found
    raise ValueError(f"an unknown kind of state {kind!r}")


class OptimizerRecord:
    """The numbers of one optimizer that change in training, besides the state of its parameters.

    Made before the first step: what is as it was made is not saved, so that a run may go on with other settings.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known = is_known(optimizer)
        self._groups = [{key: _frozen(value) for key, value in group.items()} for group in optimizer.param_groups]
        self._attributes = {key: _frozen(value) for key, value in vars(optimizer).items()}
        self._of_torch = frozenset() if self._known else frozenset(vars(SGD([torch.zeros(1)])))
        """Attributes that every optimizer has."""
        self.scheduled: frozenset[str] = frozenset()
        """Keys of groups that a schedule sets at each step."""

    def state(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Any] | None:
        """This rank's part; None for torch's optimizers and Plait's, which keep tensors only."""
        if self._known:
            return None
        optimizer = self._optimizer
        groups = [
            _changed(group, before, _GROUP | self.scheduled, f"group {number}") if group["params"] else None
            for number, (group, before) in enumerate(zip(optimizer.param_groups, self._groups, strict=True))
        ]
        found: dict[str, Any] = {}
        seen = 0
        for name, tensor in parameters:
            seen += tensor in optimizer.state
            outlines = {}
            for key, value in optimizer.state.get(tensor, {}).items():
                _, outline = _flat(optimizer, name, key, value)
                if outline is not None:
                    outlines[key] = outline
            if outlines:
                found[name] = outlines
        if seen != len(optimizer.state):
            stranger = next((key for key in optimizer.state if not isinstance(key, Tensor)), "of other tensors")
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps a state of its own, {stranger!r}, besides those of parameters, "
                "which a checkpoint cannot hold"
            )
        return {
            "groups": groups,
            "attributes": _changed(vars(optimizer), self._attributes, self._of_torch | {"step"}, "attribute"),
            "state": found,
        }

    def restore(self, state: Mapping[str, Any], parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Go on with these numbers; the tensors are there already, under their paths."""
        optimizer = self._optimizer
        if len(state["groups"]) != len(optimizer.param_groups):
            raise ValueError(f"{len(state['groups'])} groups, and not {len(optimizer.param_groups)} as here")
        for group, before, saved in zip(optimizer.param_groups, self._groups, state["groups"], strict=True):
            device = next((tensor.device for tensor in group["params"]), None)
            _put_back(group, before, _GROUP | self.scheduled)
            group.update({key: _restored(value, device) for key, value in (saved or {}).items()})
        _put_back(vars(optimizer), self._attributes, self._of_torch | {"step"})
        for key, value in state["attributes"].items():
            setattr(optimizer, key, _restored(value, None))
        for name, tensor in parameters:
            kept = optimizer.state[tensor] if name in state["state"] or tensor in optimizer.state else {}
            for key, outline in state["state"].get(name, {}).items():
                kept[key] = unflatten(outline, kept.pop)


def merged(parts: Sequence[Mapping[str, Any] | None], kind: str) -> dict[str, Any] | None:
    """The numbers of all ranks as one; those of groups must be the same on all ranks that update some of them."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    groups = []
    for number in range(len(found[0]["groups"])):
        theirs = [part["groups"][number] for part in found if part["groups"][number] is not None]
        if any(each != theirs[0] for each in theirs):
            differing = next(key for each in theirs for key in theirs[0] if each.get(key) != theirs[0][key])
            raise CheckpointError(
                f"{kind}: {differing!r} of group {number} is not the same on all ranks, so it looks across parameters; "
                "train with strategy.zero: 0"
            )
        groups.append(theirs[0] if theirs else None)
    return {
        "groups": groups,
        "attributes": found[0]["attributes"],
        "state": {name: outlines for part in found for name, outlines in part["state"].items()},
    }


def tensors_of(optimizer: Optimizer, name: str, state: Mapping[str, Any]) -> dict[str, Tensor | Packed]:
    """All tensors in the state of one parameter by their paths; `CheckpointError` for what cannot be stored."""
    found: dict[str, Tensor | Packed] = {}
    for key, value in state.items():
        found.update(_flat(optimizer, name, key, value)[0])
    return found


def _flat(optimizer: Optimizer, name: str, key: str, value: Any) -> tuple[dict[str, Tensor | Packed], Any]:
    try:
        return flatten(key, value)
    except TypeError as error:
        kind = type(optimizer).__name__
        raise CheckpointError(f"{kind} keeps {error} of {name}, which a checkpoint cannot hold") from error


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() <= _FEW:
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def _changed(now: Mapping[str, Any], before: Mapping[str, Any], skipped: frozenset[str], where: str) -> dict[str, Any]:
    found = {}
    for key, value in now.items():
        if key in skipped or (key in before and _equal(before[key], value)):
            continue
        if isinstance(value, Tensor):
            if value.numel() > _FEW:
                raise CheckpointError(
                    f"{where}: {key!r} is a tensor of {value.numel()} numbers, which no parameter has"
                )
            found[key] = {"values": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
            continue
        tensors: dict[str, Tensor | Packed] = {}
        try:
            outline = _outline(key, value, tensors)
        except TypeError as error:
            raise CheckpointError(f"{where}: {error} has changed, and a checkpoint cannot hold it") from error
        if tensors:
            raise CheckpointError(f"{where}: {key!r} holds tensors, which a checkpoint cannot hold there")
        found[key] = outline
    return found


def _put_back(now: dict[str, Any], before: Mapping[str, Any], skipped: frozenset[str]) -> None:
    """What is not saved is as it was made."""
    for key in [key for key in now if key not in skipped]:
        if key not in before:
            del now[key]
        elif not _equal(before[key], now[key]):
            now[key] = _frozen(before[key])


def _restored(saved: Mapping[str, Any], device: torch.device | None) -> Any:
    if "values" in saved:
        return torch.tensor(saved["values"], dtype=getattr(torch, saved["dtype"]), device=device)
    return unflatten(saved, _no_tensor)


def _no_tensor(path: str) -> Any:
    raise ValueError(f"{path} is no tensor of a parameter")


def _equal(before: Any, now: Any) -> bool:
    if before is now and not isinstance(now, Tensor):
        return True
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        alike = isinstance(before, Tensor) and isinstance(now, Tensor) and before.shape == now.shape
        return alike and bool((before == now).all())
    try:
        return type(before) is type(now) and bool(before == now)
    except Exception:  # what cannot be compared has changed
        return False
