"""`plait plan --states-only`: memory of weights, gradients and optimizer, as DeepSpeed's estimators count it."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from plait.config import RunConfig, parse
from plait.errors import ConfigError, ModelError, Problem


def show_states(config: str, overrides: Sequence[str], *, gpus: int = 1) -> None:
    """Print the account of the run's own model, and DeepSpeed's tables for it. The model is never given storage."""
    found = parse(config, overrides).config

    from plait.plan import account_of, zero2_table, zero3_table

    total, largest = _count(found)
    account = account_of(found, total)
    head = f"{total / 1e6:,.1f}M parameters, {largest / 1e6:,.1f}M in the largest layer"
    typer.echo(f"{head}: {found.precision.compute}, {found.optim.type}")
    for name, each, size in account.rows():
        typer.echo(f"  {name:<10} {each:4g} B a parameter  {size:10.2f} GB")
    typer.echo("Without activations, buffers and what torch itself takes: `plait plan` counts those too.\n")
    typer.echo("ZeRO-2, as DeepSpeed estimates it (16-bit weights, Adam; GB of 2^30 bytes)")
    typer.echo(zero2_table(total, gpus) + "\n")
    typer.echo("ZeRO-3, as DeepSpeed estimates it (16-bit weights, Adam; GB of 2^30 bytes)")
    typer.echo(zero3_table(total, largest, gpus))


def _count(config: RunConfig) -> tuple[int, int]:
    if config.model is None:
        raise ConfigError(Problem("model", "there is none", "Add a section `model` with a `type`."))
    import torch

    from plait.cli.here import import_from_here
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
