"""Parts of one's own that decide how a step is made, by name, in real runs: the maths stay those of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.config import parse_sections
from plait.config.run import RunConfig
from plait.config.strategy import CustomTensorPlan, PipelineConfig
from plait.distributed.pipeline_schedule import check_pipeline
from plait.distributed.tensor_parallel import load_tensor_plan
from plait.engine.engines import planned_as
from plait.errors import ConfigError
from tests.multi import own_techniques
from tests.multi.own_engine import DdpEngine
from tests.multi.parity import MODEL, Trace, assert_same, run_steps, token_batches
from tests.multi.ranks import RankPool
from tests.multi.toys import Classifier, Outcome, assert_close, fit, fit_with

ENGINE = {"engine": {"type": "tests.multi.own_engine:DdpEngine", "bucket_mb": 1}}


def assert_same_run(found: Outcome, expected: Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.rates == expected.rates
    assert_close(found, expected, tolerance=1e-5)


def test_an_engine_by_name_equals_one_process_saved_on_two_ranks_and_resumed_natively(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    train = {"by_epoch": True, "max_epochs": 2, "clip_norm": 0.5}
    sections: dict[str, Any] = {"train": train, "batch": {"total": 4, "micro": 1}}
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


OWN = "tests.multi.own_techniques"


@pytest.mark.parametrize(
    "strategy",
    [
        {"recompute": f"{OWN}:every_other"},
        {"recompute": {"mode": {"type": f"{OWN}:every_other", "first": 1}}, "zero": 3},
        {"recompute": f"{OWN}:keeps_products", "zero": 2},
        {"recompute": f"{OWN}:saves_products", "zero": 3},
        {"pipeline": {"schedule": f"{OWN}:one_by_one"}, "layout": {"pp": 2}},
        {"pipeline": {"schedule": f"{OWN}:two_in_a_loop"}, "layout": {"pp": 2}},
        {"tensor": {"plan": f"{OWN}:llama_plan"}, "layout": {"tp": 2}},
    ],
    ids=str,
)
def test_techniques_by_name_equal_one_process(two_ranks: RankPool, strategy: dict[str, Any]) -> None:
    steps = token_batches(7, 4)
    # Ranks of a pipeline or a tensor-parallel group see the same micro-batches.
    model = {"model": {**MODEL, "layers": 4}}
    alone = run_steps(0, 1, {"strategy": {}, **model}, steps)
    together = "layout" in strategy
    given = [[batch for batch in step for _ in range(2)] for step in steps] if together else steps
    for found in two_ranks.run(run_own_steps, {"strategy": strategy, **model}, given):
        assert found[1] > 0 or "recompute" not in strategy
        held = found[0].tensors if "pipeline" in strategy else alone.tensors  # those of its own stages
        assert_same(found[0], replace(alone, tensors={name: alone.tensors[name] for name in held}), tolerance=1e-5)


def run_own_steps(rank: int, size: int, sections: dict[str, Any], steps: list[list[Any]]) -> tuple[Trace, int]:
    """The trace, and how often a policy of torch's was asked, or 1 where it is another."""
    own_techniques.ASKED.clear()
    trace = run_steps(rank, size, sections, steps)
    return trace, len(own_techniques.ASKED) if "saves_products" in str(sections) else 1


def test_a_recipe_changes_how_layers_compute_the_same_way_on_two_ranks(two_ranks: RankPool) -> None:
    steps = token_batches(8, 2)
    recipe = {"precision": {"recipe": {"type": f"{OWN}:rounded", "steps": 16}}}
    plain, alone = (run_steps(0, 1, {"strategy": {}, **each}, steps) for each in ({}, recipe))
    assert alone.losses != plain.losses
    assert alone.losses == pytest.approx(plain.losses, rel=0.02)
    for found in two_ranks.run(run_steps, {"strategy": "zero3", **recipe}, steps):
        assert_same(found, alone, tolerance=1e-5)


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"strategy": {"recompute": f"{OWN}:answers_a_number"}}, "strategy.recompute.mode"),
        (
            {"strategy": {"recompute": {"mode": {"type": f"{OWN}:every_other", "frist": 1}}}},
            "strategy.recompute.mode.frist",
        ),
        ({"precision": {"recipe": f"{OWN}:renames"}}, "precision.recipe"),
        ({"precision": {"recipe": f"{OWN}:rounded"}}, "precision.recipe"),
    ],
    ids=str,
)
def test_a_technique_that_does_not_fit_is_refused_by_name(sections: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_steps(0, 1, {"strategy": {}, **sections}, token_batches(1, 1))
    assert [problem.path for problem in caught.value.problems] == [path]


@pytest.mark.parametrize("name", ["waits_for_ever", "forgets_one", "no_plan"])
def test_a_schedule_is_looked_through_before_the_first_step(name: str) -> None:
    options = PipelineConfig(schedule=f"{OWN}:{name}")  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        check_pipeline(options, 2, 4)
    assert caught.value.problems[0].path == "strategy.pipeline.schedule"


def test_a_tensor_plan_that_returns_none_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load_tensor_plan(CustomTensorPlan(type=f"{OWN}:no_plan"), Classifier())
    assert caught.value.problems[0].path == "strategy.tensor.plan"
