"""`plait generate`, `plait chat` and `plait serve`: open a model from a path, and generate text with it."""

from __future__ import annotations

import math
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import typer
from torch import nn

from plait.checkpoint import MANIFEST_NAME as MANIFEST
from plait.checkpoint import CheckpointFolder, kind_of, load_into, open_checkpoint, open_source, read_description
from plait.cli.files import import_from_here, write_file
from plait.config import (
    HFConfig,
    ModelConfig,
    PosttrainConfig,
    RunConfig,
    as_utf8,
    parse,
    parse_json,
    parse_stored,
    read_json_object,
)
from plait.data import tokenizer_path
from plait.distributed import open_world, persistent_buffers
from plait.errors import ConfigError, DataError, GenerateError, ModelError, Problem
from plait.generate import (
    CLOSE,
    LOCAL_NAMES,
    OPEN,
    Conversation,
    Generator,
    Limits,
    Perplexity,
    Sampling,
    Server,
    ToolCall,
    Turn,
    context_of,
    measure_perplexity,
    page_of,
    printable,
    read_calls,
)
from plait.models import build_model, from_transformers
from plait.posttrain import (
    NAME,
    AdapterSpec,
    ChatMessage,
    ChatTokenizer,
    OfTokenizer,
    Question,
    Template,
    UnwritableError,
    attach,
    chat_template_in,
    fill_all,
    open_scorer,
    open_start,
    read_adapter,
    read_tokenizer,
    run_behind,
    template_of_run,
    tokenizer_folder,
)
from plait.posttrain import held_out as kept_back

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_ROWS = 64
"""The most prompts in one batch."""
_FAMILIES = {"gpt2": "gpt", "llama": "llama", "mixtral": "moe"}
"""Model type of `transformers` → Plait's model family that is used instead, as it generates faster."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The options by which a model is opened."""

    adapter: str | None = None
    tokenizer: str | None = None
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """`auto`: bf16 on a GPU, fp32 elsewhere."""
    offload: str | None = None
    """Where the weights of the blocks are kept: `cpu` (memory), `nvme` (a file), or None for the device."""
    offload_path: str | None = None
    """Folder of the `nvme` tier."""
    trust_code: bool = False
    """Whether code that stored files name is run: a model's own class, `auto_map` of a Hugging Face folder."""


def open_conversation(path: str, opening: Opening | None = None) -> Conversation:
    """Return a conversation with the model of a run, of one of its checkpoints or of a Hugging Face folder.

    The model is loaded in this one process.
    """
    opening, folder = opening or Opening(), Path(path)
    config = None
    if not folder.exists():
        raise GenerateError(
            f"{path} does not exist; give the work_dir of a run, a checkpoint, or a Hugging Face folder"
        )
    if kind_of(folder) == "hf":
        model_config = _model_config_of(folder)
    else:
        checkpoint = CheckpointFolder(folder).find(str(folder.absolute()))  # absolute: `find` treats `auto` specially
        assert checkpoint is not None
        stored = {**open_checkpoint(checkpoint).manifest.state["config"], "strategy": {}}
        config = parse_stored(stored, checkpoint / MANIFEST, trust_code=opening.trust_code)
        if config.model is None:
            raise ModelError(
                f"{path} was trained on a model that was given as an object, and nothing here can build it"
            )
        if config.phase == "reward":
            raise ModelError(f"{path} holds a reward model, which cannot generate; open the tuned model")
        folder, model_config = checkpoint, config.model
    tokenizer_file = _tokenizer(Path(path), folder, config, opening)
    tokenizer = read_tokenizer(tokenizer_file)
    streamed = opening.offload is not None
    if streamed:
        model = _load_streamed(folder, config, opening)
    elif config is not None and "frozen" in open_checkpoint(folder).manifest.state:
        model = _load_trained_part(folder, config, opening)
    else:
        model = _load(str(folder), model_config, opening)
    template, stop = _chat_format(tokenizer, config, opening, folder, tokenizer_file)

    def format_turns(turns: Sequence[Turn]) -> list[int]:
        try:
            return template.prompt([ChatMessage(turn.role, turn.content) for turn in turns])
        except UnwritableError as error:
            raise GenerateError(str(error)) from error

    context = _context(model, config)
    generator = Generator(model, decode=tokenizer.decode, context=context, max_rows=MAX_ROWS, graphs=not streamed)
    return Conversation(
        Path(path).resolve().name,
        generator,
        tokenizer,
        format_turns,
        stop,
        _with_tools(template, tokenizer),
        begin=() if config is not None and config.phase is None else tokenizer.begin,  # data of `plait train` has none
        template=template.kind,
    )


def _model_config_of(folder: Path) -> ModelConfig:
    """Return the configuration of Plait's model for a Hugging Face folder, or if it has none, of `transformers`'."""
    description = read_description(folder) or {}
    family = _FAMILIES.get(description.get("model_type", ""))
    if family is not None:
        entries = open_source(folder).entries
        shapes = {name.removeprefix("model."): entry.shape for name, entry in entries.items()}
        try:
            converted = from_transformers(family, description, shapes).config
        except ModelError:  # Plait's model does not support this variant
            converted = None
        if converted is not None:
            return converted
    return HFConfig(path=str(folder))


def _build(model_config: ModelConfig, opening: Opening) -> nn.Module:
    with open_world(parse({}).config).device:
        return build_model(model_config, trust_code=opening.trust_code)


def _cast_for_inference(model: nn.Module, opening: Opening) -> nn.Module:
    device = next(model.parameters()).device
    dtype = DTYPES.get(opening.dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)
    return model.to(dtype).eval().requires_grad_(False)


def _load(path: str, model_config: ModelConfig, opening: Opening) -> nn.Module:
    model, adapter = _build(model_config, opening), None
    if opening.adapter is not None:
        adapter = read_adapter(opening.adapter, model)
        attach(model, adapter.spec, adapter.layers)
        if (warning := adapter.strange_base(path)) is not None:
            typer.echo(f"--adapter: {warning}", err=True)
    start = open_start(path, model_config, adapter, model)
    assert start is not None, "there is a path, so there are weights"
    fill_all(model, start)
    return _cast_for_inference(model, opening)


def _load_trained_part(checkpoint_folder: Path, config: RunConfig, opening: Opening) -> nn.Module:
    """Return the model of a checkpoint that has only the trained parameters; the others are from the run's start."""
    assert config.model is not None
    checkpoint = open_checkpoint(checkpoint_folder)
    initial = (config.posttrain.start if config.posttrain else None) or getattr(config.model, "path", None)
    if initial is None or opening.adapter is not None:
        raise GenerateError(
            f"{checkpoint_folder} holds only what was trained, and the run does not say what it began with; open the "
            "model that it began with, and give the run's folder `adapter` as --adapter"
        )
    model = _build(config.model, opening)
    if config.lora is not None:
        attach(model, AdapterSpec.of(config.lora), config.lora.targets)
    start = open_start(initial, config.model, None, model)
    assert start is not None, "there is a path, so there are weights"
    fill_all(model, start)
    tensors = {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    names = checkpoint.manifest.state["frozen"]["names"]
    ignore = ("optim.", "rng.", "hook.")
    load_into(checkpoint, tensors, world=open_world(parse({}).config), ignore=ignore, partial=names)
    return _cast_for_inference(model, opening)


def _load_streamed(checkpoint_folder: Path, config: RunConfig | None, opening: Opening) -> nn.Module:
    """Return a model whose weights are kept off the device, which holds two blocks at a time."""
    from plait.generate import build_streamed

    tier = opening.offload
    if tier not in ("cpu", "nvme"):
        raise ConfigError(Problem("--offload", f"unknown tier {tier!r}", "Write cpu or nvme."))
    if config is None or opening.adapter is not None or opening.dtype != "auto":
        raise GenerateError("--offload takes checkpoints of Plait as they are: convert the model or merge its adapter")
    world = open_world(config)
    folder = Path(opening.offload_path or checkpoint_folder)
    model, stream = build_streamed(config, world.device, tier=tier, folder=folder)  # type: ignore[arg-type]
    tensors = {f"model.{name}": tensor for name, tensor in stream.tensors().items()}
    tensors.update({f"model.{name}": buffer for name, buffer in persistent_buffers(model)})
    load_into(open_checkpoint(checkpoint_folder), tensors, world=world, ignore=("optim.", "rng.", "hook."))
    stream.filled()
    return model


def _context(model: nn.Module, config: RunConfig | None) -> int | None:
    """Return the context length of the model, else of its training data; None if neither has one."""
    return context_of(model) or (None if config is None else getattr(config.data, "seq_len", None))


def _tokenizer(asked: Path, weights: Path, config: RunConfig | None, opening: Opening) -> Path:
    """Return the path of the tokenizer: `--tokenizer`, else that beside the weights, else that of the run's data."""
    if opening.tokenizer is not None:
        return Path(opening.tokenizer)
    section = None if config is None else config.posttrain
    data = None if config is None or section is not None else tokenizer_path(config.data)
    if data is not None:
        return data
    near = [asked, weights, *weights.absolute().parents[:2]]
    named = [section.tokenizer if section else None, getattr(config.model, "path", None) if config else None]
    for folder in (*near, *(Path(path) for path in named if path)):
        if folder.is_file() or (folder / NAME).is_file():
            return folder
    raise GenerateError(f"no {NAME} with {asked}: name one with --tokenizer, a file or the folder of a model")


def _chat_format(
    tokenizer: ChatTokenizer, config: RunConfig | None, opening: Opening, weights: Path, tokenizer_location: Path
) -> tuple[Template, tuple[int | str, ...]]:
    """Return the chat template, and the tokens and texts that end an answer."""
    section = (config.posttrain if config is not None else None) or PosttrainConfig()
    named = (section.tokenizer, getattr(config.model, "path", None) if config else None, str(weights))
    template_folders = [tokenizer_location, *(Path(path) for path in named if path is not None)]
    if config is None or config.phase is None:  # not trained on conversations by Plait: use the model's own template
        template_folders = [
            *(path for path in template_folders if chat_template_in(tokenizer_folder(path)) is not None),
            *template_folders,
        ]
    template = template_of_run(section.template, tokenizer, template_folders, trust_code=opening.trust_code)
    folders = (opening.tokenizer, *named)
    folder = next((Path(path) for path in folders if path is not None and Path(path).is_dir()), weights)
    return template, tuple(dict.fromkeys((*template.ends, *_eos_tokens(folder))))


def _with_tools(
    template: Template, tokenizer: ChatTokenizer
) -> Callable[[Sequence[Turn], Sequence[Mapping[str, Any]]], list[int]] | None:
    """Return a function that formats conversations with tools.

    Return None if the template writes tool calls in a form that is not parsed here.
    """
    name, arguments = "probe", {"x": [1, "y"]}
    hidden = any(tokenizer.special_token(mark) is not None for mark in (OPEN, CLOSE))  # decoding would remove them
    if hidden or not isinstance(template, OfTokenizer):
        return None
    written = template.written_call(name, arguments)
    if written is None or OPEN not in written:
        return None
    begin, end = written.index(OPEN), written.rfind(CLOSE) + len(CLOSE)
    if read_calls(written[begin:end]) != [ToolCall(name, arguments)]:
        return None

    def write_with_tools(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        messages = [{"role": turn.role, "content": turn.content, **(turn.more or {})} for turn in turns]
        return template.prompt_with_tools(messages, tools)

    return write_with_tools


def _eos_tokens(folder: Path) -> list[int]:
    """Return the tokens that end an answer, from a Hugging Face folder."""
    file = folder / "generation_config.json"
    value = _json(file).get("eos_token_id")
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(end) is int for end in tokens):
        raise DataError(f"{file} has the eos_token_id {value!r:.80}, expected a token's number or a list of them")
    return tokens


def _json(file: Path) -> dict[str, Any]:
    return read_json_object(file, DataError) if file.is_file() else {}


# `plait generate`: continues prompts with one or several models, and computes the perplexity of a text.


_MORE = ("messages", "system", "history", "instruction", "input", "tools")
"""Fields of a prompt in a file that are not supported here."""
_WINDOW = 1024
"""Tokens per window when a perplexity is computed with a model that has no context length."""


def generate(
    path: str,
    prompts: list[str],
    sampling: Sampling,
    opening: Opening,
    *,
    prompts_file: str | None = None,
    against: list[str] | None = None,
    html: str | None = None,
    perplexity: str | None = None,
    chat: bool = False,
    held_out: int | None = None,
    reward: str | None = None,
) -> None:
    """Continue the prompts with one or several models, and print the texts, or write them side by side to `html`.

    With `chat`, and for the run's `held_out` questions, a prompt is the user's turn in a conversation. `reward` names
    the reward model or function that scores the answers.
    """
    text = None if perplexity is None else _read(Path(perplexity))
    if html is None and against:
        raise GenerateError("--against needs --html, the page that shows the models side by side")
    given = [*prompts, *([] if prompts_file is None else read_prompts(Path(prompts_file)))]
    asked = [Question((ChatMessage("user", prompt),)) for prompt in given]
    asked += [] if held_out is None else kept_back(path, held_out, trust_code=opening.trust_code)
    if not asked and text is None:
        asked = [Question((ChatMessage("user", "def "),))]
    reward_model = None
    if reward is not None:
        if not Path(reward).exists():
            import_from_here()  # `reward` may name a function in the current folder
        reward_model = open_scorer(reward, run_behind(path), trust_code=opening.trust_code)
    paths = [path, *(against or [])]
    answers: list[list[str]] = [[] for _ in asked]
    rewards_shown: list[list[str]] = [[] for _ in asked]
    figures: dict[str, list[str]] = {}
    for model_path in paths:  # one after another, so that only one is in memory
        conversation = open_conversation(model_path, opening)
        if text is not None:
            expected = _perplexity_of(conversation, text)
            figures.setdefault("perplexity", []).append(f"{expected.perplexity:.4g}")
            typer.echo(f"{model_path}: perplexity {expected.perplexity:.4g} over {expected.tokens} tokens")
        encoded = [_prompt(conversation, question, chat=chat or held_out is not None) for question in asked]
        written = conversation.write(encoded, sampling)
        for row, question, (answer, completion) in zip(answers, asked, written, strict=True):
            row.append(answer)
            if html is None:
                text = question.text + answer
                typer.echo(printable(text, keep="\n\t") if sys.stdout.isatty() else text)
            if completion.finish_reason == "length" and len(completion.tokens) < sampling.max_new_tokens:
                typer.echo(f"({model_path} sees {conversation.generator.context} tokens: no room for more)", err=True)
        if reward_model is not None and asked:
            rewards = reward_model.rewards(asked, [answer for answer, _ in written])
            for row, value in zip(rewards_shown, rewards, strict=True):
                row.append("not judged" if math.isnan(value) else f"reward {value:.3g}")
            mean, said = _mean(rewards)
            figures.setdefault("mean reward", []).append(mean)
            typer.echo(f"{model_path}: reward {mean} over {said}")
    if html is not None:
        rows = list(figures.items())
        write_file(
            html, page_of(paths, [q.text for q in asked], answers, captions=rewards_shown, figures=rows), "--html"
        )
        typer.echo(f"side by side: {html}")


def _prompt(conversation: Conversation, question: Question, *, chat: bool) -> list[int]:
    if not chat:
        return conversation.encode(question.text)
    asked = conversation.encode_conversation([Turn(message.role, message.content) for message in question.messages])
    if asked.left_out:
        typer.echo(f"({asked.left_out} earliest turns of {question.text[:40]!r} have no room)", err=True)
    return asked.tokens


def _mean(rewards: Sequence[float]) -> tuple[str, str]:
    """Return the mean of the known rewards, and a text with their number."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    lost = len(rewards) - len(known)
    said = f"{len(known)} answers" + (f", {lost} not judged" if lost else "")
    return (f"{sum(known) / len(known):.4g}" if known else "unknown"), said


def read_prompts(file: Path) -> list[str]:
    """Return one prompt per line of a file; for a `.jsonl` file, the field `prompt` or `text` of each line."""
    # Not `splitlines`, which also splits at U+2028 and form feeds, which a prompt may contain.
    lines = [(number, line) for number, line in enumerate(_read(file).split("\n"), 1) if line.strip()]
    if not lines:
        raise DataError(f"{file} has no prompt in it: write one per line")
    if file.suffix != ".jsonl":
        return [line for _, line in lines]
    prompts = []
    for number, line in lines:
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"{file}, line {number} is not JSON: {error}") from error
        prompt = row.get("prompt", row.get("text")) if isinstance(row, dict) else row
        if more := [key for key in _MORE if isinstance(row, dict) and row.get(key)]:
            raise DataError(f"{file}, line {number} has {more[0]!r}, which is not supported: put all into `prompt`")
        if not isinstance(prompt, str):
            raise DataError(f"{file}, line {number} has no text as `prompt` or `text`")
        prompts.append(prompt)
    return prompts


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text: {as_utf8(error.object)}") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error


def _perplexity_of(conversation: Conversation, text: str) -> Perplexity:
    window = conversation.generator.context or _WINDOW
    return measure_perplexity(conversation.generator.model, [conversation.encode(text)], window=window)


# `plait chat`: a conversation in the terminal.


_COMMAND = re.compile(r"/[a-z]+")
HELP = "/clear starts over, /undo removes the last question, /quit ends (as does Ctrl-D); Ctrl-C stops an answer"


def chat(path: str, sampling: Sampling, opening: Opening, *, system: str | None = None) -> None:
    """Chat until the input ends. Answers are streamed; the whole conversation is the prompt of the next answer."""
    conversation = open_conversation(path, opening)
    first = [Turn("system", system)] if system else []
    turns, interactive = list(first), sys.stdin.isatty()
    if interactive:
        typer.secho(f"{printable(conversation.name)} (template {conversation.template!r}): {HELP}", dim=True)
    while (said := _ask(interactive)) is not None:
        if said in ("/quit", "/exit"):
            break
        if said == "/clear":
            turns = list(first)
        elif said == "/undo":
            turns = turns[: max(len(first), len(turns) - 2)]
        elif said in ("/help", "/?"):
            typer.echo(HELP)
        elif _COMMAND.fullmatch(said):
            typer.secho(f"unknown command {said}: {HELP}", fg="red", err=True)
        elif said:
            answer = _answer(conversation, [*turns, Turn("user", said)], sampling)
            if answer is not None:
                turns += [Turn("user", said), Turn("assistant", answer)]
                sampling = replace(sampling, seed=sampling.seed + 1)  # a repeated question gets another answer


def _ask(interactive: bool) -> str | None:
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        typer.echo()
        return None


def _answer(conversation: Conversation, turns: list[Turn], sampling: Sampling) -> str | None:
    """Print the answer as it is generated, and return it, or the part before Ctrl-C; None after an error.

    Escape sequences in it are printed as text, so that the terminal does not execute them.
    """
    said: list[str] = []
    try:
        asked = conversation.encode_conversation(turns)
        if asked.left_out:
            typer.secho(f"({asked.left_out} earliest turns have no room any more)", dim=True, err=True)
        for piece in conversation.stream(asked.tokens, sampling):
            said.append(piece.text)
            typer.echo(printable(piece.text, keep="\n\t"), nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    except (GenerateError, DataError) as error:
        typer.secho(str(error), fg="red", err=True)
        return None
    typer.echo()
    return "".join(said)


# `plait serve`: a model behind HTTP.


def serve(
    path: str, opening: Opening, *, host: str, port: int, token_file: str | None, open_to_all: bool, limits: Limits
) -> None:
    """Serve until interrupted. A token is generated and shown, unless a file has one or none is required."""
    if open_to_all and host not in LOCAL_NAMES:
        raise GenerateError(f"--no-token with --host {host} would let anybody use this model; give a token")
    token = None if open_to_all else _token(token_file)
    conversation = open_conversation(path, opening)
    try:
        server = Server(conversation, host=host, port=port, token=token, limits=limits, log=typer.echo)
    except OSError as error:
        raise GenerateError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    shown = "" if token is None else f"/#token={token}" if token_file is None else "/ (token from the file)"
    typer.echo(f"{printable(conversation.name)}: {server.url}{shown}")
    typer.echo(f"chat template: {conversation.template!r}")
    typer.echo(f"OpenAI-compatible: {server.url}/v1 (chat/completions, completions, models)")
    server.run()
    typer.echo("stopped")


def _token(file: str | None) -> str:
    """Return the token in a file, or a new one. An option with the token itself would be visible in `ps`."""
    if file is None:
        return secrets.token_urlsafe(24)
    try:
        token = Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise GenerateError(f"--token-file {file} cannot be read: {error}") from error
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise GenerateError(f"--token-file {file} must hold one word of ASCII characters, and nothing else")
    return token
