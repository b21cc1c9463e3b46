"""Collectives that overlap with the matrix products around them (async TP)."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch.distributed.device_mesh import DeviceMesh

from plait.errors import ConfigError, Problem
from plait.torch_internals import split_products_around_collectives

ASYNC_KEY = "strategy.tensor.async_tp"


def why_no_async(device_type: str, *, sequence: bool) -> str | None:
    """The reason why async TP cannot work; none where it can."""
    if device_type != "cuda":
        return f"it copies between GPUs through symmetric memory, and this run is on {device_type}"
    if not sequence:
        return "it takes apart the gathers and scatters of sequence parallelism, which is off"
    if find_spec("triton") is None:
        return "it is a pass of torch.compile's inductor, which needs the package triton"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "symmetric memory needs a GPU of compute capability 8.0 or newer"
    return None


def enable_async(mesh: DeviceMesh, *, sequence: bool) -> None:
    """Have compiled blocks split their products into pieces that overlap with the collectives.

    The ranks of the group have to reach each other's memory, as GPUs of one host do. It changes code that
    `torch.compile` makes, so it does nothing for blocks that are not compiled.
    """
    reason = why_no_async(mesh.device_type, sequence=sequence)
    if reason is not None:
        raise ConfigError(
            Problem(ASYNC_KEY, f"async tensor parallelism cannot work here: {reason}", "Set it to false.")
        )
    split_products_around_collectives(mesh.get_group().group_name)
