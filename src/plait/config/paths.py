"""Checks, before anything starts, that the files and folders of a run description exist."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

from plait.config.data import (
    Cifar10Data,
    DataConfig,
    ImageFolderData,
    JsonlData,
    MixtureData,
    TextData,
    TokensData,
    leaf_sources,
)
from plait.config.model import HFConfig
from plait.config.run import RunConfig
from plait.config.text import nearest
from plait.errors import Problem


def missing_paths(config: RunConfig) -> list[Problem]:
    """Return a problem for each file or folder that the run would read and that does not exist."""
    problems: list[Problem] = []
    for role in ("data", "val_data", "test_data"):
        problems += _missing_data_paths(role, getattr(config, role))
    if isinstance(config.model, HFConfig) and config.model.path is not None:
        problems += _unless_exists("model.path", config.model.path, "Give the folder of a `transformers` model.")
    if config.checkpoint.resume not in (None, "auto"):
        remedy = "Give a checkpoint or the work_dir of a run, or `auto`."
        problems += _unless_exists("checkpoint.resume", str(config.checkpoint.resume), remedy)
    return problems


def start_paths(config: RunConfig) -> dict[str, str]:
    """Return the paths of other runs' results that a phase starts from, by their keys."""
    posttrain, lora, ppo = config.posttrain, config.lora, config.ppo
    named = {
        "posttrain.start": posttrain.start if posttrain else None,
        "posttrain.tokenizer": posttrain.tokenizer if posttrain else None,
        "lora.adapter": lora.adapter if lora else None,
        "ppo.reward_model": ppo.reward_model if ppo else None,
        "ppo.critic_start": ppo.critic_start if ppo else None,
    }
    return {key: path for key, path in named.items() if path is not None}


def missing_start_paths(config: RunConfig) -> list[Problem]:
    """Return a problem for each of these paths that does not exist."""
    runs = "Give a run, a checkpoint or a Hugging Face folder; where another phase makes it, run that one first."
    remedies = {"posttrain.tokenizer": "Give a tokenizer.json, or its folder.", "lora.adapter": "Give its folder."}
    named = start_paths(config).items()
    return [problem for key, path in named for problem in _unless_exists(key, path, remedies.get(key, runs))]


def _missing_data_paths(role: str, source: DataConfig | None) -> Iterator[Problem]:
    match source:
        case MixtureData():
            for key, leaf in leaf_sources(role, source):
                yield from _missing_data_paths(key, leaf)
        case TextData(path="stdlib"):
            pass
        case TextData() | JsonlData():
            if not glob.glob(str(Path(source.path).expanduser()), recursive=True):
                yield _missing(f"{role}.path", source.path, "Give a file, a folder or a glob.")
        case ImageFolderData() | Cifar10Data():
            yield from _unless_exists(f"{role}.path", source.path, "Give the folder of the images.")
        case TokensData():
            path = Path(source.path)
            stem = path.with_suffix("") if path.suffix in (".bin", ".json") else path
            if not (meta := stem.with_name(f"{stem.name}.json")).exists():
                remedy = "Give a file that `plait.data.TokenWriter` wrote."
                if path.exists():
                    message = f"{source.path!r} is not a token file: {meta.name!r} is missing beside it"
                    yield Problem(f"{role}.path", message, remedy)
                else:
                    yield _missing(f"{role}.path", source.path, remedy)
    if isinstance(source, TextData | JsonlData) and source.tokenizer is not None:
        yield from _unless_exists(f"{role}.tokenizer", source.tokenizer, "Give a tokenizer.json.")


def _unless_exists(key: str, path: str, remedy: str) -> Iterator[Problem]:
    if not Path(path).expanduser().exists():
        yield _missing(key, path, remedy)


def _missing(key: str, path: str, remedy: str) -> Problem:
    expanded = Path(path).expanduser()
    message = f"{path!r} does not exist" + ("" if expanded.is_absolute() else f" in {Path.cwd()}")
    if expanded.parent.is_dir() and (
        meant := nearest(expanded.name, [sibling.name for sibling in expanded.parent.iterdir()])
    ):
        remedy = f"Did you mean `{expanded.parent / meant}`? {remedy}"
    return Problem(key, message, remedy)
