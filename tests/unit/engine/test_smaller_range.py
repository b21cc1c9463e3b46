"""Weights that were trained in bf16 meet fp16: the run says so before its loss scale does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.multi.toys import Classifier, Points

from plait import Runner
from plait.config import parse_sections
from plait.config.model import HFConfig
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from plait.models import build_model
from plait.models.hf import PRESETS

WORDS = "the weights were trained in bf16, and precision is fp16"


def said_by(given: Any = None, **sections: Any) -> list[str]:
    said: list[str] = []
    config = parse_sections(device="cpu", **sections).config
    prepare_native(Preparation(config, open_world(config), model=given, log=said.append))
    return [text for text in said if text.startswith(WORDS)]


def test_a_model_given_in_bf16() -> None:
    assert said_by(Classifier().bfloat16(), precision="fp16")
    assert not said_by(Classifier().bfloat16(), precision="bf16")
    assert not said_by(Classifier(), precision="fp16")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_folder_of_transformers_that_says_bf16(tmp_path: Path, key: str) -> None:
    model: Any = build_model(HFConfig(config=PRESETS["tiny-llama"]["config"]))
    model.bfloat16().save_pretrained(tmp_path)
    stored = tmp_path / "config.json"
    stored.write_text(stored.read_text().replace('"dtype"', f'"{key}"'))
    described = {"type": "hf", "path": str(tmp_path)}
    assert len(said_by(precision="fp16", model=described)) == 1
    assert not said_by(precision="bf16", model=described)
    assert not said_by(precision="fp16", model={**described, "pretrained": False})


def test_a_checkpoint_of_a_bf16_run(tmp_path: Path) -> None:
    def run(precision: str, steps: int) -> str:
        settings: dict[str, Any] = {
            "work_dir": tmp_path,
            "batch": {"total": 4},
            "train": {"max_steps": steps},
            "checkpoint": {"resume": "auto"},
            "precision": precision,
            "device": "cpu",
            "log": {"console": "none"},
        }
        with Runner(model=Classifier(), data=Points(8), **settings) as runner:
            runner.train()
        return (tmp_path / "events-rank0.jsonl").read_text()

    assert WORDS not in run("bf16", 2)
    assert WORDS not in run("bf16", 4)
    assert run("fp16", 6).count(WORDS) == 1
