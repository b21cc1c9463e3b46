"""From summed gradients to new weights: unscale, guard, clip, step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.config import TrainConfig
from plait.distributed import World, is_sharded
from plait.engine.base import Skips, StepNumbers, StepResult
from plait.engine.loss import StepLoss
from plait.engine.master_weights import MasterWeights
from plait.errors import ConfigError, ModelError, Problem
from plait.optim import (
    OnePassAdam,
    OptimizerRates,
    OptimizerRecord,
    Schedule,
    bare_step,
    clip_by_value,
    grad_norm,
    has_two_modes,
    part_norms,
    supports_grad_scale,
    whole_norm,
)
from plait.precision import LossScaler
from plait.torch_internals import foreach_mul_

if TYPE_CHECKING:
    from plait.distributed import Stage

# [Note: one step behind] A device works through a queue, and a host that waits for a number leaves that queue empty.
# So a step's numbers are copied to the host behind the step's work, and read when the next step is queued: the device
# always has work, and the host is at most one step ahead, which bounds the memory of pending steps. The result of a
# step does not depend on the delay: whether it is skipped is decided on the device. Only reports come one step later:
# that a step was skipped, the end of a run that skipped too many, and a request to stop. fp16 with a loss scale waits
# in the step, since the next step's scale depends on this one.


class AsyncHostCopy:
    """A few numbers that are copied from a device to the host asynchronously."""

    def __init__(self, numbers: Sequence[Tensor | float], device: torch.device) -> None:
        on_device = [
            # Filled in on the device: a copy from the host would wait for it.
            number.to(torch.float64)
            if isinstance(number, Tensor)
            else torch.full((), number, dtype=torch.float64, device=device)
            for number in numbers
        ]
        self._host = torch.stack(on_device).to("cpu", non_blocking=True)  # torch puts such a copy into pinned memory
        self._come = torch.cuda.Event(blocking=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._come is not None:
            self._come.record()

    def read(self) -> list[float]:
        """Return the numbers; waits for the copy without keeping a core busy."""
        if self._come is not None:
            self._come.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


class Updater:
    """Applies one step's gradients. Every decision depends on numbers that are equal on all ranks."""

    def __init__(
        self,
        master_weights: MasterWeights,
        optimizer: Optimizer,
        schedule: Schedule | OptimizerRates,
        *,
        scaler: LossScaler | None,
        config: TrainConfig,
        device: torch.device,
        planned: bool = False,
    ) -> None:
        """`planned`: tensors are fake, and values cannot be read."""
        self.optimizer = optimizer
        self.schedule = schedule
        self.scaler = scaler
        self.skips = Skips(config.guard)
        self._master_weights = master_weights
        self.clip_norm = config.clip_norm
        self.clip_value = config.clip_value
        self._device = device
        self._fused = supports_grad_scale(optimizer)
        self.stays_on_device = device.type == "cuda"
        """Whether the device decides if a step is skipped, given a fused optimizer, so that the host need not wait."""
        self._skips = config.guard.enabled or scaler is not None
        self._bare_step = bare_step(optimizer)
        self._publishes = isinstance(optimizer, OnePassAdam) and optimizer.publishes
        self.numbers = OptimizerRecord(optimizer)
        """The optimizer's state besides tensors."""
        if isinstance(schedule, Schedule) and schedule.schedules_momentum:
            self.numbers.scheduled = frozenset({"betas", "momentum"})
        self._planned = planned
        self._two_modes = has_two_modes(optimizer)
        self._evaluating = False
        self.train()
        self._weights: Tensor | None = None
        self._measured: Tensor | float | None = None
        """The norm of this step's gradients, with the loss scale, if it was measured already; on the device if that
        decides."""
        self.updated: bool | Tensor = True
        """Whether the latest step changed the weights; on the device if that decided it."""
        self.norms: Tensor | None = None
        """The norm of each of its gradients, if the device decided."""

    @property
    def _folds_scale(self) -> bool:
        """Whether the optimizer scales gradients as it reads them. Clipping by value comes between the two."""
        return self._fused and self.clip_value is None

    @property
    def _device_decides(self) -> bool:
        return self.stays_on_device and self._folds_scale

    def train(self) -> None:
        """Switch an optimizer with two modes to the weights that it trains."""
        if self._two_modes:
            self._evaluating = False
            self._switch("train")

    def _switch(self, mode: str) -> None:
        with torch.no_grad(), self._master_weights.gathered():
            getattr(self.optimizer, mode)()
        self._master_weights.publish()

    @contextmanager
    def evaluation_weights(self) -> Iterator[bool]:
        """Within the block, the model has the weights to evaluate and save, if the optimizer has two modes.

        Yields whether that changed anything. Every rank must enter it.
        """
        changes = self._two_modes and not self._evaluating
        if not changes:
            yield False
            return
        self._evaluating = True
        self._switch("eval")
        try:
            yield True
        finally:
            if self._evaluating:  # else a checkpoint was loaded meanwhile
                self.train()

    def measure_norm(self) -> Tensor:
        """Return the norm of the step's gradients, without the loss scale; they must be complete.

        The norm is a tensor on the device; nothing waits for it if the device decides whether the step is skipped.
        """
        grads = self._master_weights.gather_gradients()
        scale = 1.0 if self.scaler is None else 1.0 / self.scaler.scale
        if self._device_decides:
            self._measured = self._norm_on_device(grads)
            return (self._measured * scale).float()
        self._measured = self._norm(grads)
        return torch.full((), self._measured * scale, dtype=torch.float32, device=self._device)

    def discard_norm(self) -> None:
        """Discard the measured norm: the gradients have changed."""
        self._measured = None

    def apply(self, sums: StepLoss, step: int) -> StepResult:
        """Update the weights with the gradients of a step whose summed loss is `sums`."""
        grads = self._master_weights.gather_gradients()
        lr = self.schedule.apply(self.optimizer, step)
        scale = 1.0 if self.scaler is None else 1.0 / self.scaler.scale
        if self._device_decides:
            result = self._apply_on_device(grads, sums, scale, lr)
        else:
            result = self._apply_on_host(grads, sums, scale, lr)
        self._measured = None
        if self.scaler is not None:
            self.scaler.update(overflow=result.skipped)
        return result

    def _apply_on_host(self, grads: list[Tensor], sums: StepLoss, scale: float, lr: float) -> StepResult:
        """Read the norm on the host, decide, and update."""
        loss, targets, stop = sums.read()
        factor = scale if sums.divisor is None else scale * sums.divisor / (targets or 1.0)
        norm = (self._norm(grads) if self._measured is None else float(self._measured)) * factor
        skipped = self._skips and not (math.isfinite(norm) and (sums.local_mean is not None or math.isfinite(loss)))
        if not skipped:
            self._apply(grads, norm, factor)
        self.updated, self.norms = not skipped, None
        return StepResult(loss, norm, skipped, lr, targets, stop)

    def _norm(self, grads: list[Tensor]) -> float:
        return grad_norm(grads, self._master_weights.norm_group, self._master_weights.norm_weights)

    def _clipped(self, norm: float, factor: float) -> float:
        """Return the factor of all gradients, clipping included."""
        if self.clip_norm is not None and norm > self.clip_norm:
            return factor * (self.clip_norm / (norm + 1e-6))
        return factor

    def _apply(self, grads: list[Tensor], norm: float, factor: float) -> None:
        factor = self._clipped(norm, factor)
        if self._folds_scale:
            self._step(None if factor == 1.0 else torch.full((), 1.0 / factor, device=self._device), None)
            return
        if factor != 1.0:
            foreach_mul_(grads, factor)
        if self.clip_value is not None:
            clip_by_value(grads, self.clip_value)
        self._update()

    def _apply_on_device(self, grads: list[Tensor], sums: StepLoss, factor: Tensor | float, lr: float) -> StepResult:
        """Update without waiting for the device: the fused kernel itself skips an update. [Note: one step behind]"""
        skips, measured = self._skips, self._measured
        factor = factor * sums.correction()
        norm = (measured if isinstance(measured, Tensor) else self._norm_on_device(grads)) * factor
        finite = norm.isfinite() & sums.total.isfinite()
        if self.clip_norm is not None:
            factor = factor * (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        scale = None
        if isinstance(factor, Tensor):
            scale = (1.0 / factor).float()
        elif factor != 1.0:
            scale = torch.full((), 1.0 / factor, device=self._device)
        self._step(scale, (~finite).float() if skips else None)
        self.updated = finite if skips else True
        arriving = AsyncHostCopy((sums.mean(), norm, finite, sums.count, sums.flag), self._device)

        def read() -> StepNumbers:
            loss, norm, finite, targets, stop = arriving.read()
            return loss, norm, skips and not finite, targets, bool(stop)

        if self.scaler is None:
            return StepResult.deferred(lr, read)
        loss, grad_norm_read, skipped, targets, stop = read()  # the scale of the next step depends on it
        return StepResult(loss, grad_norm_read, skipped, lr, targets, stop)

    def _norm_on_device(self, grads: list[Tensor]) -> Tensor:
        self.norms = part_norms(grads, self._device)
        return whole_norm(self.norms, self._master_weights.norm_group, self._norm_weights())

    def _norm_weights(self) -> Tensor | None:
        """Return the weights of the norms, as a tensor on the device."""
        if self._weights is None and self._master_weights.norm_weights is not None:
            self._weights = torch.tensor(self._master_weights.norm_weights, dtype=torch.float64, device=self._device)
        return self._weights

    def _step(self, scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Step a fused optimizer, which divides gradients by `scale` as it reads them, without a pass of its own."""
        optimizer: Any = self.optimizer
        if scale is not None and found_inf is None:
            found_inf = torch.zeros((), device=self._device)
        optimizer.grad_scale, optimizer.found_inf = scale, found_inf
        self._update()
        optimizer.grad_scale = optimizer.found_inf = None

    def _update(self) -> None:
        with torch.no_grad(), self._master_weights.gathered(gradients=True):
            try:
                self._bare_step()
            except (ArithmeticError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
                if not self._planned:
                    raise
                optimizer_name = type(self.optimizer).__name__
                reason = f"{optimizer_name} cannot be planned: its step needs values ({type(error).__name__}: {error})"
                remedy = "Train without a plan: `plan: off`."
                raise ConfigError(Problem("optim.type", reason.replace("\n", " "), remedy)) from error
        if not self._publishes:
            self._master_weights.publish()


# The gradient norm in any layout: each rank adds the squares of its shards, divided by the number of ranks that hold
# the same shard. A weight that two pipeline stages share counts in the first of them. So one all-reduce over all ranks
# is always right.


def set_norm_weights(master_weights: MasterWeights, world: World, stages: Sequence[Stage]) -> None:
    """Set over which ranks squared norms are summed, and with which weight each of this rank's gradients counts."""
    layout = world.layout
    if layout.tp == layout.ep == layout.pp == 1:  # every shard is on one rank only, or every parameter on all ranks
        spread = any(is_sharded(param) for param in master_weights.params)
        master_weights.norm_group = world.group("dp_shard", "cp") if spread else None
        return
    master_weights.norm_group = world.everyone
    local_stages = {stage.index for stage in stages}
    elsewhere = {name for stage in stages for name, holders in stage.tied.items() if holders[0] not in local_stages}
    master_weights.norm_weights = [
        0.0 if name in elsewhere else _shard_count(param) * layout.pp / layout.size
        for name, param in zip(master_weights.names, master_weights.params, strict=True)
    ]


_UNLIKE = 0.05
"""Share of its norm by which a gradient may differ between ranks that compute the same: sums are not ordered."""


def refuse_different_gradients(master_weights: MasterWeights, world: World) -> bool:
    """Refuse parameters that are replicated along `tp` and have different gradients on the ranks.

    The tensor plan has missed such a parameter: ranks would update it differently. Returns whether the comparison was
    conclusive; gradients that are not finite cannot be compared. Every rank must call it.
    """
    group = world.group("tp")
    assert group is not None
    pairs = zip(master_weights.names, master_weights.params, master_weights.gather_gradients(), strict=True)
    whole = [(name, grad.detach().float()) for name, param, grad in pairs if not _is_sharded_along(param, "tp")]
    if not whole or world.fake:
        return True
    # Sums of every fourth element: of gradients that differ, hardly all of them agree.
    sums = torch.stack([torch.stack([grad.flatten()[at::4].sum() for at in range(4)]) for _, grad in whole])
    norms = torch.stack([grad.norm() for _, grad in whole])
    gathered = [torch.empty_like(sums) for _ in range(world.layout.tp)]
    dist.all_gather(gathered, sums, group=group)
    every = torch.stack(gathered)
    dist.all_reduce(norms, op=dist.ReduceOp.MAX, group=group)
    if not bool(every.isfinite().all() & norms.isfinite().all()):
        return False
    differs = (every.amax(0) - every.amin(0)).amax(1) > _UNLIKE * norms
    unlike = [name for (name, _), unequal in zip(whole, differs.tolist(), strict=True) if unequal]
    if unlike:
        raise ModelError(
            f"the gradient of {unlike[0]!r} ({len(unlike)} such parameters) differs between the ranks of "
            "strategy.layout.tp: each has computed a partial sum, and the tensor plan has no style for its module; "
            "write one in strategy.tensor.plan, such as `inner` if every rank uses the full parameter, or set "
            "strategy.layout.tp: 1"
        )
    return True


def _is_sharded_along(param: nn.Parameter, axis: str) -> bool:
    return is_sharded(param) and any(axis in name.split("_") for name in param.device_mesh.mesh_dim_names or ())


def _shard_count(param: nn.Parameter) -> int:
    """Return into how many shards a parameter is split."""
    if not is_sharded(param):
        return 1
    cut = zip(param.device_mesh.shape, param.placements, strict=True)
    return prod(size for size, placement in cut if not placement.is_replicate())
