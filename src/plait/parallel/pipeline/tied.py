"""Weights that several stages hold: one name, one value, one gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.parallel.pipeline.split import Stage
from plait.world import is_sharded, wait_for

Find = Callable[[Stage, str], Tensor]
"""The tensor of a parameter of a stage that is meant: its gradient, say, wherever that is kept."""


class TiedWeights:
    """What this rank's stages share with those of others (or with each other).

    Ranks that hold the same parameter and the same part of it (where it is sharded as well) are those of one
    pipeline, so its own group is enough.
    """

    def __init__(self, stages: Sequence[Stage], placement: Sequence[int], group: dist.ProcessGroup) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._placement = placement
        self._group = group
        self._rank = dist.get_rank(group)
        self.holders = {name: holders for stage in stages for name, holders in stage.tied.items()}
        """Name → stages that hold it, in order; the first owns it."""
        here = {name: [index for index in holders if index in self._stages] for name, holders in self.holders.items()}
        self._copies = [(name, first, copy) for name, (first, *copies) in here.items() for copy in copies]

    def sum(self, find: Find | None = None) -> None:
        """Make every holder's tensor the sum over all holders, in place; to be called by all ranks, once a step.

        Without `find` these are the `.grad` of parameters, zeros where there is none. The sum is taken in the
        order of the stages everywhere, so all holders get the same bits, and go on having the same weights.
        """
        for name, holders in sorted(self.holders.items()):
            if not self._trained(name):
                continue
            own = {index: self._local(index, name, find) for index in holders if index in self._stages}
            parts = self._exchange(own, holders)
            total = torch.stack(parts).sum(0) if len(parts) > 2 else parts[0] + parts[1]
            for tensor in own.values():
                tensor.copy_(total)

    @torch.no_grad()
    def refresh(self) -> None:
        """Let a second tensor of a weight on this rank follow the first: its values, and no gradient of its own.

        For an optimizer and a checkpoint that know the first alone, whose gradient `sum` makes that of both. To be
        called before a pass.
        """
        for name, first, copy in self._copies:
            source, target = (self._stages[index].module.get_parameter(name) for index in (first, copy))
            _local(target).copy_(_local(source))
            target.grad = None

    def _trained(self, name: str) -> bool:
        stage = next(self._stages[index] for index in self.holders[name] if index in self._stages)
        return stage.module.get_parameter(name).requires_grad

    def _local(self, index: int, name: str, find: Find | None) -> Tensor:
        stage = self._stages[index]
        return _local(_gradient(stage.module.get_parameter(name)) if find is None else find(stage, name))

    @torch.no_grad()
    def _exchange(self, own: dict[int, Tensor], holders: Sequence[int]) -> list[Tensor]:
        """Everybody's tensors, in the order of the stages."""
        example = next(iter(own.values()))
        parts: dict[int, Tensor] = {index: tensor.contiguous() for index, tensor in own.items()}
        peers = sorted({self._placement[index] for index in holders} - {self._rank})
        operations = []
        for index in holders:
            if index in own:
                operations += [self._operation(dist.isend, parts[index], peer) for peer in peers]
            else:
                parts[index] = torch.empty_like(example, memory_format=torch.contiguous_format)
                operations.append(self._operation(dist.irecv, parts[index], self._placement[index]))
        wait_for(
            dist.batch_isend_irecv(operations) if operations else (),
            "an exchange of tied weights between pipeline stages",
        )
        return [parts[index] for index in holders]

    def _operation(self, operation: Callable[..., dist.Work | None], tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, group=self._group, group_peer=peer)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor.detach()
