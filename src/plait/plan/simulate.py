"""Simulate one rank's training step: the code that trains runs on fake tensors, and memory and time are recorded.

[Note: two steps] The first step creates the optimizer's state and fills DTensor's caches of sharding decisions; all
later steps are like the second. So the figures are those of the second step. Of the first, only the peak of the update
is kept, as that of `Phase.INIT`.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.checkpoint import (
    BLOCK,
    STRIP,
    WRITERS,
    DeferredTensor,
    Entry,
    SavedTensor,
    checkpoint_memory,
    contiguous_bytes,
    saved_tensor,
    thread_count,
)
from plait.config import (
    CUSTOM_MODELS,
    AdamW8bitConfig,
    Cifar10Data,
    CustomObjective,
    ImageFolderData,
    ImageTextData,
    JsonlData,
    Layout,
    RunConfig,
    SpeechData,
    TextClassificationData,
    TextData,
    TokensData,
    leaf_sources,
    resolve_batch,
)
from plait.data import target_length
from plait.distributed import activations_on_host, fake_world, replaced, to_local
from plait.engine import NativeEngine, OffloadedParams, Preparation, RunLength, configured_loss, prepare_native
from plait.errors import ConfigError, Problem
from plait.kernels import WORKSPACE_BYTES
from plait.launch import Phase
from plait.optim import Offload
from plait.plan.classify import Owners
from plait.plan.compiled import compiled_units
from plait.plan.hardware import Hardware
from plait.plan.ledger import PER_MICRO_BATCH, Away, Ledger, host_work, mode_of, with_update
from plait.plan.recorder import END, CachingAllocator, MemoryRecorder, Peak
from plait.plan.timing import MATMUL_WORKSPACE, Timing, kernels_of_cuda
from plait.torch_internals import in_backward_pass

# The memory of saving and loading a checkpoint, from the code that does both, on fake tensors.
#
# [Note: files that a plan does not write] The engine updates the model as after loading, allocates the optimizer's
# state, and collects its state for a save: this code runs, and the recorder sees it. Writing and reading cannot run
# without files. Their memory is computed from the same tensors by `plait.checkpoint.checkpoint_memory`, whose numbers
# the real writer and reader also use. The host memory of an offloaded optimizer is computed from its buckets: a plan
# does not allocate its state.


COPY = "checkpoint copy"
"""The category of the memory that a background save copies the state to; it is kept for the next save."""
_SINCE_A_SAVE = (Phase.FORWARD, Phase.BACKWARD, END, Phase.REDUCE, Phase.STEP, Phase.SAVE, Phase.IDLE)
"""Peaks that include that copy, in a run that has saved before."""


class _Away(NamedTuple):
    """Optimizer state that is not on the device."""

    entries: list[SavedTensor]
    """Its tensors in a checkpoint."""
    held: float = 0.0
    """Bytes of host memory that it uses between steps."""
    largest: float = 0.0
    """Bytes of the largest tensor that a checkpoint has in another format: a save or a load converts it in memory."""
    in_files: frozenset[str] = frozenset()
    """Names of weights whose bucket is in files; in a run (not in a plan) they are contiguous."""


class SimulatedCheckpoints:
    """The checkpoints of a simulated run: one is loaded after the build, and one is saved after the steps.

    A run that saves is assumed to resume from a checkpoint, so it also loads.
    """

    def __init__(self, engine: NativeEngine, recorder: MemoryRecorder, config: RunConfig, *, cores: int) -> None:
        """`cores`: how many cores the host has; threads that read and write depend on it."""
        self._engine, self._recorder = engine, recorder
        self._settings, self._optim = config.checkpoint, config.optim
        self._cores, self._local_ranks = cores, engine.world.ranks.local_size
        self._ranks = engine.world.size // engine.world.layout.pp
        self.saves = self._settings.last or self._settings.every is not None or self._settings.best is not None
        self.loads = self.saves or self._settings.resume is not None

    def load(self) -> None:
        """Record the update of the model after weights were loaded; the optimizer's state is counted by `save`."""
        if self.loads:
            self._recorder.enter(Phase.LOAD)
            self._engine.state_loaded()
            self._recorder.enter(Phase.IDLE)

    def save(self) -> dict[str, float]:
        """Collect the tensors of a checkpoint, then allocate them as for loading; return the `Ledger` figures of both.

        The engine cannot train afterwards: its optimizer has lost its state.
        """
        engine, recorder, away = self._engine, self._recorder, self._away()
        if self.saves:
            recorder.enter(Phase.SAVE)
        with torch.no_grad():
            with replaced(recorder, "paused", not self.saves):
                tensors = engine.state_entries()
                entries = {name: _kept(entry, self._ranks) for name, entry in tensors.items()}
            entries |= {name: entries[name]._replace(contiguous=True) for name in away.in_files}
            numbers = {"state": sum(entry.bytes for entry in (*entries.values(), *away.entries))}
            if not self.loads:
                return numbers
            frozen = {f"model.{name}" for name in engine.frozen()} if self._settings.trainable_only else set()
            written = [entry for name, entry in entries.items() if name not in frozen] + away.entries
            host = {"cores": self._cores, "ranks": self._local_ranks}
            needed = checkpoint_memory(written, **host, background=self._settings.async_save)
            separate = engine.world.device.type != "cpu"  # otherwise the recorder sees the host
            at_once = thread_count(WRITERS, **host)
            lates = [entries[name].bytes for name, entry in tensors.items() if isinstance(entry, DeferredTensor)]
            largest = max([*lates, away.largest])
            # See [Note: a few rows at a time], `plait.checkpoint.pieces`; a block may be assembled from two strips.
            wide = (min(largest, STRIP) + 2 * BLOCK * (largest > STRIP) + WORKSPACE_BYTES) * at_once if largest else 0.0
            if self.saves:
                strided = [tensor for name, tensor in tensors.items() if not entries[name].contiguous]
                _copy_in_rows(
                    (tensor for tensor in strided if isinstance(tensor, Tensor)), engine.world.device.type, at_once
                )
                numbers |= {"written": needed.written, "host_copy": needed.copied}
                numbers["host_saving"] = needed.writing + wide
            numbers["loaded"] = self._allocate_optimizer_state(tensors)
        there = 0.0 if separate else away.held
        return numbers | {"host_reading": needed.reading, "host_loading": wide + away.held - there}

    def _allocate_optimizer_state(self, tensors: dict[str, Entry]) -> float:
        """Return the bytes that a new optimizer state takes on the device; the one in `tensors` is freed first."""
        shapes = {
            name.removeprefix("optim."): (tensor.shape, tensor.dtype)
            for name, tensor in tensors.items()
            if name.startswith("optim.")
        }
        tensors.clear()
        self._engine.updater.optimizer.state.clear()
        with replaced(self._recorder, "trail", None):
            before = self._recorder.in_use
            self._engine.allocate_optimizer_state(shapes)
            return self._recorder.in_use - before

    def _away(self) -> _Away:
        views = self._engine.master_weights
        if not isinstance(views, OffloadedParams):
            return _Away([])
        narrow = views.store.options.state_bytes
        wide = 8.0 if isinstance(self._optim, AdamW8bitConfig) else narrow  # moments in 8 bits are saved in fp32
        entries, on_host, largest, in_files = [], 0, 0, set()
        for bucket in views.store.buckets:
            if bucket.span.home != "device":
                on_host += bucket.numel if bucket.span.home == "cpu" else 0
                for index, master, _ in bucket.items():
                    entries.append(
                        SavedTensor(master.numel() * wide, saved_tensor(views.params[index], self._ranks).holders)
                    )
                    largest = max(largest, master.numel())
            if bucket.span.home == "nvme":
                in_files |= {f"model.{views.names[index]}" for index in bucket.span.indices}
        made = largest * 4.0 if wide > narrow else 0.0  # one moment, in fp32
        return _Away(entries, on_host * narrow, made, frozenset(in_files))


def _copy_in_rows(tensors: Iterable[Tensor], device: str, writers: int) -> None:
    """Copy tensors as the writer threads do: one copy per thread exists at a time."""
    under_way: deque[Tensor] = deque(maxlen=writers)
    for tensor in tensors:
        local = to_local(tensor)
        if local.device.type == device:
            under_way.append(contiguous_bytes(local))


def _kept(entry: Entry, ranks: int) -> SavedTensor:
    """Return what a checkpoint has of an entry, in the format of the checkpoint."""
    if isinstance(entry, Tensor):
        return saved_tensor(entry, ranks)
    size = to_local(entry.like.detach()).numel() * entry.dtype.itemsize
    return saved_tensor(entry.like, ranks)._replace(bytes=size, on_device=False, contiguous=True)


def completed(numbers: dict[str, float], *, one_memory: bool) -> dict[str, float]:
    """Return the figures with the optimizer state that loading allocates added to the peak of `Phase.LOAD`.

    `one_memory`: the device is the host (a CPU), so buffers in host memory are added to the peaks too.
    """
    completed_numbers = dict(numbers)
    loaded = {"optimizer": completed_numbers.pop("loaded", 0.0)}
    more = _host_memory_by_peak(completed_numbers) if one_memory else {}
    more[Phase.LOAD] = {**loaded, **more.get(Phase.LOAD, {})}
    detailed = any(key.startswith("at.") for key in completed_numbers)
    for name, owners in more.items():
        for owner, size in owners.items():
            if size and f"peak.{name}" in completed_numbers:
                completed_numbers[f"peak.{name}"] += size
                if detailed:
                    completed_numbers[f"at.{name}.{owner}"] = completed_numbers.get(f"at.{name}.{owner}", 0.0) + size
    return completed_numbers


def _host_memory_by_peak(numbers: dict[str, float]) -> dict[str, dict[str, float]]:
    """Remove the host memory of checkpoints from `numbers`; return it as peak → category → bytes."""
    copy, saving, reading, loading = (
        numbers.pop(f"host_{key}", 0.0) for key in ("copy", "saving", "reading", "loading")
    )
    sizes = {str(name): {COPY: copy} for name in _SINCE_A_SAVE}
    sizes[Phase.SAVE]["optimizer"] = saving
    return {**sizes, Phase.LOAD: {"temporaries": reading + loading}}


# A micro-batch with the shapes of the data, made without reading the data.


def example_of(config: RunConfig, micro: int) -> Any:
    """Return a micro-batch of `micro` samples of `config.data`; without data, tokens of the model's `seq_len`.

    Call it in a fake world, where its tensors have no values. Raise `ConfigError` if the shapes are not known.
    """
    data = next((source for _, source in leaf_sources("data", config.data)), None)
    if config.data is not None and config.data.collate is not None:
        message = "a function of its own makes batches of them, so the shapes of a micro-batch are not known"
        raise ConfigError(Problem("data.collate", message, "Start the run; a plan needs batches that are stacked."))
    if isinstance(data, TextData | JsonlData | TokensData):
        if data.objective is None:
            return _token_example(micro, data.seq_len, documents=data.document_mask)
        if not isinstance(data.objective, CustomObjective):
            inputs = _encoder_example(micro, data.seq_len, padded=data.document_mask)
            return {**inputs, "labels": _integers(micro, target_length(data.objective, data.seq_len))}
    if isinstance(data, ImageFolderData | Cifar10Data):
        size = data.size if isinstance(data, ImageFolderData) else 32
        image = {"image": torch.zeros(micro, 3, size, size)}
        if data.objective is None:
            return {**image, "label": _integers(micro)}
        return {**image, "bool_masked_pos": _integers(micro, (size // data.objective.patch_size) ** 2).bool()}
    if isinstance(data, TextClassificationData):
        return {**_encoder_example(micro, data.seq_len, padded=True), "labels": _integers(micro)}
    if isinstance(data, ImageTextData):
        pixels = torch.zeros(micro, 3, data.size, data.size)
        return {**_encoder_example(micro, data.seq_len, padded=True), "pixel_values": pixels}
    if isinstance(data, SpeechData):
        frames = torch.zeros(micro, data.mel_bins, round(data.seconds * 100))
        return {"input_features": frames, "labels": _integers(micro, data.seq_len)}
    length = None if isinstance(config.model, CUSTOM_MODELS) else getattr(config.model, "seq_len", None)
    if data is None and isinstance(length, int):
        return _token_example(micro, length, documents=False)
    described = "there are none" if data is None else f"data of type {data.type!r}"
    message = f"{described}, so the shapes of a micro-batch are not known without reading one"
    raise ConfigError(Problem("data", message, "Start the run: it plans itself, with its first micro-batch."))


def _token_example(micro: int, length: int, *, documents: bool) -> dict[str, torch.Tensor]:
    keys = ("input_ids", "labels", "positions", "document_ids") if documents else ("input_ids", "labels")
    return {key: _integers(micro, length) for key in keys}


def _encoder_example(micro: int, length: int, *, padded: bool) -> dict[str, torch.Tensor]:
    keys = ("input_ids", "attention_mask") if padded else ("input_ids",)
    return {key: _integers(micro, length) for key in keys}


def _integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


# A time limit for a search, which also ends a running simulation. It counts CPU seconds of this process and not wall
# clock time, so that a search on a busy host takes longer and finds the same.


SEARCH_S = 40.0
"""How long a search for what makes a run fit may compute beyond the plan itself."""


class TimeUpError(Exception):
    """The time budget is spent. Whoever sets a budget catches it and reports what was left out."""


class TimeBudget:
    """A budget of CPU seconds. As a watcher of a recorder it raises `TimeUpError` at the first operation after it.

    Not within a backward pass: an exception there would end autograd's threads.
    """

    def __init__(self, seconds: float = SEARCH_S, clock: Callable[[], float] = time.process_time) -> None:
        self.seconds = seconds
        self._clock = clock
        self._start = clock()

    @property
    def over(self) -> bool:
        """Whether the budget is spent."""
        return self._passed() >= self.seconds

    @property
    def half_over(self) -> bool:
        """Whether half of it is spent."""
        return self._passed() >= self.seconds / 2

    def again(self, seconds: float) -> TimeBudget:
        """Return a new budget that starts now, with the same clock."""
        return TimeBudget(seconds, self._clock)

    def saw(self, *_operation: Any) -> None:
        """Raise `TimeUpError` if the budget is spent."""
        if not in_backward_pass() and self.over:
            raise TimeUpError

    def _passed(self) -> float:
        return self._clock() - self._start


@contextmanager
def _time_up_as_itself() -> Iterator[None]:
    """Raise a `TimeUpError` as itself: DTensor wraps what is raised while it propagates shardings in a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, TimeUpError):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        raise


_REORDERED = 0.15
"""Inductor orders the operations of a backward pass with recomputation differently. Measured, this takes up to this
fraction more of the memory beyond parameters and optimizer state."""
_SOME_LENGTH = RunLength(total_steps=1000, steps_per_epoch=1000)
"""A learning-rate schedule may need the length of the run; memory and time of a step do not depend on it."""
_ONCE = (Phase.BUILD, Phase.LOAD, Phase.INIT)
"""Phases that occur once, before the step whose figures are used."""
_FILED = (Phase.LOAD, Phase.SAVE)
MakeExample = Callable[[RunConfig, int], Any]


@dataclass(frozen=True, slots=True)
class Simulated:
    """Memory and time of one rank's step."""

    ledger: Ledger
    flops_per_token: float | None
    """What the model's `flops_per_token` returns; None if it has none."""
    trail: list[tuple[Phase, int]] = field(default_factory=list)
    """(Phase, bytes in use) after every operation, from the build to a save; only if every layer was simulated."""
    sent_spec: Any = None
    """Shapes and dtypes of the tensors that a pipeline stage sends to the next; None without a pipeline."""
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
    budget: TimeBudget | None = None,
) -> Simulated:
    """Run two steps of `rank` of `ranks` on fake tensors, and return the memory and time of the second.

    `layers`: how many layers this rank has; the last 1/`layers` of the backward pass is the peak `backward.end`.
    `received`: the `sent_spec` of the stage before, for ranks that are not in the first pipeline stage. `detailed` adds
    the categories of the memory at each peak. Raise `TimeUpError` when `budget` is spent.
    """
    notes: list[str] = []
    with _time_up_as_itself(), ExitStack() as stack:
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
        watchers = (timing,) if budget is None else (timing, budget)
        recorder = MemoryRecorder(hardware.kind, allocator=CachingAllocator() if on_cuda else None, watchers=watchers)
        recorder.trail = [] if detailed else None
        mode = config.strategy.recompute.mode
        stack.enter_context(compiled_units(recorder, timing, notes.append))
        stack.enter_context(recorder.recording())
        streams = 0 if not on_cuda else 2 if config.strategy.graphs is True else 1  # 2: one is for graph capture
        workspace = torch.empty(streams * 2 * MATMUL_WORKSPACE, dtype=torch.uint8, device=world.device)
        micro_batches = config.strategy.pipeline.micro_batches
        batch = resolve_batch(config.batch, world.layout.data_parallel, micro_batches=micro_batches)
        engine = prepare_native(
            Preparation(
                config,
                world,
                model=model,
                loss_function=loss_function or configured_loss(config),
                length=_SOME_LENGTH,
                accumulation=batch.accumulation,
                example=make_example(config, batch.micro),
                log=notes.append,
            )
        )
        if engine.pipeline is not None:
            engine.pipeline.transport.expected_spec = received
        stack.enter_context(recorder.ignoring_shape_propagation())
        peaks: dict[str, dict[str, int]] = {}
        keeping = SimulatedCheckpoints(engine, recorder, config, cores=hardware.host_cores)
        if detailed:
            _look_at_peaks(recorder, engine, peaks)
        keeping.load()
        recorder.at_peak = None

        def enter_first(phase: Phase) -> None:
            if phase is Phase.STEP and detailed:
                _look_at_peaks(recorder, engine, peaks)
            recorder.enter(Phase.INIT if phase is Phase.STEP else phase)

        engine.on_phase = enter_first

        def step(count: int = batch.accumulation) -> None:
            engine.train_step([make_example(config, batch.micro) for _ in range(count)])

        # Schedules other than these accept only certain numbers of micro-batches.
        plain = engine.pipeline is None or config.strategy.pipeline.schedule in ("1f1b", "gpipe")
        step(1 if plain else batch.accumulation)
        if batch.accumulation == 1:  # otherwise all gradients exist after the first micro-batch
            recorder.end_at = recorder.backward_operations - recorder.backward_operations // max(layers, 1)
        timing.restart()
        recorder.peaks = defaultdict(Peak, {phase: recorder.peaks[phase] for phase in _ONCE if phase in recorder.peaks})
        recorder.trail = recorder.trail and [point for point in recorder.trail if point[0] in _ONCE]
        engine.on_phase = recorder.enter
        step()
        timing.stop()
        example = make_example(config, batch.micro)
        saved = keeping.save()
        numbers = _numbers(recorder, timing, engine, _tokens(example) * batch.accumulation) | saved
        numbers["micro_batches"] = batch.accumulation
        if isinstance(engine.master_weights, OffloadedParams):
            numbers |= _update(engine.master_weights.store, config, hardware, world.layout)
        if config.strategy.offload.params == "nvme":
            on_link = numbers.get(f"link.in.{PER_MICRO_BATCH}", 0.0) * hardware.pcie_gbps
            numbers[f"link.files.{PER_MICRO_BATCH}"] = on_link * min(ranks, hardware.per_host) / hardware.disk_gbps
        if config.strategy.compile.enabled and mode != "none":
            highest = max(value for key, value in numbers.items() if key.startswith("peak."))
            beyond = highest - numbers.get("peak.idle", 0.0)
            numbers["reserved"] = max(numbers["reserved"], highest + beyond * _REORDERED)
        numbers |= {f"at.{name}.{owner}": size for name, held in peaks.items() for owner, size in held.items()}
        numbers = completed(numbers, one_memory=not on_cuda)
        del workspace
        return Simulated(
            Ledger(numbers).settled(),
            _flops_per_token(engine, example),
            _in_order(recorder.trail or [], numbers),
            engine.pipeline.transport.sent_spec if engine.pipeline is not None else None,
            notes,
        )


def _numbers(recorder: MemoryRecorder, timing: Timing, engine: NativeEngine, tokens: int) -> dict[str, float]:
    numbers: dict[str, float] = dict(timing.numbers)
    numbers |= {f"peak.{phase}": peak.bytes for phase, peak in recorder.peaks.items()}
    numbers["peak.backward.end"] = recorder.end.bytes
    numbers["reserved"] = max(peak.reserved for peak in (*recorder.peaks.values(), recorder.end))
    if isinstance(engine.master_weights, OffloadedParams):
        store = engine.master_weights.store
        numbers["host_built"] = store.built_bytes()
        numbers["host_rooms"] = store.host_buffer_bytes()
        numbers["host_state"] = store.host_bytes() - store.host_buffer_bytes()
    if (held := activations_on_host(engine.model)) > 0:
        numbers["host_state"] = numbers.get("host_state", 0.0) + held
    numbers["tokens"] = tokens
    numbers["parameters"] = sum(param.numel() for param in engine.model.parameters())
    return numbers


def _update(store: Offload, config: RunConfig, hardware: Hardware, layout: Layout) -> dict[str, float]:
    """Return the `Ledger` figures of the update on the host, which is computed and not simulated."""
    homes = {home: [bucket for bucket in store.buckets if bucket.span.home == home] for home in ("cpu", "nvme")}
    on_host, in_files = (sum(bucket.numel for bucket in homes[home]) for home in ("cpu", "nvme"))
    targets = [target for home in homes.values() for bucket in home for target in bucket.targets]
    back = sum(target.numel() for target in targets if target.device.type != "cpu")
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=config.strategy.pipeline.micro_batches)
    wide = batch.accumulation > 1 or layout.replicas > 1 or config.strategy.stage == 3
    away = Away(on_host, in_files, back)
    work = host_work(away, config, hardware, layout, state=store.options.state_bytes, wide=wide)
    return work.to_dict(mode_of(config, layout, hardware.kind))


def _look_at_peaks(recorder: MemoryRecorder, engine: NativeEngine, peaks: dict[str, dict[str, int]]) -> None:
    """Fill `peaks` with the bytes of each category: now for the build, and at each later peak when it is reached."""
    owners = Owners(engine)

    def look(name: str, beyond: int, kernel: bool) -> None:
        # What a compiled forward pass has allocated so far is kept for the backward pass.
        whose = "kernel workspaces" if kernel else "activations" if name == Phase.FORWARD else "temporaries"
        peaks[name] = held = owners.share_out(recorder)
        held[whose] = held.get(whose, 0) + beyond

    recorder.at_peak = look
    # Of the peak of the build, the tensors that still exist are known; the rest was used to initialize them.
    built = owners.share_out(recorder)
    built = {owner: built[owner] for owner in ("parameters", "kernel workspaces") if owner in built}
    built["temporaries"] = recorder.peaks[Phase.BUILD].bytes - sum(built.values())
    peaks[Phase.BUILD] = built


def _in_order(trail: list[tuple[Phase, int]], numbers: dict[str, float]) -> list[tuple[Phase, int]]:
    """Return the points in the order of a resumed run, with the peaks of loading and of saving added."""
    if not trail:
        return []
    tops = {phase: [(phase, int(numbers[f"peak.{phase}"]))] for phase in _FILED if f"peak.{phase}" in numbers}
    loads, saves = ([*(p for p in trail if p[0] is phase), *tops.get(phase, [])] for phase in _FILED)
    first = [point for point in trail if point[0] is Phase.BUILD]
    return [*first, *loads, *(p for p in trail if p[0] not in (Phase.BUILD, *_FILED)), *saves]


def _tokens(example: Any) -> int:
    """Return the tokens of a micro-batch; its samples if it has no tokens."""
    if isinstance(example, dict) and "input_ids" in example:
        return int(example["input_ids"].numel())
    first = example[0] if isinstance(example, (tuple, list)) else example
    return int(first.shape[0]) if isinstance(first, torch.Tensor) else 1


def _flops_per_token(engine: NativeEngine, example: Any) -> float | None:
    count = getattr(engine.model, "flops_per_token", None)
    if count is None or not isinstance(example, dict) or "input_ids" not in example:
        return None
    return float(count(example["input_ids"].shape[-1]))
