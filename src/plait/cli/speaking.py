"""From a path to something that can be talked to: for `generate`, `chat` and `serve`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import typer
from torch import nn

from plait.checkpoint import NAME as MANIFEST
from plait.checkpoint import CheckpointFolder, kind_of, load_into, open_checkpoint, open_source, read_description
from plait.config import HFConfig, ModelConfig, PosttrainConfig, RunConfig, parse, parse_stored, read_json_object
from plait.data import tokenizer_path
from plait.errors import ConfigError, DataError, GenerateError, ModelError, Problem
from plait.generate import CLOSE, OPEN, Generator, Speaker, ToolCall, Turn, context_of, read_calls
from plait.models import build_model, from_transformers
from plait.parallel import persistent_buffers
from plait.posttrain import (
    NAME,
    AdapterSpec,
    ChatTokenizer,
    Message,
    OfTokenizer,
    Template,
    UnwritableError,
    attach,
    chat_template_in,
    fill_all,
    open_start,
    read_adapter,
    read_tokenizer,
    template_of_run,
    tokenizer_folder,
)
from plait.world import open_world

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_ROWS = 64
"""Prompts that are answered at once."""
_FAMILIES = {"gpt2": "gpt", "llama": "llama", "mixtral": "moe"}
"""Model types of `transformers` that Plait has a family for, and writes faster with."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How to open a model."""

    adapter: str | None = None
    tokenizer: str | None = None
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """`auto`: bf16 on a GPU, fp32 elsewhere."""
    offload: str | None = None
    """`cpu` or `nvme`: where the weights of the blocks live, if not on the device."""
    offload_path: str | None = None
    """Folder of the `nvme` tier."""
    trust_code: bool = False
    """Run the code that the stored files name: a model of the author's own, `auto_map` of a Hugging Face folder."""


def open_speaker(path: str, opening: Opening | None = None) -> Speaker:
    """Open a run, one of its checkpoints, or a Hugging Face folder, in this one process."""
    opening, place = opening or Opening(), Path(path)
    config = None
    if not place.exists():
        raise GenerateError(
            f"{path} does not exist; give the work_dir of a run, a checkpoint, or a Hugging Face folder"
        )
    if kind_of(place) == "hf":
        described = _described(place)
    else:
        found = CheckpointFolder(place).find(str(place.absolute()))  # absolute: `auto` is a name here
        assert found is not None
        stored = {**open_checkpoint(found).manifest.state["config"], "strategy": {}}
        config = parse_stored(stored, found / MANIFEST, trust_code=opening.trust_code)
        if config.model is None:
            raise ModelError(
                f"{path} was trained on a model that was given as an object, and nothing here can build it"
            )
        if config.phase == "reward":
            raise ModelError(f"{path} holds a reward model, which judges texts and writes none; open the tuned model")
        place, described = found, config.model
    lies = _tokenizer(Path(path), place, config, opening)
    tokenizer = read_tokenizer(lies)
    away = opening.offload is not None
    if away:
        model = _load_streamed(place, config, opening)
    elif config is not None and "frozen" in open_checkpoint(place).manifest.state:
        model = _load_trained_part(place, config, opening)
    else:
        model = _load(str(place), described, opening)
    template, stop = _manner(tokenizer, config, opening, place, lies)

    def write_down(turns: Sequence[Turn]) -> list[int]:
        try:
            return template.prompt([Message(turn.role, turn.content) for turn in turns])
        except UnwritableError as error:
            raise GenerateError(str(error)) from error

    context = _context(model, config)
    generator = Generator(model, decode=tokenizer.decode, context=context, max_rows=MAX_ROWS, graphs=not away)
    return Speaker(
        Path(path).resolve().name,
        generator,
        tokenizer,
        write_down,
        stop,
        _with_tools(template, tokenizer),
        begin=() if config is not None and config.phase is None else tokenizer.begin,  # rows of `plait train` have none
        template=template.kind,
    )


def _described(folder: Path) -> ModelConfig:
    """Our own family for a Hugging Face folder, where there is one; else `transformers` itself."""
    description = read_description(folder) or {}
    family = _FAMILIES.get(description.get("model_type", ""))
    if family is not None:
        entries = open_source(folder).entries
        shapes = {name.removeprefix("model."): entry.shape for name, entry in entries.items()}
        try:
            adopted = from_transformers(family, description, shapes).config
        except ModelError:  # a variant that ours cannot compute
            adopted = None
        if adopted is not None:
            return adopted
    return HFConfig(path=str(folder))


def _built(described: ModelConfig, opening: Opening) -> nn.Module:
    with open_world(parse({}).config).device:
        return build_model(described, trust_code=opening.trust_code)


def _finished(model: nn.Module, opening: Opening) -> nn.Module:
    device = next(model.parameters()).device
    dtype = DTYPES.get(opening.dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)
    return model.to(dtype).eval().requires_grad_(False)


def _load(path: str, described: ModelConfig, opening: Opening) -> nn.Module:
    model, adapter = _built(described, opening), None
    if opening.adapter is not None:
        adapter = read_adapter(opening.adapter, model)
        attach(model, adapter.spec, adapter.layers)
        if (strange := adapter.strange_base(path)) is not None:
            typer.echo(f"--adapter: {strange}", err=True)
    start = open_start(path, described, adapter, model)
    assert start is not None, "there is a path, so there are weights"
    fill_all(model, start)
    return _finished(model, opening)


def _load_trained_part(place: Path, config: RunConfig, opening: Opening) -> nn.Module:
    """A checkpoint that holds only what was trained, on top of the weights that the run began with."""
    assert config.model is not None
    checkpoint = open_checkpoint(place)
    begun = (config.posttrain.start if config.posttrain else None) or getattr(config.model, "path", None)
    if begun is None or opening.adapter is not None:
        raise GenerateError(
            f"{place} holds only what was trained, and the run does not say what it began with; open the model that it "
            "began with, and give the run's folder `adapter` as --adapter"
        )
    model = _built(config.model, opening)
    if config.lora is not None:
        attach(model, AdapterSpec.of(config.lora), config.lora.targets)
    start = open_start(begun, config.model, None, model)
    assert start is not None, "there is a path, so there are weights"
    fill_all(model, start)
    tensors = {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    names = checkpoint.manifest.state["frozen"]["names"]
    ignore = ("optim.", "rng.", "hook.")
    load_into(checkpoint, tensors, world=open_world(parse({}).config), ignore=ignore, partial=names)
    return _finished(model, opening)


def _load_streamed(place: Path, config: RunConfig | None, opening: Opening) -> nn.Module:
    """A model of which the device holds two blocks at a time."""
    from plait.generate import build_streamed

    tier = opening.offload
    if tier not in ("cpu", "nvme"):
        raise ConfigError(Problem("--offload", f"there is no place {tier!r} for weights", "Write cpu or nvme."))
    if config is None or opening.adapter is not None or opening.dtype != "auto":
        raise GenerateError("--offload takes checkpoints of Plait as they are: convert the model or merge its adapter")
    world = open_world(config)
    model, stream = build_streamed(config, world.device, tier=tier, folder=Path(opening.offload_path or place))  # type: ignore[arg-type]
    tensors = {f"model.{name}": tensor for name, tensor in stream.tensors().items()}
    tensors.update({f"model.{name}": buffer for name, buffer in persistent_buffers(model)})
    load_into(open_checkpoint(place), tensors, world=world, ignore=("optim.", "rng.", "hook."))
    stream.filled()
    return model


def _context(model: nn.Module, config: RunConfig | None) -> int | None:
    """What the model says itself; a model that does not say sees what it was trained on."""
    return context_of(model) or (None if config is None else getattr(config.data, "seq_len", None))


def _tokenizer(asked: Path, place: Path, config: RunConfig | None, opening: Opening) -> Path:
    """Where the tokenizer lies: as told, beside the weights, or with the data of the run."""
    if opening.tokenizer is not None:
        return Path(opening.tokenizer)
    section = None if config is None else config.posttrain
    data = None if config is None or section is not None else tokenizer_path(config.data)
    if data is not None:
        return data
    near = [asked, place, *place.absolute().parents[:2]]
    named = [section.tokenizer if section else None, getattr(config.model, "path", None) if config else None]
    for folder in (*near, *(Path(each) for each in named if each)):
        if folder.is_file() or (folder / NAME).is_file():
            return folder
    raise GenerateError(f"there is no {NAME} with {asked}: name one with --tokenizer, a file or the folder of a model")


def _manner(
    tokenizer: ChatTokenizer, config: RunConfig | None, opening: Opening, place: Path, lies: Path
) -> tuple[Template, tuple[int | str, ...]]:
    """How conversations are written down, and what ends an answer; the tokenizer `lies` there."""
    section = (config.posttrain if config is not None else None) or PosttrainConfig()
    named = (section.tokenizer, getattr(config.model, "path", None) if config else None, str(place))
    places = [lies, *(Path(each) for each in named if each is not None)]
    if config is None or config.phase is None:  # nothing was written down in any way, so the model's own it is
        places = [*(each for each in places if chat_template_in(tokenizer_folder(each)) is not None), *places]
    template = template_of_run(section.template, tokenizer, places, trust_code=opening.trust_code)
    folders = (opening.tokenizer, *named)
    folder = next((Path(each) for each in folders if each is not None and Path(each).is_dir()), place)
    ends = dict.fromkeys((*template.ends, *_ends(folder)))

    return template, tuple(ends)


def _with_tools(
    template: Template, tokenizer: ChatTokenizer
) -> Callable[[Sequence[Turn], Sequence[Mapping[str, Any]]], list[int]] | None:
    """How conversations with tools are written down, where the template writes calls in the form that is read here."""
    name, arguments = "probe", {"x": [1, "y"]}
    hidden = any(tokenizer.special_token(mark) is not None for mark in (OPEN, CLOSE))  # no answer would show a call
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


def _ends(folder: Path) -> list[int]:
    """The tokens that end an answer, as a Hugging Face folder says."""
    file = folder / "generation_config.json"
    found = _json(file).get("eos_token_id")
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(end) is int for end in ends):
        raise DataError(f"{file} has the eos_token_id {found!r:.80}, expected a token's number or a list of them")
    return ends


def _json(file: Path) -> dict[str, Any]:
    return read_json_object(file, DataError) if file.is_file() else {}
