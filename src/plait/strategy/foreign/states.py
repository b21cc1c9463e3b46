"""Where a library keeps weights and optimizer states; see [Note: states by way of wholes], `foreign/wholes.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class States(ABC):
    """The fp32 weights and optimizer states of a library, read and written whole, parameter by parameter."""

    def __init__(self, optimizer: Optimizer) -> None:
        """`optimizer` is the torch optimizer inside the library's."""
        self.optimizer = optimizer

    @abstractmethod
    def home(self, param: Any) -> Tensor:
        """The tensor under which the torch optimizer keeps the state of a parameter, perhaps with others'."""

    @abstractmethod
    def read(self, param: Any, key: str | None) -> Tensor:
        """The whole fp32 weight, or the whole state called `key`."""

    @abstractmethod
    def write(self, param: Any, key: str | None, whole: Tensor) -> None:
        """Set what `read` reads, from a whole tensor."""

    def write_computing(self, param: Any, whole: Tensor) -> None:
        """Set the values that the model computes with, which may be rounded."""
        param.data.copy_(whole)

    def publish(self) -> None:  # noqa: B027  # where what is written computes
        """Bring what computes up to date with the weights."""

    def state(self, param: Any) -> dict[str, Any]:
        """What the torch optimizer keeps for a parameter, by name."""
        found: dict[str, Any] = self.optimizer.state.get(self.home(param), {})
        return found

    def keys(self, param: Any) -> list[str]:
        """Names of the states that are tensors."""
        return [key for key, value in self.state(param).items() if isinstance(value, Tensor)]

    def allocate(self, param: Any, key: str, shape: torch.Size, dtype: torch.dtype, *, whole: bool) -> None:
        """Make room for a state: one as large as the parameter (`whole`), or of `shape` for all at the same home."""
        home = self.home(param)
        fused = any(group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups)
        device = home.device if whole or fused else torch.device("cpu")
        room = torch.zeros(home.shape if whole else shape, dtype=dtype, device=device)
        self.optimizer.state[home].setdefault(key, room)

    def _scalar(self, param: Any, key: str | None) -> Tensor | None:
        """A state that is one for all at the same home, such as `step`."""
        value = None if key is None else self.state(param)[key]
        return value if isinstance(value, Tensor) and value.ndim == 0 else None


class PlainStates(States):
    """Every rank has all; where weights are rounded, the fp32 ones lie beside."""

    def __init__(self, optimizer: Optimizer, masters: Mapping[int, Tensor]) -> None:
        """`masters` holds the fp32 weights of rounded parameters, by the parameter's `id`."""
        super().__init__(optimizer)
        self._masters = masters

    def home(self, param: Any) -> Tensor:
        """The fp32 weights, or the parameter."""
        found: Tensor = self._masters.get(id(param), param)
        return found

    def read(self, param: Any, key: str | None) -> Tensor:
        """Every rank has it whole: nothing is gathered."""
        found: Tensor = self.home(param) if key is None else self.state(param)[key]
        return found.detach()

    def write(self, param: Any, key: str | None, whole: Tensor) -> None:
        """Copy it in place; also, rounded, into what computes."""
        self.read(param, key).copy_(whole)
        if key is None and id(param) in self._masters:
            self.write_computing(param, whole)
