"""Signals to a real `plait train --nproc 2`, and failures of its ranks."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
from tests.refusals import missing

from plait.checkpoint import CheckpointFolder, read_manifest

ENDLESS = ("train.max_steps=1000000", "log.every=5", "checkpoint.resume=auto", "plan=off")


def start(place: Any, strategy: str = "ddp", count: int = 2) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A run that has begun to train, and its ranks; one of one process is its own rank."""
    process = place.start("train", "run.yaml", "--nproc", str(count), *ENDLESS, f"strategy={strategy}")
    for line in process.stdout:
        if "Iter(train)" in line:
            break
    else:
        raise AssertionError(process.stderr.read())
    whole = psutil.Process(process.pid)
    ranks = whole.children(recursive=True) if count > 1 else [whole]
    assert len(ranks) == count
    return process, ranks


def assert_gone(ranks: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive


def newest(folder: Path) -> int:
    found = CheckpointFolder(folder / "run" / "checkpoints").newest()
    assert found is not None
    return read_manifest(found).step


def test_a_signal_saves_and_the_run_goes_on_from_there(place: Any) -> None:
    steps = [0]
    cases = (
        (signal.SIGINT, "Ctrl-C", "zero2", 2),
        (signal.SIGTERM, "SIGTERM", "ddp", 2),
        (signal.SIGINT, "Ctrl-C", "ddp", 1),
    )
    for number, name, strategy, count in cases:
        process, ranks = start(place, strategy, count)
        # SIGTERM to one rank alone: the others hear of it, and nobody calls the one that left a failure.
        (ranks[-1] if number == signal.SIGTERM else process).send_signal(number)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (128 + number, ""), "saved, and not finished"
        assert f"({name})" in out
        assert_gone(ranks)
        steps.append(newest(place.folder))
        assert steps[-1] > steps[-2]
    process, ranks = start(place)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # ends it at once, unless the first one has done so already
    assert process.wait(60) == 128 + signal.SIGINT
    assert_gone(ranks)
    assert newest(place.folder) >= steps[-1]


def test_a_rank_that_dies_ends_the_run_with_a_word_about_it(place: Any) -> None:
    process, ranks = start(place)
    ranks[1].kill()
    began = time.monotonic()
    _, err = process.communicate(timeout=120)
    print(f"ended after {time.monotonic() - began:.1f} s")
    assert process.returncode == 128 + signal.SIGKILL
    assert not missing(err, "rank 1", "SIGKILL")
    assert "report.txt" in err.splitlines()[-1]
    assert_gone(ranks)


def test_an_error_that_all_ranks_meet_is_told_once(place: Any) -> None:
    (place.folder / "run").write_text("a file where the folder should be")
    ended = place.run("train", "run.yaml", "--nproc", "2", "plan=off")
    assert ended.returncode == 2
    assert not re.search(r" - INFO - .*\bmodel\b", ended.stdout)  # what it did until then, and no more
    assert ended.stderr.count("work_dir") == 1
    assert "Traceback" not in ended.stderr
