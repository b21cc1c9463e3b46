"""A user's own state in a checkpoint: plain values as JSON, tensors beside the model's. Nothing is pickled.

[Note: no pickles in a checkpoint]
DeepSpeed pickles whatever it is given, and loading runs whatever a pickle says. Here a value is a number, a text, a
list, a tuple, a set, a mapping, bytes, a tensor or an array, or it is refused by name when it is saved.
"""

from __future__ import annotations

import argparse
import base64
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import CheckpointError

_KIND = "@"
"""The key that marks a value which JSON has no word for."""


def encode(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """`value` as JSON; its tensors go to `tensors`, under names that begin with `where`."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if isinstance(value, Tensor):
        name = f"{where}.{len(tensors)}"
        tensors[name] = value.detach()
        return {_KIND: "tensor", "name": name}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {_KIND: "array", "of": encode(torch.from_numpy(np.ascontiguousarray(value)), tensors, where)}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, (torch.dtype, torch.device)):
        return {_KIND: type(value).__name__, "of": str(value).removeprefix("torch.")}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, argparse.Namespace):
        return {_KIND: "namespace", "of": encode(vars(value), tensors, where)}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [encode(each, tensors, where) for each in value]
        kind = "list" if isinstance(value, list) else "tuple" if isinstance(value, tuple) else "set"
        return items if kind == "list" else {_KIND: kind, "of": items}
    if isinstance(value, Mapping):
        pairs = [(key, encode(each, tensors, f"{where}.{key}")) for key, each in value.items()]
        if all(type(key) is str and key != _KIND for key, _ in pairs):
            return dict(pairs)
        return {_KIND: "pairs", "of": [[encode(key, tensors, where), each] for key, each in pairs]}
    if isinstance(value, (bool, int, float, str)):
        return encode(_plain(value), tensors, where)
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold without pickling it: give its "
        "state_dict(), or numbers, texts, lists, mappings and tensors"
    )


def _plain(value: Any) -> Any:
    """The number or text that an enum, or another subclass, is."""
    return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))


def decode(value: Any, read: Callable[[str], Tensor]) -> Any:
    """What `encode` made it from; `read` gives a tensor by its name."""
    if isinstance(value, list):
        return [decode(each, read) for each in value]
    if not isinstance(value, dict):
        return value
    kind, inner = value.get(_KIND), value.get("of")
    match kind:
        case None:
            return {key: decode(each, read) for key, each in value.items()}
        case "tensor":
            return read(value["name"])
        case "array":
            return decode(inner, read).numpy()
        case "bytes":
            return base64.b64decode(str(inner))
        case "dtype":
            return getattr(torch, str(inner))
        case "device":
            return torch.device(str(inner))
        case "namespace":
            return argparse.Namespace(**decode(inner, read))
        case "tuple":
            return tuple(decode(inner, read))
        case "set":
            return set(decode(inner, read))
        case "pairs":
            return {_key(decode(key, read)): decode(each, read) for key, each in inner or ()}
    raise CheckpointError(f"the checkpoint has a value of the unknown kind {kind!r}; it is from a newer Plait")


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
