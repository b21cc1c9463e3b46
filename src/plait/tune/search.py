"""The search of `plait tune`: measure candidates one after another, until a limit is reached."""

from __future__ import annotations

import csv
import io
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from plait.atomic_write import write_atomically
from plait.config import (
    RunConfig,
    check,
    check_complete,
    code_keys,
    counted,
    parse,
    parse_json,
    read_json_object,
    read_lines,
    resolve_batch,
    resolve_layout,
    to_dict,
    to_yaml,
)
from plait.errors import ConfigError, Problem, TrainingError, in_one_line
from plait.plan import Candidate, candidates
from plait.tune.config import RankCandidates, TuneConfig, in_order, rank_by_rule, space_of
from plait.tune.trial import TrialOutcome, run_trial

# The results of a search, in a folder from which it can be continued.
#
#     search.json      the run and how it is measured; a search can only be continued if both are unchanged
#     results.jsonl    one line for each finished candidate
#     results.csv      the same as a table
#     best.yaml        the run description with the best settings so far
#     trials/KEY/      the output and logs of each trial
#
# Files are replaced atomically, so that each of them is always complete.


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """The result of a candidate."""

    settings: Mapping[str, Any]
    outcome: TrialOutcome
    value: float | None
    """The metric, larger is better; None where the trial has none."""

    @property
    def key(self) -> str:
        """The candidate's key."""
        return Candidate(self.settings).key

    @property
    def was_run(self) -> bool:
        """Whether a trial was run; settings that were refused have none."""
        return self.outcome.seconds > 0


class TrialRecords:
    """The records of one search, read from its folder when constructed."""

    def __init__(self, folder: Path, run: RunConfig, tune: TuneConfig, *, fresh: bool = False) -> None:
        self.folder = folder
        try:
            if fresh and folder.exists():
                _remove(folder)
            folder.mkdir(parents=True, exist_ok=True)
            self._identify(run, tune)
        except OSError as error:
            message = f"{str(folder)!r} cannot be written to: {error.strerror}"
            raise ConfigError(Problem("--out", message, "Give another folder.")) from error
        self._records = {record.key: record for record in _read(folder / "results.jsonl")}

    @property
    def records(self) -> tuple[TrialRecord, ...]:
        """All records, in the order in which they were added."""
        return tuple(self._records.values())

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        """The records of trials that were run."""
        return tuple(record for record in self.records if record.was_run)

    @property
    def since_best(self) -> int:
        """How many trials were run after the best one; 0 without one."""
        best, trials = self.best, self.trials
        return 0 if best is None else len(trials) - 1 - trials.index(best)

    def trial_folder(self, candidate: Candidate) -> Path:
        """Return the folder of a trial."""
        return (self.folder / "trials" / candidate.key).resolve()

    def find(self, candidate: Candidate) -> TrialRecord | None:
        """Return the record of a candidate; None where it has none."""
        return self._records.get(candidate.key)

    def add(self, *records: TrialRecord) -> None:
        """Add records and write them to the disk."""
        self._records |= {record.key: record for record in records}
        lines = [
            json.dumps({"settings": dict(r.settings), **asdict(r.outcome), "value": r.value}) for r in self.records
        ]
        write_atomically(self.folder / "results.jsonl", "".join(f"{line}\n" for line in lines))
        write_atomically(self.folder / "results.csv", self._table())

    @property
    def best(self) -> TrialRecord | None:
        """The record with the best value; the first of equal ones."""
        measured = [record for record in self.records if record.value is not None]
        return max(measured, key=lambda record: record.value or 0.0, default=None)

    def _table(self) -> str:
        names = list(dict.fromkeys(key for record in self.records for key in record.settings))
        figures = [figure.name for figure in fields(TrialOutcome)]
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow([*names, *figures, "value"])
        for record in self.records:
            outcome = asdict(record.outcome)
            cells = [*(record.settings.get(name, "") for name in names), *(outcome[name] for name in figures)]
            table.writerow(["" if cell is None else cell for cell in [*cells, record.value]])
        return text.getvalue()

    def _identify(self, run: RunConfig, tune: TuneConfig) -> None:
        """Raise `ConfigError` if the folder has results of another run, or measured with other `names`."""
        names = ("nproc", "steps", "warmup", "metric")
        # Converted by JSON, like the stored value that it is compared with.
        wanted = json.loads(json.dumps({"run": to_dict(run), **{name: getattr(tune, name) for name in names}}))
        path = self.folder / "search.json"
        if not path.exists():
            write_atomically(path, json.dumps(wanted, indent=1))
            return
        existing = read_json_object(path, _damaged)
        if changed := [name for name in wanted if wanted[name] != existing.get(name)]:
            what = [
                f"another {n} ({existing.get(n)}, now {wanted[n]})" if n != "run" else "another run" for n in changed
            ]
            remedy = "Give another folder with --out, or --fresh to throw these results away."
            raise ConfigError(Problem("--out", f"{self.folder} has results of {' and '.join(what)}", remedy))


def _read(path: Path) -> list[TrialRecord]:
    if not path.exists():
        return []
    return [_record(line, f"{path}, line {number}") for number, line in enumerate(read_lines(path, _damaged), start=1)]


def _record(line: str, where: str) -> TrialRecord:
    try:
        row = parse_json(line)
        settings, value = row.pop("settings"), row.pop("value")
        outcome = TrialOutcome(**row)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(f"{where} is not a result of a search ({type(error).__name__}: {error})") from None
    number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    if not isinstance(settings, dict) or not number or not isinstance(outcome.seconds, int | float):
        raise _damaged(f"{where} is not a result of a search: {line[:80]!r}")
    return TrialRecord(settings, outcome, value)


def _damaged(reason: str) -> ConfigError:
    return ConfigError(Problem("--out", reason, "Write --fresh to throw these results away, or give another folder."))


def _remove(folder: Path) -> None:
    """Remove the files of a search; the folder may have others."""
    for name in ("search.json", "results.jsonl", "results.csv", "best.yaml"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "trials", ignore_errors=True)


# Checking settings without running them.


def effective(source: str, overrides: Sequence[str], ranks: int) -> str:
    """Return the effective settings on `ranks` ranks, as text that is equal for equal runs.

    With one replica of the model, every ZeRO stage is the same. Raises `ConfigError` where the settings are invalid.
    """
    config = parse(source, overrides).config
    check(config, has_val=config.val_data is not None, require_length=True)
    strategy = config.strategy
    layout = resolve_layout(strategy, size=ranks, local_size=ranks)
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=strategy.pipeline.micro_batches)
    if layout.pp > 1:
        from plait.distributed import check_pipeline

        check_pipeline(strategy.pipeline, layout.pp, batch.accumulation)
    data = config.model_dump(mode="json")
    alone = layout.replicas == 1 and strategy.engine == "native"
    data["strategy"] |= {"zero": 0 if alone else strategy.stage, "sharding": None, "layout": layout.sizes()}
    data["batch"] = [batch.total, batch.micro, batch.accumulation]
    return json.dumps(data, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of a search."""

    best: TrialRecord
    best_path: Path
    """The run description with the best settings."""
    records: tuple[TrialRecord, ...]
    """All finished candidates, including those of an earlier part of the search."""
    why: str
    """What ended the search."""


def tune(
    source: str,
    overrides: Sequence[str] = (),
    config: TuneConfig | None = None,
    *,
    out: str | Path,
    rank: RankCandidates = rank_by_rule,
    fresh: bool = False,
    log: Callable[[str], None] = print,
) -> Tuned:
    """Return the fastest settings for a run description, found by running it with many settings.

    An earlier search in the folder `out` is continued, unless `fresh`: a finished candidate is not run again. A
    candidate that fails gets a record with its reason. Raise `ConfigError` if the run itself is invalid, and
    `TrainingError` if no candidate succeeds.
    """
    config = config or TuneConfig()
    parsed = parse(source, overrides)
    check_complete(parsed, require_length=True)
    run = parsed.config
    records = TrialRecords(Path(out), run, config, fresh=fresh)
    _refuse_code(records, config)
    legal = _legal(candidates(run, space_of(run, config)), source, overrides, config, records)
    ordered = in_order(run, legal, config, rank)
    done = sum(records.find(candidate) is not None for candidate in ordered)
    log(f"{counted(len(ordered), 'setting')} to try, {done} of them done; results in {records.folder}")
    why = _measure(ordered, source, overrides, run, config, records, log)
    best = records.best
    if best is not None:
        _write_best(records, source, overrides, best)  # again: the tuner may have died before it could
    else:
        counts = Counter(record.outcome.reason for record in records.records)
        reasons = "".join(f"\n  - {count} × {reason}" for reason, count in counts.most_common(5))
        raise TrainingError(f"no trial succeeded ({why}). The reasons:{reasons}")
    return Tuned(best, records.folder / "best.yaml", records.records, why)


def _refuse_code(records: TrialRecords, config: TuneConfig) -> None:
    """Raise `ConfigError` if stored results set keys that name code to run and are not in `space`.

    The best results become settings of a run, so a manipulated file could run any code.
    """
    for record in records.records:
        if strange := [key for key in code_keys(record.settings) if key not in config.space]:
            message = f"{records.folder / 'results.jsonl'} sets {strange[0]}, which decides what code runs"
            remedy = f"Name {strange[0]} and its values with --space if they are yours, or give another folder."
            raise ConfigError(Problem("--out", message, remedy))


def _legal(
    candidates: Sequence[Candidate], source: str, overrides: Sequence[str], config: TuneConfig, records: TrialRecords
) -> list[Candidate]:
    """Return the valid candidates, without duplicates; record the invalid ones with the reason.

    Raise `ConfigError` for a key of `space` that is valid in no candidate: it is misspelt, or all its values are wrong.
    """
    kept: dict[str, Candidate] = {}
    refused: list[TrialRecord] = []
    possible: set[str] = set()
    for candidate in candidates:
        try:
            kept.setdefault(effective(source, [*overrides, *candidate.overrides], config.nproc), candidate)
            possible |= candidate.settings.keys()
        except ConfigError as error:
            if not candidate.settings:
                raise  # the run as the user wrote it
            refused.append(TrialRecord(candidate.settings, TrialOutcome("refused", 0.0, in_one_line(error)), None))
    why = {key: record.outcome.reason for record in reversed(refused) for key in record.settings}
    idle = [key for key in config.space if key in why and key not in possible]
    if idle:  # one invalid key may make every combination invalid, also with valid values of the others
        remedy = "Leave the key out, or correct it."
        named = [key for key in idle if key in why[key]] or idle
        raise ConfigError(
            [Problem(f"space.{key}", f"none of its values makes a run: {why[key]}", remedy) for key in named]
        )
    records.add(*refused)
    return list(kept.values())


def _measure(
    ordered: Sequence[Candidate],
    source: str,
    overrides: Sequence[str],
    run: RunConfig,
    config: TuneConfig,
    records: TrialRecords,
    log: Callable[[str], None],
) -> str:
    """Run the candidates that have no record yet; return why the search ended."""
    end = float("inf") if config.minutes is None else time.monotonic() + config.minutes * 60
    for candidate in ordered:
        if records.find(candidate) is not None:
            continue
        if len(records.trials) >= config.trials:
            return f"{counted(len(records.trials), 'trial')}, as asked"
        if config.early_stop is not None and records.since_best >= config.early_stop:
            return f"{records.since_best} trials in a row were no better"
        left = end - time.monotonic()
        if left <= 0:
            return f"{config.minutes:g} minutes are over"
        log(f"trial {len(records.trials) + 1}: {' '.join(candidate.changes(run)) or 'as written'}")
        changed, folder = [*overrides, *candidate.overrides], records.trial_folder(candidate)
        outcome = run_trial(source, changed, run, config, folder, limit_s=min(config.trial_seconds, left))
        if outcome.status == "timeout" and left < config.trial_seconds:
            return f"{config.minutes:g} minutes are over, and a trial was cut off"
        record = TrialRecord(candidate.settings, outcome, outcome.value(config.metric))
        records.add(record)
        log(f"  {_describe(outcome)}")
        if records.best is record:
            _write_best(records, source, overrides, record)
    return "every setting was tried"


def _describe(outcome: TrialOutcome) -> str:
    if outcome.status != "ok":
        return f"{outcome.status}: {outcome.reason}"
    rate = f"{outcome.samples_per_s:.2f} samples/s"
    tokens = "" if outcome.tokens_per_s is None else f"{outcome.tokens_per_s:.0f} tokens/s, "
    return f"{tokens}{rate}, {outcome.step_time or 0:.4g} s per step, {outcome.memory_mib or 0:.0f} MiB"


def _write_best(records: TrialRecords, source: str, overrides: Sequence[str], record: TrialRecord) -> None:
    candidate, run = Candidate(record.settings), parse(source, overrides).config
    chosen = candidate.changes(run)
    text = to_yaml(parse(source, [*overrides, *candidate.overrides]).config)
    head = [f"# {Path(source).name}, with the best settings that `plait tune` measured: {_describe(record.outcome)}"]
    head += [f"#   {change}" for change in chosen] or ["#   (as it was written)"]
    write_atomically(records.folder / "best.yaml", "\n".join([*head, "", text]))
