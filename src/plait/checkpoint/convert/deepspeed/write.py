"""Write a checkpoint that DeepSpeed resumes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.convert.deepspeed.universal import FRESH
from plait.checkpoint.convert.source import Source
from plait.checkpoint.convert.target import replacing
from plait.errors import CheckpointError

WRITTEN_FOR = "0.19.8"
"""The version of DeepSpeed whose layout is written."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


def write_deepspeed(source: Source, target: Path) -> int:
    """Write weights and optimizer state to the folder `target`, one tensor after another; returns its size.

    DeepSpeed resumes from it with `engine.load_checkpoint(target)`, at stages 1, 2 and 3 and on any number of
    data-parallel ranks, if the `ds_config` says `"checkpoint": {"load_universal": true}`. Then:

    - Learning rates, weight decay and the rest of the optimizer's settings are those of the `ds_config`: none are
      in the folder. One of DeepSpeed's own schedulers continues at the right step; its rate for the first step has
      to be asked for: `engine.lr_scheduler.step(engine.lr_scheduler.last_batch_iteration)`. With a scheduler of
      torch, pass `load_lr_scheduler_states=False`. An fp16 run starts with the loss scale of the `ds_config`.
    - At stage 3 DeepSpeed reads the moments of Adam and no others, and gives one and the same `step` to all groups.
      Its own Adam takes that; with an optimizer of torch make them tensors, one each:
      `for state in engine.optimizer.optimizer.state.values(): state["step"] = torch.tensor(float(state["step"]))`.
    - DeepSpeed does not restore buffers and frozen parameters from a universal folder, and at stage 0 cannot load one
      at all. Everything is there, though, for the model to be given before `deepspeed.initialize`:
      `{f.parent.name: torch.load(f)["param"] for f in Path(target).glob("*/zero/*/fp32.pt")}` is its state dict.
      Instead of stage 0 take stage 1, which updates alike.

    A source without optimizer state is one whose optimizer has not made a step: it starts with zeros.
    """
    plan = _Plan(source)
    needed = sum(entry.bytes for entry in source.entries.values())
    with replacing(target, source=source.path, needed=needed, overwrite=False) as staging:
        tag = f"global_step{plan.steps}"
        _write(plan, staging / tag)
        for pointer in ("latest", "latest_universal"):
            (staging / pointer).write_text(tag, encoding="utf-8")
        return sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())


class _Plan:
    """What a source holds, as DeepSpeed needs to see it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.weights = [name.removeprefix("model.") for name in source.entries if name.startswith("model.")]
        self.keys: dict[str, list[str]] = {name: [] for name in self.weights}
        for entry in source.entries:
            if entry.startswith("optim."):
                name, _, key = entry.removeprefix("optim.").rpartition(".")
                if name not in self.keys:
                    raise CheckpointError(f"{source.path} has {entry} and no weights of that name")
                self.keys[name].append(key)
        self.trained = [name for name, keys in self.keys.items() if keys]
        self._refuse_other_shapes()
        self.step = self._one_step()
        engine = source.state.get("engine") or {}
        self.steps = int(engine.get("steps", self.step))

    def _refuse_other_shapes(self) -> None:
        entries = self.source.entries
        for name in self.trained:
            of_weights = entries[f"model.{name}"].shape
            for key in self.keys[name]:
                shape = entries[f"optim.{name}.{key}"].shape
                if key != "step" and shape != of_weights:
                    raise CheckpointError(
                        f"optim.{name}.{key} has the shape {tuple(shape)}, and the parameter {tuple(of_weights)}: "
                        "DeepSpeed only keeps states of the parameter's shape. Convert the weights alone"
                    )

    def _one_step(self) -> float:
        counted = [name for name in self.trained if "step" in self.keys[name]]
        steps = {name: float(self.source.read(f"optim.{name}.step")) for name in counted}
        if len(set(steps.values())) > 1:
            low, high = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
            raise CheckpointError(
                f"{low} was updated {steps[low]:g} times and {high} {steps[high]:g} times; DeepSpeed counts the steps "
                "of all parameters together. Convert the weights alone"
            )
        return next(iter(steps.values()), 0.0)

    def files(self, name: str) -> Iterator[tuple[str, Any]]:
        """The files of one parameter, by the name of the state in it."""
        tensor = self.source.read(f"model.{name}")
        keys = self.keys[name]
        yield "fp32", {"param": _alone(tensor.float() if keys else tensor)}
        if keys:
            for key in keys:
                if key != "step":
                    yield key, {"param": _alone(self.source.read(f"optim.{name}.{key}").float())}
        elif tensor.is_floating_point():
            # Frozen, a buffer, or never reached by a gradient: only the run that loads it knows. Zeros take no room.
            for key in _MOMENTS:
                yield key, {"param": torch.zeros(()).expand(tensor.shape), FRESH: True}
        if tensor.is_floating_point():
            yield "step", torch.tensor(self.step)


def _alone(tensor: Tensor) -> Tensor:
    """Without the rest of the storage that it is a view of, which torch.save would write too."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _write(plan: _Plan, folder: Path) -> None:
    for name in plan.weights:
        home = folder / "zero" / name
        home.mkdir(parents=True)
        for state, content in plan.files(name):
            torch.save(content, home / f"{state}.pt")
    torch.save(_common(plan), folder / "zero" / "optimizer_state.pt")
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        torch.save(_model_states(plan), folder / name)


def _common(plan: _Plan) -> Mapping[str, Any]:
    """What DeepSpeed reads of the optimizer as a whole.

    What stands in `param_groups` would overwrite the settings of its groups (at stage 3 those of the first group all
    of them), so nothing does; there are enough of them for any division of the parameters.
    """
    return {
        "param_groups": [{} for _ in plan.weights],
        "optimizer_state_dict": {"state": {0: {"step": int(plan.step)}}, "param_groups": [{}]},
        "ds_version": WRITTEN_FOR,
    }


def _model_states(plan: _Plan) -> Mapping[str, Any]:
    entries = plan.source.entries
    return {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [{name: entries[f"model.{name}"].shape for name in plan.trained}],
        "frozen_param_shapes": None,
        "shared_params": dict(plan.source.state.get("tied") or {}),
        "frozen_param_fragments": None,
        "lr_scheduler": {"last_batch_iteration": plan.steps - 1},
        "skipped_steps": 0,
        "global_steps": plan.steps,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": WRITTEN_FOR,
    }
