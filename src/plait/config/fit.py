"""Defaults that follow another section: what was not written must not stand against what was."""

from __future__ import annotations

from typing import Any

from plait.config.base import Section
from plait.config.data import SMALLEST_BPE, MixtureData
from plait.config.model import GptConfig, LlamaConfig
from plait.config.run import RunConfig


def fitted(config: RunConfig) -> RunConfig:
    """The same run; sequences and trained vocabularies whose size was not written are no larger than the model's."""
    model = config.model
    if not isinstance(model, (GptConfig, LlamaConfig)):
        return config
    bounds = {"seq_len": model.seq_len, "vocab_size": max(model.vocab_size, SMALLEST_BPE)}
    roles = {role: getattr(config, role) for role in ("data", "val_data", "test_data")}
    changed = {role: found for role, data in roles.items() if (found := _within(data, bounds)) is not data}
    return _with(config, changed) if changed else config


def _within(data: Any, bounds: dict[str, int]) -> Any:
    if isinstance(data, MixtureData):
        sources = tuple(_within(source, bounds) for source in data.sources)
        unchanged = all(new is old for new, old in zip(sources, data.sources, strict=True))
        return data if unchanged else _with(data, {"sources": sources})
    own = {} if data is None else {name: getattr(data, name, 0) for name in bounds if name not in data.model_fields_set}
    smaller = {name: bounds[name] for name, size in own.items() if size > bounds[name]}
    return _with(data, smaller) if smaller else data


def _with(section: Any, changes: dict[str, Any]) -> Any:
    """A copy with other values, in which nothing counts as written that did not before."""
    assert isinstance(section, Section)
    made = section.model_copy(update=changes)
    made.__pydantic_fields_set__ &= section.model_fields_set
    return made
