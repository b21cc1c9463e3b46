"""What a checkpoint on disk promises: whole or not at all, and never wrong in silence."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.refusals import refused
from torch import Tensor

from plait.checkpoint import (
    CheckpointFolder,
    Manifest,
    load_into,
    open_checkpoint,
    read_manifest,
    save_checkpoint,
    verify,
)
from plait.config import parse_sections
from plait.distributed import World, open_world
from plait.errors import CheckpointError


@pytest.fixture
def world() -> World:
    return open_world(parse_sections(device="cpu").config)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {
        "model.weight": torch.randn(6, 5),
        "model.half": torch.randn(3).bfloat16(),
        "optim.weight.step": torch.tensor(float(random.randint(1, 99))),
        "rng.0.torch": torch.get_rng_state(),
    }


@pytest.fixture
def saved(tmp_path: Path, world: World, tensors: dict[str, Tensor]) -> Path:
    target = tmp_path / "checkpoints" / "step-00000007"
    state = {"epoch": 2, "nan": float("nan"), "nested": {"list": [1, 2.5, None], 3: "three"}}
    save_checkpoint(target, tensors, state, step=7, world=world)
    return target


def empty(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def flip(path: Path, position: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content)) if position is None else position] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def test_what_was_saved_is_loaded_to_the_bit(saved: Path, world: World, tensors: dict[str, Tensor]) -> None:
    checkpoint = open_checkpoint(saved)
    manifest = checkpoint.manifest
    found = empty(tensors)
    verify(checkpoint, world=world)
    load_into(checkpoint, found, world=world)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert manifest.step == 7
    assert manifest.state["nested"] == {"list": [1, 2.5, None], "3": "three"}
    assert manifest.versions["torch"] == torch.__version__
    half = checkpoint.index.tensors["model.half"]
    assert (half.shape, half.dtype, len(half.pieces)) == ((3,), torch.bfloat16, 1)


def test_one_process_saves_and_loads_without_a_warning(
    tmp_path: Path, world: World, tensors: dict[str, Tensor]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_checkpoint(tmp_path / "step-1", tensors, {}, step=1, world=world)
        load_into(open_checkpoint(tmp_path / "step-1"), empty(tensors), world=world)


def test_nothing_but_the_checkpoint_is_left_behind(saved: Path) -> None:
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    files = {path.name for path in saved.iterdir()}
    assert files == {*read_manifest(saved).files, "manifest.json"}


@pytest.mark.parametrize("victim", ["rank-00000.safetensors", "index.json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_file_is_named(saved: Path, world: World, victim: str, damage: str) -> None:
    path = saved / victim
    if damage == "flipped":
        flip(path)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    with refused(CheckpointError, path):
        verify(open_checkpoint(saved), world=world)


def test_a_manifest_with_any_bit_flipped_is_refused_or_says_the_same(saved: Path, world: World) -> None:
    path = saved / "manifest.json"
    whole, content = repr(read_manifest(saved)), path.read_bytes()
    for position in random.sample(range(len(content)), 150):
        flip(path, position)
        try:
            assert repr(read_manifest(saved)) == whole, position  # the byte was a space between values
        except CheckpointError as error:
            assert "manifest.json" in str(error)  # noqa: PT017
        path.write_bytes(content)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}'])
def test_a_manifest_that_is_something_else_is_refused(saved: Path, text: str) -> None:
    (saved / "manifest.json").write_text(text)
    with refused(CheckpointError, saved / "manifest.json"):
        read_manifest(saved)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with refused(CheckpointError, tmp_path / "nowhere"):
        read_manifest(tmp_path / "nowhere")
    with refused(CheckpointError, tmp_path, "manifest.json"):
        read_manifest(tmp_path)


def test_misfits_stand_in_one_table_that_fits_on_a_screen(
    saved: Path, world: World, tensors: dict[str, Tensor]
) -> None:
    wanted = empty(tensors)
    wanted["model.weight"] = torch.zeros(6, 4)
    wanted["model.added"] = torch.zeros(2)
    del wanted["model.half"]
    with pytest.raises(CheckpointError) as caught:
        load_into(open_checkpoint(saved), wanted, world=world)
    head, columns, *rows, advice = str(caught.value).splitlines()
    assert "checkpoint.partial" in advice
    assert str(saved) in head
    assert columns.index("checkpoint") < columns.index("model")
    assert [" ".join(row.split()) for row in rows] == [
        "model.added - (2,)",
        "model.half (3,) -",
        "model.weight (6, 5) (6, 4)",
    ]
    many = {f"model.{i}": torch.zeros(1) for i in range(100)}
    with refused(CheckpointError, saved) as caught:
        load_into(open_checkpoint(saved), many, world=world)
    _, _, *rows, more, _ = lines = str(caught.value).splitlines()
    assert len(lines) <= 24
    assert str(sum(name.startswith("model.") for name in {*many, *tensors}) - len(rows)) in more


def test_entries_that_may_be_left_out_are_no_misfit(saved: Path, world: World, tensors: dict[str, Tensor]) -> None:
    wanted = {name: tensor for name, tensor in empty(tensors).items() if name.startswith("model.")}
    load_into(open_checkpoint(saved), wanted, world=world, ignore=("optim.", "rng."))
    with refused(CheckpointError, saved, "rng.0.torch", "checkpoint.partial"):
        load_into(open_checkpoint(saved), wanted, world=world, ignore=("optim.",))


# ---- when saving fails


def full_save(target: Path, world: World) -> None:
    save_checkpoint(target, {"model.big": torch.randn(1 << 20)}, {}, step=8, world=world)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs rights that are not here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_told_and_the_old_checkpoint_stays(
    small_disk: Path, world: World, tensors: dict[str, Tensor]
) -> None:
    folder = CheckpointFolder(small_disk)
    save_checkpoint(folder.path_of(7), tensors, {}, step=7, world=world)
    with refused(CheckpointError, folder.path_of(8), "4.0 MiB"):
        full_save(folder.path_of(8), world)
    assert [path.name for path in small_disk.iterdir()] == ["step-00000007"]  # what was half written is gone
    verify(open_checkpoint(folder.path_of(7)), world=world)
    save_checkpoint(folder.path_of(9), tensors, {}, step=9, world=world)  # and there is room again


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, world: World) -> None:
    (tmp_path / "file").write_text("in the way")
    target = tmp_path / "file" / "step-00000008"
    with refused(CheckpointError, target, "NotADirectoryError"):
        full_save(target, world)


def test_a_read_only_folder_is_told_and_the_old_checkpoint_stays(
    small_disk: Path, world: World, tensors: dict[str, Tensor]
) -> None:
    folder = CheckpointFolder(small_disk)
    save_checkpoint(folder.path_of(7), tensors, {}, step=7, world=world)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with refused(CheckpointError, folder.path_of(8), os.strerror(errno.EROFS)):
        save_checkpoint(folder.path_of(8), tensors, {}, step=8, world=world)
    verify(open_checkpoint(folder.path_of(7)), world=world)


def test_state_that_json_cannot_hold_is_told_and_nothing_is_left(saved: Path, world: World) -> None:
    target = saved.with_name("step-00000008")
    with refused(CheckpointError, target, "TypeError", "JSON"):
        save_checkpoint(target, {"model.x": torch.zeros(1)}, {"odd": object()}, step=8, world=world)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


# ---- the folder of a run


def place(root: Path, step: int, saved_at: float, *, complete: bool = True) -> Path:
    path = CheckpointFolder(root).path_of(step)
    path.mkdir(parents=True)
    (path / "rank-00000.safetensors").write_text("data")
    if complete:
        Manifest(step, 1, {}, {}, {}, saved_at).write(path)
    return path


def test_of_two_checkpoints_the_one_saved_later_is_the_newer(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step, when in ((3, 10.0), (9, 20.0), (6, 30.0)):
        place(tmp_path, step, when)
    assert [path.name[-1] for path in folder.complete()] == ["3", "9", "6"]
    folder.prune(2)
    assert [path.name[-1] for path in folder.complete()] == ["9", "6"]


def test_a_checkpoint_that_may_not_be_looked_into_is_named_and_none_is_taken_in_its_place(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(saved.parent, 5, 1.0)
    looks = Path.exists

    def exists(path: Path) -> bool:  # as Python has it for a folder of another user; root may look into all
        if path.parent == saved:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return looks(path)

    monkeypatch.setattr(Path, "exists", exists)
    folder = CheckpointFolder(saved.parent)
    for look in (folder.newest, folder.sweep, lambda: folder.find(str(saved)), lambda: read_manifest(saved)):
        with refused(CheckpointError, saved, os.strerror(errno.EACCES)):
            look()


def test_a_clock_that_was_set_back_makes_no_new_checkpoint_an_old_one(
    tmp_path: Path, world: World, tensors: dict[str, Tensor]
) -> None:
    folder = CheckpointFolder(tmp_path)
    place(tmp_path, 3, 5e9)  # by the clock of another host
    for step in (6, 9):
        save_checkpoint(folder.path_of(step), tensors, {}, step=step, world=world)
    assert [path.name[-1] for path in folder.complete()] == ["3", "6", "9"]
    folder.prune(1)
    assert folder.newest() == folder.path_of(9)


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "rank-00000.safetensors"])
def test_a_file_that_cannot_be_read_is_named_and_the_one_before_is_offered(
    saved: Path, world: World, tensors: dict[str, Tensor], name: str
) -> None:
    before = place(saved.parent, 5, 1.0)
    (saved / name).unlink()
    (saved / name).mkdir()  # root may read whatever is forbidden, but no folder
    assert CheckpointFolder(saved.parent).newest() == saved
    with refused(CheckpointError, saved / name, os.strerror(errno.EISDIR), before):
        load_into(open_checkpoint(saved), empty(tensors), world=world)


def test_an_unfinished_folder_is_no_checkpoint_and_is_swept_away(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    good = place(tmp_path, 3, 1.0)
    place(tmp_path, 5, 2.0, complete=False)
    (tmp_path / ".step-00000006.tmp").mkdir()
    (tmp_path / "notes.txt").write_text("the user's own")
    (tmp_path / "step-by-step").mkdir()
    assert folder.newest() == good
    folder.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-00000003", "step-by-step"]


def test_a_checkpoint_that_had_stepped_aside_comes_back(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    aside = place(tmp_path, 3, 1.0).rename(tmp_path / ".step-00000003.old.tmp")
    (tmp_path / ".step-00000003.tmp").mkdir()
    folder.sweep()
    assert folder.newest() == folder.path_of(3)
    assert not aside.exists()
    place(tmp_path, 4, 2.0).rename(tmp_path / ".step-00000004.old.tmp")
    place(tmp_path, 4, 3.0)  # the new one has its name already
    folder.sweep()
    assert json.loads((folder.path_of(4) / "manifest.json").read_text())["saved_at"] == 3.0


def test_links_are_replaced_in_one_step_and_the_best_one_survives_pruning(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in range(1, 6):
        path = place(tmp_path, step, float(step))
        folder.link("latest", path)
        if step == 2:
            folder.link("best", path)
        folder.prune(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "latest", "step-00000002", "step-00000005"]
    assert (tmp_path / "latest").resolve().name == "step-00000005"
    assert folder.newest() == folder.path_of(5)


def test_milestones_are_never_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in range(1, 10):
        place(tmp_path, step, float(step))
        folder.prune(2, keep_every=3)
    assert [int(path.name[-1]) for path in folder.complete()] == [3, 6, 8, 9]


def test_of_a_damaged_checkpoint_the_one_before_it_is_offered(saved: Path, world: World) -> None:
    for step in (8, 9):
        save_checkpoint(saved.with_name(f"step-{step:08d}"), {"model.x": torch.zeros(3)}, {}, step=step, world=world)
    damaged = saved.with_name("step-00000008")
    flip(damaged / "rank-00000.safetensors", -1)
    with refused(CheckpointError, damaged / "rank-00000.safetensors", f"checkpoint.resume: {saved}`"):
        verify(open_checkpoint(damaged), world=world)
    with refused(CheckpointError, damaged / "rank-00000.safetensors", f"checkpoint.resume: {saved}`"):
        load_into(open_checkpoint(damaged), {"model.x": torch.ones(3)}, world=world)


def test_a_place_is_a_checkpoint_a_link_a_folder_of_them_or_a_run(tmp_path: Path) -> None:
    path = place(tmp_path / "checkpoints", 3, 1.0)
    CheckpointFolder(path.parent).link("latest", path)
    elsewhere = CheckpointFolder(tmp_path / "elsewhere")
    for wanted in (path, path.parent / "latest", path.parent, tmp_path):
        assert elsewhere.find(str(wanted)) == path
    assert elsewhere.find("auto") is None
    with refused(CheckpointError, tmp_path / "nowhere", "manifest.json", "work_dir"):
        elsewhere.find(str(tmp_path / "nowhere"))
