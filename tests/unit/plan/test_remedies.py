"""What makes a run fit: remedies are added, then removed, shares of an offloaded optimizer, and a limit of time."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from tests.refusals import missing

from plait.config import parse_sections, resolve_layout
from plait.config.run import RunConfig
from plait.plan import rankplan
from plait.plan.hardware import find_hardware
from plait.plan.plan import make_plan
from plait.plan.rankplan import Known
from plait.plan.remedies import RemedySearch
from plait.plan.search import Candidate
from plait.plan.shares import HOST_SHARE, SHARE, STEPS, lowered_shares
from plait.plan.simulate import TimeBudget, TimeUpError
from plait.plan.states import count_params, least_gib

H100 = find_hardware("h100")


def small(**sections: Any) -> RunConfig:
    heads = random.choice([2, 4])
    model = {
        "type": "llama",
        "vocab_size": random.choice([500, 1000]),
        "dim": 32 * heads,
        "layers": random.choice([7, 9]),
        "heads": heads,
        "kv_heads": random.choice([1, heads]),
        "ffn_dim": random.choice([96, 200]),
        "seq_len": random.choice([32, 64]),
    }
    return parse_sections(**{"model": model, "batch": {"micro": 2}, "precision": "bf16", **sections}).config


def without_end() -> TimeBudget:
    """However busy the machine is that runs these tests."""
    return TimeBudget(1.0, clock=lambda: 0.0)


class Clock:
    """A clock that goes on when it is told to, and by `each` whenever somebody looks."""

    def __init__(self, each: float = 0.0) -> None:
        self.now, self.each = 0.0, each

    def __call__(self) -> float:
        self.now += self.each
        return self.now


def refusing_to_simulate(*_args: Any, **_options: Any) -> Any:
    raise AssertionError("this was simulated before")


def test_what_does_not_fit_is_led_up_the_ladder_to_what_does() -> None:
    config = small(batch={"total": 64, "micro": 16}, strategy="ddp")
    written = parse_sections(**config.model_dump(exclude_unset=True) | {"batch": {"total": 64, "micro": 1}}).config
    spare = replace(H100, context_gib=0.0)
    tight = replace(spare, memory_gib=make_plan(written, spare, ranks=4).needed_gib * 0.97)
    remedy_search = RemedySearch(config, tight, 4, without_end())
    remedies = list(remedy_search.remedies())
    assert remedies[-1].fits
    assert not any(remedy.fits for remedy in remedies[:-1])
    assert remedies[0].candidate.settings["batch.micro"] == 1
    assert remedies[0].candidate.settings["batch.total"] == 64


def test_remedies_that_a_later_one_makes_needless_are_taken_back() -> None:
    config = small(batch={"total": 4, "micro": 1}, strategy="ddp")
    sizes = {"vocab_size": 8000, "dim": 256, "layers": 6, "ffn_dim": 1024}
    config = config.model_copy(update={"model": config.model.model_copy(update=sizes)})  # type: ignore[union-attr]
    spare = replace(H100, context_gib=0.0)
    shared = make_plan(Candidate({"strategy.zero": 1}).applied_to(config), spare, ranks=4).needed_gib
    tight = replace(spare, memory_gib=shared * 1.06)  # a search extrapolates from fewer layers, and is a little above
    remedy_search = RemedySearch(config, tight, 4, without_end())
    remedies = list(remedy_search.remedies())
    assert remedies[-1].candidate.changes(config) == ["strategy.recompute.mode=full", "strategy.zero=1"]
    least = remedy_search.without_needless(remedies)
    assert least.fits
    assert least.candidate.changes(config) == ["strategy.zero=1"]


def test_a_micro_batch_of_one_grows_to_the_largest_for_which_there_is_room() -> None:
    config = small(batch={"total": 64, "micro": 64}, strategy="single")
    spare = replace(H100, context_gib=0.0)
    whole = make_plan(config, spare, ranks=1).needed_gib
    one = make_plan(Candidate({"batch.micro": 1}).applied_to(config), spare, ranks=1).needed_gib
    tight = replace(spare, memory_gib=one + 0.6 * (whole - one))
    remedy_search = RemedySearch(config, tight, 1, without_end())
    remedies = list(remedy_search.remedies())
    least = remedy_search.without_needless(remedies)
    assert remedies[-1].candidate.settings["batch.micro"] == 1
    assert least.fits
    assert least.candidate.changes(config) in (["batch.micro=32"], ["batch.micro=16"])


def test_above_zero_2_the_ladder_leads_to_host_memory() -> None:
    config = small(batch={"total": 4, "micro": 1}, strategy={"zero": 2, "recompute": "full"}, precision="bf16")
    tight = replace(H100, memory_gib=H100.context_gib * 0.9)  # room for the states, but not for what comes before them
    remedies = list(islice(RemedySearch(config, tight, 4, without_end()).remedies(), 3))
    added = [remedy.added.changes(config) for remedy in remedies]
    assert added == [["strategy.offload.optimizer=cpu"], ["strategy.zero=3"], ["strategy.offload.params=cpu"]]
    assert remedies[-1].candidate.changes(config) == [word for words in added for word in words]
    needs = [remedy.plan.needed_gib for remedy in remedies if remedy.plan is not None]
    assert len(needs) == 3
    assert needs == sorted(needs, reverse=True)


def test_when_the_time_is_up_every_remedy_that_nobody_looked_at_is_named() -> None:
    config = small(batch={"total": 8, "micro": 2}, strategy="ddp")
    tight = replace(H100, memory_gib=H100.context_gib * 0.9)
    clock = Clock()
    remedy_search = RemedySearch(config, tight, 4, TimeBudget(40.0, clock))
    remedies = []
    for remedy in remedy_search.remedies():
        remedies.append(remedy)
        clock.now += 40.0
    assert [remedy.timed_out for remedy in remedies] == [False] + [True] * (len(remedies) - 1)
    assert not any(remedy.plan for remedy in remedies[1:])
    said = remedy_search.left_out(remedies)
    assert "40 s" in said
    for remedy in remedies[1:]:
        assert f"`{' '.join(remedy.added.changes(config))}`" in said
        assert "40 s" in remedy.reason
        assert "estimated" in remedy.reason or clock.now > 80.0  # the quick account has half as much time
    hopeless = RemedySearch(config, replace(tight, memory_gib=-1.0), 4, without_end())  # nothing to simulate
    assert [remedy.candidate for remedy in remedies] == [remedy.candidate for remedy in hopeless.remedies()]


def test_when_the_time_is_up_the_quick_account_names_the_first_remedy_that_seems_to_fit() -> None:
    config = small(batch={"total": 8, "micro": 2}, strategy="ddp")
    clock = Clock()
    needed = make_plan(config, H100, ranks=4).needed_gib
    remedy_search = RemedySearch(config, replace(H100, memory_gib=needed * 1.2), 4, TimeBudget(40.0, clock))
    clock.now = 40.0
    remedies = list(remedy_search.remedies())
    assert len(remedies) == 1
    assert remedies[0].timed_out
    assert remedies[0].seems_to_fit
    assert not remedies[0].fits  # which only a simulation says
    assert remedies[0].estimate == pytest.approx(needed, rel=0.2)
    said = remedy_search.left_out(remedies)
    assert not missing(said, "40 s", "`batch.micro=1", f"{remedies[0].estimate:.1f} GiB")


def test_a_search_counts_what_it_computes_and_not_the_time_that_passes() -> None:
    budget = TimeBudget(0.2)
    time.sleep(0.3)
    assert not budget.over
    while not budget.over:
        sum(range(10000))
    assert budget.again(5.0).seconds == 5.0


def test_at_half_time_remedies_are_skipped_to_what_saves_most_and_removed_from_there() -> None:
    config = small(batch={"total": 4, "micro": 1}, strategy="ddp")
    sizes = {"vocab_size": 8000, "dim": 256, "layers": 4, "ffn_dim": 1024, "kv_heads": 2}
    config = config.model_copy(update={"model": config.model.model_copy(update=sizes)})  # type: ignore[union-attr]
    spare = replace(H100, context_gib=0.0)
    shared = make_plan(Candidate({"strategy.zero": 1}).applied_to(config), spare, ranks=4).needed_gib
    clock = Clock()
    remedy_search = RemedySearch(config, replace(spare, memory_gib=shared * 1.03), 4, TimeBudget(40.0, clock))
    climbing = remedy_search.remedies()
    remedies = [next(climbing)]
    clock.now = 20.0
    remedies += climbing
    assert remedies[0].plan is not None
    assert all(remedy.timed_out and "40 s" in remedy.reason for remedy in remedies[1:-1])
    assert remedies[-1].fits
    assert remedies[-1].added.changes(config) == ["strategy.offload.optimizer=nvme"]
    least = remedy_search.without_needless(remedies)
    assert least.fits
    assert not remedy_search.left_out(remedies)
    assert least.candidate.changes(config) in (["strategy.zero=1"], ["strategy.recompute.mode=full", "strategy.zero=1"])


def test_a_simulation_under_way_ends_when_the_time_is_up_and_leaves_nothing_behind() -> None:
    config = small(strategy={"zero": 3, "recompute": "full"}, batch={"micro": 1})
    config = config.model_copy(update={"model": config.model.model_copy(update={"layers": 3})})  # type: ignore[union-attr]
    clock = Clock(each=1.0)
    before = make_plan(config, H100, ranks=4, budget=TimeBudget(1e9, clock)).to_dict()
    operations = int(clock.now)
    for moment in random.sample(range(operations - 2), 5):  # in the build, forward, in the update
        known: Known = {}
        with pytest.raises(TimeUpError):
            make_plan(config, H100, ranks=4, known=known, budget=TimeBudget(moment, Clock(each=1.0)))
        assert not known
    assert make_plan(config, H100, ranks=4).to_dict() == before


def test_a_search_that_ends_on_the_way_down_keeps_what_it_has_found_and_says_so() -> None:
    config = small(batch={"total": 64, "micro": 64}, strategy="single")
    spare = replace(H100, context_gib=0.0)
    one = make_plan(Candidate({"batch.micro": 1}).applied_to(config), spare, ranks=1).needed_gib
    clock = Clock()
    remedy_search = RemedySearch(config, replace(spare, memory_gib=one * 1.5), 1, TimeBudget(40.0, clock))
    remedies = list(remedy_search.remedies())
    assert remedy_search.left_out(remedies) == ""
    clock.now = 41.0
    least = remedy_search.without_needless(remedies)
    assert least.candidate == remedies[-1].candidate
    assert least.fits
    assert "40 s" in remedy_search.left_out(remedies)


def test_what_one_plan_has_simulated_another_does_not_simulate_again(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = {"optimizer": "nvme", "ratio": 0.4, "host_ratio": 0.3}
    config = small(strategy={"recompute": "full", "offload": offload}, batch={"micro": 1})
    other = Candidate({SHARE: random.uniform(0.1, 0.5), HOST_SHARE: 0.2}).applied_to(config)
    known: Known = {}
    first = make_plan(config, H100, ranks=1, known=known)
    fresh = make_plan(other, H100, ranks=1, detailed=False)
    monkeypatch.setattr(rankplan, "simulate", refusing_to_simulate)
    assert make_plan(config, H100, ranks=1, known=known).to_dict() == first.to_dict()
    again = make_plan(other, H100, ranks=1, detailed=False, known=known)
    # Sums of the same numbers, perhaps in another order.
    assert again.needed_gib == pytest.approx(fresh.needed_gib, rel=1e-12)
    assert again.host_gib == pytest.approx(fresh.host_gib, rel=1e-12)
    assert again.seconds == pytest.approx(fresh.seconds, rel=1e-12)


@pytest.mark.parametrize("shares", [{"ratio": 0.4, "host_ratio": 0.4}, {"ratio": 0.62}], ids=["two", "one"])
def test_shares_that_are_too_large_are_lowered_to_the_largest_that_fit(
    shares: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"type": "llama", "dim": 6144, "layers": 56, "heads": 48, "kv_heads": 8, "ffn_dim": 20480}
    model |= {"vocab_size": 128256, "tie_embeddings": False, "seq_len": 1024}
    offload = {"optimizer": "nvme", "path": "states", **shares}
    config = parse_sections(
        model=model,
        optim={"type": "AdamW8bit", "lr": 1e-4},
        precision="bf16",
        batch={"micro": 1},
        strategy={"recompute": "full", "offload": offload},
    ).config
    machine, known = find_hardware("h200"), dict[Any, Any]()
    assert not make_plan(config, machine, ranks=1, known=known).fits
    with monkeypatch.context() as patched:  # the plan that did not fit knows all that is needed
        patched.setattr(rankplan, "simulate", refusing_to_simulate)
        remedy_search = RemedySearch(config, machine, 1, without_end(), known)
        remedies = list(remedy_search.remedies())
        least = remedy_search.without_needless(remedies)
        (remedy,) = remedies
        assert least.candidate == remedy.candidate
        found = remedy.candidate.settings
        assert found.keys() == {f"strategy.offload.{key}" for key in shares}
        assert sum(found.values()) == pytest.approx(sum(shares.values())) or len(found) == 1
        more = Candidate({**found, SHARE: found[SHARE] + 1 / STEPS})
        assert not make_plan(more.applied_to(config), machine, ranks=1, known=known, detailed=False).fits
    named = make_plan(remedy.candidate.applied_to(config), machine, ranks=1)
    assert named.fits
    assert remedy.plan is not None
    assert named.needed_gib == remedy.plan.needed_gib


def test_what_leaves_the_device_goes_to_the_host_as_far_as_that_has_room() -> None:
    ratio, host = random.uniform(0.3, 0.6), random.uniform(0.1, 0.3)
    config = small(strategy={"offload": {"optimizer": "nvme", "ratio": ratio, "host_ratio": host}})
    device_room, host_room = random.uniform(0.1, ratio), random.uniform(0.0, 1.0)

    def plan_with(shares: dict[str, Any]) -> Any:
        device, on_host = shares[SHARE], shares[HOST_SHARE]
        machine = SimpleNamespace(host_memory_gib=host_room)
        return SimpleNamespace(
            hardware=machine, host_gib=on_host, fits=device <= device_room and on_host <= host_room + 1e-9
        )

    found = lowered_shares(config, plan_with)
    assert device_room - 1 / STEPS < found[SHARE] <= device_room
    most = min(host_room, host + ratio - found[SHARE])
    assert most - 1 / STEPS < found[HOST_SHARE] <= most + 1e-4


@pytest.mark.parametrize(
    "strategy",
    [
        "single",
        {"zero": 1},
        {"zero": 2, "layout": {"tp": 2}},
        {"zero": 3, "recompute": "full"},
        {"layout": {"pp": 2}, "pipeline": {"micro_batches": 2}},
        {"offload": {"optimizer": "cpu", "ratio": 0.5}},
        {"zero": 3, "offload": {"optimizer": "cpu", "params": "cpu"}},
    ],
    ids=["single", "zero1", "zero2-tp2", "zero3", "pipeline", "share", "weights-away"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_run_takes_less_than_its_weights_and_optimizer(strategy: Any, precision: str) -> None:
    from plait.models import build_model

    optim = random.choice(["AdamW", "AdamW8bit", "Lion", "SGD"])
    config = small(strategy=strategy, precision=precision, optim={"type": optim, "lr": 1e-3}, batch={"micro": 1})
    config = config.model_copy(update={"model": config.model.model_copy(update={"kv_heads": 2, "layers": 4})})  # type: ignore[union-attr]
    ranks = 1 if strategy == "single" else 4
    layout = resolve_layout(config.strategy, size=ranks, local_size=ranks)
    assert config.model is not None
    least = least_gib(config, count_params(build_model(config.model))[0], layout)
    peak = make_plan(config, H100, ranks=ranks, detailed=False).fullest.ledger.peak[1] / 2**30
    assert 0 <= least <= peak


def test_a_remedy_whose_states_alone_are_too_large_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(batch={"total": 8, "micro": 2}, strategy={"zero": 2})
    monkeypatch.setattr(rankplan, "simulate", refusing_to_simulate)
    remedies = list(islice(RemedySearch(config, replace(H100, memory_gib=1e-5), 4, without_end()).remedies(), 3))
    assert all(remedy.plan is None and not remedy.timed_out and remedy.least > 1e-5 for remedy in remedies)
