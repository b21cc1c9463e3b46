"""Where ranks call the launcher back: anybody on the network can call there too."""

from __future__ import annotations

import json
import socket
from dataclasses import replace

import pytest

from plait.launch.controller import Controller
from plait.launch.heartbeat import Beat, Phase
from plait.launch.job import Job, Node
from plait.launch.records import RankObservation, record_end

JOB = Job(("python", "t.py"), (Node("localhost", (0,)),))


def say(controller: Controller, text: bytes) -> None:
    host, port, _ = controller.job.contact.split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(text)
        for _ in range(4):
            controller.poll(0.05)


@pytest.mark.parametrize(
    "text",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"3\n",
        b"[" * 100_000 + b"\n",
        b'{"password": "\\u00e9"}\n',
        b'{"password": "\\ud800"}\n',
        b'{"rank": 0}\n',
    ],
)
def test_a_stranger_who_says_anything_is_hung_up_on(text: bytes) -> None:
    with Controller(JOB) as controller:
        say(controller, text)
        assert not controller.connected
        host, port, password = controller.job.contact.split(":")
        with socket.create_connection((host, int(port))) as line:
            line.sendall(json.dumps({"password": password}).encode() + b"\n")
            for _ in range(4):
                controller.poll(0.05)
            assert controller.connected


def test_a_rank_whose_end_was_not_told_is_still_the_one_that_the_others_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As mpirun ends on a busy machine: the rank that slept was killed, and its last words never came."""
    with Controller(Job(("python", "t.py"), (Node("localhost", (0, 1)),))) as controller:
        waits, sleeps = controller.records
        at_work = Beat(pid=7, timeout_s=45.0, phase=Phase.FORWARD, step=6, since=1.0)
        sleeps.observation = RankObservation(beat=at_work)
        waits.observation = RankObservation(beat=replace(at_work, collective="all_reduce of 3", pending=True))
        record_end(waits, -15, by_us=True)
        controller.hung = True
        assert controller.report_end(1) == 1
    page = capsys.readouterr().err
    assert "rank 1 did not come to all_reduce" in page, page
    assert "rank 0: was ended" in page, page
