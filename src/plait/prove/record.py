"""One rank of one run of `plait prove`: `python -m plait.prove.record JOB`.

`plait prove` trains a model a few steps with one process, the reference, then with the user's strategy, and compares
losses, weights and optimizer states. Both runs are run by this module; that of the strategy also compares the states.

All ranks save the state after each step as a checkpoint. So states are compared by names and global shapes, which do
not depend on the layout, and no process needs memory for a whole model that it does not train.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.checkpoint import CheckpointFolder, CheckpointWriter, as_bytes, digest
from plait.config import Section
from plait.distributed import World, is_sharded, to_local
from plait.engine import Engine
from plait.errors import DataError, PlaitError
from plait.launch import report_failure
from plait.prove.compare import SavedState, compare
from plait.prove.job import PERTURBED, TRACE, ProofJob, ProofTrace
from plait.torch_internals import intercept_operations
from plait.trainer import Runner

# Dropout: off while runs are compared, on again to check the random numbers of the ranks.
#
# [Note: what can be said about dropout]
# One process drops other elements than several ranks do: the random numbers are drawn in another order. So runs are
# compared without dropout, and two properties of dropout are checked instead. Ranks with different samples must draw
# different numbers; with a shared seed they would drop the same elements in every part of the batch. Ranks along `tp`,
# which share the same samples, must drop the same elements of tensors that they all hold; otherwise their copies of a
# parameter that is not sharded would diverge.


class DropoutSwitch:
    """All dropout rates of a model: set to 0 by the constructor, restored by `on`."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[str] = []
        self._rates: list[tuple[nn.Module, str, Any]] = []
        for name, module in model.named_modules():
            for key, value in list(vars(module).items()):
                quiet = _without(value) if key == "config" else (0.0 if _is_rate(module, key, value) else None)
                if quiet is not None:
                    self._rates.append((module, key, value))
                    setattr(module, key, quiet)
                    self.modules += [name] if name not in self.modules else []

    def on(self) -> None:
        """Restore the rates."""
        for module, key, value in self._rates:
            setattr(module, key, value)


def _is_rate(module: nn.Module, key: str, value: Any) -> bool:
    named = "drop" in key or "jitter" in key or (key == "p" and "Dropout" in type(module).__name__)
    return named and isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _without(config: Any) -> Any:
    """Return a copy of a model's config with dropout rates of 0; None if no rate is above 0."""
    settings = config.__dict__ if hasattr(config, "__dict__") else {}
    rates = [key for key, value in settings.items() if "drop" in key and isinstance(value, float) and value > 0]
    if not rates:
        return None
    if isinstance(config, Section):
        return config.model_copy(update=dict.fromkeys(rates, 0.0))
    changed = copy.copy(config)
    for key in rates:
        setattr(changed, key, 0.0)
    return changed


def random_state(device: torch.device) -> str:
    """Return a hash of the states of torch's default generators, of the CPU and of `device`."""
    state = torch.get_rng_state().numpy().tobytes()
    if device.type == "cuda":
        state += torch.cuda.get_rng_state(device).numpy().tobytes()
    return hashlib.blake2b(state, digest_size=12).hexdigest()


class RandomCall(NamedTuple):
    """One operation that used random numbers."""

    module: str
    operation: str
    numbers: str
    """The hash of the generator's state: equal states give equal numbers."""


@contextmanager
def record_random_calls(model: nn.Module, device: torch.device) -> Iterator[list[RandomCall]]:
    """Record every operation that draws random numbers until the block ends, whichever code calls it.

    Hooks on dropout modules would miss `F.dropout`, and dropout inside attention.
    """
    calls: list[RandomCall] = []
    running: list[str] = []

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = random_state(device)
        result = func(*args, **kwargs)
        # Attention kernels count as random even where they drop nothing.
        if random_state(device) != before:
            calls.append(RandomCall(running[-1] if running else "", str(func), before))
        return result

    def pop(*_: Any) -> None:  # a hook that returns something would replace the output
        running.pop()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)).remove)
            hooks.callback(module.register_forward_hook(pop, always_call=True).remove)
        with intercept_operations(run):
            yield calls


def check_dropout(engine: Engine, micro_batches: Any) -> list[tuple[str, bool, str]]:
    """Run one step with dropout, and return the checks as (name, whether it passed, details). A collective.

    The checks are those of [Note: what can be said about dropout].
    """
    world = engine.world
    with record_random_calls(engine.model, world.device) as calls:
        engine.train_step(micro_batches)
    everyone = world.gather((_coordinates(world), calls))
    checks = [] if world.layout.replicas == 1 else [_check_ranks_differ(everyone)]
    if world.layout.tp > 1:
        checks.append(_check_tp_agrees(world.gather((_coordinates(world), _copies(engine)))))
    return checks


def _coordinates(world: World) -> dict[str, int]:
    return {axis: world.coordinate(axis) for axis in world.layout.sizes()}


def _check_ranks_differ(everyone: list[tuple[dict[str, int], list[RandomCall]]]) -> tuple[str, bool, str]:
    name = "ranks with different samples draw different numbers"
    compared = 0
    for (a, (first, ours)), (b, (second, theirs)) in combinations(enumerate(everyone), 2):
        if first["pp"] != second["pp"] or first["tp"] or second["tp"]:
            continue
        for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            compared += 1
            if one == other:
                where = one.module or "the model"
                text = f"ranks {a} and {b} drew the same numbers in {where} (draw {index + 1}, {one.operation})"
                return name, False, text
    return name, compared > 0, f"{compared} pairs of draws, all different" if compared else "no rank drew anything"


def _check_tp_agrees(everyone: list[tuple[dict[str, int], dict[str, str]]]) -> tuple[str, bool, str]:
    name = "ranks along tp drop alike"
    compared = 0
    for (a, (first, ours)), (b, (second, theirs)) in combinations(enumerate(everyone), 2):
        if {**first, "tp": 0} != {**second, "tp": 0}:
            continue
        for key, value in ours.items():
            compared += 1
            if theirs.get(key) != value:
                return name, False, f"after a step with dropout ranks {a} and {b} have different copies of {key}"
    return name, compared > 0, f"after a step with dropout {compared} pairs of copies are equal, bit for bit"


def _copies(engine: Engine) -> Mapping[str, str]:
    """Return a digest of each tensor that is replicated along `tp`."""
    digests = {}
    for name, tensor in engine.state_tensors().items():
        if not _cut_along_tp(tensor):
            digests[name] = digest(as_bytes(to_local(tensor).detach().cpu().contiguous()))
    return digests


def _cut_along_tp(tensor: Tensor) -> bool:
    if not is_sharded(tensor):
        return False
    axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=False)
    return any(axis == "tp" and not placement.is_replicate() for axis, placement in axes)


def run(job: ProofJob) -> None:
    """Train as the job says; rank 0 writes the measurements, a `ProofTrace`, to the job's folder."""
    folder = Path(job.folder)
    against = None if job.against is None else Path(job.against)
    _record(job, folder, against, perturbation=0.0)
    if job.perturbation:
        gc.collect()  # free the first model before making the second
        _record(job, folder / PERTURBED, folder, perturbation=job.perturbation)


def _record(job: ProofJob, folder: Path, against: Path | None, *, perturbation: float) -> None:
    with Runner.from_config({**job.config, "work_dir": str(folder)}) as runner:
        runner.setup()
        engine, world = runner.engine, runner.world
        trace = ProofTrace(device=_device(world.device), versions=f"torch {torch.__version__}")
        switch = DropoutSwitch(engine.model)
        trace.drops = list(dict.fromkeys(name for names in world.gather(switch.modules) for name in names))
        trace.uncompared = running_statistics(engine.model)
        if perturbation:
            perturb_weights(engine, perturbation)
        steps = _StateSaver(engine, folder, against, trace)
        steps.save(0)
        micro_batches: Any = None
        for step, micro_batches in zip(range(1, job.steps + 1), _batches(runner), strict=False):
            before = random_state(world.device)
            result = engine.train_step(micro_batches)
            # Tensor parallelism draws a seed for each layer with dropout, at rate 0 too.
            drew = random_state(world.device) != before and world.layout.tp == 1
            trace.random = world.any(drew) or trace.random
            trace.loss.append(result.loss)
            trace.grad_norm.append(result.grad_norm)
            trace.targets.append(result.targets)
            trace.skipped.append(result.skipped)
            steps.save(step)
        steps.close()
        if against is not None and not perturbation and trace.drops and not runner.config.strategy.compile.enabled:
            switch.on()
            trace.checks = check_dropout(engine, micro_batches)
        if world.is_main:
            trace.write(folder / TRACE)


class _StateSaver:
    """Saves the state after each step; a run that has a reference compares it, and then deletes it."""

    def __init__(self, engine: Engine, folder: Path, against: Path | None, trace: ProofTrace) -> None:
        self._engine = engine
        self._trace = trace
        self._folder = CheckpointFolder(folder / "steps")
        self._against = None if against is None else CheckpointFolder(against / "steps")
        self._names = [] if against is None else ProofTrace.read(against / TRACE).names
        self._folder.root.mkdir(parents=True, exist_ok=True)
        self._checkpoints = CheckpointWriter(self._folder.root, engine.world)

    def save(self, step: int) -> None:
        """Save the state after a step (0: before the first); rank 0 compares it with a reference's, if there is one."""
        tensors = self._engine.state_tensors()
        tensors = {name: tensor for name, tensor in tensors.items() if name not in self._trace.uncompared}
        target = self._folder.path_of(step)
        self._checkpoints.save(target, tensors, {}, step=step)
        self._trace.names = list(tensors)
        if self._against is not None and self._engine.world.is_main:
            expected = SavedState(self._against.path_of(0), self._against.path_of(step))
            measured = SavedState(self._folder.path_of(0), target)
            # At the start the optimizer has no state yet.
            names = [name for name in self._names if step or not name.startswith("optim.")]
            self._trace.deviations.append(compare(expected, measured, names, step=step))
            expected.close()
            measured.close()
            if step:
                shutil.rmtree(target)

    def close(self) -> None:
        """Close the checkpoint writer."""
        self._checkpoints.close()


def _batches(runner: Runner) -> Iterator[Any]:
    """Yield this rank's micro-batches of each step, over as many epochs as needed."""
    epoch = 0
    while True:
        empty = True
        for micro_batches in runner.loader.epoch(epoch, 0):
            empty = False
            yield micro_batches
        if empty:
            raise DataError("the data ended before the first batch: there is nothing to compare")
        epoch += 1


def perturb_weights(engine: Engine, size: float) -> None:
    """Multiply weights by random factors from 1 - `size` to 1 + `size`; see [Note: where a tolerance comes from]."""
    for name, weight in engine.weights().items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        factors = torch.rand(weight.shape, generator=generator).mul_(2 * size).sub_(size)
        with torch.no_grad():
            weight.add_(weight * factors.to(weight.device, weight.dtype))
    engine.weights_changed()


def running_statistics(model: nn.Module) -> list[str]:
    """Return the names of buffers with running statistics, which depend on the samples of each rank."""
    owners = [(name, module) for name, module in model.named_modules() if hasattr(module, "running_mean")]
    return [
        f"model.{name}.{key}" if name else f"model.{key}"
        for name, module in owners
        for key, _ in module.named_buffers(recurse=False)
    ]


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def main() -> None:
    """Run the `ProofJob` in the file that the command line names; exit with 2 after an error that Plait reports."""
    try:
        run(ProofJob.read(Path(sys.argv[1])))
    except PlaitError as error:
        report_failure(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
