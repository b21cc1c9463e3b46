"""What a checkpoint of such a run holds, and how a run goes on from one.

It is Plait's own checkpoint, with the weights and the optimizer under their logical names; what only MMEngine knows
(position of its loops, schedules, groups, message hub, what hooks added) is beside it under `mmengine`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.checkpoint import NAME, CheckpointWriter, entries, load_into, open_checkpoint, open_source
from plait.config import to_dict
from plait.errors import CheckpointError
from plait.frontends.mmengine.runner.folders import resolve
from plait.parallel import assign_whole
from plait.spec import Phase
from plait.world import on_main, restore_rng_state, rng_state

_SHOWN = 8
_PLAIN = (bool, int, float, str, tuple, type(None))
_NOT_SETTINGS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Of a group: what it holds, and how torch computes it, which another layout may do otherwise."""


class Saver:
    """Writes and reads the checkpoints of one runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._writer: CheckpointWriter | None = None
        self._root: Path | None = None
        self._generators: dict[str, Tensor] | None = None

    # ---- writing

    def save(
        self,
        path: Path,
        position: Mapping[str, int],
        *,
        optimizer: bool = True,
        schedulers: bool = True,
        meta: Mapping[str, Any] | None = None,
        tidy: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint; every rank must call it. `tidy` is called once it is complete, on one rank."""
        runner = self._runner
        self.wait()
        runner.enter(Phase.SAVE)
        on_main(runner.world, lambda: path.parent.mkdir(parents=True, exist_ok=True))
        runner.engine.agree_on_buffers()
        if self._root != path.parent:
            self.close()
            self._root = path.parent
        if self._writer is None:
            background = runner.config.checkpoint.async_save
            self._writer = CheckpointWriter(path.parent, runner.world, background=background)
        with runner.engine.weights_to_use():
            tensors = runner.engine.state_entries()
            if not optimizer:
                tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("optim.")}
            tensors.update(self._hook_tensors())
            for name, tensor in rng_state(runner.device).items():
                tensors[f"rng.{runner.world.rank}.{name}"] = tensor
            state = self._state(position, schedulers=schedulers, meta=meta)
            self._writer.save(path, tensors, state, step=runner.engine.steps, tidy=tidy)
        runner.enter(Phase.IDLE)

    def _state(self, position: Mapping[str, int], *, schedulers: bool, meta: Any) -> dict[str, Any]:
        runner = self._runner
        added: dict[str, Any] = {
            "meta": {"seed": runner.seed, "experiment_name": runner.experiment_name, **position, **(meta or {})},
            "message_hub": runner.message_hub.state_dict(),
        }
        if schedulers:
            added["param_schedulers"] = [scheduler.state_dict() for scheduler in runner.param_schedulers]
            added["param_groups"] = [_numbers(group) for group in runner.optim_wrapper.param_groups]
        runner.call_hook("before_save_checkpoint", checkpoint=added)
        try:
            json.dumps(added)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"a hook put something into the checkpoint that JSON cannot hold: {error}; put numbers and texts there"
            ) from error
        description = to_dict(runner.config)
        description.pop("optim", None)  # it is that of the optim wrapper
        return {
            "engine": runner.engine.state(),
            "epoch": position["epoch"],
            "step_in_epoch": position["step_in_epoch"],
            "batch_total": position["batch_total"],
            "best": None,
            "hooks": {name: {} for name in self._hooks()},
            "config": description,
            "mmengine": added,
        }

    def _hooks(self) -> dict[str, Any]:
        """Hooks with tensors of their own, by the name under which a checkpoint has them."""
        return {hook.state_name: hook for hook in self._runner.hooks if hasattr(hook, "state_name")}

    def _hook_tensors(self) -> dict[str, Tensor]:
        found = {name: hook.tensors(self._runner) for name, hook in self._hooks().items()}
        return {f"hook.{name}.{key}": tensor for name, part in found.items() for key, tensor in part.items()}

    # ---- reading

    def resume(self, name: str | Path) -> None:
        """Go on from a checkpoint: weights, optimizer, schedules, position and random numbers."""
        runner, world = self._runner, self._runner.world
        path = on_main(world, lambda: resolve(name))
        if not (path / NAME).exists():
            raise CheckpointError(
                f"{path} holds no state to go on from: `plait convert {path} NEW --to plait` makes a checkpoint of it, "
                "and load_from takes its weights"
            )
        runner.enter(Phase.LOAD)
        on_main(world, lambda: open_checkpoint(path))  # what is wrong with it is said once
        checkpoint = open_checkpoint(path)
        state = checkpoint.manifest.state
        if "engine" not in state or not any(key.startswith("optim.") for key in checkpoint.index.tensors):
            raise CheckpointError(f"{path} holds weights alone: write resume=False, which takes them by load_from")
        runner.engine.allocate_optimizer_state(entries(checkpoint.index, "optim."))
        tensors = {**runner.engine.state_entries(), **self._wanted(checkpoint)}
        generators = rng_state(runner.device)
        same = checkpoint.manifest.world_size == world.size
        if same and f"rng.{world.rank}.torch" in checkpoint.index.tensors:
            tensors.update({f"rng.{world.rank}.{key}": tensor for key, tensor in generators.items()})
            self._generators = generators
        left = () if any(key.startswith("hook.") for key in tensors) else ("hook.",)
        load_into(checkpoint, tensors, world=world, ignore=("rng.", *left))
        runner.engine.state_loaded()
        runner.engine.restore(state["engine"])
        self.restore_generators()
        self._set(state, path)
        runner.enter(Phase.IDLE)

    def _wanted(self, checkpoint: Any) -> dict[str, Tensor]:
        """The tensors of hooks, where the checkpoint has them."""
        return {name: tensor for name, tensor in self._hook_tensors().items() if name in checkpoint.index.tensors}

    def restore_generators(self) -> None:
        """Put random numbers back to where the checkpoint found them."""
        if self._generators is not None:
            restore_rng_state(self._generators, self._runner.device)

    def _set(self, state: Mapping[str, Any], path: Path) -> None:
        runner = self._runner
        added = dict(state.get("mmengine", {}))
        runner.message_hub.load_state_dict(added.get("message_hub", {}))
        saved = added.get("param_groups")
        if saved is not None:
            groups = runner.optim_wrapper.param_groups
            if len(saved) != len(groups):
                raise CheckpointError(
                    f"{path} has {len(saved)} groups of parameters, and this run {len(groups)}: keep paramwise_cfg"
                )
            for group, numbers in zip(groups, saved, strict=True):
                group.update({key: tuple(v) if isinstance(v, list) else v for key, v in numbers.items()})
        schedulers = added.get("param_schedulers", [])
        if schedulers and len(schedulers) != len(runner.param_schedulers):
            count = len(runner.param_schedulers)
            raise CheckpointError(f"{path} has {len(schedulers)} schedules, and this run {count}: keep param_scheduler")
        for scheduler, position in zip(runner.param_schedulers, schedulers, strict=False):
            scheduler.load_state_dict(position)
        runner.set_position(int(state.get("epoch", 0)), int(state.get("step_in_epoch", 0)), state, path)
        runner.call_hook("after_load_checkpoint", checkpoint=added)

    def load_weights(self, name: str | Path) -> None:
        """Take the weights of a checkpoint of any kind; what does not fit is told, and left."""
        runner, world = self._runner, self._runner.world
        path = on_main(world, lambda: resolve(name))
        tensors = {key: value for key, value in runner.engine.state_tensors().items() if key.startswith("model.")}
        meta: dict[str, Any] = {}
        if (path / NAME).exists():
            checkpoint = open_checkpoint(path)
            meta = checkpoint.manifest.state.get("mmengine", {}).get("meta", {})
            rest = ("optim.", "rng.", "hook.")
            rows = load_into(checkpoint, tensors, world=world, ignore=rest, partial=("model.*",))
            left = [row.name for row in rows]
        else:
            left = _fill(path, tensors)
        runner.engine.state_loaded()
        missing = [each.removeprefix("model.") for each in left if each in tensors]
        if missing and len(missing) == len(tensors):
            raise CheckpointError(f"{path} has no weight that fits this model; its names are others, or its shapes")
        if left:
            names = ", ".join(each.removeprefix("model.") for each in left[:_SHOWN])
            more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
            runner.logger.warning(f"not loaded from {path}, missing or of another shape: {names}{more}")
        runner.call_hook("after_load_checkpoint", checkpoint={"meta": meta})

    # ---- the end

    def wait(self) -> None:
        """See a checkpoint in the background through."""
        if self._writer is not None and self._writer.busy:
            self._writer.wait()

    def close(self) -> None:
        """See through what is being written, and let go."""
        if self._writer is not None:
            self.wait()
            self._writer.close()
            self._writer = None


def _fill(path: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    """Fill tensors from a checkpoint that others wrote; returns the names on one side only, or of another shape."""
    with open_source(path) as source:
        entries = {name: entry for name, entry in source.entries.items() if name.startswith("model.")}
        fitting = [name for name, t in tensors.items() if name in entries and entries[name].shape == t.shape]
        for name in fitting:
            assign_whole(tensors[name], source.read(name))
    return sorted((tensors.keys() | entries.keys()) - set(fitting))


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group, without its parameters."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in group.items()
        if key not in _NOT_SETTINGS and isinstance(value, _PLAIN)
    }
