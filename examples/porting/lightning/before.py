"""A training script for Lightning; `after.py` is the same one ported. Needs `pip install lightning`.

python examples/porting/lightning/before.py
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, ACCUMULATION, LR, STEPS = 2, 8, 2, 1e-2, 16


def points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    return TensorDataset(x, (x[:, :4] * x[:, 4:8]).argmax(-1))


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.log("val_accuracy", (logits.argmax(-1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Losses(lightning.Callback):
    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())  # divided by the accumulation already
        if len(self.losses) == ACCUMULATION:
            print(f"step {trainer.global_step} loss {float(torch.stack(self.losses).sum()):.6f}")
            self.losses.clear()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        found = trainer.callback_metrics
        print(f"val_loss {float(found['val_loss']):.6f} val_accuracy {float(found['val_accuracy']):.6f}")


def main() -> None:
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="auto",
        devices=1,
        strategy="auto",
        accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=1.0,
        callbacks=[Losses()],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(points(128, 1), BATCH), DataLoader(points(64, 2), BATCH))


if __name__ == "__main__":
    main()
