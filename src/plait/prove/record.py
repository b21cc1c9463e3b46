"""A process of a proof: `python -m plait.prove.record JOB`, started once for each rank.

Each step is written as a checkpoint, by all ranks together, whatever the layout; so states are compared under names
and shapes that no layout changes, and no process ever holds a whole model that it does not train.
"""

from __future__ import annotations

import gc
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.checkpoint import CheckpointFolder, CheckpointWriter
from plait.errors import DataError, PlaitError
from plait.launch import tell
from plait.prove.compare import State, compare
from plait.prove.dropout import Switch, check_dropout, random_state
from plait.prove.job import NUDGED, TRACE, Job, Trace
from plait.runner import Runner
from plait.strategy import Engine


def run(job: Job) -> None:
    """Do as `job` says; rank 0 leaves a `Trace` in its folder."""
    folder = Path(job.folder)
    against = None if job.against is None else Path(job.against)
    _record(job, folder, against, nudge=0.0)
    if job.nudge:
        gc.collect()  # of the first model, before there is a second
        _record(job, folder / NUDGED, folder, nudge=job.nudge)


def _record(job: Job, folder: Path, against: Path | None, *, nudge: float) -> None:
    with Runner.from_config({**job.config, "work_dir": str(folder)}) as runner:
        runner.setup()
        engine, world = runner.engine, runner.world
        trace = Trace(device=_device(world.device), versions=f"torch {torch.__version__}")
        switch = Switch(engine.model)
        trace.drops = list(dict.fromkeys(name for names in world.gather(switch.modules) for name in names))
        trace.uncompared = running_statistics(engine.model)
        if nudge:
            nudge_weights(engine, nudge)
        steps = _Steps(engine, folder, against, trace)
        steps.save(0)
        micro_batches: Any = None
        for step, micro_batches in zip(range(1, job.steps + 1), _batches(runner), strict=False):
            before = random_state(world.device)
            result = engine.train_step(micro_batches)
            # Tensor parallelism takes a number for each layer that may drop, dropped or not.
            drew = random_state(world.device) != before and world.layout.tp == 1
            trace.random = world.any(drew) or trace.random
            trace.loss.append(result.loss)
            trace.grad_norm.append(result.grad_norm)
            trace.targets.append(result.targets)
            trace.skipped.append(result.skipped)
            steps.save(step)
        steps.close()
        if against is not None and not nudge and trace.drops and not runner.config.strategy.compile.enabled:
            switch.on()
            trace.checks = check_dropout(engine, micro_batches)
        if world.is_main:
            trace.write(folder / TRACE)


class _Steps:
    """The states of a run on their way to the disk; compared and removed at once where there is a reference."""

    def __init__(self, engine: Engine, folder: Path, against: Path | None, trace: Trace) -> None:
        self._engine = engine
        self._trace = trace
        self._folder = CheckpointFolder(folder / "steps")
        self._against = None if against is None else CheckpointFolder(against / "steps")
        self._names = [] if against is None else Trace.read(against / TRACE).names
        self._folder.root.mkdir(parents=True, exist_ok=True)
        self._writer = CheckpointWriter(self._folder.root, engine.world)

    def save(self, step: int) -> None:
        """Write the state after a step; rank 0 compares it."""
        tensors = self._engine.state_tensors()
        tensors = {name: tensor for name, tensor in tensors.items() if name not in self._trace.uncompared}
        target = self._folder.path_of(step)
        self._writer.save(target, tensors, {}, step=step)
        self._trace.names = list(tensors)
        if self._against is not None and self._engine.world.is_main:
            expected = State(self._against.path_of(0), self._against.path_of(step))
            found = State(self._folder.path_of(0), target)
            # At the start there is no optimizer state yet.
            names = [name for name in self._names if step or not name.startswith("optim.")]
            self._trace.deviations.append(compare(expected, found, names, step=step))
            expected.close()
            found.close()
            if step:
                shutil.rmtree(target)

    def close(self) -> None:
        """Let go of the writer."""
        self._writer.close()


def _batches(runner: Runner) -> Iterator[Any]:
    """This rank's micro-batches, step after step, through as many epochs as it takes."""
    epoch = 0
    while True:
        empty = True
        for micro_batches in runner.loader.epoch(epoch, 0):
            empty = False
            yield micro_batches
        if empty:
            raise DataError("the data ended before the first batch: there is nothing to prove on")
        epoch += 1


def nudge_weights(engine: Engine, size: float) -> None:
    """Move every weight by up to `size` of itself; see [Note: where a tolerance comes from]."""
    for name, weight in engine.weights().items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        factors = torch.rand(weight.shape, generator=generator).mul_(2 * size).sub_(size)
        with torch.no_grad():
            weight.add_(weight * factors.to(weight.device, weight.dtype))
    engine.weights_changed()


def running_statistics(model: nn.Module) -> list[str]:
    """Running means and variances, by name: ranks gather them over their own samples, one process over all in turn."""
    owners = [(name, part) for name, part in model.named_modules() if hasattr(part, "running_mean")]
    return [
        f"model.{name}.{key}" if name else f"model.{key}"
        for name, part in owners
        for key, _ in part.named_buffers(recurse=False)
    ]


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def main() -> None:
    """Run the job in the file that the command line names."""
    try:
        run(Job.read(Path(sys.argv[1])))
    except PlaitError as error:
        tell(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
