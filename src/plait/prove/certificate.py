"""The certificate of a proof: all comparisons and the verdict, as text, JSON and HTML."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.config import counted
from plait.monitor import card, document, escaped, fact_list, footer, page_header, plain_json
from plait.prove.compare import Rounding
from plait.prove.job import Deviation, ProofTrace


@dataclass(frozen=True, slots=True)
class ComparedQuantity:
    """The comparison of one quantity after one step."""

    step: int
    """From 1; 0 is the start, where weights must be bitwise equal."""
    name: str
    """`loss`, `grad_norm`, `targets`, `skipped`, or a tensor: `model.<name>`, `optim.<name>.<key>`."""
    deviation: float
    """The difference from the reference, relative to the reference's norm."""
    allowed: float
    """The tolerance; infinite where rounding alone changes the quantity by about its own size."""
    detail: str = ""

    @property
    def agrees(self) -> bool:
        """Whether it is within its tolerance."""
        return self.deviation <= self.allowed

    @property
    def is_noise(self) -> bool:
        """Whether the quantity cannot be compared, because rounding decides its value."""
        return math.isinf(self.allowed)

    @property
    def is_tensor(self) -> bool:
        """Whether it is a parameter, a buffer or optimizer state."""
        return self.name.startswith(("model.", "optim."))

    @property
    def layer(self) -> str:
        """The layer that it belongs to: its name up to the first number, or the first component."""
        path = self.name.partition(".")[2]
        match = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", path)
        return match.group() if match else path.partition(".")[0]

    def __str__(self) -> str:
        section, _, path = self.name.partition(".")
        parameter, _, key = path.rpartition(".")
        what = f"{parameter} ({key} of the optimizer)" if section == "optim" else path or section
        where = "at the start" if self.step == 0 else f"step {self.step}"
        detail = f": {self.detail}" if self.detail else ""
        return f"{where}, {what}{detail}; relative deviation {self.deviation:.1e}, allowed {self.allowed:.1e}"


@dataclass(frozen=True, slots=True)
class Check:
    """A property that must hold between ranks, so that it cannot be compared with one process."""

    name: str
    holds: bool
    text: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """The result of a proof: whether a strategy computes the same as one process."""

    facts: dict[str, str]
    tolerance: str
    """How the tolerances were determined."""
    steps: list[dict[str, float | bool]]
    """Loss, gradient norm and number of targets of both runs, by step."""
    findings: list[ComparedQuantity]
    """By step; numbers first, then tensors in the order of the model."""
    checks: list[Check]
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Whether all comparisons agree and all checks hold."""
        return all(finding.agrees for finding in self.findings) and all(check.holds for check in self.checks)

    @property
    def first(self) -> ComparedQuantity | None:
        """The first difference."""
        return next((finding for finding in self.findings if not finding.agrees), None)

    @property
    def first_tensor(self) -> ComparedQuantity | None:
        """The first tensor that differs: at the earliest step, the first in the order of the model."""
        return next((finding for finding in self.findings if finding.is_tensor and not finding.agrees), None)

    @property
    def worst(self) -> ComparedQuantity | None:
        """The quantity closest to its tolerance, or furthest beyond it."""
        compared = [finding for finding in self.findings if finding.allowed > 0 and not finding.is_noise]
        return max(compared, key=lambda finding: finding.deviation / finding.allowed, default=None)

    def verdict(self) -> str:
        """Return PASS, or FAIL with the first difference, in a few lines."""
        subject, steps = self.facts["candidate"], len(self.steps)
        if self.passed:
            tensors = len({finding.name for finding in self.findings if finding.is_tensor and not finding.is_noise})
            worst = self.worst
            margin = "" if worst is None else f"; closest to its tolerance: {worst}"
            if worst is not None and worst.deviation == 0:
                margin = ", without any deviation"
            when = "1 step" if steps == 1 else f"each of {steps} steps"
            return f"PASS  {subject} computes the same as one process: {tensors} tensors agree after {when}{margin}"
        lines = [f"FAIL  {subject} differs from one process"]
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
        """Write the certificate as JSON, with `inf` as a string."""
        first, tensor = self.first, self.first_tensor
        data = {
            "verdict": "PASS" if self.passed else "FAIL",
            "first_difference": None if first is None else asdict(first),
            "first_tensor": None if tensor is None else asdict(tensor),
            **asdict(self),
        }
        path.write_text(json.dumps(plain_json(data), indent=1) + "\n", encoding="utf-8")


def compare_findings(
    reference: ProofTrace, perturbed: ProofTrace, candidate: ProofTrace, rounding: Rounding
) -> list[ComparedQuantity]:
    """Return all comparisons of the candidate with the reference, in the order of steps.

    Tolerances follow from `perturbed`, the second run of the reference; see [Note: where a tolerance comes from].
    """
    findings = _starts(candidate.deviations[0], reference.names)
    for index in range(len(reference.loss)):
        step = index + 1
        for name in ("loss", "grad_norm"):
            expected, twin, measured = (getattr(trace, name)[index] for trace in (reference, perturbed, candidate))
            allowed = rounding.allowed(_gap(twin, expected))
            detail = f"{measured:.6g} instead of {expected:.6g}"
            findings.append(ComparedQuantity(step, name, _gap(measured, expected), allowed, detail))
        targets = candidate.targets[index], reference.targets[index]
        skipped = candidate.skipped[index], reference.skipped[index]
        findings.append(ComparedQuantity(step, "targets", _gap(*targets), 0.0, "{:g} instead of {:g}".format(*targets)))
        findings.append(
            ComparedQuantity(step, "skipped", float(skipped[0] != skipped[1]), 0.0, "{} instead of {}".format(*skipped))
        )
        sensitivity = perturbed.deviations[step]
        deviations = candidate.deviations[step]
        for name in in_model_order(deviations, reference.names):
            deviation = deviations[name]
            moved = sensitivity[name].value if name in sensitivity else 0.0
            allowed = 0.0 if deviation.problem else rounding.allowed(moved, deviation.stored * step)
            findings.append(ComparedQuantity(step, name, deviation.value, allowed, deviation.problem))
    return findings


def _starts(deviations: dict[str, Deviation], names: Sequence[str]) -> list[ComparedQuantity]:
    ordered = in_model_order(deviations, names)
    return [ComparedQuantity(0, name, deviations[name].value, 0.0, deviations[name].problem) for name in ordered]


def in_model_order(names: dict[str, Deviation], model_names: Sequence[str]) -> list[str]:
    """Return names in the order of the model: each parameter, then its optimizer state."""
    models = {name.removeprefix("model."): index for index, name in enumerate(model_names) if name.startswith("model.")}

    def sort_key(name: str) -> tuple[int, bool]:
        section, _, path = name.partition(".")
        parameter = path.rpartition(".")[0] if section == "optim" else path
        return models.get(parameter, len(models)), section == "optim"

    return sorted(names, key=sort_key)


def _gap(measured: float, expected: float) -> float:
    if measured == expected or (math.isnan(measured) and math.isnan(expected)):
        return 0.0
    gap = abs(measured - expected) / (abs(expected) or 1.0)
    return gap if math.isfinite(gap) else math.inf


# The certificate as a self-contained HTML page.


MAX_ROWS = 12
"""How many differences the page shows at most; the JSON file has all."""


def write_page(certificate: Certificate, out: Path) -> None:
    """Write the page to `out`."""
    body = (
        _header(certificate),
        _facts(certificate),
        card("Differences", _differences(certificate), subtitle="the first ones"),
        card("Steps", _steps(certificate)),
        card("Layers", _layers(certificate), subtitle="largest deviation, over all steps, beside what is allowed"),
        card("Dropout", _checks(certificate)),
        card("How it was measured", _method(certificate)),
        footer(time.time()),
    )
    out.write_text(document(f"Parity certificate: {certificate.facts['candidate']}", body), encoding="utf-8")


def _header(certificate: Certificate) -> str:
    result, tone = ("PASS", "good") if certificate.passed else ("FAIL", "bad")
    lines = certificate.verdict().partition("  ")[2].splitlines()
    rest = "".join(f"<p>{escaped(line.strip())}</p>" for line in lines[1:])
    pill = f'<span class="pill {tone}">{result}</span>'
    return page_header("Parity certificate", lines[0].partition(":")[0], pill, rest)


def _facts(certificate: Certificate) -> str:
    compared = [finding for finding in certificate.findings if not finding.is_noise]
    worst = certificate.worst
    shown: list[tuple[str, str, str]] = [
        ("Steps", str(len(certificate.steps)), ""),
        (
            "Tensors",
            str(len({finding.name for finding in compared if finding.is_tensor})),
            "compared after each step",
        ),
        (
            "Outside of tolerance",
            str(sum(not finding.agrees for finding in compared)),
            f"of {len(compared)} comparisons",
        ),
    ]
    if worst is not None:
        share = worst.deviation / worst.allowed
        shown.append(("Largest deviation", f"{share:.2g}", "times what is allowed"))
    return fact_list(shown)


def _differences(certificate: Certificate) -> str:
    wrong = [finding for finding in certificate.findings if not finding.agrees]
    rows = [
        [str(finding.step), f"{finding.name}: {finding.detail}" if finding.detail else finding.name, *_numbers(finding)]
        for finding in wrong[:MAX_ROWS]
    ]
    return _table(("Step", "What", "Deviation", "Allowed"), rows, numeric=2)


def _steps(certificate: Certificate) -> str:
    rows = [
        [str(index + 1), *(f"{row[f'{name}_{side}']:.7g}" for name in _PAIRS for side in ("reference", "candidate"))]
        for index, row in enumerate(certificate.steps)
    ]
    heads = [head for name in ("Loss", "Gradient norm", "Targets") for head in (name, "under the strategy")]
    return _table(("Step", *heads), rows, numeric=1)


_PAIRS = ("loss", "grad_norm", "targets")


def _layers(certificate: Certificate) -> str:
    rows = []
    for (layer, quantity), findings in _groups(certificate.findings):
        compared = [finding for finding in findings if not finding.is_noise]
        noise = len({finding.name for finding in findings}) - len({finding.name for finding in compared})
        if compared:
            worst = max(compared, key=lambda finding: finding.deviation / (finding.allowed or 1.0))
            bad = sum(not finding.agrees for finding in compared)
            rows.append([layer, quantity, *_numbers(worst), str(bad or "")])
        if noise:
            rows.append([layer, quantity, "noise", counted(noise, "tensor"), ""])
    return _table(("Layer", "What", "Deviation", "Allowed", "Outside"), rows, numeric=2)


def _groups(findings: Sequence[ComparedQuantity]) -> Iterator[tuple[tuple[str, str], list[ComparedQuantity]]]:
    groups: dict[tuple[str, str], list[ComparedQuantity]] = {}
    for finding in findings:
        if finding.is_tensor and finding.step > 0:
            quantity = "weights" if finding.name.startswith("model.") else finding.name.rpartition(".")[2]
            groups.setdefault((finding.layer, quantity), []).append(finding)
    yield from groups.items()


def _checks(certificate: Certificate) -> str:
    rows = [[check.name, "yes" if check.holds else "no", check.text] for check in certificate.checks]
    return _table(("Rule", "Holds", "What was seen"), rows, numeric=3)


def _method(certificate: Certificate) -> str:
    rows = {**certificate.facts, "tolerance": certificate.tolerance}
    body = "".join(f"<tr><th>{escaped(label)}</th><td>{escaped(value)}</td></tr>" for label, value in rows.items())
    remarks = "".join(f"<p>{escaped(remark)}</p>" for remark in certificate.notes)
    return f"<table><tbody>{body}</tbody></table>{remarks}"


def _numbers(finding: ComparedQuantity) -> list[str]:
    return [f"{finding.deviation:.1e}", f"{finding.allowed:.1e}"]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: int) -> str:
    """Return a table whose columns from `numeric` on are numbers; empty without rows."""
    if not rows:
        return ""

    def line(cells: Sequence[str], tag: str) -> str:
        marks = ['class="n"' if index >= numeric else "" for index in range(len(cells))]
        return "<tr>" + "".join(f"<{tag} {m}>{escaped(c)}</{tag}>" for m, c in zip(marks, cells, strict=True)) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="scroll"><table><thead>{line(heads, "th")}</thead><tbody>{body}</tbody></table></div>'
