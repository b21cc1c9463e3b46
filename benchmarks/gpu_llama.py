"""A Llama on one GPU: tokens a second, share of the peak and memory, Plait beside raw torch and others.

    python benchmarks/gpu_llama.py                                  # 1B, 4 × 4096 tokens a step
    python benchmarks/gpu_llama.py --rows raw-model,plait-model
    python benchmarks/gpu_llama.py --size tiny --device cpu         # does every row work?

bf16 compute on fp32 weights, AdamW, no clipping; each row in a process of its own, with a time limit. Rows with
`plain` in the column `model` share one plain Llama; `plait` is the one that Plait brings, the same network
with a loss that never holds all logits. Every row runs some steps that are waited for one by one (`tokens/s`,
their median), then as many without waiting in between (`free-running`): the speed of a loop that never reads a
number off the device. Plait's step reads loss and norm every time, so for Plait there is little between them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import common
from common import Result, median

PEAK = 989e12
"""Dense bf16 FLOP/s of an H100 or H200."""
ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
WARMUP = 4
SHAPES = {"tiny": (2, 64), "1b": (4, 4096), "3b": (2, 4096)}
"""Default rows and tokens of a batch."""


@dataclass(frozen=True)
class Row:
    """One way to train."""

    label: str
    model: str
    """Whose network: `plain` or `plait`."""
    run: Callable[[Job], None]


class Job:
    """Model, batches and clock of one row. Made in the child, which has torch."""

    def __init__(self, given: argparse.Namespace, model: str) -> None:
        import torch
        from nets import LLAMAS, token_walks

        self.torch, self.device = torch, torch.device(given.device)
        self.size = LLAMAS[given.size]
        self.rows, self.seq, self.steps = given.batch, given.seq, given.steps
        self.total = WARMUP + 2 * given.steps
        self.times: list[float] = []
        self.loss = float("nan")
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        self.tokens = token_walks(8 * self.rows, self.seq + 1, self.size.vocab, seed=1)
        on_device = self.tokens.to(self.device).split(self.rows)
        self._batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in on_device]
        with self.device:
            self.model = self._plain() if model == "plain" else self._plaits()

    def _plain(self) -> Any:
        from nets import Llama

        return Llama(self.size)

    def _plaits(self) -> Any:
        from plait.config.model import LlamaConfig
        from plait.models import build_model

        size = self.size
        return build_model(
            LlamaConfig(
                vocab_size=size.vocab,
                dim=size.dim,
                layers=size.layers,
                heads=size.heads,
                kv_heads=size.kv_heads,
                ffn_dim=size.ffn,
                seq_len=self.seq,
                rope_base=size.rope_base,
                tie_embeddings=size.tied,
            )
        )

    def batch(self, step: int) -> tuple[Any, Any]:
        """Inputs and labels of a step, already on the device."""
        return self._batches[step % len(self._batches)]

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def tick(self) -> None:
        """A step begins; the first part of a run waits for the one before."""
        if len(self.times) <= WARMUP + self.steps:
            self.wait()
        self.times.append(time.perf_counter())

    def loop(self, step: Callable[[Any, Any], Any]) -> None:
        """Run a step that was written by hand."""
        loss = None
        for index in range(self.total):
            self.tick()
            loss = step(*self.batch(index))
        self.wait()
        self.loss = float(loss.detach() if hasattr(loss, "detach") else loss)

    def optimizer(self) -> Any:
        """The same optimizer for every loop written by hand."""
        return self.torch.optim.AdamW(self.model.parameters(), fused=True, **ADAM)

    def measured(self) -> Result:
        """What this row did."""
        self.wait()
        end = time.perf_counter()
        if len(self.times) != self.total:
            raise RuntimeError(f"asked for {self.total} steps, saw {len(self.times)}")
        turn = WARMUP + self.steps
        waited = median([after - before for before, after in pairwise(self.times[WARMUP : turn + 1])])
        free = (end - self.times[turn]) / self.steps
        tokens, flops = self.rows * self.seq, self.size.flops_per_token(self.seq)
        cuda = self.device.type == "cuda"
        peak = self.torch.cuda.max_memory_allocated() / 2**30 if cuda else common.memory_mib("VmHWM") / 1024
        return {
            "tokens": tokens,
            "ms": round(1e3 * waited, 2),
            "tokens_per_s": round(tokens / waited),
            "free_tokens_per_s": round(tokens / free),
            "mfu": round(tokens / waited * flops / PEAK, 4) if cuda else None,
            "peak_gib": round(peak, 2),
            "loss": round(self.loss, 4),
            "device": self.torch.cuda.get_device_name() if cuda else "cpu",
        }


# ---- raw torch


def raw(*, scope: str = "", weights: str = "fp32") -> Callable[[Job], None]:
    """Autocast on fp32 weights, or plain bf16 weights; compiled by block, as a whole, or not at all."""

    def run(job: Job) -> None:
        torch, model = job.torch, job.model
        if weights == "bf16":
            model.bfloat16()
        for part in {"": [], "block": list(model.blocks), "model": [model]}[scope]:
            part.compile()
        optimizer = job.optimizer()

        def step(x: Any, y: Any) -> Any:
            with torch.autocast(job.device.type, torch.bfloat16, enabled=weights == "fp32"):
                loss = _mean(model(x, y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        job.loop(step)

    return run


def _mean(loss: Any) -> Any:
    """The mean of a scalar loss is itself; Plait's models return a sum and a count."""
    return loss.sum / loss.count if hasattr(loss, "count") and not hasattr(loss, "backward") else loss


# ---- Plait


def plait(*, scope: str = "", master: bool = True) -> Callable[[Job], None]:
    """Plait's engine; `master: false` keeps the weights themselves in bf16."""

    def run(job: Job) -> None:
        import plait

        engine = plait.prepare(
            job.model,
            optim={"type": "AdamW", **ADAM, "no_decay": []},
            precision={"compute": "bf16", "master": master},
            strategy={"compile": {"scope": scope}} if scope else None,
            device=job.device.type,
        )
        job.loop(lambda x, y: engine.train_step([(x, y)]).loss)

    return run


# ---- others


def accelerate(job: Job) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=job.device.type == "cpu")
    model, optimizer = accelerator.prepare(job.model, job.optimizer())

    def step(x: Any, y: Any) -> Any:
        loss = model(x, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    job.loop(step)


def fabric(job: Job) -> None:
    try:
        from lightning.fabric import Fabric
    except ImportError:
        from lightning_fabric import Fabric

    fabric = Fabric(accelerator=job.device.type, devices=1, precision="bf16-mixed")
    fabric.launch()
    model, optimizer = fabric.setup(job.model, job.optimizer())

    def step(x: Any, y: Any) -> Any:
        loss = model(x, y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    job.loop(step)


def hf_trainer(job: Job) -> None:
    from torch import nn
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = job.model

        def forward(self, ids: Any, labels: Any) -> dict[str, Any]:
            loss = self.net(ids, labels)
            self.last = loss.detach()
            return {"loss": loss}

    class Rows(Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return job.rows * job.total

        def __getitem__(self, index: int) -> dict[str, Any]:
            row = job.tokens[index % len(job.tokens)]
            return {"ids": row[:-1], "labels": row[1:]}

    class Tick(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            job.tick()

    arguments = TrainingArguments(
        output_dir="hf",
        use_cpu=job.device.type == "cpu",
        per_device_train_batch_size=job.rows,
        max_steps=job.total,
        bf16=True,
        optim="adamw_torch_fused",
        learning_rate=ADAM["lr"],
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    net = Net()
    Trainer(model=net, args=arguments, train_dataset=Rows(), callbacks=[Tick()]).train()
    job.loss = float(net.last)


def deepspeed(stage: int) -> Callable[[Job], None]:
    """DeepSpeed, alone, at a ZeRO stage."""

    def run(job: Job) -> None:
        common.join_alone()
        if job.device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.init_distributed(dist_backend="nccl" if job.device.type == "cuda" else "gloo")
        config = {
            "train_micro_batch_size_per_gpu": job.rows,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
        }
        # torch's own fused AdamW: the same for every row, and nothing to build first.
        engine, *_ = deepspeed.initialize(model=job.model, optimizer=job.optimizer(), config=config)

        def step(x: Any, y: Any) -> Any:
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            return loss

        job.loop(step)

    return run


ROWS = {
    "raw-eager": Row("raw autocast, eager", "plain", raw()),
    "raw-block": Row("raw autocast, blocks compiled", "plain", raw(scope="block")),
    "raw-model": Row("raw autocast, whole model compiled", "plain", raw(scope="model")),
    "raw-model-bf16": Row("raw bf16 weights, whole model compiled", "plain", raw(scope="model", weights="bf16")),
    "raw-model-own": Row("raw autocast, whole model compiled", "plait", raw(scope="model")),
    "plait-eager": Row("Plait, eager", "plait", plait()),
    "plait-block": Row("Plait, `compile: {scope: block}`", "plait", plait(scope="block")),
    "plait-model": Row("Plait, `compile: {scope: model}`", "plait", plait(scope="model")),
    "plait-model-bf16": Row(
        "Plait, `compile: {scope: model}`, `master: false`", "plait", plait(scope="model", master=False)
    ),
    "plait-eager-plain": Row("Plait, eager", "plain", plait()),
    "plait-model-plain": Row("Plait, `compile: {scope: model}`", "plain", plait(scope="model")),
    "accelerate": Row("Accelerate", "plain", accelerate),
    "fabric": Row("Lightning Fabric", "plain", fabric),
    "hf": Row("HF Trainer", "plain", hf_trainer),
    "ds1": Row("DeepSpeed stage 1", "plain", deepspeed(1)),
    "ds3": Row("DeepSpeed stage 3", "plain", deepspeed(3)),
}


# ---- measuring


def measure(name: str, given: argparse.Namespace) -> Result:
    """In the child: train, and tell. What was printed meanwhile is told too: a compiler that gave up says so."""
    job = Job(given, ROWS[name].model)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        ROWS[name].run(job)
    print(said.getvalue())
    result = job.measured()
    if name.startswith("plait") and said.getvalue().strip():
        result["said"] = said.getvalue().strip()[:300]
    return result


def as_table(found: dict[str, Result]) -> str:
    """One line a row."""
    lines = []
    for name, one in found.items():
        start = [ROWS[name].label, ROWS[name].model]
        if "error" in one:
            lines.append([*start, *"–" * 5, f"did not run: {one['error']}"])
            continue
        mfu = "–" if one["mfu"] is None else f"{one['mfu']:.3f}"
        speeds = [f"{one['tokens_per_s']:,}", f"{one['free_tokens_per_s']:,}"]
        label = f"{start[0]} ({one['said']})" if "said" in one else start[0]
        lines.append(
            [label, start[1], f"{one['ms']:.1f}", *speeds, mfu, f"{one['peak_gib']:.1f}", f"{one['loss']:.3f}"]
        )
    return common.table(["row", "model", "ms", "tokens/s", "free-running", "MFU", "peak GiB", "last loss"], lines)


def main() -> None:
    options = common.parser(__doc__, list(ROWS))
    options.add_argument("--size", choices=list(SHAPES), default="1b")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--batch", type=int, help="rows of a batch")
    options.add_argument("--seq", type=int, help="tokens of a row")
    options.add_argument("--steps", type=int, default=10, help="steps waited for, and as many again without")
    options.add_argument("--limit", type=float, default=200.0, help="seconds that one row may take")
    given = options.parse_args()
    rows, seq = SHAPES[given.size]
    given.batch, given.seq = given.batch or rows, given.seq or seq
    if given.child is not None:
        common.reply(lambda: measure(given.child, given))
    where = common.machine()
    found: dict[str, Result] = {}
    shape = ["--size", given.size, "--device", given.device, "--batch", given.batch, "--seq", given.seq]
    for name in common.chosen(given.rows, list(ROWS)):
        command = common.itself(__file__, "--child", name, *map(str, [*shape, "--steps", given.steps]))
        said = common.run_child(command, limit=given.limit)
        found[name] = said if "error" in said else said["ranks"][0]
        common.show(row=name, **found[name])
    device = next((one["device"] for one in found.values() if "device" in one), given.device)
    title = (
        f"{device}; {common.say_machine(where)}; Llama {given.size}, {given.batch} × {given.seq} tokens a step, "
        f"{given.steps} steps; MFU of 989 TFLOP/s"
    )
    common.finish(given.json, {"machine": where, "results": found}, f"{title}.\n\n{as_table(found)}")


if __name__ == "__main__":
    main()
