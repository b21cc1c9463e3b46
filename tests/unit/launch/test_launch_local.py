"""Several processes on one machine: started together, ended together."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.refusals import refused
from tests.unit.launch.processes import assert_gone

from plait.errors import CheckpointError, ConfigError, Problem, WorldError
from plait.launch import cpu_count, free_port, gpu_count, launched_size, report_failure, run_ranks
from plait.launch.failure import RankMessages, merge_messages

PYTHON = sys.executable


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "rank.py"
    path.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + text)
    return [PYTHON, str(path)]


def launcher(command: list[str], count: int) -> subprocess.Popen[str]:
    """`run_ranks` in a process of its own, which signals can be sent to."""
    text = f"""
import sys
from plait.launch import local
local.FAILURE_WAIT_S = local.GRACE_S = 0.5
sys.exit(local.run_ranks({command!r}, {count}))
"""
    return subprocess.Popen([PYTHON, "-c", text], stderr=subprocess.PIPE, text=True)


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)


def test_every_rank_gets_the_command_and_torchruns_variables(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    text = f"""
open({str(tmp_path)!r} + f"/{{rank}}", "w").write(" ".join([*sys.argv[1:], *(os.environ[n] for n in {names!r})]))
"""
    arguments = ["train", "run.yaml", "a=b c", "--odd=$HOME 'x'"]
    assert run_ranks([*script(tmp_path, text), *arguments], 3) == 0
    found = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    ports = {line.split()[-1] for line in found}
    assert len(ports) == 1
    for rank, line in enumerate(found):
        assert line == f"train run.yaml a=b c --odd=$HOME 'x' {rank} {rank} 3 3 127.0.0.1 {ports.copy().pop()}"


def test_a_rank_that_fails_ends_the_others_and_gives_its_exit_code(tmp_path: Path) -> None:
    text = f"""
open({str(tmp_path)!r} + f"/{{rank}}", "w").write(str(os.getpid()))
if rank == 1: sys.exit(7)
time.sleep(600)
"""
    assert run_ranks(script(tmp_path, text), 3) == 7
    assert_gone([int((tmp_path / name).read_text()) for name in "012" if (tmp_path / name).exists()])


def test_a_rank_that_is_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    text = f"""
open({str(tmp_path)!r} + f"/{{rank}}", "w").write(str(os.getpid()))
if rank == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""
    process = launcher(script(tmp_path, text), 2)
    wait_for(tmp_path / "0", tmp_path / "1")
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert re.search(r"^rank 1 .*\bSIGKILL\b", errors, re.MULTILINE)
    assert "rank 0" in errors
    assert_gone(pids)  # even the one that does not listen


def test_a_rank_that_cannot_start_is_told_and_the_others_are_ended(tmp_path: Path) -> None:
    with refused(WorldError, "rank 0 of 2", "no-such-program"):
        run_ranks([str(tmp_path / "no-such-program")], 2)


WAITS = """
def leave(number, frame):
    open(folder + f"/{rank}.got", "a").write(f"{signal.Signals(number).name} ")
    if number == signal.SIGTERM or leaves: sys.exit(0)
signal.signal(signal.SIGINT, leave)
signal.signal(signal.SIGTERM, leave)
open(folder + f"/{rank}", "w").write(str(os.getpid()))
while True: time.sleep(0.05)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_every_rank_once_and_the_run_does_not_look_finished(tmp_path: Path, number: int) -> None:
    process = launcher(script(tmp_path, f"folder, leaves = {str(tmp_path)!r}, True\n{WAITS}"), 2)
    wait_for(tmp_path / "0", tmp_path / "1")
    process.send_signal(number)
    passed_on = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
    assert process.wait(60) == 128 + passed_on, "although both ranks end with 0"
    assert [(tmp_path / f"{rank}.got").read_text() for rank in range(2)] == [f"{passed_on.name} "] * 2


def test_a_second_interrupt_ends_ranks_that_do_not_listen(tmp_path: Path) -> None:
    process = launcher(script(tmp_path, f"folder, leaves = {str(tmp_path)!r}, False\n{WAITS}"), 2)
    wait_for(tmp_path / "0", tmp_path / "1")
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path / "0.got", tmp_path / "1.got")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    assert_gone([int((tmp_path / str(rank)).read_text()) for rank in range(2)])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_killing_the_launcher_itself_leaves_no_orphans(tmp_path: Path) -> None:
    process = launcher(script(tmp_path, f"folder, leaves = {str(tmp_path)!r}, False\n{WAITS}"), 2)
    wait_for(tmp_path / "0", tmp_path / "1")
    process.kill()
    process.wait(60)
    assert_gone([int((tmp_path / str(rank)).read_text()) for rank in range(2)])
    assert "SIGTERM" in (tmp_path / "0.got").read_text()  # asked, so that it can save


def test_what_a_killed_launcher_leaves_is_removed_by_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    process = launcher(script(tmp_path, f"folder, leaves = {str(tmp_path)!r}, False\n{WAITS}"), 1)
    wait_for(tmp_path / "0")
    (left,) = folder.iterdir()
    long_ago = time.time() - 3600
    os.utime(left, (long_ago, long_ago))
    with RankMessages():
        assert left.exists()  # its launcher lives
    process.kill()
    process.wait(60)
    assert_gone([int((tmp_path / "0").read_text())])
    os.utime(left, (long_ago, long_ago))
    with RankMessages() as messages:
        assert list(folder.iterdir()) == [messages.folder]
    assert not list(folder.iterdir())


FAILS = """
from plait.errors import DataError
from plait.launch import report_failure as tell
if rank != silent:
    tell(DataError(message.format(rank=rank)))
sys.exit(2)
"""


@pytest.mark.parametrize(
    ("message", "silent", "expected"),
    [
        ("no text", -1, "plait: no text\n"),
        ("bad line on {rank}", -1, "plait: rank 0: bad line on 0\nplait: rank 1: bad line on 1\n"),
        ("only one knows", 0, "plait: only one knows\n"),
    ],
)
def test_what_all_ranks_say_is_printed_once(tmp_path: Path, message: str, silent: int, expected: str) -> None:
    process = launcher(script(tmp_path, f"message, silent = {message!r}, {silent}\n{FAILS}"), 2)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors == expected


def test_a_rank_that_somebody_else_started_speaks_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PLAIT_FAILURES", raising=False)
    wrong = ConfigError(Problem("a.b", "wrong"))
    for rank, error, expected in (
        ("0", wrong, f"plait: {wrong}\n"),
        ("1", wrong, ""),
        ("1", CheckpointError("damaged"), "plait: rank 1: damaged\n"),
    ):
        monkeypatch.setenv("RANK", rank)
        report_failure(error)
        assert capsys.readouterr().err == expected


def test_messages_name_the_ranks_only_where_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankMessages() as messages:
        monkeypatch.setenv("PLAIT_FAILURES", messages.environment["PLAIT_FAILURES"])
        for rank, text in ((0, "x"), (10, "y"), (2, "x")):
            monkeypatch.setenv("RANK", str(rank))
            report_failure(CheckpointError(text))
        assert merge_messages(messages.raw()) == ["rank 0, 2: x", "rank 10: y"]


def test_a_free_port_can_be_listened_on() -> None:
    ports = {free_port() for _ in range(5)}
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, count in (("", 0), ("-1", 0), ("0", 1), ("0,2, 3", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpu_count() == count
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launched_size() is None
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert launched_size() == 16
    for text in ("9" * 5000, "²", "x", ""):
        monkeypatch.setenv("WORLD_SIZE", text)
        assert launched_size() is None


def test_an_error_is_told_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("x", "", "9" * 5000):
        monkeypatch.setenv("RANK", text)
        report_failure(WorldError("RANK is wrong"))
        assert capsys.readouterr().err == "plait: RANK is wrong\n"
    assert 1 <= cpu_count() <= (os.cpu_count() or 1)
