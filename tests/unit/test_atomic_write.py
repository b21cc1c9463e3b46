"""A staging is gone in the end, however its writer ended, and nobody disturbs one that is being written."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from plait.atomic_write import staging_path, write_atomically


def _write(target: Path, ready: Any, go_on: Any, *, folder: bool) -> None:
    with staging_path(target) as staging:
        if folder:
            staging.mkdir()
        (staging / "part" if folder else staging).write_text("half")
        ready.set()
        go_on.wait(60)
        staging.rename(target)


def _started(context: Any, target: Path, go_on: Any, *, folder: bool) -> Any:
    ready = context.Event()
    process = context.Process(target=_write, args=(target, ready, go_on), kwargs={"folder": folder}, daemon=True)
    process.start()
    assert ready.wait(60)
    return process


@pytest.mark.parametrize("folder", [False, True])
def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_of_one_at_work(
    tmp_path: Path, folder: bool
) -> None:
    context = multiprocessing.get_context("fork")
    go_on = context.Event()
    killed, alive = (
        # A mark that the dead wait for cannot be set: it is waited for that they wake up.
        _started(context, tmp_path / name, context.Event() if name == "killed" else go_on, folder=folder)
        for name in ("killed", "alive")
    )
    killed.kill()
    killed.join()
    assert len(list(tmp_path.iterdir())) == 2
    with staging_path(tmp_path / "third") as staging:
        names = [path.name for path in tmp_path.iterdir()]
        assert len(names) == 2
        assert not any("killed" in name for name in names)
        staging.write_text("whole")
        staging.rename(tmp_path / "third")
    go_on.set()
    alive.join(60)
    assert alive.exitcode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"alive", "third"}


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with staging_path(tmp_path / "new" / "target") as staging:
            staging.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list((tmp_path / "new").iterdir()) == []


def test_hidden_files_and_folders_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / ".others.tmp").mkdir()
    (tmp_path / f".corpus.bin.{'0' * 32}.tmp").write_text("a file that is being written")
    before = set(tmp_path.iterdir())
    with staging_path(tmp_path / "target"):
        pass
    assert set(tmp_path.iterdir()) == before


def test_a_file_keeps_its_old_contents_where_the_new_ones_cannot_be_written(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    write_atomically(target, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(target, "new \ud800")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
