"""One DeepSpeed script, two libraries: real DeepSpeed and Plait's front end say the same, step by step."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import plait.frontends.deepspeed as deepspeed
from tests.multi.deepspeed_loop import train, train_really
from tests.multi.deepspeed_ranks import run_deepspeed
from tests.multi.ranks import RankPool

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed (pip install deepspeed)"
)


def config(stage: int, dtype: str = "fp32", *, own: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if not own:
        found["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}}
        found["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_min_lr": 1e-3}}
    if dtype != "fp32":
        found[dtype] = {"enabled": True}
    if dtype == "fp16":
        found["fp16"] |= {"initial_scale_power": 12, "loss_scale_window": 3, "hysteresis": 2}
    return found


EXACT: dict[str, dict[str, Any]] = {
    **{f"{stage}-fp32": {"config": config(stage)} for stage in range(4)},
    **{f"{stage}-batchnorm": {"config": config(stage), "norm": "batch"} for stage in (0, 2)},
    **{f"{stage}-own-objects": {"config": config(stage, own=True), "own": "objects"} for stage in (0, 3)},
    **{f"{stage}-own-functions": {"config": config(stage, own=True), "own": "functions"} for stage in (1, 3)},
    **{f"{stage}-own-groups": {"config": config(stage), "own": "groups"} for stage in (0, 2)},
}
BF16: dict[str, dict[str, Any]] = {f"{stage}-bf16": {"config": config(stage, "bf16")} for stage in range(4)}
# Real DeepSpeed 0.19.8 does not scale the loss at stage 0 with torch's Adam, so there is nothing to compare with.
FP16: dict[str, dict[str, Any]] = {
    f"{stage}-fp16": {"config": config(stage, "fp16"), "explode": {"1": 1e4, "2": 1e4, "3": 1e4}, "steps": 9}
    for stage in (1, 2, 3)
}
JOBS = [{"name": name, "steps": 5, **job} for name, job in (EXACT | BF16 | FP16).items()]
SAVED = (0, 2, 3)
"""Stages at which real DeepSpeed also saves."""

Said = dict[str, dict[str, Any]]


def all_jobs(rank: int, size: int, jobs: list[dict[str, Any]]) -> Said:
    said = {job["name"]: train(deepspeed, job, rank, size) for job in jobs}
    return {job["name"]: {**said[job["name"]], "client": job.get("client")} for job in jobs}


@pytest.fixture(scope="module")
def said(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Said, Said]:
    """What Plait said of each job, and what DeepSpeed said."""
    folder = tmp_path_factory.mktemp("real")
    saving = [{"name": f"{n}-saved", "steps": 3, "config": config(n), "save": str(folder / f"{n}")} for n in SAVED]
    real = run_deepspeed(train_really, 2, [*JOBS, *saving])
    loading = [{"name": f"{n}-loaded", "steps": 5, "config": config(n), "load": str(folder / f"{n}")} for n in SAVED]
    return two_ranks.run(all_jobs, [*JOBS, *loading])[0], real


def norms(found: dict[str, Any], real: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Those that DeepSpeed tells: at stage 0 in fp32 it knows none."""
    pairs = [(mine, its) for mine, its in zip(found["norms"], real["norms"], strict=True) if its is not None]
    return [mine for mine, _ in pairs], [its for _, its in pairs]


@pytest.mark.parametrize("name", EXACT)
def test_losses_norms_and_rates_are_those_of_deepspeed(said: tuple[Said, Said], name: str) -> None:
    mine, real = said[0][name], said[1][name]
    assert mine["losses"] == pytest.approx(real["losses"], rel=1e-6)
    ours, its = norms(mine, real)
    assert ours == pytest.approx(its, rel=1e-5)
    assert mine["rates"] == real["rates"]
    assert mine["counters"] == real["counters"]


@pytest.mark.parametrize("name", BF16)
def test_in_bf16_they_agree_to_its_rounding(said: tuple[Said, Said], name: str) -> None:
    mine, real = said[0][name], said[1][name]
    assert mine["losses"] == pytest.approx(real["losses"], rel=4e-3)
    ours, its = norms(mine, real)
    assert ours == pytest.approx(its, rel=4e-2)
    assert mine["rates"] == real["rates"]


@pytest.mark.parametrize("name", FP16)
def test_in_fp16_the_loss_scale_has_the_same_history(said: tuple[Said, Said], name: str) -> None:
    mine, real = said[0][name], said[1][name]
    assert mine["scales"] == real["scales"]
    assert len(set(mine["scales"])) > 2  # it fell, and rose
    assert mine["counters"] == real["counters"]
    assert mine["rates"] == real["rates"]
    # In the very step in which its scale doubles, DeepSpeed divides gradients by the new one: half an update.
    grown = next(i for i in range(1, len(real["scales"])) if real["scales"][i] > real["scales"][i - 1])
    assert mine["losses"][: grown + 1] == pytest.approx(real["losses"][: grown + 1], rel=2e-3)


@pytest.mark.parametrize("stage", SAVED)
def test_a_checkpoint_of_deepspeed_itself_goes_on_as_it_does(said: tuple[Said, Said], stage: int) -> None:
    mine, real = said[0][f"{stage}-loaded"], said[1][f"{stage}-saved"]
    assert mine["losses"] == pytest.approx(real["after"], rel=1e-5)
    assert mine["counters"][-1] == [5, 10, 80, 0]
    assert mine["client"]["epoch"] == 2
    assert mine["client"]["seen"].tolist() == [0, 1, 2]
