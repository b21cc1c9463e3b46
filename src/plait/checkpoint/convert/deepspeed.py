"""DeepSpeed checkpoints: reading those of any ZeRO stage, writing universal ones."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from plait.checkpoint.convert.conversion import replacing
from plait.checkpoint.convert.files import Inert, PickledTensor, field, open_file
from plait.checkpoint.convert.source import Source, TensorEntry
from plait.config import read_name
from plait.errors import CheckpointError

# The files of a DeepSpeed checkpoint.


_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_POINTERS = ("latest", "latest_universal")


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one checkpoint, by rank."""

    folder: Path
    """The folder of the tag."""
    models: dict[int, Path]
    """Model-states files by rank: of every rank at stage 3, else only of rank 0."""
    shards: dict[int, Path]
    """Files with the ZeRO optimizer state, by rank."""

    @property
    def universal(self) -> Path | None:
        """The folder of unsharded parameters of a universal checkpoint; None in others."""
        return self.folder / "zero" if (self.folder / "zero").is_dir() else None

    def of_ranks(self, files: dict[int, Path], count: int, what: str) -> list[Path]:
        """Return one file for each of `count` ranks; raise an error that names a missing one."""
        missing = [rank for rank in range(count) if rank not in files]
        if missing or len(files) != count:
            names = ", ".join(path.name for path in list(files.values())[:8]) or "none"
            reason = f"those of ranks {missing[:16]} are missing" if missing else "there are more, of another save"
            raise CheckpointError(
                f"{self.folder}: {count} ranks wrote {what}, and {reason}. Found: {names}. Copy the whole folder again"
            )
        return [files[rank] for rank in range(count)]


def is_deepspeed(path: Path) -> bool:
    """Return whether a folder looks like a checkpoint of DeepSpeed, or like a folder of several."""
    if not path.is_dir():
        return False
    return any((path / name).is_file() for name in _POINTERS) or any(_MODEL.fullmatch(p.name) for p in path.iterdir())


def find_files(path: Path) -> Files:
    """Return the files of the checkpoint at `path`: a tag's folder, or one whose file `latest` names a tag."""
    folder = _tag_of(path) or path
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; name the one with `latest` in it, or the folder of a tag")
    models: dict[int, Path] = {}
    shards: dict[int, Path] = {}
    for file in sorted(folder.iterdir()):
        _refuse_parallel(file)
        for pattern, files in ((_MODEL, models), (_OPTIM, shards)):
            match = pattern.fullmatch(file.name)
            if match is None:
                continue
            rank = int(match[1] or 0)
            if rank in files and not (folder / "zero").is_dir():
                raise CheckpointError(
                    f"{folder} holds {files[rank].name} and {file.name}: two checkpoints were saved into one folder. "
                    "Remove the files of the older"
                )
            files.setdefault(rank, file)
    if not models:
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"{folder} is not a DeepSpeed checkpoint: it has no *_model_states.pt, but {names}. "
            "Name the folder with `latest` in it, or the folder of a tag"
        )
    return Files(folder, models, shards)


def _tag_of(path: Path) -> Path | None:
    pointers = [path / name for name in _POINTERS if (path / name).is_file()]
    folders = [path / read_name(pointer, CheckpointError) for pointer in pointers]
    there = [folder for folder in folders if folder.is_dir()]
    if folders and not there:
        names = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir())) or "none"
        raise CheckpointError(f"{pointers[0]} names {folders[0].name!r}, which is not there; folders found: {names}")
    return there[0] if there else None


def _refuse_parallel(file: Path) -> None:
    name = file.name
    parallelism = None
    if re.match(r"(layer_\d+_)?expert_\d+_|expp_rank_", name):
        parallelism = "mixture of experts, spread over ranks"
    elif re.match(r"layer_\d+-model", name):
        parallelism = "pipeline parallel (a file for every layer)"
    elif (match := _MODEL.fullmatch(name) or _OPTIM.fullmatch(name)) and int(match[2]) > 0:
        parallelism = "tensor or pipeline parallel (more than one mp_rank)"
    if parallelism is not None:
        raise CheckpointError(
            f"{file.parent} is a DeepSpeed checkpoint of another kind: {parallelism}; {name} says so. Only those of "
            "data-parallel ranks are read: make it universal with DeepSpeed's ds_to_universal, load that with "
            "`load_universal` on data-parallel ranks alone, and save it again"
        )


# The entries of a DeepSpeed checkpoint, read one at a time.


class DeepSpeedEntry(NamedTuple):
    """One tensor: its shape and dtype, and the function that reads and assembles it."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]


DeepSpeedEntries = dict[str, DeepSpeedEntry]
"""Entries by the names of a `Source`: `model.<parameter>`, `optim.<parameter>.<key>`."""

Cuts = Callable[[], Iterable[tuple[int, int, int]]]
"""Returns where a parameter's elements lie, in order: (rank, first element in its flat tensor, number of elements)."""


def whole(tensor: PickledTensor) -> DeepSpeedEntry:
    """Return the entry of a tensor that one file holds unsharded."""
    return DeepSpeedEntry(tensor.shape, tensor.dtype, tensor.read)


def number(value: Any) -> DeepSpeedEntry | None:
    """Return the entry of a scalar of the optimizer state, as a 0-dimensional tensor; None if it is not a scalar."""
    if isinstance(value, PickledTensor) and value.numel == 1:
        return DeepSpeedEntry(torch.Size(), value.dtype, lambda: value.read().reshape(()))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return DeepSpeedEntry(torch.Size(), torch.float32, lambda: torch.tensor(float(value)))
    return None


def joined(name: str, shape: torch.Size, flats: Sequence[PickledTensor], cuts: Cuts) -> DeepSpeedEntry:
    """Return the entry of a tensor whose pieces lie in the flat tensors of all ranks; only the pieces are read."""

    def read() -> Tensor:
        pieces = list(cuts())
        available = sum(max(0, min(count, flats[rank].numel - start)) for rank, start, count in pieces)
        if available != shape.numel():
            raise CheckpointError(
                f"{name}: the files of {len(flats)} ranks hold {available} of its {shape.numel()} elements; "
                "they are not all of one checkpoint"
            )
        tensor = torch.empty(shape, dtype=flats[0].dtype)
        rest = tensor.view(-1)
        for rank, start, count in pieces:
            flats[rank].fill(rest[:count], start)
            rest = rest[count:]
        return tensor

    return DeepSpeedEntry(shape, flats[0].dtype, read)


def flat_group(
    name: str,
    shape: torch.Size,
    masters: Sequence[PickledTensor],
    states: Sequence[Mapping[str, Any]],
    step: Any,
    cuts: Cuts,
) -> DeepSpeedEntries:
    """Return the entries of a parameter and its optimizer state, which lie at the same places of flat tensors.

    `masters` are the ranks' flat fp32 weights, `states` their optimizer states for these; `step` is the step count if
    `states` have none.
    """
    entries = {f"model.{name}": joined(f"model.{name}", shape, masters, cuts)}
    for key, first in states[0].items():
        entry = f"optim.{name}.{key}"
        if isinstance(first, PickledTensor) and len(first.shape) == 1 and first.numel >= masters[0].numel:
            entries[entry] = joined(entry, shape, [state[key] for state in states], cuts)
        elif (scalar := number(first)) is not None:
            entries[entry] = scalar
        elif isinstance(first, PickledTensor):
            raise CheckpointError(
                f"{entry}: DeepSpeed's optimizer keeps {tuple(first.shape)} for a partition of "
                f"{masters[0].numel} elements, and that cannot be divided among its parameters"
            )
    if states[0] and f"optim.{name}.step" not in entries and (scalar := number(step)) is not None:
        entries[f"optim.{name}.step"] = scalar
    return entries


# The ZeRO partitions: which rank has which elements of a parameter.


Pickled = Mapping[str, Any]
"""The unpickled content of one file of a checkpoint."""


def stage_1_and_2(model: Pickled, shards: Sequence[Pickled]) -> DeepSpeedEntries:
    """Return the trained parameters of stages 1 and 2 with their optimizer state.

    All parameters of a group are concatenated in a flat tensor, which is partitioned evenly over the ranks: a boundary
    may be in the middle of a parameter. The padding at the end is not stored in the last rank's partition.

    [Note: addresses that are not trusted]
    Every rank also stores where in its partition each parameter lies (`param_slice_mappings`). With
    `round_robin_gradients` these addresses are in another order than the tensors: DeepSpeed 0.19.8 then returns
    scrambled values from `safe_get_full_fp32_param`, and `ds_to_universal` writes scrambled values. So the addresses
    are not used: the order of `param_shapes` is right in all cases.
    """
    entries: DeepSpeedEntries = {}
    paddings = shards[0].get("param_alignment_paddings")
    for group, shapes in enumerate(model["param_shapes"]):
        masters = [shard["single_partition_of_fp32_groups"][group] for shard in shards]
        states = [_state_of_group(shard, group) for shard in shards]
        step = _step_of_group(shards[0], group)
        length = max(master.numel for master in masters)
        begin = 0
        for (name, given), padding in zip(shapes.items(), paddings[group] if paddings else repeat(0), strict=False):
            shape = torch.Size(given)
            cuts = _across(begin, begin + shape.numel(), length)
            entries |= flat_group(name, shape, masters, states, step, cuts)
            begin += shape.numel() + padding
    return entries


def _state_of_group(shard: Pickled, group: int) -> Mapping[str, Any]:
    base = shard.get("base_optimizer_state") or {}
    if isinstance(base, Mapping):
        groups = base.get("param_groups")
        state = base["state"].get(groups[group]["params"][0], {}) if groups else {}
    else:
        state = base[group]  # an elastic checkpoint: one state per group, without padding
    return state if isinstance(state, Mapping) else {}


def _step_of_group(shard: Pickled, group: int) -> Any:
    base = shard.get("base_optimizer_state")
    groups = base.get("param_groups") if isinstance(base, Mapping) else None
    return groups[group].get("step") if groups else shard.get("base_optimizer_state_step")


def _across(begin: int, end: int, length: int) -> Cuts:
    """Return the `Cuts` of elements `begin` to `end` of a flat tensor that is split into partitions of `length`."""

    def cuts() -> Iterator[tuple[int, int, int]]:
        at = begin
        while at < end:
            rank, start = divmod(at, length)
            count = min(end - at, length - start)
            yield rank, start, count
            at += count

    return cuts


def stage_3(model: Pickled, shards: Sequence[Pickled]) -> DeepSpeedEntries:
    """Return the trained parameters of stage 3 and their state. Each is padded and split evenly over ranks."""
    entries: DeepSpeedEntries = {}
    for group, shapes in enumerate(model["param_shapes"]):
        masters = [shard["fp32_flat_groups"][group] for shard in shards]
        states = [_state_of_subgroup(shard, group) for shard in shards]
        begin = 0
        for name, given in shapes.items():
            shape = torch.Size(given)
            share = math.ceil(shape.numel() / len(shards))
            entries |= flat_group(name, shape, masters, states, None, evenly(begin, shape.numel(), share, len(shards)))
            begin += share
        if masters[0].numel < begin:
            raise CheckpointError(
                f"the fp32 weights of parameter group {group} have {masters[0].numel} of {begin} elements: "
                "DeepSpeed kept them on NVMe, in files that only it can read back. Load the checkpoint once with "
                "`offload_optimizer` on the CPU or off, and save it again"
            )
    return entries


def _state_of_subgroup(shard: Pickled, index: int) -> Mapping[str, Any]:
    inner = shard.get("optimizer_state_dict")
    if not isinstance(inner, Mapping):
        return {}
    numbered = [number for group in inner["param_groups"] for number in group["params"]]
    state = inner["state"].get(numbered[index] if index < len(numbered) else index, {})
    return state if isinstance(state, Mapping) else {}


def evenly(begin: int, size: int, share: int, ranks: int) -> Cuts:
    """Return the `Cuts` of a parameter of `size` elements, of which each rank has `share` at its element `begin`."""

    def cuts() -> Iterator[tuple[int, int, int]]:
        for rank in range(ranks):
            yield rank, begin, max(0, min(share, size - rank * share))

    return cuts


# A model-states file: the weights in the model's own dtype, and settings of the run.


def module_of(model: Pickled) -> dict[str, PickledTensor]:
    """Return the tensors of the model's state dict. At stage 3 the parameters in it are empty."""
    return {name: tensor for name, tensor in (model.get("module") or {}).items() if isinstance(tensor, PickledTensor)}


def tied_of(model: Pickled) -> dict[str, str]:
    """Return the tied parameters: each later name of a parameter → its first name."""
    shared = model.get("shared_params")
    if shared is not None:
        return dict(shared)
    owners: dict[tuple[Any, ...], str] = {}
    tied = {}
    for name, tensor in module_of(model).items():
        owner = owners.setdefault((tensor.begin, tensor.shape, tensor.stride) if tensor.numel else (name,), name)
        if owner != name:
            tied[name] = owner
    return tied


def shapes_of(model: Pickled) -> dict[str, torch.Size]:
    """Return the shapes of the trained parameters, if ZeRO stored them."""
    return {name: torch.Size(shape) for group in model.get("param_shapes") or () for name, shape in group.items()}


def untrained(models: Sequence[Pickled], trained: Container[str]) -> DeepSpeedEntries:
    """Return buffers and frozen parameters, in the model's own precision.

    `models` are the model-states files of all ranks at stage 3, else the only one.
    """
    model = models[0]
    entries: DeepSpeedEntries = {}
    tied = tied_of(model)
    frozen = model.get("frozen_param_shapes") or {}
    kept = set(model.get("buffer_names") or ())
    module, shapes = module_of(model), shapes_of(model)
    spread = any(name in module and module[name].shape != shape for name, shape in shapes.items())
    for name, tensor in module.items():
        if f"model.{name}" in trained or name in tied:
            continue
        if name in frozen:
            entries[f"model.{name}"] = _frozen(name, torch.Size(frozen[name]), models)
        elif name in kept or not spread:
            entries[f"model.{name}"] = whole(tensor)
    return entries


def _frozen(name: str, shape: torch.Size, models: Sequence[Pickled]) -> DeepSpeedEntry:
    flats = [model["frozen_param_fragments"][name] for model in models]
    if flats[0].shape == shape:
        return whole(flats[0])
    share = math.ceil(shape.numel() / len(flats))
    return joined(f"model.{name}", shape, flats, evenly(0, shape.numel(), share, len(flats)))


def dtype_of(model: Pickled) -> str:
    """Return the model's compute dtype: `fp32`, `bf16` or `fp16`."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    buffers = set(model.get("buffer_names") or ())
    dtypes = {tensor.dtype for name, tensor in module_of(model).items() if name not in buffers}
    return next((name for dtype, name in names.items() if dtype in dtypes), "fp32")


def scaler_of(optimizer: Any) -> dict[str, float] | None:
    """Return the loss scaler's state under Plait's keys; None if there is none."""
    if not isinstance(optimizer, Mapping):
        return None
    scaler = optimizer.get("loss_scaler")
    look = optimizer.get if scaler is None else lambda key, default=None: field(scaler, key, default)
    scale = look("cur_scale")
    if scale is None:
        return None
    clean = look("cur_iter", 0) - look("last_overflow_iter", -1) - 1 if look("last_overflow_iter") is not None else 0
    return {"scale": float(scale), "clean_steps": max(0, int(clean)), "tolerance": int(look("cur_hysteresis", 1))}


# Stage 0: unsharded weights, and an optimizer state without parameter names.
#
# [Note: whose state is it]
# At stage 0 DeepSpeed saves `optimizer.state_dict()`, which numbers the parameters in the order in which the optimizer
# was given them, group after group; the names are not stored. Within a group, parameters are in the model's order, but
# it is not stored which parameters a group has. So a number is matched with a name only if there is one possibility: in
# 16-bit runs, the name whose weights are the rounded fp32 weights; otherwise, if all the model's parameters of
# a shape are in one group. If several possibilities are left, an error is raised, and the caller has to pass the order.


def stage_0(model: Pickled, order: Sequence[str] | None) -> DeepSpeedEntries:
    """Return the trained parameters of stage 0 and their optimizer state.

    `order`: the names of the optimizer's parameters, in its order; () leaves out the optimizer state.

    [Note: whose state is it]
    """
    optimizer = model.get("optimizer")
    if not isinstance(optimizer, Mapping) or order == ():
        return {}
    buffers = set(model.get("buffer_names") or ())
    tied = tied_of(model)
    weights = {name: tensor for name, tensor in module_of(model).items() if name not in buffers and name not in tied}
    inner = optimizer.get("optimizer_state_dict", optimizer)
    states, groups = inner["state"], inner["param_groups"]
    given = list(order) if order is not None else _named(groups)
    if given is not None and (unknown := [name for name in given if name not in weights]):
        raise CheckpointError(f"order names {unknown[:4]}, which the model does not have")
    if "fp32_groups_flat" in optimizer:
        return _flat(weights, optimizer["fp32_groups_flat"], states, groups, given)
    numbers = [number for group in groups for number in group["params"]]
    if "fp32_groups" in optimizer:
        masters = [list(group) for group in optimizer["fp32_groups"]]
        names = given or _by_value(weights, masters)
        values = [master for group in masters for master in group]
    else:
        names = given or _by_shape(weights, groups, states)
        values = [weights[name] for name in names]
    if len(names) != len(numbers):
        raise CheckpointError(f"the optimizer has {len(numbers)} parameters, and {len(names)} names were given for it")
    entries: DeepSpeedEntries = {}
    for name, value, index in zip(names, values, numbers, strict=True):
        entries |= _one(name, value, states.get(index, {}))
    return entries


def _named(groups: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Return the parameter names that the optimizer itself stored, if it was given names."""
    if not all("param_names" in group for group in groups):
        return None
    return [name for group in groups for name in group["param_names"]]


def _one(name: str, value: PickledTensor, state: Mapping[str, Any]) -> DeepSpeedEntries:
    entries = {f"model.{name}": whole(value)}
    for key, kept in state.items():
        value_entry = whole(kept) if isinstance(kept, PickledTensor) else number(kept)
        if value_entry is not None:
            entries[f"optim.{name}.{key}"] = value_entry
    return entries


def _by_shape(
    weights: Mapping[str, PickledTensor], groups: Sequence[Mapping[str, Any]], states: Mapping[int, Any]
) -> list[str]:
    numbers = [(index, number) for index, group in enumerate(groups) for number in group["params"]]
    shapes = [(group, _shape(states.get(number))) for group, number in numbers]
    if len(groups) == 1 and len(numbers) == len(weights):
        pairs = zip(weights.values(), shapes, strict=True)
        if all(shape is None or shape == tensor.shape for tensor, (_, shape) in pairs):
            return list(weights)
    by_shape: dict[torch.Size, list[str]] = {}
    for name, tensor in weights.items():
        by_shape.setdefault(tensor.shape, []).append(name)
    counts = Counter(shape for _, shape in shapes)
    for shape in counts:
        of_groups = {group for group, other in shapes if other == shape}
        names = by_shape.get(shape, []) if shape is not None else []
        if len(of_groups) > 1 or len(names) != counts[shape]:
            _give_up(shape, names, counts[shape], len(of_groups))
    queues = {shape: iter(names) for shape, names in by_shape.items()}
    return [next(queues[shape]) for _, shape in shapes if shape is not None]


def _shape(state: Any) -> torch.Size | None:
    sizes = [value.shape for value in (state or {}).values() if isinstance(value, PickledTensor) and value.shape]
    return sizes[0] if sizes else None


def _give_up(shape: torch.Size | None, names: Sequence[str], count: int, groups: int) -> NoReturn:
    what = f"shape {tuple(shape)}" if shape is not None else "no state yet"
    some = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
    raise CheckpointError(
        f"a stage 0 checkpoint does not say whose optimizer state is whose: of {what} it has {count} in {groups} "
        f"parameter group(s), and the model has {len(names)} parameters ({some}). "
        "Give DeepSpeedSource(order=[…]) the optimizer's parameters by name, in its order, or order=() to read the "
        "weights alone; or save once with ZeRO stage 1, which notes the names"
    )


def _by_value(weights: Mapping[str, PickledTensor], masters: Sequence[Sequence[PickledTensor]]) -> list[str]:
    free = dict(weights)
    names = []
    for group in masters:
        for master in group:
            value = master.read()
            alike = [name for name, tensor in free.items() if tensor.shape == master.shape]
            name = next((name for name in alike if torch.equal(value.to(free[name].dtype), free[name].read())), None)
            if name is None:
                _give_up(master.shape, alike, 1, 1)
            names.append(name)
            del free[name]
    return names


def _flat(
    weights: Mapping[str, PickledTensor],
    flats: Sequence[PickledTensor],
    states: Mapping[int, Any],
    groups: Sequence[Mapping[str, Any]],
    given: list[str] | None,
) -> DeepSpeedEntries:
    entries: DeepSpeedEntries = {}
    free = dict(weights) if given is None else {name: weights[name] for name in given}
    for flat, group in zip(flats, groups, strict=True):
        state = states.get(group["params"][0], {})
        begin = 0
        while begin < flat.numel:
            name = next((n for n, t in free.items() if given is not None or _rounds_to(flat, begin, t)), None)
            if name is None:
                _give_up(flat.shape, list(free), 1, 1)
            tensor = free.pop(name)
            cuts = evenly(begin, tensor.numel, tensor.numel, 1)
            entries |= flat_group(name, tensor.shape, [flat], [state], group.get("step"), cuts)
            begin += tensor.numel
    return entries


def _rounds_to(flat: PickledTensor, begin: int, tensor: PickledTensor) -> bool:
    if begin + tensor.numel > flat.numel:
        return False
    for count in (min(64, tensor.numel), tensor.numel):  # tensors that differ mostly do so in their first elements
        value = torch.empty(count, dtype=flat.dtype)
        flat.fill(value, begin)
        if not torch.equal(value.to(tensor.dtype), tensor.read().reshape(-1)[:count]):
            return False
    return True


# Universal checkpoints: a folder for every parameter, with a file for its weights and one for each state.


FRESH = "plait_fresh"
"""Key that marks states of zeros, written for parameters that have no state, in case DeepSpeed trains them."""


def universal(folder: Path, model: Pickled, common: Any, besides: Container[str]) -> DeepSpeedEntries:
    """Return the entries in the folder `zero`, except those in `besides`, which come from the model-states file.

    `common` is the part of the optimizer state that is not per parameter.
    """
    shapes, tied = shapes_of(model), tied_of(model)
    there = [path.name for path in sorted(folder.iterdir()) if path.is_dir() and (path / "fp32.pt").is_file()]
    if missing := [name for name in shapes if name not in set(there)]:
        raise CheckpointError(f"{folder} lacks the folder, or the fp32.pt in it, of {', '.join(missing[:8])}")
    entries: DeepSpeedEntries = {}
    other = [name for name in there if name not in shapes and name not in tied and f"model.{name}" not in besides]
    for name in [*shapes, *other]:
        files = sorted((folder / name).glob("*.pt"))
        states = {path.stem: path for path in files if path.stem not in ("fp32", "step")}
        weights = _tensor(folder / name / "fp32.pt", shapes.get(name))
        assert weights is not None, "weights are never fresh"
        entries[f"model.{name}"] = weights
        kept = {key: _tensor(path, weights.shape) for key, path in states.items()}
        entries |= {f"optim.{name}.{key}": state for key, state in kept.items() if state is not None}
        step = _step(folder / name / "step.pt", common)
        if step is not None and any(state is not None for state in kept.values()):
            entries[f"optim.{name}.step"] = step
    return entries


def _tensor(path: Path, shape: torch.Size | None) -> DeepSpeedEntry | None:
    content = open_file(path)
    if isinstance(content, Mapping):
        if content.get(FRESH):
            return None
        content = content.get("param")
    if not isinstance(content, PickledTensor):
        raise CheckpointError(f"{path} holds {type(content).__name__}, and a tensor was expected")
    tensor: PickledTensor = content
    if shape is None or tensor.shape == shape:
        return whole(tensor)
    if tensor.numel != shape.numel():
        raise CheckpointError(f"{path} has {tensor.numel} elements; the parameter has the shape {tuple(shape)}")
    # Checkpoints that were converted from stage 3 hold flat tensors.
    return DeepSpeedEntry(shape, tensor.dtype, lambda: tensor.read().reshape(shape))


def _step(path: Path, common: Any) -> DeepSpeedEntry | None:
    if path.is_file():
        return number(open_file(path))
    if not isinstance(common, Mapping):
        return None
    inner = common.get("optimizer_state_dict")
    first: Mapping[str, Any] = next(iter(inner["state"].values()), {}) if isinstance(inner, Mapping) else {}
    groups = common.get("param_groups") or [{}]
    return number(first.get("step", groups[0].get("step", common.get("base_optimizer_state_step"))))


class DeepSpeedSource(Source):
    """A checkpoint of DeepSpeed's `save_checkpoint`, of any stage and number of ranks, or of `ds_to_universal`.

    Weights are the fp32 master weights; buffers and frozen parameters have none, and keep the model's dtype. A
    parameter with several names appears under the first; `state["tied"]` maps the others to it.

    DeepSpeed need not be installed, and nothing in the files is executed. [Note: inert objects]
    `order` is used at stage 0 only. [Note: whose state is it]
    """

    kind = "deepspeed"

    def __init__(self, path: Path, *, order: Sequence[str] | None = None) -> None:
        self.path = path
        files = find_files(path)
        first = files.models[min(files.models)]
        model = open_file(first)
        if not isinstance(model, Mapping) or "global_steps" not in model:
            raise CheckpointError(f"{first} is not a model-states file of DeepSpeed: it lacks `global_steps`")
        try:
            self._entries, stage, ranks, optimizer = _open(files, model, order)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{files.folder} does not have the layout of a DeepSpeed checkpoint: {type(error).__name__} {error}"
            ) from error
        self.entries = {name: TensorEntry(entry.shape, entry.dtype) for name, entry in self._entries.items()}
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
        """Return one whole tensor, in memory of its own."""
        return self._entries[name].read()

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""


def _open(files: Files, model: Pickled, order: Sequence[str] | None) -> tuple[DeepSpeedEntries, str, int, Any]:
    """Return the entries, the stage, the number of ranks, and the optimizer state that rank 0 saved."""
    if files.universal is not None:
        optimizer_state = files.universal / "optimizer_state.pt"
        common = open_file(optimizer_state) if optimizer_state.is_file() else None
        # The folder also holds untrained tensors, but in fp32; the model-states file has them in their own dtype.
        models = [open_file(files.models[rank]) for rank in sorted(files.models)]
        rest = untrained(models, {f"model.{name}" for name in shapes_of(model)})
        entries = universal(files.universal, model, common, rest)
        ranks = int(model.get("dp_world_size") or 1)
        return rest | entries, "universal", ranks, common
    if not files.shards:
        if model.get("param_shapes") is not None:
            raise CheckpointError(
                f"{files.folder} was saved with ZeRO, without *_optim_states.pt in it: the fp32 weights and "
                "the optimizer state are in these. Copy the whole folder again"
            )
        entries = stage_0(model, order)
        return untrained([model], entries) | entries, "0", int(model.get("dp_world_size") or 1), model.get("optimizer")
    first = files.shards[min(files.shards)]
    optimizer = open_file(first)["optimizer_state_dict"]
    ranks = _ranks(optimizer)
    shards = [open_file(path)["optimizer_state_dict"] for path in files.of_ranks(files.shards, ranks, "optim_states")]
    if "fp32_flat_groups" not in optimizer:
        entries = stage_1_and_2(model, shards)
        return untrained([model], entries) | entries, str(_number(optimizer.get("zero_stage")) or 1), ranks, optimizer
    models = [open_file(path) for path in files.of_ranks(files.models, ranks, "model_states")]
    entries = stage_3(model, shards)
    return untrained(models, entries) | entries, "3", ranks, optimizer


def _ranks(optimizer: Pickled) -> int:
    counts = optimizer["partition_count"]
    return max(counts) if isinstance(counts, Sequence) else int(counts)


def _number(value: Any) -> int | None:
    """Return the value of a pickled enum member (the argument that its class is called with), or a number as it is."""
    number = value.args[0] if isinstance(value, Inert) and value.args else value
    return number if isinstance(number, int) else None


# Writing a universal checkpoint, which DeepSpeed resumes from.


WRITTEN_FOR = "0.19.8"
"""The version of DeepSpeed whose layout is written."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


def write_deepspeed(source: Source, target: Path) -> int:
    """Write weights and optimizer state to the folder `target`, one tensor after another; return its size in bytes.

    DeepSpeed resumes from it with `engine.load_checkpoint(target)`, at stages 1, 2 and 3 and on any number of
    data-parallel ranks, if the `ds_config` says `"checkpoint": {"load_universal": true}`. Then:

    - Learning rates, weight decay and the rest of the optimizer's settings are those of the `ds_config`: none are
      in the folder. One of DeepSpeed's own schedulers continues at the right step; its rate for the first step has
      to be set by a call: `engine.lr_scheduler.step(engine.lr_scheduler.last_batch_iteration)`. With a scheduler of
      torch, pass `load_lr_scheduler_states=False`. An fp16 run starts with the loss scale of the `ds_config`.
    - At stage 3 DeepSpeed reads the moments of Adam and no others, and sets all groups' `step` to one number. Its own
      Adam accepts that; an optimizer of torch needs a tensor for each parameter:
      `for state in engine.optimizer.optimizer.state.values(): state["step"] = torch.tensor(float(state["step"]))`.
    - DeepSpeed does not restore buffers and frozen parameters from a universal folder, and at stage 0 cannot load one
      at all. But the folder has all tensors, to be loaded into the model before `deepspeed.initialize`:
      `{f.parent.name: torch.load(f)["param"] for f in Path(target).glob("*/zero/*/fp32.pt")}` is its state dict.
      Instead of stage 0 use stage 1, whose updates are the same.

    If the source has no optimizer state, zeros are written, as before the first step.
    """
    plan = _Plan(source)
    needed = sum(entry.bytes for entry in source.entries.values())
    with replacing(target, source=source.path, needed=needed, overwrite=False) as staging:
        tag = f"global_step{plan.steps}"
        _write(plan, staging / tag)
        for pointer in _POINTERS:
            (staging / pointer).write_text(tag, encoding="utf-8")
        return sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())


class _Plan:
    """The entries of a source, grouped by parameter. Raises an error for entries that DeepSpeed does not support."""

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
        """Yield the content of the files of one parameter, each with its name."""
        tensor = self.source.read(f"model.{name}")
        keys = self.keys[name]
        yield "fp32", {"param": _alone(tensor.float() if keys else tensor)}
        if keys:
            for key in keys:
                if key != "step":
                    yield key, {"param": _alone(self.source.read(f"optim.{name}.{key}").float())}
        elif tensor.is_floating_point():
            # Frozen, a buffer, or no gradient so far: the source does not say which. Expanded zeros use no memory.
            for key in _MOMENTS:
                yield key, {"param": torch.zeros(()).expand(tensor.shape), FRESH: True}
        if tensor.is_floating_point():
            yield "step", torch.tensor(self.step)


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if it is a view of a larger storage: torch.save would write the whole storage."""
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
    """Return the part of the optimizer state that is not per parameter, as DeepSpeed reads it.

    Settings in `param_groups` would overwrite those of the optimizer's groups (at stage 3 those of the first group
    would overwrite all groups), so the groups are empty. There are as many as any division of the parameters needs.
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
