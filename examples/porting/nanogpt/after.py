"""`before.py` on Plait: the same losses, under any strategy.

torchrun --nproc-per-node 2 examples/porting/nanogpt/after.py
torchrun --nproc-per-node 2 examples/porting/nanogpt/after.py --strategy zero2
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait

# ---- settings
eval_interval, eval_iters = 4, 3
batch_size, block_size, gradient_accumulation_steps = 4, 32, 4
n_layer, n_head, n_embd, vocab_size = 2, 2, 32, 64
learning_rate, min_lr, weight_decay, beta1, beta2, grad_clip = 3e-3, 3e-4, 1e-1, 0.9, 0.95, 1.0
max_iters, warmup_iters, lr_decay_iters = 8, 2, 8


# ---- model
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.up, self.down = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (each.view(b, t, n_head, -1).transpose(1, 2) for each in self.qkv(self.norm_1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList([Block() for _ in range(n_layer)])
        self.norm = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


# ---- data: a file of 16-bit tokens, and random windows of it
def write_tokens(path: Path, count: int, seed: int) -> None:
    steps = np.random.default_rng(seed).integers(1, 4, count)
    (np.cumsum(steps) % vocab_size).astype(np.uint16).tofile(path)


def get_batch(path: Path, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    data = np.memmap(path, dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block_size - 1, (batch_size,), generator=generator).tolist()
    rows = torch.stack([torch.from_numpy(data[i : i + block_size + 1].astype(np.int64)) for i in starts])
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--resume", default="")
    parser.add_argument("--strategy", default="ddp")
    args = parser.parse_args()
    out = Path(args.out)

    torch.manual_seed(1337)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    accumulation = gradient_accumulation_steps // ranks
    engine = plait.prepare(
        GPT(),
        optim={
            "type": "AdamW",
            "lr": learning_rate,
            "betas": (beta1, beta2),
            "weight_decay": weight_decay,
            "no_decay": ["bias", "norm"],  # all that is not a matrix
        },
        schedule={
            "type": "CosineAnnealingLR",
            "warmup": warmup_iters,
            "warmup_start_factor": 1 / (warmup_iters + 1),
            "total": lr_decay_iters,
            "min_factor": min_lr / learning_rate,
        },
        strategy=args.strategy,
        clip_norm=grad_clip,
        accumulation=accumulation,
        loss_fn=lambda outputs, batch: outputs[1],
    )
    rank = engine.world.rank
    if engine.world.is_main:
        out.mkdir(exist_ok=True)
        write_tokens(out / "train.bin", 4000, seed=1)
        write_tokens(out / "val.bin", 1000, seed=2)
    engine.world.barrier()
    best_val_loss = engine.load(args.resume)["best_val_loss"] if args.resume else 1e9

    def estimate_loss() -> dict[str, float]:
        found = {}
        for split in ("train", "val"):
            generator = torch.Generator().manual_seed(99)
            batches = [get_batch(out / f"{split}.bin", generator) for _ in range(eval_iters)]
            found[split] = engine.evaluate(batches)["loss"]
        return found

    while True:
        if engine.steps % eval_interval == 0:
            losses = estimate_loss()
            if engine.world.is_main:
                print(f"eval {engine.steps} train_loss {losses['train']:.6f} val_loss {losses['val']:.6f}", flush=True)
            if losses["val"] < best_val_loss and engine.steps > 0:
                best_val_loss = losses["val"]
                engine.save(out / f"step-{engine.steps:08d}", extra={"best_val_loss": best_val_loss})
        if engine.steps >= max_iters:
            break

        first = engine.steps * accumulation
        generators = [torch.Generator().manual_seed((first + i) * ranks + rank) for i in range(accumulation)]
        result = engine.train_step([get_batch(out / "train.bin", generator) for generator in generators])
        if engine.world.is_main:
            print(f"step {engine.steps} loss {result.loss:.6f}", flush=True)
    engine.world.close()


if __name__ == "__main__":
    main()
