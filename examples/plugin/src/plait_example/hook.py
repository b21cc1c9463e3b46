"""A hook of one's own: logs the largest weight of the model."""

from __future__ import annotations

import torch
import torch.distributed as dist

from plait import Hook, Runner, StepResult


class LargestWeight(Hook):
    """Measures, every `every` steps, the largest weight over all ranks; it is logged with the loss."""

    def __init__(self, every: int = 1) -> None:
        self.every = every

    def after_step(self, runner: Runner, result: StepResult) -> None:
        """Measure this rank's part of the weights, and take the largest of all ranks."""
        if runner.step % self.every:
            return
        largest = torch.stack([part.abs().max() for part in runner.engine.weights().values() if part.numel()]).max()
        if runner.world.size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=runner.world.everyone)
        runner.figures["largest_weight"] = float(largest)
