"""Candidates side by side: the columns that `plait plan --search` and `plait tune` show."""

from __future__ import annotations

from typing import Any

from plait.cli.columns import as_columns
from plait.config import RunConfig, parse
from plait.plan.search import Candidate

RUN: dict[str, Any] = {
    "model": {"type": "gpt", "vocab_size": 64, "dim": 32, "layers": 2, "heads": 2, "seq_len": 16},
    "batch": {"total": 8},
    "strategy": "zero2",
    "hooks": [{"type": "import", "target": "mine:Hook", "args": {"kind": "a"}}],
}


def columns(*settings: dict[str, Any], ranks: int = 2) -> dict[str, list[str]]:
    return as_columns(parse(RUN).config, [Candidate(each) for each in settings], ranks)


def test_a_column_for_each_key_in_which_candidates_differ() -> None:
    found = columns({"strategy.zero": 1, "strategy.layout.tp": 1}, {"strategy.zero": 3, "strategy.layout.tp": 1})
    assert found == {"zero": ["1", "3"]}


def test_what_a_candidate_leaves_as_it_is_written_is_shown_too() -> None:
    found = columns({}, {"strategy.zero": 3, "strategy.recompute.mode": "full", "batch.micro": 1})
    assert found == {"zero": ["2", "3"], "recompute": ["none", "full"], "micro": ["4", "1"]}


def test_the_share_of_an_offload_is_shown_where_there_is_one() -> None:
    away = {"strategy.offload.optimizer": "cpu", "strategy.offload.ratio": 0.25}
    assert columns({}, away) == {"offload": ["none", "cpu"], "ratio": ["", "0.25"]}


def test_keys_inside_lists_have_columns() -> None:
    assert columns({}, {"hooks.0.args.kind": "b"}) == {"hooks.0.args.kind": ["a", "b"]}


def test_settings_that_make_no_run_are_shown_as_they_are() -> None:
    assert columns({}, {"strategy.zero": 7}) == {"zero": ["2", "7"]}


def test_only_what_the_run_does_not_say_has_to_be_written() -> None:
    run: RunConfig = parse(RUN).config
    candidate = Candidate({"strategy.zero": 2, "batch.total": 8, "batch.accumulation": None, "batch.micro": 1})
    assert candidate.changes(run) == ["batch.micro=1"]
    again = parse(RUN, candidate.changes(run)).config
    assert again.batch == parse(RUN, candidate.overrides).config.batch
    assert Candidate({"hooks.0.args.kind": "a"}).changes(run) == ["hooks.0.args.kind=a"]  # not looked at
