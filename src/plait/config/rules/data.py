"""Rules for `data`, `val_data` and `test_data`, alone and together with `model`."""

from __future__ import annotations

from collections.abc import Iterator

from plait.config.data import (
    SMALLEST_BPE,
    Cifar10Data,
    DataConfig,
    ImageFolderData,
    ImportedData,
    JsonlData,
    TextData,
)
from plait.config.model import GptConfig, LlamaConfig
from plait.config.rules.facts import Facts, idle
from plait.errors import Problem


def _sources(facts: Facts) -> Iterator[tuple[str, DataConfig]]:
    for path in ("data", "val_data", "test_data"):
        if (source := getattr(facts.config, path)) is not None:
            yield path, source


def own_tokenizer_has_its_own_size(facts: Facts) -> Iterator[Problem]:
    """`vocab_size` is for a tokenizer that is trained."""
    for path, source in _sources(facts):
        if isinstance(source, (TextData, JsonlData)) and source.tokenizer is not None:
            reason = f"the tokenizer {source.tokenizer!r} has a size of its own"
            yield from idle(path, source, ("vocab_size",), reason, "Leave one of the two out.")


def val_fraction_needs_a_split(facts: Facts) -> Iterator[Problem]:
    """Where all of a source is used, no part of it is set aside."""
    for path, source in _sources(facts):
        if getattr(source, "split", None) == "all":
            remedy = f"Leave it out, or write `{path}.split: train` (or `val`)."
            yield from idle(path, source, ("val_fraction",), f"`{path}.split` is all", remedy)


def sequences_fit_the_model(facts: Facts) -> Iterator[Problem]:
    """A model is made for sequences of up to `seq_len`; a GPT has no position beyond."""
    model = facts.config.model
    for path, source in _sources(facts):
        if not isinstance(model, (GptConfig, LlamaConfig)) or isinstance(
            source, (ImageFolderData, Cifar10Data, ImportedData)
        ):
            continue
        if source.seq_len > model.seq_len:
            message = f"{source.seq_len} is longer than `model.seq_len`, {model.seq_len}"
            yield Problem(f"{path}.seq_len", message, f"Write `{path}.seq_len: {model.seq_len}`, or a longer model.")


def trained_vocabulary_fits_the_model(facts: Facts) -> Iterator[Problem]:
    """A token that the model has no embedding for cannot be looked up. Validation takes the training tokenizer."""
    model, source = facts.config.model, facts.config.data
    if not isinstance(model, (GptConfig, LlamaConfig)) or not isinstance(source, (TextData, JsonlData)):
        return
    if source.tokenizer is None and source.vocab_size > model.vocab_size:
        message = f"{source.vocab_size} tokens, but the model knows {model.vocab_size} (`model.vocab_size`)"
        remedy = f"Write `data.vocab_size: {model.vocab_size}`."
        if model.vocab_size < SMALLEST_BPE:
            remedy = f"Give the model {SMALLEST_BPE} or more, one for each byte and one for the end."
        yield Problem("data.vocab_size", message, remedy)


RULES = (
    own_tokenizer_has_its_own_size,
    val_fraction_needs_a_split,
    sequences_fit_the_model,
    trained_vocabulary_fits_the_model,
)
