"""Run a proof: the reference (one process), the candidate (the user's strategy), and their comparison."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.config import (
    LAYER_KEYS,
    HFConfig,
    Layout,
    ResolvedBatch,
    RunConfig,
    StrategyConfig,
    check_complete,
    counted,
    depth_of,
    min_ranks,
    parse,
    parse_sections,
    resolve_batch,
    resolve_layout,
    to_dict,
    with_depth,
)
from plait.errors import ConfigError, Problem, TrainingError
from plait.launch import STOPPED_CODES, gpu_count, run_ranks
from plait.prove.certificate import Certificate, Check, compare_findings, write_page
from plait.prove.compare import Rounding, rounding_of
from plait.prove.job import PERTURBED, TRACE, ProofJob, ProofTrace

# The run descriptions of the reference and of the candidate, from that of the user.


_TIME_KEYS = ("by_epoch", "max_epochs", "max_steps", "clip_norm", "clip_value", "guard")
"""The keys of `train` that affect a step. The others are about validating and stopping."""


@dataclass(frozen=True, slots=True)
class Cases:
    """Two run descriptions that must compute the same."""

    reference: RunConfig
    """One process, without sharding, recomputation, compilation and offload."""
    candidate: RunConfig
    layout: Layout
    batch: ResolvedBatch
    """The batch sizes of the candidate; the reference has the same `total` and `micro`."""
    remarks: tuple[str, ...]
    """Sentences on how both differ from the user's own run."""


def make_cases(config: RunConfig, *, ranks: int | None = None, layers: int | None = None) -> Cases:
    """Return the two runs. Without `ranks`, the candidate has `default_ranks`; `layers` shrinks the model."""
    remarks: list[str] = []
    size = ranks or default_ranks(config)
    layout = resolve_layout(config.strategy, size=size, local_size=size)
    _refuse_what_is_one_process(config, layout)
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=config.strategy.pipeline.micro_batches)
    base = _common(config, remarks)
    if layers is not None:
        base["model"] = shrink(config, layers, remarks)
    if config.device in ("auto", "cuda") and gpu_count() < size:
        base |= {"device": "cpu", "backend": "auto" if config.backend == "nccl" else config.backend}
        if gpu_count() or config.device == "cuda":
            remarks.append(f"Both runs were on the CPU: {size} ranks need as many GPUs, and here are {gpu_count()}.")
    base["batch"] = {"total": batch.total, "micro": batch.micro}
    if config.strategy.stage > 0 and layout.dp_shard * layout.ep * layout.cp == 1:
        remarks.append(f"Nothing was sharded: the layout leaves one rank for it. `--ranks {2 * size}` would show it.")
    single = {**base, "strategy": {"meta_init": config.strategy.meta_init}}
    return Cases(_parsed(single), _parsed(base), layout, batch, tuple(remarks))


def default_ranks(config: RunConfig) -> int:
    """Return the product of the axis sizes that the layout sets; 2 if that is 1 and data parallelism is not set."""
    layout, fixed = config.strategy.layout, min_ranks(config.strategy)
    free = layout.dp_replicate is None or layout.dp_shard is None
    return 2 if fixed == 1 and free else fixed


def shrink(config: RunConfig, layers: int, remarks: list[str]) -> dict[str, Any]:
    """Return the `model` section with `layers` layers; add remarks on the change to `remarks`."""
    model = config.model
    depth = depth_of(model)
    if model is None or depth is None:
        message = f"{layers}: a {getattr(model, 'type', 'model')} has no number of layers to shrink"
        raise ConfigError(Problem("--layers", message, f"Leave it out, or set one of {', '.join(LAYER_KEYS)}."))
    if layers > depth:
        raise ConfigError(Problem("--layers", f"{layers}, and the model has {depth}", "Write fewer, or leave it out."))
    remarks.append(f"The model was shrunk from {depth} to {layers} layers.")
    if isinstance(model, HFConfig) and model.path is not None and model.pretrained:
        remarks.append("The shrunk model started from random weights, not from the pretrained ones.")
    shrunk = with_depth(model, layers)
    section: dict[str, Any] = dict(to_dict(config.model_copy(update={"model": shrunk}))["model"])
    return {key: value for key, value in section.items() if value is not None}


def _common(config: RunConfig, remarks: list[str]) -> dict[str, Any]:
    """Return the sections that affect a step, without validation, hooks, checkpoints and logs."""
    base = to_dict(config)
    dropped = ("val_data", "test_data", "hooks", "checkpoint", "log", "batch")
    base = {key: value for key, value in base.items() if key not in dropped and value is not None}
    train = {key: value for key, value in base["train"].items() if key in _TIME_KEYS and value is not None}
    if config.strategy.engine == "native":
        train["audit"] = "off"  # what differs between ranks is to be compared and named, not to stop a run
    base["train"] = train
    base["log"] = {"console": "none", "sinks": []}
    if config.hooks:
        remarks.append(f"Hooks were left out: {', '.join(hook.type for hook in config.hooks)}.")
    if config.checkpoint.resume is not None:
        remarks.append("Both runs began with fresh weights, not with `checkpoint.resume`.")
    return base


def _parsed(sections: Mapping[str, Any]) -> RunConfig:
    return parse_sections(**sections).config


def techniques_of(strategy: StrategyConfig) -> list[str]:
    """Return the techniques of a strategy besides sharding, each in a word or two."""
    offload = strategy.offload
    techniques = {
        f"engine {strategy.engine_name}": strategy.engine != "native",
        f"recompute {strategy.recompute.mode}": strategy.recompute.mode != "none",
        "compile": strategy.compile.enabled,
        f"offload {offload.optimizer}": offload.on,
        f"weights in {'host memory' if offload.params == 'cpu' else 'files'}": offload.params != "none",
        "offloaded activations": offload.activations != "none",
        "tiles": bool(strategy.tiles.names),
    }
    return [name for name, is_so in techniques.items() if is_so]


def _refuse_what_is_one_process(config: RunConfig, layout: Layout) -> None:
    if layout.size == 1 and not techniques_of(config.strategy):
        message = "one rank without recompute, compile or offload is the reference itself"
        raise ConfigError(
            Problem("strategy", message, "Give `--ranks 2`, or a strategy that differs from one process.")
        )


def prove(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    steps: int = 5,
    ranks: int | None = None,
    layers: int | None = None,
    out: str | Path | None = None,
    log: Callable[[str], None] = lambda _text: None,
) -> Certificate:
    """Return a certificate of whether a run computes the same under its strategy as on one process.

    `steps` steps of the run's own model and data are trained twice, by one process and by `ranks` processes. Loss,
    gradient norm, every parameter and every optimizer state are compared after each step. `layers` shrinks a model that
    is too large for one process. With `out`, a folder, `certificate.json` and `certificate.html` are written there. The
    run's own `work_dir` is not changed. `log` is called with a line of text at each stage.
    """
    config = _checked(source, overrides, steps)
    if out is not None:
        _prepare_folder(Path(out))
    cases = make_cases(config, ranks=ranks, layers=layers)
    rounding = rounding_of(config.precision, on_cpu=cases.candidate.device == "cpu")
    with tempfile.TemporaryDirectory(prefix="plait-prove-") as folder:
        one, many = Path(folder, "reference"), Path(folder, "candidate")
        log(f"reference: one process, {counted(steps, 'step')}, twice")
        _run(ProofJob(to_dict(cases.reference), str(one), steps, perturbation=rounding.epsilon), 1, "the reference")
        log(f"candidate: {name_of(cases.candidate, cases.layout)}, {counted(steps, 'step')}")
        _run(ProofJob(to_dict(cases.candidate), str(many), steps, against=str(one)), cases.layout.size, "the candidate")
        traces = [ProofTrace.read(path / TRACE) for path in (one, one / PERTURBED, many)]
    certificate = certify(cases, rounding, *traces)
    if out is not None:
        certificate.write(Path(out, "certificate.json"))
        write_page(certificate, Path(out, "certificate.html"))
    return certificate


def _checked(source: str | Path | Mapping[str, Any], overrides: Sequence[str], steps: int) -> RunConfig:
    """Return the run description, checked as far as possible without starting a process."""
    parsed = parse(source, overrides)
    check_complete(parsed, require_length=False)
    if steps < 1:
        raise ConfigError(Problem("--steps", f"{steps}: there is nothing to compare", "Give 1 or more."))
    return parsed.config


def _prepare_folder(out: Path) -> None:
    """Make the folder of the certificate, and check that it is writable, before running steps."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        message = f"{str(out)!r} cannot be written to: {error.strerror}"
        raise ConfigError(Problem("--out", message, "Give another folder.")) from error


def _run(job: ProofJob, ranks: int, who: str) -> None:
    folder = Path(job.folder)
    folder.mkdir()
    job.write(folder / "job.json")
    code = run_ranks([sys.executable, "-m", "plait.prove.record", str(folder / "job.json")], ranks)
    if code in STOPPED_CODES:
        sys.exit(code)  # the ranks were stopped by a signal, which is meant for this process too
    if code:
        raise TrainingError(f"{who} failed with exit code {code}, so there is nothing to compare")


def name_of(config: RunConfig, layout: Layout) -> str:
    """Return a strategy in a few words: `zero3 on 2 ranks`, `zero1, pp 2, tp 2, offload cpu on 8 ranks`."""
    stage = config.strategy.stage
    axes = [f"{axis} {size}" for axis, size in layout.sizes().items() if size > 1 and not axis.startswith("dp_")]
    sharding = [f"zero{stage}" if stage else "ddp"] if layout.data_parallel > 1 or stage else []
    count = f"{layout.size} rank{'s' if layout.size > 1 else ''}"
    return f"{', '.join([*sharding, *axes, *techniques_of(config.strategy)])} on {count}"


def certify(
    cases: Cases, rounding: Rounding, reference: ProofTrace, perturbed: ProofTrace, candidate: ProofTrace
) -> Certificate:
    """Return the certificate of the three runs of a proof."""
    config, batch = cases.candidate, cases.batch
    assert config.model is not None
    facts = {
        "candidate": name_of(config, cases.layout),
        "reference": "one process, nothing sharded, recomputed, compiled or offloaded",
        "model": config.model.type,
        "optimizer": config.optim.type,
        "precision": f"{config.precision.compute} compute, {config.precision.reduce} reduction",
        "layout": " × ".join(f"{axis} {size}" for axis, size in cases.layout.sizes().items()),
        "batch": f"{batch.total} samples per step in both runs, in micro-batches of {batch.micro}",
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
    findings = compare_findings(reference, perturbed, candidate, rounding)
    checks = [Check(*check) for check in candidate.checks]
    noise = {finding.name for finding in findings if finding.is_noise}
    remarks = [*cases.remarks, *_remarks(cases, reference, candidate, noise)]
    return Certificate(facts, rounding.explain(), steps, findings, checks, remarks)


def _remarks(cases: Cases, reference: ProofTrace, candidate: ProofTrace, noise: set[str]) -> list[str]:
    remarks = []
    if reference.drops:
        where = ", ".join(name or "the model itself" for name in reference.drops[:3])
        more = f" and {len(reference.drops) - 3} more" if len(reference.drops) > 3 else ""
        remarks.append(
            f"Dropout was set to 0 for the comparison, in {where}{more}: two layouts do not draw the same numbers."
        )
        if cases.candidate.strategy.compile.enabled:
            remarks.append("Dropout itself was not checked: random numbers of compiled code cannot be observed.")
        elif not candidate.checks:
            remarks.append("Dropout itself was not checked: all ranks have different layers.")
    if reference.random or candidate.random:
        remarks.append(
            "The model drew random numbers during a step although all dropout that was found is off. A difference may "
            "be due to these numbers alone."
        )
    if reference.uncompared:
        remarks.append(
            f"{len(reference.uncompared)} running statistics were not compared: each rank computes them over its own "
            "samples, one process over all samples."
        )
    if noise:
        few = ", ".join(sorted(noise)[:3])
        remarks.append(
            f"{len(noise)} tensors are decided by rounding alone at some steps, on one process too, and were not "
            f"compared there: {few}{' and others' if len(noise) > 3 else ''}."
        )
    return remarks
