"""Rules for `data`, `val_data` and `test_data`, alone and together with `model`."""

from __future__ import annotations

from collections.abc import Iterator

from plait.config.data import (
    OWN_DATA,
    SMALLEST_BPE,
    DataSource,
    JsonlData,
    MixtureData,
    TextData,
    TokensData,
    leaves,
    texts,
)
from plait.config.model import GptConfig, HFConfig, LlamaConfig
from plait.config.rules.facts import Facts, idle
from plait.errors import Problem

_ROLES = ("data", "val_data", "test_data")


def _sources(facts: Facts) -> Iterator[tuple[str, DataSource]]:
    for path in _ROLES:
        for place, source in leaves(path, getattr(facts.config, path)):
            if not isinstance(source, OWN_DATA):  # whose keys are its own
                yield place, source


def sources_of_a_mixture_fit_together(facts: Facts) -> Iterator[Problem]:
    """Samples of all of them stand in one batch, and one tokenizer made their tokens."""
    for path in _ROLES:
        mixture = getattr(facts.config, path)
        if not isinstance(mixture, MixtureData):
            continue
        if mixture.weights and len(mixture.weights) != len(mixture.sources):
            message = f"{len(mixture.weights)} numbers for {len(mixture.sources)} sources"
            yield Problem(f"{path}.weights", message, "Write one for each source, in their order.")
        for place, source in leaves(path, mixture):
            names, reason = (
                ("shuffle", "workers", "pin_memory", "drop_last", "collate"),
                f"`{path}` as a whole is loaded",
            )
            yield from idle(place, source, names, reason, f"Write it beside `{path}.sources`.")
            length = getattr(source, "seq_len", None)
            if length is not None and length != mixture.seq_len:
                message = f"{length}, but sequences of the first source have {mixture.seq_len}"
                yield Problem(f"{place}.seq_len", message, f"Write `seq_len: {mixture.seq_len}`.")
        tokenized = texts(path, mixture)
        for place, text in tokenized[1:]:
            first = tokenized[0]
            if text.tokenizer not in (None, first[1].tokenizer):
                message = f"{text.tokenizer!r}, but the tokenizer of the mixture is that of `{first[0]}`"
                yield Problem(f"{place}.tokenizer", message, "Leave it out, or name the same one in both.")
            elif text.tokenizer is None:
                yield from idle(place, text, ("vocab_size",), f"the tokenizer is that of `{first[0]}`", "Leave it out.")


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


def labels_fit_the_task(facts: Facts) -> Iterator[Problem]:
    """Text becomes rows whose labels are the next tokens. A model that sees these tokens would learn to copy them."""
    model = facts.config.model
    if not isinstance(model, HFConfig) or model.task == "causal-lm":
        return
    made = [path for path, source in _sources(facts) if isinstance(source, (TokensData, TextData, JsonlData))]
    if made:
        message = f"{model.task!r}, and the labels that `{made[0]}` gives are the next tokens"
        remedy = "Write `model.task: causal-lm`, or give a data set of your own with the labels of this task."
        yield Problem("model.task", message, remedy)


def sequences_fit_the_model(facts: Facts) -> Iterator[Problem]:
    """A model is made for sequences of up to `seq_len`; a GPT has no position beyond."""
    model = facts.config.model
    for path, source in _sources(facts):
        if not isinstance(model, (GptConfig, LlamaConfig)) or not isinstance(source, (TokensData, TextData, JsonlData)):
            continue
        if source.seq_len > model.seq_len:
            message = f"{source.seq_len} is longer than `model.seq_len`, {model.seq_len}"
            yield Problem(f"{path}.seq_len", message, f"Write `{path}.seq_len: {model.seq_len}`, or a longer model.")


def trained_vocabulary_fits_the_model(facts: Facts) -> Iterator[Problem]:
    """A token that the model has no embedding for cannot be looked up. Validation takes the training tokenizer."""
    model, tokenized = facts.config.model, texts("data", facts.config.data)
    if not isinstance(model, (GptConfig, LlamaConfig)) or not tokenized:
        return
    path, source = tokenized[0]
    if source.tokenizer is None and source.vocab_size > model.vocab_size:
        message = f"{source.vocab_size} tokens, but the model knows {model.vocab_size} (`model.vocab_size`)"
        remedy = f"Write `{path}.vocab_size: {model.vocab_size}`."
        if model.vocab_size < SMALLEST_BPE:
            remedy = f"Give the model {SMALLEST_BPE} or more, one for each byte and one for the end."
        yield Problem(f"{path}.vocab_size", message, remedy)


RULES = (
    sources_of_a_mixture_fit_together,
    own_tokenizer_has_its_own_size,
    val_fraction_needs_a_split,
    labels_fit_the_task,
    sequences_fit_the_model,
    trained_vocabulary_fits_the_model,
)
