"""A DeepSpeed checkpoint of any stage, opened for reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.checkpoint.convert.deepspeed.folder import Files, find_files
from plait.checkpoint.convert.deepspeed.parts import Parts
from plait.checkpoint.convert.deepspeed.plain import stage_0
from plait.checkpoint.convert.deepspeed.states import dtype_of, scaler_of, shapes_of, tied_of, untrained
from plait.checkpoint.convert.deepspeed.universal import universal
from plait.checkpoint.convert.deepspeed.zero import Pickled, stage_1_and_2, stage_3
from plait.checkpoint.convert.pickled import Inert, open_file
from plait.checkpoint.convert.source import Entry, Source
from plait.errors import CheckpointError


class DeepSpeedSource(Source):
    """What DeepSpeed's `save_checkpoint` wrote, at any stage and on any number of ranks, or `ds_to_universal` made.

    Weights are the fp32 ones that the optimizer updates; buffers and frozen parameters have no such, and come as the
    model has them. A parameter with two names appears under the first, and `state["tied"]` has the others.

    DeepSpeed need not be installed, and nothing in the files is executed. [Note: inert objects]
    `order` is for stage 0 alone. [Note: whose state is it]
    """

    kind = "deepspeed"

    def __init__(self, path: Path, *, order: Sequence[str] | None = None) -> None:
        self.path = path
        files = find_files(path)
        first = files.models[min(files.models)]
        model = open_file(first)
        if not isinstance(model, Mapping) or "global_steps" not in model:
            raise CheckpointError(f"{first} is no model-states file of DeepSpeed: it lacks `global_steps`")
        try:
            self._parts, stage, ranks, optimizer = _open(files, model, order)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{files.folder} is laid out in a way that is not known of DeepSpeed: {type(error).__name__} {error}"
            ) from error
        self.entries = {name: Entry(part.shape, part.dtype) for name, part in self._parts.items()}
        steps, dtype = int(model["global_steps"]), dtype_of(model)
        self.state = {
            "engine": {
                "steps": steps,
                "skips_in_a_row": 0,
                "scaler": scaler_of(optimizer) if dtype == "fp16" else None,
            },
            "tied": tied_of(model),
        }
        self.facts = {
            "written by": f"DeepSpeed {model.get('ds_version', 'of unknown version')}",
            "stage": stage,
            "ranks": str(ranks),
            "tag": files.folder.name,
            "step": str(steps),
            "dtype": dtype,
        }

    def read(self, name: str) -> Tensor:
        """One whole tensor, in memory of its own."""
        return self._parts[name].read()

    def close(self) -> None:
        """Nothing to do: files are open only while they are read."""


def _open(files: Files, model: Pickled, order: Sequence[str] | None) -> tuple[Parts, str, int, Any]:
    """The parts, the stage, the number of ranks, and the optimizer state that rank 0 saved."""
    if files.universal is not None:
        common = _if_there(files.universal / "optimizer_state.pt")
        # What is not trained lies there too, but in fp32; the model has it as it was.
        models = [open_file(files.models[rank]) for rank in sorted(files.models)]
        rest = untrained(models, {f"model.{name}" for name in shapes_of(model)})
        parts = universal(files.universal, model, common, rest)
        ranks = int(model.get("dp_world_size") or 1)
        return rest | parts, "universal", ranks, common
    if not files.shards:
        if model.get("param_shapes") is not None:
            raise CheckpointError(
                f"{files.folder} was saved with ZeRO, and there is no *_optim_states.pt in it: the fp32 weights and "
                "the optimizer state are in these. Copy the whole folder again"
            )
        parts = stage_0(model, order)
        return untrained([model], parts) | parts, "0", int(model.get("dp_world_size") or 1), model.get("optimizer")
    first = files.shards[min(files.shards)]
    optimizer = open_file(first)["optimizer_state_dict"]
    ranks = _ranks(optimizer)
    shards = [open_file(path)["optimizer_state_dict"] for path in files.of_ranks(files.shards, ranks, "optim_states")]
    if "fp32_flat_groups" not in optimizer:
        parts = stage_1_and_2(model, shards)
        return untrained([model], parts) | parts, str(_number(optimizer.get("zero_stage")) or 1), ranks, optimizer
    models = [open_file(path) for path in files.of_ranks(files.models, ranks, "model_states")]
    parts = stage_3(model, shards)
    return untrained(models, parts) | parts, "3", ranks, optimizer


def _if_there(path: Path) -> Any:
    return open_file(path) if path.is_file() else None


def _ranks(optimizer: Pickled) -> int:
    counts = optimizer["partition_count"]
    return max(counts) if isinstance(counts, Sequence) else int(counts)


def _number(value: Any) -> int | None:
    """The number of an enum's member, which is what it was to be made from."""
    found = value.args[0] if isinstance(value, Inert) and value.args else value
    return found if isinstance(found, int) else None
