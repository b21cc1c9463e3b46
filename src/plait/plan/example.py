"""A micro-batch of the right shapes, for a run whose data nobody has to read."""

from __future__ import annotations

from typing import Any

import torch

from plait.config import OWN_MODEL, Cifar10Data, ImageFolderData, JsonlData, RunConfig, TextData, TokensData, leaves
from plait.errors import ConfigError, Problem


def example_of(config: RunConfig, micro: int) -> Any:
    """What the model is called with, for `micro` samples of `config.data`; without data, tokens where the model says
    how many it takes. To be called in a fake world: nothing in it has values."""
    data = next((source for _, source in leaves("data", config.data)), None)
    if config.data is not None and config.data.collate is not None:
        message = "a function of its own makes batches of them, so the shapes of a micro-batch are not known"
        raise ConfigError(Problem("data.collate", message, "Start the run; a plan needs batches that are stacked."))
    if isinstance(data, TextData | JsonlData | TokensData):
        return _tokens(micro, data.seq_len, documents=data.document_mask)
    if isinstance(data, ImageFolderData | Cifar10Data):
        size = data.size if isinstance(data, ImageFolderData) else 32
        return torch.zeros(micro, 3, size, size), torch.zeros(micro, dtype=torch.int64)
    length = None if isinstance(config.model, OWN_MODEL) else getattr(config.model, "seq_len", None)
    if data is None and isinstance(length, int):
        return _tokens(micro, length, documents=False)
    kind = "there are none" if data is None else f"data of type {data.type!r}"
    message = f"{kind}, so the shapes of a micro-batch are not known without reading one"
    raise ConfigError(Problem("data", message, "Start the run: it plans itself, with its first micro-batch."))


def _tokens(micro: int, length: int, *, documents: bool) -> dict[str, torch.Tensor]:
    keys = ("input_ids", "labels", "positions", "document_ids") if documents else ("input_ids", "labels")
    return {key: torch.zeros(micro, length, dtype=torch.int64) for key in keys}
