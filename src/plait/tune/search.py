"""The search: candidates one after the other, each measured, until the budget is spent."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.config import RunConfig, code_keys, counted, parse, to_yaml
from plait.errors import ConfigError, Problem, TrainingError, in_one_line
from plait.ops import write_whole
from plait.plan import Candidate, candidates
from plait.tune.book import Book, Record
from plait.tune.config import TuneConfig
from plait.tune.legal import check_run, effective
from plait.tune.order import Rank, in_order, rank_by_rule, space_of
from plait.tune.trial import Outcome, run_trial

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a search has found."""

    best: Record
    best_path: Path
    """The run description with the best settings."""
    records: tuple[Record, ...]
    """All candidates that are done with, those of an earlier part of the search included."""
    why: str
    """What ended the search."""


def tune(
    source: str,
    overrides: Sequence[str] = (),
    config: TuneConfig | None = None,
    *,
    out: str | Path,
    rank: Rank = rank_by_rule,
    fresh: bool = False,
    say: Say = print,
) -> Tuned:
    """Find the fastest settings for a run description by running it.

    Goes on where an earlier search in `out` ended, unless `fresh`: a candidate that is done with is never run again.
    Raises `ConfigError` where the run itself is wrong, and `TrainingError` where no candidate at all could be run;
    a candidate that fails is a record with its reason.
    """
    config = config or TuneConfig()
    run = check_run(source, overrides).config
    book = Book(Path(out), run, config, fresh=fresh)
    _refuse_code(book, config)
    found = _legal(candidates(run, space_of(run, config)), source, overrides, config, book)
    ordered = in_order(run, found, config, rank)
    done = sum(book.find(each) is not None for each in ordered)
    say(f"{counted(len(ordered), 'setting')} to try, {done} of them done; results in {book.folder}")
    why = _measure(ordered, source, overrides, run, config, book, say)
    best = book.best
    if best is not None:
        _write_best(book, source, overrides, best)  # again: the tuner may have died before it could
    else:
        counts = Counter(each.outcome.reason for each in book.records)
        reasons = "".join(f"\n  - {count} × {reason}" for reason, count in counts.most_common(5))
        raise TrainingError(f"no trial ran to its end ({why}). Why not:{reasons}")
    return Tuned(best, book.folder / "best.yaml", book.records, why)


def _refuse_code(book: Book, config: TuneConfig) -> None:
    """Refuse results that would have other code run than this search: the best of them become the run's settings."""
    for record in book.records:
        if strange := [key for key in code_keys(record.settings) if key not in config.space]:
            message = f"{book.folder / 'results.jsonl'} sets {strange[0]}, which decides what code runs"
            remedy = f"Name {strange[0]} and its values with --space if they are yours, or give another folder."
            raise ConfigError(Problem("--out", message, remedy))


def _legal(
    found: Sequence[Candidate], source: str, overrides: Sequence[str], config: TuneConfig, book: Book
) -> list[Candidate]:
    """Candidates that make a run, one of each that would be the same; the others are recorded with their reason.

    A key of `space` that no candidate can have is an error: it is misspelt, or all its values are wrong.
    """
    kept: dict[str, Candidate] = {}
    refused: list[Record] = []
    possible: set[str] = set()
    for candidate in found:
        try:
            kept.setdefault(effective(source, [*overrides, *candidate.overrides], config.nproc), candidate)
            possible |= candidate.settings.keys()
        except ConfigError as error:
            if not candidate.settings:
                raise  # the run as the user wrote it
            refused.append(Record(candidate.settings, Outcome("refused", 0.0, in_one_line(error)), None))
    why = {key: each.outcome.reason for each in reversed(refused) for key in each.settings}
    idle = [key for key in config.space if key in why and key not in possible]
    if idle:  # one alone may keep all others from every run
        raise ConfigError([_idle(key, why[key]) for key in [key for key in idle if key in why[key]] or idle])
    book.add(*refused)
    return list(kept.values())


def _idle(key: str, reason: str) -> Problem:
    return Problem(f"space.{key}", f"none of its values makes a run: {reason}", "Leave the key out, or correct it.")


def _measure(
    ordered: Sequence[Candidate],
    source: str,
    overrides: Sequence[str],
    run: RunConfig,
    config: TuneConfig,
    book: Book,
    say: Say,
) -> str:
    """Run what has no record yet; returns what ended it."""
    end = float("inf") if config.minutes is None else time.monotonic() + config.minutes * 60
    for candidate in ordered:
        if book.find(candidate) is not None:
            continue
        if len(book.trials) >= config.trials:
            return f"{counted(len(book.trials), 'trial')}, as asked"
        if config.early_stop is not None and book.since_best >= config.early_stop:
            return f"{book.since_best} trials in a row were no better"
        left = end - time.monotonic()
        if left <= 0:
            return f"{config.minutes:g} minutes are over"
        say(f"trial {len(book.trials) + 1}: {' '.join(candidate.changes(run)) or 'as it is written'}")
        changed, folder = [*overrides, *candidate.overrides], book.trial_folder(candidate)
        outcome = run_trial(source, changed, run, config, folder, limit_s=min(config.trial_seconds, left))
        if outcome.status == "timeout" and left < config.trial_seconds:
            return f"{config.minutes:g} minutes are over, and a trial was cut off"
        record = Record(candidate.settings, outcome, outcome.value(config.metric))
        book.add(record)
        say(f"  {_told(outcome)}")
        if book.best is record:
            _write_best(book, source, overrides, record)
    return "every setting was tried"


def _told(outcome: Outcome) -> str:
    if outcome.status != "ok":
        return f"{outcome.status}: {outcome.reason}"
    rate = f"{outcome.samples_per_s:.2f} samples/s"
    tokens = "" if outcome.tokens_per_s is None else f"{outcome.tokens_per_s:.0f} tokens/s, "
    return f"{tokens}{rate}, {outcome.step_time or 0:.4g} s a step, {outcome.memory_mib or 0:.0f} MiB"


def _write_best(book: Book, source: str, overrides: Sequence[str], record: Record) -> None:
    candidate, run = Candidate(record.settings), parse(source, overrides).config
    chosen = candidate.changes(run)
    text = to_yaml(parse(source, [*overrides, *candidate.overrides]).config)
    head = [f"# {Path(source).name}, with the best settings that `plait tune` measured: {_told(record.outcome)}"]
    head += [f"#   {each}" for each in chosen] or ["#   (as it was written)"]
    write_whole(book.folder / "best.yaml", "\n".join([*head, "", text]))
