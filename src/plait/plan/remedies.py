"""What to change when a run does not fit in memory.

A *remedy* is a change of settings that saves memory, such as a smaller micro-batch, recomputation, sharding or offload.
Remedies are added one after the other, the one that slows the run least first, until a simulation of it fits.

[Note: remedies are added, then removed] The last remedy may save so much that some before it were not needed: with
sharded weights, the optimizer can stay on the device. So remedies that the run fits without are removed again, the most
expensive first. A micro-batch of 1 that is still needed then grows to the largest that fits, and so do the shares of an
offloaded optimizer (the parts of its state that stay on the device, and in host memory instead of files).

[Note: what is cheap comes first] A simulation takes seconds. So a remedy with which the weights and the optimizer state
alone are too large is not simulated (`least_gib`). A model is simulated with a few of its layers; simulations that two
remedies have in common are run once (`Known`). Once half of the `TimeBudget` is spent, all remedies but the last before
tensor parallelism are skipped. That one has all changes so far, and so takes the least memory: it is more useful to
find something that fits than to simulate every remedy before it. The other half is for removing the changes that it
does not need. When the budget is spent, what was not simulated is listed with an estimate (`quick`).
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
from plait.plan.quick import Quick, Seen, estimate
from plait.plan.rankplan import Known
from plait.plan.shares import HOST_SHARE, SHARE, lowered_shares
from plait.plan.simulate import TimeBudget, TimeUpError
from plait.plan.space import Candidate
from plait.plan.states import count_params, least_gib

_TENSOR = "strategy.layout.tp"


@dataclass(frozen=True, slots=True)
class Remedy:
    """One more change of settings, and the plan (the simulated memory and time) with it and all changes before it."""

    candidate: Candidate
    """All changes up to here."""
    added: Candidate
    """The changes of this remedy."""
    plan: Plan | None
    reason: str = ""
    """Why it has no plan; empty if it has one, or if `least` is too much."""
    least: float = 0.0
    """GiB that each device needs at least; if that is too much, it is not simulated."""
    timed_out: bool = False
    """Whether there was no time to simulate it."""
    estimate: float | None = None
    """Estimated GiB of each device, of a remedy that was not simulated."""
    seems_to_fit: bool = False
    """Whether the run fits by that estimate."""

    @property
    def fits(self) -> bool:
        """Whether the run fits with all changes up to here."""
        return self.plan is not None and self.plan.fits


@dataclass
class RemedySearch:
    """Searches for changes with which a run fits in memory."""

    config: RunConfig
    hardware: Hardware
    ranks: int
    budget: TimeBudget = field(default_factory=TimeBudget)
    known: Known = field(default_factory=dict)
    """Simulations to reuse, for example of the plan that did not fit."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of `make_plan` that are not in the run description."""
    cut: bool = False
    """Whether the budget ended the search."""

    def remedies(self) -> Iterator[Remedy]:
        """Yield remedies up to the first that fits. Each keeps the global batch and the losses."""
        settings: dict[str, Any] = {}
        changes = list(_changes(self.config, self.ranks, self.hardware))
        top = max((index for index, change in enumerate(changes) if _TENSOR not in change), default=0)
        for index, change in enumerate(changes):
            skips = index < top and self.budget.half_over and not self.budget.over
            remedy = self._skipped(settings, change) if skips else self._remedy(settings, change)
            settings = dict(remedy.candidate.settings)
            yield remedy
            if remedy.fits or (remedy.seems_to_fit and self.budget.over):
                return

    def without_needless(self, remedies: Sequence[Remedy]) -> Remedy:
        """Return the last of `remedies`, which must fit, without the changes that the run also fits without."""
        smallest, needed = remedies[-1], [remedy.added.settings for remedy in remedies]
        try:
            for index in reversed(range(len(remedies))):  # the last too: what was before it may have been skipped
                fewer = [*needed[:index], *needed[index + 1 :]]
                candidate = Candidate({key: value for change in fewer for key, value in change.items()})
                if candidate.settings == smallest.candidate.settings:  # a later remedy has the last word on it
                    needed = fewer
                    continue
                try:
                    config = candidate.applied_to(self.config)
                    if self._least(config) > self.hardware.memory_gib:
                        continue
                    plan = self._plan(config)
                except PlaitError:
                    continue  # a later change is not valid without it
                if plan.fits:
                    smallest, needed = Remedy(candidate, remedies[-1].added, plan), fewer
            if smallest is not remedies[-1] or not _is_shares(smallest.added.settings):
                smallest = self._larger_shares(smallest)
            return self._larger_micro(smallest)
        except TimeUpError:
            self.cut = True
            return smallest

    def left_out(self, remedies: Sequence[Remedy]) -> str:
        """Return a sentence on what was not simulated; empty if the budget sufficed."""
        if not self.cut:
            return ""
        over = f"The {self.budget.seconds:.0f} s of computing for this search were over"
        if remedies[-1].fits:
            return f"{over} before it was clear whether less would do."
        likely = next((remedy for remedy in remedies if remedy.seems_to_fit), None)
        if likely is not None:
            changes = " ".join(likely.candidate.changes(self.config))
            return f"{over}. Estimated, not simulated: with `{changes}` it needs about {likely.estimate:.1f} GiB."
        options = [f"`{' '.join(remedy.added.changes(self.config))}`" for remedy in remedies if remedy.timed_out]
        return f"{over} before all was simulated: {', '.join(options)} may still make it fit."

    def _remedy(self, before: dict[str, Any], change: dict[str, Any]) -> Remedy:
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
            return self._estimated(settings, before, "not simulated", f"{self.budget.seconds:.0f} s", least)
        return Remedy(Candidate(settings), _added(before, settings), plan, reason, least)

    def _skipped(self, before: dict[str, Any], change: dict[str, Any]) -> Remedy:
        when = f"half of the {self.budget.seconds:.0f} s"
        return self._estimated({**before, **change}, before, "skipped", when)

    def _estimated(
        self, settings: dict[str, Any], before: dict[str, Any], what: str, when: str, least: float = 0.0
    ) -> Remedy:
        """Return a remedy that was not simulated for lack of time, with an estimate.

        All estimates together may take half as long as the search.
        """
        candidate, reason = Candidate(settings), f"{what}: {when} of computing for this search were over"
        quick = self._quick(candidate)
        if quick is None:
            return Remedy(candidate, _added(before, settings), None, reason, least, timed_out=True)
        hardware = self.hardware
        fits = quick.needed_gib <= hardware.memory_gib and quick.host_gib <= hardware.host_memory_gib
        outlook = "seems to fit" if fits else "seems too large"
        reason = f"about {quick.needed_gib:.1f} GiB, {outlook} (estimated; {reason})"
        added = _added(before, settings)
        return Remedy(
            candidate, added, None, reason, least, timed_out=True, estimate=quick.needed_gib, seems_to_fit=fits
        )

    def _quick(self, candidate: Candidate) -> Quick | None:
        try:
            if self._estimating.over:
                return None
            config = candidate.applied_to(self.config)
            result = estimate(
                config, self.hardware, self.ranks, seen=self._seen, budget=self._estimating, **self.options
            )
        except (PlaitError, TimeUpError):
            return None
        return None if isinstance(result, str) else result

    @cached_property
    def _estimating(self) -> TimeBudget:
        return self.budget.again(self.budget.seconds / 2)

    @cached_property
    def _seen(self) -> Seen:
        """Results that the estimates share; their micro-batches are from 1, which a remedy sets, to the run's own."""
        return Seen(1, self._micro)

    @property
    def _micro(self) -> int:
        """Samples of a micro-batch in the run description, before any remedy."""
        layout = resolve_layout(self.config.strategy, size=self.ranks, local_size=self._local)
        stages = self.config.strategy.pipeline.micro_batches
        return resolve_batch(self.config.batch, layout.data_parallel, micro_batches=stages).micro

    def _plan(self, config: RunConfig) -> Plan:
        if self.budget.over:
            raise TimeUpError
        common: dict[str, Any] = {"known": self.known, "budget": self.budget}
        return make_plan(config, self.hardware, ranks=self.ranks, detailed=False, **common, **self.options)

    def _least(self, config: RunConfig) -> float:
        """GiB that a device needs at least; 0 if not known: for a user's model, or if only a part is trained."""
        if self.options or config.model is None or config.lora is not None or isinstance(config.model, CUSTOM_MODELS):
            return 0.0
        return least_gib(config, self._params, resolve_layout(config.strategy, size=self.ranks, local_size=self._local))

    @cached_property
    def _params(self) -> int:
        model = self.config.model
        assert model is not None
        if isinstance(model, HFConfig):  # no weights are needed, only shapes
            model = model.model_copy(update={"pretrained": False})
        with torch.device("meta"):
            return count_params(build_model(model, trust_code=self.config.trust_code))[0]

    @property
    def _local(self) -> int:
        return min(self.ranks, self.hardware.per_host)

    # ---- larger shares and micro-batches, while the run fits

    def _shares(self, settings: dict[str, Any]) -> dict[str, float]:
        """Return the largest shares that fit with these settings, up to those of the run description."""
        others = {key: value for key, value in settings.items() if key not in (SHARE, HOST_SHARE)}

        def plan_with(shares: dict[str, Any]) -> Plan:
            return self._plan(Candidate({**others, **shares}).applied_to(self.config))

        return lowered_shares(self.config, plan_with)

    def _larger_shares(self, remedy: Remedy) -> Remedy:
        """Return a fitting remedy with its shares of an offloaded optimizer raised to the largest that still fit."""
        settings = dict(remedy.candidate.settings)
        offloads_params = settings.get("strategy.offload.params", "none") != "none"
        # Offloaded weights are not updated on the device, whatever the share.
        if offloads_params or not (SHARE in settings or HOST_SHARE in settings):
            return remedy
        candidate = Candidate({**settings, **self._shares(settings)})
        if candidate.settings == remedy.candidate.settings:
            return remedy
        plan = self._plan(candidate.applied_to(self.config))
        return Remedy(candidate, remedy.added, plan) if plan.fits else remedy

    def _larger_micro(self, remedy: Remedy) -> Remedy:
        """Return a fitting remedy with its micro-batch of 1 raised to the largest that still fits.

        Memory grows linearly with it, so two simulations tell which sizes to try.
        """
        if remedy.plan is None or remedy.candidate.settings.get("batch.micro") != 1:
            return remedy

        def at(micro: int) -> Remedy:
            candidate = Candidate({**remedy.candidate.settings, "batch.micro": micro})
            return Remedy(candidate, remedy.added, self._plan(candidate.applied_to(self.config)))

        written = self._micro
        try:
            whole = at(written).plan
            assert whole is not None
            grows = (whole.needed_gib - remedy.plan.needed_gib) / (written - 1)
            most = 1 + (self.hardware.memory_gib - remedy.plan.needed_gib) / max(grows, 1e-9)
            sizes = [size for size in range(2, written) if written % size == 0 and size <= most]
            return next((larger for size in reversed(sizes[-2:]) if (larger := at(size)).fits), remedy)
        except PlaitError:
            return remedy  # with the changed layout, other micro-batches may be invalid
        except TimeUpError:
            self.cut = True
            return remedy


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
        yield given  # the smallest; `_shares` then finds the largest that fit
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
