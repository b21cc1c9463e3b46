"""The `plait` command. Each subcommand loads what it needs when it runs; `plait --help` loads no torch."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from plait.errors import ConfigError, PlaitError, Problem


def open_closed_streams() -> None:
    """Open standard streams that are closed (by some daemons, or `>&-`) on the null device.

    Otherwise the next file that is opened would get a standard stream's number. Ranks inherit the null device.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is `number`
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def restart_in_utf8_mode() -> None:
    """If the locale is ASCII, restart in Python's UTF-8 mode: files with Chinese names could not be opened."""
    if _is(sys.getfilesystemencoding(), "ascii"):
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def replace_unencodable() -> None:
    """Make output print `?` for characters that the console's encoding lacks, instead of raising."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape" if _is(sys.stdout.encoding, "utf-8") else "replace")
    if isinstance(sys.stdin, io.TextIOWrapper) and _is(sys.stdin.encoding, "ascii"):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # a superset of ASCII


def _is(encoding: str, name: str) -> bool:
    return codecs.lookup(encoding).name == name


app = typer.Typer(
    name="plait",
    help="Train large PyTorch models: say once what to train, and in one small section how it is spread.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[str, typer.Argument(help="Run description: YAML, TOML, or JSON (comments allowed).")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings on top of the file, as dotted keys: `strategy.zero=3 optim.lr=3e-4`."),
]
Nproc = Annotated[
    str, typer.Option("--nproc", "-n", help="Processes on this machine: a number, or `gpu` for one per GPU.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show the resolved settings and where each came from; start nothing.")
]
ModelPath = Annotated[str, typer.Argument(help="A run's work_dir, one of its checkpoints, or a Hugging Face folder.")]
Adapter = Annotated[str | None, typer.Option("--adapter", metavar="DIR", help="A LoRA adapter on top of it.")]
TokenizerFile = Annotated[str | None, typer.Option("--tokenizer", help="Absent: the one that belongs to the model.")]
Dtype = Annotated[str, typer.Option(help="fp32, bf16 or fp16; auto: bf16 on a GPU, fp32 elsewhere.")]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Run code that stored files name; otherwise it is refused.")
]
NewTokens = Annotated[int, typer.Option("--tokens", "-t", min=1, help="The most new tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Choose among the K likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Choose among the likeliest, up to this share.")]
Penalty = Annotated[float, typer.Option("--repetition-penalty", help="Above 1: what came before is less likely.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="A text that ends an answer. May be repeated.")]
Seed = Annotated[int, typer.Option(help="Seed of sampling.")]


def _settings(overrides: list[str] | None, *, trust_code: bool) -> list[str]:
    """Return the overrides; `--trust-code` is added to them as a setting, so that every rank gets it."""
    return [*(overrides or []), *(["trust_code=true"] if trust_code else [])]


class _CommandWithSettings(TyperCommand):
    """Raises an error for a setting that is written like an option (`--key`); its message shows the right form."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Check every `--name` before the arguments are parsed."""
        options = {name for param in self.params for name in param.opts}
        for argument in args:
            key, equals, value = argument.lstrip("-").partition("=")
            if argument.startswith("--") and f"--{key}" not in options and _is_setting(key):
                remedy = f"A setting has no dashes, and its value follows `=`: `{key}={value if equals else '…'}`."
                raise ConfigError(Problem(f"--{key}", "not an option of this command", remedy))
        return super().parse_args(ctx, args)


def _is_setting(key: str) -> bool:
    from plait.config import RunConfig

    return "." in key or key in RunConfig.model_fields


@app.command(cls=_CommandWithSettings)
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    nproc: Annotated[
        str | None,
        typer.Option("--nproc", "-n", help="Processes on this machine: a number, or `gpu` for one per GPU; absent: 1."),
    ] = None,
    dry_run: DryRun = False,
    accelerate_config: Annotated[
        str | None, typer.Option("--accelerate-config", metavar="YAML", help="Spread the run as `accelerate` would.")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Train as a run description says."""
    from plait.cli.train import train as run

    run(
        config,
        _settings(overrides, trust_code=trust_code),
        nproc=nproc,
        dry_run=dry_run,
        accelerate_config=accelerate_config,
    )


def _add_phase(phase: str, summary: str) -> None:
    def run(
        config: ConfigFile,
        overrides: Overrides = None,
        nproc: Nproc = "1",
        dry_run: DryRun = False,
        trust_code: TrustCode = False,
    ) -> None:
        from plait.cli.train import run_phase

        run_phase(phase, config, _settings(overrides, trust_code=trust_code), nproc=nproc, dry_run=dry_run)

    app.command(phase, cls=_CommandWithSettings, help=summary)(run)


_add_phase("sft", "Fine-tune a language model on answers.")
_add_phase("reward", "Train a reward model: it scores answers, so that the better of two has the higher score.")
_add_phase("dpo", "Train a language model on pairs of answers, without a reward model (DPO, IPO, KTO).")
_add_phase("ppo", "Train a language model on its own answers, with a critic and a reward model or function (PPO).")
_add_phase("grpo", "Train a language model on its own answers, compared within groups of one prompt (GRPO).")


@app.command(cls=_CommandWithSettings)
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", "--nproc", "-n", min=1, help="Ranks; absent: as few as the layout takes.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="h100-80g, a100-40g, …, or a file of `plait doctor --measure`.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Find the fastest strategy that fits.")] = False,
    states_only: Annotated[
        bool, typer.Option("--states-only", help="DeepSpeed's tables of model states; activations not counted.")
    ] = False,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Draw the pipeline: which stage works on which micro-batch, when.")
    ] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Simulate every layer, not a few that stand for all.")] = False,
    timeline: Annotated[
        str | None, typer.Option("--timeline", metavar="SVG", help="Draw memory over a run; implies --exact.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="Write the figures (JSON) or the picture (SVG).")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Show what a run will need before it starts: memory, time, and whether it fits."""
    from plait.cli import plan as commands

    settings = _settings(overrides, trust_code=trust_code)
    modes = {"--schedule": schedule, "--states-only": states_only, "--search": search}
    commands.check_use(modes | {"--gpu": gpu, "--exact": exact, "--timeline": timeline, "--out": out})
    if schedule:
        commands.draw_pipeline(config, settings, out, ranks=gpus)
        return
    if states_only:
        from plait.cli.plan import show_states

        show_states(config, settings, gpus=gpus or 1)
        return
    fits = (
        commands.search_run(config, settings, gpu=gpu, gpus=gpus, out=out)
        if search
        else commands.plan_run(config, settings, gpu=gpu, gpus=gpus, out=out, timeline=timeline, exact=exact)
    )
    if not fits:
        raise typer.Exit(1)


@app.command(cls=_CommandWithSettings)
def profile(
    config: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[
        int | None, typer.Option("--steps", "-s", min=1, help="Recorded steps; absent: `profile.steps`, 3.")
    ] = None,
    nproc: Nproc = "1",
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="Folder for page, picture and traces; absent: WORK_DIR-profile.")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Record a few steps of a run and show where their time and memory go."""
    from plait.cli.train import profile as run

    run(config, _settings(overrides, trust_code=trust_code), steps=steps, nproc=nproc, out=out)


@app.command(cls=_CommandWithSettings)
def prove(
    config: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", "-s", min=1, help="Optimizer steps to compare.")] = 5,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-r", min=1, help="Processes; absent: as many as the layout fixes, at least two."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Shrink the model to this number of layers, on both sides.")
    ] = None,
    out: Annotated[str, typer.Option("--out", "-o", help="Folder for certificate.json and certificate.html.")] = ".",
    trust_code: TrustCode = False,
) -> None:
    """Compare a few steps of a run under its strategy with the same steps in one process."""
    from plait.prove import prove as run

    settings = _settings(overrides, trust_code=trust_code)
    certificate = run(config, settings, steps=steps, ranks=ranks, layers=layers, out=out, log=typer.echo)
    typer.echo(certificate.verdict())
    for remark in certificate.notes:
        typer.echo(f"note: {remark}")
    typer.echo(f"{Path(out, 'certificate.html')} and {Path(out, 'certificate.json')} have all of it")
    if not certificate.passed:
        raise typer.Exit(1)


@app.command()
def convert(
    src: Annotated[str | None, typer.Argument(help="A checkpoint, or with `--to yaml` a ds_config.json.")] = None,
    dst: Annotated[str | None, typer.Argument(help="Where to write: a folder, or a file with `--to torch`.")] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", help="What to write: hf, torch, plait, deepspeed or yaml; or package.module:name."),
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="NAME", help="What reads SRC, by package.module:name.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: keep, fp32, bf16 or fp16.")] = "keep",
    model: Annotated[
        str | None,
        typer.Option(help="gpt, llama, moe: take weights of transformers as Plait's own. With `--to hf`: its folder."),
    ] = None,
    weights: Annotated[str, typer.Option(help="model, or ema for the averages of the EMA hook.")] = "model",
    shard_size: Annotated[str, typer.Option(help="Largest file of an hf folder.")] = "5GB",
    optimizer: Annotated[bool, typer.Option("--optimizer", help="With `--to torch`: its state too.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    inspect: Annotated[str | None, typer.Option(metavar="PATH", help="Show what is in a checkpoint instead.")] = None,
    every: Annotated[bool, typer.Option("--all", help="With --inspect: a row for each tensor.")] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="With --inspect: read all data and compare checksums; exit code 1 if damaged."),
    ] = False,
    trust_code: TrustCode = False,
) -> None:
    """Convert a checkpoint to another format, or show its contents; `--to yaml` converts another framework's config."""
    from plait.cli import convert as commands

    options = commands.ConvertOptions(
        to,
        dtype,
        model,
        weights,
        shard_size,
        optimizer=optimizer,
        overwrite=overwrite,
        trust_code=trust_code,
        from_=from_,
    )
    commands.check_use(src, options, inspect=inspect, every=every, verify=verify)
    if inspect is not None:
        commands.inspect(inspect, every=every, verify=verify, from_=from_)
    else:
        commands.convert(src, dst, options)


# The commands that let a model write.


def _opening(
    adapter: str | None,
    tokenizer: str | None,
    dtype: str,
    offload: str | None = None,
    offload_path: str | None = None,
    *,
    trust_code: bool,
) -> Any:
    from plait.cli.generate import DTYPES, Opening

    if dtype not in ("auto", *DTYPES):
        raise typer.BadParameter(f"--dtype {dtype}: choose auto, {', '.join(DTYPES)}")
    return Opening(adapter, tokenizer, dtype, offload, offload_path, trust_code)  # type: ignore[arg-type]


@app.command()
def generate(
    run_dir: ModelPath,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="To continue. May be repeated.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", metavar="FILE", help="Prompts: one per line, or `prompt` of a .jsonl file."),
    ] = None,
    tokens: NewTokens = 120,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = None,
    repetition_penalty: Penalty = 1.0,
    stop: Stop = None,
    seed: Seed = 0,
    against: Annotated[
        list[str] | None, typer.Option("--against", metavar="PATH", help="Another model, for the page.")
    ] = None,
    html: Annotated[str | None, typer.Option("--html", help="Write a page with all texts side by side.")] = None,
    perplexity: Annotated[
        str | None, typer.Option("--perplexity", metavar="FILE", help="Show the model's perplexity on a text.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Apply the model's chat template to prompts, as `plait chat` does.")
    ] = False,
    held_out: Annotated[
        int | None,
        typer.Option(
            "--held-out", min=1, help="Use this number of questions of the run's validation split as prompts."
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward", metavar="WHO", help="What scores answers: a reward model's folder, task, gsm8k, module:name."
        ),
    ] = None,
    adapter: Adapter = None,
    tokenizer: TokenizerFile = None,
    dtype: Dtype = "auto",
    trust_code: TrustCode = False,
    offload: Annotated[
        str | None,
        typer.Option(
            metavar="TIER", help="Keep weights that do not fit on the device in memory (cpu) or on disk (nvme)."
        ),
    ] = None,
    offload_path: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the nvme tier; absent: the checkpoint's.")
    ] = None,
) -> None:
    """Continue texts with a trained language model."""
    from plait.cli.generate import generate as run
    from plait.generate import Sampling

    sampling = Sampling(tokens, temperature, top_k, top_p, repetition_penalty, tuple(stop or ()), seed)
    opening = _opening(adapter, tokenizer, dtype, offload, offload_path, trust_code=trust_code)
    run(
        run_dir,
        prompt or [],
        sampling,
        opening,
        prompts_file=prompts,
        against=against,
        html=html,
        perplexity=perplexity,
        chat=chat,
        held_out=held_out,
        reward=reward,
    )


@app.command()
def chat(
    model: Annotated[
        str | None, typer.Argument(help="A run's work_dir, one of its checkpoints, or a Hugging Face folder.")
    ] = None,
    path: Annotated[str | None, typer.Option("--path", help="The same, as an option.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system prompt.")] = None,
    tokens: NewTokens = 512,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = 0.95,
    repetition_penalty: Penalty = 1.0,
    stop: Stop = None,
    seed: Seed = 0,
    adapter: Adapter = None,
    tokenizer: TokenizerFile = None,
    dtype: Dtype = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Talk to a trained model in the terminal."""
    if (model is None) == (path is None):
        raise typer.BadParameter("name one model: `plait chat MODEL` or `plait chat --path MODEL`")
    from plait.cli.generate import chat as run
    from plait.generate import Sampling

    sampling = Sampling(tokens, temperature, top_k, top_p, repetition_penalty, tuple(stop or ()), seed)
    run(model or path or "", sampling, _opening(adapter, tokenizer, dtype, trust_code=trust_code), system=system)


@app.command()
def serve(
    path: ModelPath,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8000,
    token_file: Annotated[
        str | None,
        typer.Option("--token-file", help="A file with the token that clients must send; absent: one is generated."),
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Require no token; on this machine only.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of one answer at most.")] = 1024,
    max_batch: Annotated[int, typer.Option(min=1, help="Answers that are generated at the same time.")] = 16,
    waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; further ones are refused.")] = 256,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of one request at most.")] = 1 << 20,
    max_messages: Annotated[int, typer.Option(min=1, help="Messages of one conversation at most.")] = 2048,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for one request, including its wait.")] = 600.0,
    adapter: Adapter = None,
    tokenizer: TokenizerFile = None,
    dtype: Dtype = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Answer over HTTP with OpenAI's API, and a web page to try it."""
    from plait.generate import Limits  # isort: skip  # first: without the extra, it fails before other imports

    from plait.cli.generate import serve as run

    limits = Limits(
        body_bytes=max_body,
        messages=max_messages,
        batch_rows=max_batch,
        waiting=waiting,
        max_new_tokens=max_tokens,
        request_s=timeout,
    )
    opening = _opening(adapter, tokenizer, dtype, trust_code=trust_code)
    run(path, opening, host=host, port=port, token_file=token_file, open_to_all=no_token, limits=limits)


@app.command()
def report(
    run_dir: Annotated[str, typer.Argument(help="The work_dir of a run.")],
    out: Annotated[str | None, typer.Option("--out", "-o", help="Where to write; absent: RUN_DIR/report.html.")] = None,
    sample: Annotated[list[str] | None, typer.Option("--sample", help="A text file to show in the report.")] = None,
) -> None:
    """Draw a run's history as one self-contained HTML page."""
    from plait.cli.files import read_file
    from plait.errors import DataError
    from plait.monitor import read_events, write_report

    record = Path(run_dir) / "events-rank0.jsonl"
    if not record.exists():
        raise DataError(f"{record} does not exist: {run_dir!r} is not the work_dir of a run with the jsonl sink")
    target = Path(out) if out else Path(run_dir) / "report.html"
    samples = [(Path(name).stem, read_file(name, "--sample")) for name in sample or []]
    events = read_events([record])
    try:
        write_report(events, target, title=Path(run_dir).resolve().name, samples=samples, folder=Path(run_dir))
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror}; name another place with --out") from error
    typer.echo(f"report: {target}")


@app.command(cls=_CommandWithSettings)
def tune(
    config: ConfigFile,
    overrides: Overrides = None,
    tuner: Annotated[
        str | None, typer.Option(help="Order of trials: grid, random, or model (the plan's ranking first; default).")
    ] = None,
    trials: Annotated[int | None, typer.Option(help="The most trials; 20 if absent.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Time limit of the search.")] = None,
    trial_seconds: Annotated[float | None, typer.Option(help="Time limit of each trial; 600 if absent.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each trial; 10 if absent.")] = None,
    warmup: Annotated[
        int | None, typer.Option(help="First steps of a trial, which are not measured; 3 if absent.")
    ] = None,
    nproc: Annotated[int | None, typer.Option("--nproc", "-n", help="Processes of each trial; 1 if absent.")] = None,
    metric: Annotated[
        str | None, typer.Option(help="throughput (default), tokens_per_s, samples_per_s or step_time.")
    ] = None,
    early_stop: Annotated[
        int | None, typer.Option(help="Stop after this number of trials without a better one.")
    ] = None,
    space: Annotated[
        list[str] | None, typer.Option(help="Values to try for a key: `'strategy.zero=[0, 3]'`. May be repeated.")
    ] = None,
    settings: Annotated[str | None, typer.Option("--search", help="A file with all of these, and more.")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Folder for results; absent: WORK_DIR-tune.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard the results of an earlier search there.")] = False,
    then_train: Annotated[bool, typer.Option("--train", help="Train with the best settings afterwards.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Find the fastest settings of a run by measuring short runs, each in processes of its own."""
    from plait.cli.tune import search

    options = {
        "tuner": tuner,
        "trials": trials,
        "minutes": minutes,
        "trial_seconds": trial_seconds,
        "steps": steps,
        "warmup": warmup,
        "nproc": nproc,
        "metric": metric,
        "early_stop": early_stop,
    }
    search(
        config,
        _settings(overrides, trust_code=trust_code),
        options=options,
        space=space or [],
        settings=settings,
        out=out,
        fresh=fresh,
        then_train=then_train,
    )


class _UnparsedCommand(TyperCommand):
    """A command whose arguments typer does not parse, as those after the script are the script's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep all arguments."""
        ctx.args = list(args)
        return list(args)


@app.command(cls=_UnparsedCommand)
def launch(ctx: typer.Context) -> None:
    """Start a script on every slot of one or several hosts: `plait launch [flags] script.py [its arguments]`."""
    from plait.cli.launch import launch as run

    run(ctx.args)


@app.command(cls=_UnparsedCommand)
def pipeline(ctx: typer.Context) -> None:
    """Run phases one after another, each from the result of the one before: `plait pipeline sft.yaml reward.yaml …`."""
    from plait.cli.pipeline import pipeline as run

    run(ctx.args)


@app.command()
def doctor(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure arithmetic, memory, disk and collectives; takes seconds.")
    ] = False,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="With --measure: a YAML file for `plait plan --gpu`.")
    ] = None,
    folder: Annotated[str, typer.Option(help="With --measure: where the disk is measured.")] = ".",
    plugins: Annotated[bool, typer.Option("--plugins", help="List the plug-ins of installed packages.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON; not with --measure.")] = False,
) -> None:
    """Show what this machine offers to training."""
    from plait.cli import doctor as commands

    if measure and (as_json or plugins):
        raise typer.BadParameter("--measure shows figures, --json and --plugins a report; give one of them")
    if plugins:
        commands.show_plugins(as_json=as_json)
    elif measure:
        commands.measure(out, folder)
    else:
        commands.doctor(out, as_json=as_json)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        from plait import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> Any:
    """Run the command; a user's error is printed as a message, without a traceback."""
    open_closed_streams()
    restart_in_utf8_mode()
    replace_unencodable()
    try:
        return app()
    except PlaitError as error:
        from plait.launch import report_failure

        report_failure(error)
        sys.exit(2)
    except OSError as error:
        if error.filename is None or error.errno not in _FORBIDDEN:
            raise
        from plait.launch import report_failure

        report_failure(
            PlaitError(
                f"{error.filename} cannot be used: {error.strerror}; change its permissions, or use another path"
            )
        )
        sys.exit(2)


_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Errors of permissions and full disks, which are printed as messages, because Plait does not cause them."""


if __name__ == "__main__":
    main()
