"""What a run will take: memory and time of its ranks, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from plait.config.batch import resolve_batch
from plait.config.layout import Layout, resolve_layout
from plait.config.model import HFConfig
from plait.config.run import RunConfig
from plait.models import build_model
from plait.plan.account import Account
from plait.plan.example import example_of
from plait.plan.hardware import Hardware
from plait.plan.host import CUDA_PROCESS_GIB, host_bytes
from plait.plan.rankplan import plan_rank
from plait.plan.shares import with_ratio
from plait.plan.simulate import MakeExample
from plait.spec.phase import Phase

GIB = 2**30


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank, which stands for all that are like it."""

    name: str
    """`every rank`, `first pipeline stage`, `last pipeline stage`."""
    account: Account
    trail: tuple[tuple[Phase, int], ...] = ()
    """Bytes in use after every operation of a step; only of a plan that is `exact`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will take on a machine."""

    hardware: Hardware
    layout: Layout
    ranks: tuple[RankPlan, ...]
    micro_batches: int
    tokens_per_step: float
    """Of all ranks; samples where the data have no tokens."""
    flops_per_token: float | None
    bubble: float
    """Idle share of a pipeline, by its schedule."""
    host_gib: float
    """Memory of one host that its ranks take."""
    notes: tuple[str, ...] = field(default=())

    @property
    def fullest(self) -> RankPlan:
        """The rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.account.needed(self.hardware))

    @property
    def needed_gib(self) -> float:
        """Memory that each device must have."""
        return self.fullest.account.needed(self.hardware) / GIB

    @property
    def fits(self) -> bool:
        """Whether devices and hosts have enough."""
        return self.needed_gib <= self.hardware.memory_gib and self.host_gib <= self.hardware.host_memory_gib

    @property
    def seconds(self) -> float:
        """How long a step takes: as long as its slowest rank, and a pipeline's idle share on top."""
        accounts = [rank.account for rank in self.ranks]
        return max(each.working() / (1.0 - self.bubble) + each.updating() for each in accounts)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.tokens_per_step / self.seconds

    @property
    def mfu(self) -> float | None:
        """The share of the devices' peak that the model's own arithmetic makes up."""
        if self.flops_per_token is None:
            return None
        peak = max(self.hardware.flops.get(word, 0.0) for word in ("bf16", "fp16", "fp32")) * 1e12
        return self.flops_per_token * self.tokens_per_second / (peak * self.layout.size)

    def dollars_per_billion(self) -> float | None:
        """Price of 10⁹ tokens, where the machine has one."""
        if self.hardware.dollars_per_hour is None:
            return None
        hours = 1e9 / self.tokens_per_second / 3600
        return hours * self.hardware.dollars_per_hour * self.layout.size

    def to_dict(self) -> dict[str, Any]:
        """It, ready for JSON."""
        return {
            "hardware": self.hardware.name,
            "layout": self.layout.sizes(),
            "fits": self.fits,
            "needed_gib": round(self.needed_gib, 3),
            "memory_gib": self.hardware.memory_gib,
            "host_gib": round(self.host_gib, 2),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "bubble": self.bubble,
            "dollars_per_billion_tokens": self.dollars_per_billion(),
            "ranks": {rank.name: dict(sorted(rank.account.numbers.items())) for rank in self.ranks},
            "notes": list(self.notes),
        }


def make_plan(
    config: RunConfig,
    hardware: Hardware,
    *,
    ranks: int,
    model: Any = None,
    loss_function: Any = None,
    make_example: MakeExample = example_of,
    detailed: bool = True,
    exact: bool = False,
) -> Plan:
    """Plan a run of `ranks` ranks; of a pipeline, its first and its last stage are looked at.

    The first has the most micro-batches under way, the last has the head and the loss.
    """
    if isinstance(config.model, HFConfig) and config.model.pretrained:  # its shapes are enough
        config = config.model_copy(update={"model": config.model.model_copy(update={"pretrained": False})})
    notes: list[str] = []
    if config.strategy.offload.ratio == "auto":
        given = {"model": model, "loss_function": loss_function, "make_example": make_example}
        config = with_ratio(config, hardware, ranks=ranks, **given)
        notes.append(f"strategy.offload.ratio: auto is {config.strategy.offload.share:g}")
    layout = resolve_layout(config.strategy, size=ranks, local_size=min(ranks, hardware.per_host))
    pipeline = config.strategy.pipeline
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=pipeline.micro_batches)
    options: dict[str, Any] = {
        "ranks": ranks,
        "model": model,
        "loss_function": loss_function,
        "make_example": make_example,
        "detailed": detailed,
        "exact": exact,
    }
    first = plan_rank(config, hardware, **options)
    found = [RankPlan("every rank" if layout.pp == 1 else "first pipeline stage", first.account, tuple(first.trail))]
    notes += first.notes
    bubble = 0.0
    if layout.pp > 1:
        from plait.parallel.pipeline import theoretical_bubble

        last_rank = (layout.pp - 1) * (layout.size // layout.pp)
        stage = layout.pp - 1
        last = plan_rank(config, hardware, rank=last_rank, stage=stage, received=first.handed_on, **options)
        found.append(RankPlan("last pipeline stage", last.account, tuple(last.trail)))
        notes += last.notes
        bubble = theoretical_bubble(pipeline.schedule, layout.pp, batch.accumulation, pipeline.stages_per_rank)
    return Plan(
        hardware,
        layout,
        tuple(found),
        batch.accumulation,
        found[-1].account.numbers["tokens"] * layout.data_parallel,
        _flops_per_token(config) or first.flops_per_token,
        bubble,
        _host_gib(config, hardware, layout, found[0].account),
        tuple(dict.fromkeys(notes)),
    )


def _flops_per_token(config: RunConfig) -> float | None:
    """By the described model's own account, for the length of the data's sequences."""
    length = getattr(config.data, "seq_len", getattr(config.model, "seq_len", None))
    if config.model is None or config.model.type == "import" or not isinstance(length, int):
        return None
    with torch.device("meta"):
        count = getattr(build_model(config.model), "flops_per_token", None)
    return None if count is None else float(count(length))


def _host_gib(config: RunConfig, hardware: Hardware, layout: Layout, account: Account) -> float:
    """Memory of one host: its processes, what they offload, and checkpoints that are written in the background."""
    local = min(layout.size, hardware.per_host)
    staged = account.numbers["state"] / GIB if config.checkpoint.async_save else 0.0
    if hardware.kind == "cpu":
        return host_bytes(account, ranks=local) / GIB + staged * local
    offloaded = sum(account.numbers.get(f"host_{part}", 0.0) for part in ("state", "rooms")) / GIB
    return (CUDA_PROCESS_GIB + staged + offloaded) * local
