"""How a list of samples becomes a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate as stack

from plait.errors import DataError
from plait.frontends.mmengine.registry import FUNCTIONS


@FUNCTIONS.register_module()
def pseudo_collate(data_batch: Sequence[Any]) -> Any:
    """Turn a list of samples inside out; what the samples are made of stays in lists, unstacked."""
    return _turn(data_batch, lambda leaves: leaves)


@FUNCTIONS.register_module()
def default_collate(data_batch: Sequence[Any]) -> Any:
    """Turn a list of samples inside out, and stack tensors, arrays and numbers."""
    return _turn(data_batch, _stacked)


def _stacked(leaves: Sequence[Any]) -> Any:
    # MMEngine's data elements carry what belongs to one sample; they stay in a list.
    elements = any(base.__name__ == "BaseDataElement" for base in type(leaves[0]).__mro__)
    return leaves if elements or leaves[0] is None else stack(list(leaves))


def _turn(batch: Sequence[Any], finish: Callable[[Sequence[Any]], Any]) -> Any:
    first = batch[0]
    if isinstance(first, str | bytes):
        return batch
    if isinstance(first, Mapping):
        return {key: _turn([sample[key] for sample in batch], finish) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_turn(part, finish) for part in zip(*batch, strict=True)))
    if isinstance(first, Sequence):
        sizes = sorted({len(sample) for sample in batch})
        if len(sizes) > 1:
            raise DataError(f"the samples of one batch have {sizes[0]} to {sizes[-1]} parts; give all equally many")
        return [_turn(part, finish) for part in zip(*batch, strict=True)]
    return finish(batch)
