"""Where ranks call the launcher back: anybody on the network can call there too."""

from __future__ import annotations

import json
import socket

import pytest

from plait.launch.controller import Controller
from plait.launch.job import Job, Node

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
