"""What a checkpoint of DeepSpeed itself says besides its tensors: counters, the scheduler, the client's state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.checkpoint import Stored, find_files, open_file

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
    scheduler = _plain(model.get("lr_scheduler"))
    if isinstance(scheduler, dict):
        found["lr_scheduler"] = scheduler
    client = {name: _plain(value) for name, value in model.items() if name not in _ITS_OWN}
    found["client_state"] = {name: value for name, value in client.items() if value is not _LEFT_OUT}
    return found


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, Stored):
        return value.read()
    if isinstance(value, (list, tuple, set)):
        items = [_plain(each) for each in value]
        return _LEFT_OUT if any(each is _LEFT_OUT for each in items) else type(value)(items)
    if isinstance(value, dict):
        pairs = {key: _plain(each) for key, each in value.items()}
        return _LEFT_OUT if any(each is _LEFT_OUT for each in pairs.values()) else pairs
    return _LEFT_OUT
