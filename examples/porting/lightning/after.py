"""`before.py` on Plait: the same losses, under any strategy.

python examples/porting/lightning/after.py
torchrun --nproc-per-node 2 examples/porting/lightning/after.py --strategy zero2
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from plait import Accuracy, Hook, Runner

EPOCHS, BATCH, ACCUMULATION, LR, STEPS = 2, 8, 2, 1e-2, 16


def points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    return TensorDataset(x, (x[:, :4] * x[:, 4:8]).argmax(-1))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def loss(outputs: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs, batch[1])


class Losses(Hook):
    def after_step(self, runner: Runner, result: Any) -> None:
        if runner.world.is_main:
            print(f"step {runner.step} loss {result.loss:.6f}")

    def after_validate(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        if runner.world.is_main:
            print(f"val_loss {metrics['loss']:.6f} val_accuracy {metrics['accuracy/top1']:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--work-dir", default="runs/lightning")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # the same global batch on any number of processes

    torch.manual_seed(0)
    with Runner(
        Classifier(),
        DataLoader(points(128, 1), BATCH // ranks),
        val_data=DataLoader(points(64, 2), BATCH // ranks),
        loss_fn=loss,
        metrics=[Accuracy()],
        hooks=[Losses()],
        optim={"type": "AdamW", "lr": LR, "weight_decay": 0.0},
        schedule={"type": "CosineAnnealingLR", "total": STEPS},
        batch={"accumulation": ACCUMULATION},
        train={"max_epochs": EPOCHS, "clip_norm": 1.0},
        strategy=args.strategy,
        checkpoint={"last": False},
        log={"console": "none", "sinks": []},
        work_dir=args.work_dir,
    ) as runner:
        runner.train()


if __name__ == "__main__":
    main()
