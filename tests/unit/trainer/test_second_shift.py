"""Labels that are shifted already, and models that shift them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused

from plait.errors import ConfigError
from plait.trainer import Runner

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def run(folder: Path, model: Any) -> Runner:
    path = folder / "text.txt"
    path.write_text("hello world " * 200, encoding="utf-8")
    data = {"type": "text", "path": str(path), "seq_len": 16, "vocab_size": 300, "cache": str(folder / "cache")}
    return Runner(
        model=model,
        data={**data, "document_mask": False},
        optim={"type": "SGD", "lr": 0.1},
        train={"max_steps": 1},
        batch={"total": 2},
        work_dir=str(folder / "run"),
        plan={"gate": "off"},
    )


@pytest.mark.parametrize("made", [True, False], ids=["function", "object"])
def test_a_transformers_object_is_not_given_shifted_labels(tmp_path: Path, made: bool) -> None:
    def make() -> Any:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))

    with (
        run(tmp_path, make if made else make()) as runner,
        refused(ConfigError, "LlamaForCausalLM", "`data`", key="model"),
    ):
        runner.train()


def test_a_described_one_takes_them(tmp_path: Path) -> None:
    with run(tmp_path, {"type": "hf", "config": {"model_type": "llama", **SIZES}}) as runner:
        runner.train()
        assert runner.step == 1
