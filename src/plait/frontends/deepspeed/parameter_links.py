"""Links from parameters to the engine that trains them, for DeepSpeed's functions whose arguments are parameters.

[Note: a shard is not saved as if it were the full tensor]
Below stage 3, DeepSpeed's weights are unsharded on every rank, and scripts save those of rank 0:
`torch.save(engine.module.state_dict(), …)`. The same works here, between steps. With pipeline stages or tensor-parallel
ranks, each rank has only a part of the weights, but the saved file would look complete. So the model's `state_dict`
then raises an error, and pickling a shard always does. At stage 3, DeepSpeed's `state_dict` has empty tensors, which
scripts replace afterwards and which cannot be mistaken for weights; the same is done here.
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
from plait.precision import map_tensors

# The attributes that DeepSpeed sets on a sharded parameter; scripts read them before they gather it.


class ZeroParamStatus(Enum):
    """Whether this rank has the full tensor of a parameter."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def set_zero_attributes(param: Any, number: int, status: ZeroParamStatus) -> None:
    """Set the attributes `ds_id`, `ds_status`, `ds_shape` and `ds_numel` of a parameter."""
    param.ds_id, param.ds_status = number, status
    param.ds_shape, param.ds_numel = param.shape, param.numel()


def is_zero_param(parameter: Any) -> bool:
    """Return whether a parameter is sharded: it then has DeepSpeed's attributes."""
    return isinstance(parameter, Tensor) and hasattr(parameter, "ds_id")


_LINK = "_plait_link"


@dataclass(slots=True)
class ParameterLink:
    """The engine and the modules that have a parameter, as weak references."""

    engine: weakref.ref[ManualEngine]
    name: str
    is_shard: bool
    owners: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)
    """Every module that has the parameter, and its name there."""

    def __reduce__(self) -> Any:
        """Let an unsharded parameter be pickled without its link; raise for a shard (see the note of this module)."""
        if self.is_shard:
            raise _shard_error(self.name)
        return type(None), ()


def link_parameters(engine: ManualEngine, *, stage: int) -> None:
    """Link every parameter of a model to its engine; register hooks on `state_dict` (see the note above)."""
    for number, param in enumerate(engine.model.parameters()):
        if is_sharded(param):
            set_zero_attributes(param, number, ZeroParamStatus.NOT_AVAILABLE)
    _link(engine)
    with engine.sharded_params_registered():  # which the model has between the backward pass and the step
        _link(engine)
        for module in engine.model.modules():
            if any(is_sharded(param) for param in module._parameters.values()):
                hook = _empty_shards if stage == 3 else _refuse_shards
                module.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
    if stage < 3:
        engine.model.register_load_state_dict_post_hook(_update_master_weights)  # type: ignore[no-untyped-call]


def _link(engine: ManualEngine) -> None:
    names = {id(param): name for name, param in engine.model.named_parameters()}
    links: dict[int, ParameterLink] = {}
    for module in engine.model.modules():
        for key, param in module._parameters.items():
            if param is not None:
                new = ParameterLink(weakref.ref(engine), names[id(param)], is_sharded(param))
                link = links.setdefault(id(param), new)
                link.owners.append((weakref.ref(module), key))
                setattr(param, _LINK, link)


def _update_master_weights(model: nn.Module, _keys: Any) -> None:
    """After `load_state_dict` of the model, copy its weights to the master weights that the optimizer updates."""
    linked = [(link_of(param), param.detach()) for param in model.parameters() if not is_sharded(param)]
    set_full_tensors([(link, value) for link, value in linked if link is not None])


def _refuse_shards(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """See [Note: a shard is not saved as if it were the full tensor]."""
    for key, param in module._parameters.items():
        if is_sharded(param):
            raise _shard_error(prefix + key)


def _empty_shards(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """See [Note: a shard is not saved as if it were the full tensor]."""
    for key, param in module._parameters.items():
        if is_sharded(param):
            state[prefix + key] = torch.empty(0, dtype=param.dtype, device=param.device)


def _shard_error(name: str) -> ModelError:
    return ModelError(
        f"this rank has a shard of {name!r}, and a file with shards would not be the model. On every rank call "
        "engine.save_16bit_model(folder) or engine.module_state_dict(), which gives rank 0 the full weights, or save "
        "inside `with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):`"
    )


def link_of(param: Tensor) -> ParameterLink | None:
    """Return the link of a parameter; None if it belongs to no engine."""
    link = getattr(param, _LINK, None)
    assert link is None or isinstance(link, ParameterLink)
    return link


def set_full_tensors(values: Iterable[tuple[ParameterLink, Tensor]]) -> None:
    """Set the engines' weights of linked parameters to full tensors, which must be equal on all ranks."""
    engines: dict[int, tuple[ManualEngine, dict[str, Tensor]]] = {}
    for link, value in values:
        engine = link.engine()
        assert engine is not None
        _, tensors = engines.setdefault(id(engine), (engine, engine.state_tensors()))
        assign_full_tensor(tensors[f"model.{link.name}"], value)
    for engine, _ in engines.values():
        engine.state_loaded()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor; a sharded one is gathered, so every rank must call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


# A gathered parameter, whose operations are done to the full tensor.
#
# A script gathers a parameter, and then reads the same parameter object. The engine refers to this object too, so it is
# not replaced: while it is gathered, its class is `GatheredParameter`, which redirects operations to the full tensor.


_FULL = "_plait_full"


class GatheredParameter(DTensor):
    """The class of a sharded parameter while it is gathered."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map_tensors(_full_of, args), **map_tensors(_full_of, kwargs or {}))


def _full_of(tensor: Tensor) -> Tensor:
    return tensor.__dict__[_FULL] if isinstance(tensor, GatheredParameter) else tensor


def redirect_operations(param: DTensor, full: nn.Parameter) -> None:
    """Redirect operations on `param` to `full`, until `restore_operations`."""
    param.__dict__[_FULL] = full
    param.__class__ = GatheredParameter


def restore_operations(param: DTensor) -> None:
    """Stop redirecting operations on a parameter: they use its shard again."""
    param.__class__ = DTensor
    del param.__dict__[_FULL]
