"""What is trained in `gpu.py`, and the clock: the same network, batches and optimizer for every way of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import common
from common import Result, median

BEGIN = time.perf_counter()
PEAK = 989e12
"""Dense bf16 FLOP/s of an H100 or H200."""
ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
IMAGE = (3, 32, 32)
BATCHES = 8
"""So many batches go round and round."""


@dataclass(frozen=True)
class Case:
    """A network and its batches."""

    net: str
    """A size of Llama, or the depth of a ResNet."""
    rows: int
    seq: int
    """Tokens of a row; 0 for images."""
    recompute: bool = False

    @property
    def unit(self) -> str:
        """What is counted."""
        return "tokens" if self.seq else "images"

    @property
    def amount(self) -> int:
        """How many of them a step has."""
        return self.rows * (self.seq or 1)

    def __str__(self) -> str:
        shape = f"{self.rows} × {self.seq} tokens" if self.seq else f"{self.rows} images of {IMAGE[1]} × {IMAGE[2]}"
        name = f"Llama {self.net}" if self.seq else f"ResNet-{self.net}"
        return f"{name}, {shape} a step{', recompute' if self.recompute else ''}"


CASES = {
    "1b": Case("1b", 4, 4096),
    "8b": Case("8b", 2, 4096, recompute=True),
    "32k": Case("1b", 1, 32 * 1024, recompute=True),
    "128k": Case("1b", 1, 128 * 1024, recompute=True),
    "resnet50": Case("50", 128, 0),
}
TINY = {
    "1b": Case("tiny", 2, 32),
    "8b": Case("tiny", 1, 32, recompute=True),
    "32k": Case("tiny", 1, 64, recompute=True),
    "128k": Case("tiny", 1, 128, recompute=True),
    "resnet50": Case("18", 2, 0),
}


@dataclass(frozen=True)
class Settings:
    """How a row is run."""

    case: Case
    steps: int
    """So many are waited for one by one, and as many again are not."""
    device: str
    backend: str
    """Of `torch.compile`."""
    recompute: str
    """Which way Plait recomputes, where something is recomputed."""
    warmup: int


class Job:
    """Model, batches and clock of one row. Made in the child, which has torch."""

    def __init__(self, given: Settings, whose: str) -> None:
        import torch

        self.torch, self.given, self.case = torch, given, given.case
        self.device = torch.device(given.device)
        self.total = given.warmup + 2 * given.steps
        self.times: list[float] = []
        self.loss = float("nan")
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        self.inputs, self.targets = self._text() if self.case.seq else self._images()
        x, y = (part.to(self.device).split(self.case.rows) for part in (self.inputs, self.targets))
        self._batches = list(zip(x, y, strict=True))
        with self.device:
            self.model = self._llama(whose) if self.case.seq else self._resnet()

    def _text(self) -> tuple[Any, Any]:
        from nets import LLAMAS, token_walks

        tokens = token_walks(BATCHES * self.case.rows, self.case.seq + 1, LLAMAS[self.case.net].vocab, seed=1)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _images(self) -> tuple[Any, Any]:
        torch, count = self.torch, BATCHES * self.case.rows
        images = torch.randn(count, *IMAGE).to(memory_format=torch.channels_last)
        return images, torch.randint(10, (count,))

    def _llama(self, whose: str) -> Any:
        from nets import LLAMAS, Llama

        size = LLAMAS[self.case.net]
        if whose == "plain":
            return Llama(size, recompute=self.case.recompute)
        from plait.config.model import LlamaConfig
        from plait.models import build_model

        return build_model(
            LlamaConfig(
                vocab_size=size.vocab,
                dim=size.dim,
                layers=size.layers,
                heads=size.heads,
                kv_heads=size.kv_heads,
                ffn_dim=size.ffn,
                seq_len=self.case.seq,
                rope_base=size.rope_base,
                tie_embeddings=size.tied,
            )
        )

    def _resnet(self) -> Any:
        from plait.config.model import ResNetConfig
        from plait.models import build_model

        made = build_model(ResNetConfig(depth=int(self.case.net), classes=1000))  # type: ignore[arg-type]
        return made.to(memory_format=self.torch.channels_last)

    def batch(self, step: int) -> tuple[Any, Any]:
        """Inputs and targets of a step, already on the device."""
        return self._batches[step % len(self._batches)]

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def tick(self) -> None:
        """A step begins; the first part of a run waits for the one before."""
        if len(self.times) <= self.given.warmup + self.given.steps:
            self.wait()
        self.times.append(time.perf_counter())

    def loop(self, step: Callable[[Any, Any], Any]) -> None:
        """Run a step that returns its loss, or something whose `loss` it is."""
        found = None
        for index in range(self.total):
            self.tick()
            found = step(*self.batch(index))
        self.wait()
        self.loss = float(getattr(found, "loss", found))

    def optimizer(self) -> Any:
        """The same optimizer for every loop written by hand."""
        return self.torch.optim.AdamW(self.model.parameters(), fused=True, **ADAM)

    def measured(self) -> Result:
        """What this row did."""
        self.wait()
        end = time.perf_counter()
        if len(self.times) != self.total:
            raise RuntimeError(f"asked for {self.total} steps, saw {len(self.times)}")
        turn = self.given.warmup + self.given.steps
        waited = median([after - before for before, after in pairwise(self.times[self.given.warmup : turn + 1])])
        free = (end - self.times[turn]) / self.given.steps
        cuda, amount = self.device.type == "cuda", self.case.amount
        peak = self.torch.cuda.max_memory_allocated() / 2**30 if cuda else common.memory_mib("VmHWM") / 1024
        return {
            "unit": self.case.unit,
            "amount": amount,
            "ms": round(1e3 * free, 2),
            "per_s": round(amount / free),
            "waited_per_s": round(amount / waited),
            "mfu": round(amount / free * self._flops() / PEAK, 4) if cuda and self.case.seq else None,
            "peak_gib": round(peak, 2),
            "ready_s": round(self.times[1] - BEGIN, 1),
            "loss": round(self.loss, 4),
            "device": self.torch.cuda.get_device_name() if cuda else "cpu",
        }

    def _flops(self) -> float:
        """Of one token: those of the model, not what recomputing adds."""
        from nets import LLAMAS

        return LLAMAS[self.case.net].flops_per_token(self.case.seq)
