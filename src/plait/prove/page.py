"""The certificate as a page: one file, nothing outside it. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from plait.config import counted
from plait.monitor import card, document, footer, text
from plait.prove.certificate import Certificate, Finding

MAX_ROWS = 12
"""Differences shown one by one; all of them are in the JSON file."""


def write_page(certificate: Certificate, out: Path) -> None:
    """Write the page to `out`."""
    body = (
        _header(certificate),
        _facts(certificate),
        card("Differences", _differences(certificate), note="the first ones"),
        card("Steps", _steps(certificate)),
        card("Layers", _layers(certificate), note="largest deviation, over all steps, beside what is allowed"),
        card("Dropout", _checks(certificate)),
        card("How it was measured", _notes(certificate)),
        footer(time.time()),
    )
    out.write_text(document(f"Parity certificate: {certificate.facts['candidate']}", body), encoding="utf-8")


def _header(certificate: Certificate) -> str:
    word, kind = ("PASS", "good") if certificate.passed else ("FAIL", "bad")
    lines = certificate.verdict().partition("  ")[2].splitlines()
    rest = "".join(f"<p>{text(line.strip())}</p>" for line in lines[1:])
    return (
        f'<header><p class="eyebrow">Parity certificate</p><h1>{text(lines[0].partition(":")[0])}</h1>'
        f'<p class="sub"><span class="pill {kind}">{word}</span></p>{rest}</header>'
    )


def _facts(certificate: Certificate) -> str:
    compared = [each for each in certificate.findings if not each.is_noise]
    worst = certificate.worst
    shown: list[tuple[str, str, str]] = [
        ("Steps", str(len(certificate.steps)), ""),
        ("Tensors", str(len({each.name for each in compared if each.is_tensor})), "compared after each step"),
        ("Outside of tolerance", str(sum(not each.agrees for each in compared)), f"of {len(compared)} comparisons"),
    ]
    if worst is not None:
        share = worst.deviation / worst.allowed
        shown.append(("Largest deviation", f"{share:.2g}", "times what is allowed"))
    cells = "".join(
        f'<div><dt>{text(label)}</dt><dd>{text(value)}</dd><dd class="note">{text(note)}</dd></div>'
        for label, value, note in shown
    )
    return f'<dl class="facts">{cells}</dl>'


def _differences(certificate: Certificate) -> str:
    wrong = [each for each in certificate.findings if not each.agrees]
    rows = [
        [str(each.step), f"{each.name}: {each.detail}" if each.detail else each.name, *_numbers(each)]
        for each in wrong[:MAX_ROWS]
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
    for (layer, kind), found in _groups(certificate.findings):
        compared = [each for each in found if not each.is_noise]
        noise = len({each.name for each in found}) - len({each.name for each in compared})
        if compared:
            worst = max(compared, key=lambda each: each.deviation / (each.allowed or 1.0))
            bad = sum(not each.agrees for each in compared)
            rows.append([layer, kind, *_numbers(worst), str(bad or "")])
        if noise:
            rows.append([layer, kind, "noise", counted(noise, "tensor"), ""])
    return _table(("Layer", "What", "Deviation", "Allowed", "Outside"), rows, numeric=2)


def _groups(findings: Sequence[Finding]) -> Iterator[tuple[tuple[str, str], list[Finding]]]:
    groups: dict[tuple[str, str], list[Finding]] = {}
    for each in findings:
        if each.is_tensor and each.step > 0:
            kind = "weights" if each.name.startswith("model.") else each.name.rpartition(".")[2]
            groups.setdefault((each.layer, kind), []).append(each)
    yield from groups.items()


def _checks(certificate: Certificate) -> str:
    rows = [[check.name, "yes" if check.holds else "no", check.text] for check in certificate.checks]
    return _table(("Rule", "Holds", "What was seen"), rows, numeric=3)


def _notes(certificate: Certificate) -> str:
    rows = {**certificate.facts, "tolerance": certificate.tolerance}
    body = "".join(f"<tr><th>{text(label)}</th><td>{text(value)}</td></tr>" for label, value in rows.items())
    notes = "".join(f"<p>{text(note)}</p>" for note in certificate.notes)
    return f"<table><tbody>{body}</tbody></table>{notes}"


def _numbers(finding: Finding) -> list[str]:
    return [f"{finding.deviation:.1e}", f"{finding.allowed:.1e}"]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: int) -> str:
    """A table whose columns from `numeric` on are numbers; nothing where there are no rows."""
    if not rows:
        return ""

    def line(cells: Sequence[str], tag: str) -> str:
        marks = ['class="n"' if index >= numeric else "" for index in range(len(cells))]
        return "<tr>" + "".join(f"<{tag} {m}>{text(c)}</{tag}>" for m, c in zip(marks, cells, strict=True)) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="scroll"><table><thead>{line(heads, "th")}</thead><tbody>{body}</tbody></table></div>'
