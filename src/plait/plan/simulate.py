"""One rank's training step, run by the real code on tensors without values.

[Note: two steps] The first step makes the optimizer's state, and lets DTensor find out how its operations are spread;
the second is what every later step is like. Of the first, only the update is kept: the optimizer's beginning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from plait.config import Layout, RunConfig, resolve_batch
from plait.parallel import Offload, activations_on_host
from plait.plan.account import EACH, Account
from plait.plan.allocator import CachingAllocator
from plait.plan.classify import Owners
from plait.plan.example import example_of
from plait.plan.fused import compiled_units
from plait.plan.hardware import Hardware
from plait.plan.hosted import Away, host_work, mode_of, with_update
from plait.plan.keeping import Keeping, completed
from plait.plan.kernels import MATMUL_WORKSPACE, kernels_of_cuda
from plait.plan.patience import Patience
from plait.plan.recorder import Peak, Recorder
from plait.plan.timing import Timing
from plait.spec import Phase
from plait.strategy import Length, NativeEngine, OffloadedViews, Preparation, described_loss, prepare_native
from plait.world import fake_world

_REORDERED = 0.15
"""Inductor orders a backward pass that recomputes in its own way; measured, that takes up to this share more of what a
step takes beyond its states."""
_SOME_LENGTH = Length(total_steps=1000, steps_per_epoch=1000)
"""A schedule may ask how long the run is; what a step takes does not depend on it."""
_ONCE = (Phase.BUILD, Phase.LOAD, Phase.INIT)
"""What comes once, before the step that is like all others."""
_FILED = (Phase.LOAD, Phase.SAVE)
MakeExample = Callable[[RunConfig, int], Any]


@dataclass(frozen=True, slots=True)
class Simulated:
    """What one rank's step takes."""

    account: Account
    flops_per_token: float | None
    """Of the model's own account, where it gives one."""
    trail: list[tuple[Phase, int]] = field(default_factory=list)
    """Bytes in use after every operation, from the build to a save; only where every layer was simulated."""
    handed_on: Any = None
    """What a pipeline stage hands to the next."""
    notes: list[str] = field(default_factory=list)


def simulate(
    config: RunConfig,
    hardware: Hardware,
    *,
    ranks: int,
    rank: int = 0,
    layers: int = 1,
    model: Any = None,
    loss_function: Any = None,
    make_example: MakeExample = example_of,
    received: Any = None,
    detailed: bool = False,
    patience: Patience | None = None,
) -> Simulated:
    """Run `rank` of `ranks` through two steps, as long as there is `patience`; `detailed` adds whose the memory is.

    `layers` is how many layers this rank has: the end of its backward pass is the last of so many parts.
    `received` is what the stage before hands on, for ranks that are not first in a pipeline.
    """
    notes: list[str] = []
    with ExitStack() as stack:
        world = stack.enter_context(
            fake_world(
                config,
                rank=rank,
                size=ranks,
                per_host=hardware.per_host,
                device=hardware.kind,
                memory=int(hardware.memory_gib * 2**30),
            )
        )
        on_cuda = hardware.kind == "cuda"
        if on_cuda:
            stack.enter_context(kernels_of_cuda(hardware.capability))
        config = with_update(config, hardware, world.layout)
        timing = Timing(hardware, config, world.layout)
        watchers = (timing,) if patience is None else (timing, patience)
        recorder = Recorder(hardware.kind, allocator=CachingAllocator() if on_cuda else None, watchers=watchers)
        recorder.trail = [] if detailed else None
        mode = config.strategy.recompute.mode
        stack.enter_context(compiled_units(recorder, timing, notes.append))
        stack.enter_context(recorder.recording())
        streams = 0 if not on_cuda else 2 if config.strategy.graphs is True else 1  # a recording is made aside
        workspace = torch.empty(streams * 2 * MATMUL_WORKSPACE, dtype=torch.uint8, device=world.device)
        micro_batches = config.strategy.pipeline.micro_batches
        batch = resolve_batch(config.batch, world.layout.data_parallel, micro_batches=micro_batches)
        engine = prepare_native(
            Preparation(
                config,
                world,
                model=model,
                loss_function=loss_function or described_loss(config),
                length=_SOME_LENGTH,
                accumulation=batch.accumulation,
                example=make_example(config, batch.micro),
                say=notes.append,
            )
        )
        if engine.pipeline is not None:
            engine.pipeline.transport.foretold = received
        stack.enter_context(recorder.deaf_to_questions())
        parts: dict[str, dict[str, int]] = {}
        keeping = Keeping(engine, recorder, config, cores=hardware.host_cores)
        if detailed:
            _look_at_peaks(recorder, engine, parts)
        keeping.load()
        recorder.at_peak = None

        def enter_first(phase: Phase) -> None:
            if phase is Phase.STEP and detailed:
                _look_at_peaks(recorder, engine, parts)
            recorder.enter(Phase.INIT if phase is Phase.STEP else phase)

        engine.on_phase = enter_first

        def step(count: int = batch.accumulation) -> None:
            engine.train_step([make_example(config, batch.micro) for _ in range(count)])

        # Some schedules take certain numbers of micro-batches only.
        plain = engine.pipeline is None or config.strategy.pipeline.schedule in ("1f1b", "gpipe")
        step(1 if plain else batch.accumulation)
        if batch.accumulation == 1:  # otherwise gradients are there from the first micro-batch on
            recorder.end_at = recorder.backward_operations - recorder.backward_operations // max(layers, 1)
        timing.restart()
        recorder.peaks = defaultdict(Peak, {phase: recorder.peaks[phase] for phase in _ONCE if phase in recorder.peaks})
        recorder.trail = recorder.trail and [point for point in recorder.trail if point[0] in _ONCE]
        engine.on_phase = recorder.enter
        step()
        timing.stop()
        example = make_example(config, batch.micro)
        kept = keeping.save()
        numbers = _numbers(recorder, timing, engine, _tokens(example) * batch.accumulation) | kept
        numbers["micro_batches"] = batch.accumulation
        if isinstance(engine.views, OffloadedViews):
            numbers |= _update(engine.views.store, config, hardware, world.layout)
        if config.strategy.offload.params == "nvme":
            on_link = numbers.get(f"link.in.{EACH}", 0.0) * hardware.pcie_gbps
            numbers[f"link.files.{EACH}"] = on_link * min(ranks, hardware.per_host) / hardware.disk_gbps
        if config.strategy.compile.enabled and mode != "none":
            highest = max(value for key, value in numbers.items() if key.startswith("peak."))
            beyond = highest - numbers.get("peak.idle", 0.0)
            numbers["reserved"] = max(numbers["reserved"], highest + beyond * _REORDERED)
        numbers |= {f"at.{name}.{part}": size for name, held in parts.items() for part, size in held.items()}
        numbers = completed(numbers, one_memory=not on_cuda)
        del workspace
        return Simulated(
            Account(numbers).settled(),
            _flops_per_token(engine, example),
            _in_order(recorder.trail or [], numbers),
            engine.pipeline.transport.handed_on if engine.pipeline is not None else None,
            notes,
        )


def _numbers(recorder: Recorder, timing: Timing, engine: NativeEngine, tokens: int) -> dict[str, float]:
    numbers: dict[str, float] = dict(timing.numbers)
    numbers |= {f"peak.{phase}": peak.bytes for phase, peak in recorder.peaks.items()}
    numbers["peak.backward.end"] = recorder.end.bytes
    numbers["reserved"] = max(peak.reserved for peak in (*recorder.peaks.values(), recorder.end))
    if isinstance(engine.views, OffloadedViews):
        store = engine.views.store
        numbers["host_built"] = store.built_bytes()
        numbers["host_rooms"] = store.room_bytes()
        numbers["host_state"] = store.host_bytes() - store.room_bytes()
    if (held := activations_on_host(engine.model)) > 0:
        numbers["host_state"] = numbers.get("host_state", 0.0) + held
    numbers["tokens"] = tokens
    numbers["parameters"] = sum(param.numel() for param in engine.model.parameters())
    return numbers


def _update(store: Offload, config: RunConfig, hardware: Hardware, layout: Layout) -> dict[str, float]:
    """What the update on the host takes, which a plan does not run."""
    homes = {home: [each for each in store.buckets if each.span.home == home] for home in ("cpu", "nvme")}
    on_host, in_files = (sum(bucket.numel for bucket in homes[home]) for home in ("cpu", "nvme"))
    targets = [target for home in homes.values() for bucket in home for target in bucket.targets]
    back = sum(target.numel() for target in targets if target.device.type != "cpu")
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=config.strategy.pipeline.micro_batches)
    wide = batch.accumulation > 1 or layout.replicas > 1 or config.strategy.stage == 3
    away = Away(on_host, in_files, back)
    work = host_work(away, config, hardware, layout, state=store.options.state_bytes, wide=wide)
    return work.to_dict(mode_of(config, layout, hardware.kind))


def _look_at_peaks(recorder: Recorder, engine: NativeEngine, found: dict[str, dict[str, int]]) -> None:
    """Whose the memory is at each of the peaks yet to come, filled in when they come, and at that of the build."""
    owners = Owners(engine)

    def look(name: str, beyond: int, kernel: bool) -> None:
        # What a compiled pass has made so far is for the backward pass, if it is the forward pass.
        whose = "kernel workspaces" if kernel else "activations" if name == Phase.FORWARD else "temporaries"
        found[name] = held = owners.share_out(recorder)
        held[whose] = held.get(whose, 0) + beyond

    recorder.at_peak = look
    # Of the build, what stayed is known; the rest was needed while values were made.
    built = owners.share_out(recorder)
    built = {part: built[part] for part in ("parameters", "kernel workspaces") if part in built}
    built["temporaries"] = recorder.peaks[Phase.BUILD].bytes - sum(built.values())
    found[Phase.BUILD] = built


def _in_order(trail: list[tuple[Phase, int]], numbers: dict[str, float]) -> list[tuple[Phase, int]]:
    """As a run has them that goes on from a checkpoint. Of loading and saving the highest point is there for sure."""
    if not trail:
        return []
    tops = {phase: [(phase, int(numbers[f"peak.{phase}"]))] for phase in _FILED if f"peak.{phase}" in numbers}
    loads, saves = ([*(p for p in trail if p[0] is phase), *tops.get(phase, [])] for phase in _FILED)
    first = [point for point in trail if point[0] is Phase.BUILD]
    return [*first, *loads, *(p for p in trail if p[0] not in (Phase.BUILD, *_FILED)), *saves]


def _tokens(example: Any) -> int:
    """Positions of a micro-batch; samples where there are no positions."""
    if isinstance(example, dict) and "input_ids" in example:
        return int(example["input_ids"].numel())
    first = example[0] if isinstance(example, (tuple, list)) else example
    return int(first.shape[0]) if isinstance(first, torch.Tensor) else 1


def _flops_per_token(engine: NativeEngine, example: Any) -> float | None:
    count = getattr(engine.model, "flops_per_token", None)
    if count is None or not isinstance(example, dict) or "input_ids" not in example:
        return None
    return float(count(example["input_ids"].shape[-1]))
