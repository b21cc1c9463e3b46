"""What is tried, in which order."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.refusals import refused

from plait.config import parse, resolve_batch, resolve_layout
from plait.errors import ConfigError
from plait.plan.space import Candidate, candidates
from plait.tune import TuneConfig, make_tune_config, rank_by_rule
from plait.tune.config import in_order, space_of
from plait.tune.search import effective

RUN: dict[str, Any] = {
    "model": {"type": "llama", "vocab_size": 64, "dim": 32, "layers": 4, "heads": 8, "kv_heads": 4, "seq_len": 16},
    "batch": {"total": 48, "micro": 2},
    "train": {"max_steps": 10},
}


def spaces(nproc: int, run: dict[str, Any] = RUN, **changes: Any) -> list[Candidate]:
    config = parse(run).config
    return candidates(config, space_of(config, TuneConfig(nproc=nproc, **changes)))


def test_every_setting_keeps_the_global_batch() -> None:
    found = spaces(4)
    assert len(found) > 100
    for candidate in found:
        config = parse(RUN, candidate.overrides).config
        layout = resolve_layout(config.strategy, size=4, local_size=4)
        batch = resolve_batch(config.batch, layout.data_parallel)
        assert batch.total == batch.micro * batch.accumulation * layout.data_parallel == 48


def test_the_run_as_it_is_written_comes_first() -> None:
    assert spaces(2)[0].settings == {}


def test_all_stages_layouts_and_ways_to_recompute_are_tried() -> None:
    found = [each.settings for each in spaces(8) if each.settings]
    assert {each["strategy.zero"] for each in found} == {0, 1, 2, 3}
    assert {each["strategy.recompute.mode"] for each in found} == {"none", "selective", "full"}
    cuts = {(each["strategy.layout.tp"], each["strategy.layout.pp"]) for each in found}
    assert cuts == {(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= 8}  # 4 heads of keys, 4 layers


def test_one_process_has_nothing_to_spread() -> None:
    keys = {key for each in spaces(1) for key in each.settings}
    assert not keys & {"strategy.zero", "strategy.layout.tp"}


def test_a_model_that_is_not_known_is_not_cut() -> None:
    run = {**RUN, "model": {"type": "resnet"}}
    assert not any("strategy.layout.tp" in each.settings for each in spaces(4, run))


def homes(run: dict[str, Any], *dimensions: Any) -> set[tuple[str, str]]:
    """Where the optimizer and the weights of each candidate live, by its settings and the run's own."""
    found = [parse(run, each.overrides).config.strategy for each in spaces(2, run, dimensions=dimensions)]
    assert all(strategy.stage == 3 for strategy in found if strategy.offload.params != "none")
    return {(strategy.offload.optimizer, strategy.offload.params) for strategy in found}


ON_THE_DEVICE, IN_MEMORY, IN_FILES, WEIGHTS_TOO = ("none", "none"), ("cpu", "none"), ("nvme", "none"), ("cpu", "cpu")


def test_every_tier_of_offload_is_tried_whatever_the_run_is_written_with() -> None:
    every = {ON_THE_DEVICE, IN_MEMORY, IN_FILES, WEIGHTS_TOO}
    assert homes(RUN, "zero", "offload") == every
    for written in ("cpu", {"optimizer": "nvme", "path": "files"}, {"optimizer": "cpu", "params": "cpu"}):
        assert homes({**RUN, "strategy": {"zero": 3, "offload": written}}, "offload") == every


def test_an_offload_that_says_more_than_where_things_live_stays_as_it_is_written() -> None:
    run = {**RUN, "strategy": {"offload": {"optimizer": "cpu", "ratio": 0.25}}}
    assert homes(run, "offload") == {IN_MEMORY}
    assert homes({**RUN, "optim": {"type": "Muon"}}, "offload") == {ON_THE_DEVICE}  # which looks at whole parameters


def test_where_the_device_is_the_host_tiers_are_tried_only_when_asked_for() -> None:
    run = {**RUN, "device": "cpu"}
    assert not any(key.startswith("strategy.offload") for each in spaces(2, run) for key in each.settings)
    assert IN_MEMORY in homes(run, "offload")


def test_a_key_of_the_users_own_is_not_varied_by_a_dimension() -> None:
    space = {"strategy.zero": (3,), "strategy.layout.tp": (2,), "batch.micro": (1, 3), "optim.lr": (0.1, 0.2)}
    found = [each.settings for each in spaces(4, space=space, dimensions=("zero", "layout", "micro")) if each.settings]
    assert len(found) == 4
    assert {each["strategy.zero"] for each in found} == {3}
    assert {(each["batch.micro"], each["optim.lr"]) for each in found} == {(1, 0.1), (1, 0.2), (3, 0.1), (3, 0.2)}
    assert {each["batch.total"] for each in found} == {48}


def test_micro_batches_keep_to_their_bounds() -> None:
    found = spaces(1, dimensions=("micro",), micro_min=3, micro_max=20, micro_count=3)
    assert [each.settings["batch.micro"] for each in found if each.settings] == [16, 8, 3]


def test_a_layout_that_was_fixed_gives_way() -> None:
    run = {**RUN, "strategy": {"sharding": "FULL_SHARD", "layout": {"dp_shard": 4}}}
    source = [each for each in spaces(4, run, dimensions=("zero", "layout")) if each.settings]
    for candidate in source:
        parse(run, candidate.overrides)
    assert any(each.settings["strategy.layout.tp"] == 4 for each in source)


def test_settings_that_come_to_the_same_run_are_equal(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**RUN, "model": None}))
    same = ["strategy=zero3"], ["strategy=fsdp"], ["strategy.zero=3", "strategy.layout.dp_shard=4"]
    assert len({effective(str(path), overrides, 4) for overrides in same}) == 1
    assert effective(str(path), ["strategy=zero2"], 4) != effective(str(path), ["strategy=zero3"], 4)
    cut = "strategy.layout.tp=4"  # one copy of the model: a stage has nothing to share out
    assert effective(str(path), ["strategy.zero=0", cut], 4) == effective(str(path), ["strategy.zero=3", cut], 4)


@pytest.mark.parametrize(
    "value", [None, True, 3, 2.5e-7, "full", "3", "null", "a: b", "[x", "", " x", [1, "2"], {"a": 1}]
)
def test_a_value_survives_the_command_line(value: Any) -> None:
    config = parse({"model": {"type": "import", "target": "a:b"}}, Candidate({"model.args.x": value}).overrides).config
    assert config.model is not None
    assert config.model.args["x"] == value  # type: ignore[union-attr]


def test_the_order_is_the_tuners() -> None:
    run = parse(RUN).config
    found = spaces(2)
    wanted = random.sample(found[1:], 5)
    grid = in_order(run, found, TuneConfig(tuner="grid"), rank_by_rule)
    assert grid == found
    shuffled = [in_order(run, found, TuneConfig(tuner="random", seed=seed), rank_by_rule) for seed in (1, 1, 2)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(each.key for each in shuffled[0]) == sorted(each.key for each in found)
    ranked = in_order(run, found, TuneConfig(tuner="model"), lambda run, each: wanted)
    assert ranked[:6] == [found[0], *wanted]  # as written first, then as ranked, and then the rest
    assert len(ranked) == len(found)


def test_without_a_plan_the_cheap_ones_come_first() -> None:
    found = spaces(4, dimensions=("zero", "layout", "recompute", "offload", "micro"))[1:]
    ordered = [each.settings for each in rank_by_rule(parse(RUN).config, found)]
    first, last = ordered[0], ordered[-1]
    assert (first["strategy.recompute.mode"], first["strategy.layout.tp"], first["batch.micro"]) == ("none", 1, 12)
    assert "strategy.offload.optimizer" not in first
    assert "strategy.offload.optimizer" in last


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"trails": 3}, ["trails", "`trials`"]),
        ({"tuner": "bayes"}, ["tuner", "bayes"]),
        ({"trials": 0}, ["trials:", "0"]),
        ({"steps": 3, "warmup": 3}, ["`warmup`", "3", "`steps`"]),
        ({"space": {"seed": []}}, ["`space`", "seed"]),
        ({"micro_min": 8, "micro_max": 4}, ["`micro_min`", "8", "`micro_max`", "4"]),
    ],
)
def test_a_wrong_search_is_an_error_that_says_so(settings: dict[str, Any], named: list[str]) -> None:
    with refused(ConfigError, *named):
        make_tune_config(settings)


def test_a_search_can_be_a_file() -> None:
    written = {"tuner": "random", "space": {"strategy.zero": [0, 3]}, "dimensions": ["micro"]}
    assert make_tune_config(json.loads(json.dumps(written))).space == {"strategy.zero": (0, 3)}
