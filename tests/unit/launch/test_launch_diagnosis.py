"""From what is known of ranks to who is to blame, for what."""

from __future__ import annotations

import os
import queue
import random
import re
import signal
import subprocess
import time
import traceback
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import missing

from plait.launch.diagnosis import absent_ranks, diagnose, exception_in, failure_page, find_root_cause
from plait.launch.heartbeat import Beat, Phase
from plait.launch.heartbeat_monitor import HeartbeatMonitor
from plait.launch.job import Job, Node
from plait.launch.observer import Observer, StepMemory
from plait.launch.records import RankObservation, RankRecord, new_records, record_end


def ranks(count: int) -> list[RankRecord]:
    job = Job(("x",), (Node("h", tuple(range(count))),))
    return new_records(job, job.placements())


def beat(record: RankRecord, *, phase: Phase = Phase.REDUCE, waits_s: float | None = None, **more: Any) -> None:
    about = {"collective": "all_reduce of 8", "called": 1000.0 - (waits_s or 0.0), "pending": waits_s is not None}
    record.observation = RankObservation(
        Beat(1, 100.0, phase, more.pop("step", 4), 999.0, **{**about, **more}), at=1000.0
    )


def ended(code: int, *lines: str, message: str = "", **evidence: Any) -> RankRecord:
    (record,) = ranks(1)
    record_end(record, code, by_us=False)
    record.tail.extend(lines)
    record.message, record.observation = message, RankObservation(**evidence)
    return record


TRACE = ["Traceback (most recent call last):", '  File "t.py", line 3, in <module>']


@pytest.mark.parametrize(
    ("record", "names", "remedy", "victim"),
    [
        (ended(-9), ["SIGKILL"], ["signal"], False),
        (ended(-9, oom_kills=1, oom_of_group=True, limit=3 << 29), ["1.5 GiB"], ["offload"], False),
        (ended(-9, oom_kills=1), ["SIGKILL"], ["dmesg"], False),
        (ended(-7), ["SIGBUS"], ["/dev/shm"], False),
        (ended(-11), ["SIGSEGV"], ["stack"], False),
        (ended(-6, "  what():  Received data size doesn't match expected size."), ["collective"], ["shapes"], False),
        (ended(-15), ["SIGTERM"], ["Plait"], False),
        (ended(3, *TRACE, "ValueError: handled before"), ["3"], ["sys.exit"], False),
        (ended(1, *TRACE, "[rank0]: KeyError: 'x'"), ["KeyError: 'x'"], [], False),
        (ended(1, *TRACE, "torch.OutOfMemoryError: CUDA out of memory. Tried"), ["GPU"], ["batch.micro"], False),
        (ended(1, *TRACE, "RuntimeError: [enforce fail] can't allocate memory: you"), ["host"], ["offload"], False),
        (ended(1, *TRACE, "MemoryError"), ["host", "MemoryError"], ["offload"], False),
        (ended(1, *TRACE, "RuntimeError: [gloo/x.cc:1] Connection closed by peer"), ["Connection closed"], [], True),
        (ended(1, '  File "distributed_c10d.py"', "RuntimeError: Timed out waiting"), ["Timed out"], [], True),
        (ended(2, message="no text"), ["no text"], [], False),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value else "",
)
def test_every_end_has_its_own_words(record: RankRecord, names: list[str], remedy: list[str], victim: bool) -> None:
    verdict = diagnose(record)
    assert not missing(verdict.what, *names)
    assert not missing(verdict.remedy, *remedy)
    assert ("dmesg" in verdict.remedy) == ("dmesg" in remedy)
    assert verdict.victim == victim
    assert victim or verdict.remedy or record.message


def test_a_kill_somewhere_on_the_host_counts_only_for_a_rank_that_was_taking_the_last_memory() -> None:
    beat = Beat(1, 100.0, Phase.FORWARD, 4, 999.0, sizes=(1, 2))
    grown: dict[str, Any] = {"beat": beat, "oom_kills": 1, "memory": 8 << 30, "growth": (3.0, 2 << 30)}
    for headroom, full in ((20 << 30, False), (None, False), (1 << 30, True)):
        verdict = diagnose(ended(-9, **grown, headroom=headroom))
        assert verdict.full == full
        assert ("dmesg" in verdict.remedy) != full


@pytest.mark.parametrize(
    ("record", "names"),
    [
        (ended(1, *TRACE, "torch.OutOfMemoryError: CUDA out of memory.", gpu_steps=(2, 90, 3 << 30)), ["GPU"]),
        (ended(-9, oom_kills=1, oom_of_group=True, host_steps=(2, 90, 3 << 30)), ["host"]),
        (ended(1, *TRACE, "MemoryError", host_steps=(2, 90, 3 << 30)), ["MemoryError"]),
    ],
)
def test_memory_that_grows_from_step_to_step_asks_for_no_smaller_batches(record: RankRecord, names: list[str]) -> None:
    verdict = diagnose(record)
    assert not verdict.full
    assert not missing(verdict.what, *names, "3.00 GiB", "step 2", "90")
    assert ".detach()" in verdict.remedy


def test_memory_grows_from_step_to_step_where_the_least_of_it_does() -> None:
    dice = random.Random(4)
    leaks, swings, settles = StepMemory(), StepMemory(), StepMemory()
    for step in range(2000):
        within = dice.randrange(50) << 20  # a look comes at any moment of a step
        leaks.add(step, (100 << 20) + (step << 18) + within)
        swings.add(step, (100 << 20) + within)
        settles.add(step, (min(step, 40) << 22) + (100 << 20) + within)
    assert swings.growth is None
    assert settles.growth is None
    assert leaks.growth is not None
    first, last, grown = leaks.growth
    assert (first, last // 10) == (2, 199)
    assert 350 << 20 < grown < 500 << 20


def test_an_exceptions_message_may_have_several_lines() -> None:
    lines = ["ValueError: earlier", *TRACE, "a.b.ConfigError: two problems:", "  - one", "  - two"]
    assert exception_in(lines) == "a.b.ConfigError: two problems: - one - two"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (zipfile.BadZipFile("File is not a zip file"), "zipfile.BadZipFile: File is not a zip file"),
        (queue.Empty(), "_queue.Empty"),
        (UserWarning("as an error"), "UserWarning: as an error"),
        (ExceptionGroup("two", [ValueError(1), KeyError(2)]), "ExceptionGroup: two (2 sub-exceptions)"),
    ],
)
def test_an_exception_is_known_by_the_stack_above_it_whatever_its_name(error: Exception, shown: str) -> None:
    try:
        raise error
    except Exception as caught:
        printed = "".join(traceback.format_exception(caught)).splitlines()
    assert exception_in(["step 3: fine", *(f"[rank1]: {line}" for line in printed)]).startswith(shown)
    assert not exception_in(["settings:", "  lr: 1", "Note: nothing was raised", "done"])


@pytest.mark.parametrize(
    ("signal_line", "group", "what", "remedy"),
    [
        ("is killed by signal: Killed. ", 1, "host", "offload"),
        ("is killed by signal: Killed. ", 2, "Killed", "dmesg"),
        ("is killed by signal: Killed. ", 0, "Killed", "signal"),
        ("is killed by signal: Bus error. It is possible that", 0, "Bus error", "/dev/shm"),
        ("is killed by signal: Segmentation fault. ", 0, "Segmentation fault", "data.workers 0"),
        ("exited unexpectedly with exit code 3. Details", 0, "", "data.workers 0"),
    ],
)
def test_a_data_worker_that_ends_is_told_from_its_rank(signal_line: str, group: int, what: str, remedy: str) -> None:
    lines = [*TRACE, f"RuntimeError: DataLoader worker (pid 7) {signal_line}", "", *TRACE]
    kills = {"recent_oom_kills": int(group > 0), "oom_of_group": group == 1}
    verdict = diagnose(ended(1, *lines, "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly", **kills))
    assert not missing(verdict.what, "data worker", what)
    assert remedy in verdict.remedy
    assert ("dmesg" in verdict.remedy) == (remedy == "dmesg")
    assert not verdict.full


def test_the_first_that_is_nobodys_victim_is_to_blame() -> None:
    found = ranks(3)
    for record, code, line in ((found[0], 1, "RuntimeError: Connection reset by peer"), (found[2], -9, "")):
        record_end(record, code, by_us=False)
        record.tail.append(line)
    record_end(found[1], -signal.SIGTERM, by_us=True)
    assert find_root_cause(found, hung=False).records == (found[2],)
    page = failure_page(found, hung=False, several_hosts=True)
    assert not missing(page.splitlines()[2], "rank 2 on h", "SIGKILL")
    assert re.search(r"rank 0\b.*RuntimeError: Connection reset by peer", page)


def test_whoever_does_not_wait_is_missing() -> None:
    found = ranks(4)
    for record in found:
        beat(record, waits_s=50.0)
    beat(found[2], phase=Phase.FORWARD)
    absent, why = absent_ranks(found)
    assert absent == [found[2]]
    assert "all_reduce of 8" in why


def test_whoever_never_joined_is_missing_too() -> None:
    found = ranks(2)
    beat(found[0], phase=Phase.BUILD)
    record_end(found[0], 1, by_us=False)
    found[0].tail.append("plait.errors.WorldError: rank 0 of 2 could not join the others: timed out (distributed)")
    record_end(found[1], -signal.SIGTERM, by_us=True)
    page = failure_page(found, hung=False, several_hosts=False)
    assert page.splitlines()[2].startswith("rank 1 ")


def test_whoever_waits_for_something_else_is_odd() -> None:
    found = ranks(3)
    for record in found:
        beat(record, waits_s=50.0)
    beat(found[1], waits_s=50.0, collective="broadcast of 1", step=5)
    absent, why = absent_ranks(found)
    assert absent == [found[1]]
    assert "all_reduce of 8" in why


def test_two_ranks_that_wait_for_each_other_are_not_judged() -> None:
    found = ranks(2)
    beat(found[0], waits_s=50.0)
    beat(found[1], waits_s=50.0, collective="broadcast of 1")
    assert absent_ranks(found) == ([], "")
    assert not re.search(r"^rank \d", failure_page(found, hung=True, several_hosts=False), re.MULTILINE)


def test_a_rank_that_a_signal_has_stopped_is_to_blame_whatever_it_last_told(tmp_path: Path) -> None:
    found = ranks(2)
    beat(found[0], waits_s=50.0)
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        os.kill(sleeper.pid, signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)
        found[1].pid = sleeper.pid
        witness = Observer(found, tmp_path)
        witness.look(found[1])
        sleeper.kill()
    record_end(found[1], -9, by_us=True)
    witness.look(found[1])
    page = failure_page(found, hung=True, several_hosts=False)
    assert page.splitlines()[2].startswith("rank 1 ")
    assert "SIGSTOP" in page


def test_a_rank_that_waits_for_a_disk_is_told_so() -> None:
    found = ranks(3)
    for record in found:
        beat(record, waits_s=50.0)
    beat(found[2], phase=Phase.SAVE)
    found[2].observation.state = "D"
    assert "disk" in failure_page(found, hung=True, several_hosts=False)


def test_a_crash_in_a_thread_of_a_library_shows_the_main_one() -> None:
    stacks = 'Fatal Python error: Aborted\n\nThread 0x1 [x] (most recent call first):\n  File "a.py", line 1 in wait\n'
    stacks += (
        '\nThread 0x2 [python] (most recent call first):\n  File "m.py", line 7 in train\n\nExtension modules: x\n'
    )
    page = failure_page([ended(-6, stacks=stacks)], hung=False, several_hosts=False)
    assert page.endswith(':\n  File "m.py", line 7 in train\n')
    assert "a.py" not in page
    assert "Fatal Python error" not in failure_page(
        [ended(-6, stacks="Fatal Python error")], hung=False, several_hosts=False
    )


def test_a_rank_that_left_too_early_is_to_blame_for_those_who_time_out() -> None:
    found = ranks(2)
    record_end(found[0], 0, by_us=False)
    record_end(found[1], 1, by_us=False)
    found[1].tail.extend(["distributed", "RuntimeError: Connection closed by peer"])
    assert find_root_cause(found, hung=False).records == (found[0],)


@pytest.mark.parametrize(("waits_s", "hangs"), [(85.0, False), (95.0, True)])
def test_a_hang_is_seen_shortly_before_the_collective_gives_up(waits_s: float, hangs: bool) -> None:
    found = ranks(2)
    beat(found[0], waits_s=waits_s)
    beat(found[1])
    assert HeartbeatMonitor(found).hangs() == hangs


def test_a_wait_is_added_up_look_by_look(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ranks(1)
    beat(found[0], waits_s=0.5)
    watch, said = HeartbeatMonitor(found), []
    for second in range(92):
        monkeypatch.setattr(time, "monotonic", lambda at=500.0 + second: at)
        said.append(watch.hangs())
    assert said == [False] * 90 + [True] * 2
    beat(found[0], waits_s=0.1)  # in another one
    assert not watch.hangs()


def test_neither_a_clock_set_forward_nor_a_sleep_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ranks(1)
    beat(found[0], waits_s=0.2)
    watch = HeartbeatMonitor(found)
    assert not watch.hangs()
    found[0].observation.at += 7200
    assert not watch.hangs()
    later = time.monotonic() + 7200
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert not watch.hangs()


def test_a_clock_that_is_set_back_stops_no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    watch = HeartbeatMonitor(ranks(2))
    assert watch.due()
    assert not watch.due()
    now -= 3600
    assert watch.due()
    assert not watch.due()
    now += 1.2
    assert watch.due()


def test_a_rank_that_all_wait_for_most_of_the_time_is_told_once() -> None:
    found = ranks(3)
    watch = HeartbeatMonitor(found, window=8, share=0.75)
    said = []
    for look in range(20):
        for record in found:
            slow = record.placement.rank == 1 and look % 8 != 0
            beat(record, phase=Phase.IDLE, waits_s=None if slow else 0.1, tick=look)
        said.append(watch.straggler())
    (text,) = filter(None, said)
    assert text.startswith("rank 1 on h ")
    assert "idle" in text


def test_ranks_that_take_turns_are_not_slow() -> None:
    found = ranks(3)
    watch = HeartbeatMonitor(found, window=6, share=0.5)
    for look in range(30):
        for record in found:
            beat(record, waits_s=None if record.placement.rank == look % 3 else 0.1, tick=look)
        assert watch.straggler() is None
