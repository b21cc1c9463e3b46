"""Weights of `transformers` models, streamed from the folder they were saved to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from plait.config import read_json_object
from plait.errors import ModelError
from plait.models.common.weights import Put, stream_weights, weight_files
from plait.transformers_internals import may_be_missing, may_be_unexpected

__all__ = ["load_pretrained", "weight_files"]


def load_pretrained(model: nn.Module, path: str | Path, put: Put) -> tuple[str, ...]:
    """Stream a folder into an adapted model; return the parameters that keep their random start.

    Those are none where the folder holds the same architecture: then everything has to fit. For another task
    (a classifier from a language model) only the body has to fit, and the heads of both sides may differ.
    Weights that `transformers` stores under other names than it uses (some mixtures of experts) are refused
    like any others that do not fit.
    """
    hf: Any = model
    names = model.state_dict().keys()
    body = f"{hf.base_model_prefix}."

    def translate(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """A body saved alone lacks the prefix; a body loaded alone has none."""
        candidates = (name, body + name, name.removeprefix(body))
        yield next((candidate for candidate in candidates if candidate in names), name), tensor

    may_skip = [*may_be_unexpected(model), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    may_miss = may_be_missing(model)
    if type(model).__name__ not in _architectures(path):
        head = _outside(body)
        if any(name.startswith(body) for name in names):
            may_miss += [head, r"\.pooler\."]  # a pooler is part of the body for some tasks only
        may_skip.append(head)
    return stream_weights(model, path, put, translate=translate, may_miss=may_miss, may_skip=may_skip)


def _architectures(path: str | Path) -> list[str]:
    found = read_json_object(Path(path) / "config.json", ModelError).get("architectures")
    return found if isinstance(found, list) else []


def _outside(prefix: str) -> str:
    """A pattern for the names that do not start with `prefix`."""
    return rf"^(?!{re.escape(prefix)})"
