"""A conversion leaves all of its target or nothing."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.refusals import refused
from tests.unit.checkpoint.samples import some_state, write_hf, write_plait
from torch import Tensor

from plait.checkpoint.convert.conversion import convert
from plait.checkpoint.convert.detect import open_source
from plait.checkpoint.convert.huggingface import Description
from plait.checkpoint.convert.source import ProgressSource, Source
from plait.errors import CheckpointError

TARGETS = ["hf", "torch", "plait", "deepspeed"]


class Failing(ProgressSource):
    """A source whose third tensor cannot be read."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, lambda _: None)
        self.reads = 0

    def read(self, name: str) -> Tensor:
        self.reads += 1
        if self.reads == 3:
            raise KeyboardInterrupt
        return super().read(name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_plait(tmp_path / "from", some_state())


def run(path: Path, target: Path, to: str, *, overwrite: bool = False) -> None:
    with open_source(path) as source:
        convert(source, target, to, description=Description({}), overwrite=overwrite)  # type: ignore[arg-type]


def files(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*")}


@pytest.mark.parametrize("to", TARGETS)
def test_a_failure_leaves_nothing_and_what_was_there_as_it_was(tmp_path: Path, path: Path, to: str) -> None:
    before = files(tmp_path)
    for overwrite in (False, True):
        with open_source(path) as source, pytest.raises(KeyboardInterrupt):
            convert(Failing(source), tmp_path / "to", to, description=Description({}), overwrite=overwrite)  # type: ignore[arg-type]
        assert files(tmp_path) == before
        if not overwrite:
            run(path, tmp_path / "to", "hf")
            before = files(tmp_path)


@pytest.mark.parametrize("to", TARGETS)
def test_an_existing_target_is_refused_unless_it_may_be_replaced(tmp_path: Path, path: Path, to: str) -> None:
    target = tmp_path / "to"
    run(path, target, "torch")
    old = target.read_bytes()
    with refused(CheckpointError, target, "--overwrite"):
        run(path, target, to)
    assert target.read_bytes() == old
    run(path, target, to, overwrite=True)
    run(path, target, to, overwrite=True)
    with open_source(target) as made:
        assert made.kind == to
    assert {each.name for each in tmp_path.iterdir()} == {"from", "to"}


@pytest.mark.parametrize("at", ["before", "after"])
def test_a_kill_while_one_takes_the_place_of_another_loses_neither(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    target, aside = tmp_path / "to", tmp_path / ".to.replaced"
    run(path, target, "hf")
    if at == "before":  # the new one had no name yet
        target.rename(aside)
    else:
        shutil.copytree(target, aside)
    with refused(CheckpointError, target, "--overwrite"):
        run(path, target, "hf")
    assert files(target)
    assert not aside.exists()

    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    real = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: fail() if Path(b) == target else real(a, b))
    with pytest.raises(KeyboardInterrupt):
        run(path, target, "plait", overwrite=True)
    with open_source(target) as kept:
        assert kept.kind == "hf"
    assert {each.name for each in tmp_path.iterdir()} == {"from", "to"}


def test_what_is_neither_file_nor_folder_is_never_replaced(tmp_path: Path, path: Path) -> None:
    pipe = tmp_path / "pipe"  # or /dev/null, which root could lose
    os.mkfifo(pipe)
    with refused(CheckpointError, pipe):
        run(path, pipe, "torch", overwrite=True)
    assert pipe.is_fifo()


def test_a_folder_of_other_things_is_never_replaced(tmp_path: Path, path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("years of work")
    with refused(CheckpointError, tmp_path / "home"):
        run(path, tmp_path / "home", "hf", overwrite=True)
    assert (tmp_path / "home/thesis.tex").exists()


def test_a_folder_that_holds_the_source_is_never_replaced(tmp_path: Path) -> None:
    outer = write_hf(tmp_path / "outer", some_state())
    inner = write_plait(outer / "inner", some_state())
    with refused(CheckpointError, outer, inner):
        run(inner, outer, "hf", overwrite=True)
    assert inner.exists()


def test_a_checkpoint_may_be_replaced_by_another_form_of_itself(tmp_path: Path, path: Path) -> None:
    run(path, path, "hf", overwrite=True)
    with open_source(path) as source:
        assert source.kind == "hf"


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**20, 2**20 - 100, 100))
    with refused(CheckpointError, tmp_path / "to", "100 B"):
        run(path, tmp_path / "to", "hf")
    assert {each.name for each in tmp_path.iterdir()} == {"from"}


def test_a_target_that_cannot_be_made_is_an_error_in_plain_words(tmp_path: Path, path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(CheckpointError, tmp_path / "file" / "to", os.strerror(errno.EEXIST)):
        run(path, tmp_path / "file" / "to", "torch")


def test_an_empty_checkpoint_is_nothing_to_convert(tmp_path: Path) -> None:
    from plait.checkpoint.convert.conversion import select_for

    write_plait(tmp_path / "from", {"rng.0.torch": torch.zeros(3)})
    with open_source(tmp_path / "from") as source, refused(CheckpointError, tmp_path / "from"):
        select_for(source, "hf", optimizer=False)
