"""How a run goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.checkpoint import (
    Checkpoint,
    attempt,
    entries,
    find_scattered,
    nothing_to_fetch,
    open_checkpoint,
    together,
)
from plait.config import listed, show, to_dict
from plait.errors import CheckpointError
from plait.spec import EventKind
from plait.strategy import resume_engine, stored_value, taken_from
from plait.world import on_main

if TYPE_CHECKING:
    from torch import Tensor

    from plait.checkpoint import Fetch
    from plait.runner.runner import Runner
    from plait.runner.saving import Saver

_NOT_ORDER = frozenset({"workers", "pin_memory", "drop_last", "cache", "tokenizer", "document_mask", "augment"})
"""Keys of `data` that decide neither which samples there are nor in which order they come."""


def resume(runner: Runner, saver: Saver) -> Path | None:
    """Continue from the checkpoint that `checkpoint.resume` names; returns it, or None if there is none."""
    found = _find(runner, saver)
    return None if found is None else _take_up(runner, saver, *found)


def go_back(runner: Runner, saver: Saver, path: Path) -> None:
    """Take up a checkpoint of this very run, in the middle of it."""
    found = _find_one(runner, saver, str(path))
    assert found is not None  # a path that is named is there, or an error says that it is not
    _take_up(runner, saver, *found)


def _take_up(runner: Runner, saver: Saver, checkpoint: Checkpoint, fetch: Fetch) -> Path:
    state = checkpoint.manifest.state
    hooks, saved_hooks = runner.hooks.named(), state.get("hooks") or {}
    more: dict[str, Tensor] = {}
    for name in hooks.keys() & saved_hooks.keys():
        hooks[name].make_room(runner, entries(checkpoint.index, f"hook.{name}."))
        more.update(saver.hook_tensors(name, hooks[name]))
        with taken_from(checkpoint, f"hooks.{name}"):
            hooks[name].restore(saved_hooks[name])
    left = sorted(saved_hooks.keys() - hooks.keys())
    patterns = runner.config.checkpoint.partial
    resume_engine(
        runner.engine,
        checkpoint,
        more=more,
        ignore=tuple(f"hook.{name}." for name in left),
        partial=patterns,
        fetch=fetch,
        channel=saver.writer.channel if "frozen" in state else None,
        warn=runner.warn,
    )
    _report_hooks_left_out(runner, checkpoint, left)
    _refuse_another_tokenizer(runner, checkpoint, patterns)
    with taken_from(checkpoint, "step_in_epoch and batch_total"):
        _set_position(runner, state)
    _tell_another_order(runner, checkpoint)
    if saver.best is not None:
        saver.best.value = state.get("best")
    return checkpoint.folder


def _find(runner: Runner, saver: Saver) -> tuple[Checkpoint, Fetch] | None:
    found = (_find_one(runner, saver, wanted) for wanted in saver.wanted)
    return next((each for each in found if each is not None), None)


def _find_one(runner: Runner, saver: Saver, wanted: str) -> tuple[Checkpoint, Fetch] | None:
    if not runner.config.checkpoint.node_local:

        def find() -> Path | None:
            saver.folder.sweep()
            return saver.folder.find(wanted if saver.storage is None else saver.storage.fetch(wanted))

        path = on_main(runner.world, find)
        if path is None:
            return None
        on_main(runner.world, lambda: open_checkpoint(path))  # what is wrong with it is said once
        return open_checkpoint(path), nothing_to_fetch
    channel, disks = saver.writer.channel, saver.writer.disks
    together(channel, attempt(saver.folder.sweep) if disks.is_lead else None, "the checkpoint folder cannot be used")
    if (storage := saver.storage) is not None:
        name = [wanted]

        def fetch() -> None:
            name.append(storage.fetch(wanted))

        together(channel, attempt(fetch) if disks.is_lead else None, "the checkpoint storage cannot be used")
        wanted = name[-1]
    scattered = find_scattered(saver.folder, wanted, channel, disks)
    return None if scattered is None else (scattered.checkpoint, scattered.fetch)


def _report_hooks_left_out(runner: Runner, checkpoint: Checkpoint, hooks: list[str]) -> None:
    for hook in hooks:
        has_tensors = any(key.startswith(f"hook.{hook}.") for key in checkpoint.index.tensors)
        if checkpoint.manifest.state["hooks"][hook] or has_tensors:
            name = checkpoint.folder.name
            runner.warn(f"{name} holds the state of the hook {hook!r}, which this run does not have: it is left out")


def _set_position(runner: Runner, state: Mapping[str, Any]) -> None:
    if "epoch" in state:
        runner.set_position(state["epoch"], state["step_in_epoch"], samples=state["batch_total"])
    elif "engine" in state:
        # Written by a loop of the user's own or another framework, which does not say where in the data it was.
        whole = runner.steps_per_epoch
        epoch, step = divmod(runner.step, whole) if whole else (0, runner.step)
        runner.set_position(epoch, step, samples=runner.batch.total)
        text = (
            f"the checkpoint does not say where in the data it was: going on as after {runner.step} steps of this run"
        )
        runner.emit(EventKind.MESSAGE, level="warning", text=text)


def _tell_another_order(runner: Runner, checkpoint: Checkpoint) -> None:
    """Within an epoch a place in the data means something only where the samples and their order are the same."""
    if "epoch" not in checkpoint.manifest.state or runner.step_in_epoch in (0, runner.steps_per_epoch):
        return  # without a place of its own, the checkpoint is warned of already
    before, now = checkpoint.manifest.state.get("config") or {}, to_dict(runner.config)
    sections: list[Mapping[str, Any]] = [each.get("data") or {} for each in (before, now)]
    keys = ["seed", *(f"data.{key}" for key in dict.fromkeys((*sections[0], *sections[1])) if key not in _NOT_ORDER)]
    values = {key: (stored_value(before, key), stored_value(now, key)) for key in keys}
    changed = [f"{key}: {show(was)}" for key, (was, is_now) in values.items() if was != is_now]
    samples = stored_value(checkpoint.manifest.state, "data.samples")
    if samples is not None and samples != data_facts(runner)["samples"]:
        changed.append(f"{samples} samples, and not {data_facts(runner)['samples']}")
    if changed:
        runner.warn(
            f"{checkpoint.folder.name} stands within an epoch of a run with {listed(changed)}, which may mean "
            "another order of samples: in the rest of this epoch some may come a second time, and others not at all"
        )


def data_facts(runner: Runner) -> dict[str, Any]:
    """What a checkpoint knows of the training data beside their description: the files themselves may change."""
    dataset = getattr(runner.loader, "dataset", None)
    known = runner.steps_per_epoch is not None and hasattr(dataset, "__len__")
    return {
        "samples": len(dataset) if known and dataset is not None else None,
        "tokenizer": getattr(dataset, "tokenizer_digest", "") or None,
    }


def _refuse_another_tokenizer(runner: Runner, checkpoint: Checkpoint, patterns: tuple[str, ...]) -> None:
    """A tokenizer that is trained on the text is another one where the text has changed: every token means another."""
    before, now = stored_value(checkpoint.manifest.state, "data.tokenizer"), data_facts(runner)["tokenizer"]
    if before is None or now is None or before == now:
        return
    message = (
        f"{checkpoint.folder} was trained on tokens of another tokenizer ({before[:12]}) than the one of `data` "
        f"({now[:12]}), so its embeddings mean other words"
    )
    if not patterns:
        raise CheckpointError(
            f"{message}. The text or data.vocab_size has changed: write `data.tokenizer` with the tokenizer.json of "
            "that run; to go on all the same, name what is new in `checkpoint.partial`"
        )
    runner.warn(message)
