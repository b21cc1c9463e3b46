"""Your own loop around Plait's engine: two ways to write a step.

    python examples/own_loop.py                                        # one process
    torchrun --nproc-per-node 2 examples/own_loop.py --strategy zero2  # two, gradients and optimizer sharded

Both ways print the same losses. With your own loop the data are yours: every process must bring its own part of
each batch, and all of them equally many micro-batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import plait
from plait import Engine, LossTerm

Batch = tuple[Tensor, Tensor]


class Regression(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> LossTerm:
        error = (self.head(self.layers(x)).squeeze(-1) - y).square()
        return LossTerm(error.sum(), error.numel())


def batches(steps: int, total: int) -> Iterator[Batch]:
    """The same global batches on every process."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(16, generator=generator)
    for _ in range(steps):
        x = torch.randn(total, 16, generator=generator)
        yield x, torch.sin(x @ truth)


def mine(batch: Batch, engine: Engine, parts: int) -> list[Batch]:
    """This process's share of a global batch, as `parts` micro-batches."""
    x, y = (tensor.chunk(engine.world.size)[engine.world.rank] for tensor in batch)
    return list(zip(x.chunk(parts), y.chunk(parts), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="ddp", help="single, ddp, zero1, zero2, zero3, fsdp or hsdp")
    parser.add_argument("--by-hand", action="store_true", help="engine(), backward() and step() instead of train_step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="samples in one step, over all processes")
    args = parser.parse_args()
    accumulation = 2

    torch.manual_seed(0)
    engine = plait.prepare(
        Regression(),
        optim={"type": "AdamW", "lr": 1e-2},
        schedule={"type": "CosineAnnealingLR", "warmup": 5},
        strategy=args.strategy,
        clip_norm=1.0,
        accumulation=accumulation,
        total_steps=args.steps,
    )
    for batch in batches(args.steps, args.batch):
        micro_batches = mine(batch, engine, accumulation)
        if args.by_hand:
            result = None
            for micro_batch in micro_batches:
                loss = engine(micro_batch)
                engine.backward(loss)
                result = engine.step()  # None until the accumulation is complete
        else:
            result = engine.train_step(micro_batches)
        if result is not None and engine.world.is_main and engine.steps % 5 == 0:
            print(f"step {engine.steps:3d}  loss {result.loss:.5f}  grad_norm {result.grad_norm:.5f}", flush=True)
    engine.world.close()


if __name__ == "__main__":
    main()
