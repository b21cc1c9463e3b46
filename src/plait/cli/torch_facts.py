"""Prints facts about torch and the optional engines as a line of JSON. `plait doctor` runs it as a child process."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import distributed

from plait.torch_internals import missing_internals, needed_internals

_ENGINES = ("deepspeed", "colossalai")


def facts() -> dict[str, Any]:
    """Return all facts by name."""
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "internals": len(needed_internals()),
        "missing": [internal._asdict() for internal in missing_internals()],
        "gloo": _gloo(),
        "nccl": _nccl(),
        "mpi": distributed.is_mpi_available(),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "links": _links(),
        "engines": {name: _engine(name) for name in _ENGINES},
    }


def _nccl() -> str | None:
    if not distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _gloo() -> str:
    """Return an empty text if gloo can sum a number in a group of one process, else the error."""
    if not distributed.is_gloo_available():
        return "not in this torch"
    try:
        with tempfile.TemporaryDirectory() as folder:
            distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            one = torch.ones(1)
            distributed.all_reduce(one)
            distributed.destroy_process_group()
        return "" if one.item() == 1 else "a sum came out wrong"
    except Exception as error:
        return f"does not work: {error}"


def _gpu(index: int) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info(index)
    return {"name": torch.cuda.get_device_name(index), "memory": total, "free": free}


def _links() -> str:
    """Return a text about how many pairs of GPUs can access each other's memory directly."""
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    direct = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    return "every pair directly" if len(direct) == len(pairs) else f"{len(direct)} of {len(pairs)} pairs directly"


def _engine(name: str) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = {"version": version(name)}
    except PackageNotFoundError:
        return {"version": None}
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            import_module(name)
            facts["parts"] = _deepspeed_parts() if name == "deepspeed" else {}
    except Exception as error:
        facts["error"] = str(error).splitlines()[0] if str(error) else type(error).__name__
    return facts


def _deepspeed_parts() -> dict[str, bool]:
    """Return DeepSpeed's kernels, and whether each can be built on this machine."""
    builders = import_module("deepspeed.ops.op_builder.all_ops").ALL_OPS
    return {
        name: bool(builder.is_compatible(verbose=False))
        for name, builder in sorted(builders.items())
        if "not_impl" not in name
    }


if __name__ == "__main__":
    print("\n" + json.dumps(facts()))
