"""From the `data` section of a run description to a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.config import (
    Cifar10Data,
    DataConfig,
    ImageFolderData,
    ImportedData,
    JsonlData,
    MixtureData,
    TextData,
    TokensData,
    load_code,
    texts,
)
from plait.data.corpus import prepare_corpus
from plait.data.packing import PackedTokens
from plait.data.tokens import TokenFile


def build_dataset(
    config: DataConfig, *, training: bool, seed: int, tokenizer: str | Path | None = None, role: str = "data"
) -> Any:
    """The data set that a config describes.

    `training` decides what the config leaves open (augmentation), `seed` the augmentation itself.
    `role` is the section that it stands in, for messages.
    `tokenizer` is for text whose config names none: the tokenizer of the training data, for validation.
    """
    match config:
        case TokensData():
            return _packed(config, Path(config.path))
        case TextData() | JsonlData():
            return _packed(config, prepare_corpus(config, tokenizer).tokens)
        case ImageFolderData():
            from plait.data.images import ImageFolder

            augment = training if config.augment is None else config.augment
            return ImageFolder(config.path, size=config.size, augment=augment, seed=seed)
        case Cifar10Data():
            from plait.data.cifar import Cifar10

            augment = training if config.augment is None else config.augment
            return Cifar10(config.path, split=config.split, augment=augment, seed=seed)
        case ImportedData():
            return load_code(config.target, key=f"{role}.target")(**config.args)
        case MixtureData():
            from plait.data.mixture import Mixture

            tokenizer = _shared(config, tokenizer)
            sources = [
                build_dataset(each, training=training, seed=seed, tokenizer=tokenizer, role=f"{role}.sources.{index}")
                for index, each in enumerate(config.sources)
            ]
            return Mixture(sources, config.weights, config.samples, seed=seed, shuffle=training)


def prepare(config: DataConfig, *, tokenizer: str | Path | None = None) -> None:
    """Do the work that is done once and kept, so that the other ranks find it done. May be called by all."""
    shared = _shared(config, tokenizer)
    for _, text in texts("data", config):
        prepare_corpus(text, shared)


def tokenizer_path(config: DataConfig | None) -> Path | None:
    """The `tokenizer.json` that belongs to text data; None for data without one."""
    return next((prepare_corpus(text).tokenizer for _, text in texts("data", config)), None)


def _shared(config: DataConfig, tokenizer: str | Path | None) -> str | Path | None:
    """The tokenizer of text that names none: in a mixture, that of its first text unless another one is given."""
    return tokenizer_path(config) if isinstance(config, MixtureData) and tokenizer is None else tokenizer


def _packed(config: TokensData | TextData | JsonlData, path: Path) -> PackedTokens:
    return PackedTokens(
        TokenFile(path),
        seq_len=config.seq_len,
        document_mask=config.document_mask,
        split=config.split,
        val_fraction=config.val_fraction,
        source=config.path,
    )
