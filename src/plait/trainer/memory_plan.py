"""The memory plan of a run: made before its ranks join, logged at the start, compared with measurements at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from plait.config import resolve_layout
from plait.distributed import Ranks, detect_ranks
from plait.engine import planned_as, stage_of
from plait.errors import ConfigError
from plait.monitor import EventKind
from plait.trainer.sources import batch_of, first_inputs
from plait.trainer.throughput import memory_mib

if TYPE_CHECKING:
    from plait.plan import RunPlan
    from plait.trainer.runner import Runner

SPLIT = "micro-batches are smaller than written, since those did not fit into memory"
"""Why this run has no plan."""


class MemoryPlan:
    """The predicted memory and step time of this run, and their comparison with what was measured."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._plan: RunPlan | str | None = None

    def is_planned_here(self) -> bool:
        """Whether this process plans the run: rank 0 does, before it joins the process group."""
        return self.runner.config.plan.gate != "off" and detect_ranks().rank == 0 and not dist.is_initialized()

    def make(self) -> None:
        """Plan the run on rank 0, before it joins: a process cannot have both a fake and a real process group."""
        if not self.is_planned_here():
            return
        ranks = detect_ranks()
        self._plan = SPLIT if ranks.split > 1 else self.simulate(ranks)

    def simulate(self, ranks: Ranks) -> RunPlan | str | None:
        """Return the plan for these ranks, or why there is none; None if building the run will report the reason."""
        given = self.runner.given
        options = {"model": given.model, "loss_function": given.loss_fn}
        if given.data is not None:
            micro = self.micro_batch(ranks)
            example = None if micro is None else first_inputs(given.data, micro, given.collate_fn)
            if example is None:
                return "reading a sample would use up the data, which can be read only once"
            options["example"] = example
        try:
            config = planned_as(self.runner.config)
        except ConfigError:  # setup() raises it again
            return None
        if isinstance(config, str):
            return config
        from plait.plan import plan_run  # it loads the simulator, which only rank 0 needs, and only with a plan

        return plan_run(config, ranks=ranks.size, local_ranks=ranks.local_size, **options)

    def micro_batch(self, ranks: Ranks) -> int | None:
        """Return the size of a micro-batch on these ranks; None if the sections contradict each other."""
        config = self.runner.config
        try:
            layout = resolve_layout(config.strategy, size=ranks.size, local_size=ranks.local_size)
            return batch_of(config, layout.data_parallel, self.runner.given.data).micro
        except ConfigError:  # setup() raises it again
            return None

    def share(self) -> None:
        """Broadcast the plan to all ranks, and raise if the run cannot fit."""
        runner = self.runner
        if runner.config.plan.gate == "off":
            return
        plan = self._plan = runner.world.broadcast(self._plan)
        # The plan of another engine is that of the native engine at the same ZeRO stage. It is only an estimate, so it
        # is logged, but raises nothing.
        refuses = runner.config.plan.gate == "refuse" and runner.config.strategy.engine == "native"
        if plan is not None and not isinstance(plan, str) and plan.refusal is not None and refuses:
            raise plan.refusal

    def log(self) -> None:
        """Log the predicted memory and step time."""
        plan = self._plan
        if self.runner.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.runner.world.device)  # the peak that is compared is this run's
        if isinstance(plan, str):
            gate = self.runner.config.plan.gate
            text = f"no plan of this run, so plan.gate={gate} does not check whether it fits into memory: {plan}"
            self.runner.emit(EventKind.MESSAGE, level="warning", text=text)
        elif plan is not None:
            step = "" if plan.seconds is None else f", {plan.seconds:.3g} s per step"
            strategy = self.runner.config.strategy
            like = "" if strategy.engine == "native" else f" (as the native engine at ZeRO stage {stage_of(strategy)})"
            text = (
                f"plan{like}: {plan.needed_gib:.2f} of {plan.memory_gib:.1f} GiB{step} (planned in {plan.took:.1f} s)"
            )
            self.runner.emit(EventKind.MESSAGE, level="info", text=text)
            if plan.refusal is not None:
                self.runner.emit(EventKind.MESSAGE, level="warning", text=str(plan.refusal))

    def compare(self) -> dict[str, Any]:
        """Return the predicted and measured peak memory and step time, and log them; empty without a plan."""
        plan = self._plan
        if plan is None or isinstance(plan, str):
            return {}
        runner = self.runner
        peak, step = memory_mib(runner.world.device) / 1024, runner.step_time
        values = [f"peak {peak:.2f} GiB ({plan.peak_gib:.2f} predicted)"]
        if step is not None and plan.seconds is not None:
            values.append(f"{step:.3g} s per step ({plan.seconds:.3g} predicted)")
        if runner.world.is_main:
            runner.emit(EventKind.MESSAGE, level="info", text=f"measured: {', '.join(values)}")
        return {
            "plan": {
                "peak_gib": {"predicted": plan.peak_gib, "measured": peak},
                "step_s": {"predicted": plan.seconds, "measured": step},
            }
        }
