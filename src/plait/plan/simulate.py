"""One rank's training step, run by the real code on tensors without values.

[Note: two steps] The first step makes the optimizer's state, and lets DTensor find out how its operations are spread;
the second is what every later step is like. A third goes to the operation at which most memory was in use, and looks
whose it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from plait.config.batch import resolve_batch
from plait.config.run import RunConfig
from plait.plan.allocator import CachingAllocator
from plait.plan.classify import classify
from plait.plan.example import example_of
from plait.plan.fused import compiled_units
from plait.plan.hardware import Hardware
from plait.plan.kernels import MATMUL_WORKSPACE, kernels_of_cuda
from plait.plan.recorder import Peak, Recorder, Trail
from plait.plan.timing import Timing
from plait.spec.phase import Phase
from plait.strategy import prepare_native
from plait.strategy.native.engine import NativeEngine
from plait.world.fake import fake_world


@dataclass(frozen=True, slots=True)
class Simulated:
    """What one rank's step takes."""

    rank: int
    peaks: dict[Phase, Peak]
    parts: dict[str, int]
    """Whose the memory is at the peak of all phases; empty where nobody asked."""
    timing: Timing
    state_bytes: int
    """What a checkpoint of this rank holds."""
    parameters: int
    tokens: int
    """Positions of all micro-batches of this rank that have a target; samples where there are no positions."""
    flops_per_token: float | None
    """Of the model's own account, where it gives one."""
    trail: Trail | None = None
    handed_on: Any = None
    """What a pipeline stage hands to the next."""
    notes: list[str] = field(default_factory=list)

    @property
    def peak(self) -> tuple[Phase, Peak]:
        """The phase with the highest peak."""
        return max(self.peaks.items(), key=lambda entry: entry[1].bytes)


def simulate(
    config: RunConfig,
    hardware: Hardware,
    *,
    ranks: int,
    rank: int = 0,
    model: Any = None,
    loss_function: Any = None,
    make_example: Callable[[RunConfig, int], Any] = example_of,
    received: Any = None,
    detailed: bool = False,
) -> Simulated:
    """Run `rank` of `ranks` through two steps; `detailed` adds whose the memory is, and how it rose and fell.

    `received` is what the stage before hands on, for ranks that are not first in a pipeline.
    """
    device = hardware.kind
    notes: list[str] = []
    local = min(ranks, hardware.per_host)
    memory = int(hardware.memory_gib * 2**30)
    with ExitStack() as stack:
        world = stack.enter_context(
            fake_world(config, rank=rank, size=ranks, per_host=local, device=device, memory=memory)
        )
        if device == "cuda":
            stack.enter_context(kernels_of_cuda(hardware.capability))
        timing = Timing(hardware, config, world)
        recorder = Recorder(device, allocator=CachingAllocator() if device == "cuda" else None, watchers=(timing,))
        stack.enter_context(compiled_units(recorder, timing, notes.append, recompute=config.strategy.recompute.mode))
        stack.enter_context(recorder.recording())
        if device == "cuda":
            keep = torch.empty(2 * MATMUL_WORKSPACE, dtype=torch.uint8, device=world.device)  # noqa: F841
        pipeline = config.strategy.pipeline
        batch = resolve_batch(config.batch, world.layout.data_parallel, micro_batches=pipeline.micro_batches)
        engine = prepare_native(
            config,
            world,
            model=model,
            loss_function=loss_function,
            accumulation=batch.accumulation,
            example=make_example(config, batch.micro),
            say=notes.append,
        )
        if engine.pipeline is not None:
            engine.pipeline.transport.foretold = received
        engine.on_phase = recorder.enter

        def step() -> None:
            engine.train_step([make_example(config, batch.micro) for _ in range(batch.accumulation)])
            recorder.enter(Phase.IDLE)

        step()
        first = {phase: peak.bytes for phase, peak in recorder.peaks.items()}
        timing.restart()
        step()
        timing.stop()
        peaks = {phase: recorder.peaks[phase] for phase in first}
        parts: dict[str, int] = {}
        if detailed:
            parts = _look_at_peak(recorder, engine, step)
        return Simulated(
            rank=rank,
            peaks=peaks,
            parts=parts,
            timing=timing,
            state_bytes=_local_bytes(engine),
            parameters=engine.parameter_count()[0] if world.layout.pp == 1 else 0,
            tokens=_tokens(make_example(config, batch.micro)) * batch.accumulation,
            flops_per_token=_flops_per_token(engine, make_example(config, batch.micro)),
            trail=recorder.trail,
            handed_on=engine.pipeline.transport.handed_on if engine.pipeline is not None else None,
            notes=notes,
        )


def _look_at_peak(recorder: Recorder, engine: NativeEngine, step: Callable[[], None]) -> dict[str, int]:
    """Run the step again up to its highest moment, and sort what is in use by whose it is."""
    before = recorder.operations
    recorder.trail = Trail()
    parts: dict[str, int] = {}
    peak = max(recorder.peaks.values(), key=lambda each: each.bytes)

    def look() -> None:
        parts.update(classify(recorder, engine))
        parts["kernel workspaces"] = max(0, peak.bytes - recorder.in_use)

    recorder.at_stop = look
    recorder.stop_at = before + (peak.at - recorder.step_began)
    step()
    if not parts:  # the peak was before the steps: while the model was built
        look()
    return parts


def _local_bytes(engine: NativeEngine) -> int:
    from plait.world import local_part

    with torch.no_grad():
        return sum(local_part(tensor).nbytes for tensor in engine.state_tensors().values())


def _tokens(example: Any) -> int:
    if isinstance(example, dict) and "input_ids" in example:
        return int(example["input_ids"].numel())
    first = example[0] if isinstance(example, (tuple, list)) else next(iter(example.values()), example)
    return int(first.shape[0]) if isinstance(first, torch.Tensor) else 1


def _flops_per_token(engine: NativeEngine, example: Any) -> float | None:
    count = getattr(engine.model, "flops_per_token", None)
    if count is None or not isinstance(example, dict) or "input_ids" not in example:
        return None
    return float(count(example["input_ids"].shape[-1]))
