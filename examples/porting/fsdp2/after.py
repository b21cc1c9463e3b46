"""`before.py` on Plait: the same losses, and a checkpoint that any strategy loads.

torchrun --nproc-per-node 2 examples/porting/fsdp2/after.py
torchrun --nproc-per-node 2 examples/porting/fsdp2/after.py --strategy zero1
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import plait

STEPS, BATCH, ACCUMULATION, LR = 6, 4, 2, 3e-3
VOCAB, DIM, LAYERS, SEQ = 64, 32, 3, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.GRU(DIM, DIM, batch_first=True)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))[0]
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows = (torch.arange(SEQ + 1) * torch.randint(1, 9, (BATCH, 1), generator=generator)) % VOCAB
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--resume", default="")
    parser.add_argument("--save", default="")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    engine = plait.prepare(
        Model(),
        optim={"type": "AdamW", "lr": LR, "weight_decay": 0.0},
        strategy=args.strategy,
        precision="bf16" if args.bf16 else "fp32",
        clip_norm=1.0,
        accumulation=ACCUMULATION,
        loss_fn=lambda outputs, batch: nn.functional.cross_entropy(outputs.float().flatten(0, 1), batch[1].flatten()),
    )
    if args.resume:
        engine.load(args.resume)

    while engine.steps < STEPS:
        first = engine.steps * ACCUMULATION
        result = engine.train_step([batch_of(first + micro, engine.world.data_rank) for micro in range(ACCUMULATION)])
        if engine.world.is_main:
            print(f"step {engine.steps} loss {result.loss:.6f}", flush=True)

    if args.save:
        engine.save(args.save)
    engine.world.close()


if __name__ == "__main__":
    main()
