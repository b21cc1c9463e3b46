"""AdamW over many tensors, which also stores rounded copies of the new weights.

On CUDA, one kernel launch updates many tensors; elsewhere they are updated one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.fake_tensors import on_fake_tensors
from plait.kernels.adam import AdamNumbers, adam_step, adam_step_plain
from plait.kernels.registry import implementation
from plait.kernels.triton import HAS_TRITON, on_device_of
from plait.torch_internals import foreach_add_, foreach_sub_, fused_adamw_

# The kernel of `adam_many`: one launch updates many tensors, whose addresses it reads from a table.
#
# An *entry* is a parameter with its gradient, its moments and its rounded copy. A program updates one *piece* of an
# entry: it reads the gradient, the weight and both moments, and writes the weight, the moments and the rounded weight.
# Every number is read and written once. Loss scale and `found_inf` are read on the device, so the host does not wait
# for them.


BLOCK = 1024
"""Elements that a program updates at a time."""
PIECE = 8 * BLOCK
"""Elements that a program updates in all, one block after another."""
WARPS = 4

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _address(table, row, count, index, dtype: tl.constexpr, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the address of tensor `row` of entry `index`, as a pointer."""
        address = tl.load(table + row * count + index).to(tl.pointer_type(dtype))
        if aligned:
            address = tl.multiple_of(address, 16)  # for vectorized accesses
        return address

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _kernel(  # type: ignore[no-untyped-def]
        table,
        pieces,
        rates,
        scale,
        found_inf,
        count,
        kept,
        decay,
        gain1,
        beta2,
        gain2,
        eps,
        weight_type: tl.constexpr,
        grad_type: tl.constexpr,
        rounded_type: tl.constexpr,
        has_rounded: tl.constexpr,
        has_scale: tl.constexpr,
        has_skip: tl.constexpr,
        aligned: tl.constexpr,
        blocks: tl.constexpr,
        block: tl.constexpr,
    ):
        """Update one piece per program."""
        piece = tl.program_id(0).to(tl.int64)
        index = tl.load(pieces + 2 * piece).to(tl.int64)
        begin = tl.load(pieces + 2 * piece + 1).to(tl.int64) * (blocks * block)
        weight = _address(table, 0, count, index, weight_type, aligned)
        grad = _address(table, 1, count, index, grad_type, aligned)
        mean = _address(table, 2, count, index, weight_type, aligned)
        square = _address(table, 3, count, index, weight_type, aligned)
        rounded = _address(table, 4, count, index, rounded_type, aligned)
        length = tl.load(table + 5 * count + index)
        if has_skip:
            length = tl.where(tl.load(found_inf) == 0, length, 0)
        if aligned:
            length = tl.multiple_of(length, 16)
        rate = tl.load(rates + index)
        root = tl.load(rates + count + index)
        factor = 1.0
        if has_scale:
            factor = 1.0 / tl.load(scale)
        for number in range(blocks):
            at = begin + number * block + tl.arange(0, block)
            inside = at < length
            w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factor
            m = tl.load(mean + at, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(square + at, mask=inside, other=0.0).to(tl.float32)
            g += w * decay
            m += (g - m) * gain1
            v = v * beta2 + g * g * gain2
            w = w * kept - rate * m / (tl.sqrt(v) / root + eps)
            tl.store(weight + at, w.to(weight_type), mask=inside)
            tl.store(mean + at, m.to(weight_type), mask=inside)
            tl.store(square + at, v.to(weight_type), mask=inside)
            if has_rounded:
                tl.store(rounded + at, w.to(rounded_type), mask=inside)


class LaunchGroup(NamedTuple):
    """The properties that all entries of one launch must share."""

    weight: torch.dtype
    grad: torch.dtype
    rounded: torch.dtype | None
    aligned: bool
    """Whether addresses and lengths of all tensors are aligned for vectorized loads and stores."""


class WeightPointers(NamedTuple):
    """An entry, the tensors of one parameter: all of one shape and memory layout, without gaps."""

    weight: Tensor
    grad: Tensor
    mean: Tensor
    square: Tensor
    rounded: Tensor | None
    """Receives the new weight, rounded to its dtype; None without a rounded copy."""

    @property
    def group(self) -> LaunchGroup:
        """The group of entries with which it can share a launch."""
        tensors = [self.weight, self.grad, self.mean, self.square, *([] if self.rounded is None else [self.rounded])]
        aligned = self.weight.numel() % 16 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        return LaunchGroup(
            self.weight.dtype, self.grad.dtype, None if self.rounded is None else self.rounded.dtype, aligned
        )


class Launch(NamedTuple):
    """The arguments of one launch."""

    group: LaunchGroup
    lengths: list[int]
    chosen: Tensor | None
    """The indices of the entries that it updates; None: all."""
    table: Tensor
    pieces: Tensor


class Tables:
    """The launches that update a list of entries, and their tables of addresses on the device.

    The tables are built again only if the address of a tensor changed. That is checked in every step, in a single loop:
    for a model of many small tensors, this check takes most of the time of an update.
    """

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._launches: list[Launch] = []

    def of(self, entries: Sequence[WeightPointers]) -> list[Launch]:
        """Return one launch for each `LaunchGroup` among the entries."""
        seen: list[Any] = []
        for weight, grad, mean, square, rounded in entries:
            seen += (weight.data_ptr(), grad.data_ptr(), mean.data_ptr(), square.data_ptr(), grad.dtype, weight.numel())
            seen.append(0 if rounded is None else rounded.data_ptr())
        if seen != self._seen:
            groups = [entry.group for entry in entries]
            self._launches = [self._launch(group, groups, entries) for group in dict.fromkeys(groups)]
            self._seen = seen
        return self._launches

    def _launch(self, group: LaunchGroup, groups: list[LaunchGroup], entries: Sequence[WeightPointers]) -> Launch:
        chosen = [index for index, other in enumerate(groups) if other == group]
        members = [entries[index] for index in chosen]
        device = members[0].weight.device
        lengths = [entry.weight.numel() for entry in members]
        rows = [entry.weight.data_ptr() for entry in members]
        rows += [entry.grad.data_ptr() for entry in members]
        rows += [entry.mean.data_ptr() for entry in members]
        rows += [entry.square.data_ptr() for entry in members]
        rows += [0 if entry.rounded is None else entry.rounded.data_ptr() for entry in members]
        known = next((launch.pieces for launch in self._launches if launch.lengths == lengths), None)
        if known is None:
            pairs = [(index, piece) for index, n in enumerate(lengths) for piece in range(-(-n // PIECE))]
            known = _to_device(torch.tensor(pairs, dtype=torch.int32).view(-1, 2), device)
        picked = None if len(chosen) == len(groups) else _to_device(torch.tensor(chosen), device)
        return Launch(group, lengths, picked, _to_device(torch.tensor(rows + lengths), device), known)


def adam_many_triton(
    kept: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    rates: Tensor,
    scale: Tensor | None,
    found_inf: Tensor | None,
    launch: Launch,
) -> None:
    """Update the entries of one launch, by one kernel.

    `kept` is the factor of decoupled weight decay, `decay` the weight decay that is added to gradients. `rates` are
    those of `_rates` for the entries of this launch.
    """
    group, lengths, _, table, pieces = launch
    if len(pieces) == 0:
        return  # a rank may have no shard of any of them
    # Numbers close to 1 are computed here in float64: the kernel gets its arguments in fp32.
    with on_device_of(table):
        _kernel[(len(pieces),)](
            table,
            pieces,
            rates,
            rates if scale is None else scale,
            rates if found_inf is None else found_inf,
            len(lengths),
            kept,
            decay,
            1.0 - betas[0],
            betas[1],
            1.0 - betas[1],
            eps,
            weight_type=_TYPES[group.weight],
            grad_type=_TYPES[group.grad],
            rounded_type=_TYPES[group.rounded or group.weight],
            has_rounded=group.rounded is not None,
            has_scale=scale is not None,
            has_skip=found_inf is not None,
            aligned=group.aligned,
            blocks=PIECE // BLOCK,
            block=BLOCK,
            num_warps=WARPS,
        )


_TYPES: dict[torch.dtype, Any] = (
    {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16} if HAS_TRITON else {}
)


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device, copied asynchronously; on a CPU, the tensor itself."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@torch.no_grad()
def adam_many(
    numbers: AdamNumbers,
    entries: Sequence[WeightPointers],
    steps: Sequence[Tensor],
    *,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    tables: Tables,
) -> None:
    """Update weights and moments in place, and store the rounded weights.

    `steps` has a scalar tensor for each entry, on its device: the number of its updates, which is incremented here, and
    used instead of `numbers.step`. Gradients are divided by `scale`; where `found_inf` is not 0, nothing changes. Both
    are read on the device. `tables` caches the launches; it must be used for one list of entries only.
    """
    if not entries:
        return
    if implementation("adam", entries[0].weight) == "torch":
        adam_many_plain(numbers, entries, steps, scale=scale, found_inf=found_inf)
        return
    _update(numbers, entries, steps, scale, found_inf, tables)


@torch.no_grad()
def adam_many_plain(
    numbers: AdamNumbers,
    entries: Sequence[WeightPointers],
    steps: Sequence[Tensor],
    *,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Do the update of `adam_many` one tensor after another, in any precision, on any device; the host waits for it."""
    if found_inf is not None and float(found_inf) != 0.0:
        return
    factor = 1.0 if scale is None else 1.0 / float(scale)
    for entry, step in zip(entries, steps, strict=True):
        step += 1
        now = replace(numbers, step=int(step), scale=factor)
        weight, grad, mean, square, rounded = entry
        on_host = all(t.device.type == "cpu" and t.is_contiguous() for t in (weight, grad, mean, square))
        update = adam_step if on_host and weight.dtype == torch.float32 else adam_step_plain
        update(now, [weight], [grad], [mean], [square], [rounded])


def _rates(numbers: AdamNumbers, steps: Tensor) -> Tensor:
    """Return (2, entries), fp32: the learning rate divided by the first bias correction, and the root of the second."""
    # In float64: in float32, 1 - 0.999 has only four correct digits.
    counts = steps.double()
    first = -torch.expm1(counts * log(numbers.betas[0])) if numbers.betas[0] > 0.0 else torch.ones_like(counts)
    second = -torch.expm1(counts * log(numbers.betas[1])) if numbers.betas[1] > 0.0 else torch.ones_like(counts)
    return torch.stack((numbers.lr / first, second.sqrt())).float()


def _update_fake(
    numbers: AdamNumbers,
    entries: Sequence[WeightPointers],
    steps: Sequence[Tensor],
    scale: Tensor | None,
    found_inf: Tensor | None,
    tables: Tables,
) -> None:
    """Call torch's fused update on fake tensors; it reads and writes as many bytes, except for the rounded weights."""
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
    entries: Sequence[WeightPointers],
    steps: Sequence[Tensor],
    scale: Tensor | None,
    found_inf: Tensor | None,
    tables: Tables,
) -> None:
    foreach_add_(list(steps), 1.0)
    if found_inf is not None:
        # A list: given one tensor, torch would synchronize to read its value.
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
