"""Calling the model: inputs moved and cast, under the run's precision, compiled where that works."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from plait.errors import ModelError
from plait.parallel import undo_compile
from plait.precision import Policy, cast_floats
from plait.spec import first_part
from plait.strategy.native.fields import Select
from plait.strategy.native.moving import Mover

Say = Callable[[str], None]


class Forward:
    """The model as the engine calls it. What a call needs is decided once, not on every step."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        policy: Policy,
        *,
        compiled: Sequence[nn.Module],
        cut: Callable[[Any], Any] | None = None,
        before: Callable[[], None] | None = None,
        select: Select | None = None,
        say: Say,
    ) -> None:
        """`cut` makes this rank's part of a micro-batch, where ranks share one; `before` is done before each call.

        `select` picks what of a micro-batch the model gets; see `fields`.
        """
        self._model = model
        self._move = Mover(device) if device.type != "cpu" else None
        self._cast_to = policy.compute if policy.mixed and policy.cast_inputs else None
        self._context = policy.context(device) if policy.mixed else None
        self._compiled = list(compiled)
        self._cut = cut
        self._before = before
        self._select = select
        self._say = say
        # An `nn.Sequential` takes one argument. A pipeline calls it with the first part of a micro-batch, and so do we.
        self._is_row = type(model).forward is nn.Sequential.forward
        self.plain = self._move is None and self._context is None and cut is None and not compiled and before is None
        """Whether nothing has to be done to inputs, nor around a call."""

    def ready(self, inputs: Any) -> Any:
        """Inputs on the device, in the compute format; of a micro-batch that ranks share, this rank's part."""
        if self._cut is not None:
            inputs = self._cut(inputs)
        if self._move is not None:
            inputs = self._move(inputs)
        return inputs if self._cast_to is None else cast_floats(inputs, self._cast_to)

    def of_model(self, inputs: Any) -> Any:
        """What of a micro-batch's inputs the model is called with."""
        return inputs if self._select is None else self._select(inputs)

    def context(self) -> AbstractContextManager[Any]:
        """The context for a forward pass that a pipeline runs. What must be done before the pass is done here."""
        if self._before is not None:
            self._before()
        return nullcontext() if self._context is None else self._context

    def __call__(self, inputs: Any) -> Any:
        """What the model says to inputs that are ready: a mapping or a row of arguments, or the only one."""
        if self._select is not None:
            inputs = self._select(inputs)
        if self._is_row:
            return self.call((first_part(inputs),), {})
        kind = type(inputs)
        args: Sequence[Any] = ()
        kwargs: Mapping[str, Any] = {}
        if kind is dict or isinstance(inputs, Mapping):
            kwargs = inputs
        else:
            args = inputs if kind is tuple or kind is list or isinstance(inputs, (tuple, list)) else (inputs,)
        try:
            return self.call(args, kwargs)
        except TypeError as error:
            if (refusal := _refusal(self._model, args, kwargs)) is not None:
                raise refusal from error
            raise

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the model says to arguments that are ready."""
        if self.plain:
            return self._model(*args, **kwargs)
        if self._before is not None:
            self._before()
        if self._compiled:
            return self._call_compiled(args, kwargs)
        if self._context is not None:
            with self._context:
                return self._model(*args, **kwargs)
        return self._model(*args, **kwargs)

    def _call_compiled(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        from plait.torch_internals import TorchDynamoException

        compiled, self._compiled = self._compiled, []
        try:
            outputs = self.call(args, kwargs)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)  # what the backend raised, where it was the backend
            reason = next((line for line in str(cause).splitlines() if line.strip()), "")
            self._say(f"torch.compile gave up, training goes on without it: {type(cause).__name__}: {reason}")
            undo_compile(compiled)
            return self.call(args, kwargs)
        self._compiled = compiled
        return outputs


def _refusal(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModelError | None:
    """What is wrong where a model's `forward` does not take what a micro-batch has; None where it does."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        reason = str(error)
    else:
        return None
    name, takes = type(model).__name__, ", ".join(signature.parameters) or "nothing"
    unknown = [key for key in kwargs if key not in signature.parameters]
    if unknown:
        remedy = "Let `forward` take them, leave them out of the data, or say with `model_inputs` what the model gets"
        if set(unknown) <= {"positions", "document_ids"}:
            remedy += ": with `data.document_mask: false` nothing says where a document begins"
        return ModelError(f"{name}.forward takes {takes}, and a micro-batch has {', '.join(unknown)} too. {remedy}")
    has = ", ".join(kwargs) if kwargs else f"{len(args)} value{'s' if len(args) != 1 else ''} in a row"
    return ModelError(
        f"{name}.forward takes {takes}, and a micro-batch has {has}: {reason}. Let `forward` take the targets as well "
        "and return the loss (`def forward(self, x, y)`), give a loss_fn(outputs, batch) that compares them, or let "
        "the data give what it takes, by name: `{'x': …}`"
    )
