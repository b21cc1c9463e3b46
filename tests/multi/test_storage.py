"""`checkpoint.storage`: copies elsewhere, complete or not there, and runs that go on from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from plait.checkpoint import CheckpointFolder, build_storage
from plait.config import parse_sections
from plait.errors import CheckpointError, ConfigError
from tests.multi.ranks import RankPool
from tests.multi.toys import assert_close, fit, fit_with
from tests.refusals import refused

MEMORY = "tests.multi.own_storage:MemoryStorage"


@pytest.fixture(scope="module")
def lasting_ranks() -> Iterator[RankPool]:
    pool = RankPool(2, lasting=True)  # a memory file system lasts as long as its process
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    yield
    memory = fsspec.filesystem("memory")
    if memory.exists("/run"):
        memory.rm("/run", recursive=True)


def stored(prefix: str = "") -> list[str]:
    return sorted(path.removeprefix("/run/") for path in fsspec.filesystem("memory").find("/run") if prefix in path)


def section(**keys: Any) -> dict[str, Any]:
    return {"storage": {"type": MEMORY, "root": "run"}, **keys}


@pytest.mark.parametrize("background", [False, True])
def test_saved_on_two_ranks_and_resumed_in_another_work_dir(
    lasting_ranks: RankPool, tmp_path: Path, background: bool
) -> None:
    whole = fit(0, 1, {"work_dir": tmp_path / "whole"})
    saving = {"storage": {"type": MEMORY, "root": f"two-{background}"}, "async_save": background}
    options = {"stop_at": 5}
    parts: dict[str, Any] = {"strategy": "zero2", "work_dir": tmp_path / "first", "checkpoint": saving}
    first = lasting_ranks.run(fit_with, parts, options)[0]
    again = {**parts, "work_dir": tmp_path / "second", "checkpoint": {**saving, "resume": "auto"}, "strategy": "zero3"}
    for second in lasting_ranks.run(fit_with, again, {}):
        assert second.losses == pytest.approx(whole.losses[first.steps :], rel=1e-5)
        assert_close(second, whole, tolerance=1e-5)


def test_a_storage_keeps_as_many_as_the_folder_and_a_name_there_can_be_resumed(tmp_path: Path) -> None:
    train = {"by_epoch": False, "max_steps": 6}
    sections = {"train": train, "checkpoint": section(every=2, keep=2), "work_dir": tmp_path / "one"}
    fit(0, 1, sections)
    assert {name.partition("/")[0] for name in stored()} == {"step-00000004", "step-00000006"}
    resumed = {**sections, "work_dir": tmp_path / "two", "checkpoint": section(resume="step-00000004")}
    assert len(fit(0, 1, resumed).losses) == 2
    with refused(CheckpointError, tmp_path / "three", "step-00000006", "checkpoint.resume=auto"):
        fit(0, 1, {**sections, "work_dir": tmp_path / "three"})


def test_a_copy_that_breaks_off_is_no_checkpoint_and_ends_the_run(tmp_path: Path) -> None:
    broken = {"storage": {"type": "tests.multi.own_storage:BrokenStorage", "root": "run"}}
    with refused(CheckpointError, "`checkpoint.storage`", "no route to step-00000012/rank-00000"):
        fit(0, 1, {"work_dir": tmp_path / "one", "checkpoint": broken})
    assert stored() == ["step-00000012/index.json"]
    assert fit(0, 1, {"work_dir": tmp_path / "two", "checkpoint": section(resume="auto")}).steps == 12
    assert stored("manifest") == ["step-00000012/manifest.json"]


def test_another_folder_is_a_storage_that_renames(tmp_path: Path) -> None:
    shared = {"type": "folder", "path": str(tmp_path / "shared")}
    fit(0, 1, {"work_dir": tmp_path / "one", "checkpoint": {"storage": shared}}, stop_at=3)
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["step-00000003"]
    found = fit(0, 1, {"work_dir": tmp_path / "two", "checkpoint": {"storage": shared, "resume": "auto"}})
    assert len(found.losses) == found.steps - 3


def made(storage: Any, folder: Path) -> Any:
    config = parse_sections(checkpoint={"storage": storage}).config
    return build_storage(config.checkpoint.storage, CheckpointFolder(folder))


@pytest.mark.parametrize(
    ("storage", "path"),
    [
        ({"type": MEMORY}, "checkpoint.storage"),
        ({"type": MEMORY, "root": "run", "rooot": 1}, "checkpoint.storage.rooot"),
        ("tests.multi.own_storage:NoStorage", "checkpoint.storage.type"),
        ({"type": "foldr", "path": "x"}, "checkpoint.storage.type"),
        ({"type": "folder"}, "checkpoint.storage.path"),
    ],
    ids=str,
)
def test_what_is_no_storage_is_refused_by_name(storage: Any, path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        made(storage, tmp_path)
    assert [problem.path for problem in caught.value.problems] == [path]
