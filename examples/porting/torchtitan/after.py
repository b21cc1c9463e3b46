"""The run of `before.toml` on Plait, on any number of processes.

python examples/porting/torchtitan/after.py
torchrun --nproc-per-node 2 examples/porting/torchtitan/after.py
torchrun --nproc-per-node 2 examples/porting/torchtitan/after.py strategy.layout.tp=2
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait import Hook, Runner

VOCAB, SEQ, STEPS, TOTAL = 64, 32, 8, 8

MODEL: dict[str, Any] = {  # [model] flavor: a Llama of this size
    "type": "llama",
    "vocab_size": VOCAB,
    "dim": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "seq_len": SEQ,
}
SECTIONS: dict[str, Any] = {
    "optim": {"type": "AdamW", "lr": 2e-3, "weight_decay": 0.1, "no_decay": []},  # [optimizer]
    "schedule": {  # [lr_scheduler]
        "type": "CosineAnnealingLR",
        "warmup": 2,
        "warmup_start_factor": 0.5,
        "min_factor": 0.1,
        "total": STEPS,
    },
    "batch": {"micro": 2, "total": TOTAL},  # [training] local_batch_size, global_batch_size
    "train": {"max_steps": STEPS, "clip_norm": 1.0},  # [training] steps, max_norm
    "strategy": {"zero": 3, "recompute": "full"},  # [parallelism], [activation_checkpoint]
    "checkpoint": {"every": 4},  # [checkpoint] interval
    "work_dir": "runs/titan",
    "log": {"console": "none", "sinks": []},
}


class Rows(Dataset[dict[str, Tensor]]):
    """In the place of c4: each row counts up in steps of its own, and its labels are the next tokens."""

    def __len__(self) -> int:
        return STEPS * TOTAL

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = (torch.arange(SEQ + 1) * (1 + index % 7) + index) % VOCAB
        return {"input_ids": row[:-1], "labels": row[1:]}


class Losses(Hook):
    def after_step(self, runner: Runner, result: Any) -> None:
        if runner.world.is_main:
            print(f"step {runner.step} loss {result.loss:.6f}", flush=True)


def main(overrides: list[str]) -> None:
    sections = {**SECTIONS, "strategy": dict(SECTIONS["strategy"])}
    for override in overrides:  # `strategy.layout.tp=2`
        key, _, value = override.partition("=")
        section: dict[str, Any] = sections
        *path, last = key.split(".")
        for name in path:
            section = section.setdefault(name, {})
        section[last] = int(value) if value.isdigit() else value
    with Runner(MODEL, Rows(), hooks=[Losses()], **sections) as runner:
        runner.train()


if __name__ == "__main__":
    main(sys.argv[1:])
