"""One bucket's update, by the optimizer itself or by the kernel that does the same in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from plait.ops import AdamNumbers, Crew, adam_step
from plait.optim import bare_step, clip_by_value, supports_grad_scale
from plait.parallel.offload.buckets import Bucket
from plait.torch_internals import foreach_mul_


@torch.no_grad()
def step_bucket(
    bucket: Bucket,
    grads: Sequence[Tensor],
    rooms: Sequence[Tensor | None],
    factor: float,
    clip_value: float | None,
    crew: Crew | None = None,
) -> None:
    """Update the masters of a bucket with `grads` times `factor`, and round each to its room, where it has one.

    `crew`: the threads that do it, where the kernel of one pass can.
    """
    optimizer = bucket.optimizer
    assert optimizer is not None
    if clip_value is None and _in_one_pass(optimizer, bucket, grads, rooms):
        _step_adam(optimizer, bucket, grads, rooms, factor, crew)
        return
    _step_any(optimizer, bucket, grads, factor, clip_value)
    for master, room in zip(bucket.masters, rooms, strict=True):
        if room is not None:
            room.copy_(master)


def _in_one_pass(optimizer: Optimizer, bucket: Bucket, grads: Sequence[Tensor], rooms: Sequence[Tensor | None]) -> bool:
    """Whether the kernel that widens gradients and rounds weights as it goes can do it, and has something to do."""
    first = bucket.masters[0]
    if type(optimizer).step not in (Adam.step, AdamW.step) or first.device.type != "cpu":
        return False
    asked = all(
        group.get("fused") and not (group["amsgrad"] or group["maximize"] or group["capturable"])
        for group in optimizer.param_groups
    )
    narrow = any(grad.dtype != torch.float32 for grad in grads)
    narrow |= any(room is not None and room.dtype != torch.float32 for room in rooms)
    wide = all(master.dtype == torch.float32 and master.is_contiguous() for master in bucket.masters)
    return asked and narrow and wide


def _step_adam(
    optimizer: Optimizer,
    bucket: Bucket,
    grads: Sequence[Tensor],
    rooms: Sequence[Tensor | None],
    factor: float,
    crew: Crew | None,
) -> None:
    given = {id(master): (grad, room) for master, grad, room in zip(bucket.masters, grads, rooms, strict=True)}
    for group in optimizer.param_groups:
        for master in group["params"]:
            state = optimizer.state[master]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            state["step"] += 1
            grad, room = given[id(master)]
            numbers = AdamNumbers(
                int(state["step"]),
                float(group["lr"]),
                (float(group["betas"][0]), float(group["betas"][1])),
                float(group["eps"]),
                float(group["weight_decay"]),
                decoupled=type(optimizer) is AdamW or bool(group.get("decoupled_weight_decay")),
                scale=factor,
            )
            adam_step(numbers, [master], [grad], [state["exp_avg"]], [state["exp_avg_sq"]], [room], crew=crew)


def _step_any(optimizer: Any, bucket: Bucket, grads: Sequence[Tensor], factor: float, clip_value: float | None) -> None:
    for master, grad in zip(bucket.masters, grads, strict=True):
        master.grad = grad.to(master.device, master.dtype)
    if supports_grad_scale(optimizer) and clip_value is None:
        if factor != 1.0:
            device = bucket.masters[0].device
            optimizer.grad_scale = torch.full((), 1.0 / factor, device=device)
            optimizer.found_inf = torch.zeros((), device=device)
    else:
        scaled = [master.grad for master in bucket.masters if master.grad is not None]
        if factor != 1.0:
            foreach_mul_(scaled, factor)
        if clip_value is not None:
            clip_by_value(scaled, clip_value)
    bare_step(optimizer)()
    optimizer.grad_scale = optimizer.found_inf = None
    for master in bucket.masters:
        master.grad = None
