"""Which fields of a micro-batch the model is called with; a `loss_fn` sees all of them.

[Note: what goes to the model]
Data of torch come as `(x, y)`: the model takes `x`, the loss compares its output with `y`. `model_inputs` says which
fields are the model's. Without that word, and with a `loss_fn` that can use the rest, the signature of `forward`
decides where it leaves no doubt: fields of a mapping that `forward` has no parameter for are the loss's, and so are
values of a row beyond those that it requires. What would change how the model reads its input (a mask, positions) is
never left out by guessing, nor is an optional parameter filled with what may be a target, unless it is named as one
(`labels=None`): both are errors that say what to write.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from plait.errors import ModelError

Select = Callable[[Any], Any]
"""From the inputs of a micro-batch to those of the model."""

_OF_THE_LOSS = ("label", "target", "loss", "weight")
_HOW_TO_READ = ("mask", "position", "document", "segment", "token_type", "seqlens")
_SEAM = "hidden"
"""The parameter through which a pipeline hands activations on; no field of a micro-batch."""


def select_inputs(model: nn.Module, wanted: int | Sequence[str] | None, *, has_loss: bool) -> Select | None:
    """What picks the model's fields, as `model_inputs` or the signature of `forward` says; None: it gets all."""
    if isinstance(wanted, int):
        return lambda inputs: _first(inputs, wanted)
    if wanted is not None:
        return lambda inputs: _named(inputs, wanted)
    if not has_loss or type(model).forward is nn.Sequential.forward:
        return None
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return None
    return _BySignature(type(model).__name__, parameters)


class _BySignature:
    """Reads off the parameters of `forward` what of a micro-batch is for the loss alone."""

    def __init__(self, model: str, parameters: Mapping[str, inspect.Parameter]) -> None:
        self._model = model
        self._takes = ", ".join(parameters)
        kinds = {parameter.kind for parameter in parameters.values()}
        named = [p for name, p in parameters.items() if p.kind in _BY_POSITION and name != _SEAM]
        self._any_row = inspect.Parameter.VAR_POSITIONAL in kinds
        self._required = sum(parameter.default is inspect.Parameter.empty for parameter in named)
        self._optional = [p.name for p in named[self._required :]]
        self._any_name = inspect.Parameter.VAR_KEYWORD in kinds
        self._names = frozenset(parameters)

    def __call__(self, inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            return self._of_mapping(inputs)
        if isinstance(inputs, (tuple, list)):
            return self._of_row(inputs)
        return inputs

    def _of_mapping(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._any_name or inputs.keys() <= self._names:
            return inputs
        left = [key for key in inputs if key not in self._names]
        if any(word in key for key in left if not _is_of_loss(key) for word in _HOW_TO_READ):
            return inputs  # refused where the model is called
        return {key: value for key, value in inputs.items() if key in self._names}

    def _of_row(self, inputs: Sequence[Any]) -> Sequence[Any]:
        count = len(inputs)
        if self._any_row or count <= self._required:
            return inputs
        beyond = self._optional[: count - self._required]
        if len(beyond) == count - self._required and all(_is_of_loss(name) for name in beyond):
            return inputs  # the model wants the targets, too
        if self._optional:
            most = self._required + len(self._optional)
            raise ModelError(
                f"model_inputs: {self._model}.forward takes {self._takes}, of which {self._required} must be given, a "
                f"micro-batch has {count} values, and the loss_fn may want some of them: write `model_inputs="
                f"{self._required}` for the first {self._required}, or another number, up to {most}"
            )
        return inputs[: self._required]


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _is_of_loss(key: str) -> bool:
    return key == "y" or any(word in key for word in _OF_THE_LOSS)


def _first(inputs: Any, count: int) -> Any:
    if isinstance(inputs, Mapping):
        names = ", ".join(map(str, inputs))
        raise ModelError(
            f"model_inputs={count} counts the values of a row, and a micro-batch is a mapping with {names}: write the "
            f"names of the fields that the model gets, such as `model_inputs=({next(iter(inputs), 'x')!r},)`"
        )
    row = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    if len(row) < count:
        raise ModelError(f"model_inputs={count}, and a micro-batch has {len(row)} values: write at most {len(row)}")
    return row[:count]


def _named(inputs: Any, names: Sequence[str]) -> dict[str, Any]:
    shown = ", ".join(map(repr, names))
    if not isinstance(inputs, Mapping):
        count = (
            f"{len(inputs)} values in a row" if isinstance(inputs, (tuple, list)) else f"one {type(inputs).__name__}"
        )
        raise ModelError(
            f"model_inputs=({shown}) names fields, and a micro-batch is {count}: write how many of them the model "
            f"gets, such as `model_inputs={len(names)}`, or let the data give them by name"
        )
    missing = [name for name in names if name not in inputs]
    if missing:
        raise ModelError(
            f"model_inputs=({shown}): a micro-batch has no {missing[0]!r}, but {', '.join(map(str, inputs))}: write "
            "some of these"
        )
    return {name: inputs[name] for name in names}
