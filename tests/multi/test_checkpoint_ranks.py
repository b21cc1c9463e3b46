"""Checkpoints written and read by several ranks together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait.checkpoint import load_into, open_checkpoint, save_checkpoint, verify
from plait.config import parse_sections
from plait.distributed import open_world
from plait.errors import CheckpointError
from tests.multi.ranks import RankPool


def save(rank: int, size: int, target: str, extra: int = 0) -> str:
    world = open_world(parse_sections(device="cpu").config)
    tensors = {"model.shared": torch.arange(5.0), f"rng.{rank}.own": torch.full((3,), float(rank + extra))}
    try:
        return str(save_checkpoint(Path(target), tensors, {"note": "x"}, step=1, world=world))
    except CheckpointError as error:
        return str(error)


def load(rank: int, size: int, target: str) -> list[float] | str:
    world = open_world(parse_sections(device="cpu").config)
    checkpoint = open_checkpoint(Path(target))
    own = torch.zeros(3)
    try:
        verify(checkpoint, world=world)
        load_into(checkpoint, {f"rng.{rank}.own": own}, world=world, ignore=("model.", "rng."))
    except CheckpointError as error:
        return str(error)
    return own.tolist()


def test_the_manifest_knows_the_tensors_of_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    target = tmp_path / "step-00000001"
    sizes = two_ranks.run(save, str(target))
    assert sizes[0] == sizes[1]
    assert sorted(open_checkpoint(target).index.tensors) == ["model.shared", "rng.0.own", "rng.1.own"]
    assert two_ranks.run(load, str(target)) == [[0.0] * 3, [1.0] * 3]


def test_damage_that_one_rank_finds_is_raised_on_all(two_ranks: RankPool, tmp_path: Path) -> None:
    target = tmp_path / "step-00000001"
    two_ranks.run(save, str(target))
    victim = sorted(target.glob("rank-00001*"))[0]
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    first, second = two_ranks.run(load, str(target))
    assert first == second
    assert victim.name in first
    assert "checksum" in first


def test_a_save_that_fails_fails_on_every_rank_and_leaves_the_old_one(two_ranks: RankPool, tmp_path: Path) -> None:
    target = tmp_path / "step-00000001"
    two_ranks.run(save, str(target))
    (tmp_path / "file").write_text("")
    first, second = two_ranks.run(save, str(tmp_path / "file" / "step-00000002"))
    assert first == second
    assert str(tmp_path / "file" / "step-00000002") in first
    assert two_ranks.run(load, str(target)) == [[0.0] * 3, [1.0] * 3]


def test_the_same_step_saved_again_replaces_the_old_one(two_ranks: RankPool, tmp_path: Path) -> None:
    target = tmp_path / "step-00000001"
    two_ranks.run(save, str(target))
    two_ranks.run(save, str(target), 5)
    assert two_ranks.run(load, str(target)) == [[5.0] * 3, [6.0] * 3]
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_fewer_ranks_read_what_more_ranks_wrote(four_ranks: RankPool, two_ranks: RankPool, tmp_path: Path) -> None:
    target = tmp_path / "step-00000001"
    four_ranks.run(save, str(target))
    assert two_ranks.run(load, str(target)) == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("leftover", ["rank-00009.safetensors", "garbage"])
def test_files_of_an_interrupted_save_do_not_get_into_the_next(
    two_ranks: RankPool, tmp_path: Path, leftover: str
) -> None:
    staging = tmp_path / ".step-00000001.tmp"
    staging.mkdir()
    (staging / leftover).write_text("left behind")
    two_ranks.run(save, str(tmp_path / "step-00000001"))
    assert not (tmp_path / "step-00000001" / leftover).exists()
