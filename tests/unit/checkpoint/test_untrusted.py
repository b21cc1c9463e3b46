"""A checkpoint whose digests are all valid, and which is malformed all the same: refused, never loaded otherwise."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import refused
from tests.unit.checkpoint.samples import reseal, two_ranks_tensors, write_as_two_ranks
from torch import Tensor

from plait.checkpoint import load_into, open_checkpoint
from plait.checkpoint.convert.plait import PlaitSource
from plait.checkpoint.load import verify
from plait.config import parse
from plait.distributed import World, open_world
from plait.errors import CheckpointError


@pytest.fixture(scope="module")
def world() -> World:
    return open_world(parse({}).config)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return two_ranks_tensors()


@pytest.fixture
def saved(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    return write_as_two_ranks(tmp_path / "step-00000007", tensors)


def load(folder: Path, tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    found = {name: torch.full_like(tensor, 9.0) for name, tensor in tensors.items()}
    load_into(open_checkpoint(folder), found, world=world)
    return found


def test_the_sample_is_loaded_to_the_bit(saved: Path, tensors: dict[str, Tensor], world: World) -> None:
    for name, tensor in load(saved, tensors, world).items():
        assert torch.equal(tensor, tensors[name])
    verify(open_checkpoint(saved))


def pieces_of(index: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = index["tensors"][name]["pieces"]
    return found


def exchange(index: dict[str, Any], key: str) -> None:
    """Two pieces of one tensor in each other's place; their bytes and digests stay valid."""
    first, second = pieces_of(index, "model.a")
    first[key], second[key] = second[key], first[key]


def same_bytes(index: dict[str, Any]) -> None:
    """One tensor reads the bytes of another."""
    for mine, other in zip(pieces_of(index, "model.a"), pieces_of(index, "model.b"), strict=False):
        mine.update({key: other[key] for key in ("file", "begin")})


def other_name(index: dict[str, Any]) -> None:
    tensors = index["tensors"]
    tensors["model.a"], tensors["model.b"] = tensors["model.b"], tensors["model.a"]


def edit(name: str, number: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda index: pieces_of(index, name)[number].update(fields)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param(edit("model.a", 1, start=[0, 0]), "model.a", id="overlap"),
        pytest.param(edit("model.a", 1, start=[1, 0]), "model.a", id="overlap and hole"),
        pytest.param(edit("model.b", 3, start=[2, 0]), "model.b", id="the same piece twice"),
        pytest.param(edit("model.a", 1, start=[3, 0]), "model.a", id="out of bounds"),
        pytest.param(edit("model.a", 1, start=[-2, 0]), "model.a", id="before the beginning"),
        pytest.param(edit("model.a", 1, start=[2]), "model.a", id="a dimension less"),
        pytest.param(edit("model.a", 1, shape=[1, 12]), "model.a", id="another shape of the same size"),
        pytest.param(edit("model.a", 1, digests=[]), "model.a", id="no digests"),
        pytest.param(edit("model.a", 1, digests=[7]), "model.a", id="a digest that is a number"),
        pytest.param(edit("model.a", 1, begin=1 << 40), "model.a", id="behind the end of the file"),
        pytest.param(edit("model.a", 1, begin=-1), "model.a", id="before the file"),
        pytest.param(edit("model.a", 1, begin=True), "model.a", id="true is no byte"),
        pytest.param(edit("model.a", 1, file="rank-00009.safetensors"), "rank-00009", id="a file that is not listed"),
        pytest.param(edit("model.a", 1, file="../step-1/x.safetensors"), "../step-1/x", id="another folder's file"),
        pytest.param(edit("model.a", 1, file="index.json"), "index.json", id="the index itself"),
        pytest.param(lambda index: pieces_of(index, "model.a").pop(), "model.a", id="a piece less"),
        pytest.param(lambda index: pieces_of(index, "model.a").clear(), "model.a", id="no pieces"),
        pytest.param(lambda index: exchange(index, "start"), "model.a", id="exchanged places"),
        pytest.param(same_bytes, "model.a", id="the bytes of another tensor"),
        pytest.param(other_name, "model.a", id="exchanged names"),
        pytest.param(lambda i: i["tensors"]["model.a"].update(dtype="int32"), "model.a", id="another dtype"),
        pytest.param(lambda i: i["tensors"]["model.a"].update(dtype="load"), "model.a", id="a word of torch's"),
        pytest.param(lambda i: i["tensors"]["model.a"].update(shape=[2, 6]), "model.a", id="a smaller whole"),
        pytest.param(lambda i: i["tensors"]["model.a"].update(shape=[6, 4]), "model.a", id="a turned whole"),
        pytest.param(lambda i: i["tensors"]["model.a"].update(shape=[2**70, 0]), "model.a", id="no memory's shape"),
        pytest.param(lambda i: i["tensors"].update({"model.a": None}), "model.a", id="no record"),
        pytest.param(lambda i: i.update(tensors=[]), "tensors", id="no mapping"),
    ],
)
def test_an_index_that_does_not_fit_together_is_refused(
    saved: Path, tensors: dict[str, Tensor], world: World, change: Callable[[dict[str, Any]], None], told: str
) -> None:
    reseal(saved, change)
    for read in (lambda: load(saved, tensors, world), lambda: read_all(saved), lambda: look(saved)):
        with refused(CheckpointError, saved, told):
            read()


def read_all(folder: Path) -> None:
    with PlaitSource(folder) as source:
        for name in source.entries:
            source.read(name)


def look(folder: Path) -> None:
    verify(open_checkpoint(folder))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hostname", "a/b", "..", "", "a\\b", "x\0"])
def test_a_manifest_that_names_files_elsewhere_is_refused(saved: Path, name: str) -> None:
    reseal(saved, manifest=lambda manifest: manifest["files"].update({name: {"bytes": 1, "digest": ""}}))
    with refused(CheckpointError, saved / "manifest.json", repr(name)):
        open_checkpoint(saved)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"step": -1}, "step -1"),
        ({"step": "7"}, "'7'"),
        ({"world_size": 0}, "world_size 0"),
        ({"saved_at": float("nan")}, "saved_at nan"),
        ({"state": []}, "[]"),
        ({"state": {"hooks": []}}, "state.hooks"),
        ({"state": {"engine": 3}}, "state.engine"),
        ({"versions": 1}, "versions"),
        ({"files": {}}, "index.json"),
        ({"files": {"index.json": {"bytes": -1, "digest": ""}}}, "'index.json'"),
        ({"files": {"index.json": {"bytes": 1}}}, "'digest'"),
        ({"unknown": 1}, "'unknown'"),
    ],
    ids=repr,
)
def test_a_manifest_with_a_field_that_is_not_what_it_should_be_is_refused(
    saved: Path, change: dict[str, Any], named: str
) -> None:
    reseal(saved, manifest=lambda manifest: manifest.update(change))
    with refused(CheckpointError, saved / "manifest.json", named):
        open_checkpoint(saved)


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "index.json", "manifest.json"])
def test_a_file_that_is_a_link_out_of_the_folder_is_refused(
    saved: Path, tensors: dict[str, Tensor], world: World, name: str
) -> None:
    outside = saved.parent / "outside"
    shutil.move(saved / name, outside)
    (saved / name).symlink_to(outside)
    for read in (lambda: load(saved, tensors, world), lambda: read_all(saved), lambda: look(saved)):
        with refused(CheckpointError, saved / name, " link "):
            read()


def test_a_file_that_is_a_pipe_is_not_waited_for(saved: Path, tensors: dict[str, Tensor], world: World) -> None:
    name = "rank-00001.safetensors"
    (saved / name).unlink()
    os.mkfifo(saved / name)
    with refused(CheckpointError, saved / name):
        load(saved, tensors, world)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"tensors": {"a": ' + "[" * 100_000, "\\ud800", '"\\ud800"'])
@pytest.mark.parametrize("name", ["manifest.json", "index.json"])
def test_json_that_ends_in_a_traceback_elsewhere_is_refused(saved: Path, name: str, text: str) -> None:
    if name == "manifest.json":
        (saved / name).write_text(text)
    else:
        reseal(saved, text=text)
    with refused(CheckpointError, saved / name):
        open_checkpoint(saved)


def test_many_pieces_that_overlap_are_refused_in_little_time(saved: Path) -> None:
    reseal(saved, lambda index: index["tensors"]["model.a"].update(shape=[40_000, 1], pieces=overlapping(20_000)))
    with refused(CheckpointError, saved / "index.json", "model.a"):
        open_checkpoint(saved)


def overlapping(count: int) -> list[dict[str, Any]]:
    """As many elements as the whole has, and each piece over all others."""
    shape = {"begin": 0, "digests": ["0"], "file": "rank-00000.safetensors"}
    return [{**shape, "start": [2 * (at // 2), 0], "shape": [2, 1]} for at in range(count)]
