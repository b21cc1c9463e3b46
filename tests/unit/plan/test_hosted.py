"""What a step does away from the device: how long it takes, what it overlaps with, and which share pays."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.config import parse_sections
from plait.config.run import RunConfig
from plait.config.strategy import Layout, resolve_layout
from plait.plan.hardware import Hardware, find_hardware, with_cores
from plait.plan.ledger import Away, HostWork, Ledger, host_work, mode_of, read_work, with_update
from plait.plan.plan import make_plan
from plait.plan.rankplan import plan_rank
from plait.plan.search import Space, candidates, search
from plait.plan.shares import best_share, with_ratio
from plait.plan.timing import crosses

H100 = find_hardware("h100")
H200_ALONE = replace(with_cores(find_hardware("h200"), 16), per_host=1, host_memory_gib=125.0)
"""The machine on which BENCHMARKS.md was measured."""
SMALL = {"type": "llama", "vocab_size": 512, "dim": 64, "layers": 2, "heads": 4, "seq_len": 32}
LLAMA_3B = {
    "type": "llama",
    "vocab_size": 128256,
    "dim": 3072,
    "layers": 28,
    "heads": 24,
    "kv_heads": 8,
    "ffn_dim": 8192,
    "seq_len": 2048,
    "tie_embeddings": True,
}


def run_of(strategy: Any = None, **sections: Any) -> RunConfig:
    given = {"precision": "bf16", "optim": {"type": "AdamW"}, "strategy": strategy or {}, **sections}
    return parse_sections(**given).config


def alone(config: RunConfig) -> Layout:
    return resolve_layout(config.strategy, size=1, local_size=1)


@pytest.mark.parametrize("optim", ["AdamW", "AdamW8bit"])
def test_a_checkpoint_is_as_large_wherever_its_state_lives(optim: str) -> None:
    def state(offload: Any) -> float:
        config = run_of({"offload": offload}, model=SMALL, batch={"micro": 1}, optim={"type": optim})
        return plan_rank(config, H100, ranks=1).ledger.numbers["state"]

    here = state({})
    for offload in ("cpu", "nvme", {"optimizer": "cpu", "ratio": 0.5}):
        assert state(offload) == pytest.approx(here, rel=1e-3)


def test_gradients_that_wait_for_the_last_micro_batch_are_called_so() -> None:
    config = run_of({"offload": "cpu"}, model=SMALL, batch={"micro": 1, "accumulation": 2})
    account = plan_rank(config, H100, ranks=1, detailed=True, exact=True).ledger
    assert account.under("at.backward")["gradients"] >= account.numbers["parameters"] * 4


def test_on_a_cpu_states_that_are_offloaded_are_the_optimizers() -> None:
    config = run_of({"offload": "cpu"}, model=SMALL, batch={"micro": 1}, precision="fp32")
    account = plan_rank(config, find_hardware("cpu"), ranks=1, detailed=True, exact=True).ledger
    assert account.under("part")["optimizer"] == pytest.approx(account.numbers["parameters"] * 8, rel=0.01)
    assert account.under("part").get("kernel workspaces", 0) < 0.001 * account.under("part")["optimizer"]


def test_an_update_takes_as_long_as_the_memory_it_passes_over() -> None:
    config, numbers = run_of({"offload": "cpu"}), random.randint(10**8, 10**9)
    work = host_work(Away(numbers, 0, numbers), config, H100, alone(config), state=8.0, wide=False)
    # Read: a bf16 gradient, weight and moments; written: weight and moments, and the weight in bf16.
    assert work.host == pytest.approx(numbers * (2 + 12 + 12 + 2) / (H100.host_gbps * 1e9))
    assert work.back == pytest.approx(numbers * 2 / (H100.pcie_gbps * 1e9))
    files = host_work(Away(0, numbers, numbers), config, H100, alone(config), state=8.0, wide=False)
    assert files.files == pytest.approx(numbers * 24 / (H100.disk_gbps * 1e9))
    assert files.seconds > work.seconds


def test_ranks_of_a_host_share_its_cores_its_memory_and_its_disk() -> None:
    config = run_of({"zero": 1, "offload": {"optimizer": "nvme", "update": "cpu"}})
    away, spread = Away(1e8, 1e8, 0), resolve_layout(config.strategy, size=8, local_size=8)
    one, eight = (host_work(away, config, H100, each, state=8.0, wide=False) for each in (alone(config), spread))
    assert (eight.host, eight.files) == pytest.approx((8 * one.host, 8 * one.files))


def test_what_a_device_updates_travels_over_its_own_link_as_fast_as_the_hosts_memory_lets_all_of_them() -> None:
    config = run_of({"zero": 1, "offload": {"optimizer": "cpu", "update": "device"}})
    away, numbers = Away(1e8, 0, 1e8), 1e8
    spread = resolve_layout(config.strategy, size=8, local_size=8)
    for memory in (10_000.0, 100.0):
        hardware = replace(H100, host_gbps=memory)
        one, eight = (
            host_work(away, config, hardware, each, state=8.0, wide=False) for each in (alone(config), spread)
        )
        link = numbers * 14 / (hardware.pcie_gbps * 1e9)
        assert one.seconds == pytest.approx(link)
        assert eight.seconds == pytest.approx(link if memory > 1000 else numbers * 26 * 8 / (1.5e9 * memory))


def test_a_plan_settles_who_updates_by_the_machine_that_is_planned_for() -> None:
    config = run_of({"offload": "cpu"})
    for hardware, who in ((replace(H100, host_cores=16), "device"), (replace(H100, host_cores=112), "cpu")):
        assert with_update(config, hardware, alone(config)).strategy.offload.update == who
    assert with_update(run_of({}), H100, alone(config)).strategy.offload.update == "auto"


def test_what_shows_of_an_update_is_what_nothing_ran_beside() -> None:
    work = HostWork(host=3.0, back=1.0)
    assert work.shows("beside", forward=1.0, step=2.0) == 2.0
    assert work.shows("beside", forward=4.0, step=9.0) == 0.0
    assert work.shows("waited", forward=1.0, step=2.0) == 3.0
    assert work.shows("late", forward=1.0, step=2.0) == 2.0  # one beyond the step, one to bring the weights in
    assert read_work(work.to_dict("late")) == (work, "late")


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        ({"offload": "cpu"}, "beside"),
        ({"offload": {"optimizer": "cpu", "delayed": True}}, "late"),
        ({"offload": "cpu", "compile": True}, "waited"),
    ],
)
def test_an_update_overlaps_with_what_the_code_lets_it_overlap_with(strategy: Any, mode: str) -> None:
    config = run_of(strategy)
    assert mode_of(config, alone(config), "cuda") == mode
    assert mode_of(config, alone(config), "cpu") == "waited"


def test_gradients_hold_a_step_up_where_they_leave_slower_than_the_backward_pass_makes_them() -> None:
    numbers = {"compute.forward.matmul": 2.0, "compute.backward.matmul": 4.0, "micro_batches": 2.0}
    assert Ledger({**numbers, "link.out.once": 1.5}).seconds() == 6.0
    assert Ledger({**numbers, "link.out.once": 3.0}).seconds() == 7.0
    assert Ledger({**numbers, "link.in.each": 8.0}).seconds() == 8.0
    assert Ledger({**numbers, "update.beside.host": 3.0}).seconds() == 8.0  # beside the first forward pass alone


def test_a_copy_is_known_by_the_devices_at_its_ends() -> None:
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    aten = torch.ops.aten
    assert crosses(aten.copy_.default, (there, here), there) == "in"
    assert crosses(aten.copy_.default, (here, there), here) == "out"
    assert crosses(aten.copy_.default, (here, here), here) is None
    assert crosses(aten.add.Tensor, (there, here), there) is None


def test_the_best_share_is_the_smallest_that_is_as_fast_as_the_fastest_that_fits() -> None:
    def seconds(share: float) -> float:
        return 1.0 + max(0.2, 1.0 - share)

    assert best_share(seconds, lambda share: 10 * share, 100.0) == pytest.approx(0.8)
    assert best_share(seconds, lambda share: 10 * share, 5.0) == pytest.approx(0.45)  # some memory is left free
    assert best_share(seconds, lambda share: 10 + share, 5.0) == 0.0


def test_a_search_tries_tiers_and_leaves_what_is_written_in_more_words() -> None:
    space = Space(1, ("offload",))
    written = run_of({"offload": {"optimizer": "cpu", "bucket_mb": 64.0}}, model=SMALL)
    assert len(candidates(written, space)) == 2  # as it is, and with its batch spelled out
    homes = {each.settings.get("strategy.offload.optimizer") for each in candidates(run_of(model=SMALL), space)}
    assert homes == {None, "cpu", "nvme"}
    adafactor = run_of(model=SMALL, optim={"type": "Adafactor"})
    assert not any("strategy.offload.optimizer" in each.settings for each in candidates(adafactor, space))


def test_where_the_device_is_too_small_the_search_leads_to_host_memory_and_a_share() -> None:
    config = run_of(model={**SMALL, "vocab_size": 4096, "dim": 256}, batch={"micro": 1})
    spare = replace(H100, context_gib=0.0)
    resident, away = (
        make_plan(each, spare, ranks=1, detailed=False).needed_gib
        for each in (config, run_of({"offload": "cpu"}, model=config.model.model_dump(), batch={"micro": 1}))  # type: ignore[union-attr]
    )
    tight: Hardware = replace(spare, memory_gib=(2 * resident + away) / 3)
    found = search(config, tight, ranks=1, close=1, space=Space(1, ("offload",)))
    assert found.best is not None
    assert found.best.config is not None
    offload = found.best.config.strategy.offload
    assert offload.optimizer == "cpu"
    assert 0 < offload.share < 1
    chosen = with_ratio(run_of({"offload": {"optimizer": "cpu", "ratio": "auto"}}, model=SMALL), H100, ranks=1)
    assert isinstance(chosen.strategy.offload.ratio, float)


def test_shares_planned_from_a_few_layers_take_what_all_layers_take() -> None:
    offload = {"optimizer": "nvme", "ratio": 0.3, "host_ratio": 0.4, "bucket_mb": 0.1}
    config = run_of({"offload": offload}, model={**SMALL, "layers": 8}, batch={"micro": 2})
    quick, whole = (plan_rank(config, H100, ranks=1, exact=exact).ledger for exact in (False, True))
    assert quick.seconds() == pytest.approx(whole.seconds(), rel=0.05)
    assert quick.peak[1] == pytest.approx(whole.peak[1], rel=0.05)
    on_host = [each.numbers["host_state"] + each.numbers["host_rooms"] for each in (quick, whole)]
    assert on_host[0] == pytest.approx(on_host[1], rel=0.1)


@pytest.mark.parametrize(
    ("ratio", "update", "measured"), [(0.0, "cpu", 1.68), (0.5, "cpu", 0.97), (0.0, "device", 1.13)]
)
def test_the_seconds_of_an_offloaded_3b_run_are_those_measured_on_an_h200(
    ratio: float, update: str, measured: float
) -> None:
    offload = {"optimizer": "cpu", "ratio": ratio, "update": update}
    config = run_of({"offload": offload}, model=LLAMA_3B, batch={"micro": 4})
    plan = make_plan(config, H200_ALONE, ranks=1, detailed=False)
    assert plan.seconds == pytest.approx(measured, rel=0.15)
