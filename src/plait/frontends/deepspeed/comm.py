"""`deepspeed.comm`: `torch.distributed` under DeepSpeed's name, and `init_distributed`."""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ReduceOp as ReduceOp
from torch.distributed import all_gather as all_gather
from torch.distributed import all_gather_into_tensor as all_gather_into_tensor
from torch.distributed import all_gather_object as all_gather_object
from torch.distributed import all_reduce as all_reduce
from torch.distributed import all_to_all as all_to_all
from torch.distributed import all_to_all_single as all_to_all_single
from torch.distributed import barrier as barrier
from torch.distributed import batch_isend_irecv as batch_isend_irecv
from torch.distributed import broadcast as broadcast
from torch.distributed import broadcast_object_list as broadcast_object_list
from torch.distributed import destroy_process_group as destroy_process_group
from torch.distributed import gather as gather
from torch.distributed import get_global_rank as get_global_rank
from torch.distributed import get_rank as get_rank
from torch.distributed import get_world_size as get_world_size
from torch.distributed import irecv as irecv
from torch.distributed import is_available as is_available
from torch.distributed import is_initialized as is_initialized
from torch.distributed import isend as isend
from torch.distributed import monitored_barrier as monitored_barrier
from torch.distributed import new_group as new_group
from torch.distributed import recv as recv
from torch.distributed import reduce as reduce
from torch.distributed import reduce_scatter as reduce_scatter
from torch.distributed import reduce_scatter_tensor as reduce_scatter_tensor
from torch.distributed import scatter as scatter
from torch.distributed import send as send

from plait.config import parse_sections
from plait.distributed import detect_ranks, device_from_env, open_world
from plait.errors import WorldError
from plait.frontends.deepspeed.accelerator import DEVICE_VARIABLE
from plait.frontends.deepspeed.module_layout import not_offered

inference_all_reduce = all_reduce


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create the process group, from the environment of plait launch, torchrun, Slurm or MPI, unless it exists.

    Without any of these, the group has this process alone. The default `dist_backend` is that of the device. The port
    is the launcher's, so `distributed_port` has no effect; nor have `config` and `verbose`.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise WorldError(
            "dist_init_required=False needs a process group that exists, and there is none: call "
            "torch.distributed.init_process_group first, or leave it out"
        )
    if init_method is not None:
        dist.init_process_group(
            dist_backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
        )
        return
    ranks = detect_ranks()
    if ranks.size == 1:
        # Scripts ask for their rank and call barriers in a single process too.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        atexit.register(_destroy_group)
        return
    if ranks.launcher == "mpi" and not auto_mpi_discovery:
        raise WorldError("auto_mpi_discovery=False, but only MPI's variables describe the ranks; leave it out")
    # With NCCL, a gloo backend is created too, for tensors in host memory.
    backend = "auto" if dist_backend in (None, "nccl") and _has_cuda(dist_backend) else dist_backend
    seconds = None if timeout is None else timeout.total_seconds()
    device = device_from_env(DEVICE_VARIABLE)
    open_world(parse_sections(backend=backend, timeout_s=seconds, device=device).config).heartbeat.close()


def _has_cuda(backend: str | None) -> bool:
    import torch

    if backend == "nccl" and not torch.cuda.is_available():
        raise WorldError(
            "dist_backend='nccl' was asked for, and torch sees no CUDA device; leave it out, or use 'gloo'"
        )
    return True


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def get_local_rank() -> int:
    """Return the rank of this process among those of its host."""
    return detect_ranks().local_rank


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the global ranks of a group."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def __getattr__(name: str) -> Any:
    raise not_offered(__name__, name)
