"""Who takes part in the next attempt, and when there is none."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.refusals import missing

from plait.launch import restart
from plait.launch.heartbeat import Beat, Phase
from plait.launch.job import Job, Node
from plait.launch.records import LaunchOutcome, RankObservation, RankRecord, causes, exit_code, new_records, record_end
from plait.launch.restart import Membership, run_with_restarts

Once = Callable[[Job, Callable[[], bool]], LaunchOutcome]


def crew(*slots: int, least: int = 1, back: bool = False, **more: int) -> Membership:
    nodes = tuple(Node(f"h{index}", tuple(range(count))) for index, count in enumerate(slots))
    words = [sys.executable, "-c", f"raise SystemExit({0 if back else 1})"]
    return Membership(Job(("x",), nodes), least, more.get("most", len(slots)), lambda host, _: words)


def records(job: Job, *, step: int, sizes: Sequence[int] = ()) -> list[RankRecord]:
    found = new_records(job, job.placements())
    for record in found:
        record.pid = 1
        record.observation = RankObservation(Beat(1, 60.0, Phase.FORWARD, step, 0.0, sizes=tuple(sizes)))
    return found


def killed(slot: tuple[str, int], *, step: int = 3, sizes: Sequence[int] = (), by: int = signal.SIGKILL) -> Once:
    """An attempt in which the rank of one slot is killed, if it takes part, and all goes well if not."""

    def once(job: Job, join: Callable[[], bool]) -> LaunchOutcome:
        found = records(job, step=step, sizes=sizes)
        bad = [record for record in found if (record.placement.host, record.placement.slot) == slot]
        for record in found:
            record_end(record, -by if record in bad else 0, by_us=False)
        return LaunchOutcome(128 + by if bad else 0, found)

    return once


def attempts(crew: Membership, *outcomes: Once, restarts: int = 10) -> tuple[int, list[Job]]:
    """The exit code, and the jobs that were attempted."""
    jobs: list[Job] = []

    def once(job: Job, join: Callable[[], bool]) -> LaunchOutcome:
        jobs.append(job)
        return outcomes[min(len(jobs), len(outcomes)) - 1](job, join)

    return run_with_restarts(crew, once, restarts=restarts), jobs


def test_the_same_ranks_start_again_and_know_which_attempt_it_is() -> None:
    code, jobs = attempts(crew(2, 2), killed(("h1", 0)), killed(("h9", 9)))
    assert code == 0
    assert [job.size for job in jobs] == [4, 4]
    assert [job.environment["PLAIT_ATTEMPT"] for job in jobs] == ["0", "1"]
    assert jobs[0].environment["PLAIT_MOST_RANKS"] == "4"


def test_a_slot_that_fails_twice_in_one_place_is_left_out() -> None:
    code, jobs = attempts(crew(2, 2), killed(("h1", 0)))
    assert code == 0
    assert jobs[-1].nodes == (Node("h0", (0, 1)), Node("h1", (1,)))


def test_failing_further_on_is_another_place() -> None:
    stages = [killed(("h0", 1), step=step) for step in range(4)]
    code, jobs = attempts(crew(2), *stages, killed(("h9", 9)))
    assert code == 0
    assert [job.size for job in jobs] == [2] * 5


def test_the_same_crash_on_another_slot_is_the_runs_own() -> None:
    crashes = [killed(("h0", slot), by=signal.SIGSEGV) for slot in (1, 2)]
    code, jobs = attempts(crew(4), *crashes)
    assert (code, len(jobs)) == (139, 2)


def test_whoever_is_killed_from_outside_may_be_anywhere() -> None:
    code, jobs = attempts(crew(4), *[killed(("h0", slot)) for slot in (1, 2, 3)], killed(("h9", 9)))
    assert (code, [job.size for job in jobs]) == (0, [4] * 4)


def test_the_nearest_size_that_fits_is_taken_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, jobs = attempts(crew(2, 2), killed(("h1", 1), sizes=[1, 2, 4, 8]))
    assert code == 0
    assert [job.size for job in jobs] == [4, 4, 2]
    assert not missing(capsys.readouterr().err, "2 ranks", "3")


def test_no_size_that_fits_ends_it_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    code, jobs = attempts(crew(4), killed(("h0", 1), sizes=[4]))
    assert (code, len(jobs)) == (137, 2)
    assert not missing(capsys.readouterr().err, "3 ranks", "4", "batch.total")


def test_there_are_no_more_new_beginnings_than_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    stages = [killed(("h0", 1), step=step) for step in range(9)]
    code, jobs = attempts(crew(2), *stages, restarts=3)
    assert (code, len(jobs)) == (137, 4)
    assert not missing(capsys.readouterr().err, "3", "--max_restarts")


def full(*, phase: Phase = Phase.BACKWARD, sizes: Sequence[int] = (2, 4)) -> Once:
    """An attempt in which a GPU has too little memory until micro-batches are a fourth of what they were."""

    def once(job: Job, join: Callable[[], bool]) -> LaunchOutcome:
        found, fits = records(job, step=0, sizes=sizes), job.environment["PLAIT_SPLIT"] == "4"
        for record in found:
            beat = record.observation.beat
            assert beat is not None
            record.observation = RankObservation(replace(beat, phase=phase))
            if not fits and record.placement.rank == 1:
                record.tail.append("torch.OutOfMemoryError: CUDA out of memory.")
            record_end(record, int(not fits and record.placement.rank == 1), by_us=False)
        return LaunchOutcome(int(not fits), found)

    return once


def test_a_rank_without_memory_gets_smaller_micro_batches_and_stays(capsys: pytest.CaptureFixture[str]) -> None:
    code, jobs = attempts(crew(4), full())
    assert code == 0
    assert [job.environment["PLAIT_SPLIT"] for job in jobs] == ["1", "2", "4"]
    assert [job.size for job in jobs] == [4, 4, 4]
    assert not missing(capsys.readouterr().err, "rank 1", "GPU", "batch.total")


@pytest.mark.parametrize("elsewhere", [{"phase": Phase.BUILD}, {"sizes": ()}], ids=["no batch yet", "no Runner"])
def test_where_smaller_micro_batches_cannot_help_nothing_is_split(elsewhere: dict[str, Any]) -> None:
    _, jobs = attempts(crew(4), full(**elsewhere), restarts=1)
    assert [job.environment["PLAIT_SPLIT"] for job in jobs] == ["1", "1"]


def lost(host: str) -> Once:
    def once(job: Job, join: Callable[[], bool]) -> LaunchOutcome:
        found = records(job, step=1)
        for record in found:
            record.lost = record.placement.host == host
            if not record.lost:
                record_end(record, -signal.SIGTERM, by_us=True)
        return LaunchOutcome(255 if any(record.lost for record in found) else 0, found)

    return once


def test_a_lost_host_is_done_without() -> None:
    code, jobs = attempts(crew(2, 2, 2), lost("h0"))
    assert code == 0
    assert [node.host for node in jobs[-1].nodes] == ["h1", "h2"]


def test_too_few_hosts_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "WAIT_S", 0.5)
    code, jobs = attempts(crew(1, 1, least=2), lost("h0"))
    assert (code, len(jobs)) == (255, 1)
    code, jobs = attempts(crew(1, 1, least=2, back=True), lost("h0"), killed(("h9", 9)))
    assert (code, [job.size for job in jobs]) == (0, [2, 2])


def test_a_host_that_is_back_makes_the_ranks_leave_and_start_together() -> None:
    def waits(job: Job, join: Callable[[], bool]) -> LaunchOutcome:
        while not join():
            pass
        return LaunchOutcome(0, records(job, step=5), reform=True)

    code, jobs = attempts(crew(1, 1, back=True), lost("h1"), waits, killed(("h9", 9)))
    assert code == 0
    assert [job.size for job in jobs] == [2, 1, 2]


def test_ranks_that_somebody_else_told_to_stop_have_not_failed_and_do_not_start_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped(job: Job, join: Callable[[], bool]) -> LaunchOutcome:
        found = records(job, step=7)
        for record in found:
            beat = record.observation.beat
            assert beat is not None
            record.observation = RankObservation(replace(beat, phase=Phase.LEFT))
            record_end(record, 143, by_us=False)
        assert not causes(found)
        return LaunchOutcome(exit_code(found), found)

    code, jobs = attempts(crew(2, 2), stopped)
    assert (code, len(jobs)) == (143, 1)
    assert "launcher" in capsys.readouterr().err


def test_a_user_who_interrupts_is_obeyed() -> None:
    def interrupted(job: Job, join: Callable[[], bool]) -> LaunchOutcome:
        return LaunchOutcome(130, records(job, step=1), interrupted=True)

    assert attempts(crew(2), interrupted)[0] == 130
