"""`save_checkpoint` and `load_checkpoint`: DeepSpeed's folders and tags, around checkpoints of Plait's own format.

save_dir/latest            the tag that was saved last
save_dir/<tag>/            a checkpoint (docs/checkpoint-format.md), complete or not there at all
save_dir/zero_to_fp32.py   whole fp32 weights from either: `python zero_to_fp32.py . OUTPUT_DIR`
"""

from __future__ import annotations

import argparse
import base64
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from plait.atomic_write import write_atomically
from plait.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    Entry,
    PickledTensor,
    entries,
    find_files,
    find_node_local,
    kind_of,
    load_into,
    nothing_to_fetch,
    open_checkpoint,
    open_file,
    open_source,
)
from plait.config import read_name
from plait.distributed import assign_full_tensor, on_main
from plait.engine import EngineSaver, ManualEngine
from plait.errors import CheckpointError
from plait.frontends.deepspeed import optimizers

# A user's own state in a checkpoint: plain values as JSON, tensors beside the model's. Nothing is pickled.
#
# [Note: no pickles in a checkpoint]
# DeepSpeed pickles whatever it is given, and loading runs whatever a pickle says. Here a value is a number, a text, a
# list, a tuple, a set, a mapping, bytes, a tensor or an array, or it is refused by name when it is saved.


_KIND = "@"
"""The key that marks a value which JSON has no word for."""


def encode(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """`value` as JSON; its tensors go to `tensors`, under names that begin with `where`."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if isinstance(value, Tensor):
        name = f"{where}.{len(tensors)}"
        tensors[name] = value.detach()
        return {_KIND: "tensor", "name": name}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {_KIND: "array", "of": encode(torch.from_numpy(np.ascontiguousarray(value)), tensors, where)}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, (torch.dtype, torch.device)):
        return {_KIND: type(value).__name__, "of": str(value).removeprefix("torch.")}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, argparse.Namespace):
        return {_KIND: "namespace", "of": encode(vars(value), tensors, where)}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [encode(each, tensors, where) for each in value]
        kind = "list" if isinstance(value, list) else "tuple" if isinstance(value, tuple) else "set"
        return items if kind == "list" else {_KIND: kind, "of": items}
    if isinstance(value, Mapping):
        pairs = [(key, encode(each, tensors, f"{where}.{key}")) for key, each in value.items()]
        if all(type(key) is str and key != _KIND for key, _ in pairs):
            return dict(pairs)
        return {_KIND: "pairs", "of": [[encode(key, tensors, where), each] for key, each in pairs]}
    if isinstance(value, (bool, int, float, str)):
        return encode(_plain(value), tensors, where)
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold without pickling it: give its "
        "state_dict(), or numbers, texts, lists, mappings and tensors"
    )


def _plain(value: Any) -> Any:
    """The number or text that an enum, or another subclass, is."""
    return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))


def decode(value: Any, read: Callable[[str], Tensor]) -> Any:
    """What `encode` made it from; `read` gives a tensor by its name."""
    if isinstance(value, list):
        return [decode(each, read) for each in value]
    if not isinstance(value, dict):
        return value
    kind, inner = value.get(_KIND), value.get("of")
    match kind:
        case None:
            return {key: decode(each, read) for key, each in value.items()}
        case "tensor":
            return read(value["name"])
        case "array":
            return decode(inner, read).numpy()
        case "bytes":
            return base64.b64decode(str(inner))
        case "dtype":
            return getattr(torch, str(inner))
        case "device":
            return torch.device(str(inner))
        case "namespace":
            return argparse.Namespace(**decode(inner, read))
        case "tuple":
            return tuple(decode(inner, read))
        case "set":
            return set(decode(inner, read))
        case "pairs":
            return {_key(decode(key, read)): decode(each, read) for key, each in inner or ()}
    raise CheckpointError(f"the checkpoint has a value of the unknown kind {kind!r}; it is from a newer Plait")


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


# What a checkpoint of DeepSpeed itself says besides its tensors: counters, the scheduler, the client's state.


_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_ITS_OWN = frozenset(
    {
        *_COUNTERS,
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
    }
)
_LEFT_OUT = object()


def foreign_state(folder: Path) -> dict[str, Any]:
    """In the form in which this front end saves it. Objects that only a pickle could make again are left out."""
    files = find_files(folder)
    model = open_file(files.models[min(files.models)])
    assert isinstance(model, Mapping)  # the tensors of it were read
    found: dict[str, Any] = {name: int(model[name]) for name in _COUNTERS if isinstance(model.get(name), int)}
    scheduler = _plain_values(model.get("lr_scheduler"))
    if isinstance(scheduler, dict):
        found["lr_scheduler"] = scheduler
    client = {name: _plain_values(value) for name, value in model.items() if name not in _ITS_OWN}
    found["client_state"] = {name: value for name, value in client.items() if value is not _LEFT_OUT}
    return found


def _plain_values(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, PickledTensor):
        return value.read()
    if isinstance(value, (list, tuple, set)):
        items = [_plain_values(each) for each in value]
        return _LEFT_OUT if any(each is _LEFT_OUT for each in items) else type(value)(items)
    if isinstance(value, dict):
        pairs = {key: _plain_values(each) for key, each in value.items()}
        return _LEFT_OUT if any(each is _LEFT_OUT for each in pairs.values()) else pairs
    return _LEFT_OUT


LATEST = "latest"
_SCRIPT = "zero_to_fp32.py"
_SCRIPT_TEXT = f'''"""Whole fp32 weights of the checkpoints in this folder: `python {_SCRIPT} . OUTPUT_DIR`."""

from plait.frontends.deepspeed.utils.zero_to_fp32 import main

main()
'''
_Kind = TypeVar("_Kind")
_OURS = "deepspeed"
"""Under this key the state of a checkpoint has what is DeepSpeed's alone."""
_OF_THE_DEVICE = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})
"""Settings of a group that belong to where it runs, and not to the run."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint says besides the tensors that are loaded."""

    path: Path
    own: Mapping[str, Any]
    """Counters, scheduler, groups, client state, as they were saved."""
    engine: Mapping[str, Any]


class DeepSpeedSaver(EngineSaver):
    """Writes and reads the checkpoints of one engine. Every rank must make the same calls."""

    engine: ManualEngine

    # ---- writing

    def save_tag(
        self, save_dir: str | os.PathLike[str], tag: str, own: Mapping[str, Any], *, latest: bool, frozen: bool
    ) -> Path:
        """Write a checkpoint of this moment under a tag; `frozen`: also what is not trained."""
        tags = set(self.engine.world.gather(tag))
        if len(tags) > 1:
            raise CheckpointError(f"the ranks name different tags ({', '.join(sorted(tags))}); all must give the same")
        root, native = Path(save_dir), self.engine

        def contents() -> tuple[dict[str, Entry], dict[str, Any]]:
            tensors = native.state_entries()
            untrained = sorted(native.frozen())
            if not frozen:
                tensors = {name: each for name, each in tensors.items() if name.removeprefix("model.") not in untrained}
            client_tensors: dict[str, Tensor] = {}
            client = encode(dict(own), client_tensors, "client")
            if native.world.is_main:
                tensors.update(client_tensors)
            return tensors, {
                "engine": native.state(),
                "tied": _tied(native.model),
                "untrained": untrained,
                _OURS: client,
            }

        def tidy() -> None:
            write_atomically(root / _SCRIPT, _SCRIPT_TEXT)
            if latest:
                write_atomically(root / LATEST, tag)

        self.save(root / tag, contents, tidy=tidy)
        return root / tag

    # ---- reading

    def find(self, load_dir: str | os.PathLike[str], tag: str | None) -> Path | None:
        """The checkpoint under a tag, or the one that was saved last; None where nothing says which that is."""
        self.wait()
        root = Path(load_dir)

        def look() -> str | None:
            if tag is not None:
                return str(tag)
            latest = root / LATEST
            return read_name(latest, CheckpointError) if latest.is_file() else None

        found = on_main(self.engine.world, look)
        return None if found is None else root / found

    def load(self, path: Path, *, optimizer: bool, strict: bool) -> Loaded:
        """Fill the engine's tensors from a checkpoint: one of ours, or one that DeepSpeed itself saved."""
        node_local = self.engine.config.checkpoint.node_local
        kind = "plait" if node_local else on_main(self.engine.world, lambda: kind_of(path))
        if kind == "deepspeed":
            return self._load_foreign(path, optimizer=optimizer, strict=strict)
        if kind != "plait":
            raise CheckpointError(f"there is no checkpoint at {path}: neither one of Plait's nor one of DeepSpeed's")
        checkpoint, fetch = self._open(path)
        native, state = self.engine, checkpoint.manifest.state
        own = state.get(_OURS, {})
        if optimizer:
            _refuse_another(path, own, native.optimizer)
            native.allocate_optimizer_state(entries(checkpoint.index, "optim."))
        tensors = _wanted(native.state_entries(), optimizer=optimizer)
        ignore = ("client.", "rng.", "hook.", *(() if optimizer else ("optim.",)))
        missing = {f"model.{name}" for name in native.frozen()} - checkpoint.index.tensors.keys()
        tensors = {name: each for name, each in tensors.items() if name not in missing}  # saved without what is frozen
        partial = () if strict else ("model.*",)
        load_into(checkpoint, tensors, world=self.engine.world, ignore=ignore, partial=partial, fetch=fetch)
        native.state_loaded()
        with open_source(path) as source:
            return Loaded(path, decode(own, source.read), state.get("engine", {}))

    def _open(self, path: Path) -> tuple[Checkpoint, Any]:
        if not self.engine.config.checkpoint.node_local:
            on_main(self.engine.world, lambda: open_checkpoint(path))  # what is wrong with it is said once
            return open_checkpoint(path), nothing_to_fetch
        writer = self.writer_for(path.parent)
        found = find_node_local(CheckpointFolder(path.parent), str(path), writer.channel, writer.disks)
        if found is None:
            raise CheckpointError(f"no node has the checkpoint {path}")
        return found.checkpoint, found.fetch

    def _load_foreign(self, path: Path, *, optimizer: bool, strict: bool) -> Loaded:
        native = self.engine
        with open_source(path) as source:
            if optimizer:
                states = {n.removeprefix("optim."): e for n, e in source.entries.items() if n.startswith("optim.")}
                native.allocate_optimizer_state(states)
            tensors = _wanted(native.state_tensors(), optimizer=optimizer)
            absent = [name for name in tensors if name not in source.entries]
            if absent and (strict or any(name.startswith("optim.") for name in absent)):
                raise CheckpointError(f"{path}, saved by DeepSpeed, does not have {', '.join(sorted(absent)[:8])}")
            for name, tensor in tensors.items():
                if name in source.entries:
                    assign_full_tensor(tensor, source.read(name))
            native.state_loaded()
            return Loaded(path, foreign_state(path), source.state["engine"])


def _wanted(tensors: dict[str, _Kind], *, optimizer: bool) -> dict[str, _Kind]:
    return tensors if optimizer else {name: each for name, each in tensors.items() if name.startswith("model.")}


def _tied(model: nn.Module) -> dict[str, str]:
    """Other names of parameters that have several, with the first."""
    first: dict[int, str] = {id(param): name for name, param in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(param)] for name, param in every if first.get(id(param), name) != name}


def _refuse_another(path: Path, own: Mapping[str, Any], optimizer: Optimizer) -> None:
    saved, here = own.get("optimizer"), state_name(optimizer)
    if saved is not None and saved != here:
        raise CheckpointError(
            f"{path} has the state of {saved}, and this run uses {here}: pass load_optimizer_states=False to start a "
            "new one, or use the same"
        )


def state_name(optimizer: Optimizer) -> str:
    """Whose state it has: DeepSpeed's names stand for optimizers of torch and of Plait."""
    kind = next(kind for kind in type(optimizer).__mro__ if kind.__module__ != optimizers.__name__)
    decoupled = kind is Adam and all(group["decoupled_weight_decay"] for group in optimizer.param_groups)
    return "AdamW" if decoupled else kind.__name__


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each group that a checkpoint carries."""
    return [{key: value for key, value in g.items() if key not in _OF_THE_DEVICE} for g in optimizer.param_groups]


def restore_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Give the groups the settings that they had."""
    if len(saved) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved)} groups, this one {len(optimizer.param_groups)}: make them "
            "alike, or pass load_optimizer_states=False"
        )
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        group.update(settings)


def whole_weights(native: ManualEngine, dtype: torch.dtype, keep: Callable[[str], bool]) -> dict[str, Tensor]:
    """On rank 0: all weights in host memory, parameters in `dtype`, under every name they have; {} elsewhere."""
    from plait.frontends.deepspeed.parameter_links import full_tensor

    parameters = {name for name, _ in native.model.named_parameters()}
    found: dict[str, Tensor] = {}
    for key, tensor in native.state_tensors().items():
        name = key.removeprefix("model.")
        if not key.startswith("model.") or not keep(name):
            continue
        full = full_tensor(tensor)
        if native.world.is_main:
            cast = name in parameters and full.is_floating_point()
            found[name] = full.detach().to("cpu", dtype if cast else full.dtype, copy=True)
    aliases = _tied(native.model) if found else {}
    return found | {name: found[first] for name, first in aliases.items() if first in found}


def clone_tensors_for_torch_save(item: Any, device: str | torch.device = "cpu") -> Any:
    """Copy nested tensors into storage of their own: a view would be saved with all of its base."""
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    return item
