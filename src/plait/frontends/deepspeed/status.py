"""What DeepSpeed notes on a parameter of which each rank holds a part; scripts look for it before they gather one."""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import Tensor


class ZeroParamStatus(Enum):
    """Whether this rank has the whole of a parameter."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def note(param: Tensor, number: int, status: ZeroParamStatus) -> None:
    """Leave DeepSpeed's notes on a parameter."""
    noted: Any = param
    noted.ds_id, noted.ds_status = number, status
    noted.ds_shape, noted.ds_numel = param.shape, param.numel()


def is_zero_param(parameter: Any) -> bool:
    """Whether a parameter has DeepSpeed's notes: each rank holds a part of it."""
    return isinstance(parameter, Tensor) and hasattr(parameter, "ds_id")
