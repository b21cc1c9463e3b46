"""`save_checkpoint` and `load_checkpoint`: DeepSpeed's folders and tags, with checkpoints in Plait's own format.

save_dir/latest            the tag that was saved last
save_dir/<tag>/            a checkpoint (docs/checkpoint-format.md), complete or absent
save_dir/zero_to_fp32.py   writes full fp32 weights: `python zero_to_fp32.py . OUTPUT_DIR`
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
from plait.frontends.deepspeed.parameter_links import full_tensor

# The user's own state (`client_state`) in a checkpoint: plain values as JSON, tensors with those of the model.
#
# [Note: no pickles in a checkpoint]
# DeepSpeed pickles any state, and loading runs the code in a pickle. Here a value must be a number, a text, a list, a
# tuple, a set, a mapping, bytes, a tensor or an array; for any other, saving raises an error that names it.


_TYPE = "@"
"""The key that marks a value of a type that JSON does not have."""


def encode(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return `value` as a JSON value; add its tensors to `tensors`, under names that begin with `path`."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if isinstance(value, Tensor):
        name = f"{path}.{len(tensors)}"
        tensors[name] = value.detach()
        return {_TYPE: "tensor", "name": name}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {_TYPE: "array", "of": encode(torch.from_numpy(np.ascontiguousarray(value)), tensors, path)}
    if isinstance(value, bytes):
        return {_TYPE: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, (torch.dtype, torch.device)):
        return {_TYPE: type(value).__name__, "of": str(value).removeprefix("torch.")}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, argparse.Namespace):
        return {_TYPE: "namespace", "of": encode(vars(value), tensors, path)}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [encode(item, tensors, path) for item in value]
        if isinstance(value, list):
            return items
        return {_TYPE: "tuple" if isinstance(value, tuple) else "set", "of": items}
    if isinstance(value, Mapping):
        pairs = [(key, encode(item, tensors, f"{path}.{key}")) for key, item in value.items()]
        if all(type(key) is str and key != _TYPE for key, _ in pairs):
            return dict(pairs)
        return {_TYPE: "pairs", "of": [[encode(key, tensors, path), item] for key, item in pairs]}
    if isinstance(value, (bool, int, float, str)):
        return encode(_plain(value), tensors, path)
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold without pickling it: give its "
        "state_dict(), or numbers, texts, lists, mappings and tensors"
    )


def _plain(value: Any) -> Any:
    """Return the number or text of an enum member, or of another subclass of `bool`, `int`, `float` or `str`."""
    return next(plain(value) for plain in (bool, int, float, str) if isinstance(value, plain))


def decode(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Return the original value of what `encode` returned; `read` returns a tensor by its name."""
    if isinstance(value, list):
        return [decode(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    type_name, inner = value.get(_TYPE), value.get("of")
    match type_name:
        case None:
            return {key: decode(item, read) for key, item in value.items()}
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
            return {_hashable(decode(key, read)): decode(item, read) for key, item in inner or ()}
    raise CheckpointError(f"the checkpoint has a value of the unknown type {type_name!r}; it is from a newer Plait")


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


# The state, other than tensors, of a checkpoint that DeepSpeed wrote: counters, the scheduler, the client state.


_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_DEEPSPEED_KEYS = frozenset(
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
_UNREADABLE = object()


def foreign_state(folder: Path) -> dict[str, Any]:
    """Return this state as this front end would have saved it, without objects that need unpickling."""
    files = find_files(folder)
    model = open_file(files.models[min(files.models)])
    assert isinstance(model, Mapping)  # its tensors have been read before
    state: dict[str, Any] = {name: int(model[name]) for name in _COUNTERS if isinstance(model.get(name), int)}
    scheduler = _plain_values(model.get("lr_scheduler"))
    if isinstance(scheduler, dict):
        state["lr_scheduler"] = scheduler
    client = {name: _plain_values(value) for name, value in model.items() if name not in _DEEPSPEED_KEYS}
    state["client_state"] = {name: value for name, value in client.items() if value is not _UNREADABLE}
    return state


def _plain_values(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, PickledTensor):
        return value.read()
    if isinstance(value, (list, tuple, set)):
        items = [_plain_values(item) for item in value]
        return _UNREADABLE if any(item is _UNREADABLE for item in items) else type(value)(items)
    if isinstance(value, dict):
        pairs = {key: _plain_values(item) for key, item in value.items()}
        return _UNREADABLE if any(item is _UNREADABLE for item in pairs.values()) else pairs
    return _UNREADABLE


LATEST = "latest"
_SCRIPT = "zero_to_fp32.py"
_SCRIPT_TEXT = f'''"""Full fp32 weights of the checkpoints in this folder: `python {_SCRIPT} . OUTPUT_DIR`."""

from plait.frontends.deepspeed.utils.zero_to_fp32 import main

main()
'''
_Tensor = TypeVar("_Tensor")
_STATE_KEY = "deepspeed"
"""The key of this front end in the state of a checkpoint."""
_DEVICE_SETTINGS = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})
"""Settings of a group that depend on the device, and are not saved."""


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The state of a checkpoint other than the tensors, which are loaded already."""

    path: Path
    deepspeed: Mapping[str, Any]
    """Counters, scheduler, groups and client state, in their saved form."""
    engine: Mapping[str, Any]


class DeepSpeedSaver(EngineSaver):
    """Writes and reads the checkpoints of one engine. Every rank must make the same calls."""

    engine: ManualEngine

    # ---- writing

    def save_tag(
        self, save_dir: str | os.PathLike[str], tag: str, state: Mapping[str, Any], *, latest: bool, frozen: bool
    ) -> Path:
        """Write a checkpoint under a tag, and return its folder; with `frozen`, parameters that are not trained too."""
        tags = set(self.engine.world.gather(tag))
        if len(tags) > 1:
            raise CheckpointError(f"the ranks name different tags ({', '.join(sorted(tags))}); all must give the same")
        root, native = Path(save_dir), self.engine

        def contents() -> tuple[dict[str, Entry], dict[str, Any]]:
            tensors = native.state_entries()
            untrained = sorted(native.frozen())
            if not frozen:
                tensors = {
                    name: tensor for name, tensor in tensors.items() if name.removeprefix("model.") not in untrained
                }
            client_tensors: dict[str, Tensor] = {}
            client = encode(dict(state), client_tensors, "client")
            if native.world.is_main:
                tensors.update(client_tensors)
            return tensors, {
                "engine": native.state(),
                "tied": _tied(native.model),
                "untrained": untrained,
                _STATE_KEY: client,
            }

        def tidy() -> None:
            write_atomically(root / _SCRIPT, _SCRIPT_TEXT)
            if latest:
                write_atomically(root / LATEST, tag)

        self.save(root / tag, contents, tidy=tidy)
        return root / tag

    # ---- reading

    def find(self, load_dir: str | os.PathLike[str], tag: str | None) -> Path | None:
        """Return the folder of a tag, or of the last saved checkpoint if None; None if `latest` does not exist."""
        self.wait()
        root = Path(load_dir)

        def read_tag() -> str | None:
            if tag is not None:
                return str(tag)
            latest = root / LATEST
            return read_name(latest, CheckpointError) if latest.is_file() else None

        name = on_main(self.engine.world, read_tag)
        return None if name is None else root / name

    def load(self, path: Path, *, optimizer: bool, strict: bool) -> LoadedState:
        """Load the engine's tensors from a checkpoint of this front end, or of DeepSpeed itself; return the state."""
        node_local = self.engine.config.checkpoint.node_local
        format_name = "plait" if node_local else on_main(self.engine.world, lambda: kind_of(path))
        if format_name == "deepspeed":
            return self._load_foreign(path, optimizer=optimizer, strict=strict)
        if format_name != "plait":
            raise CheckpointError(f"{path} is not a checkpoint of Plait or DeepSpeed")
        checkpoint, fetch = self._open(path)
        native, state = self.engine, checkpoint.manifest.state
        saved = state.get(_STATE_KEY, {})
        if optimizer:
            _refuse_another_optimizer(path, saved, native.optimizer)
            native.allocate_optimizer_state(entries(checkpoint.index, "optim."))
        tensors = _tensors_to_load(native.state_entries(), optimizer=optimizer)
        ignore = ("client.", "rng.", "hook.", *(() if optimizer else ("optim.",)))
        missing = {f"model.{name}" for name in native.frozen()} - checkpoint.index.tensors.keys()
        tensors = {name: tensor for name, tensor in tensors.items() if name not in missing}  # frozen ones not saved
        partial = () if strict else ("model.*",)
        load_into(checkpoint, tensors, world=self.engine.world, ignore=ignore, partial=partial, fetch=fetch)
        native.state_loaded()
        with open_source(path) as source:
            return LoadedState(path, decode(saved, source.read), state.get("engine", {}))

    def _open(self, path: Path) -> tuple[Checkpoint, Any]:
        if not self.engine.config.checkpoint.node_local:
            on_main(self.engine.world, lambda: open_checkpoint(path))  # one rank alone reports problems with it
            return open_checkpoint(path), nothing_to_fetch
        opened = self.writer_for(path.parent)
        local = find_node_local(CheckpointFolder(path.parent), str(path), opened.channel, opened.disks)
        if local is None:
            raise CheckpointError(f"no node has the checkpoint {path}")
        return local.checkpoint, local.fetch

    def _load_foreign(self, path: Path, *, optimizer: bool, strict: bool) -> LoadedState:
        native = self.engine
        with open_source(path) as source:
            if optimizer:
                states = {n.removeprefix("optim."): e for n, e in source.entries.items() if n.startswith("optim.")}
                native.allocate_optimizer_state(states)
            tensors = _tensors_to_load(native.state_tensors(), optimizer=optimizer)
            absent = [name for name in tensors if name not in source.entries]
            if absent and (strict or any(name.startswith("optim.") for name in absent)):
                raise CheckpointError(f"{path}, saved by DeepSpeed, does not have {', '.join(sorted(absent)[:8])}")
            for name, tensor in tensors.items():
                if name in source.entries:
                    assign_full_tensor(tensor, source.read(name))
            native.state_loaded()
            return LoadedState(path, foreign_state(path), source.state["engine"])


def _tensors_to_load(tensors: dict[str, _Tensor], *, optimizer: bool) -> dict[str, _Tensor]:
    return tensors if optimizer else {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


def _tied(model: nn.Module) -> dict[str, str]:
    """Return, for parameters with several names, other name → first name."""
    first: dict[int, str] = {id(param): name for name, param in model.named_parameters()}
    all_names = model.named_parameters(remove_duplicate=False)
    return {name: first[id(param)] for name, param in all_names if first.get(id(param), name) != name}


def _refuse_another_optimizer(path: Path, state: Mapping[str, Any], optimizer: Optimizer) -> None:
    saved, current = state.get("optimizer"), state_name(optimizer)
    if saved is not None and saved != current:
        raise CheckpointError(
            f"{path} has the state of {saved}, and this run uses {current}: use the same, or pass "
            "load_optimizer_states=False to start with new state"
        )


def state_name(optimizer: Optimizer) -> str:
    """Return the name of the optimizer whose state it has: torch's or Plait's base class of DeepSpeed's class."""
    base = next(base for base in type(optimizer).__mro__ if base.__module__ != optimizers.__name__)
    decoupled = base is Adam and all(group["decoupled_weight_decay"] for group in optimizer.param_groups)
    return "AdamW" if decoupled else base.__name__


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group that are saved in a checkpoint."""
    return [{key: value for key, value in g.items() if key not in _DEVICE_SETTINGS} for g in optimizer.param_groups]


def restore_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Set the groups of an optimizer to saved settings; raise `CheckpointError` if their number differs."""
    if len(saved) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved)} groups, this one {len(optimizer.param_groups)}: build the "
            "same groups, or pass load_optimizer_states=False"
        )
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        group.update(settings)


def full_weights(native: ManualEngine, dtype: torch.dtype, keep: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the weights whose names `keep` accepts, on rank 0, in host memory; {} on other ranks.

    Parameters are in `dtype`; one with several names is returned under each.
    """
    parameters = {name for name, _ in native.model.named_parameters()}
    weights: dict[str, Tensor] = {}
    for key, tensor in native.state_tensors().items():
        name = key.removeprefix("model.")
        if not key.startswith("model.") or not keep(name):
            continue
        full = full_tensor(tensor)
        if native.world.is_main:
            cast = name in parameters and full.is_floating_point()
            weights[name] = full.detach().to("cpu", dtype if cast else full.dtype, copy=True)
    aliases = _tied(native.model) if weights else {}
    return weights | {name: weights[first] for name, first in aliases.items() if first in weights}


def clone_tensors_for_torch_save(item: Any, device: str | torch.device = "cpu") -> Any:
    """Return a copy of nested tensors, each with its own storage: `torch.save` writes a view's whole storage."""
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    return item
