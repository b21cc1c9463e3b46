"""Hosts and slots: the hostfile, and the filters on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.refusals import refused

from plait.errors import WorldError
from plait.launch.hostfile import choose, limit, read_hostfile

POOL = {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1, 2, 3), "fd00::2": (0, 1)}


def read(folder: Path, text: str) -> dict[str, tuple[int, ...]]:
    path = folder / "hosts"
    path.write_text(text)
    return read_hostfile(path)


def test_a_hostfile_has_comments_ipv6_and_slots(tmp_path: Path) -> None:
    text = """
# all of them
// ip gpus
worker-0 slots=2   # the first
me@10.2.180.1\tslots = 1 max_slots=4
[2001:db8::7] slots=2
fe80::1%eth0 slots=1
"""
    expected = {"worker-0": (0, 1), "me@10.2.180.1": (0,), "2001:db8::7": (0, 1), "fe80::1%eth0": (0,)}
    assert read(tmp_path, text) == expected
    assert list(read(tmp_path, text)) == list(expected)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a slots=1\nb\n", ["hosts:2", "'b'", "`b slots=4`"]),
        ("a slots=1\n\nb slots=many\n", ["hosts:3", "slots=many", "`b slots=4`"]),
        ("a slots=0\n", ["hosts:1", "slots=0", "`a slots=4`"]),
        ("a slots=1 b slots=2\n", ["hosts:1", "'a slots=1 b slots=2'"]),
        ("a slots=1\na slots=2\n", ["hosts:2", "'a'"]),
        ("# nobody\n", ["hosts'", "`worker-0 slots=4`"]),
        ("a slots=99999999999\n", ["hosts:1", "slots=99999999999", "65536"]),
        (f"a slots={'9' * 5000}\n", ["hosts:1", f"slots={'9' * 20}"]),
        ("a slots=٣\n", ["hosts:1", "slots=٣"]),
        ("a slots=1\n-oProxyCommand=touch${IFS}ran slots=1\n", ["hosts:2", "'-oProxyCommand="]),
        ("a;id slots=1\n", ["hosts:1", "'a;id'"]),
        ("a,b slots=1\n", ["hosts:1", "'a,b'"]),
    ],
)
def test_a_wrong_line_is_named_by_its_number(tmp_path: Path, text: str, names: list[str]) -> None:
    with refused(WorldError, *names):
        read(tmp_path, text)


def test_a_hostfile_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with refused(WorldError, tmp_path / "absent", "No such file"):
        read_hostfile(tmp_path / "absent")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("worker-0@worker-1:0,2", {"worker-0": (0, 1, 2, 3), "worker-1": (0, 2)}),
        ("worker-1:2,0@worker-0:3", {"worker-0": (3,), "worker-1": (0, 2)}),
        ("worker-1:0@worker-1:3", {"worker-1": (0, 3)}),
        ("[fd00::2]:1", {"fd00::2": (1,)}),
        ("fd00::2", {"fd00::2": (0, 1)}),
    ],
)
def test_include_takes_what_it_names_in_the_order_of_the_hostfile(text: str, expected: object) -> None:
    assert choose(POOL, include=text) == expected


def test_exclude_takes_the_rest() -> None:
    left = choose(POOL, exclude="worker-1:0@fd00::2")
    assert left == {"worker-0": (0, 1, 2, 3), "worker-1": (1, 2, 3)}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"include": "worker-0", "exclude": "worker-1"}, ["--include 'worker-0'", "--exclude 'worker-1'"]),
        ({"include": "worker-9"}, ["--include", "'worker-9'", "'worker-1'"]),
        ({"exclude": "worker-0:7"}, ["'worker-0'", "slot 7", "0,1,2,3"]),
        ({"include": "worker-0:a"}, ["'a'", "'worker-0:a'", "`worker-0:0,2`"]),
        ({"include": "@worker-0"}, ["--include", "`worker-0@worker-1:0,2`"]),
        ({"include": "worker-0:²"}, ["'²'", "`worker-0:0,2`"]),
        ({"include": f"worker-0:{'9' * 5000}"}, ["`worker-0:0,2`"]),
        ({"exclude": "worker-0@worker-1@fd00::2"}, ["--exclude 'worker-0@worker-1@fd00::2'"]),
    ],
)
def test_a_filter_that_cannot_be_is_explained(options: dict[str, str], names: list[str]) -> None:
    with refused(WorldError, *names):
        choose(POOL, **options)


def test_the_user_of_an_entry_is_no_part_of_its_name() -> None:
    assert choose({"me@a": (0, 1)}, include="a:1") == {"me@a": (1,)}


def test_the_first_hosts_and_slots_can_be_taken() -> None:
    assert limit(POOL, hosts=2, slots=1) == {"worker-0": (0,), "worker-1": (0,)}
    assert limit(POOL, hosts=None, slots=None) == POOL
    with refused(WorldError, "--num_nodes 4", "3 hosts"):
        limit(POOL, hosts=4, slots=None)
    with refused(WorldError, "--num_gpus 3", "'fd00::2'", "2 slots"):
        limit(POOL, hosts=None, slots=3)


def test_a_hostfile_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes("主机 slots=4".encode("gbk"))
    with refused(WorldError, path, "byte 0", "iconv"):
        read_hostfile(path)
