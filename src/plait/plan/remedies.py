"""What to change when a run does not fit: one rung after the other, cheapest first, until one does.

[Note: up the ladder, and down again] The last rung may save so much that some before it were not needed: with weights
shared out, the optimizer can stay on the device. So those are taken back that the run fits without, the dearest first.
A micro-batch of 1, where it stays, then grows to the largest for which there is room, and so do shares of an offloaded
optimizer.

[Note: what is cheap comes first] A simulation takes seconds. So a rung whose weights and optimizer alone are too large
is not simulated (`least_gib`), and short models that two rungs have in common are simulated once (`Known`). Once half
of the `TimeBudget` is gone, rungs are passed over up to the last before tensor parallelism, which has all that ranks
and hosts can take over: something that fits is worth more than the next figure, and what it does not need is taken back
in the other half. All of it ends when the patience does; what nobody has simulated by then is said, with what the quick
account (`quick`) makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from plait.config import CUSTOM_MODELS, HFConfig, RunConfig, resolve_batch, resolve_layout
from plait.errors import PlaitError, in_one_line
from plait.models import build_model
from plait.plan.hardware import Hardware
from plait.plan.plan import Plan, make_plan
from plait.plan.quick import Quick, Seen, quick_of
from plait.plan.rankplan import Known
from plait.plan.shares import HOST_SHARE, SHARE, lowered_shares
from plait.plan.simulate import TimeBudget, TimeUpError
from plait.plan.space import Candidate
from plait.plan.states import count_params, least_gib

_TENSOR = "strategy.layout.tp"


@dataclass(frozen=True, slots=True)
class Rung:
    """Settings beyond those before, and what the run would take with all of them."""

    candidate: Candidate
    """All changes up to here."""
    added: Candidate
    """Those of this rung."""
    plan: Plan | None
    reason: str = ""
    """Why there is no plan."""
    least: float = 0.0
    """GiB that each device needs at least; where that is too much, nobody looks closer."""
    late: bool = False
    """Whether there was no time to simulate it."""
    estimate: float | None = None
    """GiB of each device by the quick account, of a rung that nobody simulated."""
    seems_to_fit: bool = False
    """Whether the run fits from here on by that account."""

    @property
    def fits(self) -> bool:
        """Whether the run fits from here on."""
        return self.plan is not None and self.plan.fits


@dataclass
class RemedySearch:
    """The changes that may make a run fit, and what is known of them so far."""

    config: RunConfig
    hardware: Hardware
    ranks: int
    patience: TimeBudget = field(default_factory=TimeBudget)
    known: Known = field(default_factory=dict)
    """What was simulated, perhaps by the plan that did not fit."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `make_plan`: what the run was given beside its description."""
    cut: bool = False
    """Whether the time was up before all was done."""

    def climb(self) -> Iterator[Rung]:
        """Rung by rung up to the first that fits. Each keeps the global batch and the losses."""
        settings: dict[str, Any] = {}
        changes = list(_changes(self.config, self.ranks, self.hardware))
        top = max((index for index, change in enumerate(changes) if _TENSOR not in change), default=0)
        for index, change in enumerate(changes):
            hurries = index < top and self.patience.half_over and not self.patience.over
            rung = self._passed_over(settings, change) if hurries else self._rung(settings, change)
            settings = dict(rung.candidate.settings)
            yield rung
            if rung.fits or (rung.seems_to_fit and self.patience.over):
                return

    def taken_back(self, rungs: Sequence[Rung]) -> Rung:
        """The last of `rungs`, which fits, without those that are not needed."""
        least, needed = rungs[-1], [rung.added.settings for rung in rungs]
        try:
            for index in reversed(range(len(rungs))):  # the last too: what was before it may have been passed over
                fewer = [*needed[:index], *needed[index + 1 :]]
                candidate = Candidate({key: value for change in fewer for key, value in change.items()})
                if candidate.settings == least.candidate.settings:  # a later rung has the last word on it
                    needed = fewer
                    continue
                try:
                    config = candidate.applied_to(self.config)
                    if self._least(config) > self.hardware.memory_gib:
                        continue
                    plan = self._plan(config)
                except PlaitError:
                    continue  # what came later rests on it
                if plan.fits:
                    least, needed = Rung(candidate, rungs[-1].added, plan), fewer
            if least is not rungs[-1] or not _is_shares(least.added.settings):
                least = self._larger_shares(least)
            return self._larger_micro(least)
        except TimeUpError:
            self.cut = True
            return least

    def left_out(self, rungs: Sequence[Rung]) -> str:
        """A sentence on what there was no time for; empty where there was."""
        if not self.cut:
            return ""
        over = f"The {self.patience.seconds:.0f} s of computing for this search were over"
        if rungs[-1].fits:
            return f"{over} before it was clear whether less would do."
        likely = next((rung for rung in rungs if rung.seems_to_fit), None)
        if likely is not None:
            changes = " ".join(likely.candidate.changes(self.config))
            return f"{over}. Estimated, not simulated: with `{changes}` it needs about {likely.estimate:.1f} GiB."
        words = [f"`{' '.join(rung.added.changes(self.config))}`" for rung in rungs if rung.late]
        return f"{over} before all was simulated: {', '.join(words)} may still make it fit."

    def _rung(self, before: dict[str, Any], change: dict[str, Any]) -> Rung:
        settings = {**before, **change}
        plan, least, reason = None, 0.0, ""
        try:
            config = Candidate(settings).applied_to(self.config)
            least = self._least(config)
            if least <= self.hardware.memory_gib:
                if _is_shares(change):
                    settings |= self._shares(settings)
                    config = Candidate(settings).applied_to(self.config)
                plan = self._plan(config)
        except PlaitError as error:
            reason = in_one_line(error)
        except TimeUpError:
            self.cut = True
            return self._estimated(settings, before, "not simulated", f"{self.patience.seconds:.0f} s", least)
        return Rung(Candidate(settings), _added(before, settings), plan, reason, least)

    def _passed_over(self, before: dict[str, Any], change: dict[str, Any]) -> Rung:
        when = f"half of the {self.patience.seconds:.0f} s"
        return self._estimated({**before, **change}, before, "passed over", when)

    def _estimated(
        self, settings: dict[str, Any], before: dict[str, Any], what: str, when: str, least: float = 0.0
    ) -> Rung:
        """A rung that there is no time to simulate, by the quick account, for which half as much time is spent."""
        candidate, reason = Candidate(settings), f"{what}: {when} of computing for this search were over"
        quick = self._quick(candidate)
        if quick is None:
            return Rung(candidate, _added(before, settings), None, reason, least, late=True)
        hardware = self.hardware
        fits = quick.needed_gib <= hardware.memory_gib and quick.host_gib <= hardware.host_memory_gib
        verdict = "seems to fit" if fits else "seems too much"
        reason = f"about {quick.needed_gib:.1f} GiB, {verdict} (estimated; {reason})"
        added = _added(before, settings)
        return Rung(candidate, added, None, reason, least, late=True, estimate=quick.needed_gib, seems_to_fit=fits)

    def _quick(self, candidate: Candidate) -> Quick | None:
        try:
            if self._estimating.over:
                return None
            config = candidate.applied_to(self.config)
            found = quick_of(
                config, self.hardware, self.ranks, seen=self._seen, patience=self._estimating, **self.options
            )
        except (PlaitError, TimeUpError):
            return None
        return None if isinstance(found, str) else found

    @cached_property
    def _estimating(self) -> TimeBudget:
        return self.patience.again(self.patience.seconds / 2)

    @cached_property
    def _seen(self) -> Seen:
        """What the rungs have in common; the one for the micro-batch ends at 1."""
        return Seen(1, self._micro)

    @property
    def _micro(self) -> int:
        """Samples of a micro-batch as it is written."""
        layout = resolve_layout(self.config.strategy, size=self.ranks, local_size=self._local)
        stages = self.config.strategy.pipeline.micro_batches
        return resolve_batch(self.config.batch, layout.data_parallel, micro_batches=stages).micro

    def _plan(self, config: RunConfig) -> Plan:
        if self.patience.over:
            raise TimeUpError
        common: dict[str, Any] = {"known": self.known, "patience": self.patience}
        return make_plan(config, self.hardware, ranks=self.ranks, detailed=False, **common, **self.options)

    def _least(self, config: RunConfig) -> float:
        """GiB that a device needs at least; 0 where that is not known: of a model that was given, or learns in part."""
        if self.options or config.model is None or config.lora is not None or isinstance(config.model, CUSTOM_MODELS):
            return 0.0
        return least_gib(config, self._params, resolve_layout(config.strategy, size=self.ranks, local_size=self._local))

    @cached_property
    def _params(self) -> int:
        model = self.config.model
        assert model is not None
        if isinstance(model, HFConfig):  # its shapes are enough
            model = model.model_copy(update={"pretrained": False})
        with torch.device("meta"):
            return count_params(build_model(model, trust_code=self.config.trust_code))[0]

    @property
    def _local(self) -> int:
        return min(self.ranks, self.hardware.per_host)

    # ---- as much as there is room for

    def _shares(self, settings: dict[str, Any]) -> dict[str, float]:
        """The shares of the run's own description, as large as fits with these settings."""
        others = {key: value for key, value in settings.items() if key not in (SHARE, HOST_SHARE)}

        def plan_with(shares: dict[str, Any]) -> Plan:
            return self._plan(Candidate({**others, **shares}).applied_to(self.config))

        return lowered_shares(self.config, plan_with)

    def _larger_shares(self, rung: Rung) -> Rung:
        """A rung that fits, with the largest shares that fit too."""
        settings = dict(rung.candidate.settings)
        away = settings.get("strategy.offload.params", "none") != "none"  # nothing is left to be updated on the device
        if away or not (SHARE in settings or HOST_SHARE in settings):
            return rung
        candidate = Candidate({**settings, **self._shares(settings)})
        if candidate.settings == rung.candidate.settings:
            return rung
        plan = self._plan(candidate.applied_to(self.config))
        return Rung(candidate, rung.added, plan) if plan.fits else rung

    def _larger_micro(self, rung: Rung) -> Rung:
        """A rung that fits with a micro-batch of 1, with the largest that fits too: memory grows evenly with it."""
        if rung.plan is None or rung.candidate.settings.get("batch.micro") != 1:
            return rung

        def at(micro: int) -> Rung:
            candidate = Candidate({**rung.candidate.settings, "batch.micro": micro})
            return Rung(candidate, rung.added, self._plan(candidate.applied_to(self.config)))

        written = self._micro
        try:
            whole = at(written).plan
            assert whole is not None
            grows = (whole.needed_gib - rung.plan.needed_gib) / (written - 1)
            most = 1 + (self.hardware.memory_gib - rung.plan.needed_gib) / max(grows, 1e-9)
            sizes = [size for size in range(2, written) if written % size == 0 and size <= most]
            return next((found for size in reversed(sizes[-2:]) if (found := at(size)).fits), rung)
        except PlaitError:
            return rung  # another layout takes no other micro-batch
        except TimeUpError:
            self.cut = True
            return rung


def _added(before: dict[str, Any], settings: dict[str, Any]) -> Candidate:
    return Candidate({key: value for key, value in settings.items() if key not in before or before[key] != value})


def _is_shares(change: Mapping[str, Any]) -> bool:
    return change.keys() <= {SHARE, HOST_SHARE}


def _changes(config: RunConfig, ranks: int, hardware: Hardware) -> Iterator[dict[str, Any]]:
    strategy, per_host = config.strategy, hardware.per_host
    layout = resolve_layout(strategy, size=ranks, local_size=min(ranks, per_host))
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=strategy.pipeline.micro_batches)
    if config.checkpoint.async_save:
        yield {"checkpoint.async_save": False}
    if batch.micro > 1:
        yield {"batch.total": batch.total, "batch.micro": 1, "batch.accumulation": None}
    if strategy.recompute.mode == "none":
        yield {"strategy.recompute.mode": "selective"}
    if strategy.recompute.mode != "full":
        yield {"strategy.recompute.mode": "full"}
    clear: dict[str, Any] = {} if strategy.sharding is None else {"strategy.sharding": None}
    free = {f"strategy.layout.{axis}": None for axis in ("dp_replicate", "dp_shard")}
    spreads, has_host = layout.data_parallel > 1, hardware.kind == "cuda"
    for stage in (1, 2):
        if spreads and stage > strategy.stage:
            yield {**clear, **free, "strategy.zero": stage}
    if has_host and strategy.offload.optimizer == "none":
        yield {"strategy.offload.optimizer": "cpu"}
    shares = {SHARE: strategy.offload.share, HOST_SHARE: strategy.offload.host_ratio}
    given = {key: 0.0 for key, share in shares.items() if share > 0 and strategy.offload.on}
    if given and strategy.offload.params == "none":
        yield given  # the smallest; how large they may be is looked for
    if spreads and strategy.stage < 3:
        yield {**clear, **free, "strategy.zero": 3}
    if has_host and strategy.offload.params == "none":
        # Weights that do not live on the device are not updated there.
        nothing_here = {SHARE: 0.0} if SHARE in given else {}
        yield {**clear, "strategy.zero": 3, "strategy.offload.params": "cpu", **nothing_here}
    if has_host and strategy.offload.optimizer != "nvme":
        yield {"strategy.offload.optimizer": "nvme"}
    tensor = layout.tp * 2
    while tensor <= min(per_host, ranks) and layout.pp * tensor * layout.cp * layout.ep <= ranks:
        yield {_TENSOR: tensor, "strategy.tensor.sequence_parallel": True}
        tensor *= 2
