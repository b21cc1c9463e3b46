"""The run's plan of itself: made before ranks join, told at the start, compared at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from plait.config import resolve_layout
from plait.distributed import Ranks, detect_ranks
from plait.engine import planned_as, stage_of
from plait.errors import ConfigError
from plait.monitor import EventKind
from plait.plan import RunForecast, forecast
from plait.trainer.sources import batch_of, first_inputs
from plait.trainer.throughput import memory_mib

if TYPE_CHECKING:
    from plait.trainer.runner import Runner

SPLIT = "micro-batches are smaller than written, since those did not fit into memory"
"""Why there is no plan."""


class MemoryPlan:
    """What this run expected, and what came of it."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._found: RunForecast | str | None = None

    def looks(self) -> bool:
        """Whether this rank plans the run: one does, before it joins the others."""
        return self.runner.config.plan.gate != "off" and detect_ranks().rank == 0 and not dist.is_initialized()

    def look(self) -> None:
        """Plan the run, on one rank, before it joins the others: a fake world and a real one do not go together."""
        if not self.looks():
            return
        ranks = detect_ranks()
        self._found = SPLIT if ranks.split > 1 else self.expect(ranks)

    def expect(self, ranks: Ranks) -> RunForecast | str | None:
        """What a run on these ranks will take, or why that is not known; None where something else tells why."""
        given = self.runner.given
        options = {"model": given.model, "loss_function": given.loss_fn}
        if given.data is not None:
            micro = self.micro_batch(ranks)
            example = None if micro is None else first_inputs(given.data, micro, given.collate_fn)
            if example is None:
                return "the data give no sample without being used up"
            options["example"] = example
        try:
            config = planned_as(self.runner.config)
        except ConfigError:  # it is told where the run is built
            return None
        if isinstance(config, str):
            return config
        return forecast(config, ranks=ranks.size, local_ranks=ranks.local_size, **options)

    def micro_batch(self, ranks: Ranks) -> int | None:
        """The size of a micro-batch on these ranks; None where the sections do not go together."""
        config = self.runner.config
        try:
            layout = resolve_layout(config.strategy, size=ranks.size, local_size=ranks.local_size)
            return batch_of(config, layout.data_parallel, self.runner.given.data).micro
        except ConfigError:  # it is told where the run is built
            return None

    def agree(self) -> None:
        """Let every rank know, and refuse a run that cannot fit."""
        runner = self.runner
        if runner.config.plan.gate == "off":
            return
        found = self._found = runner.world.broadcast(self._found)
        # Another engine's run is planned as the native one of its stage, which is a guess: told, but not acted on.
        refuses = runner.config.plan.gate == "refuse" and runner.config.strategy.engine == "native"
        if isinstance(found, RunForecast) and found.refusal is not None and refuses:
            raise found.refusal

    def tell(self) -> None:
        """Say what is expected."""
        found = self._found
        if self.runner.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.runner.world.device)  # the peak that is compared is this run's
        if isinstance(found, str):
            level = "warning" if "\n" in found else "info"  # with the traceback of what nobody expected
            self.runner.emit(EventKind.MESSAGE, level=level, text=f"no plan of this run: {found}")
        elif found is not None:
            step = "" if found.seconds is None else f", {found.seconds:.3g} s a step"
            strategy = self.runner.config.strategy
            like = "" if strategy.engine == "native" else f" (as the native engine at ZeRO stage {stage_of(strategy)})"
            text = (
                f"plan{like}: {found.needed_gib:.2f} of {found.memory_gib:.1f} GiB{step} (known in {found.took:.1f} s)"
            )
            self.runner.emit(EventKind.MESSAGE, level="info", text=text)
            if found.refusal is not None:
                self.runner.emit(EventKind.MESSAGE, level="warning", text=str(found.refusal))

    def compare(self) -> dict[str, Any]:
        """Predicted and measured side by side, for the run's end."""
        found = self._found
        if not isinstance(found, RunForecast):
            return {}
        runner = self.runner
        peak, step = memory_mib(runner.world.device) / 1024, runner.step_time
        words = [f"peak {peak:.2f} GiB ({found.peak_gib:.2f} predicted)"]
        if step is not None and found.seconds is not None:
            words.append(f"{step:.3g} s a step ({found.seconds:.3g} predicted)")
        if runner.world.is_main:
            runner.emit(EventKind.MESSAGE, level="info", text=f"measured: {', '.join(words)}")
        return {
            "plan": {
                "peak_gib": {"predicted": found.peak_gib, "measured": peak},
                "step_s": {"predicted": found.seconds, "measured": step},
            }
        }
