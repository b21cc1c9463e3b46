"""Parts of one's own that decide how a step is made, by name, in real runs: the maths stay those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.config import parse_sections
from plait.config.run import RunConfig
from plait.errors import ConfigError
from plait.strategy.engines import planned_as
from tests.multi.own_engine import DdpEngine
from tests.multi.ranks import RankPool
from tests.multi.toys import Outcome, assert_close, fit, fit_with

ENGINE = {"engine": {"type": "tests.multi.own_engine:DdpEngine", "bucket_mb": 1}}


def assert_same_run(found: Outcome, expected: Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.rates == expected.rates
    assert_close(found, expected, tolerance=1e-5)


def test_an_engine_by_name_equals_one_process_saved_on_two_ranks_and_resumed_natively(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {"train": {"by_epoch": True, "max_epochs": 2, "clip_norm": 0.5}}
    options = {"validation": 6}
    whole = fit(0, 1, {**sections, "work_dir": tmp_path / "whole"}, **options)
    own = {**sections, "strategy": ENGINE, "work_dir": tmp_path / "own"}
    for found in two_ranks.run(fit_with, own, options):
        assert_same_run(found, whole)
        assert found.metrics[-1]["loss"] == pytest.approx(whole.metrics[-1]["loss"], rel=1e-5)
    parts = {**own, "work_dir": tmp_path / "parts"}
    first = two_ranks.run(fit_with, parts, {**options, "stop_at": 5})[0]
    native = {**parts, "strategy": "zero2", "checkpoint": {"resume": "auto"}}
    for second in two_ranks.run(fit_with, native, options):
        assert second.losses == pytest.approx(whole.losses[first.steps :], rel=1e-5)
        assert_close(second, whole, tolerance=1e-5)


def test_an_engine_given_as_a_class_is_told_and_planned_as_the_native_one(tmp_path: Path) -> None:
    found = fit(0, 1, {"strategy": {"engine": DdpEngine}, "work_dir": tmp_path})
    assert found.steps == 12


def test_an_engine_that_says_so_has_no_plan() -> None:
    own = parse_sections(strategy={"engine": "tests.multi.own_engine:OwnWay"}).config
    assert "tests.multi.own_engine:OwnWay" in str(planned_as(own))
    like = planned_as(parse_sections(strategy=ENGINE).config)
    assert isinstance(like, RunConfig)
    assert (like.strategy.engine, like.strategy.stage) == ("native", 0)


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"strategy": {**ENGINE, "zero": 1}}, "strategy.zero"),
        ({"strategy": {**ENGINE, "compile": True}}, "strategy.compile.enabled"),
        ({"strategy": {**ENGINE, "layout": {"dp_replicate": 1, "dp_shard": 1}}}, "strategy.layout.dp_replicate"),
        ({"strategy": ENGINE, "precision": "bf16"}, "precision.compute"),
        ({"strategy": ENGINE, "train": {"max_epochs": 1, "clip_value": 1.0}}, "train.clip_value"),
        ({"strategy": ENGINE, "deterministic": True}, "deterministic"),
        ({"strategy": {"engine": {**ENGINE["engine"], "buckets": 1}}}, "strategy.engine.buckets"),
        ({"strategy": {"engine": "tests.multi.own_engine:NotAnEngine"}}, "strategy.engine.type"),
        ({"strategy": {"engine": "tests.multi.own_engine:makes_nothing"}}, "strategy.engine.type"),
        ({"strategy": {"engine": "tests.multi.own_engine:NoSuch"}}, "strategy.engine.type"),
    ],
    ids=str,
)
def test_what_an_engine_does_not_act_on_or_is_not_is_refused_by_name(
    sections: dict[str, Any], path: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        fit(0, 1, {**sections, "work_dir": tmp_path})
    assert path in [problem.path for problem in caught.value.problems]
