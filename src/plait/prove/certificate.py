"""What a proof found: every comparison, and the verdict. Imports no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.prove.job import Deviation, Trace, plain
from plait.prove.tolerance import Rounding


@dataclass(frozen=True, slots=True)
class Finding:
    """One quantity after one step, compared."""

    step: int
    """From 1; 0 is the start, where weights must be equal bit for bit."""
    name: str
    """`loss`, `grad_norm`, `targets`, `skipped`, or a tensor: `model.<name>`, `optim.<name>.<key>`."""
    deviation: float
    """As a part of the reference's own size."""
    allowed: float
    """The tolerance; infinite where rounding alone changes the quantity by as much as its size."""
    detail: str = ""

    @property
    def agrees(self) -> bool:
        """Whether it is within its tolerance."""
        return self.deviation <= self.allowed

    @property
    def is_noise(self) -> bool:
        """Whether there is nothing to compare: rounding decides it all."""
        return math.isinf(self.allowed)

    @property
    def is_tensor(self) -> bool:
        """Whether it is a parameter, a buffer or optimizer state."""
        return self.name.startswith(("model.", "optim."))

    @property
    def layer(self) -> str:
        """The part of the model it belongs to: everything up to the first number, or the first word."""
        path = self.name.partition(".")[2]
        found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", path)
        return found.group() if found else path.partition(".")[0]

    def __str__(self) -> str:
        kind, _, path = self.name.partition(".")
        parameter, _, key = path.rpartition(".")
        what = f"{parameter} ({key} of the optimizer)" if kind == "optim" else path or kind
        where = "at the start" if self.step == 0 else f"step {self.step}"
        detail = f": {self.detail}" if self.detail else ""
        return f"{where}, {what}{detail}; off by {self.deviation:.1e} of its size, allowed {self.allowed:.1e}"


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold on many ranks and has no counterpart on one."""

    name: str
    holds: bool
    text: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """Whether a strategy does what one process does."""

    facts: dict[str, str]
    tolerance: str
    """Where the tolerances come from."""
    steps: list[dict[str, float | bool]]
    """Loss, gradient norm and number of targets of both runs, step by step."""
    findings: list[Finding]
    """Step by step; numbers first, then tensors in the order of the model."""
    checks: list[Check]
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Whether everything agrees."""
        return all(each.agrees for each in self.findings) and all(check.holds for check in self.checks)

    @property
    def first(self) -> Finding | None:
        """The first difference."""
        return next((each for each in self.findings if not each.agrees), None)

    @property
    def first_tensor(self) -> Finding | None:
        """The first tensor that differs: the first step at which one does, and there the first in the model."""
        return next((each for each in self.findings if each.is_tensor and not each.agrees), None)

    @property
    def worst(self) -> Finding | None:
        """What came closest to its tolerance, or went furthest beyond."""
        compared = [each for each in self.findings if each.allowed > 0 and not each.is_noise]
        return max(compared, key=lambda each: each.deviation / each.allowed, default=None)

    def verdict(self) -> str:
        """A few lines for people: PASS, or the first difference."""
        subject, steps = self.facts["candidate"], len(self.steps)
        if self.passed:
            tensors = len({each.name for each in self.findings if each.is_tensor and not each.is_noise})
            worst = self.worst
            margin = "" if worst is None else f"; closest to its tolerance: {worst}"
            if worst is not None and worst.deviation == 0:
                margin = ", without any deviation"
            when = "1 step" if steps == 1 else f"each of {steps} steps"
            return f"PASS  {subject} is one process: {tensors} tensors agree after {when}{margin}"
        lines = [f"FAIL  {subject} is not one process"]
        tensor = self.first_tensor
        if self.first is not None:
            lines.append(f"first difference: {self.first}")
        if tensor is not None and tensor is not self.first:
            lines.append(f"first tensor: {tensor}")
        lines += [f"{check.name}: no, {check.text}" for check in self.checks if not check.holds]
        if self.first is not None:
            lines.append(f"allowed: {self.tolerance}")
        return "\n      ".join(lines)

    def write(self, path: Path) -> None:
        """As JSON. `inf`, which JSON does not know, is a text."""
        first, tensor = self.first, self.first_tensor
        data = {
            "verdict": "PASS" if self.passed else "FAIL",
            "first_difference": None if first is None else asdict(first),
            "first_tensor": None if tensor is None else asdict(tensor),
            **asdict(self),
        }
        path.write_text(json.dumps(plain(data), indent=1) + "\n", encoding="utf-8")


def judge(reference: Trace, nudged: Trace, candidate: Trace, rounding: Rounding) -> list[Finding]:
    """Every comparison of the candidate with the reference, against what one rounding did to the reference."""
    findings = _starts(candidate.deviations[0], reference.names)
    for index in range(len(reference.loss)):
        step = index + 1
        for name in ("loss", "grad_norm"):
            expected, twin, found = (getattr(trace, name)[index] for trace in (reference, nudged, candidate))
            allowed = rounding.allowed(_gap(twin, expected))
            detail = f"{found:.6g} instead of {expected:.6g}"
            findings.append(Finding(step, name, _gap(found, expected), allowed, detail))
        targets = candidate.targets[index], reference.targets[index]
        skipped = candidate.skipped[index], reference.skipped[index]
        findings.append(Finding(step, "targets", _gap(*targets), 0.0, "{:g} instead of {:g}".format(*targets)))
        findings.append(
            Finding(step, "skipped", float(skipped[0] != skipped[1]), 0.0, "{} instead of {}".format(*skipped))
        )
        sensitivity = nudged.deviations[step]
        found_here = candidate.deviations[step]
        for name in in_model_order(found_here, reference.names):
            deviation = found_here[name]
            moved = sensitivity[name].value if name in sensitivity else 0.0
            allowed = 0.0 if deviation.problem else rounding.allowed(moved, deviation.stored * step)
            findings.append(Finding(step, name, deviation.value, allowed, deviation.problem))
    return findings


def _starts(deviations: dict[str, Deviation], names: Sequence[str]) -> list[Finding]:
    ordered = in_model_order(deviations, names)
    return [Finding(0, name, deviations[name].value, 0.0, deviations[name].problem) for name in ordered]


def in_model_order(found: dict[str, Deviation], names: Sequence[str]) -> list[str]:
    """Names in the order of the model: each parameter, then what the optimizer keeps for it."""
    models = {name.removeprefix("model."): index for index, name in enumerate(names) if name.startswith("model.")}

    def place(name: str) -> tuple[int, bool]:
        kind, _, path = name.partition(".")
        parameter = path.rpartition(".")[0] if kind == "optim" else path
        return models.get(parameter, len(models)), kind == "optim"

    return sorted(found, key=place)


def _gap(found: float, expected: float) -> float:
    if found == expected or (math.isnan(found) and math.isnan(expected)):
        return 0.0
    gap = abs(found - expected) / (abs(expected) or 1.0)
    return gap if math.isfinite(gap) else math.inf
