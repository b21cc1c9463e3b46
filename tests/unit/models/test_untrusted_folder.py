"""Folders of `transformers` that are damaged, or made by somebody with ill intent: refused by the name of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from plait.checkpoint.convert.detect import open_source
from plait.config.model import HFConfig, depth_of
from plait.errors import CheckpointError, ConfigError, ModelError
from plait.models import build_model
from plait.models.common.weights import weight_files

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    "places",
    [
        {"weight_map": {"a": "../secret.safetensors"}},
        {"weight_map": {"a": "/etc/hostname"}},
        {"weight_map": {"a": "x" * 300}},
        {"weight_map": {"a": "x\0"}},
        {"weight_map": {"a": 3}},
        {"weight_map": {"a": ""}},
        {"weight_map": ["a"]},
        {},
        [],
        {"weight_map": {"\ud800": "a"}},
    ],
    ids=repr,
)
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, places: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "secret.safetensors")
    (folder / INDEX).write_text(json.dumps(places))
    with pytest.raises(ModelError, match=INDEX):
        weight_files(folder)
    with pytest.raises(CheckpointError, match=INDEX):
        open_source(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        '{"model_type": 3}',
        '{"model_type": "no-such"}',
        "{}",
        '{"model_type": "llama", "hidden_size": "many"}',
        '{"model_type": "llama", "hidden_size": -4}',
        '{"model_type": "llama", "num_attention_heads": 0}',
        "\xff",
    ],
    ids=lambda text: text[:40],
)
def test_a_damaged_config_is_named(tmp_path: Path, text: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    described = HFConfig(path=str(tmp_path))
    with pytest.raises((ConfigError, ModelError)), torch.device("meta"):
        build_model(described)
    if not text.startswith('{"') and text != "{}":
        with pytest.raises(ModelError, match=r"config\.json"):
            depth_of(described)


def test_weights_that_are_no_safetensors_file_are_named(tmp_path: Path) -> None:
    for content in (b"", b"12345678", (1 << 60).to_bytes(8, "little"), b"\x02" + bytes(7) + b"[]", bytes(4096)):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            weight_files(tmp_path)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_source(tmp_path)
