"""Optimizer state that is not a flat dictionary of tensors, in a form that a checkpoint can store.

[Note: state of any shape] The state of torch's optimizers and Plait's is a dictionary of tensors per parameter. Other
optimizers also keep Python numbers per parameter, lists and dictionaries of tensors, numbers in their groups, and
attributes of the optimizer object. Tensors are stored as tensors, under their path (`GG/0`). Everything else is stored
in the checkpoint's manifest as an *outline*: JSON with the paths in place of the tensors. For state that cannot be
stored in either way, an error names it; nothing is left out silently.
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
from plait.optim.base import is_builtin

_PLAIN = (bool, int, float, str, type(None))
_FEW = 64
"""The largest tensor, in elements, that is stored in the manifest."""
_GROUP = frozenset({"params", "param_names", "initial_lr", "lr"})
"""Keys of a group that are not optimizer state: the schedule or the run description sets them."""


def flatten(name: str, value: Any) -> tuple[dict[str, Tensor | Packed], Any]:
    """Return the tensors of a state by path, and its outline; the outline is None if the state is a single tensor.

    Raises `TypeError`, with the path, for values that cannot be stored.
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
        inner = [_outline(f"{path}/{index}", item, tensors) for index, item in enumerate(value)]
        return {type(value).__name__: inner}
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int) or "/" in str(key) or "." in str(key):
                raise TypeError(f"the key {key!r} in its state {path!r}")
        return {"dict": [[key, _outline(f"{path}/{key}", item, tensors)] for key, item in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise TypeError(f"a {type(value).__name__} in its state {path!r}")


def leaves(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in a state of nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):  # `Packed` is a tuple of tensors
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)


def unflatten(outline: Mapping[str, Any], tensor_at: Callable[[str], Any]) -> Any:
    """Return the state that an outline describes; `tensor_at` returns the tensor of a path."""
    ((type_name, inner),) = outline.items()
    match type_name:
        case "tensor":
            return tensor_at(inner)
        case "plain":
            return inner
        case "dtype":
            return getattr(torch, inner)
        case "dict":
            return {key: unflatten(item, tensor_at) for key, item in inner}
        case "list" | "tuple":
            items = [unflatten(item, tensor_at) for item in inner]
            return tuple(items) if type_name == "tuple" else items
    raise ValueError(f"an unknown kind of state {type_name!r}")


class OptimizerRecord:
    """Saves and restores an optimizer's values that change in training, besides the tensors in its parameters' states.

    Create it before the first step: values that have not changed since then (settings) are not saved, so that a resumed
    run may use other settings.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known = is_builtin(optimizer)
        self._groups = [{key: _frozen(value) for key, value in group.items()} for group in optimizer.param_groups]
        self._attributes = {key: _frozen(value) for key, value in vars(optimizer).items()}
        self._of_torch = frozenset() if self._known else frozenset(vars(SGD([torch.zeros(1)])))
        """Attributes of every torch optimizer."""
        self.scheduled: frozenset[str] = frozenset()
        """Keys of groups that a schedule sets at each step."""

    def state(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Any] | None:
        """Return this rank's values, given its parameters by name; None for torch's and Plait's optimizers.

        Raises `CheckpointError` for values that cannot be stored.
        """
        if self._known:
            return None
        optimizer = self._optimizer
        groups = [
            _changed(group, before, _GROUP | self.scheduled, f"group {number}") if group["params"] else None
            for number, (group, before) in enumerate(zip(optimizer.param_groups, self._groups, strict=True))
        ]
        outlines_by_name: dict[str, Any] = {}
        seen = 0
        for name, tensor in parameters:
            seen += tensor in optimizer.state
            outlines = {}
            for key, value in optimizer.state.get(tensor, {}).items():
                _, outline = _flat(optimizer, name, key, value)
                if outline is not None:
                    outlines[key] = outline
            if outlines:
                outlines_by_name[name] = outlines
        if seen != len(optimizer.state):
            stranger = next((key for key in optimizer.state if not isinstance(key, Tensor)), "of other tensors")
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps a state of its own, {stranger!r}, besides those of parameters, "
                "which a checkpoint cannot hold"
            )
        return {
            "groups": groups,
            "attributes": _changed(vars(optimizer), self._attributes, self._of_torch | {"step"}, "attribute"),
            "state": outlines_by_name,
        }

    def restore(self, state: Mapping[str, Any], parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Set the values that `state` returned; the tensors must have been loaded already, under their paths."""
        optimizer = self._optimizer
        if len(state["groups"]) != len(optimizer.param_groups):
            raise ValueError(f"{len(state['groups'])} groups, and not {len(optimizer.param_groups)} as here")
        for group, before, saved in zip(optimizer.param_groups, self._groups, state["groups"], strict=True):
            device = next((tensor.device for tensor in group["params"]), None)
            _reset(group, before, _GROUP | self.scheduled)
            group.update({key: _restored(value, device) for key, value in (saved or {}).items()})
        _reset(vars(optimizer), self._attributes, self._of_torch | {"step"})
        for key, value in state["attributes"].items():
            setattr(optimizer, key, _restored(value, None))
        for name, tensor in parameters:
            kept = optimizer.state[tensor] if name in state["state"] or tensor in optimizer.state else {}
            for key, outline in state["state"].get(name, {}).items():
                kept[key] = unflatten(outline, kept.pop)


def merge_records(records: Sequence[Mapping[str, Any] | None], optimizer_name: str) -> dict[str, Any] | None:
    """Return one record merged from those of all ranks; None if they are all None.

    Raises `CheckpointError` if values of a group differ between the ranks that update parameters of it.
    """
    present = [record for record in records if record is not None]
    if not present:
        return None
    groups = []
    for number in range(len(present[0]["groups"])):
        theirs = [record["groups"][number] for record in present if record["groups"][number] is not None]
        if any(other != theirs[0] for other in theirs):
            differing = next(key for other in theirs for key in theirs[0] if other.get(key) != theirs[0][key])
            raise CheckpointError(
                f"{optimizer_name}: {differing!r} of group {number} differs between ranks, so the optimizer's update "
                "depends on several parameters; train with strategy.zero: 0"
            )
        groups.append(theirs[0] if theirs else None)
    return {
        "groups": groups,
        "attributes": present[0]["attributes"],
        "state": {name: outlines for record in present for name, outlines in record["state"].items()},
    }


def flat_tensors(optimizer: Optimizer, name: str, state: Mapping[str, Any]) -> dict[str, Tensor | Packed]:
    """Return all tensors in the state of one parameter by path; raise `CheckpointError` if it cannot be stored."""
    tensors: dict[str, Tensor | Packed] = {}
    for key, value in state.items():
        tensors.update(_flat(optimizer, name, key, value)[0])
    return tensors


def _flat(optimizer: Optimizer, name: str, key: str, value: Any) -> tuple[dict[str, Tensor | Packed], Any]:
    try:
        return flatten(key, value)
    except TypeError as error:
        optimizer_name = type(optimizer).__name__
        raise CheckpointError(f"{optimizer_name} keeps {error} of {name}, which a checkpoint cannot hold") from error


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() <= _FEW:
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def _changed(now: Mapping[str, Any], before: Mapping[str, Any], skipped: frozenset[str], where: str) -> dict[str, Any]:
    changed = {}
    for key, value in now.items():
        if key in skipped or (key in before and _equal(before[key], value)):
            continue
        if isinstance(value, Tensor):
            if value.numel() > _FEW:
                raise CheckpointError(
                    f"{where}: {key!r} is a tensor of {value.numel()} numbers, which no parameter has"
                )
            changed[key] = {"values": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
            continue
        tensors: dict[str, Tensor | Packed] = {}
        try:
            outline = _outline(key, value, tensors)
        except TypeError as error:
            raise CheckpointError(f"{where}: {error} has changed, and a checkpoint cannot hold it") from error
        if tensors:
            raise CheckpointError(f"{where}: {key!r} holds tensors, which a checkpoint cannot hold there")
        changed[key] = outline
    return changed


def _reset(now: dict[str, Any], before: Mapping[str, Any], skipped: frozenset[str]) -> None:
    """Set all values, except the `skipped` ones, to what they were when the record was created."""
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
    raise ValueError(f"{path} is not a tensor of a parameter")


def _equal(before: Any, now: Any) -> bool:
    if before is now and not isinstance(now, Tensor):
        return True
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        alike = isinstance(before, Tensor) and isinstance(now, Tensor) and before.shape == now.shape
        return alike and bool((before == now).all())
    try:
        return type(before) is type(now) and bool(before == now)
    except Exception:  # values that cannot be compared are treated as changed
        return False
