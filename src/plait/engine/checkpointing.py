"""Write and read an engine's state as a checkpoint, for the Runner and for custom loops (`engine.save`)."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from plait.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    CheckpointWriter,
    Entry,
    Fetch,
    Mismatch,
    WriteAssignment,
    entries,
    fingerprint,
    held_pieces,
    load_into,
    matches,
    nothing_to_fetch,
    open_checkpoint,
    save_checkpoint,
)
from plait.config import to_dict
from plait.distributed import Channel, on_main, restore_rng_state, rng_state
from plait.engine.construction import SMALLER_RANGE
from plait.errors import CheckpointError, TrainingError

if TYPE_CHECKING:
    from plait.engine.base import Engine


@dataclass(frozen=True, slots=True)
class FrozenTensors:
    """The frozen tensors that a trainable-only checkpoint leaves out: their names, and a fingerprint of their values.

    The fingerprint does not depend on how the tensors are sharded.
    """

    names: frozenset[str]
    fingerprint: str

    @classmethod
    def of(cls, engine: Engine, names: Iterable[str], channel: Channel) -> FrozenTensors:
        """Return the record of those of `names` that some rank has; in a pipeline, a rank has only its stages' tensors.

        Every rank must call it.
        """
        tensors = engine.state_entries()
        local_names = sorted(tensors.keys() & set(names))
        held = held_pieces({name: tensors[name] for name in local_names})
        everywhere = frozenset(name for rank_names in channel.all_gather(local_names) for name in rank_names)
        return cls(everywhere, fingerprint(WriteAssignment(channel).mine(held), channel))

    def state(self) -> dict[str, Any]:
        """Return the JSON-compatible form that a checkpoint stores."""
        return {"names": sorted(self.names), "fingerprint": self.fingerprint}


def check_left_out(path: object, saved: Mapping[str, Any], engine: Engine, channel: Channel) -> frozenset[str]:
    """Return the names of the tensors that a trainable-only checkpoint leaves out.

    Raises `CheckpointError` if this model does not have them, or has other values. Every rank must call it.
    """
    names = frozenset(saved["names"])
    current = FrozenTensors.of(engine, names, channel)
    missing = sorted(names - current.names)
    if missing:
        raise CheckpointError(
            f"{path} holds only what was trained, on top of a model with {missing[0]}"
            f"{f' and {len(missing) - 1} more tensors' if len(missing) > 1 else ''}, which this model does not have"
        )
    if current.fingerprint != saved["fingerprint"]:
        raise CheckpointError(
            f"{path} holds only what was trained, and the {len(names)} other tensors of this model are not the ones "
            "it was trained on; start from the same `model` section, weights and `seed` as then"
        )
    return names


_SAME_STATE = frozenset({"AdamW", "AdamW8bit"})
"""Optimizers that can read each other's state from a checkpoint."""
_SHOWN = 8


# ---- for any loop


def tensors_of(engine: Engine) -> dict[str, Entry]:
    """Return the tensors of an engine's checkpoint: weights, optimizer states, and this rank's random state."""
    tensors = engine.state_entries()
    for name, tensor in rng_state(engine.world.device).items():
        tensors[f"rng.{engine.world.rank}.{name}"] = tensor
    return tensors


def resume_engine(
    engine: Engine,
    checkpoint: Checkpoint,
    *,
    more: Mapping[str, Tensor] | None = None,
    ignore: Sequence[str] = (),
    partial: Sequence[str] = (),
    fetch: Fetch = nothing_to_fetch,
    channel: Channel | None = None,
    warn: Callable[[str], None],
) -> list[Mismatch]:
    """Load a checkpoint into an engine: weights, optimizer states, step count, skipped steps, loss scale.

    Random state is loaded too if the checkpoint was saved by the same number of ranks. `more` are further tensors to
    load into; entries that match `ignore` are not loaded. Tensors whose names match a pattern of `partial` may be
    missing or have another shape; those that do are returned. `channel` connects the ranks for the check of a
    trainable-only checkpoint (`check_left_out`). Every rank must call it.
    """
    state, world = checkpoint.manifest.state, engine.world
    patterns = _patterns(checkpoint, partial)
    _refuse_another_optimizer(checkpoint.folder, state, engine.optimizer_type)
    tensors = engine.state_entries()
    wanted = _fitting_entries(checkpoint, tensors, patterns)
    if lacking := {name: entry for name, entry in wanted.items() if f"optim.{name}" not in tensors}:
        engine.allocate_optimizer_state(lacking)
        tensors = engine.state_entries()
    if "frozen" in state:
        left_out = check_left_out(checkpoint.folder, state["frozen"], engine, channel or Channel(world))
        tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    has_generators = any(name.startswith("rng.") for name in checkpoint.index.tensors)  # a converted one has none
    same_world = checkpoint.manifest.world_size == world.size and has_generators
    generators = rng_state(world.device)
    if same_world:
        tensors.update({f"rng.{world.rank}.{name}": tensor for name, tensor in generators.items()})
    tensors.update(more or {})
    differing = load_into(checkpoint, tensors, world=world, ignore=("rng.", *ignore), partial=patterns, fetch=fetch)
    if same_world:
        restore_rng_state(generators, world.device)
    engine.state_loaded()
    if "engine" in state:
        with naming_state(checkpoint, "engine"):
            engine.restore(state["engine"])
    if differing:
        names = ", ".join(row.name for row in differing[:_SHOWN])
        others = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        warn(f"not loaded from {checkpoint.folder.name}, as checkpoint.partial says: {names}{others}")
    saved = stored_value(state.get("config") or {}, "precision.compute")
    if saved == "bf16" and engine.config.precision.compute == "fp16":
        warn(SMALLER_RANGE)
    return differing


@contextmanager
def naming_state(checkpoint: Checkpoint, key: str) -> Iterator[None]:
    """Within the block, turn errors about malformed state into a `CheckpointError` that names the file and the key."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        where = f"{checkpoint.folder / 'manifest.json'}: state.{key}"
        raise CheckpointError(f"{where} cannot be taken up ({type(error).__name__}: {error})") from error


def stored_value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of `section.name` in a stored run description; None if it is missing."""
    section, _, name = key.rpartition(".")
    return ((config.get(section) or {}) if section else config).get(name)


def _patterns(checkpoint: Checkpoint, partial: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns of tensor names that may be missing or differ in shape.

    Raises `CheckpointError` for a weights-only checkpoint, unless `partial` matches the optimizer state.
    """
    if "engine" in checkpoint.manifest.state:
        return tuple(partial)
    if not any(matches("optim.any.exp_avg", (pattern,)) for pattern in partial):
        raise CheckpointError(
            f"{checkpoint.folder} holds weights only, without optimizer state: continuing from it starts the optimizer "
            'anew at step 0; to do that, write `checkpoint.partial: ["optim.*"]`, or '
            '`engine.load(folder, partial=["optim.*"])`'
        )
    return tuple(pattern for pattern in partial if not pattern.startswith("optim."))


def _fitting_entries(checkpoint: Checkpoint, tensors: Mapping[str, Entry], patterns: tuple[str, ...]) -> dict[str, Any]:
    """Return the entries of optimizer state to load: without those of a weight whose shape differs in the model."""
    saved = entries(checkpoint.index, "optim.")
    if not patterns:
        return saved
    reshaped = {
        name.removeprefix("model.")
        for name, tensor in tensors.items()
        if name in checkpoint.index.tensors and checkpoint.index.tensors[name].shape != tuple(tensor.shape)
    }
    return {
        name: entry
        for name, entry in saved.items()
        if not matches(f"optim.{name}", patterns) and name.rpartition(".")[0] not in reshaped
    }


def _refuse_another_optimizer(path: Path, state: Mapping[str, Any], wanted: str) -> None:
    saved = stored_value(state.get("config") or {}, "optim.type")
    if saved is not None and saved != wanted and not {saved, wanted} <= _SAME_STATE:
        raise CheckpointError(
            f"{path} was trained with {saved}, and optim.type is {wanted}: their states do not fit each other; "
            f"write `optim.type: {saved}`"
        )


class EngineSaver:
    """Writes checkpoints of one engine to any folders. Every rank must make the same calls."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writer: CheckpointWriter | None = None
        self._root: Path | None = None

    def save(
        self,
        target: Path,
        contents: Callable[[], tuple[Mapping[str, Entry], Mapping[str, Any]]],
        *,
        tidy: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint, in the background with `checkpoint.async_save`.

        `contents` returns its tensors and state; while it runs, the model has the weights to evaluate with. `tidy` is
        called on one rank when the checkpoint is complete, for example to delete older ones.
        """
        self.wait()
        self.engine.sync_buffers()
        with self.engine.evaluation_weights():
            tensors, state = contents()
            self.writer_for(target.parent).save(target, tensors, state, step=self.engine.steps, tidy=tidy)

    def writer_for(self, root: Path) -> CheckpointWriter:
        """Return the writer for checkpoints in `root`; creating it is a collective, so every rank must call it."""
        if self._writer is None or self._root != root:
            self.close()
            options = self.engine.config.checkpoint
            self._writer = CheckpointWriter(
                root, self.engine.world, background=options.async_save, node_local=options.node_local
            )
            self._root = root
            if options.async_save:
                atexit.register(_close, weakref.ref(self))  # for scripts that never close it
        return self._writer

    def wait(self) -> None:
        """Wait for the checkpoint that is being written in the background; if writing failed, raise its error."""
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and release the writer."""
        if self._writer is not None:
            self.wait()
            self._writer.close()
            self._writer = None


def _close(saver: weakref.ref[EngineSaver]) -> None:
    if (alive := saver()) is not None:
        alive.close()


# ---- `engine.save` and `engine.load`


def save_engine(engine: Engine, folder: str | Path, extra: Mapping[str, Any] | None) -> Path:
    """Write a checkpoint of an engine; return its folder. See `Engine.save`."""
    target, world = Path(folder).absolute(), engine.world
    if engine.pending:
        raise TrainingError(
            f"engine.save was called with {engine.pending} micro-batches accumulated, and a checkpoint holds no "
            "gradients: call engine.step() first, until it returns a result"
        )
    _check_extra(extra or {}, "extra")
    on_main(world, lambda: _refuse_to_overwrite(target))
    engine.settle()
    engine.sync_buffers()
    description = to_dict(engine.config)
    description["optim"]["type"] = engine.optimizer_type
    state = {"engine": engine.state(), "config": description, "extra": dict(extra or {})}
    save_checkpoint(target, tensors_of(engine), state, step=engine.steps, world=world)
    return target


def load_engine(
    engine: Engine, folder: str | Path, partial: Sequence[str], warn: Callable[[str], None]
) -> dict[str, Any]:
    """Load a checkpoint into an engine; return its `extra`. See `Engine.load`."""
    wanted = Path(folder).absolute()
    if engine.pending:
        raise TrainingError(
            f"engine.load was called with {engine.pending} micro-batches accumulated: call engine.step() first, until "
            "it returns a result"
        )
    path = on_main(engine.world, lambda: CheckpointFolder(wanted).find(str(wanted)))
    assert path is not None  # `find` raises an error for a named path that does not exist
    on_main(engine.world, lambda: open_checkpoint(path))  # first on rank 0, so that an error is reported only once
    checkpoint = open_checkpoint(path)
    engine.settle()
    resume_engine(engine, checkpoint, ignore=("hook.",), partial=partial, warn=warn)
    return dict(checkpoint.manifest.state.get("extra") or {})


def _refuse_to_overwrite(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise CheckpointError(
            f"engine.save: {target} exists already, and is not overwritten: use one folder per checkpoint, such as "
            f"`{target}/step-{{engine.steps:08d}}`, or remove it first"
        )


def _check_extra(value: Any, key: str) -> None:
    """Raise `CheckpointError` for values that would change when written as JSON and read again."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise CheckpointError(f"{key}[{name!r}]: keys must be strings in a checkpoint; write {str(name)!r}")
            _check_extra(inner, f"{key}[{name!r}]")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_extra(inner, f"{key}[{index}]")
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        remedy = "give `.item()` of it, or a list" if hasattr(value, "item") else "give a list, a dict or plain values"
        raise CheckpointError(
            f"{key} is a {type(value).__name__}; a checkpoint stores numbers, strings, lists and dicts there: {remedy}"
        )
