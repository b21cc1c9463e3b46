"""`deepspeed.zero`: building a large model, and reading sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.distributed import is_sharded
from plait.errors import ConfigError, Problem
from plait.frontends.deepspeed.module_layout import not_offered
from plait.frontends.deepspeed.parameter_links import (
    GatheredParameter,
    ParameterLink,
    ZeroParamStatus,
    full_tensor,
    link_of,
    redirect_operations,
    restore_operations,
    set_full_tensors,
    set_zero_attributes,
)

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]


class Init:
    """A `with` block: models built inside are in host memory, and `initialize` moves each rank's shard to its device.

    So the device never holds the whole model, at any stage. Weights are initialized by the model's constructors, in
    full precision. The host memory of each rank holds the whole model until then. To avoid that too, pass a function
    that returns the model to `initialize`, as `model`; its layers must be such that they can be initialised one by one.

    `Init(module=…)`, for a model that is already built, does nothing. `dtype`, `config`, `mem_efficient_linear` and
    `pin_memory` have no effect; the configuration of `initialize` decides the dtypes.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        unsupported = {
            "data_parallel_group": data_parallel_group,
            "mpu": mpu,
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights or None,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights or None,
            "sequence_data_parallel_group": sequence_data_parallel_group,
            "param_swapper": param_swapper,
            "remote_device": None if remote_device in (None, "none", "cpu") else remote_device,
        }
        problems = [
            Problem(f"zero.Init({name}=…)", f"{value!r} is not offered", "Leave it out.")
            for name, value in unsupported.items()
            if value is not None
        ]
        if problems and enabled:
            raise ConfigError(problems)
        self._device = torch.device("cpu") if enabled else None

    def __enter__(self) -> Init:
        if self._device is not None:
            self._device.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device is not None:
            self._device.__exit__(exc_type, error, trace)


class GatheredParameters:
    """A `with` block in which these parameters, also as attributes of modules, are unsharded. Every rank must enter it.

    With `modifier_rank`, the changes of that rank are kept, on all ranks; without it, changes are lost. `with … as
    params` returns the parameters in the given order.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, Tensor) else list(params)
        self._params = list({id(param): param for param in given}.values()) if enabled else []
        self._modifier = modifier_rank
        self._full: list[nn.Parameter] = []

    def __enter__(self) -> list[nn.Parameter]:
        self._full = [_gather(param) if _is_shard(param) else param for param in self._params]  # type: ignore[misc]
        return list(self._full)

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pairs, self._full = list(zip(self._params, self._full, strict=True)), []
        for param, full in pairs:
            if full is not param:
                _release(param)
        if self._modifier is None or exc_type is not None:
            return
        if dist.is_initialized() and dist.get_world_size() > 1:
            for _, full in pairs:
                dist.broadcast(full.data, src=self._modifier)
        linked = [(link_of(param), full.data) for param, full in pairs]
        set_full_tensors([(link, full) for link, full in linked if link is not None])


def _is_shard(param: Tensor) -> bool:
    return is_sharded(param) and not isinstance(param, GatheredParameter)  # then an outer block has gathered it


def _gather(param: Any) -> nn.Parameter:
    with torch.no_grad():
        full = nn.Parameter(_gathered_weight(param), requires_grad=param.requires_grad)
    if hasattr(param, "ds_id"):
        set_zero_attributes(full, param.ds_id, ZeroParamStatus.AVAILABLE)
        set_zero_attributes(param, param.ds_id, ZeroParamStatus.AVAILABLE)
    _register(link_of(param), full)
    redirect_operations(param, full)
    return full


def _gathered_weight(param: Any) -> Tensor:
    """Return the full weight in the dtype of the parameter, also if it is offloaded or its update is pending."""
    link = link_of(param)
    engine = None if link is None else link.engine()
    weight = param.detach() if engine is None else engine.weight_of(param)
    copy = param.device_mesh.size() == 1  # over one rank, it would share the shard's memory, and keep changes
    return full_tensor(weight).to(param.device, param.dtype, copy=copy)


def _release(param: Any) -> None:
    restore_operations(param)
    if hasattr(param, "ds_id"):
        set_zero_attributes(param, param.ds_id, ZeroParamStatus.NOT_AVAILABLE)
    _register(link_of(param), param)


def _register(link: ParameterLink | None, param: nn.Parameter) -> None:
    for owner, key in link.owners if link is not None else ():
        module = owner()
        if module is not None:
            module._parameters[key] = param


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that a module uses a parameter of another module. Has no effect, except that types are checked.

    A parameter that is used outside its block belongs to the root unit, which stays gathered while the model runs.
    """
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(f"register_external_parameter takes a parameter, not a {type(parameter).__name__}")


def __getattr__(name: str) -> Any:
    raise not_offered(__name__, name)
