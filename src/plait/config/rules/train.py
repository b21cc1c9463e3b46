"""Rules for `train`, `optim`, `schedule`, `checkpoint`, `log` and `hooks`."""

from __future__ import annotations

from collections.abc import Iterator

from plait.config.online import ONLINE
from plait.config.optim import SGDConfig
from plait.config.profile import EARLIEST
from plait.config.rules.facts import Facts, idle
from plait.config.train import EarlyStopConfig, RollbackConfig
from plait.config.words import show
from plait.errors import Problem


def one_length(facts: Facts) -> Iterator[Problem]:
    """A run ends after epochs or after steps."""
    train = facts.config.train
    if train.max_epochs is not None and train.max_steps is not None:
        message = (
            f"`train.max_steps` is {train.max_steps} and `train.max_epochs` {train.max_epochs}: which one ends it?"
        )
        yield Problem("train.max_steps", message, "Leave one of the two out.")
    if facts.require_length and train.max_epochs is None and train.max_steps is None:
        message = "the run has no length: neither `max_epochs` nor `max_steps` is set"
        yield Problem("train", message, "Write `train.max_epochs` or `train.max_steps`.")


def counting_fits_the_length(facts: Facts) -> Iterator[Problem]:
    """`by_epoch` follows from the length; said the other way round it contradicts it."""
    train = facts.config.train
    lengths = {True: train.max_epochs, False: train.max_steps}
    if train.by_epoch is None or lengths[train.by_epoch] is not None:
        return
    other = "max_steps" if train.by_epoch else "max_epochs"
    if lengths[not train.by_epoch] is not None:
        message = f"{show(train.by_epoch)}, but the length is given as `train.{other}: {lengths[not train.by_epoch]}`"
        right = "max_epochs" if train.by_epoch else "max_steps"
        yield Problem("train.by_epoch", message, f"Leave it out, or give the length as `train.{right}`.")


def one_way_to_clip(facts: Facts) -> Iterator[Problem]:
    """Gradients are clipped by their norm or one by one."""
    train = facts.config.train
    if train.clip_norm is not None and train.clip_value is not None:
        message = f"{train.clip_value:g}, but `train.clip_norm` is set too, to {train.clip_norm:g}"
        yield Problem("train.clip_value", message, "Leave one of the two out.")


def measuring_needs_validation_data(facts: Facts) -> Iterator[Problem]:
    """Whatever is decided by validation needs something to validate on."""
    if facts.has_val:
        return
    reason, remedy = "there is no validation data", "Leave it out, or add `val_data`."
    config = facts.config
    yield from idle("train", config.train, ("val_every", "val_batches"), reason, remedy)
    if config.checkpoint.best is not None:
        yield Problem("checkpoint.best", f"no checkpoint can be the best one: {reason}", remedy)
    for index, hook in enumerate(config.hooks):
        if isinstance(hook, EarlyStopConfig):
            yield Problem(f"hooks.{index}", f"early_stop watches validations, and {reason}", remedy)


def going_back_needs_checkpoints(facts: Facts) -> Iterator[Problem]:
    """There must be one to go back to, also where the newest was written after the loss had leapt."""
    config = facts.config
    for index, hook in enumerate(config.hooks):
        if not isinstance(hook, RollbackConfig):
            continue
        path = f"hooks.{index}"
        if config.checkpoint.every is None:
            message = "rollback goes back to a checkpoint, and `checkpoint.every` is not set"
            yield Problem(path, message, "Write `checkpoint.every`, or leave the hook out.")
        elif config.checkpoint.keep < 2:
            message = "rollback may need the checkpoint before the newest, and `checkpoint.keep` is 1"
            yield Problem(path, message, "Write `checkpoint.keep: 2`, or more.")
        if config.phase in ONLINE:
            message = f"rollback goes on with the data that come next, and those of {config.phase} are the model's own"
            yield Problem(path, message, "Leave it out.")


def nesterov_needs_momentum(facts: Facts) -> Iterator[Problem]:
    """Nesterov's step looks ahead along the momentum."""
    optim = facts.config.optim
    if isinstance(optim, SGDConfig) and optim.nesterov and optim.momentum == 0:
        message = "true looks ahead along the momentum, but `optim.momentum` is 0"
        yield Problem("optim.nesterov", message, "Write `optim.momentum: 0.9`, or leave it out.")


def a_cycle_of_momentum_needs_momentum(facts: Facts) -> Iterator[Problem]:
    """OneCycle can move the momentum, where the optimizer has one."""
    schedule, optim = facts.config.schedule, facts.config.optim
    if not getattr(schedule, "cycle_momentum", False) or hasattr(optim, "betas") or getattr(optim, "momentum", 0) > 0:
        return
    message = f"true, but {optim.type} runs without momentum here, so there is none to cycle"
    remedy = "Write `optim.momentum`, or `false`." if hasattr(optim, "momentum") else "Leave it out."
    yield Problem("schedule.cycle_momentum", message, remedy)


def warmup_start_needs_warmup(facts: Facts) -> Iterator[Problem]:
    """A rise of no length has no start."""
    schedule = facts.config.schedule
    if schedule is not None and getattr(schedule, "warmup", None) == 0:
        remedy = "Leave it out, or write `schedule.warmup`."
        yield from idle("schedule", schedule, ("warmup_start_factor",), "`schedule.warmup` is 0", remedy)


def wandb_project_needs_wandb(facts: Facts) -> Iterator[Problem]:
    """A project for a sink that is not there."""
    log = facts.config.log
    if "wandb" not in log.sinks:
        listed = ", ".join([*(str(getattr(sink, "type", sink)) for sink in log.sinks), "wandb"])
        remedy = f"Leave it out, or write `log.sinks: [{listed}]`."
        yield from idle("log", log, ("wandb_project",), "`log.sinks` has no wandb", remedy)


def a_profile_fits_into_the_run(facts: Facts) -> Iterator[Problem]:
    """Steps that never come cannot be recorded."""
    profile, steps = facts.config.profile, facts.config.train.max_steps
    if profile is None or steps is None:
        return
    last = profile.start + profile.steps - 1
    if last > steps:
        message = f"{profile.start}, so steps up to {last} are recorded, but `train.max_steps` is {steps}"
        latest = steps - profile.steps + 1
        start = f"Write `profile.start: {latest}` or less." if latest >= EARLIEST else ""
        yield Problem("profile.start", message, start or f"Write `train.max_steps: {last}` or more.")


def skips_are_counted_by_the_guard(facts: Facts) -> Iterator[Problem]:
    """Without it a step that is not finite is made, and none is skipped; but in fp16 overflows always are."""
    config = facts.config
    if not config.train.guard.enabled and config.precision.compute != "fp16" and config.strategy.engine == "native":
        reason = "`train.guard.enabled` is false, so no step is skipped"
        yield from idle("train.guard", config.train.guard, ("max_skips",), reason, "Leave one of the two out.")


RULES = (
    one_length,
    counting_fits_the_length,
    one_way_to_clip,
    measuring_needs_validation_data,
    going_back_needs_checkpoints,
    nesterov_needs_momentum,
    a_cycle_of_momentum_needs_momentum,
    warmup_start_needs_warmup,
    wandb_project_needs_wandb,
    a_profile_fits_into_the_run,
    skips_are_counted_by_the_guard,
)
