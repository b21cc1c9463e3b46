"""The plan of a run: predicted memory and time of its ranks, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import torch

from plait.config import CUSTOM_MODELS, HFConfig, Layout, RunConfig, resolve_batch, resolve_graphs, resolve_layout
from plait.distributed import expert_modules
from plait.launch import Phase
from plait.models import active_params, build_model
from plait.plan.hardware import Hardware
from plait.plan.ledger import Ledger, host_peaks
from plait.plan.rankplan import Known, plan_rank
from plait.plan.shares import with_ratio
from plait.plan.simulate import MakeExample, TimeBudget, example_of
from plait.plan.states import count_params

GIB = 2**30


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The figures of one rank, which stands for all ranks with the same work."""

    name: str
    """`every rank`, `first pipeline stage`, `last pipeline stage`."""
    ledger: Ledger
    trail: tuple[tuple[Phase, int], ...] = ()
    """(Phase, bytes in use) after every operation, from the build to a save; only if `make_plan` was `exact`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The predicted memory and time of a run on a machine."""

    hardware: Hardware
    layout: Layout
    ranks: tuple[RankPlan, ...]
    micro_batches: int
    tokens_per_step: float
    """Of all ranks together; samples if the data have no tokens."""
    flops_per_token: float | None
    params: int | None
    """Parameters of the whole model; None for a model that was given as an object, or is not Plait's to build."""
    active_params: int | None
    """Of a mixture of experts, those that one token uses; None for other models."""
    bubble: float
    """Fraction of a step in which a pipeline is idle, by its schedule; 0 without a pipeline."""
    host_phases: Mapping[Phase, float]
    """Phase → GiB of host memory that the ranks of one host need together."""
    notes: tuple[str, ...] = field(default=())

    @property
    def fullest(self) -> RankPlan:
        """The rank that needs the most device memory."""
        return max(self.ranks, key=lambda rank: rank.ledger.needed(self.hardware))

    @property
    def needed_gib(self) -> float:
        """GiB that each device must have."""
        return self.fullest.ledger.needed(self.hardware) / GIB

    @property
    def host_phase(self) -> Phase:
        """The phase in which a host needs the most memory; of equal ones the save, whose copy the later phases keep."""
        return max(self.host_phases, key=lambda phase: (self.host_phases[phase], phase is Phase.SAVE))

    @property
    def host_gib(self) -> float:
        """GiB of host memory that the ranks of one host need, in the highest phase."""
        return self.host_phases[self.host_phase]

    @property
    def fits(self) -> bool:
        """Whether devices and hosts have enough memory."""
        return self.needed_gib <= self.hardware.memory_gib and self.host_gib <= self.hardware.host_memory_gib

    @property
    def axes_across_hosts(self) -> tuple[str, ...]:
        """The axes of the layout along which ranks of different hosts communicate."""
        across, inner, per_host = [], self.layout.size, self.hardware.per_host
        for axis, size in self.layout.sizes().items():
            outer, inner = inner, inner // size
            if size > 1 and self.layout.size > per_host and per_host % outer:
                across.append(axis)
        return tuple(across)

    @property
    def seconds(self) -> float:
        """Seconds of a step: the time of the slowest rank, and the time in which a pipeline is idle."""
        accounts = [rank.ledger for rank in self.ranks]
        return max(ledger.working() / (1.0 - self.bubble) + ledger.updating() for ledger in accounts)

    @property
    def tokens_per_second(self) -> float:
        """Tokens (or samples) per second of all ranks together."""
        return self.tokens_per_step / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: FLOPs of the model per second, by the devices' peak; None if they are not known."""
        if self.flops_per_token is None:
            return None
        peak = max(self.hardware.flops.get(dtype_name, 0.0) for dtype_name in ("bf16", "fp16", "fp32")) * 1e12
        return self.flops_per_token * self.tokens_per_second / (peak * self.layout.size)

    def dollars_per_billion(self) -> float | None:
        """Return the price of 10⁹ tokens; None if the machine has no price."""
        if self.hardware.dollars_per_hour is None:
            return None
        hours = 1e9 / self.tokens_per_second / 3600
        return hours * self.hardware.dollars_per_hour * self.layout.size

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as values for JSON."""
        return {
            "hardware": self.hardware.name,
            "layout": self.layout.sizes(),
            "axes_across_hosts": list(self.axes_across_hosts),
            "params": self.params,
            "active_params": self.active_params,
            "tokens_per_step": self.tokens_per_step,
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
    """Return the plan of a run of `ranks` ranks; of a pipeline, its first and its last stage are simulated.

    The first stage holds activations of the most micro-batches, the last has the head and the loss. `detailed` adds
    which tensors the memory belongs to; `exact` simulates every layer, and records memory after every operation.
    Simulations in `known` are reused, and new ones are added to it. Raise `TimeUpError` when `budget` is spent.
    """
    if isinstance(config.model, HFConfig) and config.model.pretrained:  # no weights are needed, only shapes
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
    counts = _count(config)
    return Plan(
        hardware,
        layout,
        tuple(plans),
        batch.accumulation,
        plans[-1].ledger.numbers["tokens"] * layout.data_parallel,
        counts.flops_per_token or first.flops_per_token,
        counts.params,
        counts.active,
        bubble,
        _host_phases(plans, hardware, ranks=min(layout.size, hardware.per_host)),
        tuple(dict.fromkeys(notes)),
    )


class _Counts(NamedTuple):
    """What is counted of the model that a run describes; None where that is not known."""

    params: int | None = None
    active: int | None = None
    flops_per_token: float | None = None


def _count(config: RunConfig) -> _Counts:
    """Return the counts of the described model; FLOPs by its `flops_per_token`, for the data's sequence length."""
    if config.model is None or isinstance(config.model, CUSTOM_MODELS):
        return _Counts()
    try:
        with torch.device("meta"):
            model = build_model(config.model, trust_code=config.trust_code)
    except (RuntimeError, NotImplementedError):  # its constructor reads values
        return _Counts()
    length = getattr(config.data, "seq_len", getattr(config.model, "seq_len", None))
    count = getattr(model, "flops_per_token", None)
    flops = float(count(length)) if count is not None and isinstance(length, int) else None
    active = active_params(model) if expert_modules(model) else None
    return _Counts(count_params(model)[0], active, flops)


def _host_phases(ranks_planned: Sequence[RankPlan], hardware: Hardware, *, ranks: int) -> dict[Phase, float]:
    """Return phase → GiB of a host with `ranks` ranks, each counted as the planned rank that needs the most."""
    peaks = [host_peaks(rank.ledger, hardware) for rank in ranks_planned]
    phases = dict.fromkeys(phase for peaks_of_rank in peaks for phase in peaks_of_rank)
    return {phase: ranks * max(peaks_of_rank.get(phase, 0.0) for peaks_of_rank in peaks) / GIB for phase in phases}


# The chart of a run's memory: bytes in use after every operation, coloured by phase, and the device's memory.


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
"""In the order of the phases in a run."""
_POINTS = 800
"""About how many points are drawn at most; each is the highest of the operations that it stands for."""


def draw_timeline(plan: Plan) -> str:
    """Return an SVG with one chart for each rank of the plan, which must be made with `exact`."""
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
