"""A training script for DistributedDataParallel, as many are written; `after.py` is the same one ported.

torchrun --nproc-per-node 2 examples/porting/ddp/before.py
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, ACCUMULATION, LR = 2, 8, 2, 1e-2


def points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    return TensorDataset(x, (x[:, :4] * x[:, 4:8]).argmax(-1))


def evaluate(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    model.eval()
    device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with torch.no_grad():
        for x, y in ((x.to(device), y.to(device)) for x, y in loader):
            sums += torch.tensor([float(nn.functional.cross_entropy(model(x), y)) * len(y), len(y)], device=device)
    dist.all_reduce(sums)
    model.train()
    return float(sums[0] / sums[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="")
    parser.add_argument("--save", default="")
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)

    data = points(128, seed=1)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, seed=3)
    loader = DataLoader(data, BATCH, sampler=sampler)
    held_out = points(64, seed=2)
    val = DataLoader(held_out, BATCH, sampler=DistributedSampler(held_out, shuffle=False))
    total = EPOCHS * len(loader) // ACCUMULATION
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)

    step = begun = 0
    if args.resume:
        saved = torch.load(args.resume, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        step, begun = saved["step"], saved["epoch"]

    for epoch in range(begun, EPOCHS):
        sampler.set_epoch(epoch)
        losses = []
        for index, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            last = (index + 1) % ACCUMULATION == 0
            with nullcontext() if last else wrapped.no_sync():
                loss = nn.functional.cross_entropy(wrapped(x), y)
                (loss / ACCUMULATION).backward()
            losses.append(loss.detach())
            if not last:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            mean = torch.stack(losses).mean() / dist.get_world_size()
            losses.clear()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {float(mean):.6f}")
        found = evaluate(model, val)
        if rank == 0:
            print(f"epoch {epoch} val_loss {found:.6f}", flush=True)
            if args.save:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "schedule": schedule.state_dict(), "step": step, "epoch": epoch + 1}, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
