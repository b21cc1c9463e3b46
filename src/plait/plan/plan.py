"""What a run will take: memory and time of its ranks, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any
from xml.sax.saxutils import escape

import torch

from plait.config import CUSTOM_MODELS, HFConfig, Layout, RunConfig, resolve_batch, resolve_graphs, resolve_layout
from plait.launch import Phase
from plait.models import build_model
from plait.plan.hardware import Hardware
from plait.plan.ledger import Ledger, host_peaks
from plait.plan.rankplan import Known, plan_rank
from plait.plan.shares import with_ratio
from plait.plan.simulate import MakeExample, TimeBudget, example_of

GIB = 2**30


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank, which stands for all that are like it."""

    name: str
    """`every rank`, `first pipeline stage`, `last pipeline stage`."""
    ledger: Ledger
    trail: tuple[tuple[Phase, int], ...] = ()
    """Bytes in use after every operation, from the build to a save; only of a plan that is `exact`."""


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
    host_phases: Mapping[Phase, float]
    """GiB of one host that its ranks take in each phase."""
    notes: tuple[str, ...] = field(default=())

    @property
    def fullest(self) -> RankPlan:
        """The rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.ledger.needed(self.hardware))

    @property
    def needed_gib(self) -> float:
        """Memory that each device must have."""
        return self.fullest.ledger.needed(self.hardware) / GIB

    @property
    def host_phase(self) -> Phase:
        """The phase in which a host needs most; a save where others keep what it has copied."""
        return max(self.host_phases, key=lambda phase: (self.host_phases[phase], phase is Phase.SAVE))

    @property
    def host_gib(self) -> float:
        """Memory of one host that its ranks take."""
        return self.host_phases[self.host_phase]

    @property
    def fits(self) -> bool:
        """Whether devices and hosts have enough."""
        return self.needed_gib <= self.hardware.memory_gib and self.host_gib <= self.hardware.host_memory_gib

    @property
    def seconds(self) -> float:
        """How long a step takes: as long as its slowest rank, and a pipeline's idle share on top."""
        accounts = [rank.ledger for rank in self.ranks]
        return max(ledger.working() / (1.0 - self.bubble) + ledger.updating() for ledger in accounts)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.tokens_per_step / self.seconds

    @property
    def mfu(self) -> float | None:
        """The share of the devices' peak that the model's own arithmetic makes up."""
        if self.flops_per_token is None:
            return None
        peak = max(self.hardware.flops.get(dtype_name, 0.0) for dtype_name in ("bf16", "fp16", "fp32")) * 1e12
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
            "host_phases": {phase: round(size, 3) for phase, size in self.host_phases.items()},
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "bubble": self.bubble,
            "dollars_per_billion_tokens": self.dollars_per_billion(),
            "ranks": {rank.name: dict(sorted(rank.ledger.numbers.items())) for rank in self.ranks},
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
    known: Known | None = None,
    budget: TimeBudget | None = None,
) -> Plan:
    """Plan a run of `ranks` ranks; of a pipeline, its first and its last stage are looked at.

    The first has the most micro-batches under way, the last has the head and the loss. Plans that share `known` and
    differ little simulate little; `budget` ends a plan with its `TimeUpError`.
    """
    if isinstance(config.model, HFConfig) and config.model.pretrained:  # its shapes are enough
        config = config.model_copy(update={"model": config.model.model_copy(update={"pretrained": False})})
    notes: list[str] = []
    if config.strategy.offload.ratio == "auto":
        known = {} if known is None else known
        given = {"model": model, "loss_function": loss_function, "make_example": make_example}
        config = with_ratio(config, hardware, ranks=ranks, **given, known=known, budget=budget)
        notes.append(f"strategy.offload.ratio: auto is {config.strategy.offload.share:g}")
    layout = resolve_layout(config.strategy, size=ranks, local_size=min(ranks, hardware.per_host))
    pipeline = config.strategy.pipeline
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=pipeline.micro_batches)
    described = model is None and loss_function is None
    config = resolve_graphs(config, ranks=ranks, accumulation=batch.accumulation, described=described)
    options: dict[str, Any] = {
        "ranks": ranks,
        "model": model,
        "loss_function": loss_function,
        "make_example": make_example,
        "detailed": detailed,
        "exact": exact,
        "known": known,
        "budget": budget,
    }
    first = plan_rank(config, hardware, **options)
    plans = [RankPlan("every rank" if layout.pp == 1 else "first pipeline stage", first.ledger, tuple(first.trail))]
    notes += first.notes
    bubble = 0.0
    if layout.pp > 1:
        from plait.distributed import theoretical_bubble

        last_rank = (layout.pp - 1) * (layout.size // layout.pp)
        stage = layout.pp - 1
        last = plan_rank(config, hardware, rank=last_rank, stage=stage, received=first.sent_spec, **options)
        plans.append(RankPlan("last pipeline stage", last.ledger, tuple(last.trail)))
        notes += last.notes
        bubble = theoretical_bubble(pipeline.schedule, layout.pp, batch.accumulation, pipeline.stages_per_rank)
    return Plan(
        hardware,
        layout,
        tuple(plans),
        batch.accumulation,
        plans[-1].ledger.numbers["tokens"] * layout.data_parallel,
        _flops_per_token(config) or first.flops_per_token,
        bubble,
        _host_phases(plans, hardware, ranks=min(layout.size, hardware.per_host)),
        tuple(dict.fromkeys(notes)),
    )


def _flops_per_token(config: RunConfig) -> float | None:
    """By the described model's own account, for the length of the data's sequences."""
    length = getattr(config.data, "seq_len", getattr(config.model, "seq_len", None))
    if config.model is None or isinstance(config.model, CUSTOM_MODELS) or not isinstance(length, int):
        return None
    with torch.device("meta"):
        count = getattr(build_model(config.model, trust_code=config.trust_code), "flops_per_token", None)
    return None if count is None else float(count(length))


def _host_phases(ranks_planned: Sequence[RankPlan], hardware: Hardware, *, ranks: int) -> dict[Phase, float]:
    """Of a host with so many ranks, each like the one that takes most of it."""
    peaks = [host_peaks(rank.ledger, hardware) for rank in ranks_planned]
    phases = dict.fromkeys(phase for peaks_of_rank in peaks for phase in peaks_of_rank)
    return {phase: ranks * max(peaks_of_rank.get(phase, 0.0) for peaks_of_rank in peaks) / GIB for phase in phases}


# A run's memory as a picture: operation by operation, phase by phase, against what the device has.


_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 860, 260, 60, 34, 40
_COLOURS = {
    Phase.BUILD: "#9d755d",
    Phase.LOAD: "#72b7b2",
    Phase.INIT: "#ff9da6",
    Phase.FORWARD: "#4c78a8",
    Phase.BACKWARD: "#f58518",
    Phase.REDUCE: "#54a24b",
    Phase.STEP: "#b279a2",
    Phase.SAVE: "#e45756",
}
"""In the order in which they come."""
_POINTS = 800
"""At most so many points are drawn; of those between two, the highest."""


def draw_timeline(plan: Plan) -> str:
    """An SVG with one chart for each rank of the plan, which must be `exact`."""
    charts = [_chart(rank, plan, index * (_HEIGHT + 20)) for index, rank in enumerate(plan.ranks)]
    height = len(charts) * (_HEIGHT + 20)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
    return "\n".join([f'{head}font-family="sans-serif" font-size="12">', *charts, "</svg>\n"])


def _chart(rank: RankPlan, plan: Plan, down: int) -> str:
    trail = _thinned([(phase, size) for phase, size in rank.trail if phase in _COLOURS])
    limit = (plan.hardware.memory_gib - plan.hardware.context_gib) * GIB
    highest = max(size for _, size in trail)
    top = max(highest * 1.1, limit if limit < 2 * highest else 0)
    inner = _HEIGHT - _TOP - _BOTTOM

    def x(index: float) -> float:
        return _LEFT + index * (_WIDTH - _LEFT - 20) / len(trail)

    def y(size: float) -> float:
        return down + _TOP + inner * (1 - size / top)

    title = f"{rank.name}: {highest / GIB:.2f} GiB of tensors at the peak, {limit / GIB:.1f} GiB there"
    lines = [f'<text x="{_LEFT}" y="{down + 18}" font-weight="bold">{escape(title)}</text>']
    start = 0
    for phase, group in groupby(trail, key=lambda point: point[0]):
        sizes = [size for _, size in group]
        points = [f"{x(start + index):.1f},{y(size):.1f}" for index, size in enumerate([*sizes, sizes[-1]])]
        edge = f"{x(start + len(sizes)):.1f},{y(0):.1f} {x(start):.1f},{y(0):.1f}"
        lines.append(f'<polygon points="{" ".join(points)} {edge}" fill="{_COLOURS[phase]}" fill-opacity="0.75"/>')
        start += len(sizes)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        level = y(share * top)
        lines.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{level:.1f}" y2="{level:.1f}" stroke="#8884"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{level + 4:.1f}" text-anchor="end">{share * top / GIB:.1f}</text>')
    if limit <= top:
        level = y(limit)
        lines.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{level:.1f}" y2="{level:.1f}" stroke="#c00"/>')
    for index, (phase, colour) in enumerate(_COLOURS.items()):
        left, row = _LEFT + index * 98, down + _HEIGHT - 12
        lines.append(f'<rect x="{left}" y="{row - 10}" width="11" height="11" fill="{colour}"/>')
        lines.append(f'<text x="{left + 16}" y="{row}">{phase}</text>')
    return "\n".join(lines)


def _thinned(trail: Sequence[tuple[Phase, int]]) -> list[tuple[Phase, int]]:
    width = max(1, len(trail) // _POINTS)
    kept = []
    for _, group in groupby(enumerate(trail), key=lambda entry: (entry[1][0], entry[0] // width)):
        kept.append(max((point for _, point in group), key=lambda point: point[1]))
    return kept
