"""The `plait` command. Each subcommand loads what it needs when it runs; `plait --help` loads no torch."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from plait.errors import PlaitError

app = typer.Typer(
    name="plait",
    help="Train large PyTorch models: say once what to train, and in one small section how it is spread.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings on top of the file, as dotted keys: `strategy.zero=3 optim.lr=3e-4`."),
]


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="Run description: YAML, TOML, or JSON (comments allowed).")],
    overrides: Overrides = None,
    nproc: Annotated[
        str, typer.Option("--nproc", "-n", help="Processes on this machine: a number, or `gpu` for one a GPU.")
    ] = "1",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the resolved settings and where each came from; start nothing.")
    ] = False,
) -> None:
    """Train as a run description says."""
    from plait.cli.train import train as run

    run(config, overrides or [], nproc=nproc, dry_run=dry_run)


@app.command()
def plan(
    config: Annotated[str, typer.Argument(help="Run description: YAML, TOML, or JSON (comments allowed).")],
    overrides: Overrides = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Draw the pipeline: who works on which micro-batch, when.")
    ] = False,
    nproc: Annotated[int | None, typer.Option("--nproc", "-n", help="Processes; absent: as few as will do.")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Where to write; absent: schedule.svg.")] = None,
) -> None:
    """Show what a run will do before it starts. For now: the schedule of its pipeline."""
    from plait.cli.plan import draw_pipeline
    from plait.errors import ConfigError, Problem

    if not schedule:
        raise ConfigError(Problem("--schedule", "not given", "it is the only plan there is so far"))
    draw_pipeline(config, overrides or [], out, nproc=nproc)


@app.command()
def convert(
    src: Annotated[str | None, typer.Argument(help="A checkpoint of Plait, FSDP, DeepSpeed or Hugging Face.")] = None,
    dst: Annotated[str | None, typer.Argument(help="Where to write: a folder, or a file with `--to torch`.")] = None,
    to: Annotated[str | None, typer.Option("--to", help="What to write: hf, torch, plait or deepspeed.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: keep, fp32, bf16 or fp16.")] = "keep",
    model: Annotated[
        str | None,
        typer.Option(help="gpt, llama, moe: take weights of transformers as Plait's own. With `--to hf`: its folder."),
    ] = None,
    weights: Annotated[str, typer.Option(help="model, or ema for the averages that the hook kept.")] = "model",
    shard_size: Annotated[str, typer.Option(help="Largest file of an hf folder.")] = "5GB",
    optimizer: Annotated[bool, typer.Option("--optimizer", help="With `--to torch`: its state too.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    inspect: Annotated[str | None, typer.Option(metavar="PATH", help="Show what is in a checkpoint instead.")] = None,
    every: Annotated[bool, typer.Option("--all", help="With --inspect: a row for each tensor.")] = False,
) -> None:
    """Turn a checkpoint into another kind, or look into it."""
    from plait.cli import convert as commands

    if inspect is not None:
        commands.inspect(inspect, every=every)
    else:
        commands.convert(
            src, dst, commands.Options(to, dtype, model, weights, shard_size, optimizer=optimizer, overwrite=overwrite)
        )


@app.command()
def generate(
    run_dir: Annotated[str, typer.Argument(help="The work_dir of a run, or one of its checkpoints.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option("--tokens", "-t", min=1, help="At most so many new tokens.")] = 120,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Choose among so many likeliest tokens.")] = 50,
    seed: Annotated[int, typer.Option(help="Another seed, another text.")] = 0,
) -> None:
    """Continue a text with a trained language model."""
    from plait.cli.generate import generate as run

    run(run_dir, prompt, new_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)


@app.command()
def report(
    run_dir: Annotated[str, typer.Argument(help="The work_dir of a run.")],
    out: Annotated[str | None, typer.Option("--out", "-o", help="Where to write; absent: RUN_DIR/report.html.")] = None,
    sample: Annotated[list[str] | None, typer.Option("--sample", help="A text file to show in the report.")] = None,
) -> None:
    """Draw a run's history as one self-contained HTML page."""
    from plait.cli.report import report as run

    run(run_dir, out, sample or [])


@app.command()
def doctor() -> None:
    """Show what this machine offers to training."""
    from plait.cli.doctor import doctor as run

    run()


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        from plait import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> Any:
    """Run the command; what a user did wrong is told in plain words, without a traceback."""
    try:
        return app()
    except PlaitError as error:
        from plait.launch import tell

        tell(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
