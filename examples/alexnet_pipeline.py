"""AlexNet as a pipeline of two stages: batches of 256 in micro-batches of 8.

    python examples/alexnet_pipeline.py --pp 1                         # one process
    torchrun --nproc-per-node 2 examples/alexnet_pipeline.py           # two, half of the layers each
    torchrun --nproc-per-node 2 examples/alexnet_pipeline.py --schedule interleaved_1f1b

The model is a plain `nn.Sequential`; nothing in it knows of stages. The pictures are made up: each class has a
pattern of its own, hidden in noise. Without dropout (`--dropout 0`) every step's loss is that of one process, up to
rounding; with it, each stage draws its own mask, and losses agree as two seeds do. At the end the log says how much
of the time the ranks waited for each other, beside what the schedule promises.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait import LossTerm, Runner


def alexnet(classes: int = 10, *, width: int = 64, dropout: float = 0.5) -> nn.Sequential:
    """AlexNet, for 3 × 224 × 224; `width` is the number of channels of its first convolution, 64 in the original."""
    channels = [width, 3 * width, 6 * width, 4 * width, 4 * width]
    features = nn.Sequential(
        nn.Conv2d(3, channels[0], 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(channels[0], channels[1], 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(channels[1], channels[2], 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels[2], channels[3], 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels[3], channels[4], 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
    )
    hidden = 64 * width
    classifier = nn.Sequential(
        nn.Dropout(dropout),
        nn.Linear(36 * channels[4], hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )
    return nn.Sequential(OrderedDict(features=features, classifier=classifier))


class Pictures(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A pattern for each class, enlarged to `size` × `size`, and noise."""

    def __init__(self, length: int, *, size: int = 224, classes: int = 10) -> None:
        self.length, self.size, self.classes = length, size, classes
        self.patterns = torch.randn(classes, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        label = torch.randint(self.classes, (), generator=generator)
        pattern = F.interpolate(self.patterns[label][None], size=self.size)[0]
        return pattern + torch.randn(3, self.size, self.size, generator=generator), label


def cross_entropy(logits: Tensor, batch: tuple[Tensor, Tensor]) -> LossTerm:
    """A sum and its count, not a mean: then it does not matter how the batch was cut."""
    return LossTerm(F.cross_entropy(logits.float(), batch[1], reduction="sum"), len(batch[1]))


def make_runner(args: argparse.Namespace, **sections: Any) -> Runner:
    """The run that the options describe."""
    # By parameters, the first stage would get all convolutions: nearly all of the work, and 4 % of the parameters.
    strategy = {"layout": {"pp": args.pp}, "pipeline": {"schedule": args.schedule, "split": args.split}}
    return Runner(
        model=lambda: alexnet(width=args.width, dropout=args.dropout),
        data=Pictures(args.batch * args.steps, size=args.size),
        loss_fn=cross_entropy,
        optim={"type": "Adam", "lr": args.lr, "betas": [0.9, 0.999], "eps": 1e-8},
        strategy=strategy if args.pp > 1 else "ddp",
        batch={"total": args.batch, "micro": args.micro},
        train={"max_steps": args.steps},
        log={"every": args.log_every},
        work_dir=args.work_dir,
        **sections,
    )


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages; 1: no pipeline")
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved_1f1b, zbv and so on")
    parser.add_argument("--split", default="time", help="how stages are balanced: time or parameters")
    parser.add_argument("--batch", type=int, default=256, help="samples in one step")
    parser.add_argument("--micro", type=int, default=8, help="samples in one micro-batch")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--size", type=int, default=224, help="height and width of a picture")
    parser.add_argument("--width", type=int, default=64, help="channels of the first convolution")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--work-dir", default="runs/alexnet")
    return parser


def main() -> None:
    with make_runner(options().parse_args()) as runner:
        runner.train()


if __name__ == "__main__":
    main()
