"""`deepspeed.zero`: building a large model, and looking at parameters of which each rank holds a part."""

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
    ParameterLink,
    ZeroParamStatus,
    link_of,
    mark_parameter,
    set_wholes,
    whole,
)

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]


class Init:
    """Models that are built inside lie in host memory, and `initialize` brings each rank's part to its device.

    So the device never holds the whole, at any stage. The values are those that the constructors make, in full
    precision. Each rank's host memory does hold the whole for a while; a function that makes the model, given to
    `initialize` as `model`, avoids that too where the layers can be initialised one by one.

    `module` may be given instead of the `with`: there is nothing to do for a model that is there. `dtype`, `config`,
    `mem_efficient_linear` and `pin_memory` have no meaning for a model in host memory; formats are decided by the
    configuration of `initialize`.
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
        asked = {
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
            for name, value in asked.items()
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device is not None:
            self._device.__exit__(kind, error, trace)


class GatheredParameters:
    """Inside, these parameters are whole, and so the modules hold them; every rank must take part.

    With `modifier_rank`, what that rank wrote into them stays, on all ranks; without, changes are lost. `with … as
    wholes` gives them in the given order, too.
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
        self._wholes: list[nn.Parameter] = []

    def __enter__(self) -> list[nn.Parameter]:
        self._wholes = [_gather(param) if _is_part(param) else param for param in self._params]  # type: ignore[misc]
        return list(self._wholes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pairs, self._wholes = list(zip(self._params, self._wholes, strict=True)), []
        for param, full in pairs:
            if full is not param:
                _let_go(param)
        if self._modifier is None or kind is not None:
            return
        if dist.is_initialized() and dist.get_world_size() > 1:
            for _, full in pairs:
                dist.broadcast(full.data, src=self._modifier)
        linked = [(link_of(param), full.data) for param, full in pairs]
        set_wholes([(link, full) for link, full in linked if link is not None])


def _is_part(param: Tensor) -> bool:
    if not is_sharded(param):
        return False
    from plait.frontends.deepspeed.parameter_links import Gathered

    return not isinstance(param, Gathered)  # by a block around this one


def _gather(param: Any) -> nn.Parameter:
    from plait.frontends.deepspeed.parameter_links import speak_for

    with torch.no_grad():
        full = nn.Parameter(_whole_of(param), requires_grad=param.requires_grad)
    if hasattr(param, "ds_id"):
        mark_parameter(full, param.ds_id, ZeroParamStatus.AVAILABLE)
        mark_parameter(param, param.ds_id, ZeroParamStatus.AVAILABLE)
    _put(link_of(param), full)
    speak_for(param, full)
    return full


def _whole_of(param: Any) -> Tensor:
    """In the format of the parameter. It may be offloaded: then it has no memory itself, or waits for its update."""
    link = link_of(param)
    engine = None if link is None else link.engine()
    behind = param.detach() if engine is None else engine.weight_of(param)
    alone = param.device_mesh.size() == 1  # the whole would be the very weights, and changes would not be lost
    return whole(behind).to(param.device, param.dtype, copy=alone)


def _let_go(param: Any) -> None:
    from plait.frontends.deepspeed.parameter_links import speak_for_itself

    speak_for_itself(param)
    if hasattr(param, "ds_id"):
        mark_parameter(param, param.ds_id, ZeroParamStatus.NOT_AVAILABLE)
    _put(link_of(param), param)


def _put(link: ParameterLink | None, param: nn.Parameter) -> None:
    for home, key in link.homes if link is not None else ():
        module = home()
        if module is not None:
            module._parameters[key] = param


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Tell that a module uses a parameter of another one.

    Nothing has to be done for it: a parameter that is used outside of its block belongs to the root, which is
    gathered as long as the model runs.
    """
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(f"register_external_parameter takes a parameter, not a {type(parameter).__name__}")


def __getattr__(name: str) -> Any:
    raise not_offered(__name__, name)
