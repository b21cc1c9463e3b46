"""What users write; mypy and pyright find nothing in it. Read by type checkers, never run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import plait
from plait import Engine, Hook, Layout, LossTerm, Metric, Runner, StepResult, Strategy, prepare


class Model(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> LossTerm:
        return LossTerm((x - y).square().sum(), x.numel())


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


class Watch(Hook):
    def after_step(self, runner: Runner, result: StepResult) -> None:
        print(runner.step, result.loss)


class Count(Metric):
    def measure(self, outputs: Any, inputs: Any) -> Sequence[Any]:
        return [1] * len(inputs)

    def summarize(self, records: Sequence[Any]) -> Mapping[str, float]:
        return {"count": float(len(records))}


def loss(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.mean()


tensors = TensorDataset(torch.zeros(8, 4))

# A section as an object, as a mapping, and as its short word.
with Runner(
    Model(),
    Numbers(),
    strategy=Strategy(zero=3, layout=Layout(tp=2), recompute=plait.Recompute(mode="full")),
    optim=plait.AdamWOptim(lr=1e-3, betas=(0.9, 0.95), no_decay=("bias",)),
    schedule=plait.CosineAnnealingLRSchedule(warmup=10),
    precision=plait.Precision(compute="bf16"),
    batch=plait.Batch(total=64, micro=8),
    train=plait.Train(max_steps=100, clip_norm=1.0, guard=plait.Guard(spike=None)),
    checkpoint=plait.Checkpoint(every=50, best=plait.Best(metric="loss", mode="min")),
    log=plait.Log(every=1, sinks=("jsonl", "html")),
    plan=plait.Plan(gate="warn"),
    hooks=[Watch(), plait.EmaHook(decay=0.99), {"type": "early_stop"}],
    metrics=[Count(), plait.Accuracy(top=5)],
    work_dir=Path("runs") / "typed",
    device="cpu",
) as runner:
    runner.setup()
    engine: Engine = runner.engine
    world: plait.World = runner.world
    runner.train()
    measured: dict[str, float] = runner.validate()

Runner(Model, DataLoader(tensors), strategy={"zero": 2}, optim={"lr": 0.1}, precision="bf16", plan="off")
Runner(model=plait.GptModel(layers=2), data=plait.TextData(path="corpus.txt", seq_len=64), strategy="zero3", seed=1)
Runner(model={"type": "gpt"}, data=[1, 2, 3], val_data=tensors, loss_fn=loss, collate_fn=torch.stack, hooks=[])
Runner.from_config("run.yaml", ["optim.lr=3e-4"], metrics=[Count()], hooks=[Watch()])
Runner.from_config({"model": {"type": "gpt"}})

# Parts of one's own.
Runner(
    Model(),
    Numbers(),
    strategy=Strategy(
        engine=plait.part("my_package.engines:Engine", bucket_mb=50),
        recompute=plait.Recompute(mode=plait.part("every-second")),
        pipeline=plait.PipelineParallel(schedule=plait.part("my_package:schedule")),
        tensor=plait.TensorParallel(plan=plait.part("my_package:plan")),
    ),
    optim=plait.part(torch.optim.NAdam, lr=1e-3),
    precision=plait.Precision(recipe=plait.part("my_package:recipe")),
    train=plait.Train(loss=plait.part(loss)),
    checkpoint=plait.Checkpoint(storage=plait.part("fsspec", url="memory://run")),
    log=plait.Log(sinks=("jsonl", plait.part("mlflow"))),
    hooks=[plait.part(Watch)],
    metrics=[plait.part(Count)],
)
plait.TextData(path="corpus.txt", seq_len=64, collate=plait.part(torch.stack))

made: Engine = prepare(
    Model,
    optim=plait.SGDOptim(lr=0.1, momentum=0.9),
    strategy="zero1",
    precision={"compute": "fp16"},
    schedule=plait.OneCycleSchedule(cycle_min_lr=1e-4, cycle_max_lr=1e-2),
    clip_norm=1.0,
    accumulation=2,
    loss_fn=loss,
    device="cuda",
)
prepare(plait.GptModel(layers=2))
prepare({"type": "gpt"})
prepare("my_package.models:Net")
result: StepResult = made.train_step([(torch.zeros(1), torch.zeros(1))])
number: float = result.loss

try:
    Strategy(zero=0)
except plait.errors.ConfigError as error:
    problems: Sequence[plait.errors.Problem] = error.problems
