"""`train`, `batch`, `checkpoint`, `log`, `hooks`, `metrics`: time, sizes, and what is written down."""

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
    """Samples in one optimizer step, over all ranks."""
    micro: Size | None = None
    """Samples in one forward/backward on one rank."""
    accumulation: Size | None = None
    """Forward/backward passes in one optimizer step."""


class GuardConfig(Section):
    """A step with a non-finite loss or gradient is skipped on every rank."""

    enabled: bool = True
    max_skips: PositiveInt = 20
    """Skipped steps in a row after which the run stops."""
    window: PositiveInt = 40
    """How many of the latest steps `max_share` is a share of."""
    max_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Where more than this share of the latest steps, or of the whole run, was skipped, the run fails."""
    spike: PositiveFloat | None = 20.0
    """A loss so many times the usual spread above the median of the last 100 is warned of. null: not watched."""


class CustomLoss(CustomPart):
    """A function of one's own of (outputs, batch) and the further keys, which gives a mean, or a sum with its count."""

    plugin_kind = "loss"


class TrainConfig(Section):
    """How long, how often measured, how clipped."""

    by_epoch: bool | None = None
    """What `val_every` and `checkpoint.every` count. Absent: as `max_epochs` or `max_steps` is set."""
    max_epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    stop_after: PositiveInt | None = None
    """Stop and save at this step, short of the end; a later run goes on from there."""
    val_every: PositiveInt | None = None
    """Absent: at the end of every epoch, or at the end of the run when counting steps."""
    val_batches: PositiveInt | None = None
    """At most so many batches a validation."""
    clip_norm: PositiveFloat | None = None
    clip_value: PositiveFloat | None = None
    guard: GuardConfig = Field(default_factory=GuardConfig)
    loss: CustomLoss | None = None
    """A function of (outputs, batch) whose result is learned. Absent: what the model returns."""


class BestConfig(Section):
    """Which validation is the best one."""

    metric: str = "loss"
    mode: Literal["min", "max"] = "min"


class FolderStorageConfig(Section):
    """Another folder, on another disk or another file system."""

    builds = "plait.checkpoint.storage:folder_storage"

    type: Literal["folder"] = "folder"
    path: PathText
    """Where it is; of one run alone."""


class CustomStorage(CustomPart):
    """A storage of one's own: files are written there, read, listed and deleted; see write-your-own.md."""

    plugin_kind = "storage"
    builtin = ("folder",)


StorageConfig = Annotated[
    Annotated[FolderStorageConfig, Tag(BUILTIN_TAG)] | Annotated[CustomStorage, Tag(CUSTOM_TAG)],
    Discriminator(builtin_or_custom(CustomStorage)),
]


class CheckpointConfig(Section):
    """When to save, how many to keep, what to start from."""

    every: PositiveInt | None = None
    """In epochs or steps, as `train.by_epoch` says. Absent: only at the end."""
    keep: PositiveInt = 3
    """Newest ones kept; the best one is kept besides."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of so many steps are never removed."""
    last: bool = True
    """Save at the end of the run."""
    max_failures: NonNegativeInt = 1
    """So many saves in a row may fail; one more, or the last one of the run, ends it with an error."""
    best: BestConfig | None = None
    resume: PathText | None = None
    """A checkpoint folder, or `auto`: the newest one of `work_dir`, if there is any."""
    partial: Many[str] = ()
    """Patterns of names (`model.head.*`, `optim.*`) that may be missing, superfluous or of another shape."""
    async_save: bool = False
    """Training waits only until the state is copied in host memory; it is written while training goes on."""
    trainable_only: bool = False
    """Leave out what is not trained; on resuming it comes from the `model` section again, and is compared."""
    storage: StorageConfig | None = None
    """Each checkpoint is copied there once it is complete, and comes from there where `work_dir` has none as new."""
    node_local: bool = False
    """Each node keeps the shards of its own ranks in its own folder; on resuming they are fetched where needed."""


class CustomSink(CustomPart):
    """A log sink of one's own, called with the `work_dir` and the further keys; see `plait.Sink`."""

    plugin_kind = "sink"
    builtin = ("jsonl", "csv", "tensorboard", "wandb", "html")


SinkConfig = Annotated[
    Annotated[Literal["jsonl", "csv", "tensorboard", "wandb", "html"], Tag(BUILTIN_TAG)]
    | Annotated[CustomSink, Tag(CUSTOM_TAG)],
    Discriminator(name_or_custom(CustomSink)),
]


class LogConfig(Section):
    """What is written down while training."""

    every: PositiveInt = 10
    """Steps between two lines."""
    console: Literal["auto", "bar", "plain", "none"] = "auto"
    """`auto`: a progress bar on a terminal, plain lines in a pipe."""
    sinks: Many[SinkConfig] = ("jsonl",)
    wandb_project: str | None = None


class EmaConfig(Section):
    """An exponential moving average of the weights, used in validation and saved beside them."""

    builds = "plait.trainer.hooks:Ema"

    type: Literal["ema"] = "ema"
    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    every: PositiveInt = 1


class EarlyStopConfig(Section):
    """Stop when a metric no longer gets better."""

    builds = "plait.trainer.hooks:EarlyStop"

    type: Literal["early_stop"] = "early_stop"
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    patience: PositiveInt = 3
    """Validations without a gain that are still accepted."""
    min_delta: Annotated[float, Field(ge=0.0)] = 0.0


class RollbackConfig(Section):
    """Where the loss leaps and stays up, go back to a checkpoint, and on with the data that come next."""

    builds = "plait.trainer.hooks:Rollback"

    type: Literal["rollback"] = "rollback"
    metric: Literal["loss", "grad_norm"] = "loss"
    """What is watched, at every step."""
    threshold: PositiveFloat = 8.0
    """A spike lies so many times the usual spread above the median of the last `window` steps."""
    window: Annotated[int, Field(ge=4)] = 100
    """Nothing is judged before half of them are known."""
    patience: PositiveInt = 3
    """Spikes in a row that it takes: one alone may be the batch, and not the model."""
    most: PositiveInt = 5
    """How often; the next time ends the run."""


class ImportedHook(ImportedPart):
    """The older form of a hook of one's own."""

    priority: NonNegativeInt = 50
    """Lower goes first."""


class CustomHook(CustomPart):
    """A hook of one's own: a class derived from `plait.Hook`, or what makes one, called with further keys."""

    plugin_kind = "hook"
    builtin = ("ema", "early_stop", "rollback", "import")

    priority: NonNegativeInt | None = None
    """Lower goes first. Absent: as the hook says, which is 50 where it says nothing."""


CUSTOM_HOOKS = (ImportedHook, CustomHook)
"""The sections of hooks of one's own."""

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
    """A label among so many likeliest classes counts as right."""
    label: str = "label"
    """The key of the labels in the batch. In a batch without keys they are in second place."""
    logits: str = "logits"
    """The key of the scores in the model's outputs, where these have keys."""
    prefix: str = "accuracy"
    """What the number is called before `/top1`."""


class CustomMetric(CustomPart):
    """A metric of one's own: a class derived from `plait.Metric`, or what makes one, called with the further
    keys."""

    plugin_kind = "metric"
    builtin = ("accuracy",)


MetricConfig = Annotated[
    Annotated[AccuracyConfig, Tag(BUILTIN_TAG)] | Annotated[CustomMetric, Tag(CUSTOM_TAG)],
    Discriminator(builtin_or_custom(CustomMetric)),
]

# `profile`: a few steps of a run, looked at closely.


EARLIEST = 4
"""The first step that can be recorded; those before it warm up, are counted, and let the profiler get ready."""


class ProfileConfig(Section):
    """Where the time and the memory of a step go, measured on a few steps of the run; see profile.md."""

    builds = "plait.profile.hook:Profile"

    start: Annotated[PositiveInt, Field(ge=EARLIEST)] = 10
    """First step that is recorded, counted from where the run begins or resumes. The steps before it warm up."""
    steps: PositiveInt = 3
    """So many are recorded."""
    folder: PathText | None = None
    """For the page, the figures and a trace of each rank. Absent: `profile` in `work_dir`."""


# `plan`: what is known before the start, and what follows from it.


def _off(value: Any) -> Any:
    """YAML reads `off` as false."""
    return "off" if value is False else value


class PlanConfig(Shorthand):
    """Every run is planned first: one step on tensors without values, in a few seconds."""

    gate: Annotated[Literal["refuse", "warn", "off"], BeforeValidator(_off)] = "refuse"
    """What happens to a run that will not fit: it does not start, it starts with a warning, or nobody looks."""
    hardware: PathText | None = None
    """A machine that `plait doctor --measure` wrote down, or a preset. Absent: the machine at hand."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A word is the `gate`."""
        return {"gate": value} if value is False or isinstance(value, str) else value


# The batch sum: `total = micro × accumulation × data-parallel size`.


@dataclass(frozen=True, slots=True)
class ResolvedBatch:
    """The three sizes of a batch, which agree with each other and with the data-parallel size."""

    total: int
    micro: int
    accumulation: int

    def split(self, count: int) -> ResolvedBatch:
        """The same batch in micro-batches that are at most the `parts`-th part as large.

        Raises `ConfigError` where a sample would have to be split.
        """
        if self.micro < count:
            message = f"memory was short with micro-batches of {max(2 * self.micro // count, 1)}, and none is smaller"
            remedy = "Write `strategy.recompute: full`, a higher `strategy.zero`, or `strategy.offload`."
            raise ConfigError(Problem("batch.micro", message, remedy))
        rank_samples = self.micro * self.accumulation
        micro = next(size for size in range(self.micro // count, 0, -1) if rank_samples % size == 0)
        return ResolvedBatch(self.total, micro, rank_samples // micro)


def resolve_batch(batch: BatchConfig, data_parallel_size: int, *, micro_batches: int | None = None) -> ResolvedBatch:
    """The three sizes from those given: two give the third; of one alone, or none, the others are 1 where free.

    `micro_batches`, the pipeline's, is another word for the accumulation. Raises `ConfigError` where the sizes
    contradict each other, or `total` cannot be cut evenly.
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
    """`total` is not a multiple of what is known of the right-hand side."""
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
    """The divisors of `number` next to `value`, below and above."""
    below = next((divisor for divisor in range(min(value, number), 0, -1) if number % divisor == 0), None)
    above = next((divisor for divisor in range(value, number + 1) if number % divisor == 0), None)
    return [divisor for divisor in (below, above) if divisor]


def _error(message: str, ways: list[str], verb: str) -> ConfigError:
    return ConfigError(Problem("batch", message, f"{verb} {listed([f'`{way}`' for way in ways], 'or')}."))
