"""A run that the Trainer began with DeepSpeed goes on with PlaitTrainer, from what DeepSpeed cut over its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multi.deepspeed_ranks import real_deepspeed, run_deepspeed
from tests.multi.ranks import RankPool

pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")
transformers = pytest.importorskip("transformers")
STAGE_3 = {
    "zero_optimization": {"stage": 3},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def train(kind: Any, folder: Path, data: list[Any], *, resume: Path | None = None, **options: Any) -> list[list[float]]:
    sections = {"sections": options.pop("sections")} if "sections" in options else {}
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, log_level="error", seed=3, logging_steps=1,
        max_steps=4, save_steps=2, per_device_train_batch_size=2, learning_rate=2e-2, warmup_steps=1,
        weight_decay=0.1, optim="adamw_torch", **options,
    )  # fmt: skip
    torch.manual_seed(8)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    trainer = kind(transformers.LlamaForCausalLM(config), args, train_dataset=data, **sections)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return [[entry[key] for key in ("loss", "grad_norm")] for entry in trainer.state.log_history if "loss" in entry]


def begin(rank: int, size: int, folder: Path, data: list[Any]) -> list[list[float]]:
    real_deepspeed()
    return train(transformers.Trainer, folder, data, deepspeed=STAGE_3)


def take_over(rank: int, size: int, folder: Path, data: list[Any]) -> list[list[float]]:
    from accelerate.state import AcceleratorState, GradientState

    from plait.frontends.transformers import PlaitTrainer

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    how: dict[str, Any] = {"resume": folder / "theirs" / "checkpoint-2", "sections": {"strategy": "zero3"}}
    return train(PlaitTrainer, folder / "ours", data, **how)


def test_losses_go_on_as_deepspeed_would(two_ranks: RankPool, tmp_path: Path) -> None:
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(50, (24, 12))]
    theirs = run_deepspeed(begin, 2, tmp_path / "theirs", data)
    assert not (tmp_path / "theirs" / "checkpoint-2" / "model.safetensors").exists(), "cut, also the weights"
    for ours in two_ranks.run(take_over, tmp_path, data):
        assert ours == [pytest.approx(row, rel=1e-4) for row in theirs]
