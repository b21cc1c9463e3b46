"""The ways to train that `gpu.py` compares, each written as its own documentation would have it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
from gpu_job import ADAM, Job


@dataclass(frozen=True)
class Row:
    """One way to train."""

    label: str
    whose: str
    """Whose Llama: `plain`, the hand-written one that all peers share, or `plait`, the one that Plait brings."""
    run: Callable[[Job], None]


def mean_of(found: Any) -> Any:
    """The mean loss in whatever a model returned: Plait's own return a sum and a count, perhaps in a mapping."""
    found = found["loss"] if isinstance(found, dict) else found
    return found.sum / found.count if isinstance(found, tuple) else found


# ---- raw torch


def raw(*, scope: str = "", weights: str = "fp32", mode: str | None = None) -> Callable[[Job], None]:
    """Autocast on fp32 weights, or plain bf16 weights; compiled by block, as a whole, or not at all."""

    def run(job: Job) -> None:
        torch, model = job.torch, job.model
        if weights == "bf16":
            model.bfloat16()
        _compile(job, scope, mode)
        optimizer = job.optimizer()

        def step(x: Any, y: Any) -> Any:
            with torch.autocast(job.device.type, torch.bfloat16, enabled=weights == "fp32"):
                loss = mean_of(model(x.bfloat16() if weights == "bf16" and x.is_floating_point() else x, y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # A recording's output is written anew by the next step.
            return loss.detach() if mode is None else loss.detach().clone()

        job.loop(step)

    return run


def _compile(job: Job, scope: str, mode: str | None = None) -> None:
    for part in {"": [], "block": getattr(job.model, "blocks", ()), "model": [job.model]}[scope]:
        part.compile(backend=job.given.backend, mode=mode)


def fsdp2(*, scope: str = "") -> Callable[[Job], None]:
    """`fully_shard` over one rank: bf16 parameters, gradients reduced in fp32, fp32 weights."""

    def run(job: Job) -> None:
        import torch.distributed as dist
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        common.join_alone()
        dist.init_process_group("nccl" if job.device.type == "cuda" else "gloo")
        torch, model = job.torch, job.model
        mesh = dist.init_device_mesh(job.device.type, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        _compile(job, scope)
        # Where memory is short, parameters are gathered again in the backward pass.
        settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": job.case.recompute}
        for block in getattr(model, "blocks", ()):
            fully_shard(block, **settings)
        fully_shard(model, **settings)
        optimizer = job.optimizer()

        def step(x: Any, y: Any) -> Any:
            loss = mean_of(model(x, y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        job.loop(step)
        dist.destroy_process_group()

    return run


# ---- Plait


def plait(
    *, scope: str = "", precision: Any = "bf16", optimizer: str = "AdamW", graphs: bool = False
) -> Callable[[Job], None]:
    """Plait's engine."""

    def run(job: Job) -> None:
        import plait

        wanted = dict(precision) if isinstance(precision, dict) else precision
        if "fp8" in wanted and job.device.type == "cpu":
            asked = wanted["fp8"]
            wanted["fp8"] = {**(asked if isinstance(asked, dict) else {"recipe": asked}), "emulate": True}
        strategy: dict[str, Any] = {"graphs": True} if graphs else {}
        if scope:
            strategy["compile"] = {"scope": scope, "backend": job.given.backend}
        if job.case.recompute and not getattr(job.model, "recompute", False):
            strategy["recompute"] = job.given.recompute
        engine = plait.prepare(
            job.model,
            optim={"type": optimizer, **ADAM, "no_decay": []},
            precision=wanted,
            strategy=strategy or None,
            example=job.batch(0),
            device=job.device.type,
        )
        job.loop(lambda x, y: engine.train_step([(x, y)]))

    return run


# ---- others


def _loop(job: Job, model: Any, optimizer: Any, backward: Callable[[Any], Any]) -> None:
    """The loop of a library whose objects replace torch's."""

    def step(x: Any, y: Any) -> Any:
        loss = mean_of(model(x, y))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    job.loop(step)


def accelerate(*, scope: str = "") -> Callable[[Job], None]:
    """Hugging Face Accelerate."""

    def run(job: Job) -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16", cpu=job.device.type == "cpu")
        _compile(job, scope)
        _loop(job, *accelerator.prepare(job.model, job.optimizer()), accelerator.backward)

    return run


def fabric(*, scope: str = "") -> Callable[[Job], None]:
    """Lightning Fabric."""

    def run(job: Job) -> None:
        try:
            from lightning.fabric import Fabric
        except ImportError:
            from lightning_fabric import Fabric

        fabric = Fabric(accelerator=job.device.type, devices=1, precision="bf16-mixed")
        fabric.launch()
        _compile(job, scope)
        _loop(job, *fabric.setup(job.model, job.optimizer()), fabric.backward)

    return run


def hf_trainer(job: Job) -> None:
    """The Trainer of transformers, with its own data loader: pinned memory, and a copy for each batch."""
    from torch import nn
    from torch.utils.data import TensorDataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = job.model

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            loss = mean_of(self.net(x, labels))
            self.last = loss.detach()
            return {"loss": loss}

    class Tick(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            job.tick()

    def collate(rows: list[Any]) -> dict[str, Any]:
        x, y = zip(*rows, strict=True)
        return {"x": job.torch.stack(x), "labels": job.torch.stack(y)}

    arguments = TrainingArguments(
        output_dir="hf",
        use_cpu=job.device.type == "cpu",
        per_device_train_batch_size=job.case.rows,
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
    net, data = Net(), TensorDataset(job.inputs, job.targets)
    Trainer(model=net, args=arguments, train_dataset=data, data_collator=collate, callbacks=[Tick()]).train()
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
            "train_micro_batch_size_per_gpu": job.case.rows,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
        }
        # torch's own fused AdamW: the same for every row, and nothing to build first.
        engine, *_ = deepspeed.initialize(model=job.model, optimizer=job.optimizer(), config=config)

        def step(x: Any, y: Any) -> Any:
            loss = mean_of(engine(x, y))
            engine.backward(loss)
            engine.step()
            return loss.detach()

        job.loop(step)

    return run


BF16 = {"compute": "bf16", "master": False}
FP8 = {"compute": "bf16", "fp8": "tensorwise"}
EARLIER = {"compute": "bf16", "fp8": {"scales": "earlier", "history": 4}}
"""As many steps find scales at once as are run before the clock starts."""
FASTEST = {"compute": "bf16", "fp8": {"scales": "earlier", "history": 4, "head": True}}
ROWS = {
    "raw-eager": Row("raw autocast, eager", "plain", raw()),
    "raw-block": Row("raw autocast, blocks compiled", "plain", raw(scope="block")),
    "raw-model": Row("raw autocast, whole model compiled", "plain", raw(scope="model")),
    "raw-model-graphs": Row(
        "raw autocast, whole model compiled, CUDA graphs", "plain", raw(scope="model", mode="reduce-overhead")
    ),
    "raw-model-bf16": Row("raw bf16 weights, whole model compiled", "plain", raw(scope="model", weights="bf16")),
    "raw-model-own": Row("raw autocast, whole model compiled", "plait", raw(scope="model")),
    "fsdp2": Row("raw FSDP2", "plain", fsdp2()),
    "fsdp2-block": Row("raw FSDP2, blocks compiled", "plain", fsdp2(scope="block")),
    "accelerate": Row("Accelerate", "plain", accelerate()),
    "accelerate-model": Row("Accelerate, whole model compiled", "plain", accelerate(scope="model")),
    "fabric": Row("Lightning Fabric", "plain", fabric()),
    "fabric-model": Row("Lightning Fabric, whole model compiled", "plain", fabric(scope="model")),
    "hf": Row("HF Trainer", "plain", hf_trainer),
    "ds1": Row("DeepSpeed stage 1", "plain", deepspeed(1)),
    "ds3": Row("DeepSpeed stage 3", "plain", deepspeed(3)),
    "plait": Row("Plait", "plait", plait()),
    "plait-plain": Row("Plait", "plain", plait()),
    "plait-block": Row("Plait, `compile: {scope: block}`", "plait", plait(scope="block")),
    "plait-compile": Row("Plait, `compile: true`", "plait", plait(scope="auto")),
    "plait-graphs": Row("Plait, `graphs: true`", "plait", plait(graphs=True)),
    "plait-graphs-compile": Row("Plait, `graphs: true`, `compile: true`", "plait", plait(scope="auto", graphs=True)),
    "plait-compile-plain": Row("Plait, `compile: true`", "plain", plait(scope="auto")),
    "plait-bf16": Row("Plait, `master: false`", "plait", plait(precision=BF16)),
    "plait-8bit": Row("Plait, AdamW8bit", "plait", plait(optimizer="AdamW8bit")),
    "plait-fp8": Row("Plait, `fp8`", "plait", plait(precision=FP8)),
    "plait-fp8-earlier": Row("Plait, `fp8: {scales: earlier}`", "plait", plait(precision=EARLIER)),
    "plait-fp8-head": Row("Plait, `fp8: {scales: earlier, head: true}`", "plait", plait(precision=FASTEST)),
    "plait-fp8-compile": Row("Plait, `compile: true`, `fp8`", "plait", plait(scope="auto", precision=FP8)),
    "plait-fp8-rowwise": Row(
        "Plait, `compile: true`, `fp8: rowwise`", "plait", plait(scope="auto", precision={**FP8, "fp8": "rowwise"})
    ),
}
LONG = ("raw-model", "fsdp2-block", "plait", "plait-fp8")
USUAL = {
    "1b": (
        *("raw-eager", "fsdp2", "fsdp2-block", "raw-model", "accelerate", "fabric", "hf"),
        *("plait", "plait-compile", "plait-bf16", "plait-fp8", "plait-fp8-earlier", "plait-fp8-head"),
    ),
    "8b": ("fsdp2", "fsdp2-block", "raw-model-bf16", "plait", "plait-compile", "plait-8bit", "plait-bf16", "plait-fp8"),
    "32k": LONG,
    "128k": LONG,
    "resnet50": (
        *("raw-eager", "raw-model", "raw-model-graphs", "plait", "plait-compile"),
        *("plait-graphs", "plait-graphs-compile"),
    ),
}
"""The rows of each size, where none are named."""
