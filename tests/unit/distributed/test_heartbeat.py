"""A rank's heartbeat: written by the rank, read by others, also after its death."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.refusals import refused

from plait.distributed import wait_for
from plait.distributed.heartbeat import Heartbeat, _FlightRecorderState
from plait.errors import WorldError
from plait.launch import Phase
from plait.launch.heartbeat import STACK_SIGNAL, read_beat


def test_what_a_rank_says_can_be_read_by_others(tmp_path: Path) -> None:
    rank, step, phase = random.randrange(100), random.randrange(1 << 40), random.choice(list(Phase))
    before = time.time()
    heartbeat = Heartbeat(tmp_path, rank, timeout_s=7.5)
    heartbeat.enter(phase, step)
    heartbeat.set_report_folder("/runs/ä")
    heartbeat.set_possible_sizes([1, 2, 24, 16000])
    found = read_beat(tmp_path / f"{rank}.beat")
    assert found is not None
    assert (found.pid, found.timeout_s, found.phase, found.step) == (os.getpid(), 7.5, phase, step)
    assert (found.folder, found.sizes) == ("/runs/ä", (1, 2, 24, 16000))
    assert before <= found.since <= time.time()


def test_there_is_none_before_the_rank_has_said_anything(tmp_path: Path) -> None:
    (tmp_path / "0.beat").write_bytes(bytes(4096))
    assert read_beat(tmp_path / "0.beat") is None
    assert read_beat(tmp_path / "1.beat") is None


DIES = """
import ctypes, os, pathlib, signal, sys, time
from plait.errors import WorldError
from plait.launch import Phase
from plait.distributed.heartbeat import Heartbeat
heartbeat = Heartbeat(pathlib.Path(sys.argv[1]), 3)
heartbeat.enter(Phase.SAVE, 17)
print("ready", flush=True)
def waits_here():
    sys.stdin.readline()
waits_here()
"""


def test_it_outlives_the_rank_and_so_do_its_stacks(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", DIES, str(tmp_path)], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 30
        while "waits_here" not in (tmp_path / "3.stacks").read_text():
            process.send_signal(STACK_SIGNAL)  # again: the first may come before it waits
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGSEGV)
    found = read_beat(tmp_path / "3.beat")
    assert found is not None
    assert (found.phase, found.step) == (Phase.SAVE, 17)
    assert "Fatal Python error: Segmentation fault" in (tmp_path / "3.stacks").read_text()


def entry(
    group: str, number: int, *, retired: bool, p2p: bool = False, name: str = "gloo:all_reduce"
) -> dict[str, object]:
    return {
        "is_p2p": p2p,
        "process_group": [group, ""],
        "collective_seq_id": number,
        "retired": retired,
        "state": "scheduled",
        "profiling_name": name,
        "input_sizes": [[3, 4]],
        "time_created_ns": number * 10**9,
    }


def test_the_oldest_collective_that_is_not_over_is_the_one_waited_in() -> None:
    seen = _FlightRecorderState()
    seen.update([entry("0", 4, retired=True), entry("1", 9, retired=False), entry("0", 5, retired=False)])
    assert (seen.name, seen.called, seen.pending, seen.count) == ("all_reduce of 3×4", 9.0, True, 14)
    seen.update([entry("0", 6, retired=True), entry("0", 0, retired=True, p2p=True, name="gloo:send")])
    assert (seen.name, seen.pending, seen.count) == ("send of 3×4", False, 15)


class Message:
    """A message that comes when it is let go."""

    def __init__(self) -> None:
        self._came = threading.Event()

    def wait(self) -> None:
        self._came.wait(30)

    def come(self) -> None:
        self._came.set()


def test_a_message_that_is_waited_for_is_told_until_it_has_come(tmp_path: Path) -> None:
    message, heartbeat = Message(), Heartbeat(tmp_path, 0)
    waiter = threading.Thread(target=lambda: wait_for([message], "a word"))  # type: ignore[list-item]
    before = time.time()
    waiter.start()
    heartbeat.start_observer(torch.device("cpu"))
    while (beat := read_beat(tmp_path / "0.beat")) is None or not beat.pending:
        assert time.time() < before + 30
        time.sleep(0.05)
    assert beat.collective == "a word"
    assert before <= beat.called <= time.time()
    message.come()
    waiter.join()
    heartbeat.close()  # however short a time ago it was: the last word is true
    last = read_beat(tmp_path / "0.beat")
    assert last is not None
    assert not last.pending


def test_a_folder_without_room_is_told_and_crashes_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with refused(WorldError, f"'{tmp_path}'", "No space left on device", "TMPDIR"):
        Heartbeat(tmp_path, 0)


def test_heartbeats_of_one_process_share_the_file_and_the_thread_that_looks(tmp_path: Path) -> None:
    device = torch.device("cpu")
    looking = [threading.active_count()]
    heartbeats = []
    for step in range(6):
        heartbeats.append(Heartbeat(tmp_path, 0))
        heartbeats[-1].start_observer(device)
        heartbeats[-1].enter(Phase.FORWARD, step)
        found = read_beat(tmp_path / "0.beat")
        assert found is not None
        assert (found.phase, found.step) == (Phase.FORWARD, step)
        looking.append(threading.active_count() - looking[0])
    assert looking[1:] == [1] * 6
    for heartbeat in heartbeats[:-1]:
        heartbeat.close()
        heartbeat.close()  # a world is closed by whoever opened it, and at the end of the process
    assert threading.active_count() == looking[0] + 1
    heartbeats[-1].close()
    assert threading.active_count() == looking[0]
