"""`plait launch`: start a script on the slots of one or several hosts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from plait.errors import WorldError
from plait.launch import (
    LaunchOptions,
    PreparedLaunch,
    code_folder,
    find_program,
    flags,
    in_allocation,
    misplaced_flag,
    missing_program,
    parse_options,
    prepare_launch,
)

if TYPE_CHECKING:
    from plait.launch import HostCheck, Preflight

_MOST_ROWS = 32
"""If there are more hosts, the table shows only those with a finding."""

_WIDTH = 150
"""Width of tables. A narrow terminal breaks their rows, which is easier to read than truncated columns."""


def launch(argv: Sequence[str]) -> None:
    """Parse the flags, check the hosts, run the job, and exit with the exit code of the worst rank."""
    if list(argv) in ([], ["-h"], ["--help"]):
        flags().print_help()
        return
    options = parse_options(argv)
    if (remark := misplaced_flag(options)) is not None:
        print(f"plait: note: {remark}", file=sys.stderr)
    setup = prepare_launch(options, argv)
    if options.autotuning is not None:
        _tune(setup)
        return
    if options.dry_run:
        print("\n".join(command.shown() for command in setup.commands()))
    elif options.preflight:
        sys.exit(0 if _checked(setup).good else 1)
    else:
        if setup.launcher == "local":
            _look_for_program(options)
        if setup.remote and not options.no_ssh_check:
            setup = _cleared(setup)
        sys.exit(setup.run())


def _look_for_program(options: LaunchOptions) -> None:
    """Raise an error for a missing script or program here, once, instead of on every rank."""
    script = options.script
    if options.module:
        return
    if options.no_python and find_program(script) is None:
        raise WorldError(missing_program(script))
    if not options.no_python and not Path(script).exists():
        raise WorldError(
            f"no script {script!r} in {Path.cwd()}; for a program or a Python module, add --no_python or --module"
        )


def _tune(setup: PreparedLaunch) -> None:
    """Run `plait tune` on a run description; `--autotuning run` trains with the best settings."""
    options = setup.options
    program = "plait" if options.module else Path(options.script).name
    described = (options.module or options.no_python) and program == "plait" and options.arguments[:1] == ("train",)
    if not described or len(options.arguments) < 2:
        raise WorldError(
            f"--autotuning {options.autotuning}: only a run description can be tuned, not a script: "
            f"plait launch --autotuning {options.autotuning} --no_python plait train run.yaml"
        )
    if setup.launcher != "local":
        raise WorldError(f"--autotuning {options.autotuning}: trials run on one host; leave out the hostfile")
    from plait.cli.tune import search

    _, config, *overrides = options.arguments
    search(config, overrides, options={"nproc": setup.job.size}, then_train=options.autotuning == "run")


def _cleared(setup: PreparedLaunch) -> PreparedLaunch:
    """Return the launch with the address and port that its hosts reported; raise an error if a check failed."""
    checked = _checked(setup)
    if not checked.good:
        raise WorldError("nothing was started; the table above says what to change")
    return replace(setup, job=checked.job)


def _checked(setup: PreparedLaunch) -> Preflight:
    if setup.launcher == "slurm" and not in_allocation():
        raise WorldError("--preflight: Slurm has not allocated hosts yet; run it inside an allocation")
    from plait.launch import preflight

    fixed = None if setup.options.master_port is None else setup.options.master_port_by
    checked = preflight(setup.job, setup.reach, code=code_folder(setup.options), fixed_port=fixed)
    _show(checked)
    return checked


def _show(checked: Preflight) -> None:
    """Print the table of hosts, and below it the findings with their remedies."""
    from rich.console import Console
    from rich.table import Table

    columns = (
        "host",
        "python",
        "torch",
        "cuda",
        "plait",
        "code",
        "free memory",
        "GPUs",
        "folder",
        "clock",
        "network",
        "",
    )
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    troubled = {finding.host for finding in checked.findings}
    shown = [check for check in checked.checks if len(checked.checks) <= _MOST_ROWS or check.host in troubled]
    for check in shown:
        fatal = any(finding.fatal for finding in checked.findings if finding.host == check.host)
        status = "[red]no[/]" if fatal else "[yellow]see below[/]" if check.host in troubled else "[green]ok[/]"
        table.add_row(*_row(check), status)
    console = Console(stderr=True, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    console.print(table)
    if hidden := len(checked.checks) - len(shown):
        console.print(f"and {hidden} more hosts without findings")
    job = checked.job
    console.print(f"{job.size} ranks on {len(job.nodes)} hosts; rank 0 listens on {job.address} port {job.port}")
    for finding in checked.findings:
        severity = "error" if finding.fatal else "warning"
        console.print(f"{severity}: {finding.host}: {finding.what}\n      {finding.remedy}", markup=False)


def _row(check: HostCheck) -> list[str]:
    facts = check.facts
    if facts is None:
        return [check.host, "no answer", *[""] * 9]
    gpus = f"{facts.gpus}, {facts.gpu_memory >> 30} GiB free" if facts.gpu_memory is not None else "none"
    return [
        check.host,
        facts.python,
        facts.torch or "absent",
        facts.cuda or "none",
        facts.plait or "absent",
        facts.code,
        f"{facts.memory / 2**30:.1f} GiB",
        gpus,
        "shared" if facts.shared else "its own",
        f"{check.skew:+.1f} s" if check.skew else "right",
        facts.interface or "",
    ]
