"""The Runner: builds a run, and decides when it trains, validates and saves. The engine implements a training step."""

from __future__ import annotations

import atexit
import gc
import json
import platform
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.atomic_write import write_atomically
from plait.config import (
    BackendArgument,
    BatchArgument,
    CheckpointArgument,
    DataArgument,
    DeviceArgument,
    DpoArgument,
    GrpoArgument,
    HookArgument,
    Layout,
    LogArgument,
    LoraArgument,
    MetricArgument,
    ModelArgument,
    OptimArgument,
    Parsed,
    PhaseArgument,
    PlanArgument,
    PosttrainArgument,
    PpoArgument,
    PrecisionArgument,
    ProfileArgument,
    ResolvedBatch,
    RewardArgument,
    RolloutArgument,
    RunConfig,
    ScheduleArgument,
    SftArgument,
    StrategyArgument,
    StrategyConfig,
    TrainArgument,
    check,
    parse,
    parse_sections,
    refuse_unknown_keywords,
    resolve_layout,
)
from plait.data import MicroBatch
from plait.distributed import Ranks, World, detect_ranks, on_main, open_world
from plait.engine import Engine, LossFunction, Preparation, RunLength, prepare_engine, stage_of
from plait.engine import evaluate as evaluate_batches
from plait.errors import ConfigError, PlaitError, Problem, TrainingError, in_one_line
from plait.launch import Phase, StepMemory
from plait.monitor import Event, EventKind, MessageEvent, Monitor, build_monitor, report_progress
from plait.plan import find_hardware
from plait.trainer.hooks import Hook, HookTable, build_hooks
from plait.trainer.loop import train_loop
from plait.trainer.memory_plan import MemoryPlan
from plait.trainer.metrics import Metric, build_metrics
from plait.trainer.saving import RunSaver, WorkDir
from plait.trainer.sources import Data, GivenObjects, batch_of, is_section, make_loader, refuse_second_shift, settle
from plait.trainer.watch import STOPPED, StepWatch, StopSignals, record_samples, warn_of_lengths

# The table at the start of a run, and the file `report.json` at its end.


_STAGES = {
    0: "replicated (DDP)",
    1: "ZeRO-1: optimizer sharded",
    2: "ZeRO-2: optimizer and gradients sharded",
    3: "ZeRO-3 / FSDP: everything sharded",
}


def describe_run(runner: Runner) -> dict[str, Any]:
    """Return the fields of the event `RUN_START`: the table at the start of a run.

    Its `segment` is a short name of the strategy and the ranks from here on (`zero3 · 2 ranks`): after a resume they
    may be others.
    """
    config, world, batch = runner.config, runner.world, runner.batch
    model = runner.engine.model
    total, trained = runner.engine.parameter_count()
    stage = stage_of(config.strategy) if world.layout.replicas > 1 else None
    rows = [
        (
            "model",
            f"{_model_name(model)}, {_si(total)} parameters" + (f", {_si(trained)} trained" if trained < total else ""),
        ),
        ("device", _devices(world)),
        ("strategy", _strategy(runner, stage)),
        ("precision", _precision(runner)),
        (
            "batch",
            f"{batch.total} = {batch.micro} micro × {batch.accumulation} accumulation "
            f"× {world.layout.data_parallel} data-parallel",
        ),
        ("length", _length(runner)),
        (
            "optimizer",
            config.optim.type
            + (f", lr {config.optim.lr:g}" if config.optim.lr is not None else "")
            + (f", {config.schedule.type}" if config.schedule else ""),
        ),
        ("work dir", str(config.work_dir)),
        ("torch", f"{torch.__version__}, Python {platform.python_version()}, seed {config.seed}"),
    ]
    if runner.resumed_from is not None:
        rows.append(("resumed", f"{runner.resumed_from.name}, epoch {runner.epoch + 1}, step {runner.step}"))
    name = _segment(stage, world.layout)
    return {
        "title": f"plait · {_model_name(model)}",
        "rows": rows,
        "segment": f"{name} · {world.size} rank{'s' if world.size > 1 else ''}",
        "resumed": runner.resumed_from is not None,
        "max_steps": runner.total_steps,
    }


def write_report(path: Path, ended: dict[str, Any]) -> str | None:
    """Write `report.json`. Return the error, if any, instead of raising it: the run's own outcome matters more."""
    try:
        write_atomically(path, json.dumps(ended, indent=1) + "\n")
    except OSError as error:
        return f"{path.name} was not written: {error.strerror}"
    return None


def _segment(stage: int | None, layout: Layout) -> str:
    """Return the short name of a strategy: `ddp`, `zero3`, `tp2`, `zero1 × pp2 × tp2`."""
    axes = [f"{axis}{size}" for axis, size in layout.sizes().items() if size > 1 and not axis.startswith("dp_")]
    data = [] if stage is None and axes else ["single" if stage is None else "ddp" if stage == 0 else f"zero{stage}"]
    return " × ".join([*data, *axes])


_AXES = {
    "pp": "pipeline parallel {} ({})",
    "ep": "expert parallel {}",
    "cp": "context parallel {} ({})",
    "tp": "tensor parallel {}{}",
}


def _axes(strategy: StrategyConfig, layout: Layout) -> list[str]:
    details = {
        "pp": str(strategy.pipeline.schedule),
        "ep": "",
        "cp": strategy.context.kind,
        "tp": " (sequence parallel)" if strategy.tensor.sequence_parallel else "",
    }
    sizes = layout.sizes()
    return [text.format(sizes[axis], details[axis]) for axis, text in _AXES.items() if sizes[axis] > 1]


def _strategy(runner: Runner, stage: int | None) -> str:
    strategy, layout = runner.config.strategy, runner.world.layout
    axes = _axes(strategy, layout)
    entries = [*axes, *([] if stage is None else [_STAGES[stage]])] or ["one process"]
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        entries.append(f"{layout.dp_replicate} replicas × {layout.dp_shard} shards (HSDP)")
    if strategy.engine != "native":
        name = strategy.engine_name
        entries.insert(0, name if strategy.plugin is None else f"{name} ({strategy.plugin})")
    if strategy.offload.on:
        tiers = {"optimizer": strategy.offload.optimizer, "weights": strategy.offload.params}
        names = {"cpu": "host memory", "nvme": "files"}
        entries += [f"{what} in {names[tier]}" for what, tier in tiers.items() if tier != "none"]
    if strategy.recompute.mode != "none":
        entries.append(f"recompute {strategy.recompute.mode}")
    if strategy.compile.enabled:
        entries.append(f"compile ({strategy.compile.backend})")
    return ", ".join(entries)


def _precision(runner: Runner) -> str:
    precision = runner.config.precision
    if precision.compute in ("fp32", "tf32"):
        return precision.compute
    master = "fp32 weights" if precision.master else f"{precision.compute} weights"
    return f"{precision.compute} compute, {precision.reduce} reduction, {master}"


def _length(runner: Runner) -> str:
    train, per_epoch = runner.config.train, runner.steps_per_epoch
    epoch = "" if per_epoch is None else f", {_several(per_epoch, 'step')} per epoch"
    if train.max_steps is not None:
        return _several(train.max_steps, "step") + epoch
    return _several(train.max_epochs, "epoch") + epoch


def _several(count: int | None, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _model_name(model: nn.Module) -> str:
    # `fully_shard` replaces the class of a model by FSDP<Name>.
    return type(model).__name__.removeprefix("FSDP")


def _devices(world: World) -> str:
    started = f", started by {world.ranks.launcher}" if world.ranks.launcher in ("slurm", "mpi") else ""
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
    elif world.device.type == "cpu":
        threads = torch.get_num_threads()
        name = f"CPU, {threads} thread{'s' if threads > 1 else ''} each"
    else:
        name = world.device.type
    return f"{world.size} × {name}{started}"


def _si(number: float) -> str:
    for unit in ("", "K", "M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}B"


# Validation and test: a pass over a loader's data.


def evaluate(
    engine: Engine,
    steps: Iterable[Sequence[MicroBatch]],
    metrics: Sequence[Metric],
    *,
    role: str,
    limit: int | None = None,
) -> tuple[dict[str, float], int]:
    """Return the mean loss and all metrics over the data, each sample counted once, and the number of batches.

    Ranks without a sample of their own in the last batch run a filler with weight 0, so that the collectives of a
    sharded model match.
    """
    batches = 0

    def micro_batches() -> Iterator[MicroBatch]:
        nonlocal batches
        for batches, step in enumerate(islice(steps, limit), 1):  # noqa: B007
            yield from step

    # A loader gives every rank the same number of micro-batches, fillers included.
    results = evaluate_batches(engine, micro_batches(), metrics, role=role, even=True)
    return results, batches


# The numbers of ranks with which an elastic run can resume.


def possible_sizes(config: RunConfig, ranks: Ranks, data: Any, batch: ResolvedBatch) -> list[int]:
    """Return the numbers of ranks for which the layout is valid and the global batch stays the same.

    Each number is checked with the functions that resolve layout and batch at the start of a run. The list is empty if
    the launcher does not restart ranks.
    """
    sizes = range(1, ranks.most + 1)
    return [size for size in sizes if _total(config, size, min(ranks.local_size, size), data) == batch.total]


def _total(config: RunConfig, size: int, local_size: int, data: Any) -> int | None:
    """Return the global batch for this number of ranks; None if such a run is not possible."""
    try:
        layout = resolve_layout(config.strategy, size=size, local_size=local_size)
        batch = batch_of(config, layout.data_parallel, data)
        if layout.pp > 1:
            from plait.distributed import check_pipeline

            check_pipeline(config.strategy.pipeline, layout.pp, batch.accumulation)
    except PlaitError:
        return None
    return batch.total


_NOT_YET = "the Runner has no {} yet: call runner.setup(), as train(), validate() and test() do"


class Runner:
    """Trains, validates and tests one model, according to one run description.

    `model` is a module, a function that makes one, or a section; the data are torch data sets, DataLoaders,
    iterables, or sections. The lists `hooks` and `metrics` may mix objects, sections and names. Every other keyword is
    a key of the run description (docs/configuration.md). A section is an object (`plait.Strategy(zero=3)`), a mapping
    (`{"zero": 3}`), a short word for sections that have one (`"zero3"`), or the user's own class or function
    (docs/write-your-own.md). None is the same as leaving a keyword out.
    """

    @refuse_unknown_keywords
    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | ModelArgument | None = None,
        data: Data | DataArgument | None = None,
        *,
        val_data: Data | DataArgument | None = None,
        test_data: Data | DataArgument | None = None,
        metrics: Sequence[Metric | MetricArgument] = (),
        loss_fn: LossFunction | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        hooks: Sequence[Hook | HookArgument] = (),
        model_inputs: int | Sequence[str] | None = None,
        batch: BatchArgument | None = None,
        optim: OptimArgument | None = None,
        schedule: ScheduleArgument | None = None,
        precision: PrecisionArgument | None = None,
        strategy: StrategyArgument | None = None,
        train: TrainArgument | None = None,
        checkpoint: CheckpointArgument | None = None,
        log: LogArgument | None = None,
        plan: PlanArgument | None = None,
        profile: ProfileArgument | None = None,
        work_dir: str | PathLike[str] | None = None,
        seed: int | None = None,
        deterministic: bool | None = None,
        device: DeviceArgument | None = None,
        backend: BackendArgument | None = None,
        timeout_s: float | None = None,
        trust_code: bool | None = None,
        phase: PhaseArgument | None = None,
        posttrain: PosttrainArgument | None = None,
        lora: LoraArgument | None = None,
        sft: SftArgument | None = None,
        reward: RewardArgument | None = None,
        dpo: DpoArgument | None = None,
        rollout: RolloutArgument | None = None,
        ppo: PpoArgument | None = None,
        grpo: GrpoArgument | None = None,
    ) -> None:
        objects: dict[str, Any] = {"model": model, "data": data, "val_data": val_data, "test_data": test_data}
        described = {key: objects.pop(key) for key in [*objects] if is_section(objects[key])}
        made_hooks = [hook for hook in hooks if isinstance(hook, Hook)]
        made_metrics = [metric for metric in metrics if isinstance(metric, Metric)]
        parsed = parse_sections(
            **described,
            hooks=[hook for hook in hooks if not isinstance(hook, Hook)] or None,
            metrics=[metric for metric in metrics if not isinstance(metric, Metric)] or None,
            model_inputs=model_inputs,
            work_dir=work_dir,
            seed=seed,
            deterministic=deterministic,
            device=device,
            backend=backend,
            timeout_s=timeout_s,
            batch=batch,
            optim=optim,
            schedule=schedule,
            precision=precision,
            strategy=strategy,
            train=train,
            checkpoint=checkpoint,
            log=log,
            plan=plan,
            profile=profile,
            trust_code=trust_code,
            phase=phase,
            posttrain=posttrain,
            lora=lora,
            sft=sft,
            reward=reward,
            dpo=dpo,
            rollout=rollout,
            ppo=ppo,
            grpo=grpo,
        )
        given = GivenObjects(**objects, loss_fn=loss_fn, collate_fn=collate_fn, hooks=made_hooks, metrics=made_metrics)
        self.begin(parsed, given)

    @classmethod
    def from_config(
        cls,
        source: str | Path | Mapping[str, Any],
        overrides: Sequence[str] = (),
        *,
        metrics: Sequence[Metric] = (),
        hooks: Sequence[Hook] = (),
    ) -> Runner:
        """Return the Runner of a run description: a file or mapping, with dotted overrides (`optim.lr=3e-4`)."""
        runner = cls.__new__(cls)
        runner.begin(parse(source, overrides), GivenObjects(hooks=hooks, metrics=metrics))
        return runner

    def begin(self, parsed: Parsed, given: GivenObjects) -> None:
        """Store a run description and the objects given beside it. Subclasses call it from their own constructors.

        It builds nothing; `setup` does.
        """
        parsed, given = settle(parsed, given)
        self.parsed = parsed
        self.config: RunConfig = parsed.config
        self.given = given
        """Model, data, hooks and metrics that were given as objects."""
        if self.config.strategy.auto:
            message = "`auto` is resolved by `plait train` before the ranks start, and this run is not"
            remedy = "Start it with `plait train --nproc N`, or write what `plait plan --search` shows."
            raise ConfigError(Problem("strategy.auto", message, remedy))
        if self.config.plan.hardware is not None:
            # A wrong name is an error now, not a run without a plan.
            find_hardware(self.config.plan.hardware, key="plan.hardware")
        check(self.config, has_val=self.has("val_data"), require_length=False, origins=parsed.origins)
        if given.model is None and self.config.model is None:
            raise ConfigError(Problem("model", "missing", "Give a module, or a section with a type."))
        if given.model is not None and not callable(given.model):  # a module is callable too
            message = f"expected a model, found {type(given.model).__name__}"
            raise ConfigError(Problem("model", message, "Give a module, a function that makes one, or a section."))
        self._work_dir = WorkDir(self.config.work_dir)
        self.metrics = [*build_metrics(self.config.metrics), *given.metrics]
        self.hooks = HookTable([*build_hooks(self.config.hooks, self.config.profile), *given.hooks])
        self.saver = RunSaver(self)
        self.memory_plan = MemoryPlan(self)
        self.step_memory = StepMemory()
        """GPU memory after each logged step."""
        self.step_time: float | None = None
        """Seconds per step, as last logged."""
        self.epoch = 0
        """Epochs that are complete."""
        self.step_in_epoch = 0
        """Steps done in the current epoch."""
        self.began: tuple[int, int, int] | None = None
        """Step, epoch and step in the epoch at the start of the latest step."""
        self.stop_reason: str | None = None
        self.watch: StepWatch | None = None
        """Watches the steps of the current call of `train`, or of the last one."""
        self.figures: dict[str, float] = {}
        """Numbers that hooks add to the next log line."""
        self._world: World | None = None
        self._engine: Engine | None = None
        self._monitor: Monitor | None = None
        self._eval_loaders: dict[str, Any] = {}
        self._closed = False

    def has(self, role: str) -> bool:
        """Return whether `data`, `val_data` or `test_data` (the role) is given."""
        return getattr(self.config, role) is not None or getattr(self.given, role) is not None

    # ---- building, in the order in which it happens

    def setup(self) -> None:
        """Build everything: plan → world → data → model → prepare → resume. Every rank must call it.

        `train`, `validate` and `test` call it if the user did not; a second call does nothing. It makes `world`,
        `engine` and `step` available.
        """
        if self._closed:  # without the process group, each rank would train on its part of the data alone
            raise TrainingError("this Runner is closed: train, validate and test inside `with`, or make another")
        if self._engine is not None:
            return
        # The plan first: it uses a fake process group, which a process that has joined a real one cannot.
        # Then the world: everything below depends on the rank.
        self._plan_and_join()
        self.memory_plan.share()  # whether the run fits; nothing has been built or written yet
        # The data before the model: the schedule needs their length, automatic recomputation measures one of their
        # batches, and errors in the data are raised before minutes are spent on loading weights.
        self._open_data()
        self._open_log()
        report_progress(self.config.log, self.world.rank, "building the model")
        self._engine = self.prepare()
        # A pipeline has split the model into stages: drop the reference to the whole.
        self.given = replace(self.given, model=None)
        refuse_second_shift(self._engine.model, self.config)
        self._engine.describe_samples = partial(record_samples, self)
        # Resume last: it writes into the engine's state and sets the position in the data.
        self.enter(Phase.LOAD)
        self.resumed_from = self.saver.resume()
        self._follow_phases(self._engine)
        self.enter(Phase.IDLE)

    def _plan_and_join(self) -> None:
        if self._world is not None:
            return
        ranks = detect_ranks()
        if self.memory_plan.is_planned_here():
            report_progress(self.config.log, ranks.rank, "planning the run")
        self.memory_plan.make()
        if ranks.size > 1:
            report_progress(self.config.log, ranks.rank, f"joining {ranks.size} ranks")
        self._world = open_world(self.config)
        if self._world.owns_processes:
            atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        # A process group joins its threads when its last reference is dropped. If that happens while the interpreter
        # shuts down, they may wake up in a half-destroyed one and abort it.
        self.close()
        self._engine = None
        gc.collect()

    def _open_data(self) -> None:
        config, world, data = self.config, self.world, self.given.data
        world.heartbeat.set_report_folder(str(Path(config.work_dir).absolute()))
        self.batch = batch_of(config, world.layout.data_parallel, data, split=world.ranks.split)
        world.heartbeat.set_possible_sizes(possible_sizes(config, world.ranks, data, self.batch))
        report_progress(config.log, world.rank, "reading the data")
        self.loader = self.make_loader("data")
        self.steps_per_epoch: int | None = None if self.loader is None else self.loader.steps_per_epoch

    def _open_log(self) -> None:
        self._make_work_dir(self.world)
        self._monitor = build_monitor(self.config.log, Path(self.config.work_dir), self.world.rank)
        weakref.finalize(self, self._monitor.close).atexit = False  # few scripts close a Runner

    def _make_work_dir(self, world: World) -> None:
        """Create the folder on every host that ranks run on; if one rank cannot write to it, all raise."""
        failure: PlaitError | None = None
        try:
            self._work_dir.make()
        except ConfigError as error:
            failure = error
        failed = {rank: text for rank, text in enumerate(world.gather(failure and in_one_line(failure))) if text}
        if failed:
            rank, text = next(iter(failed.items()))
            where = f" (rank {rank})" if world.size > 1 else ""
            raise ConfigError(Problem("work_dir", f"{text.removeprefix('work_dir: ')}{where}", "Choose another one."))

    def _follow_phases(self, engine: Engine) -> None:
        if self.world.heartbeat.is_read:  # otherwise each step would write six phases that nothing reads
            enter = self.world.heartbeat.enter
            engine.on_phase = lambda phase: enter(phase, engine.steps)

    # ---- what subclasses may override

    def prepare(self) -> Engine:
        """Build the model and return its engine; a step of `setup`."""
        return prepare_engine(self.preparation(example=self._example()))

    def preparation(self, *, example: Any = None) -> Preparation:
        """Return the arguments of `prepare_engine`; `example` is a micro-batch's inputs for measurements, or None."""
        return Preparation(
            self.config,
            self.world,
            model=self.given.model,
            loss_function=self.given.loss_fn,
            length=RunLength(self.total_steps, self.steps_per_epoch),
            accumulation=self.batch.accumulation,
            example=example,
            log=self._log,
        )

    def make_loader(self, role: str) -> Any:
        """Return the loader of `data`, `val_data` or `test_data`; None without such data."""
        given = getattr(self.given, role)
        return make_loader(role, self.config, self.world, self.batch, given=given, collate=self.given.collate_fn)

    def measure(self, role: str, limit: int | None) -> tuple[dict[str, float], int]:
        """Evaluate up to `limit` batches of `val_data` or `test_data`; return the metrics and the number of batches."""
        return evaluate(self.engine, self.eval_loader(role).epoch(0), self.metrics, role=role, limit=limit)

    def _example(self) -> Any:
        strategy = self.config.strategy
        measured = strategy.recompute.mode == "auto" or strategy.pipeline.split == "time"
        if not measured or self.loader is None:
            return None
        return next(iter(self.loader.epoch(0, 0)))[0].inputs

    # ---- available after `setup`

    @property
    def world(self) -> World:
        """The processes of this run."""
        if self._world is None:
            raise TrainingError(_NOT_YET.format("world"))
        return self._world

    @property
    def engine(self) -> Engine:
        """The engine: the prepared model, its optimizer and its schedule."""
        if self._engine is None:
            raise TrainingError(_NOT_YET.format("engine"))
        return self._engine

    @property
    def step(self) -> int:
        """Optimizer steps done so far."""
        if self._engine is None:
            raise TrainingError(_NOT_YET.format("step"))
        return self._engine.steps

    def eval_loader(self, role: str) -> Any:
        """Return the loader of `val_data` or `test_data`, made once."""
        if role not in self._eval_loaders:
            self._eval_loaders[role] = self.make_loader(role)
        return self._eval_loaders[role]

    @property
    def by_epoch(self) -> bool:
        """Whether intervals (`val_every`, `checkpoint.every`, …) count epochs."""
        train = self.config.train
        return train.by_epoch if train.by_epoch is not None else train.max_steps is None

    @property
    def total_steps(self) -> int | None:
        """The step at which the run ends, if that is known."""
        train = self.config.train
        if train.max_steps is not None:
            return train.max_steps
        if train.max_epochs is None or self.steps_per_epoch is None:
            return None
        # Counted from the current position: steps before a resume may have had another batch size.
        done = 0 if self._engine is None else self._engine.steps
        return done + (train.max_epochs - self.epoch) * self.steps_per_epoch - self.step_in_epoch

    # ---- what a user calls

    def train(self) -> None:
        """Train to the end, from the start or from the checkpoint that `checkpoint.resume` names."""
        if not self.has("data"):
            raise ConfigError(Problem("data", "missing; nothing to train on", "Give data, or a section `data`."))
        if self.config.train.max_steps is None and self.config.train.max_epochs is None:
            raise ConfigError(Problem("train", "the run has no end", "Set train.max_steps or train.max_epochs."))
        if not self._closed and (self._engine is None or self._engine.steps == 0):
            self._plan_and_join()
            self.saver.refuse_to_overwrite()  # before the log of an earlier run is written to
        self.setup()
        engine = self.engine
        if self.has("val_data"):
            self.eval_loader("val_data")  # its errors show now, not after the first epoch
        self.saver.check_folder()
        on_main(self.world, lambda: self._work_dir.acquire(self.config))
        self.stop_reason = self.watch = None
        self.emit(EventKind.RUN_START, **describe_run(self))
        self.memory_plan.log()
        warn_of_lengths(self)
        start, first, reason = time.perf_counter(), engine.steps, "failed"
        measured: dict[str, Any] = {}
        try:
            with StopSignals(self.stop):
                train_loop(self)
                reason = self.stop_reason or "finished"
                if engine.steps == first and reason not in STOPPED and self.world.is_main:
                    limits = "`train.max_steps`, `max_epochs` or `stop_after`"
                    text = f"nothing left to do at step {first}: raise {limits} to continue"
                    self.emit(EventKind.MESSAGE, level="info", text=text)
                measured = self._measured()
                if self.config.checkpoint.last:
                    self.saver.save(last=True)
                self.saver.wait()
        except BaseException as error:
            reason = f"failed with {type(error).__name__}"
            raise
        finally:
            seconds = time.perf_counter() - start
            ended = {"reason": reason, "seconds": seconds, "steps": engine.steps - first, **measured}
            if self.watch is not None and self.watch.skipped:
                ended["skipped"] = self.watch.skipped
            if self.world.is_main and (lost := write_report(Path(self.config.work_dir) / "report.json", ended)):
                self.emit(EventKind.MESSAGE, level="warning", text=lost)
            self.emit(EventKind.RUN_END, **ended)
            self._work_dir.release()

    def _measured(self) -> dict[str, Any]:
        """Return the measurements of a finished run; every rank must call it."""
        measured = self.memory_plan.compare()
        bubble = self.engine.bubble()
        if bubble is not None:
            measured["pipeline"] = asdict(bubble)
            if self.world.is_main:
                self.emit(EventKind.MESSAGE, level="info", text=str(bubble))
        return measured

    def validate(self) -> dict[str, float]:
        """Evaluate on `val_data` and return the metrics."""
        return self._validate("val_data", EventKind.VALIDATE)

    def test(self) -> dict[str, float]:
        """Evaluate on `test_data` (or `val_data` if there is none) and return the metrics."""
        return self._validate("test_data" if self.has("test_data") else "val_data", EventKind.TEST)

    def _validate(self, role: str, event: EventKind) -> dict[str, float]:
        if not self.has(role):
            remedy = f"Give {role}, or a section of that name."
            raise ConfigError(Problem(role, "missing; no data to evaluate on", remedy))
        self.setup()
        self.engine.sync_buffers()
        self.eval_loader(role)  # created outside the measured time
        validating = event is EventKind.VALIDATE
        for hook in self.hooks.before_validate if validating else self.hooks.before_test:
            hook(self)
        start = time.perf_counter()
        limit = self.config.train.val_batches if validating else None
        self.enter(Phase.EVALUATE)
        with self.engine.evaluation_weights():
            metrics, batches = self.measure(role, limit)
        self.enter(Phase.IDLE)
        seconds, max_epochs = time.perf_counter() - start, self.config.train.max_epochs
        self.emit(event, metrics=metrics, batches=batches, time=seconds, by_epoch=self.by_epoch, max_epochs=max_epochs)
        for hook in self.hooks.after_validate if validating else self.hooks.after_test:
            hook(self, metrics)
        return metrics

    def stop(self, reason: str) -> None:
        """Ask every rank to end training: at once after a validation or epoch, otherwise within a few steps.

        It may be called on any rank, and from a signal handler.
        """
        self.stop_reason = self.stop_reason or reason
        self.engine.request_stop()

    def stopping(self) -> bool:
        """Return whether any rank asked to stop, and set `stop_reason`. A collective: every rank must call it."""
        reasons = [reason for reason in self.world.gather(self.stop_reason) if reason is not None]
        if reasons:
            self.stop_reason = reasons[0]
        return bool(reasons)

    def close(self) -> None:
        """Close loaders, checkpoint writers, log sinks and the process group."""
        self._closed = True
        for loader in (getattr(self, "loader", None), *self._eval_loaders.values()):
            if loader is not None:
                loader.close()
        self.saver.close()
        if self._monitor is not None:
            self._monitor.close()
        if self._world is not None:
            self._world.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- called by the loop, hooks and savers

    def enter(self, phase: Phase) -> None:
        """Write this rank's phase to its heartbeat. After a failure, the launcher's report names the last phase."""
        self.world.heartbeat.enter(phase, 0 if self._engine is None else self._engine.steps)

    def set_position(self, epoch: int, step_in_epoch: int, *, samples: int) -> None:
        """Set the position in the data, given in steps of `samples` samples each."""
        if samples != self.batch.total:
            done = step_in_epoch * samples
            per_epoch = None if self.loader is None else self.loader.samples_per_epoch
            if per_epoch is not None and done >= per_epoch:  # the last batch of an epoch may be short
                epoch, done = epoch + 1, 0
            if done % self.batch.total:
                raise TrainingError(
                    f"the checkpoint was saved {done} samples into epoch {epoch + 1}, which is not a multiple of "
                    f"batch.total={self.batch.total}; keep batch.total={samples}, or start at an epoch's end"
                )
            step_in_epoch = done // self.batch.total
        self.epoch, self.step_in_epoch = epoch, step_in_epoch

    def emit(self, event: EventKind, **data: Any) -> None:
        """Send an event to the log sinks."""
        assert self._monitor is not None
        step = 0 if self._engine is None else self._engine.steps
        if event is EventKind.TRAIN:
            self.step_time = data.get("time", self.step_time)
        # The epoch of the latest step, counted from 1.
        epoch = self.epoch + 1 if self.step_in_epoch else max(self.epoch, 1)
        self._monitor.emit(Event(event, step, epoch, data))

    def _log(self, text: str) -> None:
        self.emit(EventKind.MESSAGE, level="info" if isinstance(text, MessageEvent) else "warning", text=text)

    def warn(self, text: str) -> None:
        """Log a warning."""
        self.emit(EventKind.MESSAGE, level="warning", text=text)

    def tick(self, step: int) -> None:
        """Advance the progress bar."""
        assert self._monitor is not None
        self._monitor.tick(step)
