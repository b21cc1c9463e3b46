"""What `plait convert` writes for a model: the names of its tensors, and the files beside them.

These functions are in a file of their own because they load torch, which the checks of the options do not need.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from plait.config import PosttrainConfig, parse_stored, read_json_object, text_sources
from plait.data import load_tokenizer, tokenizer_path
from plait.errors import CheckpointError, ConfigError, DataError, ModelError, PlaitError, Problem
from plait.models import from_stored, from_transformers, to_transformers
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

TEMPLATES = (CHAT_TEMPLATE, "chat_template.json")
"""Files in which `transformers` folders keep a chat template, if it is not in the tokenizer's settings."""
GENERATION = "generation_config.json"
STORED_KINDS = ("hf", "megatron")
"""Kinds of sources whose tensors have the names and shapes that `save_pretrained` writes, not those of modules."""
FAMILIES = ("gpt", "llama", "moe")
"""Plait's models that can load weights of `transformers`."""


def prepare_source(
    source: Source, to: Format | str, model: str | None, *, trust_code: bool = False
) -> tuple[Source, Description | None]:
    """Return the source under the target's tensor names, and the other files of an `hf` folder, else None."""
    if to == "hf":
        return _for_transformers(_as_plain_model(source, trust_code), model, trust_code)
    if model is None:
        return (_as_hf_model(source, trust_code) if to == "plait" else source), None
    if model not in FAMILIES:
        raise ConfigError(Problem("--model", f"names of {model!r} are not known", f"Use {' or '.join(FAMILIES)}."))
    return _as_plait_model(source, model), None


def _as_plain_model(source: Source, trust_code: bool) -> Source:
    """Return a checkpoint of post-training as a plain model, with adapters merged. Raise for a reward model."""
    if _config_in(source.state).get("phase") == "reward":
        raise ModelError(
            f"{source.path} holds a reward model, which has a value head in place of logits; transformers has no such "
            "model. Write it with `--to torch` or `--to plait`"
        )
    return merged(source, trust_code=trust_code) if has_adapters(source) else source


def _as_plait_model(source: Source, family: str) -> Source:
    """Return weights of `transformers` under the names of Plait's model of this family."""
    described = _config_in(source.state).get("model", {}).get("config")  # a Megatron checkpoint has it
    description = read_description(source.path) if source.kind == "hf" else described
    shapes = {n.removeprefix("model."): e.shape for n, e in source.entries.items() if n.startswith("model.")}
    adopted = from_transformers(family, description, shapes)
    renamed = translated(source, adopted.made, unused=adopted.unused)
    if adopted.config is None:
        return renamed
    return with_state(renamed, _with_model(source.state, adopted.config.model_dump(mode="json")))


def _as_hf_model(source: Source, trust_code: bool) -> Source:
    """Return weights that were stored for `transformers` under the names that its modules have; others unchanged."""
    if source.kind not in STORED_KINDS:
        return source
    if source.kind == "hf":
        source = with_state(source, _with_model(source.state, {"type": "hf", "path": str(source.path.absolute())}))
    described = _config_in(source.state).get("model")
    if described is None or (source.kind == "hf" and read_description(source.path) is None):
        return source
    shapes = {n.removeprefix("model."): e.shape for n, e in source.entries.items() if n.startswith("model.")}
    made = from_stored(_parsed("model", described, source), shapes, trust_code=trust_code)
    return source if made is None else translated(source, made)


def _config_in(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the run description in a checkpoint; {} if it has none, as `engine.save` writes for a model object."""
    return state.get("config") or {}


def _with_model(state: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "config": {**_config_in(state), "model": dict(model)}}


def _for_transformers(source: Source, model: str | None, trust_code: bool) -> tuple[Source, Description]:
    described = _config_in(source.state).get("model")
    _refuse_partial(source)
    if described is not None:
        portable = to_transformers(_parsed("model", described, source), trust_code=trust_code)
        if portable.made is not None and source.kind not in STORED_KINDS:
            source = translated(source, portable.made, unused=portable.unused)
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
    # Quantized weights were computed back to full ones when they were read.
    config = {key: value for key, value in _description(folder).items() if key != "quantization_config"}
    return source, Description(config, companions(folder))


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
    """Return the description with a tokenizer: of the data, else the run's copy, else of the model's folder."""
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
    """Return the description with the chat template of the phase, in place of the original tokenizer's."""
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
    if len(eos_ids := list(dict.fromkeys(eos_ids))) > 1:  # answers also end at the template's end token
        files.pop(GENERATION, None)
        texts[GENERATION] = json.dumps({**generation, "eos_token_id": eos_ids}, indent=2) + "\n"
    if SETTINGS in files:  # older folders have the template in it
        settings = {key: value for key, value in read_settings(files.pop(SETTINGS)).items() if key != "chat_template"}
        texts[SETTINGS] = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    return Description(description.config, files, texts)


def _tokens(file: Path) -> str:
    """Return a tokenizer's content, to compare it: runs save copies, so equal tokenizers may be in different files."""
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
        return None  # the data is on another machine: convert without a tokenizer


def _parsed(section: str, value: Any, source: Source) -> Any:
    """Return a parsed section of the run description in a checkpoint; code that it names is not run."""
    try:
        return getattr(parse_stored({section: value}, source.description, trust_code=False), section)
    except PlaitError as error:
        raise ModelError(f"the run description in the checkpoint cannot be read by this version: {error}") from error
