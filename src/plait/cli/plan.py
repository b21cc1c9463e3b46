"""`plait plan`: the memory and time of a run, before it starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from plait.cli.files import import_from_here, write_file
from plait.config import RunConfig, min_ranks, parse, resolve_batch, resolve_layout, sample_unit
from plait.errors import ConfigError, ModelError, Problem
from plait.launch import Phase
from plait.monitor import format_duration

if TYPE_CHECKING:
    from rich.console import Console

    from plait.plan import Hardware, Known, Plan, Remedy, Search

GIB, MIB = 2**30, 2**20
_SHOWN = 12
"""The number of a search's results that are shown; the file of `--out` has all."""
_PHASES = [phase for phase in Phase if phase not in (Phase.EVALUATE, Phase.IDLE, Phase.LEFT)]
"""The phases that the table shows, in the order of a run that resumes from a checkpoint."""
_WHOLE_GIB = 10.0
"""From this size on, host memory is shown in whole GiB."""
_NOTABLE_S = 1e-3
"""Copies that take less time are not shown, as every run copies its inputs."""


_ALONE = {
    "--schedule": ("--states-only", "--search", "--gpu", "--exact", "--timeline"),
    "--states-only": ("--search", "--gpu", "--exact", "--timeline", "--out"),
    "--search": ("--exact", "--timeline"),
}
"""For each mode, the options that have no effect in it."""


def check_use(given: dict[str, object]) -> None:
    """Raise a `ConfigError` for options without effect in the given mode. `given` has the value of each option."""
    for mode, others in _ALONE.items():
        if given[mode] and (idle := [option for option in others if given[option]]):
            raise ConfigError(
                [Problem(option, f"no effect beside {mode}", "Leave one of the two out.") for option in idle]
            )


def draw_pipeline(config: str, overrides: Sequence[str], out: str | None, *, ranks: int | None) -> None:
    """Draw the pipeline schedule of a run: which micro-batch each stage works on at each time, and when it waits."""
    run = parse(config, overrides).config
    strategy = run.strategy
    if strategy.layout.pp == 1:
        message = "1: the run has no pipeline, hence no schedule to draw"
        raise ConfigError(Problem("strategy.layout.pp", message, "Write `strategy.layout.pp: 2`, or more."))
    size = ranks or min_ranks(run.strategy)
    layout = resolve_layout(strategy, size=size, local_size=size)
    pipeline = strategy.pipeline
    batch = resolve_batch(run.batch, layout.data_parallel, micro_batches=pipeline.micro_batches)

    from plait.distributed import draw_schedule, theoretical_bubble

    picture = draw_schedule(pipeline.schedule, layout.pp, batch.accumulation, pipeline.stages_per_rank)
    path = Path(out or "schedule.svg")
    write_file(path, picture, "--out")
    idle = theoretical_bubble(pipeline.schedule, layout.pp, batch.accumulation, pipeline.stages_per_rank)
    micro = f"{batch.accumulation} micro-batch{'' if batch.accumulation == 1 else 'es'}"
    typer.echo(f"{path}: {pipeline.schedule} over {layout.pp} ranks, {micro}, {idle:.1%} idle")


def plan_run(
    source: str,
    overrides: Sequence[str],
    *,
    gpu: str | None,
    gpus: int | None,
    out: str | None,
    timeline: str | None,
    exact: bool,
) -> bool:
    """Show the plan of a run, and what to change if it does not fit; return whether it fits."""
    from rich.console import Console

    from plait.engine import planned_as
    from plait.plan import make_plan

    asked = parse(source, overrides).config
    if asked.strategy.auto:
        message = "true: a plan needs one strategy, and this run searches for it when it starts"
        raise ConfigError(Problem("strategy.auto", message, "Add --search, or write a strategy."))
    import_from_here()
    config = planned_as(asked)
    if isinstance(config, str):
        raise ConfigError(Problem("strategy.engine", f"no plan: {config}", "Plan with `engine: native`."))
    machine, ranks = _machine(gpu, config), gpus or min_ranks(config.strategy)
    known: Known = {}
    plan = make_plan(config, machine, ranks=ranks, exact=exact or timeline is not None, known=known)
    console = Console(soft_wrap=True)
    if asked is not config:
        stage = config.strategy.stage
        console.print(
            f"engine {asked.strategy.engine_name}: planned as the native engine at ZeRO stage {stage}, which is near"
        )
    _show(console, plan, config)
    if out is not None:
        write_file(out, json.dumps(plan.to_dict(), indent=1) + "\n", "--out")
        console.print(f"{out}: all figures")
    if timeline is not None:
        from plait.plan import draw_timeline

        write_file(timeline, draw_timeline(plan), "--timeline")
        console.print(f"{timeline}: memory from the build to a save")
    if not plan.fits:
        _show_remedies(console, config, machine, ranks, known)
    return plan.fits


def search_run(source: str, overrides: Sequence[str], *, gpu: str | None, gpus: int | None, out: str | None) -> bool:
    """Show the fastest strategies of a run that fit, and why the others do not; return whether any fits."""
    from plait.cli.columns import wide_console
    from plait.plan import search

    config = parse(source, overrides).config
    import_from_here()
    machine, ranks = _machine(gpu, config), gpus or min_ranks(config.strategy)
    console = wide_console()
    result = search(config, machine, ranks=ranks, log=lambda text: console.print(text, style="dim"))
    _show_search(console, result, config, ranks)
    if out is not None:
        rows = [
            {
                "settings": dict(way.candidate.settings),
                "reason": way.reason,
                "tokens_per_second": way.tokens_per_second,
                "needed_gib": None if way.plan is None else way.plan.needed_gib,
            }
            for way in result.results
        ]
        write_file(out, json.dumps(rows, indent=1) + "\n", "--out")
        console.print(f"{out}: all {len(rows)} ways")
    return result.best is not None


def _machine(gpu: str | None, config: RunConfig) -> Hardware:
    from plait.plan import find_hardware, hardware_here

    given = gpu or config.plan.hardware
    return hardware_here(config.device) if given is None else find_hardware(given)


def _show(console: Console, plan: Plan, config: RunConfig) -> None:
    from rich.table import Table

    machine, layout = plan.hardware, plan.layout
    axes = ", ".join(f"{axis} {size}" for axis, size in layout.sizes().items() if size > 1) or "one process"
    console.print(f"[bold]{layout.size} × {machine.name}[/]: {axes}, ZeRO {config.strategy.stage}", highlight=False)
    status = "[green]fits[/]" if plan.fits else "[red]does not fit[/]"
    where = "on a device" if machine.kind == "cuda" else "for a process"
    host = f"{plan.host_gib:.0f}" if plan.host_gib >= _WHOLE_GIB else f"{plan.host_gib:.1f}"
    console.print(
        f"{status}: {plan.needed_gib:.2f} of {machine.memory_gib:.1f} GiB {where} ({plan.fullest.name}), "
        f"{host} of {machine.host_memory_gib:.0f} GiB on a host",
        highlight=False,
    )
    console.print(_counts(plan, sample_unit(config.data)), highlight=False)
    unit, size = ("GiB", GIB) if plan.fullest.ledger.peak[1] >= GIB else ("MiB", MIB)
    names = [column.format(rank.name) for rank in plan.ranks for column in _columns(plan)]
    table = Table(unit, *names, box=None, pad_edge=False, header_style="bold")
    for name, held in _memory_rows(plan):
        cells = ["" if value is None else f"{value / size:9.2f}" for value in held]
        if name.endswith(":") or any(float(cell or 0) for cell in cells):  # skip rows that would be shown as 0.00
            table.add_row(name, *cells)
    console.print(table)
    mfu = "" if plan.mfu is None else f", {plan.mfu:.1%} of the peak"
    cost = plan.dollars_per_billion()
    unit = sample_unit(config.data)
    price = "" if cost is None else f", ${cost:,.0f} per billion {unit}"
    console.print(
        f"[bold]{plan.seconds:.3g} s per step[/], {plan.tokens_per_second:,.0f} {unit}/s{mfu}{price}", highlight=False
    )
    times = Table("seconds", *(rank.name for rank in plan.ranks), box=None, pad_edge=False, header_style="bold")
    for name, values in _time_rows(plan):
        times.add_row(name, *(f"{value:9.4f}" if value else "" for value in values))
    console.print(times)
    if plan.bubble:
        console.print(f"{plan.bubble:.1%} of the pipeline's time is idle ({config.strategy.pipeline.schedule})")
    if config.train.max_steps is not None:
        console.print(f"{config.train.max_steps:,} steps take {format_duration(plan.seconds * config.train.max_steps)}")
    for remark in plan.notes:
        console.print(f"note: {remark}", markup=False, highlight=False)
    if machine.kind == "cpu" and not machine.measured:
        console.print("note: seconds are those of ordinary cores; `plait doctor --measure` finds those of this machine")


def _counts(plan: Plan, unit: str) -> str:
    """Return a line: the parameters of the model, tokens per step, and the axes of the layout that cross hosts."""
    texts = []
    if plan.params is not None:
        active = "" if plan.active_params is None else f", {_billions(plan.active_params)} active"
        texts.append(f"{_billions(plan.params)} parameters{active}")
    texts.append(f"{plan.tokens_per_step:,.0f} {unit} per step")
    if plan.layout.size > plan.hardware.per_host:
        axes = ", ".join(plan.axes_across_hosts) or "no axis"
        texts.append(f"{axes} across hosts of {plan.hardware.per_host}")
    return "; ".join(texts)


def _billions(count: int) -> str:
    """Return a number of parameters as the names of models have it: `671.0B`, `8.03B`, `124M`, `12,345`."""
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:,.{2 if count < 10 * size else 1}f}{letter}"
    return f"{count:,}"


def _memory_rows(plan: Plan) -> Iterator[tuple[str, list[float | None]]]:
    """Yield rows by phase and by category, with columns per rank: device memory, and host memory if separate."""
    from plait.plan import host_peaks

    width = len(_columns(plan))
    peaks = [(rank.ledger.peaks(), host_peaks(rank.ledger, plan.hardware))[:width] for rank in plan.ranks]
    for phase in _PHASES:
        yield phase, [column.get(phase) for columns in peaks for column in columns]
    yield "at the peak:", []
    for name, values in _category_rows(plan):
        yield name, [cell for value in values for cell in (value, None)[:width]]


def _columns(plan: Plan) -> list[str]:
    return ["{}", "its host memory"] if plan.hardware.kind == "cuda" else ["{}"]


def _category_rows(plan: Plan) -> Iterator[tuple[str, list[float]]]:
    ledgers = [rank.ledger for rank in plan.ranks]
    held = [ledger.under("part") for ledger in ledgers]
    categories = dict.fromkeys(category for bytes_by_category in held for category in bytes_by_category)
    rows = {
        category: [bytes_by_category.get(category, 0.0) for bytes_by_category in held]
        for category in sorted(categories, key=lambda p: -held[0].get(p, 0.0))
    }
    rows["kept free by the allocator"] = [max(0.0, a.numbers["reserved"] - a.peak[1]) for a in ledgers]
    before = "CUDA context" if plan.hardware.kind == "cuda" else "Python and its libraries"
    rows[before] = [plan.hardware.context_gib * GIB] * len(ledgers)
    yield from ((f"  {name}", values) for name, values in rows.items())
    yield "a checkpoint of the rank", [ledger.numbers["state"] for ledger in ledgers]


def _time_rows(plan: Plan) -> Iterator[tuple[str, list[float]]]:
    ledgers = [rank.ledger for rank in plan.ranks]
    operations = sorted({key.split(".")[1] for ledger in ledgers for key in ledger.under("compute")})
    for operation in operations:
        ending = f".{operation}"
        yield operation, [sum(v for k, v in a.under("compute").items() if k.endswith(ending)) for a in ledgers]
    axes = sorted({key.rpartition(".")[0] for ledger in ledgers for key in ledger.under("sent")})
    for axis in axes:
        how = "waited for" if any(a.total("waited", axis) for a in ledgers) else "beside computing"
        yield f"messages {axis}, {how}", [a.total("waited", axis) + a.total("hidden", axis) for a in ledgers]
    yield "host, beside the device", [ledger.total("host") for ledger in ledgers]
    for way, label in (("out", "copies to the host"), ("in", "copies to the device"), ("files", "weights from files")):
        values = [ledger.total("link", way) for ledger in ledgers]
        if max(values) > _NOTABLE_S:
            yield f"{label}, beside computing", values
    if any(ledger.total("update") for ledger in ledgers):
        yield "update of what is offloaded", [ledger.on_host() for ledger in ledgers]
        yield "  of that waited for", [ledger.updating() for ledger in ledgers]


def _show_remedies(console: Console, config: RunConfig, machine: Hardware, ranks: int, known: Known) -> None:
    """Print each remedy when its plan is ready; then what to write, that nothing helps, or that time ran out."""
    from plait.plan import RemedySearch

    console.print("\nChanges in order, each added to those before:")
    remedies = RemedySearch(config, machine, ranks, known=known)
    tried: list[Remedy] = []
    for remedy in remedies.remedies():
        tried.append(remedy)
        changes = " ".join(remedy.added.changes(config))
        if remedy.reason:
            console.print(f"  {changes}: {remedy.reason}", markup=False, highlight=False)
        elif remedy.plan is None:
            console.print(f"  {changes}: at least {remedy.least:.1f} GiB, too much", highlight=False)
        else:
            host = (
                "" if remedy.plan.host_gib <= machine.host_memory_gib else f" and {remedy.plan.host_gib:.0f} on a host"
            )
            status = "[green]fits[/]" if remedy.fits else "too much"
            console.print(f"  {changes}: {remedy.plan.needed_gib:.1f} GiB{host}, {status}", highlight=False)
    if tried and tried[-1].fits:
        least = remedies.without_needless(tried)
        assert least.plan is not None
        changes, needed = " ".join(least.candidate.changes(config)), least.plan.needed_gib
        console.print(f"Needed changes: {changes} ({needed:.1f} GiB)", markup=False, highlight=False)
    elif not remedies.cut:
        console.print("None of this makes it fit. `--search` looks at pipelines too; else use more devices.")
    if left_out := remedies.left_out(tried):
        console.print(left_out, markup=False, highlight=False)


def _show_search(console: Console, result: Search, config: RunConfig, ranks: int) -> None:
    from rich.table import Column, Table

    from plait.cli.columns import as_columns

    shown = result.results[:_SHOWN]
    columns = as_columns(config, [entry.candidate for entry in shown], ranks)
    figures = [Column(title, justify="right", no_wrap=True) for title in (f"{sample_unit(config.data)}/s", "GiB")]
    titles = [Column(title, no_wrap=True) for title in columns]
    table = Table(*figures, *titles, "", box=None, pad_edge=False, header_style="bold")
    for index, entry in enumerate(shown):
        needed = "" if entry.plan is None else f"{entry.plan.needed_gib:.1f}"
        remark = entry.reason or ("" if entry.candidate.settings else "as written")
        cells = [column[index] for column in columns.values()]
        about = "" if entry.plan else "~"  # an estimate: no plan was made
        table.add_row(f"{about}{entry.tokens_per_second:,.0f}", needed, *cells, remark, style="dim" if about else None)
    console.print(table)
    if len(result.results) > _SHOWN:
        console.print(f"and {len(result.results) - _SHOWN} more; all of them with --out FILE ({result.seconds:.0f} s)")
    if result.best is None:
        console.print("[red]nothing fits[/]")
        return
    changes = " ".join(result.best.candidate.changes(config)) or "nothing to change"
    console.print(f"[bold]fastest:[/] {changes}", highlight=False)


# `plait plan --states-only`: memory of weights, gradients and optimizer, as DeepSpeed's estimators count it.


def show_states(config: str, overrides: Sequence[str], *, gpus: int = 1) -> None:
    """Print the sizes of the model states, and DeepSpeed's tables for the model. Its weights are not allocated."""
    run = parse(config, overrides).config

    from plait.plan import estimate_states, zero2_table, zero3_table

    total, largest = _count(run)
    state_memory = estimate_states(run, total)
    head = f"{total / 1e6:,.1f}M parameters, {largest / 1e6:,.1f}M in the largest layer"
    typer.echo(f"{head}: {run.precision.compute}, {run.optim.type}")
    for name, per_param, size in state_memory.rows():
        typer.echo(f"  {name:<10} {per_param:4g} B per parameter  {size:10.2f} GB")
    typer.echo("Without activations, buffers and what torch itself takes: `plait plan` counts those too.\n")
    typer.echo("ZeRO-2, as DeepSpeed estimates it (16-bit weights, Adam; GB of 2^30 bytes)")
    typer.echo(zero2_table(total, gpus) + "\n")
    typer.echo("ZeRO-3, as DeepSpeed estimates it (16-bit weights, Adam; GB of 2^30 bytes)")
    typer.echo(zero3_table(total, largest, gpus))


def _count(config: RunConfig) -> tuple[int, int]:
    if config.model is None:
        raise ConfigError(Problem("model", "it is missing", "Add a section `model` with a `type`."))
    import torch

    from plait.models import build_model
    from plait.plan import count_params

    import_from_here()
    try:
        with torch.device("meta"):
            return count_params(build_model(config.model, trust_code=config.trust_code))
    except (RuntimeError, NotImplementedError) as error:
        raise ModelError(
            f"the model cannot be built on the meta device, where it costs no memory: {error}. Give its number of "
            "parameters to plait.plan.states.estimate_zero3_model_states_mem_needs_all_cold instead"
        ) from error
