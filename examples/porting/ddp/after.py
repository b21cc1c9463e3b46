"""`before.py` on Plait: the same losses, now under any strategy.

torchrun --nproc-per-node 2 examples/porting/ddp/after.py
torchrun --nproc-per-node 2 examples/porting/ddp/after.py --strategy zero3
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import plait

EPOCHS, BATCH, ACCUMULATION, LR = 2, 8, 2, 1e-2


def points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    return TensorDataset(x, (x[:, :4] * x[:, 4:8]).argmax(-1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--resume", default="")
    parser.add_argument("--save", default="")
    args = parser.parse_args()
    total = EPOCHS * 128 // (BATCH * ACCUMULATION * int(os.environ.get("WORLD_SIZE", "1")))

    torch.manual_seed(0)
    engine = plait.prepare(
        nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)),
        optim={"type": "AdamW", "lr": LR, "weight_decay": 0.0},
        schedule={"type": "CosineAnnealingLR", "total": total},
        strategy=args.strategy,
        clip_norm=1.0,
        accumulation=ACCUMULATION,
        total_steps=total,
        loss_fn=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1]),
    )

    ranks, rank = engine.world.layout.data_parallel, engine.world.data_rank
    data = points(128, seed=1)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, ranks, rank, seed=3)
    loader = DataLoader(data, BATCH, sampler=sampler)
    held_out = points(64, seed=2)
    val = DataLoader(held_out, BATCH, sampler=DistributedSampler(held_out, ranks, rank, shuffle=False))

    begun = engine.load(args.resume)["epoch"] if args.resume else 0
    for epoch in range(begun, EPOCHS):
        sampler.set_epoch(epoch)
        micro_batches = []
        for batch in loader:
            micro_batches.append(batch)
            if len(micro_batches) == ACCUMULATION:
                result = engine.train_step(micro_batches)
                micro_batches = []
                if engine.world.is_main:
                    print(f"step {engine.steps} loss {result.loss:.6f}")
        found = engine.evaluate(val)["loss"]
        if engine.world.is_main:
            print(f"epoch {epoch} val_loss {found:.6f}", flush=True)
        if args.save:
            engine.save(f"{args.save}/epoch-{epoch}", extra={"epoch": epoch + 1})
    engine.world.close()


if __name__ == "__main__":
    main()
