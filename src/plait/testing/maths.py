"""Assertions that a user-provided part computes the same under every strategy as on one process."""

from __future__ import annotations

import pickle
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.config import SHORTHANDS, Section, min_ranks, parse_sections
from plait.errors import ConfigError, Problem
from plait.prove import ComparedQuantity, Rounding, compare_findings, rounding_of
from plait.testing.ranks import RankFailedError, RankPool
from plait.testing.runs import MODEL, RandomTokens, RecordedRun, record

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "tp2")
"""The strategies that are tried by default."""
TOTAL, MICRO = 8, 2
"""Samples per step, and per micro-batch."""
_AXIS = re.compile(r"(pp|ep|cp|tp)(\d+)")

Strategy = str | Mapping[str, Any]


def assert_same_maths(
    *,
    strategies: Sequence[Strategy] = STRATEGIES,
    steps: int = 3,
    dtype: str = "fp32",
    tolerance: float | None = None,
    allow_refusal: bool = False,
    timeout_s: float = 300.0,
    **given: Any,
) -> dict[str, str]:
    """Train under each strategy on real ranks and on one process, and compare the whole state after each step.

    `given` are keywords of `plait.Runner`: the part under test, and what it needs. The defaults are tiny: a decoder of
    two layers, random tokens, AdamW. A strategy is a name (`zero2`), a name with axes (`zero3+tp2`), or a section.
    Losses, gradient norms, skipped steps, every parameter, buffer and optimizer state, and the tensors of hooks must
    agree. By default the tolerance is measured, as by `plait prove`: it is the effect that perturbing the weights by
    one rounding has on a run on one process. With `tolerance` it is that number times each tensor's norm.

    Raise `AssertionError` at the first difference, with strategy, step and tensor. Return the outcome of each strategy:
    `same`, or with `allow_refusal` the reason why Plait refuses it for this part.
    """
    _check(given, steps)
    outcomes: dict[str, str] = {}
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-testing-")))
        pools = _Pools(stack, timeout_s)
        run = _Runs(given, steps, dtype, work, pools)
        rounding = run.rounding(tolerance)
        twins: tuple[RecordedRun, RecordedRun] | None = None
        for strategy in strategies:
            name = _name(strategy)
            section, ranks = strategy_of(strategy)
            twins = twins or run.reference(rounding)
            try:
                recorded = run.on(ranks, name, strategy=section)
            except RankFailedError as error:
                if error.refusal is None:
                    raise AssertionError(f"{name} on {ranks} ranks failed:\n{error}") from None
                if not allow_refusal:
                    raise AssertionError(
                        f"{name} is refused: {error.refusal}\n"
                        "Leave it out of `strategies`, or write allow_refusal=True."
                    ) from None
                outcomes[name] = error.refusal
                continue
            _compare(f"{name} on {ranks} ranks", twins, recorded, rounding)
            outcomes[name] = "same"
    return outcomes


def assert_same_after_resume(
    *,
    saved: tuple[Strategy, int] = ("zero2", 2),
    resumed: tuple[Strategy, int] = ("zero3", 4),
    at: int = 2,
    steps: int = 4,
    dtype: str = "fp32",
    tolerance: float | None = None,
    timeout_s: float = 300.0,
    **given: Any,
) -> None:
    """Train to step `at` under one strategy, save, continue under another, and compare with one uninterrupted process.

    `saved` and `resumed` are a strategy and a number of ranks. The other arguments are those of `assert_same_maths`.
    The section `checkpoint` is used by the two runs that save and resume; if it has a `storage`, the second run resumes
    from there, in a `work_dir` of its own. Raise `AssertionError` at the first difference; loaded tensors must equal
    the saved ones bit for bit.
    """
    _check(given, steps)
    options = _checkpoint(given.pop("checkpoint", None))
    if not 0 < at < steps:
        raise ConfigError(Problem("at", f"{at} is not a step within {steps}", f"Write 1 to {steps - 1}."))
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-testing-")))
        run = _Runs(given, steps, dtype, work, _Pools(stack, timeout_s))
        rounding = run.rounding(tolerance)
        twins = run.reference(rounding)
        runs = []
        source = "auto" if "storage" in options else str(work / "saved" / "checkpoints")
        for (strategy, ranks), checkpoint, end in (
            (saved, {**options, "last": True}, at),
            (resumed, {**options, "last": False, "resume": source}, None),
        ):
            where = "saved" if end else "resumed"
            section, _ = strategy_of(strategy)
            changes: dict[str, Any] = {"strategy": section, "checkpoint": checkpoint}
            if end:
                changes["train"] = {**run.train, "stop_after": end}
            runs.append(run.on(ranks, where, **changes))
        before, after = runs
        what = f"{_name(resumed[0])} on {resumed[1]} ranks, resumed from {_name(saved[0])} on {saved[1]} at step {at},"
        _compare_loaded(what, before.states[-1], after.states[0])
        joined = RecordedRun(states=[*before.states, *after.states[1:]])
        for key in ("loss", "grad_norm", "targets", "skipped"):
            setattr(joined.trace, key, [*getattr(before.trace, key), *getattr(after.trace, key)])
        _compare(what, twins, joined, rounding)


def strategy_of(strategy: Strategy) -> tuple[Any, int]:
    """Return the section of a strategy, and the number of ranks to test it on.

    For a name, that is two data-parallel ranks, times the sizes of its other axes.
    """
    if not isinstance(strategy, str):
        config = parse_sections(strategy=strategy).config.strategy
        least = min_ranks(config)
        data = config.layout.dp_replicate or config.layout.dp_shard
        return strategy, least if data or (least > 1 and config.stage == 0) else 2 * least
    names = strategy.split("+")
    axes = {m[1]: int(m[2]) for name in names if (m := _AXIS.fullmatch(name))}
    stages = [name for name in names if not _AXIS.fullmatch(name)]
    unknown = [name for name in stages if name not in SHORTHANDS or name in ("auto", "single")]
    if unknown or len(stages) > 1:
        known = ", ".join(name for name in SHORTHANDS if name not in ("auto", "single"))
        message = f"{strategy!r} is not a strategy to test"
        raise ConfigError(
            Problem("strategies", message, f"Write one of {known}, axes such as tp2 or pp2, both with +, or a section.")
        )
    section = dict(SHORTHANDS[stages[0]]) if stages else {}
    return {**section, **({"layout": axes} if axes else {})}, (2 if stages else 1) * prod(axes.values())


class _Pools:
    """Rank pools by number of ranks, started on first use."""

    def __init__(self, stack: ExitStack, timeout_s: float) -> None:
        self._stack, self._timeout_s = stack, timeout_s
        self._pools: dict[int, RankPool] = {}

    def __getitem__(self, ranks: int) -> RankPool:
        if ranks not in self._pools:
            self._pools[ranks] = self._stack.enter_context(RankPool(ranks, timeout_s=self._timeout_s))
        return self._pools[ranks]


class _Runs:
    """Runs the same description under different strategies."""

    def __init__(self, given: Mapping[str, Any], steps: int, dtype: str, work: Path, pools: _Pools) -> None:
        self.train = {**dict(given.get("train") or {}), "max_steps": steps}
        self._work, self._pools = work, pools
        self._given: dict[str, Any] = {
            "model": MODEL,
            "precision": dtype,
            "batch": {"total": TOTAL, "micro": MICRO},
            "seed": 0,
            "device": "cpu",
            "log": {"console": "none", "sinks": []},
            "checkpoint": {"last": False},
            **given,
            "plan": "off",
            "train": self.train,
        }
        if given.get("data") is None:
            self._given["data"] = RandomTokens(TOTAL * steps)

    def rounding(self, tolerance: float | None) -> Rounding:
        """Return the tolerance of the comparison."""
        if tolerance is not None:
            return Rounding("a fixed tolerance", tolerance, roundings=1.0, margin=0.0)
        return rounding_of(parse_sections(precision=self._given["precision"]).config.precision, on_cpu=True)

    def reference(self, rounding: Rounding) -> tuple[RecordedRun, RecordedRun]:
        """Return the run on one process, and the same with weights changed by one rounding."""
        perturbation = rounding.epsilon if rounding.margin else 0.0
        try:
            first = self.on(1, "one-process", strategy="single")
            return first, self.on(
                1, "one-process-again", perturbation=perturbation, strategy="single"
            ) if perturbation else first
        except RankFailedError as error:
            raise AssertionError(f"one process alone failed:\n{error.refusal or error}") from None

    def on(self, ranks: int, folder: str, *, perturbation: float = 0.0, **changes: Any) -> RecordedRun:
        """Run on this number of ranks and return what was recorded."""
        given = {**self._given, **changes, "work_dir": str(self._work / folder)}
        recorded: RecordedRun = self._pools[ranks].run(record, given, perturbation)[0]
        return recorded


def _check(given: Mapping[str, Any], steps: int) -> None:
    if steps < 1:
        raise ConfigError(Problem("steps", f"{steps} leaves nothing to compare", "Write 1 or more."))
    for key in ("strategy", "work_dir", "plan"):
        if key in given:
            remedy = "Write `strategies=(…)`." if key == "strategy" else "Leave it out."
            raise ConfigError(Problem(key, "is set by the comparison", remedy))
    if given.get("model") is not None and given.get("data") is None and not isinstance(given["model"], Mapping):
        raise ConfigError(
            Problem("data", "missing: a user-provided model needs data of its form", "Give a data set with it.")
        )
    for key, value in given.items():
        try:
            pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            message = f"cannot be sent to other processes ({error})"
            remedy = "Define it at the top level of a module, or write `package.module:name`."
            raise ConfigError(Problem(key, message, remedy)) from None


def _checkpoint(section: Any) -> dict[str, Any]:
    """Return the keys of `checkpoint` that the caller wrote."""
    is_object = isinstance(section, Section)
    written = {name: getattr(section, name) for name in section.model_fields_set} if is_object else section
    for key in ("last", "resume"):
        if key in (written or {}):
            raise ConfigError(Problem(f"checkpoint.{key}", "is set by the comparison", "Leave it out."))
    return dict(written or {})


def _name(strategy: Strategy) -> str:
    return strategy if isinstance(strategy, str) else repr(dict(strategy))


def _compare(what: str, twins: tuple[RecordedRun, RecordedRun], recorded: RecordedRun, rounding: Rounding) -> None:
    reference, perturbed = twins
    if len(recorded.states) != len(reference.states):
        raise AssertionError(
            f"{what} made {len(recorded.states) - 1} steps, and one process {len(reference.states) - 1}: is the data "
            "the same on every rank?"
        )
    trace = recorded.against(reference)
    findings = compare_findings(reference.trace, perturbed.against(reference), trace, rounding)
    wrong = next((finding for finding in findings if not finding.agrees), None)
    if wrong is not None:
        raise AssertionError(f"{what} differs from one process {_at(wrong)}{_values(wrong, reference, recorded)}")
    tensors = [finding for finding in findings if finding.is_tensor and finding.step]
    if tensors and all(finding.is_noise for finding in tensors):
        raise AssertionError(
            f"{what} cannot be compared: one rounding of the weights changes every tensor of one process by half of "
            "itself. Give a smaller learning rate or fewer steps"
        )


def _at(finding: ComparedQuantity) -> str:
    when = f"after step {finding.step}" if finding.step else "before the first step"
    off = f"is off by {finding.deviation:.2e} of its size, allowed are {finding.allowed:.2e}"
    return f"{when}: {finding.name} {finding.detail if finding.detail and finding.is_tensor else off}"


def _values(finding: ComparedQuantity, reference: RecordedRun, recorded: RecordedRun) -> str:
    if not finding.is_tensor:
        return f" ({finding.detail})"
    if finding.detail:
        return ""
    return _largest(reference.states[finding.step][finding.name], recorded.states[finding.step][finding.name])


def _largest(expected: Tensor, actual: Tensor) -> str:
    """Return the position of the largest difference of two tensors, and both values."""
    gap = (actual.double() - expected.double()).abs().nan_to_num(torch.inf).reshape(-1)
    index = int(gap.argmax())
    position = [int(coordinate) for coordinate in torch.unravel_index(torch.tensor(index), expected.shape)]
    values = actual.reshape(-1)[index], expected.reshape(-1)[index]
    return "; most at {}: {:.9g} instead of {:.9g}".format(position, *(float(value) for value in values))


def _compare_loaded(what: str, saved: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    for name, tensor in saved.items():
        if name not in loaded:
            raise AssertionError(f"{what} did not load {name}, which was saved")
        if not torch.equal(tensor, loaded[name]):
            raise AssertionError(f"{what} loaded another {name} than was saved{_largest(tensor, loaded[name])}")
