"""Image classification with a model of your own, under any strategy.

    python examples/cifar_resnet.py                                        # one process
    torchrun --nproc-per-node 2 examples/cifar_resnet.py --strategy zero3  # two, everything sharded
    python examples/cifar_resnet.py --data path/to/cifar-10                # the real pictures

Without `--data` the pictures are made up: each class has a pattern of its own, hidden in noise. The loss of a step
is the same for any number of processes and any strategy, because Plait divides by the targets of the whole step.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait import Accuracy, LossTerm, Runner


class Residual(nn.Module):
    """Two convolutions and a way around them.

    GroupNorm rather than BatchNorm: its statistics are those of one picture, so they do not depend on how a
    batch is cut over processes.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, width)
        same = stride == 1 and channels == width
        self.around = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


class SmallResNet(nn.Module):
    """A plain module: Plait asks nothing of it but a loss."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(
            Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, image: Tensor, label: Tensor) -> dict[str, Any]:
        logits = self.head(self.blocks(self.stem(image)).mean(dim=(2, 3)))
        # A sum and its count, not a mean: then it does not matter how the batch was cut.
        loss = LossTerm(F.cross_entropy(logits.float(), label, reduction="sum"), label.numel())
        return {"loss": loss, "logits": logits}


class Patterns(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Pictures of the shape of CIFAR's: a pattern for each class, and noise."""

    def __init__(self, length: int, *, seed: int) -> None:
        self.length = length
        self.seed = seed
        self.patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * self.length + index)
        label = torch.randint(10, (), generator=generator)
        image = 0.5 * self.patterns[label] + torch.randn(3, 32, 32, generator=generator)
        return {"image": image, "label": label}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with CIFAR-10, binary or Python form; absent: made-up pictures")
    parser.add_argument("--strategy", default="ddp", help="single, ddp, zero1, zero2, zero3, fsdp or hsdp")
    parser.add_argument("--precision", default="fp32", help="fp32, tf32, bf16 or fp16")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="samples in one step, over all processes")
    parser.add_argument("--width", type=int, default=16, help="channels of the first block, a multiple of 8")
    parser.add_argument("--samples", type=int, default=512, help="how many made-up pictures")
    parser.add_argument("--work-dir", default="runs/cifar")
    args = parser.parse_args()

    data: Any = Patterns(args.samples, seed=1)
    val_data: Any = Patterns(max(args.samples // 4, 1), seed=2)
    if args.data is not None:
        data = {"type": "cifar10", "path": args.data}
        val_data = {"type": "cifar10", "path": args.data, "split": "test"}

    with Runner(
        # A function that makes the model, so that under ZeRO-3 no process ever holds all of it.
        model=lambda: SmallResNet(args.width),
        data=data,
        val_data=val_data,
        metrics=[Accuracy()],
        optim={"type": "AdamW", "lr": 2e-3},
        schedule={"type": "CosineAnnealingLR", "warmup": 5},
        strategy=args.strategy,
        precision=args.precision,
        batch={"total": args.batch},
        train={"max_epochs": args.epochs},
        checkpoint={"best": {"metric": "accuracy/top1", "mode": "max"}},
        work_dir=args.work_dir,
    ) as runner:
        runner.train()


if __name__ == "__main__":
    main()
