"""`deepspeed.zero`: building a large model, and looking at parameters of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.errors import ConfigError, Problem
from plait.frontends.deepspeed.absent import not_offered
from plait.frontends.deepspeed.link import Link, link_of, whole
from plait.parallel.materialize import assign_whole
from plait.world import is_sharded

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
    """Inside, the modules that hold these parameters hold the whole of them; every rank must take part.

    With `modifier_rank`, what that rank wrote into them stays, on all ranks; without, changes are lost. A module is
    to be asked for its parameter again inside: the object from before is still a part. `with … as wholes` gives them
    in the given order, too.
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
        with torch.no_grad():
            # What is whole already is used as it is.
            wholes = [whole(param.detach()) if is_sharded(param) else param for param in self._params]
        self._wholes = [
            each if isinstance(each, nn.Parameter) else nn.Parameter(each, requires_grad=param.requires_grad)
            for each, param in zip(wholes, self._params, strict=True)
        ]
        for param, full in zip(self._params, self._wholes, strict=True):
            _put(link_of(param), full)
        return list(self._wholes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for param, full in zip(self._params, self._wholes, strict=True):
            assert isinstance(param, nn.Parameter)
            _put(link_of(param), param)
            if self._modifier is None or kind is not None:
                continue
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast(full.data, src=self._modifier)
            if full is not param:
                assign_whole(param, full.data)
        self._wholes = []


def _put(link: Link | None, param: nn.Parameter) -> None:
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
