"""How a run goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.checkpoint import (
    Checkpoint,
    Misfit,
    attempt,
    entries,
    find_scattered,
    load_into,
    matches,
    nothing_to_fetch,
    open_checkpoint,
    together,
)
from plait.config import listed, show, to_dict
from plait.errors import CheckpointError
from plait.runner.frozen import check_left_out
from plait.spec import Entry, EventKind
from plait.strategy import SMALLER_RANGE
from plait.world import on_main, restore_rng_state, rng_state

if TYPE_CHECKING:
    from plait.checkpoint import Fetch
    from plait.runner.runner import Runner
    from plait.runner.saving import Saver

_SHOWN = 8
_NOT_ORDER = frozenset({"workers", "pin_memory", "drop_last", "cache", "tokenizer", "document_mask", "augment"})
"""Keys of `data` that decide neither which samples there are nor in which order they come."""
_SAME_STATE = frozenset({"AdamW", "AdamW8bit"})
"""Optimizers that find in a checkpoint what they need, whichever of them wrote it."""


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
    state, engine, world = checkpoint.manifest.state, runner.engine, runner.world
    patterns = _patterns(runner, checkpoint)
    _refuse_another_optimizer(checkpoint.folder, state, runner.config.optim.type)
    tensors = engine.state_entries()
    wanted = _fitting_entries(checkpoint, tensors, patterns)
    if lacking := {name: entry for name, entry in wanted.items() if f"optim.{name}" not in tensors}:
        engine.allocate_optimizer_state(lacking)
        tensors = engine.state_entries()
    if "frozen" in state:
        left_out = check_left_out(checkpoint.folder, state["frozen"], engine, saver.writer.channel)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    has_generators = any(name.startswith("rng.") for name in checkpoint.index.tensors)  # not in a converted one
    same_world = checkpoint.manifest.world_size == world.size and has_generators
    generators = rng_state(world.device)
    if same_world:
        tensors.update({f"rng.{world.rank}.{name}": tensor for name, tensor in generators.items()})
    hooks, saved_hooks = runner.hooks.named(), state.get("hooks") or {}
    for name in hooks.keys() & saved_hooks.keys():
        hooks[name].make_room(runner, entries(checkpoint.index, f"hook.{name}."))
        tensors.update(saver.hook_tensors(name, hooks[name]))
        with _taken_from(checkpoint, f"hooks.{name}"):
            hooks[name].restore(saved_hooks[name])
    left = sorted(saved_hooks.keys() - hooks.keys())
    ignore = ("rng.", *(f"hook.{name}." for name in left))
    differing = load_into(checkpoint, tensors, world=world, ignore=ignore, partial=patterns, fetch=fetch)
    _tell_left_out(runner, checkpoint, left, differing)
    if same_world:
        restore_rng_state(generators, world.device)
    engine.state_loaded()
    if "engine" in state:
        with _taken_from(checkpoint, "engine"):
            engine.restore(state["engine"])
    _refuse_another_tokenizer(runner, checkpoint, patterns)
    with _taken_from(checkpoint, "step_in_epoch and batch_total"):
        _set_position(runner, state)
    _tell_another_order(runner, checkpoint)
    saved = _at(state.get("config") or {}, "precision.compute")
    if saved == "bf16" and runner.config.precision.compute == "fp16":
        runner.warn(SMALLER_RANGE)
    if saver.best is not None:
        saver.best.value = state.get("best")
    return checkpoint.folder


@contextmanager
def _taken_from(checkpoint: Checkpoint, key: str) -> Iterator[None]:
    """What a checkpoint does not have as it should is an error that names its place, and not only the value."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        where = f"{checkpoint.folder / 'manifest.json'}: state.{key}"
        raise CheckpointError(f"{where} cannot be taken up ({type(error).__name__}: {error})") from error


def _find(runner: Runner, saver: Saver) -> tuple[Checkpoint, Fetch] | None:
    found = (_find_one(runner, saver, wanted) for wanted in saver.wanted)
    return next((each for each in found if each is not None), None)


def _find_one(runner: Runner, saver: Saver, wanted: str) -> tuple[Checkpoint, Fetch] | None:
    if not runner.config.checkpoint.node_local:

        def find() -> Path | None:
            saver.folder.sweep()
            return saver.folder.find(wanted)

        path = on_main(runner.world, find)
        if path is None:
            return None
        on_main(runner.world, lambda: open_checkpoint(path))  # what is wrong with it is said once
        return open_checkpoint(path), nothing_to_fetch
    channel, disks = saver.writer.channel, saver.writer.disks
    together(channel, attempt(saver.folder.sweep) if disks.is_lead else None, "the checkpoint folder cannot be used")
    scattered = find_scattered(saver.folder, wanted, channel, disks)
    return None if scattered is None else (scattered.checkpoint, scattered.fetch)


def _patterns(runner: Runner, checkpoint: Checkpoint) -> tuple[str, ...]:
    """The names that may differ. A checkpoint of weights alone is taken only by somebody who says so."""
    patterns = runner.config.checkpoint.partial
    if "engine" in checkpoint.manifest.state:
        return patterns
    if not any(matches("optim.any.exp_avg", (pattern,)) for pattern in patterns):
        raise CheckpointError(
            f"{checkpoint.folder} holds weights alone, without the state of an optimizer: going on from it starts a "
            'new one at step 0; if that is meant, write `checkpoint.partial: ["optim.*"]`'
        )
    return tuple(pattern for pattern in patterns if not pattern.startswith("optim."))


def _fitting_entries(checkpoint: Checkpoint, tensors: Mapping[str, Entry], patterns: tuple[str, ...]) -> dict[str, Any]:
    """The optimizer's entries that are to be loaded: not those of a weight whose shape is another now."""
    found = entries(checkpoint.index, "optim.")
    if not patterns:
        return found
    reshaped = {
        name.removeprefix("model.")
        for name, tensor in tensors.items()
        if name in checkpoint.index.tensors and checkpoint.index.tensors[name].shape != tuple(tensor.shape)
    }
    return {
        name: entry
        for name, entry in found.items()
        if not matches(f"optim.{name}", patterns) and name.rpartition(".")[0] not in reshaped
    }


def _tell_left_out(runner: Runner, checkpoint: Checkpoint, hooks: list[str], differing: list[Misfit]) -> None:
    def warn(text: str) -> None:
        runner.emit(EventKind.MESSAGE, level="warning", text=text)

    name = checkpoint.folder.name
    for hook in hooks:
        has_tensors = any(key.startswith(f"hook.{hook}.") for key in checkpoint.index.tensors)
        if checkpoint.manifest.state["hooks"][hook] or has_tensors:
            warn(f"{name} holds the state of the hook {hook!r}, which this run does not have: it is left out")
    if differing:
        names = ", ".join(row.name for row in differing[:_SHOWN])
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        warn(f"not loaded from {name}, as checkpoint.partial says: {names}{more}")


def _set_position(runner: Runner, state: Mapping[str, Any]) -> None:
    if "epoch" in state:
        runner.set_position(state["epoch"], state["step_in_epoch"], samples=state["batch_total"])
    elif "engine" in state:
        # Written by another framework, which does not say where in the data it was.
        whole = runner.steps_per_epoch
        epoch, step = divmod(runner.step, whole) if whole else (0, runner.step)
        runner.set_position(epoch, step, samples=runner.batch.total)
        text = (
            f"the checkpoint does not say where in the data it was: going on as after {runner.step} steps of this run"
        )
        runner.emit(EventKind.MESSAGE, level="warning", text=text)


def _tell_another_order(runner: Runner, checkpoint: Checkpoint) -> None:
    """Within an epoch a place in the data means something only where the samples and their order are the same."""
    if runner.step_in_epoch in (0, runner.steps_per_epoch):
        return
    before, now = checkpoint.manifest.state.get("config") or {}, to_dict(runner.config)
    sections: list[Mapping[str, Any]] = [each.get("data") or {} for each in (before, now)]
    keys = ["seed", *(f"data.{key}" for key in dict.fromkeys((*sections[0], *sections[1])) if key not in _NOT_ORDER)]
    changed = [f"{key}: {show(_at(before, key))}" for key in keys if _at(before, key) != _at(now, key)]
    samples = _at(checkpoint.manifest.state, "data.samples")
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
    before, now = _at(checkpoint.manifest.state, "data.tokenizer"), data_facts(runner)["tokenizer"]
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


def _at(config: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.rpartition(".")
    return ((config.get(section) or {}) if section else config).get(name)


def _refuse_another_optimizer(path: Path, state: Mapping[str, Any], wanted: str) -> None:
    saved = _at(state.get("config") or {}, "optim.type")
    if saved is not None and saved != wanted and not {saved, wanted} <= _SAME_STATE:
        raise CheckpointError(
            f"{path} was trained with {saved}, and optim.type is {wanted}: their states do not fit each other; "
            f"write `optim.type: {saved}`"
        )
