"""A DeepSpeed training script as people write it, for whichever `deepspeed` it is given.

`train` is given Plait's front end, or the real one by `train_really`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.multi.deepspeed_ranks import real_deepspeed

CLASSES = 4


class ConvNet(nn.Module):
    """Pictures of three channels to classes; the norm is a choice."""

    def __init__(self, norm: str = "group") -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8) if norm == "group" else nn.BatchNorm2d(8)
        self.block = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.block(F.relu(self.norm(self.stem(x)))))
        return self.head(y.mean(dim=(2, 3)))


def conv_net(norm: str = "group") -> ConvNet:
    torch.manual_seed(7)
    return ConvNet(norm)


def pictures(index: int, count: int) -> tuple[Tensor, Tensor]:
    """The micro-batch number `index`, of all ranks together."""
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randn(count, 3, 8, 8, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """As scripts write it: no weight decay for what has one dimension."""
    trained = list(model.parameters())
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "lr": 5e-3},
    ]


def begin(deepspeed: Any, job: dict[str, Any]) -> Any:
    """An engine for a job."""
    model = conv_net(job.get("norm", "group"))
    given: dict[str, Any] = {"model": model, "config": job["config"]}
    if job.get("own") == "objects":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        given["optimizer"] = optimizer
        given["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    elif job.get("own") == "functions":
        given["model_parameters"] = groups(model)
        given["optimizer"] = lambda params: torch.optim.AdamW(params, lr=1e-2)
        given["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
    elif job.get("own") == "groups":
        given["model_parameters"] = groups(model)
    else:
        given["model_parameters"] = model.parameters()
    return deepspeed.initialize(**given)[0]


def micro_step(engine: Any, index: int, rank: int, size: int, *, scale: float = 1.0) -> Tensor:
    x, y = pictures(index, engine.train_micro_batch_size_per_gpu() * size)
    x, y = x.chunk(size)[rank], y.chunk(size)[rank]
    if engine.bfloat16_enabled():
        x = x.bfloat16()
    if engine.fp16_enabled():
        x = x.half()
    loss = F.cross_entropy(engine(x).float(), y) * scale
    engine.backward(loss)
    engine.step()
    return loss.detach()


def train(deepspeed: Any, job: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Run a job to its end; what its engine said after every step."""
    engine = begin(deepspeed, job)
    if "load" in job:
        job["client"] = engine.load_checkpoint(job["load"])[1]
    first = engine.global_steps
    said = go_on(engine, job, rank, size, first, job["steps"] - first)
    if "save" in job:
        engine.save_checkpoint(job["save"], client_state={"epoch": 2, "seen": torch.arange(3)})
        said["after"] = go_on(engine, job, rank, size, job["steps"], 2)["losses"]
    return said


def go_on(engine: Any, job: dict[str, Any], rank: int, size: int, first: int, steps: int) -> dict[str, Any]:
    said: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "scales": [], "counters": []}
    accumulation = engine.gradient_accumulation_steps()
    for step in range(first, first + steps):
        total = torch.zeros(())
        for micro in range(accumulation):
            scale = job.get("explode", {}).get(str(step), 1.0)
            total += micro_step(engine, step * accumulation + micro, rank, size, scale=scale)
        torch.distributed.all_reduce(total)
        said["losses"].append(float(total) / size / accumulation)
        norm = engine.get_global_grad_norm()
        said["norms"].append(None if norm is None else float(norm))
        said["rates"].append([float(rate) for rate in engine.get_lr()])
        said["scales"].append(float(engine.optimizer.loss_scale) if engine.fp16_enabled() else None)
        said["counters"].append([engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps])
    return said


def train_really(rank: int, size: int, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """What each job says of itself with the real library."""
    deepspeed = real_deepspeed()
    accelerator = deepspeed.accelerator.get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # torch's CPU computes in fp16; DeepSpeed was told so before it did
    dtypes = accelerator.supported_dtypes()
    accelerator.supported_dtypes = lambda: [*dtypes, torch.float16]
    return {job["name"]: train(deepspeed, job, rank, size) for job in jobs}
