"""Running a proof: the reference, the strategy, and what to make of them. Imports no torch."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.config import Layout, RunConfig, check_complete, counted, parse, to_dict
from plait.errors import ConfigError, Problem, TrainingError
from plait.launch import STOPPED_CODES, run_ranks
from plait.prove.cases import Cases, besides, make_cases
from plait.prove.certificate import Certificate, Check, judge
from plait.prove.job import NUDGED, TRACE, Job, Trace
from plait.prove.page import write_page
from plait.prove.tolerance import Rounding, rounding_of

Say = Callable[[str], None]


def prove(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    steps: int = 5,
    ranks: int | None = None,
    layers: int | None = None,
    out: str | Path | None = None,
    say: Say = lambda _text: None,
) -> Certificate:
    """Show that a run does under its strategy what it does on one process, or where it does not.

    `steps` steps of the run's own model and data are made in real processes, on one and on `ranks` of them, and
    compared: loss, gradient norm, every parameter and every optimizer state after each step. `layers` shrinks a
    model of which one process cannot hold the whole. With `out`, a folder, `certificate.json` and
    `certificate.html` are written there. The run's own `work_dir` is not touched. `say` hears how far it is.
    """
    config = _checked(source, overrides, steps)
    if out is not None:
        _prepare_folder(Path(out))
    cases = make_cases(config, ranks=ranks, layers=layers)
    rounding = rounding_of(config.precision, on_cpu=cases.candidate.device == "cpu")
    with tempfile.TemporaryDirectory(prefix="plait-prove-") as folder:
        one, many = Path(folder, "reference"), Path(folder, "candidate")
        say(f"reference: one process, {counted(steps, 'step')}, twice")
        _run(Job(to_dict(cases.reference), str(one), steps, nudge=rounding.epsilon), 1, "the reference")
        say(f"candidate: {name_of(cases.candidate, cases.layout)}, {counted(steps, 'step')}")
        _run(Job(to_dict(cases.candidate), str(many), steps, against=str(one)), cases.layout.size, "the candidate")
        traces = [Trace.read(path / TRACE) for path in (one, one / NUDGED, many)]
    certificate = certify(cases, rounding, *traces)
    if out is not None:
        certificate.write(Path(out, "certificate.json"))
        write_page(certificate, Path(out, "certificate.html"))
    return certificate


def _checked(source: str | Path | Mapping[str, Any], overrides: Sequence[str], steps: int) -> RunConfig:
    """The run description, with everything in order that can be seen before a process starts."""
    parsed = parse(source, overrides)
    check_complete(parsed, require_length=False)
    if steps < 1:
        raise ConfigError(Problem("--steps", f"{steps}: there is nothing to compare", "Give 1 or more."))
    return parsed.config


def _prepare_folder(out: Path) -> None:
    """Make the folder of the certificate, and find out whether it takes files, before the steps cost time."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        message = f"{str(out)!r} cannot be written to: {error.strerror}"
        raise ConfigError(Problem("--out", message, "Give another folder.")) from error


def _run(job: Job, ranks: int, who: str) -> None:
    folder = Path(job.folder)
    folder.mkdir()
    job.write(folder / "job.json")
    code = run_ranks([sys.executable, "-m", "plait.prove.record", str(folder / "job.json")], ranks)
    if code in STOPPED_CODES:
        sys.exit(code)  # whoever told the ranks to stop meant this
    if code:
        raise TrainingError(f"{who} did not come to its end (exit code {code}), so there is nothing to compare")


def name_of(config: RunConfig, layout: Layout) -> str:
    """A strategy in a few words: `zero3 on 2 ranks`, `zero1, pp 2, tp 2, offload cpu on 8 ranks`."""
    stage = config.strategy.stage
    axes = [f"{axis} {size}" for axis, size in layout.sizes().items() if size > 1 and not axis.startswith("dp_")]
    word = [f"zero{stage}" if stage else "ddp"] if layout.data_parallel > 1 or stage else []
    count = f"{layout.size} rank{'s' if layout.size > 1 else ''}"
    return f"{', '.join([*word, *axes, *besides(config.strategy)])} on {count}"


def certify(cases: Cases, rounding: Rounding, reference: Trace, nudged: Trace, candidate: Trace) -> Certificate:
    """What the three runs of a proof say together."""
    config, batch = cases.candidate, cases.batch
    assert config.model is not None
    facts = {
        "candidate": name_of(config, cases.layout),
        "reference": "one process, nothing sharded, recomputed, compiled or offloaded",
        "model": config.model.type,
        "optimizer": config.optim.type,
        "precision": f"{config.precision.compute} compute, {config.precision.reduce} reduction",
        "layout": " × ".join(f"{axis} {size}" for axis, size in cases.layout.sizes().items()),
        "batch": f"{batch.total} samples a step on both sides, in micro-batches of {batch.micro}",
        "seed": str(config.seed),
        "device": candidate.device,
        "versions": candidate.versions,
    }
    steps: list[dict[str, float | bool]] = [
        {
            f"{name}_{side}": getattr(trace, name)[index]
            for name in ("loss", "grad_norm", "targets", "skipped")
            for side, trace in (("reference", reference), ("candidate", candidate))
        }
        for index in range(len(reference.loss))
    ]
    findings = judge(reference, nudged, candidate, rounding)
    checks = [Check(*found) for found in candidate.checks]
    noise = {each.name for each in findings if each.is_noise}
    notes = [*cases.notes, *_remarks(cases, reference, candidate, noise)]
    return Certificate(facts, rounding.explain(), steps, findings, checks, notes)


def _remarks(cases: Cases, reference: Trace, candidate: Trace, noise: set[str]) -> list[str]:
    notes = []
    if reference.drops:
        where = ", ".join(name or "the model itself" for name in reference.drops[:3])
        more = f" and {len(reference.drops) - 3} more" if len(reference.drops) > 3 else ""
        notes.append(
            f"Dropout was set to 0 for the comparison, in {where}{more}: no two layouts draw the same numbers."
        )
        if cases.candidate.strategy.compile.enabled:
            notes.append("Dropout itself was not checked: compiled code draws its numbers out of sight.")
        elif not candidate.checks:
            notes.append("Dropout itself was not checked: no two ranks have the same layers.")
    if reference.random or candidate.random:
        notes.append(
            "The model drew random numbers during a step although no dropout was left on that could be found. "
            "A difference may be these numbers, and nothing else."
        )
    if reference.uncompared:
        notes.append(
            f"{len(reference.uncompared)} running statistics were not compared: each rank gathers them over its own "
            "samples, one process over all of them in turn."
        )
    if noise:
        few = ", ".join(sorted(noise)[:3])
        notes.append(
            f"{len(noise)} tensors are, at some steps, decided by rounding alone, on one process too, and say nothing "
            f"there: {few}{' and others' if len(noise) > 3 else ''}."
        )
    return notes
