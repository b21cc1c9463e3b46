"""Building the dataset of a `data` section."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader

from plait.config import (
    CUSTOM_DATA,
    Cifar10Data,
    DataConfig,
    ImageFolderData,
    ImportedData,
    JsonlData,
    MixtureData,
    TextData,
    TokensData,
    text_sources,
)
from plait.data.objectives import ObjectiveRows
from plait.data.packing import PackedTokens
from plait.data.text import prepare_corpus
from plait.data.tokenizer import load_tokenizer
from plait.data.tokens import TokenFile
from plait.errors import ConfigError, Problem
from plait.plugins import build


@dataclass(frozen=True, slots=True)
class DataUse:
    """What a dataset's builder needs to know besides its own section."""

    training: bool
    """Whether it is training data: the default of `augment`, and whether a mixture is shuffled."""
    seed: int
    """The seed of augmentation."""
    tokenizer: str | Path | None
    """For text whose section names no tokenizer: for validation data, that of the training data."""
    role: str
    """The key of its section, for messages."""

    def augments(self, wanted: bool | None) -> bool:
        """Return whether samples are augmented: `wanted`, or by default those of training data."""
        return self.training if wanted is None else wanted


@runtime_checkable
class Indexed(Protocol):
    """A dataset whose samples are read by their index."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one sample."""


def build_dataset(
    config: DataConfig, *, training: bool, seed: int, tokenizer: str | Path | None = None, role: str = "data"
) -> Any:
    """Return the dataset of a section; the other arguments are the fields of `DataUse`.

    Raise a `ConfigError` if a user-provided class or function does not make a dataset.
    """
    if not isinstance(config, CUSTOM_DATA):
        return build(config, role, use=DataUse(training, seed, tokenizer, role))
    made = build(config, role, accepts=(Iterable, Indexed))
    name = str(config.target if isinstance(config, ImportedData) else config.type)
    key = f"{role}.{'target' if isinstance(config, ImportedData) else 'type'}"
    if isinstance(made, DataLoader):
        message = f"{name!r} made a DataLoader; batches, order and workers are said in `{role}`"
        raise ConfigError(Problem(key, message, "Return its data set, or give the DataLoader from Python."))
    if isinstance(made, (type, str, bytes)) or not isinstance(made, (Iterable, Indexed)):
        message = f"{name!r} made a {type(made).__name__}, which has no `__getitem__` and no `__iter__`"
        raise ConfigError(Problem(key, message, "Return a torch Dataset, or any iterable."))
    return made


def token_file(config: TokensData, use: DataUse) -> PackedTokens | ObjectiveRows:
    """Return the dataset of a token file."""
    return _rows(config, Path(config.path), config.tokenizer, use)


def packed_text(config: TextData | JsonlData, use: DataUse) -> PackedTokens | ObjectiveRows:
    """Return the dataset of text, which is tokenized once and cached."""
    corpus = prepare_corpus(config, use.tokenizer)
    return _rows(config, corpus.tokens, corpus.tokenizer, use)


def image_folder(config: ImageFolderData, use: DataUse) -> Any:
    """Return the dataset of a folder of images."""
    from plait.data.images import ImageFolder

    pixels: dict[str, Any] = {"size": config.size, "mean": config.mean, "std": config.std}
    return ImageFolder(config.path, **pixels, **_augmented(config, use))


def cifar10(config: Cifar10Data, use: DataUse) -> Any:
    """Return the CIFAR-10 dataset."""
    from plait.data.images import Cifar10

    return Cifar10(config.path, split=config.split, **_augmented(config, use))


def _augmented(config: ImageFolderData | Cifar10Data, use: DataUse) -> dict[str, Any]:
    hide = None if config.objective is None else build(config.objective, f"{use.role}.objective")
    return {"augment": use.augments(config.augment), "seed": use.seed, "hide": hide}


def mixture(config: MixtureData, use: DataUse) -> Any:
    """Return the mixture of several datasets."""
    from plait.data.mixture import MixtureSource

    tokenizer = _shared(config, use.tokenizer)
    sources = [
        build_dataset(
            source, training=use.training, seed=use.seed, tokenizer=tokenizer, role=f"{use.role}.sources.{index}"
        )
        for index, source in enumerate(config.sources)
    ]
    return MixtureSource(sources, config.weights, config.samples, seed=use.seed, shuffle=use.training)


def prepare(config: DataConfig, *, tokenizer: str | Path | None = None) -> None:
    """Tokenize and cache the text of a section, so that other ranks can read it from the cache. Not a collective."""
    shared = _shared(config, tokenizer)
    for _, text in text_sources("data", config):
        prepare_corpus(text, shared)


def tokenizer_path(config: DataConfig | None) -> Path | None:
    """Return the `tokenizer.json` of text data; None for data without text."""
    return next((prepare_corpus(text).tokenizer for _, text in text_sources("data", config)), None)


def _shared(config: DataConfig, tokenizer: str | Path | None) -> str | Path | None:
    """Return the tokenizer for text sources that name none: `tokenizer`, else that of a mixture's first text."""
    return tokenizer_path(config) if isinstance(config, MixtureData) and tokenizer is None else tokenizer


def _rows(
    config: TokensData | TextData | JsonlData, path: Path, tokenizer_file: str | Path | None, use: DataUse
) -> PackedTokens | ObjectiveRows:
    """Return the rows of a token file for the section's objective."""
    tokens, objective = TokenFile(path), config.objective
    rows: dict[str, Any] = {
        "seq_len": config.seq_len,
        "document_mask": config.document_mask,
        "split": config.split,
        "val_fraction": config.val_fraction,
        "source": config.path,
    }
    if objective is None:
        return PackedTokens(tokens, **rows)
    assert tokenizer_file is not None  # a rule asks for it
    tokenizer = load_tokenizer(tokenizer_file)
    if tokens.meta.tokenizer not in ("", tokenizer.digest):
        message = f"{str(tokenizer_file)!r} did not make the tokens of {config.path!r}"
        raise ConfigError(Problem(f"{use.role}.tokenizer", message, "Give the tokenizer.json that made them."))
    made = build(objective, f"{use.role}.objective", tokenizer=tokenizer, seq_len=config.seq_len)
    return ObjectiveRows(tokens, made, tokenizer, seed=use.seed, **rows)
