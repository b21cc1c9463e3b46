"""What a search has found so far, in a folder that survives whatever happens to the tuner.

    search.json      what was measured, and how: a later search must be the same to go on
    results.jsonl    one line for each candidate that is done with
    results.csv      the same as a table
    best.yaml        the run description with the best settings so far
    trials/KEY/      what each trial printed and logged

Files are replaced as a whole, so that each of them is always complete.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from plait.config import RunConfig, parse_json, read_json_object, read_lines, to_dict
from plait.errors import ConfigError, Problem
from plait.ops import write_whole
from plait.plan import Candidate
from plait.tune.config import TuneConfig
from plait.tune.trial import Outcome


@dataclass(frozen=True, slots=True)
class Record:
    """A candidate that is done with."""

    settings: Mapping[str, Any]
    outcome: Outcome
    value: float | None
    """The metric, the larger the better; None where the trial gave none."""

    @property
    def key(self) -> str:
        """The candidate's."""
        return Candidate(self.settings).key

    @property
    def was_run(self) -> bool:
        """Whether a process was started for it; what is refused by its settings alone has none."""
        return self.outcome.seconds > 0


class Book:
    """The records of one search. Opening it reads what is there."""

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
        self._records = {each.key: each for each in _read(folder / "results.jsonl")}

    @property
    def records(self) -> tuple[Record, ...]:
        """All of them, in the order in which they came."""
        return tuple(self._records.values())

    @property
    def trials(self) -> tuple[Record, ...]:
        """Those that were run."""
        return tuple(each for each in self.records if each.was_run)

    @property
    def since_best(self) -> int:
        """How many trials came after the best one; 0 while there is none."""
        best, trials = self.best, self.trials
        return 0 if best is None else len(trials) - 1 - trials.index(best)

    def trial_folder(self, candidate: Candidate) -> Path:
        """Where a trial keeps what is its own."""
        return (self.folder / "trials" / candidate.key).resolve()

    def find(self, candidate: Candidate) -> Record | None:
        """The record of a candidate; None where it has none."""
        return self._records.get(candidate.key)

    def add(self, *records: Record) -> None:
        """Take records in; they are on the disk when this returns."""
        self._records |= {each.key: each for each in records}
        lines = [
            json.dumps({"settings": dict(r.settings), **asdict(r.outcome), "value": r.value}) for r in self.records
        ]
        write_whole(self.folder / "results.jsonl", "".join(f"{line}\n" for line in lines))
        write_whole(self.folder / "results.csv", self._table())

    @property
    def best(self) -> Record | None:
        """The record with the best value; of equal ones the first."""
        measured = [each for each in self.records if each.value is not None]
        return max(measured, key=lambda each: each.value or 0.0, default=None)

    def _table(self) -> str:
        names = list(dict.fromkeys(key for record in self.records for key in record.settings))
        figures = [each.name for each in fields(Outcome)]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*names, *figures, "value"])
        for record in self.records:
            outcome = asdict(record.outcome)
            cells = [*(record.settings.get(name, "") for name in names), *(outcome[name] for name in figures)]
            writer.writerow(["" if cell is None else cell for cell in [*cells, record.value]])
        return text.getvalue()

    def _identify(self, run: RunConfig, tune: TuneConfig) -> None:
        """Numbers of different runs, or measured in different ways, must not stand in one table."""
        names = ("nproc", "steps", "warmup", "metric")
        # Through JSON, as what it is compared with has been.
        wanted = json.loads(json.dumps({"run": to_dict(run), **{name: getattr(tune, name) for name in names}}))
        path = self.folder / "search.json"
        if not path.exists():
            write_whole(path, json.dumps(wanted, indent=1))
            return
        found = read_json_object(path, _damaged)
        if changed := [name for name in wanted if wanted[name] != found.get(name)]:
            what = [f"another {n} ({found.get(n)}, now {wanted[n]})" if n != "run" else "another run" for n in changed]
            remedy = "Give another folder with --out, or --fresh to throw these results away."
            raise ConfigError(Problem("--out", f"{self.folder} has results of {' and '.join(what)}", remedy))


def _read(path: Path) -> list[Record]:
    if not path.exists():
        return []
    return [_record(line, f"{path}, line {number}") for number, line in enumerate(read_lines(path, _damaged), start=1)]


def _record(line: str, where: str) -> Record:
    try:
        row = parse_json(line)
        settings, value = row.pop("settings"), row.pop("value")
        outcome = Outcome(**row)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(f"{where} is no result of a search ({type(error).__name__}: {error})") from None
    number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    if not isinstance(settings, dict) or not number or not isinstance(outcome.seconds, int | float):
        raise _damaged(f"{where} is no result of a search: {line[:80]!r}")
    return Record(settings, outcome, value)


def _damaged(reason: str) -> ConfigError:
    return ConfigError(Problem("--out", reason, "Write --fresh to throw these results away, or give another folder."))


def _remove(folder: Path) -> None:
    """Only what a search has written; a folder may hold other things too."""
    for name in ("search.json", "results.jsonl", "results.csv", "best.yaml"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "trials", ignore_errors=True)
