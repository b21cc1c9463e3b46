"""A DeepSpeed training script, unchanged but for its import.

    plait launch --nproc_per_node 2 examples/deepspeed_script.py --deepspeed --deepspeed_config ds_config.json
    torchrun --nproc-per-node 2 examples/deepspeed_script.py --deepspeed_config=ds_config.json --steps=50
    python examples/deepspeed_script.py --deepspeed            # one process, with the configuration below

With `import deepspeed` in place of the line marked below, the same script runs on DeepSpeed itself. The pictures are
made up: each class has a pattern of its own, hidden in noise.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait.frontends.deepspeed as deepspeed  # the line that was `import deepspeed`

CONFIG: dict[str, Any] = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "steps_per_print": 10,
}


class ConvNet(nn.Module):
    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


class Pictures(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Of the shape of CIFAR's."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        label = torch.randint(10, (), generator=generator)
        return self.patterns[label] + torch.randn(3, 32, 32, generator=generator), label


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help="some launchers pass it")
    parser.add_argument("-s", "--steps", type=int, default=40)
    parser.add_argument("--samples", type=int, default=512, help="how many pictures")
    parser.add_argument("--save", help="folder for checkpoints")
    parser.add_argument("--load", help="folder to go on from")
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    deepspeed.init_distributed()
    net = ConvNet()
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=net.parameters(),
        training_data=Pictures(args.samples),
        config=None if args.deepspeed_config else CONFIG,
    )
    if args.load:
        _, client_state = engine.load_checkpoint(args.load)
        if client_state is None:
            raise SystemExit(f"no checkpoint in {args.load}")
        print(f"goes on from step {client_state['step']}")
    criterion = nn.CrossEntropyLoss()
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.half if engine.fp16_enabled() else torch.float
    batches = iter(deepspeed.utils.RepeatingLoader(loader))
    while engine.global_steps < args.steps:
        images, labels = next(batches)
        images, labels = images.to(engine.device, dtype), labels.to(engine.device)
        loss = criterion(engine(images).float(), labels)
        engine.backward(loss)
        engine.step()
        if engine.global_steps % 10 == 0 and engine.was_step_applied() and engine.global_rank == 0:
            print(f"step {engine.global_steps:3d}  loss {loss.item():.4f}", flush=True)
    if args.save:
        engine.save_checkpoint(args.save, client_state={"step": engine.global_steps})
        if engine.global_rank == 0:
            print(f"saved {sorted(path.name for path in Path(args.save).iterdir())}")


if __name__ == "__main__":
    main()
