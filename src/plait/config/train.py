"""`train`, `batch`, `checkpoint`, `log`, `hooks`, `metrics`, `profile`, `plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, PositiveFloat, Tag

from plait.config.base import Many, NonNegativeInt, PathText, PositiveInt, Section, Shorthand, Size
from plait.config.part import BUILTIN_TAG, CUSTOM_TAG, CustomPart, ImportedPart, builtin_or_custom, name_or_custom
from plait.config.text import listed
from plait.errors import ConfigError, Problem


class BatchConfig(Section):
    """`total = micro × accumulation × data-parallel size`: any two give the third."""

    total: Size | None = None
    """Samples per optimizer step, over all ranks."""
    micro: Size | None = None
    """Samples per forward/backward pass of one rank."""
    accumulation: Size | None = None
    """Forward/backward passes per optimizer step."""


def _off(value: Any) -> Any:
    """Return `off` for False: YAML reads the word `off` as false."""
    return "off" if value is False else value


class GuardConfig(Section):
    """A step with a non-finite loss or gradient is skipped on every rank."""

    enabled: bool = True
    max_skips: PositiveInt = 20
    """Skipped steps in a row after which the run stops."""
    window: PositiveInt = 40
    """The number of latest steps of which `max_share` is a share."""
    max_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """The run fails where more than this share of the latest steps, or of the whole run, was skipped."""
    spike: PositiveFloat | None = 20.0
    """Warn about a loss that is above the median of the last 100 by this multiple of their usual deviation. null: no
    warning."""


class CustomLoss(CustomPart):
    """A custom loss of (outputs, batch) and the further keys, which returns a mean, or a sum with its count."""

    plugin_kind = "loss"


class TrainConfig(Section):
    """Length, validation and clipping."""

    by_epoch: bool | None = None
    """Whether `val_every` and `checkpoint.every` count epochs. Absent: as `max_epochs` or `max_steps` is set."""
    max_epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    stop_after: PositiveInt | None = None
    """Stop and save at this step, before the end; a later run can resume from there."""
    val_every: PositiveInt | None = None
    """Absent: at the end of every epoch, or at the end of the run when counting steps."""
    val_batches: PositiveInt | None = None
    """The most batches per validation."""
    clip_norm: PositiveFloat | None = None
    clip_value: PositiveFloat | None = None
    check_rows: bool = True
    """Before the first step, check with a few short forward passes that no document of a packed row sees another one,
    and that rows that are split over ranks are causal."""
    guard: GuardConfig = Field(default_factory=GuardConfig)
    audit: Annotated[Literal["off", "warn", "error", "strict"], BeforeValidator(_off)] = "error"
    """What happens if, in the first step, a parameter has no optimizer, is not finite or differs between replicas.
    `error`: the run stops, and gradients that are zero are named in a warning. `strict`: these stop it too. `warn`:
    nothing does."""
    loss: CustomLoss | None = None
    """The loss, a function of (outputs, batch). Absent: what the model returns."""


class BestConfig(Section):
    """Which validation is the best."""

    metric: str = "loss"
    mode: Literal["min", "max"] = "min"


class FolderStorageConfig(Section):
    """Another folder, on another disk or file system."""

    builds = "plait.checkpoint.storage:folder_storage"

    type: Literal["folder"] = "folder"
    path: PathText
    """The folder, which belongs to one run."""


class CustomStorage(CustomPart):
    """A custom storage, in which files are written, read, listed and deleted; see write-your-own.md."""

    plugin_kind = "storage"
    builtin = ("folder",)


StorageConfig = Annotated[
    Annotated[FolderStorageConfig, Tag(BUILTIN_TAG)] | Annotated[CustomStorage, Tag(CUSTOM_TAG)],
    Discriminator(builtin_or_custom(CustomStorage)),
]


class CheckpointConfig(Section):
    """When to save, which checkpoints to keep, and what to resume from."""

    every: PositiveInt | None = None
    """In epochs or steps, as `train.by_epoch` says. Absent: only at the end."""
    keep: PositiveInt = 3
    """How many of the newest checkpoints are kept; the best one is kept too."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of this step are never removed."""
    last: bool = True
    """Save at the end of the run."""
    max_failures: NonNegativeInt = 1
    """How many saves in a row may fail; one more, or the last of the run, ends it with an error."""
    best: BestConfig | None = None
    resume: PathText | None = None
    """A checkpoint folder, or `auto`: the newest one of `work_dir`, if there is one."""
    partial: Many[str] = ()
    """Patterns of names (`model.head.*`, `optim.*`) that may be missing, unexpected or of another shape."""
    async_save: bool = False
    """Copy the state to host memory and write it while training continues."""
    trainable_only: bool = False
    """Leave out parameters that are not trained; on resuming they come from the `model` section, and are compared."""
    storage: StorageConfig | None = None
    """Each complete checkpoint is copied there, and read from there where `work_dir` has none as new."""
    node_local: bool = False
    """Each node keeps the shards of its ranks in its own folder; on resuming they are sent where they are needed."""


class CustomSink(CustomPart):
    """A custom log sink, called with the `work_dir` and the further keys; see `plait.Sink`."""

    plugin_kind = "sink"
    builtin = ("jsonl", "csv", "tensorboard", "wandb", "html")


SinkConfig = Annotated[
    Annotated[Literal["jsonl", "csv", "tensorboard", "wandb", "html"], Tag(BUILTIN_TAG)]
    | Annotated[CustomSink, Tag(CUSTOM_TAG)],
    Discriminator(name_or_custom(CustomSink)),
]


class LogConfig(Section):
    """What is logged, and where."""

    every: PositiveInt = 10
    """Steps between two log lines."""
    console: Literal["auto", "bar", "plain", "none"] = "auto"
    """`auto`: a progress bar on a terminal, plain lines in a pipe."""
    sinks: Many[SinkConfig] = ("jsonl",)
    wandb_project: str | None = None


class EmaConfig(Section):
    """An exponential moving average of the weights, used in validation and saved with them."""

    builds = "plait.trainer.hooks:Ema"

    type: Literal["ema"] = "ema"
    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    every: PositiveInt = 1


class EarlyStopConfig(Section):
    """Stop when a metric no longer improves."""

    builds = "plait.trainer.hooks:EarlyStop"

    type: Literal["early_stop"] = "early_stop"
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    patience: PositiveInt = 3
    """How many validations in a row may bring no improvement."""
    min_delta: Annotated[float, Field(ge=0.0)] = 0.0


class RollbackConfig(Section):
    """Where the loss spikes and stays high, roll back to a checkpoint, and continue with the next data."""

    builds = "plait.trainer.hooks:Rollback"

    type: Literal["rollback"] = "rollback"
    metric: Literal["loss", "grad_norm"] = "loss"
    """The metric, checked at every step."""
    threshold: PositiveFloat = 8.0
    """A spike is above the median of the last `window` steps by this multiple of their usual deviation."""
    window: Annotated[int, Field(ge=4)] = 100
    """Spikes are detected once half of the window is known."""
    patience: PositiveInt = 3
    """Roll back after this number of spikes in a row: a single one may come from the batch, not from the model."""
    most: PositiveInt = 5
    """The most rollbacks; the next one ends the run."""


class ImportedHook(ImportedPart):
    """The older form of a custom hook."""

    priority: NonNegativeInt = 50
    """Hooks with a lower number are called first."""


class CustomHook(CustomPart):
    """A custom hook: a class derived from `plait.Hook`, or what makes one, called with the further keys."""

    plugin_kind = "hook"
    builtin = ("ema", "early_stop", "rollback", "import")

    priority: NonNegativeInt | None = None
    """Hooks with a lower number are called first. Absent: the hook's own, which is 50 by default."""


CUSTOM_HOOKS = (ImportedHook, CustomHook)
"""The sections of custom hooks."""

HookConfig = Annotated[
    Annotated[
        Annotated[EmaConfig | EarlyStopConfig | RollbackConfig | ImportedHook, Field(discriminator="type")],
        Tag(BUILTIN_TAG),
    ]
    | Annotated[CustomHook, Tag(CUSTOM_TAG)],
    Discriminator(builtin_or_custom(CustomHook)),
]


class AccuracyConfig(Section):
    """Share of samples whose label is among the most likely classes; reported as `accuracy/top1`."""

    builds = "plait.trainer.metrics:accuracy"

    type: Literal["accuracy"] = "accuracy"
    top: PositiveInt = 1
    """A prediction is right if the label is among this number of most likely classes."""
    label: str = "label"
    """The key of the labels in the batch. In a batch without keys they are the second value."""
    logits: str = "logits"
    """The key of the logits in the model's outputs, where these have keys."""
    prefix: str = "accuracy"
    """The name of the metric before `/top1`."""


class CustomMetric(CustomPart):
    """A custom metric: a class derived from `plait.Metric`, or what makes one, called with the further
    keys."""

    plugin_kind = "metric"
    builtin = ("accuracy",)


MetricConfig = Annotated[
    Annotated[AccuracyConfig, Tag(BUILTIN_TAG)] | Annotated[CustomMetric, Tag(CUSTOM_TAG)],
    Discriminator(builtin_or_custom(CustomMetric)),
]

EARLIEST = 4
"""The first step that can be profiled; those before it are for warm-up, for counting, and to start the profiler."""


class ProfileConfig(Section):
    """Profile a few steps of the run: where their time and memory go; see profile.md."""

    builds = "plait.profile.hook:Profile"

    start: Annotated[PositiveInt, Field(ge=EARLIEST)] = 10
    """The first step that is profiled, counted from where the run starts or resumes. The steps before it are
    warm-up."""
    steps: PositiveInt = 3
    """How many steps are profiled."""
    folder: PathText | None = None
    """Folder for the page, the figures and a trace of each rank. Absent: `profile` in `work_dir`."""


class PlanConfig(Shorthand):
    """The plan before a run: one step is simulated on tensors without data, in a few seconds."""

    gate: Annotated[Literal["refuse", "warn", "off"], BeforeValidator(_off)] = "refuse"
    """What happens to a run that will not fit: it does not start, it starts with a warning, or nothing is planned."""
    hardware: PathText | None = None
    """A file of `plait doctor --measure`, or a preset. Absent: this machine."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A word is the `gate`."""
        return {"gate": value} if value is False or isinstance(value, str) else value


# Resolving the batch: `total = micro × accumulation × data-parallel size`.


@dataclass(frozen=True, slots=True)
class ResolvedBatch:
    """The three sizes of a batch, consistent with each other and with the data-parallel size."""

    total: int
    micro: int
    accumulation: int

    def split(self, count: int) -> ResolvedBatch:
        """Return the same batch in micro-batches of at most `1 / count` of the size.

        Raises `ConfigError` where a micro-batch would be smaller than a sample.
        """
        if self.micro < count:
            message = f"out of memory with micro-batches of {max(2 * self.micro // count, 1)}, the smallest size"
            remedy = "Write `strategy.recompute: full`, a higher `strategy.zero`, or `strategy.offload`."
            raise ConfigError(Problem("batch.micro", message, remedy))
        rank_samples = self.micro * self.accumulation
        micro = next(size for size in range(self.micro // count, 0, -1) if rank_samples % size == 0)
        return ResolvedBatch(self.total, micro, rank_samples // micro)


def resolve_batch(batch: BatchConfig, data_parallel_size: int, *, micro_batches: int | None = None) -> ResolvedBatch:
    """Return the three sizes: two of them give the third; otherwise a missing one is 1 where it is free.

    `micro_batches` of the pipeline are the same as `accumulation`. Raises `ConfigError` where the sizes contradict each
    other, or `total` is not a multiple of the others.
    """
    assert data_parallel_size >= 1
    total, micro, accumulation = batch.total, batch.micro, batch.accumulation or micro_batches
    if total is None:
        micro, accumulation = micro or 1, accumulation or 1
        return ResolvedBatch(micro * accumulation * data_parallel_size, micro, accumulation)
    if micro is not None and accumulation is not None:
        if total != micro * accumulation * data_parallel_size:
            raise _contradiction(total, micro, accumulation, data_parallel_size)
        return ResolvedBatch(total, micro, accumulation)
    known = micro or accumulation or 1
    other, left = divmod(total, known * data_parallel_size)
    if left:
        raise _uneven(total, micro, accumulation, data_parallel_size)
    return ResolvedBatch(total, micro or other, accumulation or (other if micro else 1))


def _contradiction(total: int, micro: int, accumulation: int, ranks: int) -> ConfigError:
    product = micro * accumulation * ranks
    message = (
        f"{total} ≠ {micro} × {accumulation} × {ranks} = {product} (total ≠ micro × accumulation × data-parallel size)"
    )
    ways = [f"total: {product}"]
    if total % (micro * ranks) == 0:
        ways.append(f"accumulation: {total // (micro * ranks)}")
    if total % (accumulation * ranks) == 0:
        ways.append(f"micro: {total // (accumulation * ranks)}")
    return _error(message, ways, "Leave one of the three out, or write")


def _uneven(total: int, micro: int | None, accumulation: int | None, ranks: int) -> ConfigError:
    """Return the error for a `total` that is not a multiple of the known factors."""
    known = (micro or accumulation or 1) * ranks
    name, value = ("micro", micro) if micro else ("accumulation", accumulation)
    factors = f"({value} × {ranks})" if value else f"{ranks}"
    formula = f"({name} × data-parallel size)" if value else "data-parallel size"
    message = f"{total} ÷ {factors} = {total / known:g}, not a whole number (total ÷ {formula})"
    ways = [
        f"total: {total_choice}"
        for total_choice in (total // known * known, total // known * known + known)
        if total_choice
    ]
    if value and total % ranks == 0:
        ways += [f"{name}: {total_choice}" for total_choice in _nearest_divisors(total // ranks, value)]
    return _error(message, ways, "Write")


def _nearest_divisors(number: int, value: int) -> list[int]:
    """Return the divisors of `number` that are closest to `value`, one below and one above."""
    below = next((divisor for divisor in range(min(value, number), 0, -1) if number % divisor == 0), None)
    above = next((divisor for divisor in range(value, number + 1) if number % divisor == 0), None)
    return [divisor for divisor in (below, above) if divisor]


def _error(message: str, ways: list[str], verb: str) -> ConfigError:
    return ConfigError(Problem("batch", message, f"{verb} {listed([f'`{way}`' for way in ways], 'or')}."))
