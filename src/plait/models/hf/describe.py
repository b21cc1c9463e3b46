"""The `config.json` of a model that was built here."""

from __future__ import annotations

import json
from typing import Any

import torch

from plait.config import HFConfig
from plait.models.hf.model import build_hf_model


def describe(config: HFConfig, *, trust_code: bool = False) -> dict[str, Any]:
    """The settings with which `transformers` builds the same model again, its class included.

    A model trained for another task than its folder was saved for is of another class, so the folder's own
    `config.json` would not do.
    """
    with torch.device("meta"):
        model: Any = build_hf_model(config, trust_code=trust_code)
    found: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=True))
    # What a config says of its class and dtype is where it came from; these are of the model as it is now.
    return {**found, "architectures": [type(model).__name__]}
