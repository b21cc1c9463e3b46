"""A small language model, and real DeepSpeed training it.

Each job starts an engine, continues from a checkpoint where it names one, trains, saves where it says so, and trains
on. The answer is what DeepSpeed itself says of losses, weights and optimizer state.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.multi.deepspeed_ranks import real_deepspeed

VOCABULARY, WIDTH, LENGTH, ROWS = 13, 8, 6, 6
LR, DECAY = 1e-2, 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH)
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype).view(1, -1, 1)
        out: Tensor = x + self.gate * self.down(F.gelu(self.up(self.norm(mixed))))
        return out


class Toy(nn.Module):
    """Head and embedding are one tensor, the positions are frozen, and a buffer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = self.embedding(tokens[:, :-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens[:, 1:].flatten())


def toy() -> Toy:
    torch.manual_seed(5)
    return Toy()


def tokens(step: int) -> Tensor:
    """The batch of a step, of all ranks together."""
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(100 + step))


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": DECAY},
        {"params": [param for param in trained if param.ndim <= 1], "weight_decay": 0.0},
    ]


def train_all(rank: int, size: int, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    deepspeed = real_deepspeed()
    return {job["name"]: train(deepspeed, job, rank, size) for job in jobs}


def make_universal(rank: int, size: int, source: str, target: str) -> None:
    real_deepspeed()
    from deepspeed.checkpoint.ds_to_universal import main

    main(
        SimpleNamespace(
            input_folder=source,
            output_folder=target,
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def train(deepspeed: Any, job: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    model = toy()
    # DeepSpeed keeps the shapes of partitioned parameters elsewhere, so the groups are made before it takes them.
    optimizer = torch.optim.AdamW(decay_groups(model), lr=LR)
    config = {
        "train_micro_batch_size_per_gpu": ROWS // size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": job["stage"], "stage3_param_persistence_threshold": 10, **job.get("zero", {})},
        "bf16": {"enabled": job["dtype"] == "bf16"},
        "checkpoint": {"load_universal": job.get("universal", False)},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    said: dict[str, Any] = {}
    begin = 0
    if "load" in job:
        engine.load_checkpoint(job["load"])
        if job["stage"] == 3:
            # All groups were given one and the same `step`.
            for state in engine.optimizer.optimizer.state.values():
                state["step"] = torch.tensor(float(state["step"]))
        begin = engine.global_steps
        said["loaded"] = say(engine)
    losses = [step(engine, index, rank, size) for index in range(begin, begin + job["steps"])]
    if "save" in job:
        engine.save_checkpoint(job["save"])
        said["saved"] = say(engine)
    losses += [step(engine, index, rank, size) for index in range(begin + job["steps"], begin + job["steps"] + 3)]
    said["losses"] = losses
    said["steps"] = engine.global_steps
    engine.destroy()
    return said


def step(engine: Any, index: int, rank: int, size: int) -> float:
    part = tokens(index).chunk(size)[rank]
    loss = engine(part)
    engine.backward(loss)
    engine.step()
    total = loss.detach().float()
    torch.distributed.all_reduce(total)
    return float(total) / size


def say(engine: Any) -> dict[str, Tensor]:
    """Weights and moments as DeepSpeed's own functions give them; at stage 0 they are there to be read."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    said: dict[str, Tensor] = {}
    stage = engine.zero_optimization_stage()
    if stage in (1, 2):
        # 0.19.8 links states after the first group's step, when the other groups have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        if stage > 0:
            said[f"model.{name}"] = safe_get_full_fp32_param(param).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                said[f"optim.{name}.{key}"] = safe_get_full_optimizer_state(param, key).clone()
        elif not engine.bfloat16_enabled():
            said[f"model.{name}"] = param.detach().clone()
            for key in ("exp_avg", "exp_avg_sq"):
                said[f"optim.{name}.{key}"] = engine.optimizer.state[param][key].clone()
    if stage == 0 and engine.bfloat16_enabled():
        said |= say_masters(engine)
    for name, buffer in engine.module.named_buffers():
        said[f"model.{name}"] = buffer.clone()
    return said


def say_masters(engine: Any) -> dict[str, Tensor]:
    said: dict[str, Tensor] = {}
    names = {param: name for name, param in engine.module.named_parameters()}
    wrapper = engine.optimizer
    for params, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
        for param, master in zip(params, masters, strict=True):
            said[f"model.{names[param]}"] = master.detach().clone()
            for key in ("exp_avg", "exp_avg_sq"):
                said[f"optim.{names[param]}.{key}"] = wrapper.optimizer.state[master][key].clone()
    return said
