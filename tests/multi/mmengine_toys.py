"""The example of MMEngine's documentation on large models, small: a convolutional net on CIFAR-shaped data."""

# ruff: noqa: C408  # as the documentation writes them

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from plait.frontends.mmengine import BaseMetric, BaseModel, FlexibleRunner, Hook


class Net(BaseModel):
    """In place of torchvision's ResNet-50."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=4)
        self.norm = nn.GroupNorm(2, 8)
        self.body = nn.Conv2d(8, 16, 3, stride=4)
        self.head = nn.Linear(16, 10)

    def forward(self, imgs: Tensor, labels: Tensor, mode: str) -> Any:
        x = F.relu(self.norm(self.stem(imgs)))
        x = self.head(F.relu(self.body(x)).mean(dim=(2, 3)))
        return {"loss": F.cross_entropy(x, labels)} if mode == "loss" else (x, labels)


class Accuracy(BaseMetric):
    def process(self, data_batch: Any, data_samples: Sequence[Any]) -> None:
        score, gt = data_samples
        self.results.append({"batch_size": len(gt), "correct": (score.argmax(dim=1) == gt).sum().cpu()})

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        total = sum(item["correct"] for item in results)
        return {"accuracy": 100 * float(total) / sum(item["batch_size"] for item in results)}


class Losses(Hook):
    """Remembers what every iteration said; the mean over ranks."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.rates.append(runner.optim_wrapper.get_lr()["lr"][0])

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        found = runner.world.gather(float(outputs["loss"].detach()))
        self.losses.append(sum(found) / len(found))


def images(count: int, seed: int) -> TensorDataset:
    """Labels that can be learnt: the colour that is strongest."""
    generator = torch.Generator().manual_seed(seed)
    colours = torch.rand(count, 3, 1, 1, generator=generator)
    pictures = colours + 0.1 * torch.randn(count, 3, 32, 32, generator=generator)
    return TensorDataset(pictures, colours.flatten(1).argmax(dim=1))


def loader(data: Any, batch_size: int, *, shuffle: bool) -> dict[str, Any]:
    return {
        "batch_size": batch_size,
        "dataset": data,
        "sampler": {"type": "DefaultSampler", "shuffle": shuffle},
        "collate_fn": {"type": "default_collate"},
    }


ADAM: dict[str, Any] = {"type": "AdamW", "lr": 1e-2}
# Word for word from the documentation, but for the number of parameters that make a unit.
OF_THE_DOCS: dict[str, dict[str, Any]] = {
    "docs: DeepSpeed": {
        "strategy": dict(
            type="DeepSpeedStrategy",
            fp16=dict(
                enabled=True,
                fp16_master_weights_and_grads=False,
                loss_scale=0,
                loss_scale_window=500,
                hysteresis=2,
                min_loss_scale=1,
                initial_scale_power=15,
            ),
            inputs_to_half=[0],
            zero_optimization=dict(
                stage=3,
                allgather_partitions=True,
                reduce_scatter=True,
                allgather_bucket_size=50000000,
                reduce_bucket_size=50000000,
                overlap_comm=True,
                contiguous_gradients=True,
                cpu_offload=False,
            ),
        ),
        "optim_wrapper": dict(type="DeepSpeedOptimWrapper", optimizer=ADAM),
    },
    "docs: FSDP": {
        "strategy": dict(
            type="FSDPStrategy",
            model_wrapper=dict(auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=1e3)),
        ),
        "optim_wrapper": dict(type="AmpOptimWrapper", optimizer=ADAM),
    },
    "docs: ColossalAI": {
        "strategy": dict(type="ColossalAIStrategy"),
        "optim_wrapper": dict(optimizer=dict(type="HybridAdam", lr=1e-2)),
    },
}
PLAIN: dict[str, Any] = dict(optimizer=ADAM)


def zero(stage: int) -> dict[str, Any]:
    strategy = dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage), gradient_clipping=0.0)
    return {"strategy": strategy, "optim_wrapper": dict(type="DeepSpeedOptimWrapper", optimizer=ADAM)}


IN_FP32: dict[str, dict[str, Any]] = {
    "DDP": {"strategy": dict(type="DDPStrategy"), "optim_wrapper": PLAIN},
    "ZeRO-1": zero(1),
    "ZeRO-2": zero(2),
    "ZeRO-3": zero(3),
    "FSDP": {
        "strategy": dict(
            type="FSDPStrategy",
            model_wrapper=dict(auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=1e3)),
        ),
        "optim_wrapper": PLAIN,
    },
    "Gemini": {
        "strategy": dict(type="ColossalAIStrategy", plugin=dict(type="GeminiPlugin", precision="fp32")),
        "optim_wrapper": dict(optimizer=dict(type="HybridAdam", lr=1e-2, weight_decay=0.01)),
    },
}
MICRO_BATCHES_SPLIT: dict[str, dict[str, Any]] = {
    "bf16": {"optim_wrapper": dict(type="AmpOptimWrapper", dtype="bfloat16", optimizer=ADAM)},
    "fp16": {"optim_wrapper": dict(type="AmpOptimWrapper", dtype="float16", optimizer=ADAM)},
    **OF_THE_DOCS,
}


def run(
    work_dir: Path,
    options: Mapping[str, Any],
    *,
    batch_size: int,
    samples: int = 64,
    epochs: int = 2,
    hooks: Sequence[Any] = (),
    **more: Any,
) -> tuple[Any, Losses]:
    """Train the net; the seed of its weights is fixed."""
    torch.manual_seed(7)
    noted = Losses()
    settings: dict[str, Any] = {
        "model": Net(),
        "work_dir": str(work_dir),
        "train_dataloader": loader(images(samples, 1), batch_size, shuffle=True),
        "param_scheduler": dict(type="LinearLR"),
        "train_cfg": dict(by_epoch=True, max_epochs=epochs, val_interval=1),
        "val_dataloader": loader(images(20, 2), batch_size, shuffle=False),
        "val_cfg": dict(),
        "val_evaluator": dict(type=Accuracy),
        "default_hooks": dict(logger=dict(type="LoggerHook", interval=2)),
        "randomness": dict(seed=5),
        "custom_hooks": [noted, *hooks],
    }
    settings.update(options)
    settings.update(more)
    runner = FlexibleRunner(**settings)
    runner.train()
    return runner, noted
