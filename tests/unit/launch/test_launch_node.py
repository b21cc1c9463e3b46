"""The launcher's hand on a host: what it tells, and that ranks never outlive the connection."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import missing
from tests.unit.launch.processes import assert_gone

from plait.launch import agent as node
from plait.launch.job import Job, Node
from plait.launch.multi_host import run_multi_host
from plait.launch.prepare import _pid_file
from plait.launch.remote import node_words

SLEEPS = """
import os, sys, time
open(sys.argv[1] + "/" + os.environ["RANK"], "w").write(str(os.getpid()))
time.sleep(600)
"""


def python(text: str, *nodes: Node, arguments: tuple[str, ...] = (), **more: Any) -> Job:
    return Job((sys.executable, "-u", "-c", text), nodes, arguments, **more)


def agent(job: Job, *, silence: float = 60.0) -> subprocess.Popen[str]:
    code = f"""
from plait.launch import agent as node
node.SILENCE_S, node.ORPHANED_S, node._BLOCKED_S = {silence}, 1.0, 1.0
raise SystemExit(node.serve(0))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None
    process.stdin.write(job.to_json() + "\n")
    return process


def pids(folder: Path, count: int, *, talks_to: subprocess.Popen[str] | None = None) -> list[int]:
    """Of ranks, as soon as all have begun; until then their host hears the launcher's beat, where it is named."""
    deadline = time.monotonic() + 60
    while True:
        if talks_to is not None and talks_to.stdin is not None:
            talks_to.stdin.write('{"beat": true}\n')
        texts = [path.read_text() for path in folder.iterdir()]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)


def test_it_tells_pids_output_and_ends() -> None:
    process = agent(python("import sys; print('hi'); print('no', file=sys.stderr); sys.exit(3)", Node("a", (0,))))
    assert process.stdout is not None
    news = [json.loads(line) for line in process.stdout]
    assert process.wait(60) == 3
    assert isinstance(news[0]["pid"], int)
    assert "".join(each.get("out", "") for each in news) == "hi\n"
    assert "".join(each.get("err", "") for each in news) == "no\n"
    assert [(each["rank"], each["code"]) for each in news if "code" in each] == [(0, 3)]


def test_a_cut_connection_ends_the_ranks(tmp_path: Path) -> None:
    process = agent(python(SLEEPS, Node("a", (0, 1)), arguments=(str(tmp_path),)))
    found = pids(tmp_path, 2)
    assert process.stdin is not None
    process.stdin.close()
    assert_gone(found)
    process.wait(60)


def test_a_launcher_that_falls_silent_is_taken_for_dead(tmp_path: Path) -> None:
    process = agent(python(SLEEPS, Node("a", (0,)), arguments=(str(tmp_path),)), silence=1.0)
    assert_gone(pids(tmp_path, 1, talks_to=process))
    process.wait(60)


def fleet(job: Job) -> subprocess.Popen[str]:
    """`run_multi_host` over hosts that are all this one, in a process of its own."""
    commands = [node_words(node) for node in range(len(job.nodes))]
    code = f"""
import sys
from plait.launch import multi_host
from plait.launch.job import Job
multi_host.FAILURE_WAIT_S, multi_host.GRACE_S = 0.3, 1.0
sys.exit(multi_host.run_multi_host(Job.from_json({job.to_json()!r}), {commands!r}, stop_grace=1.0).code)
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_lines_of_several_hosts_come_whole_and_with_their_rank() -> None:
    text = "import os, sys\nfor _ in range(40): sys.stdout.write('x' * 30); sys.stdout.write('y\\n')"
    out, _ = fleet(python(text, Node("a", (0, 1)), Node("b", (0,)))).communicate(timeout=60)
    lines = out.splitlines()
    assert len(lines) == 120
    assert set(lines) == {f"{who}: {'x' * 30}y" for who in ("a[0]", "a[1]", "b[2]")}


def test_the_worst_exit_code_of_all_hosts_counts_and_the_others_are_ended(tmp_path: Path) -> None:
    # One that failed before the others had begun would end them before they could be seen.
    last = "while os.environ['RANK'] != '2' or len(os.listdir(sys.argv[1])) < 3: time.sleep(0.05)\nsys.exit(9)"
    text = SLEEPS.replace("time.sleep(600)", last)
    process = fleet(python(text, Node("a", (0, 1)), Node("b", (0,)), arguments=(str(tmp_path),)))
    found = pids(tmp_path, 3)
    process.communicate(timeout=60)
    assert process.returncode == 9
    assert_gone(found)


@pytest.mark.parametrize("stubborn", [False, True])
def test_an_interrupt_ends_everything_everywhere(tmp_path: Path, stubborn: bool) -> None:
    ignore = "import signal\nsignal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)\n" if stubborn else ""
    process = fleet(python(ignore + SLEEPS, Node("a", (0,)), Node("b", (0,)), arguments=(str(tmp_path),)))
    found = pids(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == (128 + signal.SIGKILL if stubborn else 128 + signal.SIGINT)
    assert_gone(found)


def test_killing_the_launcher_ends_everything_too(tmp_path: Path) -> None:
    process = fleet(python(SLEEPS, Node("a", (0,)), Node("b", (0,)), arguments=(str(tmp_path),)))
    found = pids(tmp_path, 2)
    process.kill()
    process.communicate(timeout=60)
    assert_gone(found)


def test_workers_of_a_killed_rank_do_not_outlive_it(tmp_path: Path) -> None:
    text = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1] + "/worker", "w").write(str(child.pid))
os.kill(os.getpid(), 9)
"""
    process = fleet(python(text, Node("a", (0,)), Node("b", ()), arguments=(str(tmp_path),)))
    found = pids(tmp_path, 1)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert not missing(errors, "rank 0 on a", "SIGKILL")
    assert_gone(found)


def test_a_host_that_cannot_be_reached_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    job = python("pass", Node("nowhere", (0,)))
    assert (
        run_multi_host(job, [[sys.executable, "-c", "raise SystemExit('connection refused')"]], stop_grace=None).code
        != 0
    )
    errors = capfd.readouterr().err
    assert not missing(errors, "nowhere", "connection refused", "rank 0 on nowhere")


def test_what_cannot_be_started_on_a_host_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    job = Job((os.path.join(os.sep, "no", "such", "program"),), (Node("a", (0,)),))
    assert run_multi_host(job, [node_words(0)], stop_grace=None).code != 0
    assert not missing(capfd.readouterr().err, "a: rank 0 of 1", job.program[0])


def test_a_rank_that_prints_to_nobody_is_ended_too(tmp_path: Path) -> None:
    text = SLEEPS.replace("time.sleep(600)", "while True: print('x' * 1000)")
    process = agent(python(text, Node("a", (0,)), arguments=(str(tmp_path),)), silence=1.0)
    assert_gone(pids(tmp_path, 1, talks_to=process))  # nobody has read a byte of it
    process.kill()
    process.wait(60)


def test_a_note_of_another_user_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: ended.append(pid))
    own = os.getuid()
    (tmp_path / f"plait-{own}-job-0.pid").write_text("11", encoding="utf-8")
    (tmp_path / f"plait-{own + 1}-job-0.pid").write_text("12", encoding="utf-8")
    node.end("job")
    assert ended == [11]
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    node.end("job")
    assert ended == [11]


def test_the_pid_of_a_launcher_is_not_written_through_somebodys_link(tmp_path: Path) -> None:
    link, mine = Path(f"/tmp/{os.getpid()}.ds"), tmp_path / "mine"
    mine.write_text("untouched", encoding="utf-8")
    link.symlink_to(mine)
    with _pid_file(True):
        assert not link.is_symlink()
        assert link.read_text(encoding="utf-8") == str(os.getpid())
    assert not link.exists()
    assert mine.read_text(encoding="utf-8") == "untouched"
