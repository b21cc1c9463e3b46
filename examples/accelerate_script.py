"""An Accelerate training script, unchanged but for its imports.

    plait launch --nproc_per_node 2 examples/accelerate_script.py
    plait launch --nproc_per_node 2 examples/accelerate_script.py --config_file accelerate.yaml --save states
    torchrun --nproc-per-node 2 examples/accelerate_script.py --load states
    python examples/accelerate_script.py                        # one process

With `accelerate` in place of `plait.frontends.accelerate` in the two lines marked below, and without `--config_file`,
the same script runs on Accelerate itself. The task is made up: which of ten patterns is hidden in the noise.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from plait.frontends.accelerate import Accelerator  # was `from accelerate import Accelerator`
from plait.frontends.accelerate.utils import set_seed  # was `from accelerate.utils import set_seed`


def patterns(count: int, seed: int) -> TensorDataset:
    shapes = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return TensorDataset(shapes[labels] + torch.randn(count, 64, generator=generator), labels)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--mixed_precision", choices=("no", "bf16", "fp16"))
    parser.add_argument("--config_file", help="what `accelerate config` wrote")
    parser.add_argument("--save", help="folder for the state after each epoch")
    parser.add_argument("--load", help="folder to go on from")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    own = {} if args.config_file is None else {"config_file": args.config_file}
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=args.mixed_precision, **own)
    set_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train = DataLoader(patterns(args.samples, seed=1), batch_size=16, shuffle=True)
    test = DataLoader(patterns(201, seed=2), batch_size=16)  # no multiple of anything: the last round is filled up
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.epochs * len(train))
    model, optimizer, train, test, schedule = accelerator.prepare(model, optimizer, train, test, schedule)
    if args.load is not None:
        accelerator.load_state(args.load)
    loss = torch.tensor(float("nan"))
    for epoch in range(train.iteration, args.epochs):
        model.train()
        for x, label in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), label)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right = seen = 0
        for x, label in test:
            with torch.no_grad():
                answer = model(x).argmax(dim=-1)
            answer, label = accelerator.gather_for_metrics((answer, label))
            right, seen = right + int((answer == label).sum()), seen + len(label)
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}, {right} of {seen} right")
        if args.save is not None:
            accelerator.save_state(args.save)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
