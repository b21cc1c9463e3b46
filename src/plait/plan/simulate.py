"""One rank's training step, run by the real code on tensors without values.

[Note: two steps] The first step makes the optimizer's state, and lets DTensor find out how its operations are spread;
the second is what every later step is like.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from plait.config.batch import resolve_batch
from plait.config.layout import Layout
from plait.config.optim import AdamW8bitConfig
from plait.config.run import RunConfig
from plait.parallel.offload.activations import activations_on_host
from plait.parallel.offload.store import Offload
from plait.plan.account import EACH, Account
from plait.plan.allocator import CachingAllocator
from plait.plan.classify import Owners
from plait.plan.example import example_of
from plait.plan.fused import compiled_units
from plait.plan.hardware import Hardware
from plait.plan.hosted import Away, host_work, mode_of
from plait.plan.kernels import MATMUL_WORKSPACE, kernels_of_cuda
from plait.plan.recorder import Peak, Recorder
from plait.plan.timing import Timing
from plait.spec.phase import Phase
from plait.strategy import Length, prepare_native
from plait.strategy.native.engine import NativeEngine
from plait.strategy.native.offloaded import OffloadedViews
from plait.world import local_part
from plait.world.fake import fake_world

_REORDERED = 0.15
"""Inductor orders a backward pass that recomputes in its own way; measured, that takes up to this share more of what a
step takes beyond its states."""
_SOME_LENGTH = Length(total_steps=1000, steps_per_epoch=1000)
"""A schedule may ask how long the run is; what a step takes does not depend on it."""
MakeExample = Callable[[RunConfig, int], Any]


@dataclass(frozen=True, slots=True)
class Simulated:
    """What one rank's step takes."""

    account: Account
    flops_per_token: float | None
    """Of the model's own account, where it gives one."""
    trail: list[tuple[Phase, int]] = field(default_factory=list)
    """Bytes in use after every operation of the step; only where every layer was simulated."""
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
) -> Simulated:
    """Run `rank` of `ranks` through two steps; `detailed` adds whose the memory is.

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
        timing = Timing(hardware, config, world.layout)
        recorder = Recorder(hardware.kind, allocator=CachingAllocator() if on_cuda else None, watchers=(timing,))
        mode = config.strategy.recompute.mode
        stack.enter_context(compiled_units(recorder, timing, notes.append))
        stack.enter_context(recorder.recording())
        workspace = torch.empty(2 * MATMUL_WORKSPACE if on_cuda else 0, dtype=torch.uint8, device=world.device)
        micro_batches = config.strategy.pipeline.micro_batches
        batch = resolve_batch(config.batch, world.layout.data_parallel, micro_batches=micro_batches)
        engine = prepare_native(
            config,
            world,
            model=model,
            loss_function=loss_function,
            length=_SOME_LENGTH,
            accumulation=batch.accumulation,
            example=make_example(config, batch.micro),
            say=notes.append,
        )
        if engine.pipeline is not None:
            engine.pipeline.transport.foretold = received
        engine.on_phase = recorder.enter

        def step(count: int = batch.accumulation) -> None:
            engine.train_step([make_example(config, batch.micro) for _ in range(count)])

        # Some schedules take certain numbers of micro-batches only.
        plain = engine.pipeline is None or config.strategy.pipeline.schedule in ("1f1b", "gpipe")
        step(1 if plain else batch.accumulation)
        if batch.accumulation == 1:  # otherwise gradients are there from the first micro-batch on
            recorder.end_at = recorder.backward_operations - recorder.backward_operations // max(layers, 1)
        timing.restart()
        recorder.peaks = defaultdict(Peak, {Phase.BUILD: recorder.peaks[Phase.BUILD]})
        parts = _look_at_peaks(recorder, engine) if detailed else {}
        recorder.trail = [] if detailed else None
        step()
        timing.stop()
        example = make_example(config, batch.micro)
        numbers = _numbers(recorder, timing, engine, _tokens(example) * batch.accumulation)
        numbers["micro_batches"] = batch.accumulation
        if isinstance(engine.views, OffloadedViews):
            numbers |= _update(engine.views.store, config, hardware, world.layout)
            numbers["state"] += _states_away(engine.views.store, config)
        if config.strategy.offload.params == "nvme":
            on_link = numbers.get(f"link.in.{EACH}", 0.0) * hardware.pcie_gbps
            numbers[f"link.files.{EACH}"] = on_link * min(ranks, hardware.per_host) / hardware.disk_gbps
        if config.strategy.compile.enabled and mode != "none":
            highest = max(value for key, value in numbers.items() if key.startswith("peak."))
            beyond = highest - numbers.get("peak.idle", 0.0)
            numbers["reserved"] = max(numbers["reserved"], highest + beyond * _REORDERED)
        found = Simulated(
            Account(numbers),
            _flops_per_token(engine, example),
            recorder.trail or [],
            engine.pipeline.transport.handed_on if engine.pipeline is not None else None,
            notes,
        )
        numbers |= {f"at.{name}.{part}": size for name, held in parts.items() for part, size in held.items()}
        del workspace
        return replace(found, account=found.account.settled())


def _numbers(recorder: Recorder, timing: Timing, engine: NativeEngine, tokens: int) -> dict[str, float]:
    numbers: dict[str, float] = dict(timing.numbers)
    numbers |= {f"peak.{phase}": peak.bytes for phase, peak in recorder.peaks.items()}
    numbers["peak.backward.end"] = recorder.end.bytes
    numbers["reserved"] = max(peak.reserved for peak in (*recorder.peaks.values(), recorder.end))
    with torch.no_grad():
        numbers["state"] = sum(local_part(tensor).nbytes for tensor in engine.state_tensors().values())
    if isinstance(engine.views, OffloadedViews):
        store = engine.views.store
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


def _states_away(store: Offload, config: RunConfig) -> float:
    """What a checkpoint has of optimizer states that are not on the device, and that a plan does not make."""
    away = sum(bucket.numel for bucket in store.buckets if bucket.span.home != "device")
    wide = isinstance(config.optim, AdamW8bitConfig)  # moments in 8 bits are saved in fp32
    return away * (8.0 if wide else store.options.state_bytes)


def _look_at_peaks(recorder: Recorder, engine: NativeEngine) -> dict[str, dict[str, int]]:
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
    found: dict[str, dict[str, int]] = {Phase.BUILD: built}
    return found


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
