"""State dictionaries as JSON beside tensors: no pickle, so that a checkpoint can be read by anybody."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import CheckpointError

_MARK = "__plait__"


def pack(value: Any, tensors: MutableMapping[str, Tensor], path: str) -> Any:
    """`value` as JSON; its tensors go into `tensors` under their paths."""
    if isinstance(value, np.ndarray):
        return {_MARK: "array", "name": pack(torch.from_numpy(value.copy()), tensors, path)["name"]}
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().clone()
        return {_MARK: "tensor", "name": path}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (float, np.generic)):
        plain = value.item() if isinstance(value, np.generic) else value
        finite = not isinstance(plain, float) or math.isfinite(plain)
        return plain if finite else {_MARK: "float", "text": str(plain)}
    if isinstance(value, (list, tuple)):
        items = [pack(each, tensors, f"{path}.{index}") for index, each in enumerate(value)]
        return items if isinstance(value, list) else {_MARK: "tuple", "items": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: pack(each, tensors, f"{path}.{key}") for key, each in value.items()}
        pairs = [[pack(k, tensors, f"{path}.k{i}"), pack(v, tensors, f"{path}.v{i}")] for i, (k, v) in _pairs(value)]
        return {_MARK: "mapping", "pairs": pairs}
    raise CheckpointError(
        f"{path} is a {type(value).__name__}; a state_dict may hold numbers, texts, tensors, arrays, lists and "
        "mappings of those"
    )


def _pairs(value: Mapping[Any, Any]) -> Any:
    return enumerate(value.items())


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack` was given."""
    if isinstance(value, list):
        return [unpack(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    match value.get(_MARK):
        case "tensor":
            return tensors[value["name"]]
        case "array":
            return tensors[value["name"]].numpy()
        case "float":
            return float(value["text"])
        case "tuple":
            return tuple(unpack(each, tensors) for each in value["items"])
        case "mapping":
            return {unpack(key, tensors): unpack(each, tensors) for key, each in value["pairs"]}
        case _:
            return {key: unpack(each, tensors) for key, each in value.items()}
