"""Rules for `strategy.offload`."""

from __future__ import annotations

from collections.abc import Iterator

from plait.config.rules.facts import Facts, idle
from plait.errors import Problem

_PATH = "strategy.offload"


def options_need_a_tier(facts: Facts) -> Iterator[Problem]:
    """Each option belongs to a tier."""
    offload = facts.config.strategy.offload
    if not offload.on:
        reason = "nothing is offloaded (`strategy.offload.optimizer` is none)"
        need_a_tier = ("bucket_mb", "ratio", "delayed", "update")
        yield from idle(_PATH, offload, need_a_tier, reason, "Leave it out, or write `optimizer: cpu`.")
    if offload.optimizer != "nvme":
        reason = f"`{_PATH}.optimizer` is {offload.optimizer}"
        yield from idle(
            _PATH, offload, ("budget_gib", "host_ratio"), reason, "Leave it out, or write `optimizer: nvme`."
        )
    if not offload.uses_files:
        yield from idle(_PATH, offload, ("path",), "nothing lies in files", "Leave it out, or use the tier nvme.")
    if offload.params == "none":
        names = ("prefetch_params", "live_params", "persistent_params")
        yield from idle(_PATH, offload, names, f"`{_PATH}.params` is none", "Leave it out, or write `params: cpu`.")


def params_need_stage_three(facts: Facts) -> Iterator[Problem]:
    """Below stage 3 weights stay whole on the device between their uses."""
    strategy = facts.config.strategy
    offload = strategy.offload
    if offload.params == "none":
        return
    if strategy.stage != 3:
        message = f"{offload.params} needs stage 3: at stage {strategy.stage} the weights stay on the device"
        yield Problem(f"{_PATH}.params", message, "Write `strategy.zero: 3`, or leave it out.")
    if not offload.on:
        message = f"{offload.params}, but the optimizer is to be on the device, and would have to fetch every weight"
        yield Problem(f"{_PATH}.params", message, f"Write `{_PATH}.optimizer: cpu` (or `nvme`) too.")


def optimizer_works_by_element(facts: Facts) -> Iterator[Problem]:
    """A bucket is updated without looking at the rest, nor at other ranks."""
    config = facts.config
    if config.strategy.offload.on and config.optim.elementwise is False:
        message = f"{config.optim.type} looks at whole parameters, but an offloaded one is updated in parts"
        yield Problem("optim.type", message, f"Use AdamW, Adam, Lion, SGD or Adagrad, or leave out `{_PATH}`.")


def shares_leave_something(facts: Facts) -> Iterator[Problem]:
    """Shares on the device and in host memory that leave nothing for files."""
    offload = facts.config.strategy.offload
    if offload.share + offload.host_ratio >= 1.0:
        message = f"{offload.host_ratio:g} and `{_PATH}.ratio: {offload.share:g}` leave nothing for files"
        yield Problem(f"{_PATH}.host_ratio", message, "Make one of them smaller, or write `optimizer: cpu`.")


def a_share_needs_weights_on_the_device(facts: Facts) -> Iterator[Problem]:
    """The share that is updated on the device must be there; with `params` all weights live on the host."""
    offload = facts.config.strategy.offload
    if offload.params != "none" and offload.ratio != 0:
        message = f"{offload.ratio}, but with `{_PATH}.params: {offload.params}` no weight lives on the device"
        yield Problem(f"{_PATH}.ratio", message, "Leave one of the two out.")


def delay_is_for_all(facts: Facts) -> Iterator[Problem]:
    """What stays on the device is updated at once, so a delay would be one for some weights only."""
    offload = facts.config.strategy.offload
    if offload.delayed and offload.ratio != 0:
        message = f"true, but `{_PATH}.ratio` keeps a share on the device, where updates are never late"
        yield Problem(f"{_PATH}.delayed", message, "Leave one of the two out.")


def a_device_updates_its_own_weights_at_once(facts: Facts) -> Iterator[Problem]:
    """What the device updates is the model's at once, and on the device."""
    offload = facts.config.strategy.offload
    if offload.update != "device":
        return
    if offload.delayed:
        message = (
            f"device, but `{_PATH}.delayed` has updates wait for the next step, and the device has no room for that"
        )
        yield Problem(f"{_PATH}.update", message, "Write `update: cpu`, or leave one of the two out.")
    if offload.params != "none":
        message = f"device, but with `{_PATH}.params: {offload.params}` the new weights belong to the host"
        yield Problem(f"{_PATH}.update", message, "Write `update: cpu`, or leave one of the two out.")


def files_are_saved_in_the_foreground(facts: Facts) -> Iterator[Problem]:
    """Saving in the background copies all state to host memory first, which is what files are to spare."""
    config = facts.config
    if config.strategy.offload.optimizer == "nvme" and config.checkpoint.async_save:
        message = f"true copies the state to host memory first, but `{_PATH}.optimizer: nvme` keeps it out of there"
        yield Problem("checkpoint.async_save", message, "Leave it out.")


RULES = (
    options_need_a_tier,
    params_need_stage_three,
    optimizer_works_by_element,
    shares_leave_something,
    a_share_needs_weights_on_the_device,
    delay_is_for_all,
    a_device_updates_its_own_weights_at_once,
    files_are_saved_in_the_foreground,
)
