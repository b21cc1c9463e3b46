"""A training script for FSDP2 (`fully_shard`) and torch.distributed.checkpoint; `after.py` is the same one ported.

torchrun --nproc-per-node 2 examples/porting/fsdp2/before.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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
    parser.add_argument("--resume", default="")
    parser.add_argument("--save", default="")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    model = Model().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy if args.bf16 else MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh, mp_policy=policy if args.bf16 else MixedPrecisionPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)

    step = 0
    if args.resume:
        states, counts = get_state_dict(model, optimizer), {"step": 0}
        saved = {"model": states[0], "optimizer": states[1], "counts": counts}
        dcp.load(saved, checkpoint_id=args.resume)
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        step = saved["counts"]["step"]

    while step < STEPS:
        mean = torch.zeros((), device=device)
        for micro in range(ACCUMULATION):
            model.set_requires_gradient_sync(micro == ACCUMULATION - 1)
            x, y = (part.to(device) for part in batch_of(step * ACCUMULATION + micro, dist.get_rank()))
            loss = nn.functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten()) / ACCUMULATION
            loss.backward()
            mean += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step} loss {float(mean) / dist.get_world_size():.6f}", flush=True)

    if args.save:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states, "counts": {"step": step}}, checkpoint_id=args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
