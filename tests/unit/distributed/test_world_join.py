"""Joining the other ranks: what can go wrong has a name."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch.distributed as dist
from tests.refusals import missing, refused

from plait.config import parse_sections
from plait.distributed import open_world
from plait.distributed.ranks import detect_ranks
from plait.errors import ConfigError, WorldError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment as of rank 0 of 2, without a port."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    return monkeypatch


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_port_in_use_is_named(launched: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launched.setenv("MASTER_PORT", str(port))
        with refused(WorldError, f"port {port}", "127.0.0.1", "MASTER_PORT"):
            open_world(parse_sections(timeout_s=5.0, device="cpu").config)
    assert not dist.is_initialized()


def test_rank_0_says_so_when_nobody_comes(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("MASTER_PORT", str(free_port()))
    with refused(WorldError, "rank 0 of 2", "127.0.0.1:"):
        open_world(parse_sections(timeout_s=1.0, device="cpu").config)
    assert not dist.is_initialized()


def test_a_rank_that_cannot_reach_rank_0_names_itself_and_the_address(launched: pytest.MonkeyPatch) -> None:
    port = free_port()
    launched.setenv("RANK", "1")
    launched.setenv("MASTER_PORT", str(port))
    with refused(WorldError, "rank 1 of 2", f"127.0.0.1:{port}", "refused", " 1 s"):
        open_world(parse_sections(timeout_s=1.0, device="cpu").config)


def test_a_name_without_an_address_is_told_with_both(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("RANK", "1")
    launched.setenv("MASTER_ADDR", "no-such-host.invalid")
    launched.setenv("MASTER_PORT", "29511")
    with refused(WorldError, "rank 1 of 2", "no-such-host.invalid:29511", "MASTER_ADDR"):
        open_world(parse_sections(timeout_s=1.0, device="cpu").config)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_port_that_nobody_can_join_is_refused_at_once(launched: pytest.MonkeyPatch, rank: str) -> None:
    launched.setenv("RANK", rank)
    launched.setenv("MASTER_PORT", "0")
    with refused(WorldError, "MASTER_PORT", "0", "65535", "--standalone"):
        open_world(parse_sections(device="cpu").config)


def test_a_rank_that_waits_for_rank_0_says_so(launched: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    launched.setenv("RANK", "1")
    launched.setenv("MASTER_PORT", str(port))
    launched.setattr("plait.distributed.world._REPORT_S", 0.2)
    with pytest.raises(WorldError):
        open_world(parse_sections(timeout_s=1.0, device="cpu").config)
    assert not missing(capsys.readouterr().err, "rank 1", "rank 0", f"127.0.0.1:{port}", "Connection refused")


def test_a_layout_that_does_not_fit_is_refused_before_joining(launched: pytest.MonkeyPatch) -> None:
    # No port is open, so an attempt to join would be a WorldError after the timeout.
    launched.setenv("MASTER_PORT", str(free_port()))
    with refused(ConfigError, "2 ranks"):
        open_world(parse_sections(strategy="single", timeout_s=1.0, device="cpu").config)


def test_one_process_joins_nobody() -> None:
    with open_world(parse_sections(device="cpu").config) as world:
        assert (world.rank, world.size, world.is_main, world.mesh, world.everyone) == (0, 1, True, None, None)
        assert world.gather("x") == ["x"]
        assert world.broadcast("x") == "x"
        assert world.any(True) is True
        assert world.any(False) is False
        world.barrier()
    assert not dist.is_initialized()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_two_ranks_join_talk_and_part(address: str) -> None:
    if address == "::1" and not _has_ipv6():
        pytest.skip("no IPv6 here")
    script = """
import torch.distributed as dist
from plait.config import parse_sections
from plait.distributed import open_world
with open_world(parse_sections(device="cpu", timeout_s=60.0).config) as world:
    print(world.gather(world.rank), world.broadcast(f"from {world.rank}"), world.any(world.rank == 1), world.is_main)
print(dist.is_initialized())
"""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "PATH": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = [process.communicate(timeout=90) for process in processes]
    assert [p.returncode for p in processes] == [0, 0], answers
    assert answers[0][0].splitlines() == ["[0, 1] from 0 True True", "False"]
    assert answers[1][0].splitlines() == ["[0, 1] from 0 True False", "False"]


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            return True
    except OSError:
        return False


def test_a_group_that_the_caller_began_is_used_and_left_alone(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("WORLD_SIZE", "1")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        with open_world(parse_sections(device="cpu").config) as world:
            assert world.ranks.launcher == "caller"
            assert detect_ranks().size == 1
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
