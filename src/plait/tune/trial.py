"""One trial: a run of a few steps in separate processes, and its outcome."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import psutil

from plait.config import RunConfig
from plait.launch import MICRO_BATCHES_SPLIT, end_with_parent
from plait.monitor import Event, EventKind, events_path, read_events
from plait.tune.config import TuneConfig

Status = Literal["ok", "oom", "crashed", "timeout", "refused"]

_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|(?:can't|cannot) allocate memory|ALLOC_FAILED|bad_alloc", re.IGNORECASE
)
_ERROR_LINE = re.compile(r"^(?:\[rank\d+\]: ?)?[\w.]*(?:Error|Exception|Interrupt)\b.*")
_NEVER = 10**9


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """How a trial ended. The figures are averages after the warm-up, and None unless it succeeded."""

    status: Status
    seconds: float
    """Duration of the whole trial, including start-up."""
    reason: str = ""
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    step_time: float | None = None
    memory_mib: float | None = None
    """Peak memory of rank 0."""

    def value(self, metric: str) -> float | None:
        """Return the metric, larger is better; None where the trial has none."""
        if metric == "step_time":
            return None if self.step_time is None else -self.step_time
        if metric == "throughput":
            return self.tokens_per_s or self.samples_per_s
        return self.tokens_per_s if metric == "tokens_per_s" else self.samples_per_s


def run_trial(
    source: str, overrides: Sequence[str], run: RunConfig, tune: TuneConfig, folder: Path, *, limit_s: float
) -> TrialOutcome:
    """Train a few steps with `plait train`, and return the outcome; a run that fails has one too.

    The trial has a process session of its own, all of whose processes have ended when this returns. The output of the
    run is in `folder/log.txt`.
    """
    shutil.rmtree(folder, ignore_errors=True)  # files of a trial that was killed
    folder.mkdir(parents=True)
    changes = measuring(run, tune, folder / "run")
    # Memory is measured, not planned.
    command = [sys.executable, "-m", "plait", "train", source, *overrides, *changes, "plan.gate=off"]
    command += ["--nproc", str(tune.nproc)]
    start = time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        trial = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGKILL),
        )
        try:
            code: int | None = trial.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_session(trial)
    return _outcome(code, folder, tune, time.monotonic() - start, limit_s)


def measuring(run: RunConfig, tune: TuneConfig, work_dir: Path) -> list[str]:
    """Return overrides that end a run after a few steps, without changing what a step computes."""
    changes = [
        f"work_dir={work_dir}",
        f"train.stop_after={tune.steps}",
        "checkpoint.every=null",
        "checkpoint.last=false",
        "checkpoint.resume=null",
        "log.every=1",
        "log.sinks=[jsonl]",
        "log.wandb_project=null",
        "log.console=plain",
    ]
    return changes if run.val_data is None else [*changes, f"train.val_every={_NEVER}"]


def _end_session(trial: subprocess.Popen[bytes]) -> None:
    """Kill all processes of the trial: ranks and workers have other process groups, but share its session."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        left = [pid for pid in psutil.pids() if _session(pid) == trial.pid and not _is_dead(pid)]
        if not left:
            break
        for pid in left:
            _kill(pid)
        trial.poll()
        time.sleep(0.02)
    trial.wait()


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _is_dead(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _outcome(code: int | None, folder: Path, tune: TuneConfig, seconds: float, limit_s: float) -> TrialOutcome:
    if code is None:
        return TrialOutcome("timeout", seconds, f"not finished after {limit_s:.0f} s; it was {_last_phase(folder)}")
    text = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    if MICRO_BATCHES_SPLIT in text:
        return TrialOutcome("oom", seconds, _reason(text, re.compile(MICRO_BATCHES_SPLIT)))
    if code == 0:
        return _figures(folder, tune, seconds)
    if _OUT_OF_MEMORY.search(text):
        return TrialOutcome("oom", seconds, _reason(text, _OUT_OF_MEMORY))
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        reason = "killed by SIGKILL, as the kernel does when host memory runs out"
        return TrialOutcome("oom", seconds, reason)
    if code == 2 and "plait: " in text:
        return TrialOutcome("refused", seconds, _own_words(text))
    return TrialOutcome("crashed", seconds, f"exit code {code}: {_reason(text)}")


def _figures(folder: Path, tune: TuneConfig, seconds: float) -> TrialOutcome:
    events = [event for event in _events(folder) if event.kind is EventKind.TRAIN]
    data = [event.data for event in events if event.step > tune.warmup]
    if not data:
        reason = f"the data ended after {len(events)} steps, within the warm-up of {tune.warmup}"
        return TrialOutcome("crashed", seconds, reason)
    spent = sum(row["time"] for row in data)

    def rate(name: str) -> float | None:
        return sum(row[name] * row["time"] for row in data) / spent if all(name in row for row in data) else None

    return TrialOutcome(
        "ok",
        seconds,
        tokens_per_s=rate("tokens_per_s"),
        samples_per_s=rate("samples_per_s"),
        step_time=spent / len(data),
        memory_mib=max(event.data["memory"] for event in events),
    )


def _events(folder: Path) -> list[Event]:
    path = events_path(folder / "run", 0)
    return read_events([path]) if path.exists() else []


def _last_phase(folder: Path) -> str:
    steps = [event.step for event in _events(folder) if event.kind is EventKind.TRAIN]
    return f"at step {steps[-1]}" if steps else "before its first step"


def _reason(text: str, pattern: re.Pattern[str] = _ERROR_LINE) -> str:
    """Return the first line that matches the pattern, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.match(line)] or lines
    fitting = [line for line in errors if pattern.search(line)] or [line for line in lines if pattern.search(line)]
    chosen = (fitting or lines[-1:] or ["it printed nothing"])[0]
    return chosen if len(chosen) <= 300 else f"{chosen[:299]}…"


def _own_words(text: str) -> str:
    """Return the last message of Plait."""
    return " ".join(text.rpartition("plait: ")[2].split())[:300]
