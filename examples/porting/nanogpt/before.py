"""A training script in the shape of nanoGPT's `train.py`; `after.py` is the same one ported.

torchrun --nproc-per-node 2 examples/porting/nanogpt/before.py
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

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


# ---- learning rate: up in a line, down in half a cosine
def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min((it - warmup_iters) / (lr_decay_iters - warmup_iters), 1.0)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    out = Path(args.out)

    # ---- one process or many
    ddp = int(os.environ.get("RANK", -1)) != -1
    if ddp:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if ddp else (0, 1)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    assert gradient_accumulation_steps % ranks == 0
    accumulation = gradient_accumulation_steps // ranks
    if rank == 0:
        out.mkdir(exist_ok=True)
        write_tokens(out / "train.bin", 4000, seed=1)
        write_tokens(out / "val.bin", 1000, seed=2)
    if ddp:
        dist.barrier()

    torch.manual_seed(1337)
    model = GPT().to(device)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))
    iter_num, best_val_loss = 0, 1e9
    if args.resume:
        saved = torch.load(out / "ckpt.pt", map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        iter_num, best_val_loss = saved["iter_num"], saved["best_val_loss"]
    wrapped = DistributedDataParallel(model) if ddp else model

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        found = {}
        model.eval()
        for split in ("train", "val"):
            generator = torch.Generator().manual_seed(99)
            losses = torch.zeros(eval_iters)
            for k in range(eval_iters):
                x, y = (part.to(device) for part in get_batch(out / f"{split}.bin", generator))
                losses[k] = model(x, y)[1].item()
            found[split] = float(losses.mean())
        model.train()
        return found

    while True:
        lr = get_lr(iter_num)
        for group in optimizer.param_groups:
            group["lr"] = lr

        if iter_num % eval_interval == 0 and rank == 0:
            losses = estimate_loss()
            print(f"eval {iter_num} train_loss {losses['train']:.6f} val_loss {losses['val']:.6f}", flush=True)
            if losses["val"] < best_val_loss and iter_num > 0:
                best_val_loss = losses["val"]
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "iter_num": iter_num, "best_val_loss": best_val_loss}, out / "ckpt.pt")
        if iter_num >= max_iters:
            break

        total = torch.zeros((), device=device)
        for micro_step in range(accumulation):
            generator = torch.Generator().manual_seed((iter_num * accumulation + micro_step) * ranks + rank)
            x, y = (part.to(device) for part in get_batch(out / "train.bin", generator))
            if ddp:
                wrapped.require_backward_grad_sync = micro_step == accumulation - 1
            loss = wrapped(x, y)[1] / accumulation
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1
        if ddp:
            dist.all_reduce(total)
        if rank == 0:
            print(f"step {iter_num} loss {float(total) / ranks:.6f}", flush=True)
    if ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
