"""`plait convert`."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from plait.checkpoint import (
    Description,
    Format,
    Source,
    companions,
    read_description,
    translated,
    with_state,
    without_padding,
)
from plait.cli.files import write_file
from plait.config import (
    PosttrainConfig,
    RunConfig,
    choose,
    choose_type,
    entry_points_of,
    parse_stored,
    read_json_object,
    text_sources,
    yaml_io,
)
from plait.data import load_tokenizer, tokenizer_path
from plait.errors import CheckpointError, ConfigError, DataError, ModelError, PlaitError, Problem
from plait.frontends import KeyOutcome, KeyReport, Translation
from plait.models import from_transformers, to_transformers
from plait.posttrain import (
    CHAT_TEMPLATE,
    SETTINGS,
    has_adapters,
    merged,
    read_settings,
    read_tokenizer,
    template_of_run,
    tokenizer_beside,
)

if TYPE_CHECKING:
    from plait.checkpoint import Source

_DTYPES = {"keep": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_TARGETS = ("hf", "torch", "plait", "deepspeed", "yaml")
_WEIGHTS = ("model", "ema")


@dataclass(frozen=True)
class ConvertOptions:
    """The options of the command."""

    to: str | None
    dtype: str
    model: str | None
    weights: str
    shard_size: str
    optimizer: bool
    overwrite: bool
    trust_code: bool
    from_: str | None = None


PLAIN = ConvertOptions(None, "keep", None, "model", "5GB", optimizer=False, overwrite=False, trust_code=False)
"""The defaults of the command."""


def check_use(src: str | None, options: ConvertOptions, *, inspect: str | None, every: bool, verify: bool) -> None:
    """Refuse options without effect: those of a conversion with `--inspect`, and the other way round."""
    if inspect is None:
        remedy = "write `plait convert --inspect PATH` with it, or leave it out"
        alone = {"--all": every, "--verify": verify}
        problems = [Problem(key, "goes with --inspect alone", remedy) for key, given in alone.items() if given]
    else:
        message = "has no effect: --inspect converts nothing"
        options_set: dict[str, Any] = {} if src is None else {"SRC": src}
        for key, value in asdict(options).items():
            if value != getattr(PLAIN, key) and key != "from_":
                options_set[f"--{key.replace('_', '-')}"] = value
        remedy = "leave out --inspect to convert, or this to inspect"
        problems = [
            Problem(key, message if value is True else f"{value!r} {message}", remedy)
            for key, value in options_set.items()
        ]
    if problems:
        raise ConfigError(problems)


def convert(src: str | None, dst: str | None, options: ConvertOptions) -> None:
    """Write a checkpoint, or a configuration, in another format. All problems with the options are raised at once."""
    shard_size, problems = _check(src, dst, options)
    if problems:
        raise ConfigError(problems)
    assert src is not None
    if options.to == "yaml":
        convert_config(src, dst, overwrite=options.overwrite)
        return
    assert dst is not None

    import torch

    from plait.checkpoint import convert as conversion
    from plait.monitor import format_bytes, format_duration

    start = time.perf_counter()
    to: Any = options.to
    with conversion.open_source(Path(src), options.from_) as opened:
        source = conversion.averaged(opened) if options.weights == "ema" else opened
        source, description = prepare_source(
            conversion.select_for(source, to, optimizer=options.optimizer),
            to,
            options.model,
            trust_code=options.trust_code,
        )
        dtype = _DTYPES[options.dtype]
        if dtype is not None:
            source = conversion.cast(source, getattr(torch, dtype))
        with _progress(source) as advance:
            result = conversion.convert(
                conversion.ProgressSource(source, advance),
                Path(dst),
                to,
                description=description,
                shard_size=shard_size,
                optimizer=options.optimizer,
                overwrite=options.overwrite,
            )
    seconds = time.perf_counter() - start
    tensors = f"{result.tensors} tensor{'' if result.tensors == 1 else 's'}"
    took = (
        f"{format_bytes(result.bytes)} in {format_duration(seconds)}, {format_bytes(_peak_memory())} of memory at most"
    )
    typer.echo(f"{dst}: {tensors}, {took}")


def inspect(path: str, *, every: bool, verify: bool, from_: str | None = None) -> None:
    """Show the contents of a checkpoint; with `verify`, read all of it first, and exit with 1 if it is damaged."""
    if not verify:
        _show(path, every=every, verify=False, from_=from_)
        return
    try:
        _show(path, every=every, verify=True, from_=from_)
    except CheckpointError as error:
        from plait.launch import report_failure

        report_failure(error)
        raise typer.Exit(1) from error


def _show(path: str, *, every: bool, verify: bool, from_: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from plait.checkpoint import group_totals, open_source, summary_rows
    from plait.monitor import format_bytes, format_count

    with open_source(Path(path), from_) as source:
        verified = source.verify() if verify else None
        facts = Table(box=None, show_header=False, pad_edge=False)
        facts.add_row("path", str(source.path))
        facts.add_row("kind", source.kind)
        for label, fact in source.facts.items():
            facts.add_row(label, fact)
        if verified is not None:
            facts.add_row("verified", verified)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading, side in (("tensor", "left"), ("count", "right"), ("shape", "left"), ("dtype", "left")):
            table.add_column(heading, justify=side, no_wrap=True)  # type: ignore[arg-type]  # both are justifications
        table.add_column("size", justify="right", no_wrap=True)
        for row in summary_rows(source.entries, every=every):
            count = "" if row.tensors == 1 else f"× {row.tensors}"
            table.add_row(
                row.name, count, " × ".join(map(str, row.shape)) or "scalar", row.dtype, format_bytes(row.bytes)
            )
        totals = Table(box=None, pad_edge=False, header_style="bold")
        totals.add_column("part")
        for heading in ("tensors", "elements", "size"):
            totals.add_column(heading, justify="right")
        for group in group_totals(source.entries):
            totals.add_row(group.name, str(group.tensors), format_count(group.elements), format_bytes(group.bytes))
    # A pipe has no width: rows stay whole there.
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 400, highlight=False, markup=False)
    for block in (facts, "", table, "", totals):
        console.print(block)


def _check(src: str | None, dst: str | None, options: ConvertOptions) -> tuple[int, list[Problem]]:
    problems = _check_alone(options) if options.to == "yaml" else []
    if src is None or (dst is None and options.to != "yaml"):
        missing = "SRC DST" if src is None else "DST"
        problems.append(Problem(missing, "not given", "Write `plait convert SRC DST --to …`, or --inspect PATH."))
    for key, value, choices in (
        ("--to", options.to, _TARGETS),
        ("--dtype", options.dtype, tuple(_DTYPES)),
        ("--weights", options.weights, _WEIGHTS),
    ):
        if value is None:
            problems.append(Problem(key, "not given", f"Say what to write: {', '.join(choices)}."))
        elif value not in choices and not (key == "--to" and _is_own(value)):
            remedy = choose_type("converter", value, choices) if key == "--to" else choose(value, choices, "choice")
            problems.append(Problem(key, f"{value!r} is not known", remedy))
    if options.from_ is not None and not _is_own(options.from_):
        message = f"{options.from_!r} is not a custom reader; the formats that Plait knows are detected"
        problems.append(Problem("--from", message, choose_type("converter", options.from_, ())))
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?I?)B?", options.shard_size.upper())
    shard_size = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if shard_size <= 0:
        problems.append(Problem("--shard-size", f"{options.shard_size!r} is not a size", "Write 5GB or 500MiB."))
    if options.optimizer and options.to not in ("torch", "yaml"):
        instead = "the hf format has none" if options.to == "hf" else "the other formats always include it"
        problems.append(Problem("--optimizer", f"goes with `--to torch` alone; {instead}", "Leave it out."))
    return shard_size, problems


def _is_own(name: str) -> bool:
    return ":" in name or name in entry_points_of("converter")


def _check_alone(options: ConvertOptions) -> list[Problem]:
    """Refuse options about weights for a configuration, which has none."""
    changed = {key: value for key, value in asdict(options).items() if key not in ("to", "overwrite")}
    return [
        Problem(
            f"--{key.strip('_').replace('_', '-')}",
            "applies to checkpoints, and `--to yaml` converts a configuration",
            "Leave it out.",
        )
        for key, value in changed.items()
        if value != getattr(PLAIN, key)
    ]


@contextmanager
def _progress(source: Source) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(bar_width=None), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=sum(entry.bytes for entry in source.entries.values()))
        yield lambda count: progress.advance(task, count)


def _peak_memory() -> int:
    """Return the peak memory of this process; `getrusage` would count its parent's on Linux, if that was higher."""
    status = Path("/proc/self/status")
    if status.exists() and (match := re.search(r"VmHWM:\s*(\d+) kB", status.read_text(encoding="utf-8"))):
        return int(match[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# The names of tensors and the model description of a converted checkpoint.


TEMPLATES = (CHAT_TEMPLATE, "chat_template.json")
"""Where folders of `transformers` keep a chat template, beside the tokenizer's settings."""
GENERATION = "generation_config.json"
FAMILIES = ("gpt", "llama", "moe")
"""Plait's models that can take weights of `transformers`."""


def prepare_source(
    source: Source, to: Format | str, model: str | None, *, trust_code: bool = False
) -> tuple[Source, Description | None]:
    """Return the source under the target's names, and the files beside the weights of an `hf` folder."""
    if to == "hf":
        return _for_transformers(_as_plain_model(source, trust_code), model, trust_code)
    if model is None:
        return (_as_hf_model(source), None) if source.kind == "hf" and to == "plait" else (source, None)
    if model not in FAMILIES:
        raise ConfigError(Problem("--model", f"names of {model!r} are not known", f"Use {' or '.join(FAMILIES)}."))
    return _as_plait_model(source, model), None


def _as_plain_model(source: Source, trust_code: bool) -> Source:
    """Return a checkpoint of post-training as a plain model, with adapters merged. Refuse reward models."""
    if _config_in(source.state).get("phase") == "reward":
        raise ModelError(
            f"{source.path} holds a reward model, which has a value head in place of logits; transformers has no such "
            "model. Write it with `--to torch` or `--to plait`"
        )
    return merged(source, trust_code=trust_code) if has_adapters(source) else source


def _as_plait_model(source: Source, family: str) -> Source:
    """Return weights of `transformers` under the names of Plait's model."""
    described = _config_in(source.state).get("model", {}).get("config")  # of a Megatron checkpoint
    description = read_description(source.path) if source.kind == "hf" else described
    shapes = {n.removeprefix("model."): e.shape for n, e in source.entries.items() if n.startswith("model.")}
    adopted = from_transformers(family, description, shapes)
    renamed = translated(source, adopted.made, unused=adopted.unused)
    if adopted.config is None:
        return renamed
    return with_state(renamed, _with_model(source.state, adopted.config.model_dump(mode="json")))


def _as_hf_model(source: Source) -> Source:
    model = {"type": "hf", "path": str(source.path.absolute())}
    return with_state(source, _with_model(source.state, model))


def _config_in(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the run description in a checkpoint; `engine.save` of a model given as an object stores none."""
    return state.get("config") or {}


def _with_model(state: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "config": {**_config_in(state), "model": dict(model)}}


def _for_transformers(source: Source, model: str | None, trust_code: bool) -> tuple[Source, Description]:
    described = _config_in(source.state).get("model")
    _refuse_partial(source)
    if described is not None:
        portable = to_transformers(_parsed("model", described, source), trust_code=trust_code)
        if portable.made is not None:
            source = translated(source, portable.made)
        folder = portable.folder if model is None else Path(model)
        description = portable.description if model is None else _description(Path(model))
        if source.kind == "megatron":
            source = without_padding(source, description["vocab_size"])
        return source, _with_template(_with_tokenizer(description, folder, source), folder, source, trust_code)
    if model is None and source.kind != "hf":
        raise ConfigError(
            Problem(
                "--model",
                f"{source.path} does not say which model it is of",
                "Give the folder of a transformers model with its config.json: the names must be those of that model.",
            )
        )
    folder = source.path if model is None else Path(model)
    return source, Description(_description(folder), companions(folder))


def _refuse_partial(source: Source) -> None:
    frozen = source.state.get("frozen")
    if frozen:
        raise CheckpointError(
            f"{source.path} holds only what was trained: {len(frozen['names'])} other tensors, such as "
            f"{frozen['names'][0]}, are not in it, so it is not a complete model"
        )


def _description(folder: Path) -> dict[str, Any]:
    description = read_description(folder) if folder.is_dir() else None
    if description is None:
        raise ConfigError(Problem("--model", f"{str(folder)!r} has no config.json", "Give a transformers folder."))
    return description


def _with_tokenizer(description: Mapping[str, Any], folder: Path | None, source: Source) -> Description:
    """Add the tokenizer: that of the data, or the one that the run saved; else the one in the model's folder."""
    data, run = source.state["config"].get("data"), source.path
    files = {} if folder is None or not folder.is_dir() else companions(folder)
    near = (folder_near / "tokenizer.json" for folder_near in (run, *run.absolute().parents[:2]))
    kept = next((file for file in near if file.is_file()), None)
    tokenizer = kept if data is None else _tokenizer(_parsed("data", data, source))
    if tokenizer is None:
        return Description(description, files)
    if "tokenizer.json" in files and _tokens(files["tokenizer.json"]) == _tokens(tokenizer):
        return Description(description, files)
    end = (read_tokenizer if data is None else load_tokenizer)(tokenizer).end
    known = read_json_object(tokenizer, DataError).get("added_tokens") or []
    end_texts = [token["content"] for token in known if token["id"] == end]  # the tokenizer above was made of them
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **({"eos_token": end_texts[0]} if end_texts else {})}
    others = {name: path for name, path in files.items() if name == GENERATION}
    return Description(
        {**description, "bos_token_id": end, "eos_token_id": end},
        {**others, "tokenizer.json": tokenizer},
        {"tokenizer_config.json": json.dumps(settings, indent=2) + "\n"},
    )


def _with_template(description: Description, folder: Path | None, source: Source, trust_code: bool) -> Description:
    """Add the chat template of the phase, which the model has learned, in place of its first tokenizer's."""
    config, kept = source.state["config"], tokenizer_beside(source.path)
    if config.get("phase") is None or kept is None:
        return description
    section = _parsed("posttrain", config.get("posttrain") or {}, source) or PosttrainConfig()
    named = [Path(section.tokenizer)] if section.tokenizer is not None else []
    folders = [kept.parent, *named, *([] if folder is None else [folder])]
    template = template_of_run(section.template, read_tokenizer(kept), folders, trust_code=trust_code)
    files = {name: path for name, path in description.files.items() if name not in TEMPLATES}
    texts = {**description.texts, CHAT_TEMPLATE: template.jinja}
    generation = {} if GENERATION not in files else read_json_object(files[GENERATION], DataError)
    eos = generation.get("eos_token_id", description.config.get("eos_token_id"))
    eos_ids = [*([eos] if isinstance(eos, int) else eos or []), *(end for end in template.ends if isinstance(end, int))]
    if len(eos_ids := list(dict.fromkeys(eos_ids))) > 1:  # an answer ends where the template ends it, too
        files.pop(GENERATION, None)
        texts[GENERATION] = json.dumps({**generation, "eos_token_id": eos_ids}, indent=2) + "\n"
    if SETTINGS in files:  # older folders have it in there
        settings = {key: value for key, value in read_settings(files.pop(SETTINGS)).items() if key != "chat_template"}
        texts[SETTINGS] = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    return Description(description.config, files, texts)


def _tokens(file: Path) -> str:
    """Return a tokenizer's content. Runs write it again, so equal tokenizers may be in different files."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(file))
    backend.no_truncation()
    backend.no_padding()
    return str(backend.to_str())


def _tokenizer(data: Any) -> Path | None:
    tokenized = text_sources("data", data)
    if not tokenized:
        return None
    data = tokenized[0][1]
    if data.tokenizer is not None:
        return Path(data.tokenizer) if Path(data.tokenizer).is_file() else None
    try:
        return tokenizer_path(data)
    except (DataError, OSError):
        return None  # the texts are somewhere else; the weights are worth having without them


def _parsed(section: str, value: Any, source: Source) -> Any:
    """Return a section of the run description in a checkpoint; code that it names is not run."""
    try:
        return getattr(parse_stored({section: value}, source.description, trust_code=False), section)
    except PlaitError as error:
        raise ModelError(f"the run description in the checkpoint cannot be read by this version: {error}") from error


# `plait convert CONFIG --to yaml`: another framework's configuration as a run description.


_YOURS = "# Add `model` and `data`: the other framework leaves them to the script."

_SEARCH = "# A search is a file of its own, for `plait tune run.yaml --search search.yaml`:"


def convert_config(src: str, dst: str | None, *, overwrite: bool) -> None:
    """Print the run description that a configuration stands for, or write it to `dst`.

    The outcome of every key goes with it as comments, and to stderr too where the description is not seen on a
    terminal. Ends with exit code 1 where a key is refused: what is printed is then less than was asked for.
    """
    if dst is not None and Path(dst).exists() and not overwrite:
        raise ConfigError(Problem("DST", f"{dst!r} is there already", "Give another name, or --overwrite."))
    name, translation = translation_of(Path(src))
    text = description_text(Path(src).name, name, translation, _search(Path(src)) if name == "DeepSpeed" else {})
    if dst is None:
        typer.echo(text, nl=False)
    else:
        write_file(dst, text, "DST")
    if dst is not None or not sys.stdout.isatty():
        _show_key_report(Path(src).name, name, translation.report)
    if any(translation.report.of(KeyOutcome.REFUSED)):
        raise typer.Exit(1)


def translation_of(path: Path) -> tuple[str, Translation]:
    """Return the framework that a configuration is of, and the run description that it stands for."""
    from plait.frontends import accelerate, deepspeed

    config = deepspeed.read_config(path)
    if accelerate.is_accelerate(config):
        return "Accelerate", accelerate.translate(path)
    if deepspeed.is_deepspeed(config):
        return "DeepSpeed", deepspeed.translate(path)
    if config and all(key in RunConfig.model_fields for key in config):
        raise ConfigError(Problem("SRC", f"{str(path)!r} is a run description already", "Use it as it is."))
    message = f"{str(path)!r} is neither a configuration of DeepSpeed nor one of Accelerate"
    raise ConfigError(Problem("SRC", message, "Give a ds_config.json, or the YAML of `accelerate config`."))


def description_text(file: str, name: str, translation: Translation, search: dict[str, Any]) -> str:
    """Return the run description as YAML; the outcome of every key and the search stand around it as comments."""
    report = translation.report
    comments = [f"# {file}, a configuration of {name}. {report.summary()}.", "#"]
    comments += [f"#   {line}" for line in report.lines()]
    text = yaml_io.dump(translation.sections) if translation.sections else ""
    after = [_YOURS, *([_SEARCH, *(f"#   {line}" for line in yaml_io.dump(search).splitlines())] if search else [])]
    return "\n".join([*comments, "", *text.splitlines(), "", *after, ""])


def _search(path: Path) -> dict[str, Any]:
    """Return the settings of `plait tune` for the `autotuning` section."""
    from plait.frontends.deepspeed import search

    tuning = search(path)
    return {} if tuning is None or not tuning.enabled else tuning.config.model_dump(mode="json", exclude_defaults=True)


def _show_key_report(file: str, name: str, report: KeyReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("outcome", f"key of {name}", "value", "explanation"):
        table.add_column(heading)
    for entry in report.entries:
        table.add_row(entry.outcome.value, entry.key, entry.shown, entry.text)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160, highlight=False, markup=False)
    console.print(f"{file}: {report.summary()}")
    console.print(table)
