"""Searches with real runs: every end of a trial is a record, and no search begins twice."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.refusals import missing, refused

from plait.config import parse
from plait.errors import ConfigError, TrainingError
from plait.plan.space import Candidate
from plait.tune import TrialOutcome, TuneConfig, Tuned, tune
from plait.tune.search import TrialRecord, TrialRecords

KIND = "hooks.0.args.kind"
FIXED = {"batch.micro": None, "batch.total": 4, "batch.accumulation": None}
"""What every candidate says besides, where the batch is not searched."""
QUICK: dict[str, Any] = {"steps": 4, "warmup": 1, "dimensions": (), "tuner": "grid"}


def by_kind(found: Tuned) -> dict[str, Any]:
    return {record.settings.get(KIND, "none"): record for record in found.records if record.was_run}


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may end at any moment, also while it is looked at
        return False


def working_in(folder: Path) -> list[int]:
    """Other processes that have this as their current folder."""
    found = []
    for process in psutil.process_iter():
        try:
            found += [process.pid] if process.pid != os.getpid() and Path(process.cwd()) == folder else []
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def wait_for(happened: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def test_trials_that_fail_are_recorded_with_their_reason_and_end_nothing(bench: Any) -> None:
    source = bench.describe()
    config = TuneConfig(**QUICK, space={KIND: ("memory", "device", "kill", "crash", "none"), "strategy.zero": (0, 7)})
    found = tune(source, [], config, out="out")

    outcomes = {kind: record.outcome for kind, record in by_kind(found).items()}
    assert {kind: outcome.status for kind, outcome in outcomes.items()} == {
        "none": "ok",
        "memory": "oom",
        "device": "oom",
        "kill": "oom",
        "crash": "crashed",
    }
    assert "planted: no room for 7 GiB" in outcomes["memory"].reason
    assert "micro-batch" in outcomes["device"].reason, "it ran to its end, but not as it is written"
    assert "SIGKILL" in outcomes["kill"].reason
    assert "planted: a shape does not fit" in outcomes["crash"].reason
    assert outcomes["none"].tokens_per_s == pytest.approx(outcomes["none"].samples_per_s * 16)
    assert outcomes["none"].step_time == pytest.approx(4 / outcomes["none"].samples_per_s)
    rejected = [record for record in found.records if record.settings.get("strategy.zero") == 7]
    assert {record.outcome.status for record in rejected} == {"refused"}
    assert all("strategy.zero" in record.outcome.reason for record in rejected)

    # The table and the best settings are there to use.
    rows = list(csv.DictReader(Path("out/results.csv").read_text().splitlines()))
    assert [row["status"] for row in rows].count("refused") == 5
    assert len(rows) == 10
    assert parse(found.best_path).config == parse(source).config  # what was written is what ran

    # A second search has nothing left to do, and no numbers of another kind come into the table.
    said: list[str] = []
    before = Path("out/results.jsonl").read_text()
    again = tune(source, [], config, out="out", log=said.append)
    assert not any("trial" in line for line in said)
    assert Path("out/results.jsonl").read_text() == before
    assert again.best == found.best
    with refused(ConfigError, "steps", f"{config.steps}", "6", "--fresh", key="--out"):
        tune(source, [], config.model_copy(update={"steps": 6}), out="out")
    with refused(ConfigError, "run", "--fresh", key="--out") as caught:
        tune(source, ["seed=5"], config, out="out")
    assert "steps" not in str(caught.value)


def test_a_trial_that_hangs_is_ended_with_all_its_processes(bench: Any) -> None:
    source = bench.describe("hang")
    config = TuneConfig(**QUICK, trial_seconds=25.0)
    with refused(TrainingError, "25 s", "step"):
        tune(source, [], config, out="out")
    assert json.loads(Path("out/results.jsonl").read_text())["status"] == "timeout"
    assert working_in(bench.folder) == []  # ranks and their children, in groups of their own


def test_a_trial_that_is_cut_off_by_the_whole_time_is_not_recorded(bench: Any) -> None:
    with refused(TrainingError, "0.02 minutes"):
        tune(bench.describe("hang"), [], TuneConfig(**QUICK, minutes=0.02), out="out")
    assert not Path("out/results.jsonl").read_text()


def test_a_search_whose_tuner_was_killed_goes_on_where_it_was(bench: Any) -> None:
    source = bench.describe()
    Path("slow").touch()
    Path("search.yaml").write_text("{steps: 4, warmup: 1, dimensions: [], tuner: grid}")
    command = [sys.executable, "-m", "plait", "tune", source, "--search", "search.yaml", "--out", "out"]
    command += ["--space", f"{KIND}=[slow]"]
    tuner = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(Path("pids").exists)
    first = Path("out/results.jsonl").read_text()
    tuner.send_signal(signal.SIGKILL)
    tuner.wait()
    trial, child = map(int, Path("pids").read_text().split())
    wait_for(lambda: not alive(trial))
    os.kill(child, signal.SIGKILL)  # the test's own; the trial, which is gone, cannot end it

    Path("slow").unlink()
    ended = subprocess.run([*command, "--train"], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trial 2: ") == 1
    assert "trial 1: " not in ended.stdout
    results = Path("out/results.jsonl").read_text()
    assert results.startswith(first)
    assert [json.loads(line)["status"] for line in results.splitlines()] == ["ok", "ok"]
    assert not missing(ended.stdout, "out/best.yaml", "50 steps")  # and then the run itself, at full length


def test_a_fresh_search_throws_away_what_a_search_wrote_and_nothing_else(bench: Any) -> None:
    run = parse(bench.describe()).config
    config = TuneConfig(**QUICK)
    book = TrialRecords(Path("out"), run, config)
    book.add(TrialRecord({"seed": 1}, TrialOutcome("crashed", 1.0, "planted"), None))
    Path("out/mine.txt").touch()
    assert len(TrialRecords(Path("out"), run, config).records) == 1
    assert TrialRecords(Path("out"), run, config, fresh=True).records == ()
    assert sorted(path.name for path in Path("out").iterdir()) == ["mine.txt", "search.json"]


def test_a_search_ends_when_trials_are_spent_or_no_longer_better(bench: Any) -> None:
    source, space = bench.describe(), {"seed": tuple(range(1, 9))}
    book = TrialRecords(Path("out"), parse(source).config, TuneConfig(**QUICK))
    for value, seed in ((5.0, 1), (9.0, 2), (7.0, 3), (None, 4)):
        outcome = TrialOutcome(
            "ok" if value else "crashed", 1.0, tokens_per_s=value, samples_per_s=value, step_time=1.0
        )
        book.add(TrialRecord({**FIXED, "seed": seed}, outcome, value))
    config = TuneConfig(**QUICK, space=space)
    spent = tune(source, [], config.model_copy(update={"trials": 4}), out="out")
    assert (spent.why, spent.best.settings["seed"]) == ("4 trials, as asked", 2)
    assert parse(spent.best_path).config.seed == 2
    stuck = tune(source, [], config.model_copy(update={"early_stop": 2}), out="out")
    assert "2 trials" in stuck.why


def test_tiers_of_offload_are_measured_on_ranks(bench: Any) -> None:
    files = {"zero": 3, "offload": {"optimizer": "nvme", "params": "cpu"}}
    source = bench.describe(strategy=files, batch={"total": 8})
    wanted = {"strategy.offload.optimizer": "cpu", "strategy.offload.ratio": "auto"}
    config = TuneConfig(steps=4, warmup=1, dimensions=("offload",), nproc=2, trials=2)

    def host_memory_first(_run: Any, found: Any) -> list[Any]:
        return [each for each in found if wanted.items() <= each.settings.items()]

    said: list[str] = []
    found = tune(source, [], config, out="out", rank=host_memory_first, log=said.append)
    assert [record.outcome.status for record in found.records] == ["ok", "ok"], found.records
    assert said[3].startswith("trial 2: strategy.offload.optimizer=cpu strategy.offload.ratio=auto"), said
    best = parse(found.best_path).config.strategy.offload
    assert best == parse(source, Candidate(found.best.settings).overrides).config.strategy.offload


def test_ranks_are_measured_together_and_one_that_is_killed_is_found(bench: Any) -> None:
    source = bench.describe(batch={"total": 8})
    kinds = {KIND: ("kill",), "hooks.0.args.rank": (1,)}
    found = tune(source, ["strategy=zero3"], TuneConfig(**QUICK, nproc=2, space=kinds), out="out")
    assert {kind: record.outcome.status for kind, record in by_kind(found).items()} == {"none": "ok", "kill": "oom"}


def test_a_key_that_no_run_can_have_is_told_before_anything_is_measured(bench: Any) -> None:
    said: list[str] = []
    config = TuneConfig(**QUICK, space={"strategy.zreo": (0, 3), "strategy.zero": (0, 1)})
    with refused(ConfigError, "strategy.zreo", key="space.strategy.zreo") as caught:
        tune(bench.describe(), [], config, out=bench.folder / "found", log=said.append)
    assert said == []
    assert len(caught.value.problems) == 1  # without it, zero 0 would make one


@pytest.mark.parametrize(
    "settings",
    [{"model.target": "os:system"}, {"trust_code": True}, {"hooks": [{"type": "import", "target": "os:system"}]}],
)
def test_results_that_name_code_are_refused(bench: Any, settings: dict[str, Any]) -> None:
    config = TuneConfig(space={"strategy.zero": [0]})
    path = bench.describe()
    TrialRecords(bench.folder / "out", parse(path).config, config).add(
        TrialRecord(settings, TrialOutcome("ok", 1.0), 9.0)
    )
    with refused(ConfigError, "results.jsonl", *settings, key="--out"):
        tune(path, [], config, out=bench.folder / "out")
