"""One rank of the measurement of collectives: `python -m plait.plan.probe DEVICE OUT`, started by `measure`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from plait.config import RunConfig
from plait.distributed import World, open_world


def probe(kind: Literal["cpu", "cuda"], out: Path) -> None:
    """Measure all-reduces of one number and of many; rank 0 writes GB/s per direction and the latency to `out`."""
    with open_world(RunConfig(device=kind, timeout_s=60.0)) as world:
        count = 2**26 if kind == "cuda" else 2**22
        small, large = (torch.ones(n, device=world.device) for n in (1, count))
        latency = _best(world, lambda: dist.all_reduce(small), 30)
        seconds = _best(world, lambda: dist.all_reduce(large), 5)
        # In a ring each rank sends (size - 1) / size of the tensor twice: reduce-scatter, then all-gather.
        sent = 2 * (world.size - 1) / world.size * count * 4
        if world.is_main:
            gbps = sent / max(seconds - latency, 1e-9) / 1e9
            out.write_text(json.dumps({"gbps": gbps, "latency_us": latency * 1e6}), encoding="utf-8")
        world.barrier()


def _best(world: World, work: Callable[[], object], times: int) -> float:
    best = float("inf")
    for _ in range(times + 2):
        world.barrier()
        start = time.perf_counter()
        work()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    probe("cuda" if sys.argv[1] == "cuda" else "cpu", Path(sys.argv[2]))
