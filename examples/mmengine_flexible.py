"""A script of MMEngine, with one import changed: its example of training large models with FlexibleRunner.

    python examples/mmengine_flexible.py                                              # one process
    torchrun --nproc-per-node 2 examples/mmengine_flexible.py --use-deepspeed         # ZeRO-3 in fp16
    torchrun --nproc-per-node 2 examples/mmengine_flexible.py --use-fsdp              # FSDP with mixed precision
    torchrun --nproc-per-node 2 examples/mmengine_flexible.py --use-colossalai        # Gemini with HybridAdam

The original takes ResNet-50 and CIFAR-10 from torchvision; here the net is Plait's own, and the pictures are made up:
each class has a colour, hidden in noise. Every strategy runs on CPU as well.
"""

# ruff: noqa: C408  # as MMEngine writes them
from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import TensorDataset

from plait.frontends.mmengine import BaseMetric, BaseModel, FlexibleRunner
from plait.models import build_model, preset


class MMResNet50(BaseModel):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.resnet = build_model(preset("resnet", f"resnet{depth}", classes=10))

    def forward(self, imgs: Tensor, labels: Tensor, mode: str) -> Any:
        x = self.resnet(imgs)
        if mode == "loss":
            return {"loss": F.cross_entropy(x, labels)}
        return x, labels


class Accuracy(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        score, gt = data_samples
        self.results.append({"batch_size": len(gt), "correct": (score.argmax(dim=1) == gt).sum().cpu()})

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        total_correct = sum(item["correct"] for item in results)
        total_size = sum(item["batch_size"] for item in results)
        return dict(accuracy=100 * float(total_correct) / total_size)


def pictures(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    colours = torch.rand(10, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    return TensorDataset(colours[labels] + 0.2 * torch.randn(count, 3, 32, 32, generator=generator), labels)


def strategy_of(args: argparse.Namespace) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """A strategy and an optim wrapper, as MMEngine's documentation has them."""
    if args.use_deepspeed:
        strategy = dict(
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
        )
        return strategy, dict(type="DeepSpeedOptimWrapper", optimizer=dict(type="AdamW", lr=1e-3))
    if args.use_fsdp:
        policy = partial(size_based_auto_wrap_policy, min_num_params=int(1e7))
        strategy = dict(type="FSDPStrategy", model_wrapper=dict(auto_wrap_policy=policy))
        return strategy, dict(type="AmpOptimWrapper", optimizer=dict(type="AdamW", lr=1e-3))
    if args.use_colossalai:
        return dict(type="ColossalAIStrategy"), dict(optimizer=dict(type="HybridAdam", lr=1e-3))
    return None, dict(optimizer=dict(type="AdamW", lr=1e-3))


def main() -> None:
    parser = argparse.ArgumentParser(description="Distributed training")
    parser.add_argument("--use-deepspeed", action="store_true")
    parser.add_argument("--use-fsdp", action="store_true")
    parser.add_argument("--use-colossalai", action="store_true")
    parser.add_argument("--depth", type=int, default=50)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    train_dataloader = dict(
        batch_size=args.batch,
        dataset=pictures(args.samples, 1),
        sampler=dict(type="DefaultSampler", shuffle=True),
        collate_fn=dict(type="default_collate"),
    )
    val_dataloader = dict(
        batch_size=args.batch,
        dataset=pictures(args.samples // 4, 2),
        sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn=dict(type="default_collate"),
    )
    strategy, optim_wrapper = strategy_of(args)
    runner = FlexibleRunner(
        model=MMResNet50(args.depth),
        work_dir="./work_dirs",
        strategy=strategy,
        train_dataloader=train_dataloader,
        optim_wrapper=optim_wrapper,
        param_scheduler=dict(type="LinearLR"),
        train_cfg=dict(by_epoch=True, max_epochs=args.epochs, val_interval=1),
        val_dataloader=val_dataloader,
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
    )
    runner.train()


if __name__ == "__main__":
    main()
