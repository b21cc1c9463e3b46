"""The world of a run: its ranks, its device, and one device mesh with named axes."""

from __future__ import annotations

import atexit
import datetime
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from math import prod
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plait.config import Layout, RunConfig, resolve_layout
from plait.distributed.device import choose_backend, choose_device
from plait.distributed.heartbeat import Heartbeat, open_heartbeat
from plait.distributed.ranks import Ranks, detect_ranks
from plait.errors import WorldError
from plait.torch_internals import concatenate_meshes, flatten_mesh

_REPORT_S = 10.0
"""Seconds after which a rank that waits for rank 0 first reports it; it reports again every three times as long."""
_UNRESOLVED_S = 60.0
"""Seconds for which the host name of rank 0 may not resolve: the name of a new host may appear after the host."""
_THREADS_END_S = 0.05
"""[Note: leaving in peace]
A worker thread of gloo frees a collective's tensors only some time after the collective is complete, and needs the
interpreter lock for it. If the interpreter is exiting by then, the process aborts ("terminate called without an active
exception", exit code -6) although its work is done; on a busy machine about one exit in ten does. So the process group
is destroyed before the interpreter exits, and this process then sleeps for these seconds without the lock.
"""


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a run, as one rank sees them. It is passed as an argument; whoever opens it closes it."""

    ranks: Ranks
    device: torch.device
    layout: Layout
    mesh: DeviceMesh | None
    """`dp_replicate`, `dp_shard`, and every other axis with more than one rank; None with one process."""
    owns_processes: bool
    """Whether `close` destroys the process group; False if the group existed before `open_world`."""
    fake: bool = False
    """Whether a plan simulates this rank: its tensors are fake, and its device, links, files and other ranks are not
    those of this machine."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """Where this rank reports its phase."""

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.ranks.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.rank == 0

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """The process group of all ranks; None with one process."""
        return None if self.mesh is None else dist.group.WORLD

    def coordinate(self, axis: str) -> int:
        """Return the coordinate of this rank along an axis of the layout."""
        inner = list(self.layout.sizes().items())
        inner = inner[[name for name, _ in inner].index(axis) :]
        stride = prod(size for _, size in inner[1:])
        return self.rank // stride % inner[0][1]

    @property
    def data_rank(self) -> int:
        """The data-parallel rank: the index of this rank's part of the samples, below `layout.data_parallel`."""
        layout = self.layout
        replica = self.coordinate("dp_replicate") * layout.dp_shard + self.coordinate("dp_shard")
        return replica * layout.ep + self.coordinate("ep")

    def mesh_of(self, *axes: str) -> DeviceMesh | None:
        """Return the mesh of the ranks whose coordinates differ from this rank's along these axes only.

        Its axes are those of `axes` with more than one rank, outermost first; None if there are none.
        """
        wanted = tuple(axis for axis, size in self.layout.sizes().items() if axis in axes and size > 1)
        if not wanted:
            return None
        assert self.mesh is not None
        return self.mesh[wanted]

    def submesh(self, *axes: str) -> DeviceMesh | None:
        """Return the mesh of `mesh_of`, flattened to one axis; None if that is None."""
        mesh = self.mesh_of(*axes)
        return None if mesh is None else as_one_axis(mesh)

    def sharding_mesh(self, *axes: str) -> DeviceMesh:
        """Return the mesh for `fully_shard`: one axis over which a replica is sharded, made of `axes`.

        If there are several replicas, the axis `dp_replicate` comes before it.
        """
        assert self.mesh is not None
        shards = self.submesh(*axes) or self.mesh["dp_shard"]
        if self.layout.dp_replicate == 1:
            return shards
        return concatenate_meshes([self.mesh["dp_replicate"], shards])

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the process group of the ranks of `mesh_of`; None if that is None.

        The first call creates it, so all ranks must make it at the same point.
        """
        mesh = self.submesh(*axes)
        return None if mesh is None else mesh.get_group()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.mesh is not None:
            dist.barrier()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value, on every rank."""
        if self.mesh is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Return, on every rank, whether the flag is set on at least one."""
        if self.mesh is None:
            return flag
        box = torch.tensor([flag], dtype=torch.int32, device=self.device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return bool(box.item())

    def close(self) -> None:
        """Destroy the process group, if this world created it; see [Note: leaving in peace]."""
        self.heartbeat.close()
        if self.owns_processes and dist.is_initialized():
            dist.destroy_process_group()
            if self.device.type == "cpu":
                time.sleep(_THREADS_END_S)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_world(config: RunConfig) -> World:
    """Join the process group, create the mesh, and return the world; `WorldError` or `ConfigError` if that fails."""
    ranks = _ranks_of_running_group() if dist.is_initialized() else detect_ranks()
    # The layout is checked before joining: with a wrong number of ranks, joining would hang.
    layout = resolve_layout(config.strategy, size=ranks.size, local_size=ranks.local_size)
    device = choose_device(config.device, ranks)
    heartbeat = open_heartbeat(ranks.rank, device, config.timeout_s)
    if ranks.size == 1 and config.strategy.offload.params == "none":
        return World(ranks, device, layout, None, owns_processes=False, heartbeat=heartbeat)
    owns = not dist.is_initialized()
    if owns and ranks.size == 1:
        # Parameter offload works on `fully_shard`, which needs a mesh even with one rank.
        dist.init_process_group(
            choose_backend(config.backend, device),
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
            device_id=device if device.type == "cuda" else None,
        )
    elif owns:
        _join(ranks, device, choose_backend(config.backend, device), config.timeout_s)
    world = World(ranks, device, layout, make_mesh(layout, device), owns_processes=owns, heartbeat=heartbeat)
    if owns and device.type == "cpu":
        atexit.register(world.close)  # for callers that never close it; see [Note: leaving in peace]
    return world


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Return the mesh of a world; see `World.mesh`."""
    axes = {axis: n for axis, n in layout.sizes().items() if n > 1 or axis in ("dp_replicate", "dp_shard")}
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _ranks_of_running_group() -> Ranks:
    ranks = detect_ranks()
    size = dist.get_world_size()
    local = (ranks.local_rank, ranks.local_size) if ranks.size == size else (dist.get_rank(), size)
    return Ranks(dist.get_rank(), size, *local, launcher="caller")


def _wait_for_store(ranks: Ranks, timeout_s: float) -> None:
    """Wait until the rendezvous store of rank 0 listens; raise `WorldError` after `timeout_s`.

    torch itself would wait as long, but would report neither the address nor the reason. The store is in rank 0, or in
    torchrun's agent. Rank 0 may plan the run before it starts the store.
    """
    if ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    start, where = time.monotonic(), f"{ranks.address}:{ranks.port}"
    report_at = start + _REPORT_S
    while True:
        try:
            socket.create_connection((ranks.address, ranks.port), timeout=5.0).close()
            return
        except OSError as error:
            waited, why = time.monotonic() - start, error.strerror or str(error)
            unresolved = isinstance(error, socket.gaierror)
        if waited > (min(timeout_s, _UNRESOLVED_S) if unresolved else timeout_s):
            raise WorldError(
                f"rank {ranks.rank} of {ranks.size} could not join the others at {where}, where rank 0 should listen: "
                f"{why}, for {waited:.0f} s; check MASTER_ADDR, MASTER_PORT and a firewall between the hosts, or raise "
                "timeout_s if rank 0 needs longer before it joins"
            )
        if time.monotonic() > report_at:
            report_at += 3 * _REPORT_S
            print(f"plait: rank {ranks.rank} waits for rank 0 at {where}: {why}", file=sys.stderr, flush=True)
        time.sleep(0.1)


def _join(ranks: Ranks, device: torch.device, backend: str, timeout_s: float) -> None:
    where = f"{ranks.address}:{ranks.port}"
    _wait_for_store(ranks, timeout_s)
    address = f"[{ranks.address}]" if ":" in ranks.address else ranks.address
    try:
        dist.init_process_group(
            backend,
            # If torchrun's agent has created the store, torch connects to that one.
            init_method=f"tcp://{address}:{ranks.port}",
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        text = str(error)
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise WorldError(
                f"port {ranks.port} on {ranks.address} is in use by another process; "
                "set MASTER_PORT to a free one, or start with `plait train --nproc`, which picks one"
            ) from error
        raise WorldError(f"rank {ranks.rank} of {ranks.size} could not join the others at {where}: {text}") from error


def as_one_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh flattened to one axis, which is named after all of its axes."""
    return mesh if mesh.ndim == 1 else flatten_mesh(mesh, "_".join(mesh.mesh_dim_names or ()))
