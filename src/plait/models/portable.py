"""Models in the terms of `transformers`: what to call their tensors, and how to describe them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from plait.config import GptConfig, HFConfig, LlamaConfig, ModelConfig, MoeConfig
from plait.errors import ModelError
from plait.models.common.weights import Made, by_translation


class Portable(NamedTuple):
    """A model that `transformers` has a counterpart of."""

    description: dict[str, Any]
    """Its `config.json`, but for the dtype."""
    made: dict[str, Made] | None
    """Its tensors, each made of ours; None where they have the same names already."""
    folder: Path | None = None
    """Where it came from: a tokenizer may lie there."""


class Adopted(NamedTuple):
    """A model of `transformers` as one of ours."""

    config: ModelConfig | None
    """None where there was no description."""
    made: dict[str, Made]
    """Our tensors, each made of the stored ones."""
    unused: tuple[str, ...]
    """Patterns of stored names that we have no use for."""


def to_transformers(config: ModelConfig, *, trust_code: bool = False) -> Portable:
    """The counterpart of a model in `transformers`; a `ModelError` where there is none."""
    match config:
        case GptConfig():
            from plait.models import gpt as gpt

            return Portable(gpt.describe(config), gpt.to_transformers(config))
        case MoeConfig():  # before the Llama that it extends
            from plait.models import moe as moe

            return Portable(moe.describe(config), moe.to_transformers(config))
        case LlamaConfig():
            from plait.models import llama as llama

            return Portable(llama.describe(config), llama.to_transformers(config))
        case HFConfig():
            from plait.models.hf import describe

            return Portable(
                describe(config, trust_code=trust_code), None, None if config.path is None else Path(config.path)
            )
        case _:
            raise ModelError(
                f"`model.type: {config.type}` has no counterpart in transformers, which knows hf, gpt, llama "
                "and moe of Plait's; write a plain state dict with `--to torch`, or a checkpoint with `--to plait`"
            )


def from_transformers(family: str, description: Mapping[str, Any] | None, shapes: Mapping[str, torch.Size]) -> Adopted:
    """Our `family` for a `transformers` model: its `config.json`, if there is one, and the shapes of its tensors."""
    from plait.models import gpt as gpt
    from plait.models import llama as llama
    from plait.models import moe as moe

    config: GptConfig | LlamaConfig | None = None
    unused: tuple[str, ...]
    try:
        if family == "gpt":
            translate, unused = gpt.from_transformers, gpt.UNUSED
            config = None if description is None else gpt.from_description(description)
        elif family == "llama":
            translate, unused = llama.from_transformers, llama.UNUSED
            config = None if description is None else llama.from_description(description)
        elif family == "moe":
            translate, unused = moe.from_transformers, moe.UNUSED
            config = None if description is None else moe.from_description(description)
        else:
            raise ModelError(f"no family {family!r} takes weights of transformers; there are gpt, llama and moe")
    except KeyError as error:
        raise ModelError(f"config.json has no {error}, which a {family} needs") from error
    if config is not None and config.tie_embeddings:
        unused = (*unused, r"^lm_head\.weight$")  # the embedding's own values, stored twice
    made = moe.made_from_transformers(shapes) if family == "moe" else by_translation(translate, shapes)
    return Adopted(config, made, unused)
