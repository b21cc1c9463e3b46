"""The world of a run: its ranks, its device, and one mesh with named axes."""

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
"""When a rank that waits for rank 0 first says so; later, three times as seldom."""
_NAMELESS_S = 60.0
"""How long a name may have no address: a new host's comes a while after the host."""
_LAST_BREATH_S = 0.05
"""[Note: leaving in peace]
A worker thread of gloo lets go of a collective's tensors only after the collective is over, and needs the
interpreter for it. If the interpreter is ending by then, the process aborts ("terminate called without an
active exception", exit code -6) although all its work is done; about one exit in ten does, on a busy machine.
So the group is ended before the interpreter is, and the threads get a moment without the interpreter's lock.
"""


@dataclass(frozen=True, slots=True)
class World:
    """Everything about the processes of a run. Passed on, never global; whoever opens it closes it."""

    ranks: Ranks
    device: torch.device
    layout: Layout
    mesh: DeviceMesh | None
    """`dp_replicate`, `dp_shard`, and every other axis with more than one rank; absent with one process."""
    owns_processes: bool
    """Whether closing ends the process group; false where the caller had one already."""
    fake: bool = False
    """Whether this is a rank that a plan plays: its tensors are fake, its device, links, files and other ranks are not
    those of this machine."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """Where this rank says what it does."""

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
        """Whether this rank speaks for all."""
        return self.ranks.rank == 0

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """All ranks; absent with one process."""
        return None if self.mesh is None else dist.group.WORLD

    def coordinate(self, axis: str) -> int:
        """Where this rank is along an axis of the layout."""
        inner = list(self.layout.sizes().items())
        inner = inner[[name for name, _ in inner].index(axis) :]
        stride = prod(size for _, size in inner[1:])
        return self.rank // stride % inner[0][1]

    @property
    def data_rank(self) -> int:
        """Which share of the samples this rank sees, of `layout.data_parallel`."""
        layout = self.layout
        replica = self.coordinate("dp_replicate") * layout.dp_shard + self.coordinate("dp_shard")
        return replica * layout.ep + self.coordinate("ep")

    def mesh_of(self, *axes: str) -> DeviceMesh | None:
        """The ranks that differ from this one along these axes only; None where it is alone there.

        The mesh has those of the axes, outermost first, that have more than one rank.
        """
        wanted = tuple(axis for axis, size in self.layout.sizes().items() if axis in axes and size > 1)
        if not wanted:
            return None
        assert self.mesh is not None
        return self.mesh[wanted]

    def submesh(self, *axes: str) -> DeviceMesh | None:
        """The same ranks as one axis."""
        found = self.mesh_of(*axes)
        return None if found is None else as_one_axis(found)

    def sharding_mesh(self, *axes: str) -> DeviceMesh:
        """For `fully_shard`: the ranks along these axes share one copy; with several copies, an axis of those first."""
        assert self.mesh is not None
        shards = self.submesh(*axes) or self.mesh["dp_shard"]
        if self.layout.dp_replicate == 1:
            return shards
        return concatenate_meshes([self.mesh["dp_replicate"], shards])

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The same ranks as a process group. Every rank must ask for it first at the same moment."""
        found = self.submesh(*axes)
        return None if found is None else found.get_group()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.mesh is not None:
            dist.barrier()

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.mesh is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on at least one rank."""
        if self.mesh is None:
            return flag
        box = torch.tensor([flag], dtype=torch.int32, device=self.device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return bool(box.item())

    def close(self) -> None:
        """End the process group, if this world began it; see [Note: leaving in peace]."""
        self.heartbeat.close()
        if self.owns_processes and dist.is_initialized():
            dist.destroy_process_group()
            if self.device.type == "cpu":
                time.sleep(_LAST_BREATH_S)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_world(config: RunConfig) -> World:
    """Join the other processes and lay out the mesh."""
    ranks = _ranks_of_running_group() if dist.is_initialized() else detect_ranks()
    # The layout is checked before anything is joined: a wrong size must not become a hang.
    layout = resolve_layout(config.strategy, size=ranks.size, local_size=ranks.local_size)
    device = choose_device(config.device, ranks)
    heartbeat = open_heartbeat(ranks.rank, device, config.timeout_s)
    if ranks.size == 1 and config.strategy.offload.params == "none":
        return World(ranks, device, layout, None, owns_processes=False, heartbeat=heartbeat)
    owns = not dist.is_initialized()
    if owns and ranks.size == 1:
        # What brings weights to the device and takes them away again works on a mesh, be it of one rank.
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
        atexit.register(world.close)  # for those who never close it; see [Note: leaving in peace]
    return world


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The mesh of a world; see `World.mesh`."""
    axes = {axis: n for axis, n in layout.sizes().items() if n > 1 or axis in ("dp_replicate", "dp_shard")}
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _ranks_of_running_group() -> Ranks:
    found = detect_ranks()
    size = dist.get_world_size()
    local = (found.local_rank, found.local_size) if found.size == size else (dist.get_rank(), size)
    return Ranks(dist.get_rank(), size, *local, launcher="caller")


def _await_the_store(ranks: Ranks, timeout_s: float) -> None:
    """Wait until somebody listens where the ranks meet: torch would wait as long, and say neither where nor why.

    Rank 0 listens itself, unless torchrun's agent does, and may plan the run for a while before it does.
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
            nameless = isinstance(error, socket.gaierror)
        if waited > (min(timeout_s, _NAMELESS_S) if nameless else timeout_s):
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
    _await_the_store(ranks, timeout_s)
    address = f"[{ranks.address}]" if ":" in ranks.address else ranks.address
    try:
        dist.init_process_group(
            backend,
            # Where torchrun's agent keeps the store itself, this joins it all the same.
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
    """The ranks of a mesh in one row, which is named after all of its axes."""
    return mesh if mesh.ndim == 1 else flatten_mesh(mesh, "_".join(mesh.mesh_dim_names or ()))
