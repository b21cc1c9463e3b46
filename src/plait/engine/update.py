"""The update of a step: undo the loss scale, skip if not finite, clip, and step the optimizer."""

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

# [Note: one step behind] The GPU executes kernels that the host has queued; while the host blocks to read a number, it
# queues none, and the GPU becomes idle. So a step's loss and norm are copied to the host asynchronously after the
# step's kernels, and read when the next step has been queued. The host is at most one step ahead, which bounds the
# memory of pending steps. The weights do not depend on this delay: the GPU itself decides whether a step is skipped.
# Only reports come one step later: that a step was skipped, the end of a run that skipped too many, and a request to
# stop. With fp16 and a loss scale the host does wait within the step, since the next step's scale depends on it.


class AsyncHostCopy:
    """A few numbers that are copied from a device to the host asynchronously."""

    def __init__(self, numbers: Sequence[Tensor | float], device: torch.device) -> None:
        on_device = [
            # `full` runs on the device; a copy from (pageable) host memory would make the host wait for the device.
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
        """Return the numbers; block until they are copied, sleeping instead of polling (`blocking=True`)."""
        if self._come is not None:
            self._come.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


class Updater:
    """Updates the weights with a step's gradients: loss scale, skipping, clipping, schedule, optimizer.

    Whether to skip and how to clip depends only on all-reduced numbers, so that all ranks decide alike.
    """

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
        """`planned`: the run is only simulated, with fake tensors, whose values cannot be read."""
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
        """Whether, with a fused optimizer, the device decides if a step is skipped, so that the host need not wait."""
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
        """The norm of this step's gradients, times the loss scale, if `measure_norm` was called: a tensor if the device
        decides whether to skip, else a number."""
        self.updated: bool | Tensor = True
        """Whether the latest step changed the weights: a tensor if the device decided it."""
        self.norms: Tensor | None = None
        """The norm of each gradient of the latest step, if the device decided; None if the host did."""

    @property
    def _folds_scale(self) -> bool:
        """Whether the fused optimizer multiplies gradients by the factor itself.

        Not with clipping by value, which comes after the multiplication and before the update.
        """
        return self._fused and self.clip_value is None

    @property
    def _device_decides(self) -> bool:
        return self.stays_on_device and self._folds_scale

    def train(self) -> None:
        """Switch an optimizer with `train()` and `eval()` to the weights that it trains."""
        if self._two_modes:
            self._evaluating = False
            self._switch("train")

    def _switch(self, mode: str) -> None:
        with torch.no_grad(), self._master_weights.gathered():
            getattr(self.optimizer, mode)()
        self._master_weights.publish()

    @contextmanager
    def evaluation_weights(self) -> Iterator[bool]:
        """Within the block, the model has the weights to evaluate and save with.

        They differ only if the optimizer has `train()` and `eval()`: then it is switched. Yields whether the weights
        were changed. Every rank must enter it.
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
            if self._evaluating:  # false if a checkpoint was loaded in the block: that has called `train`
                self.train()

    def measure_norm(self) -> Tensor:
        """Return the norm of the step's gradients, divided by the loss scale; the gradients must be reduced already.

        The norm is a tensor on the device. If the device decides whether to skip, the host does not wait for it.
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
        """Update the weights with the gradients of step `step`, whose summed loss is `sums`; return its result."""
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
        """Read the norm on the host, and update unless it is not finite."""
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
        """Return the number that all gradients must be multiplied by: `factor` times the clipping by norm."""
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
        """Update without waiting for the device: the fused kernel skips if `found_inf` is 1. [Note: one step behind]"""
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
        """Return `MasterWeights.norm_weights` as a tensor on the device; None if all weights are 1."""
        if self._weights is None and self._master_weights.norm_weights is not None:
            self._weights = torch.tensor(self._master_weights.norm_weights, dtype=torch.float64, device=self._device)
        return self._weights

    def _step(self, scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Step a fused optimizer, whose kernel divides gradients by `scale`, and does nothing if `found_inf` is 1."""
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


# The gradient norm in any layout: each rank adds the squared norms of its shards, each divided by the number of ranks
# that hold the same shard. A weight that two pipeline stages share is counted in the first of them only. The sum over
# all ranks, one all-reduce, is then the squared norm of the full model's gradient.


def set_norm_weights(master_weights: MasterWeights, world: World, stages: Sequence[Stage]) -> None:
    """Set `norm_group`, the ranks over which squared norms are summed, and `norm_weights`, a weight per gradient."""
    layout = world.layout
    sharded = {is_sharded(param) for param in master_weights.params}
    # Every shard is on one rank only, or every parameter on all ranks.
    if layout.tp == layout.ep == layout.pp == 1 and len(sharded) == 1:
        master_weights.norm_group = world.group("dp_shard", "cp") if True in sharded else None
        return
    master_weights.norm_group = world.everyone
    local_stages = {stage.index for stage in stages}
    elsewhere = {name for stage in stages for name, holders in stage.tied.items() if holders[0] not in local_stages}
    master_weights.norm_weights = [
        0.0 if name in elsewhere else _shard_count(param) * layout.pp / layout.size
        for name, param in zip(master_weights.names, master_weights.params, strict=True)
    ]


_UNLIKE = 0.05
"""By which fraction of its norm a gradient may differ between ranks that compute the same one: the order in which
floating-point numbers are summed differs."""


def refuse_different_gradients(master_weights: MasterWeights, world: World) -> bool:
    """Raise `ModelError` if a parameter that is replicated along `tp` has different gradients on these ranks.

    Then the tensor plan has no style for its module, and ranks would update it differently. Return whether the
    comparison was conclusive: gradients that are not finite cannot be compared. Every rank must call it.
    """
    group = world.group("tp")
    assert group is not None
    pairs = zip(master_weights.names, master_weights.params, master_weights.gather_gradients(), strict=True)
    whole = [(name, grad.detach().float()) for name, param, grad in pairs if not _is_sharded_along(param, "tp")]
    if not whole or world.fake:
        return True
    # Four sums, each over every fourth element, are compared instead of all elements: if gradients differ, at least one
    # of the four sums almost certainly does.
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
