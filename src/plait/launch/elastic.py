"""Elastic training: how many hosts take part, and when torch's elastic agent starts the ranks.

Plait restarts ranks itself (`restart.py`), unless the flags are torchrun's and name a rendezvous, which hosts join by
themselves: then torch's agent does.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace

from plait.errors import WorldError
from plait.launch.job import Job
from plait.launch.options import LaunchOptions

VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Variables for torch's agent. Otherwise restarted ranks find the dead ranks' addresses in the store, and wait."""
_RESTARTS = 100


def is_elastic(options: LaunchOptions) -> bool:
    """Whether any flag of elastic training is given."""
    return (
        options.elastic_training
        or options.standalone
        or ":" in (options.nnodes or "")
        or bool(options.max_restarts)
        or any((options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id, options.rdzv_conf))
    )


def uses_torchs_agent(options: LaunchOptions) -> bool:
    """Whether hosts find each other through torch's rendezvous, rather than being started from here."""
    by_hand = ":" in (options.nnodes or "") and options.hostfile is None
    named = any((options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id, options.rdzv_conf))
    return options.standalone or named or by_hand


def restarts(options: LaunchOptions) -> int:
    """Return how many restarts are allowed."""
    if options.max_restarts is not None:
        return options.max_restarts
    return _RESTARTS if options.elastic_training or ":" in (options.nnodes or "") else 0


def range_of_nodes(options: LaunchOptions, host_count: int) -> tuple[int, int]:
    """Return the smallest and the largest number of hosts; `host_count` are in the hostfile."""
    if options.nnodes is not None:
        match = re.fullmatch(r"(\d+)(?::(\d+))?", options.nnodes)
        if match is None:
            raise WorldError(f"--nnodes {options.nnodes!r} is neither a number nor a range; write 4 or 2:4")
        least, most = int(match[1]), int(match[2] or match[1])
    else:
        least, most = options.min_elastic_nodes or 1, options.max_elastic_nodes or host_count
        if not options.elastic_training:
            least = most = host_count
    if not 1 <= least <= most:
        raise WorldError(f"hosts from {least} to {most} is not a range; write the smaller number first, from 1")
    return least, most


def elastic_job(job: Job, options: LaunchOptions) -> Job:
    """Return the job changed to start torch's agent once per host, which then starts the ranks."""
    _check(job, options)
    least, most = range_of_nodes(options, len(job.nodes))
    endpoint = options.rdzv_endpoint or (
        "localhost:0" if options.standalone else f"{_bracketed(job.address)}:{job.port}"
    )
    flags = {
        "nnodes": f"{least}:{most}",
        "nproc-per-node": str(len(job.nodes[0].slots)),
        "rdzv-backend": options.rdzv_backend or "c10d",
        "rdzv-endpoint": endpoint,
        "rdzv-id": options.rdzv_id or job.id,
        "max-restarts": str(restarts(options)),
    }
    if job.log_dir is not None:
        flags |= {"log-dir": job.log_dir, "redirects": "3"}
    if options.node_rank is not None:
        flags["node-rank"] = str(options.node_rank)
    conf = {"PET_RDZV_CONF": options.rdzv_conf} if options.rdzv_conf else {}  # torchrun's own flag
    agent = [sys.executable, "-m", "torch.distributed.run", *(f"--{key}={value}" for key, value in flags.items())]
    how = ["--module"] if options.module else ["--no-python"] if options.no_python else []
    return replace(
        job,
        program=(*agent, *how, options.script),
        environment={**VARIABLES, **job.environment, **conf},
        log_dir=None,
        once_per_node=True,
        rendezvous=options.rdzv_endpoint is None and not options.standalone,
        spare=max(len(job.nodes) - least, 0),
    )


def _check(job: Job, options: LaunchOptions) -> None:
    uneven = {len(node.slots) for node in job.nodes}
    if len(uneven) > 1:
        raise WorldError(
            f"torch's elastic agent needs equally many ranks on each host, not {sorted(uneven)}; use --num_gpus"
        )
    for name in ("pass_local_rank", "bind_cores_to_rank"):
        if getattr(options, name):
            raise WorldError(f"--{name} is not for torch's elastic agent, which starts the ranks itself; leave it out")


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
