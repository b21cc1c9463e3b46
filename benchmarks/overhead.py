"""What a framework costs a step: microseconds over a raw loop, on a model so small that nothing else is left.

    python benchmarks/overhead.py                 # every framework that is installed
    python benchmarks/overhead.py --imports       # what importing them costs
    python benchmarks/overhead.py --before FOLDER # Plait's rows with the Plait of another checkout too

One process, one thread, a batch that is ready-made, fused SGD for everybody. Each framework runs in a child
process of its own, between two raw loops in that same process, and what it costs is the difference to their
mean. Rounds go over all frameworks before the next one starts; the tables show medians over rounds. The clock
sits in the model's forward, so loops that a framework owns and loops written by hand are measured alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
import imports
from common import Result, Stopwatch, median

LR = 1e-3
SGD = {"lr": LR, "fused": True}


@dataclass(frozen=True)
class Peer:
    """A way to run the loop, and the package it comes from."""

    label: str
    package: str
    run: Callable[[Bench, int], None]
    """Trains the bench's model for so many steps."""


class Bench:
    """The model, the batch and the optimizer that everybody gets. Made in the child, which has torch."""

    def __init__(self) -> None:
        import torch
        from torch import Tensor, nn
        from torch.nn import functional as F

        torch.set_num_threads(1)
        torch.manual_seed(0)
        watch = self.watch = Stopwatch()
        self.torch = torch
        self.batch = (torch.randn(8, 64), torch.randn(8, 64))

        class Mlp(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                watch.tick()
                return F.mse_loss(self.down(torch.relu(self.up(x))), y)

        self.model = Mlp()

    def optimizer(self) -> Any:
        """The same optimizer for every loop."""
        return self.torch.optim.SGD(self.model.parameters(), **SGD)

    def loader(self, steps: int, names: tuple[str, str] | None = None) -> Any:
        """A DataLoader whose every item is the ready-made batch, for frameworks that own the loop."""
        return self.torch.utils.data.DataLoader(self.dataset(steps, names), batch_size=None)

    def dataset(self, steps: int, names: tuple[str, str] | None = None) -> Any:
        """The data set of that DataLoader; with `names`, items are mappings."""
        item = self.batch if names is None else dict(zip(names, self.batch, strict=True))

        class Ready(self.torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
            def __len__(self) -> int:
                return steps

            def __getitem__(self, index: int) -> Any:
                return item

        return Ready()


# ---- the loops


def raw(bench: Bench, steps: int) -> None:
    model, optimizer, (x, y) = bench.model, bench.optimizer(), bench.batch
    for _ in range(steps):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def raw_with_loader(bench: Bench, steps: int) -> None:
    model, optimizer = bench.model, bench.optimizer()
    for x, y in bench.loader(steps):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def plait_train_step(bench: Bench, steps: int) -> None:
    import plait

    engine = plait.prepare(bench.model, optim={"type": "SGD", "lr": LR, "implementation": "fused"}, device="cpu")
    micro_batches = [bench.batch]
    for _ in range(steps):
        engine.train_step(micro_batches)


def plait_three_calls(bench: Bench, steps: int) -> None:
    import plait

    engine = plait.prepare(bench.model, optim={"type": "SGD", "lr": LR, "implementation": "fused"}, device="cpu")
    batch = bench.batch
    for _ in range(steps):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()


def plait_runner(bench: Bench, steps: int) -> None:
    from plait import Runner

    Runner(
        bench.model,
        bench.loader(steps),
        optim={"type": "SGD", "lr": LR, "implementation": "fused"},
        train={"max_steps": steps},
        checkpoint={"last": False},
        log={"every": 10**9, "console": "none", "sinks": []},
        work_dir="plait",
        device="cpu",
    ).train()


def accelerate(bench: Bench, steps: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(bench.model, bench.optimizer())
    x, y = bench.batch
    for _ in range(steps):
        loss = model(x, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def fabric(bench: Bench, steps: int) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optimizer = fabric.setup(bench.model, bench.optimizer())
    x, y = bench.batch
    for _ in range(steps):
        loss = model(x, y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def lightning(bench: Bench, steps: int) -> None:
    from lightning import LightningModule, Trainer

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = bench.model

        def training_step(self, batch: Any, _index: int) -> Any:
            return self.net(*batch)

        def configure_optimizers(self) -> Any:
            return bench.optimizer()

    # barebones: everything off that Lightning itself knows to cost time.
    Trainer(accelerator="cpu", devices=1, max_steps=steps, barebones=True).fit(Lit(), bench.loader(steps))


def hf_trainer(bench: Bench, steps: int) -> None:
    from torch import nn
    from transformers import Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = bench.model

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            return {"loss": self.net(x, labels)}

    arguments = TrainingArguments(
        output_dir="hf",
        use_cpu=True,
        per_device_train_batch_size=1,
        max_steps=steps,
        max_grad_norm=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    optimizer = bench.optimizer()
    constant = bench.torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
    Trainer(
        model=Net(),
        args=arguments,
        train_dataset=bench.dataset(steps, ("x", "labels")),
        data_collator=_only,
        optimizers=(optimizer, constant),
    ).train()


def _only(items: list[Any]) -> Any:
    return items[0]


def deepspeed(bench: Bench, steps: int) -> None:
    common.join_alone()
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 0},
    }
    engine, *_ = deepspeed.initialize(model=bench.model, optimizer=bench.optimizer(), config=config)
    x, y = bench.batch
    for _ in range(steps):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()


def mmengine_runner(bench: Bench, steps: int) -> None:
    from mmengine.runner import Runner

    Runner(**_mmengine(bench, steps)).train()


def mmengine_flexible(bench: Bench, steps: int) -> None:
    from mmengine.runner._flexible_runner import FlexibleRunner

    FlexibleRunner(**_mmengine(bench, steps)).train()


def _mmengine(bench: Bench, steps: int) -> dict[str, Any]:
    from mmengine.model import BaseModel
    from mmengine.registry import FUNCTIONS

    class Net(BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = bench.model

        def forward(self, x: Any, y: Any, mode: str = "loss") -> dict[str, Any]:
            return {"loss": self.net(x, y)}

    FUNCTIONS.register_module(name="only", module=_only)
    return {
        "model": Net(),
        "work_dir": "mmengine",
        "train_cfg": {"by_epoch": False, "max_iters": steps},
        "train_dataloader": {
            "batch_size": 1,
            "num_workers": 0,
            "dataset": bench.dataset(steps, ("x", "y")),
            "sampler": {"type": "DefaultSampler", "shuffle": False},
            "collate_fn": {"type": "only"},
        },
        "optim_wrapper": {"optimizer": {"type": "SGD", **SGD}},
        "default_hooks": {"logger": {"type": "LoggerHook", "interval": 10**9}, "checkpoint": None},
    }


PEERS = {
    "loader": Peer("raw loop, fed by a DataLoader", "torch", raw_with_loader),
    "plait-step": Peer("Plait, `prepare` + `train_step`", "plait", plait_train_step),
    "plait-calls": Peer("Plait, `engine()` / `backward` / `step`", "plait", plait_three_calls),
    "plait-runner": Peer("Plait, `Runner`", "plait", plait_runner),
    "accelerate": Peer("Accelerate", "accelerate", accelerate),
    "fabric": Peer("Lightning Fabric", "lightning", fabric),
    "lightning": Peer("Lightning Trainer (barebones)", "lightning", lightning),
    "hf": Peer("HF Trainer", "transformers", hf_trainer),
    "deepspeed": Peer("DeepSpeed, stage 0", "deepspeed", deepspeed),
    "mmengine": Peer("MMEngine Runner", "mmengine", mmengine_runner),
    "mmengine-flexible": Peer("MMEngine FlexibleRunner", "mmengine", mmengine_flexible),
}


# ---- measuring


def measure(name: str, steps: int) -> Result:
    """In the child: raw loop, framework, raw loop."""
    before = _timed(raw, steps)
    peer = _timed(PEERS[name].run, steps)
    after = _timed(raw, steps)
    return {"peer": peer, "raw": {key: (before[key] + after[key]) / 2 for key in before}}


def _timed(run: Callable[[Bench, int], None], steps: int) -> dict[str, float]:
    bench = Bench()
    run(bench, steps)
    wall, cpu = bench.watch.steps(skip=steps // 5)
    if len(bench.watch.wall) != steps:
        raise RuntimeError(f"asked for {steps} steps, saw {len(bench.watch.wall)}")
    return {"wall": 1e6 * median(wall), "cpu": 1e6 * median(cpu), "cpu_mean": 1e6 * sum(cpu) / len(cpu)}


def compare(
    names: list[str], *, steps: int, rounds: int, limit: float, before: str | None = None
) -> dict[str, list[Result]]:
    """Every peer once a round; what each said. With `before`, Plait's rows twice, in turns first and second."""
    runs = common.with_before(names, before)
    found: dict[str, list[Result]] = {label: [] for label, _, _ in runs}
    env = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    for turn in range(rounds):
        for label, name, tree in runs if turn % 2 == 0 else runs[::-1]:
            command = common.itself(__file__, "--child", name, "--steps", str(steps))
            said = common.run_child(command, limit=limit, env=env | tree)
            found[label].append(said if "error" in said else said["ranks"][0])
            common.show(row=label, round=turn, **found[label][-1])
    return found


def as_table(found: dict[str, list[Result]], before: str | None = None) -> str:
    """Medians over rounds; what a row costs over the raw loops of its own process."""
    good = {name: [one for one in results if "error" not in one] for name, results in found.items()}
    raws = [one["raw"] for results in good.values() for one in results]
    lines: list[list[str]] = [
        ["raw loop", "", *(f"{median([r[k] for r in raws]):.1f}" for k in ("wall", "cpu")), "", ""]
    ]
    for name, results in found.items():
        peer = PEERS[name.removesuffix(common.BEFORE)]
        version = "" if peer.package == "torch" else common.version(peer.package)
        if before is not None and peer.package == "plait":
            version = common.commit(before if name.endswith(common.BEFORE) else common.ROOT)
        start = [peer.label + (common.BEFORE if name.endswith(common.BEFORE) else ""), version]
        if not good[name]:
            lines.append([*start, "–", "–", "–", f"did not run: {results[0]['error']}"])
            continue
        took = [f"{median([one['peer'][key] for one in good[name]]):.1f}" for key in ("wall", "cpu")]
        over = [f"{median([one['peer'][key] - one['raw'][key] for one in good[name]]):+.1f}" for key in ("wall", "cpu")]
        lines.append([*start, *took, *over])
    return common.table(["loop", "version", "wall µs", "CPU µs", "over raw, wall", "over raw, CPU"], lines)


def main() -> None:
    options = common.parser(__doc__, list(PEERS))
    options.add_argument("--steps", type=int, default=3000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--limit", type=float, default=300.0, help="seconds that one child may take")
    options.add_argument("--imports", action="store_true", help="measure imports, not steps (see imports.py)")
    common.add_before(options)
    given = options.parse_args()
    if given.child is not None:
        common.reply(lambda: measure(given.child, given.steps))
    if given.imports:
        imports.run(given)
        return
    where = common.machine()
    names = common.chosen(given.rows, list(PEERS))
    found = compare(names, steps=given.steps, rounds=given.rounds, limit=given.limit, before=given.before)
    title = f"{common.say_machine(where)}; median of {given.rounds} rounds of {given.steps} steps"
    common.finish(given.json, {"machine": where, "results": found}, f"{title}.\n\n{as_table(found, given.before)}")


if __name__ == "__main__":
    main()
