"""Tables, their timelines, their pictures: all known before anything runs."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.communication_volume import pipeline_traffic
from tests.refusals import refused

from plait.distributed.pipeline_schedule import (
    SCHEDULES,
    Action,
    ActionType,
    StageTransfer,
    check_micro_batches,
    draw_schedule,
    forward_table,
    is_legal,
    make_programs,
    make_table,
    merge_backward,
    nearest_legal,
    placement_of,
    resolve_virtual,
    simulate,
    theoretical_bubble,
)
from plait.errors import ConfigError

words = st.sampled_from(sorted(SCHEDULES))
few_ranks = st.integers(1, 6)


@given(words, few_ranks, st.integers(1, 20), st.booleans())
def test_a_table_has_all_the_work_and_can_be_run(word: str, ranks: int, count: int, merged: bool) -> None:
    count = nearest_legal(word, ranks, count)
    placement = placement_of(word, ranks)
    table = make_table(word, ranks, count)
    table = merge_backward(table) if merged else table
    simulate(table, len(placement))
    done = Counter((action.type, action.stage) for work in table for action in work)
    for stage, rank in enumerate(placement):
        assert done[ActionType.FORWARD, stage] == count
        assert done[ActionType.BACKWARD, stage] + done[ActionType.INPUT, stage] == count
        assert done[ActionType.INPUT, stage] == done[ActionType.WEIGHT, stage]
        assert all(action.stage != stage for other, work in enumerate(table) if other != rank for action in work)


@given(words, few_ranks, st.integers(1, 20))
def test_messages_are_taken_in_the_order_in_which_they_are_sent(word: str, ranks: int, count: int) -> None:
    count = nearest_legal(word, ranks, count)
    placement = placement_of(word, ranks)
    programs = make_programs(make_table(word, ranks, count), placement)
    for sender in range(ranks):
        for receiver in range(ranks):
            sent = [t for t in programs[sender] if isinstance(t, StageTransfer) and t.sends and t.peer == receiver]
            taken = [t for t in programs[receiver] if isinstance(t, StageTransfer) and not t.sends and t.peer == sender]
            assert [(t.type, t.stage, t.micro_batch) for t in sent] == [(t.type, t.stage, t.micro_batch) for t in taken]


@given(words, few_ranks, st.integers(1, 20))
def test_ranks_that_stand_still_for_each_message_do_not_hang(word: str, ranks: int, count: int) -> None:
    count = nearest_legal(word, ranks, count)
    programs = make_programs(make_table(word, ranks, count), placement_of(word, ranks))
    at = [0] * ranks
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                entry = program[at[rank]]
                if isinstance(entry, StageTransfer):
                    other = programs[entry.peer][at[entry.peer]] if at[entry.peer] < len(programs[entry.peer]) else None
                    if not isinstance(other, StageTransfer) or other.peer != rank or other.sends == entry.sends:
                        break
                    at[entry.peer] += 1
                at[rank] += 1
                progress = True
    assert at == [len(program) for program in programs]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 9))
def test_forward_passes_alone_need_no_legal_number(ranks: int, virtual: int, count: int) -> None:
    placement = tuple(stage % ranks for stage in range(ranks * virtual))
    table = forward_table(placement, count)
    simulate(table, len(placement))
    assert sorted(a for work in table for a in work) == sorted(
        Action(ActionType.FORWARD, stage, index) for stage in range(len(placement)) for index in range(count)
    )


@given(st.integers(1, 8), st.integers(1, 4))
def test_bubbles_of_the_textbook(ranks: int, rounds: int) -> None:
    count = ranks * rounds
    assert theoretical_bubble("gpipe", ranks, count) == pytest.approx((ranks - 1) / (count + ranks - 1))
    assert theoretical_bubble("1f1b", ranks, count) == pytest.approx((ranks - 1) / (count + ranks - 1))
    for virtual in (2, 3):
        interleaved = theoretical_bubble("interleaved_1f1b", ranks, count, virtual)
        assert interleaved == pytest.approx((ranks - 1) / (virtual * count + ranks - 1))


def test_better_schedules_have_smaller_bubbles() -> None:
    bubbles = [theoretical_bubble(word, 4, 8) for word in ("1f1b", "interleaved_1f1b", "zbv")]
    assert bubbles == sorted(bubbles, reverse=True)
    assert theoretical_bubble("interleaved_zb", 4, 8, 1) < theoretical_bubble("1f1b", 4, 8)


def test_1f1b_holds_no_more_micro_batches_than_there_are_stages_to_come() -> None:
    for rank, work in enumerate(make_table("1f1b", 4, 16)):
        held = most = 0
        for action in work:
            held += 1 if action.type is ActionType.FORWARD else -1
            most = max(most, held)
        assert most == 4 - rank


@pytest.mark.parametrize(
    ("word", "ranks", "count", "nearest"),
    [("interleaved_1f1b", 4, 9, 10), ("interleaved_zb", 2, 5, 6), ("dualpipev", 2, 3, 4), ("1f1b", 4, 0, 1)],
)
def test_a_number_that_cannot_work_is_refused_with_the_nearest(word: str, ranks: int, count: int, nearest: int) -> None:
    with refused(ConfigError, f"{count} micro-batch", f"{ranks} ranks", nearest, key="strategy.pipeline.micro_batches"):
        check_micro_batches(word, ranks, count)
    assert is_legal(word, ranks, nearest)


@pytest.mark.parametrize(("word", "virtual"), [("1f1b", 2), ("interleaved_1f1b", 1), ("zbv", 3), ("looped_bfs", 1)])
def test_a_number_of_stages_that_a_schedule_does_not_have_is_refused(word: str, virtual: int) -> None:
    with refused(ConfigError, str(virtual), word, key="strategy.pipeline.stages_per_rank"):
        resolve_virtual(word, virtual)


def test_an_unknown_word_is_answered_with_the_known_ones() -> None:
    with refused(ConfigError, "'2f2b'", "interleaved_1f1b", key="strategy.pipeline.schedule"):
        make_table("2f2b", 2, 4)


def test_v_schedules_go_up_and_down() -> None:
    assert placement_of("zbv", 3) == (0, 1, 2, 2, 1, 0)
    assert placement_of("interleaved_1f1b", 3) == (0, 1, 2, 0, 1, 2)


@pytest.mark.parametrize("word", SCHEDULES)
def test_a_picture_has_a_box_for_each_action(word: str) -> None:
    root = ET.fromstring(draw_schedule(word, 4, 8))
    boxes = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("class") == "box"]
    assert len(boxes) == sum(len(work) for work in make_table(word, 4, 8))
    assert f"{theoretical_bubble(word, 4, 8):.1%} idle" in (root.get("aria-label") or "")


def test_bytes_sent_by_each_rank() -> None:
    sizes = {"micro_batches": 8, "activation_bytes": 100}
    sent = [pipeline_traffic("1f1b", ranks=4, rank=rank, **sizes) for rank in range(4)]
    assert sent == [800, 1600, 1600, 800]
    assert pipeline_traffic("interleaved_1f1b", ranks=4, rank=1, **sizes) == 2 * 1600
    assert pipeline_traffic("zbv", ranks=2, rank=0, **sizes) == 1600  # of its stages 0 and 3; 1 and 2 meet on rank 1
    assert pipeline_traffic("1f1b", ranks=4, rank=0, tied_bytes=7, **sizes) == 807
    assert pipeline_traffic("1f1b", ranks=4, rank=1, tied_bytes=7, **sizes) == 1600
    assert pipeline_traffic("1f1b", ranks=4, rank=3, backward=False, **sizes) == 0
