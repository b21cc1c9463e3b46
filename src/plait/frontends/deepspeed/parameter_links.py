"""From a parameter to the engine that trains it: what DeepSpeed's functions on bare parameters need.

[Note: a part is not saved as if it were the whole]
Below stage 3 the weights of DeepSpeed are whole on every rank, and scripts write what rank 0 alone has:
`torch.save(engine.module.state_dict(), …)`. So it is here, between steps. Of layers that are spread over a pipeline or
over tensor ranks each rank has a part, and the file would look whole: there the `state_dict` of a model is an error,
and everywhere the pickling of a part. At stage 3 DeepSpeed gives tensors without numbers, which scripts write over
afterwards and which nothing takes for weights; so it is here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plait.distributed import assign_full_tensor, is_sharded
from plait.engine import ManualEngine
from plait.errors import ModelError
from plait.torch_internals import tree_map

# What DeepSpeed notes on a parameter of which each rank holds a part; scripts look for it before they gather one.


class ZeroParamStatus(Enum):
    """Whether this rank has the whole of a parameter."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark_parameter(param: Tensor, number: int, status: ZeroParamStatus) -> None:
    """Leave DeepSpeed's notes on a parameter."""
    noted: Any = param
    noted.ds_id, noted.ds_status = number, status
    noted.ds_shape, noted.ds_numel = param.shape, param.numel()


def is_zero_param(parameter: Any) -> bool:
    """Whether a parameter has DeepSpeed's notes: each rank holds a part of it."""
    return isinstance(parameter, Tensor) and hasattr(parameter, "ds_id")


_NAME = "_plait_link"


@dataclass(slots=True)
class ParameterLink:
    """Where a parameter lives. Nothing is kept alive by it."""

    engine: weakref.ref[ManualEngine]
    name: str
    part: bool
    homes: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)
    """Every module that holds it, and under which key."""

    def __reduce__(self) -> Any:
        """Nothing goes along with a whole parameter that is pickled; see the note for the others."""
        if self.part:
            raise _a_part_of(self.name)
        return type(None), ()


def link_parameters(engine: ManualEngine, *, whole_nowhere: bool) -> None:
    """Leave a note on every parameter of an engine's model; `whole_nowhere`: with DeepSpeed ranks have parts, too."""
    for number, part in enumerate(engine.model.parameters()):
        if is_sharded(part):
            mark_parameter(part, number, ZeroParamStatus.NOT_AVAILABLE)
    _link(engine)
    with engine.sharded_params_registered():  # as they are between the backward pass and the step
        _link(engine)
        for module in engine.model.modules():
            if any(is_sharded(param) for param in module._parameters.values()):
                hook = _without_numbers if whole_nowhere else _refuse_parts
                module.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
    if not whole_nowhere:
        engine.model.register_load_state_dict_post_hook(_take_loaded)  # type: ignore[no-untyped-call]


def _link(engine: ManualEngine) -> None:
    named = {id(param): name for name, param in engine.model.named_parameters()}
    links: dict[int, ParameterLink] = {}
    for module in engine.model.modules():
        for key, param in module._parameters.items():
            if param is not None:
                new = ParameterLink(weakref.ref(engine), named[id(param)], is_sharded(param))
                link = links.setdefault(id(param), new)
                link.homes.append((weakref.ref(module), key))
                setattr(param, _NAME, link)


def _take_loaded(model: nn.Module, _keys: Any) -> None:
    """Let the weights that are updated become those that a script has loaded into the model."""
    linked = [(link_of(param), param.detach()) for param in model.parameters() if not is_sharded(param)]
    set_wholes([(link, value) for link, value in linked if link is not None])


def _refuse_parts(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """See [Note: a part is not saved as if it were the whole]."""
    for key, param in module._parameters.items():
        if is_sharded(param):
            raise _a_part_of(prefix + key)


def _without_numbers(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """See [Note: a part is not saved as if it were the whole]."""
    for key, param in module._parameters.items():
        if is_sharded(param):
            state[prefix + key] = torch.empty(0, dtype=param.dtype, device=param.device)


def _a_part_of(name: str) -> ModelError:
    return ModelError(
        f"this rank holds a part of {name!r}, and what is saved of it would not be the model. On every rank call "
        "engine.save_16bit_model(folder) or engine.module_state_dict(), which gives rank 0 the whole, or ask inside "
        "`with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):`"
    )


def link_of(param: Tensor) -> ParameterLink | None:
    """What was noted on a parameter; None where it belongs to no engine."""
    found = getattr(param, _NAME, None)
    assert found is None or isinstance(found, ParameterLink)
    return found


def set_wholes(values: Iterable[tuple[ParameterLink, Tensor]]) -> None:
    """Set the weights behind parameters to whole tensors, the same on all ranks."""
    engines: dict[int, tuple[ManualEngine, dict[str, Tensor]]] = {}
    for link, value in values:
        engine = link.engine()
        assert engine is not None
        _, tensors = engines.setdefault(id(engine), (engine, engine.state_tensors()))
        assign_full_tensor(tensors[f"model.{link.name}"], value)
    for engine, _ in engines.values():
        engine.state_loaded()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which this rank may hold a part; every rank must ask."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


# A parameter that speaks for the whole of itself, as long as that is there.
#
# Scripts hold on to parameters: they ask for one, gather it, and look at the very object that they asked for. It stays
# the object that the engine knows; only what is done to it meanwhile is done to the whole.


_WHOLE = "_plait_whole"


class Gathered(DTensor):
    """The class of a parameter while it is gathered."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(_whole_of, args), **tree_map(_whole_of, kwargs or {}))


def _whole_of(value: Any) -> Any:
    return value.__dict__[_WHOLE] if isinstance(value, Gathered) else value


def speak_for(param: DTensor, whole: nn.Parameter) -> None:
    """From now on, what is done to `param` is done to `whole`."""
    param.__dict__[_WHOLE] = whole
    param.__class__ = Gathered


def speak_for_itself(param: DTensor) -> None:
    """The parameter is this rank's part again."""
    param.__class__ = DTensor
    del param.__dict__[_WHOLE]
