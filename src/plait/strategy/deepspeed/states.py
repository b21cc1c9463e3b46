"""Where DeepSpeed keeps weights and optimizer states: one class for each of its ways.

All give and take wholes; see [Note: states by way of wholes], `foreign/wholes.py`. They look where DeepSpeed's own
`safe_get_full_*` look. Those functions themselves find no state of a group that has not stepped in the same call as the
first one, and fail on a ZeRO-3 parameter whose size does not divide by the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from plait.errors import CheckpointError
from plait.strategy.foreign.states import PlainStates, States
from plait.world import all_gather_flat


def states_of(wrapper: Any, stage: int) -> States:
    """The states of `wrapper`, which is what DeepSpeed calls its optimizer."""
    optimizer: Optimizer = getattr(wrapper, "optimizer", wrapper)
    if stage == 3:
        return PartitionedStates(wrapper, optimizer)
    if stage > 0:
        return FlatStates(wrapper, optimizer)
    groups = zip(getattr(wrapper, "fp16_groups", ()), getattr(wrapper, "fp32_groups", ()), strict=True)
    masters = {id(param): master for params, masters in groups for param, master in zip(params, masters, strict=True)}
    optimizer.state.clear()  # in bf16 DeepSpeed has stepped once, to make states, and its count would be one off
    return PlainStates(optimizer, masters)


class FlatStates(States):
    """Stages 1 and 2: each group is one flat vector, of which a rank has one stretch."""

    def __init__(self, wrapper: Any, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.wrapper = wrapper
        own = hasattr(wrapper, "bf16_groups")  # stage 1 in bf16 has a wrapper of its own
        groups = wrapper.bf16_groups if own else wrapper.bit16_groups
        self._group_of = {id(param): index for index, group in enumerate(groups) for param in group}
        self._list = "fp32_groups_flat_partition" if own else "single_partition_of_fp32_groups"

    def home(self, param: Any) -> Tensor:
        """This rank's stretch of the parameter's group."""
        stretch: Tensor = getattr(self.wrapper, self._list)[self._group_of[id(param)]]
        return stretch

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
        """Let DeepSpeed round its fp32 weights into what computes."""
        self.wrapper.update_lp_params()


class PartitionedStates(States):
    """Stage 3: of each parameter a rank has one stretch, the last ones filled up; perhaps in files."""

    def __init__(self, wrapper: Any, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.wrapper = wrapper

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
        all_gather_flat(every, mine)
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
        filled = F.pad(whole.flatten(), (0, size * dist.get_world_size() - whole.numel()))
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
