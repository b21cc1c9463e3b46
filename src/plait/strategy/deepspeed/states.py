"""Where DeepSpeed keeps weights and optimizer states: one class for each of its ways.

All give and take wholes; see [Note: states by way of wholes], `foreign/wholes.py`. They look where DeepSpeed's own
`safe_get_full_*` look. Those functions themselves find no state of a group that has not stepped in the same call as the
first one, and fail on a ZeRO-3 parameter whose size does not divide by the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.errors import CheckpointError


class States(ABC):
    """Weights and states by parameter."""

    def __init__(self, wrapper: Any, optimizer: Optimizer) -> None:
        """`wrapper` is what DeepSpeed calls its optimizer; `optimizer` the torch optimizer inside."""
        self.wrapper = wrapper
        self.optimizer = optimizer

    @abstractmethod
    def home(self, param: Any) -> Tensor:
        """The tensor under which the torch optimizer keeps the state of a parameter, perhaps with others'."""

    @abstractmethod
    def read(self, param: Any, key: str | None) -> Tensor:
        """The whole fp32 weight, or the whole state called `key`."""

    @abstractmethod
    def write(self, param: Any, key: str | None, whole: Tensor) -> None:
        """Set it."""

    def write_computing(self, param: Any, whole: Tensor) -> None:
        """Set what computes."""
        param.data.copy_(whole)

    def publish(self) -> None:  # noqa: B027  # where what is written computes
        """Bring what computes up to date with the weights."""

    def state(self, param: Any) -> dict[str, Any]:
        """What the torch optimizer keeps."""
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
    """Stage 0: every rank has all; in bf16 the fp32 weights lie beside."""

    def __init__(self, wrapper: Any, optimizer: Optimizer) -> None:
        super().__init__(wrapper, optimizer)
        optimizer.state.clear()  # in bf16 DeepSpeed has stepped once, to make states, and its count would be one off
        groups = zip(getattr(wrapper, "fp16_groups", ()), getattr(wrapper, "fp32_groups", ()), strict=True)
        self._masters: dict[int, Tensor] = {
            id(param): master for params, masters in groups for param, master in zip(params, masters, strict=True)
        }

    def home(self, param: Any) -> Tensor:
        """The fp32 weights, or the parameter."""
        found: Tensor = self._masters.get(id(param), param)
        return found

    def read(self, param: Any, key: str | None) -> Tensor:
        """It is there."""
        found: Tensor = self.home(param) if key is None else self.state(param)[key]
        return found.detach()

    def write(self, param: Any, key: str | None, whole: Tensor) -> None:
        """Copied in place."""
        self.read(param, key).copy_(whole)
        if key is None and id(param) in self._masters:
            self.write_computing(param, whole)


class FlatStates(States):
    """Stages 1 and 2: each group is one flat vector, of which a rank has one stretch."""

    @property
    def _stretches(self) -> list[Tensor]:
        of_zero: list[Tensor] | None = getattr(self.wrapper, "single_partition_of_fp32_groups", None)
        return self.wrapper.fp32_groups_flat_partition if of_zero is None else of_zero

    @property
    def _groups(self) -> list[list[nn.Parameter]]:
        of_zero: list[list[nn.Parameter]] | None = getattr(self.wrapper, "bit16_groups", None)
        return self.wrapper.bf16_groups if of_zero is None else of_zero

    def home(self, param: Any) -> Tensor:
        """This rank's stretch of the parameter's group."""
        for stretch, group in zip(self._stretches, self._groups, strict=True):
            if any(each is param for each in group):
                return stretch
        raise AssertionError("a trained parameter is in some group")

    def read(self, param: Any, key: str | None) -> Tensor:
        """The pieces of all ranks."""
        scalar = self._scalar(param, key)
        if scalar is not None:
            return scalar
        whole = torch.zeros(param.numel(), device=param.device)
        piece = self._piece(param, key)
        if piece is not None:
            at = param._hp_mapping.lp_fragment_address
            whole.narrow(0, at.start, at.numel).copy_(piece)
        dist.all_reduce(whole)
        return whole.view(param.shape)

    def write(self, param: Any, key: str | None, whole: Tensor) -> None:
        """This rank's piece of it."""
        scalar = self._scalar(param, key)
        if scalar is not None:
            scalar.copy_(whole)
            return
        piece = self._piece(param, key)
        if piece is not None:
            at = param._hp_mapping.lp_fragment_address
            piece.copy_(whole.flatten().narrow(0, at.start, at.numel))

    def _piece(self, param: Any, key: str | None) -> Tensor | None:
        if param._hp_mapping is None:
            return None
        at = param._hp_mapping.hp_fragment_address
        home = self.home(param).detach()
        source: Tensor = home if key is None else self.optimizer.state[self.home(param)][key]
        return source.narrow(0, at.start, at.numel)

    def publish(self) -> None:
        """DeepSpeed's own function."""
        self.wrapper.update_lp_params()


class PartitionedStates(States):
    """Stage 3: of each parameter a rank has one stretch, the last ones filled up; perhaps in files."""

    def _place(self, param: Any) -> int:
        place: int = self.wrapper.grad_position[self.wrapper.get_param_id(param)][0]
        return place

    def home(self, param: Any) -> Tensor:
        """The vector that the parameter is updated in, with others."""
        home: Tensor = self.wrapper.fp32_partitioned_groups_flat[self._place(param)]
        return home

    def read(self, param: Any, key: str | None) -> Tensor:
        """The stretches of all ranks, without what fills up the last."""
        scalar = self._scalar(param, key)
        if scalar is not None:
            return scalar
        mine: Tensor = self.wrapper.get_local_fp32_param(param, key).detach().contiguous()
        every = mine.new_empty(mine.numel() * dist.get_world_size())
        dist.all_gather_into_tensor(every, mine)
        return every[: param.ds_numel].view(param.ds_shape)

    def write(self, param: Any, key: str | None, whole: Tensor) -> None:
        """This rank's stretch of it, also of what computes."""
        scalar = self._scalar(param, key)
        if scalar is not None:
            scalar.copy_(whole)
            return
        self.wrapper.set_local_hp_param(self._stretch(param, whole), param, key)
        if key is None:
            self.write_computing(param, whole)

    def write_computing(self, param: Any, whole: Tensor) -> None:
        """This rank's stretch; the whole too where it is gathered, as small ones are between steps."""
        stretch, part = self._stretch(param, whole), param.ds_tensor
        if part.status.name == "AVAILABLE":
            part.data.copy_(stretch)
        else:
            param.nvme_swapper.swap_out_partitioned_params(dst_fp16_params=[param], src_fp32_params=[stretch])
        if param.ds_status.name == "AVAILABLE":
            param.data.copy_(whole)

    def _stretch(self, param: Any, whole: Tensor) -> Tensor:
        size, rank = param.ds_tensor.ds_numel, dist.get_rank()
        filled = nn.functional.pad(whole.flatten(), (0, size * dist.get_world_size() - whole.numel()))
        return filled.narrow(0, size * rank, size)

    def allocate(self, param: Any, key: str, shape: torch.Size, dtype: torch.dtype, *, whole: bool) -> None:
        """Make room; refused where the states lie in files, which DeepSpeed makes at the first step."""
        if getattr(self.wrapper, "swap_optimizer", False):
            raise CheckpointError(
                "DeepSpeed makes the files of its NVMe offload at the first step, so no optimizer state can be put "
                "there before: resume with offload_optimizer.device: cpu, or leave the state out with "
                'checkpoint.partial: ["optim.*"]'
            )
        super().allocate(param, key, shape, dtype, whole=whole)
