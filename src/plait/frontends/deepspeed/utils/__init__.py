"""`deepspeed.utils`: logging, full values of sharded parameters, and marks of ZeRO-3 leaf modules."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.distributed import assign_full_tensor
from plait.engine import ManualEngine
from plait.errors import ModelError
from plait.frontends.deepspeed.loader import RepeatingLoader
from plait.frontends.deepspeed.module_layout import not_offered
from plait.frontends.deepspeed.parameter_links import ParameterLink, full_tensor, link_of, set_full_tensors

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_optimizer_state",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

logger = logging.getLogger("plait.deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Print a message on the given ranks; -1 or none means all of them."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or ranks[0] == -1 or rank in ranks:
        if level >= logging.WARNING:
            logger.log(level, "[Rank %s] %s", rank, message)
        else:
            print(f"[Rank {rank}] {message}", flush=True)


class OnDevice:
    """A `with` block: models built inside have this device and dtype. On `meta`, `initialize` initializes them."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self._dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
        self._device = torch.device(device)
        self._enabled = enabled
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            self._device.__exit__(exc_type, error, trace)
            torch.set_default_dtype(self._before)


def safe_get_full_fp32_param(param: Tensor) -> Tensor:
    """Return the full fp32 master weight of a parameter. Every rank must call it."""
    engine, link = _engine_and_link(param)
    return full_tensor(engine.state_tensors()[f"model.{link.name}"])


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the fp32 master weight of a parameter to a full tensor, which must be equal on all ranks."""
    set_full_tensors([(_engine_and_link(param)[1], value)])


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return a full optimizer state of a parameter, such as `exp_avg`; None before the first step.

    Every rank must call it.
    """
    engine, link = _engine_and_link(param)
    state = engine.state_tensors().get(f"optim.{link.name}.{optim_state_key}")
    return None if state is None else full_tensor(state)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set an optimizer state of a parameter to a full tensor, which must be equal on all ranks."""
    engine, link = _engine_and_link(param)
    state = engine.state_tensors().get(f"optim.{link.name}.{optim_state_key}")
    if state is None:
        raise ModelError(f"{link.name} has no state {optim_state_key!r}; states exist after the first step")
    with torch.no_grad():
        assign_full_tensor(state, value)


def _engine_and_link(param: Tensor) -> tuple[ManualEngine, ParameterLink]:
    link = link_of(param)
    engine = None if link is None else link.engine()
    if link is None or engine is None:
        raise ModelError("this parameter belongs to no engine: take those of engine.module, after initialize")
    return engine, link


# ---- `deepspeed.utils.z3_leaf_module`: modules that scripts want gathered as one
#
# Here all parameters of a block are gathered together before it runs, also those of experts that a batch does not use.
# So the marks are stored, and returned to scripts, but have no effect.

import_module(f"{__name__}.z3_leaf_module")  # first: a later import would hide the function of that name


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, given as classes or names; return these modules."""
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of the modules of these classes; return these modules."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def _mark(model: nn.Module, given: Sequence[type | str], flag: bool, must_exist: bool) -> list[nn.Module]:
    classes = tuple(item for item in given if isinstance(item, type))
    names = {item for item in given if isinstance(item, str)}
    modules: list[Any] = [
        module for module in model.modules() if isinstance(module, classes) or type(module).__name__ in names
    ]
    if not modules and must_exist:
        raise ValueError(f"the model has no module of {', '.join(map(str, given))}")
    for module in modules:
        module._z3_leaf = flag
    return modules


def __getattr__(name: str) -> Any:
    if name == "zero_to_fp32":  # imported on first use, because it imports much
        return import_module(f"{__name__}.{name}")
    raise not_offered(__name__, name)
