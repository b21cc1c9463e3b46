"""The raw side of `pipeline.py`: torch's own tensor and pipeline parallelism, used as its documents say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from nets import GptSize
from pipeline_nets import Block, cross_entropy, gpt_row
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

LR, CLIP = 3e-4, 1.0

Step = Callable[[Tensor, Tensor], float]
"""(tokens, labels) of a whole batch → its loss."""


def tensor_parallel(size: GptSize, _micros: int) -> Step:
    """Attention by heads, feed-forward by features; each enters its region once."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    model = gpt_row(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        if isinstance(block, Block):
            enter = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
            plan = {"attention": enter, "ffn": enter}
            plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
            plan |= {"attention.out": RowwiseParallel(), "ffn.up": ColwiseParallel(), "ffn.down": RowwiseParallel()}
            parallelize_module(block, mesh, plan)
    params = list(model.parameters())
    cut = [param for param in params if isinstance(param, DTensor)]
    whole = [param for param in params if not isinstance(param, DTensor)]
    optimizers = [_optimizer(cut), _optimizer(whole)]  # one optimizer refuses a mixture of both kinds

    def step(ids: Tensor, labels: Tensor) -> float:
        loss = cross_entropy(model(ids), labels)
        loss.backward()
        of_cut = get_total_norm([param.grad for param in cut if param.grad is not None])
        of_whole = get_total_norm([param.grad for param in whole if param.grad is not None])
        assert isinstance(of_cut, DTensor)
        norm = torch.hypot(of_cut.full_tensor(), of_whole)
        for group in (cut, whole):
            _clip(group, norm)
        _update(optimizers)
        return float(loss.detach())

    return step


def pipeline_parallel(size: GptSize, micros: int) -> Step:
    """1F1B over as many stages as there are ranks; the norm and the loss go to all ranks in one sum."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers = list(gpt_row(size))
    bounds = [round(index * len(layers) / ranks) for index in range(ranks + 1)]
    model = nn.Sequential(*layers[bounds[rank] : bounds[rank + 1]])
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=micros, loss_fn=cross_entropy)
    params = list(model.parameters())
    optimizers = [_optimizer(params)]

    def step(ids: Tensor, labels: Tensor) -> float:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=labels, losses=losses)
        squared = get_total_norm([param.grad for param in params if param.grad is not None]).square()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        sums = torch.stack((squared, loss))
        dist.all_reduce(sums)
        _clip(params, sums[0].sqrt())
        _update(optimizers)
        return float(sums[1])

    return step


def _optimizer(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.01, fused=True)


def _clip(params: Sequence[nn.Parameter], norm: Tensor) -> None:
    clip_grads_with_norm_(params, CLIP, norm)


def _update(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


RAW: Mapping[str, Callable[[GptSize, int], Step]] = MappingProxyType({"tp2": tensor_parallel, "pp2": pipeline_parallel})
