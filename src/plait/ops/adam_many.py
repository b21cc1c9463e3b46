"""AdamW over many tensors at once, which also rounds the new weights: one launch on CUDA, a loop elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log

import torch
from torch import Tensor

from plait.fake_tensors import on_fake_tensors
from plait.ops.adam import AdamNumbers, adam_step, adam_step_plain
from plait.ops.adam_kernel import Entry, Tables, adam_many_triton
from plait.ops.triton import has_kernels
from plait.torch_internals import foreach_add_, foreach_sub_, fused_adamw_


@torch.no_grad()
def adam_many(
    numbers: AdamNumbers,
    entries: Sequence[Entry],
    steps: Sequence[Tensor],
    *,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    tables: Tables,
) -> None:
    """Update weights and moments in place and write the rounded weights.

    `steps` count the updates of each entry, on its device, and are counted on here; the `step` of `numbers` is not
    looked at. Gradients are divided by `scale`; where `found_inf` is not 0, nothing changes. Both are read where they
    are. `tables` keeps what the launches need, for one list of entries.
    """
    if not entries:
        return
    if not has_kernels(entries[0].weight):
        adam_many_plain(numbers, entries, steps, scale=scale, found_inf=found_inf)
        return
    _update(numbers, entries, steps, scale, found_inf, tables)


@torch.no_grad()
def adam_many_plain(
    numbers: AdamNumbers,
    entries: Sequence[Entry],
    steps: Sequence[Tensor],
    *,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """The plain twin: one tensor after another, in any precision, on any device; the host waits."""
    if found_inf is not None and float(found_inf) != 0.0:
        return
    factor = 1.0 if scale is None else 1.0 / float(scale)
    for entry, step in zip(entries, steps, strict=True):
        step += 1
        now = replace(numbers, step=int(step), scale=factor)
        weight, grad, mean, square, room = entry
        on_host = all(t.device.type == "cpu" and t.is_contiguous() for t in (weight, grad, mean, square))
        update = adam_step if on_host and weight.dtype == torch.float32 else adam_step_plain
        update(now, [weight], [grad], [mean], [square], [room])


def _rates(numbers: AdamNumbers, steps: Tensor) -> Tensor:
    """Of each entry: the learning rate over the first correction, and the root of the second."""
    # In float64: in float32, 1 - 0.999 has four digits left.
    counts = steps.double()
    first = -torch.expm1(counts * log(numbers.betas[0])) if numbers.betas[0] > 0.0 else torch.ones_like(counts)
    second = -torch.expm1(counts * log(numbers.betas[1])) if numbers.betas[1] > 0.0 else torch.ones_like(counts)
    return torch.stack((numbers.lr / first, second.sqrt())).float()


def _update_fake(
    numbers: AdamNumbers,
    entries: Sequence[Entry],
    steps: Sequence[Tensor],
    scale: Tensor | None,
    found_inf: Tensor | None,
    tables: Tables,
) -> None:
    """torch's own update, which moves as many bytes but for the rounded weights."""
    fused_adamw_(
        [entry.weight for entry in entries],
        [entry.grad for entry in entries],
        [entry.mean for entry in entries],
        [entry.square for entry in entries],
        [],
        list(steps),
        lr=0.0,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


@on_fake_tensors(_update_fake, argument=1)
def _update(
    numbers: AdamNumbers,
    entries: Sequence[Entry],
    steps: Sequence[Tensor],
    scale: Tensor | None,
    found_inf: Tensor | None,
    tables: Tables,
) -> None:
    foreach_add_(list(steps), 1.0)
    if found_inf is not None:
        # A list: given one tensor, torch would wait for the device to tell its value.
        foreach_sub_(list(steps), [found_inf] * len(steps))
    rates = _rates(numbers, torch.stack(list(steps)))
    for launch in tables.of(entries):
        adam_many_triton(
            1.0 - numbers.lr * numbers.weight_decay if numbers.decoupled else 1.0,
            0.0 if numbers.decoupled else numbers.weight_decay,
            numbers.betas,
            numbers.eps,
            rates if launch.chosen is None else rates.index_select(1, launch.chosen),
            scale,
            found_inf,
            launch,
        )
