"""The forward pass: move and cast the inputs, select the model's fields, and call the model, under autocast."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from plait.distributed import first_input, undo_compile
from plait.errors import ModelError
from plait.precision import Policy, cast_floats, map_tensors

# [Note: copies on their own stream] The host is up to a step ahead of the GPU. A copy of the next batch on the compute
# stream would begin only after the queued kernels; on a stream of its own it begins at once, and overlaps with them. A
# copy from memory that is not pinned blocks the host until its stream is done; the copy stream has no other work, so
# that takes as long as the copy.


class InputMover:
    """Moves the tensors of a batch, however nested, to one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, value: Any) -> Any:
        """Return the same structure with every tensor on the device; the compute stream waits for the copies."""
        moved: list[Tensor] = []
        result = map_tensors(lambda tensor: self._copy(tensor, moved), value)
        if moved and self._stream is not None:
            work = torch.cuda.current_stream(self._device)
            work.wait_stream(self._stream)
            for tensor in moved:
                tensor.record_stream(work)  # it was allocated on the copy stream, which must not reuse its memory yet
        return result

    def _copy(self, tensor: Tensor, moved: list[Tensor]) -> Tensor:
        if self._stream is None or tensor.device.type != "cpu":
            return tensor.to(self._device, non_blocking=True)
        with torch.cuda.stream(self._stream):
            copy = tensor.to(self._device, non_blocking=True)
        moved.append(copy)
        return copy


# Which fields of a micro-batch the model is called with; a `loss_fn` receives all of them.
#
# [Note: what goes to the model]
# torch's datasets yield `(x, y)`: the model takes `x`, and the loss compares its output with `y`. `model_inputs` names
# the fields that the model receives. Without it, and with a `loss_fn`, they follow from the signature of `forward`:
# fields of a mapping that `forward` has no parameter for are for the loss only, and so are values of a tuple beyond
# the required parameters. Two cases are ambiguous, and raise an error that says what to write: a field that changes how
# the model reads its input (a mask, positions) and has no parameter, which must not be dropped silently; and a value of
# a tuple that might be a target but would be passed as an optional parameter, unless the parameter's name says that it
# is a target (`labels=None`).


Select = Callable[[Any], Any]
"""From all fields of a micro-batch to those that the model receives."""

_LOSS_FIELDS = ("label", "target", "loss", "weight")
_READING_FIELDS = ("mask", "position", "document", "segment", "token_type", "seqlens")
_PIPELINE_INPUT = "hidden"
"""The parameter through which pipeline stages pass activations; not a field of a micro-batch."""


def select_inputs(model: nn.Module, wanted: int | Sequence[str] | None, *, has_loss: bool) -> Select | None:
    """Return the function that selects the model's fields, by `wanted` (the key `model_inputs`) or by `forward`.

    None: the model receives all fields.
    """
    if isinstance(wanted, int):
        return lambda inputs: _first_values(inputs, wanted)
    if wanted is not None:
        return lambda inputs: _named_fields(inputs, wanted)
    if not has_loss or type(model).forward is nn.Sequential.forward:
        return None
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return None
    return _BySignature(type(model).__name__, parameters)


class _BySignature:
    """Selects the model's fields by the parameters of `forward`; the others are for the loss."""

    def __init__(self, model: str, parameters: Mapping[str, inspect.Parameter]) -> None:
        self._model = model
        self._takes = ", ".join(parameters)
        param_kinds = {parameter.kind for parameter in parameters.values()}
        named = [p for name, p in parameters.items() if p.kind in _BY_POSITION and name != _PIPELINE_INPUT]
        self._takes_any_values = inspect.Parameter.VAR_POSITIONAL in param_kinds
        self._required = sum(parameter.default is inspect.Parameter.empty for parameter in named)
        self._optional = [p.name for p in named[self._required :]]
        self._takes_any_fields = inspect.Parameter.VAR_KEYWORD in param_kinds
        self._names = frozenset(parameters)

    def __call__(self, inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            return self._of_mapping(inputs)
        if isinstance(inputs, (tuple, list)):
            return self._of_sequence(inputs)
        return inputs

    def _of_mapping(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._takes_any_fields or inputs.keys() <= self._names:
            return inputs
        left = [key for key in inputs if key not in self._names]
        if any(marker in key for key in left if not _is_of_loss(key) for marker in _READING_FIELDS):
            return inputs  # calling the model with all of them raises an error that names the field
        return {key: value for key, value in inputs.items() if key in self._names}

    def _of_sequence(self, inputs: Sequence[Any]) -> Sequence[Any]:
        count = len(inputs)
        if self._takes_any_values or count <= self._required:
            return inputs
        beyond = self._optional[: count - self._required]
        if len(beyond) == count - self._required and all(_is_of_loss(name) for name in beyond):
            return inputs  # the model takes the targets, too
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
    return key == "y" or any(marker in key for marker in _LOSS_FIELDS)


def _first_values(inputs: Any, count: int) -> Any:
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


def _named_fields(inputs: Any, names: Sequence[str]) -> dict[str, Any]:
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


LogFunction = Callable[[str], None]


class Forward:
    """Calls the model. Which of moving, casting, autocast, … a call needs is decided once, not in every step."""

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
        log: LogFunction,
    ) -> None:
        """`cut` returns this rank's shard of a micro-batch, if ranks along `cp` share one.

        `before` is called before each forward pass. `select` selects the model's fields; see `select_inputs`.
        `compiled` are the modules that `torch.compile` was applied to; if the first call fails in the compiler, they
        are called without it from then on.
        """
        self._model = model
        self._move = InputMover(device) if device.type != "cpu" else None
        self._cast_to = policy.compute if policy.mixed and policy.cast_inputs else None
        self._context = policy.context(device) if policy.mixed else None
        self._compiled = list(compiled)
        self._cut = cut
        self._before = before
        self._select = select
        self._log = log
        # An `nn.Sequential` takes one argument: it gets the first value of a micro-batch, as in a pipeline.
        self._is_sequential = type(model).forward is nn.Sequential.forward
        self.plain = self._move is None and self._context is None and cut is None and not compiled and before is None
        """Whether a call needs none of: moving, casting, `cut`, autocast, compilation, `before`."""

    def ready(self, inputs: Any) -> Any:
        """Return the inputs on the device, in the compute dtype; with `cut`, this rank's shard of them."""
        if self._cut is not None:
            inputs = self._cut(inputs)
        if self._move is not None:
            inputs = self._move(inputs)
        return inputs if self._cast_to is None else cast_floats(inputs, self._cast_to)

    def model_fields(self, inputs: Any) -> Any:
        """Return those of the inputs that the model is called with."""
        return inputs if self._select is None else self._select(inputs)

    def context(self) -> AbstractContextManager[Any]:
        """Call `before`, and return the autocast context for a forward pass that a pipeline runs."""
        if self._before is not None:
            self._before()
        return nullcontext() if self._context is None else self._context

    def __call__(self, inputs: Any) -> Any:
        """Return the model's outputs for inputs that `ready` returned: a mapping or sequence of arguments, or one."""
        if self._select is not None:
            inputs = self._select(inputs)
        if self._is_sequential:
            return self.call((first_input(inputs),), {})
        input_type = type(inputs)
        args: Sequence[Any] = ()
        kwargs: Mapping[str, Any] = {}
        if input_type is dict or isinstance(inputs, Mapping):
            kwargs = inputs
        else:
            args = (
                inputs if input_type is tuple or input_type is list or isinstance(inputs, (tuple, list)) else (inputs,)
            )
        try:
            return self.call(args, kwargs)
        except TypeError as error:
            if (refusal := _refusal(self._model, args, kwargs)) is not None:
                raise refusal from error
            raise

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the model's outputs for arguments that `ready` returned."""
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
            self._log(f"torch.compile failed, training continues without it: {type(cause).__name__}: {reason}")
            undo_compile(compiled)
            return self.call(args, kwargs)
        self._compiled = compiled
        return outputs


def _refusal(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModelError | None:
    """Return the error for arguments that a model's `forward` does not accept; None if it accepts them."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        reason = str(error)
    else:
        return None
    name, takes = type(model).__name__.removeprefix("FSDP"), ", ".join(signature.parameters) or "nothing"
    unknown = [key for key in kwargs if key not in signature.parameters]
    if unknown:
        remedy = "Let `forward` take them, leave them out of the data, or name the model's fields in `model_inputs`"
        if set(unknown) <= {"positions", "document_ids"}:
            remedy += ": with `data.document_mask: false` nothing says where a document begins"
        return ModelError(f"{name}.forward takes {takes}, and a micro-batch has {', '.join(unknown)} too. {remedy}")
    has = ", ".join(kwargs) if kwargs else f"{len(args)} value{'s' if len(args) != 1 else ''} in a row"
    return ModelError(
        f"{name}.forward takes {takes}, and a micro-batch has {has}: {reason}. Let `forward` take the targets as well "
        "and return the loss (`def forward(self, x, y)`), give a loss_fn(outputs, batch) that compares them, or let "
        "the data give what it takes, by name: `{'x': …}`"
    )
