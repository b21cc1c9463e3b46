"""What a step costs through each front end, beside the library whose API it is: the same script, one import changed.

    python benchmarks/frontends.py                      # every front end whose library is installed
    python benchmarks/frontends.py --rows deepspeed     # one of them
    python benchmarks/frontends.py --quick              # few steps: does every row work?

Two models: a small MLP, of which nothing but the loop's own cost is left, and a GPT. Library and front end run in
processes of their own, one after the other in every round, so that what else the machine does hits both alike; the
table shows medians over rounds. The clock sits in the model's forward. With several ranks a step lasts as long as on
the slowest of them. The last column is the processor time of that rank, library → Plait: on a machine that has other
work to do, it is the one to look at.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
from common import Result, Stopwatch, median

MODELS = ("mlp", "gpt")


@dataclass(frozen=True)
class Case:
    """What is trained, on how many ranks, and how it is spread (the front end's own word)."""

    model: str
    ranks: int
    spread: str

    @property
    def label(self) -> str:
        """For the table."""
        return f"{self.model}, {self.ranks} rank{'s' if self.ranks > 1 else ''}, {self.spread}"


@dataclass(frozen=True)
class Front:
    """A front end: the library, the module in its place, and a script that takes either."""

    label: str
    package: str
    module: str
    """What is imported of Plait."""
    run: Callable[[Bench, Any, str], None]
    """Trains the bench's model with a library, spread in this way."""
    cases: tuple[Case, ...]


class Bench:
    """A model, its batches and its optimizer. Made in the child, which has torch."""

    def __init__(self, kind: str, steps: int) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.torch, self.steps = torch, steps
        self.rank, self.ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.watch = Stopwatch()
        self.model, self.batch = self._mlp() if kind == "mlp" else self._gpt()

    def _mlp(self) -> tuple[Any, tuple[Any, Any]]:
        torch, watch = self.torch, self.watch

        class Mlp(torch.nn.Module):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

            def forward(self, x: Any, y: Any) -> Any:
                watch.tick()
                return torch.nn.functional.mse_loss(self.down(torch.relu(self.up(x))), y)

        return Mlp(), (torch.randn(8, 64), torch.randn(8, 64))

    def _gpt(self) -> tuple[Any, tuple[Any, Any]]:
        from nets import Gpt, GptSize, token_walks

        watch = self.watch

        class Watched(Gpt):
            def forward(self, ids: Any, labels: Any) -> Any:
                watch.tick()
                return super().forward(ids, labels)

        rows = token_walks(2 * self.ranks, 65, 512, seed=1).chunk(self.ranks)[self.rank]
        return Watched(GptSize(4, 256, 4, 512, 64)), (rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    def optimizer(self) -> Any:
        """The same optimizer for both sides."""
        return self.torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)


# ---- one function a front end


def deepspeed(bench: Bench, library: Any, spread: str) -> None:
    """`initialize`, then `engine()`, `backward`, `step`."""
    library.init_distributed()
    config = {
        "train_micro_batch_size_per_gpu": len(bench.batch[0]),
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": int(spread.removeprefix("stage "))},
    }
    engine, *_ = library.initialize(model=bench.model, optimizer=bench.optimizer(), config=config)
    x, y = bench.batch
    for _ in range(bench.steps):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()


def accelerate(bench: Bench, library: Any, spread: str) -> None:
    """`prepare`, then `accumulate`, `backward`, `clip_grad_norm_`, `step`."""
    own = {} if library.__name__ == "accelerate" else {"sections": {"strategy": spread}}
    accelerator = library.Accelerator(cpu=True, **own)
    model, optimizer = accelerator.prepare(bench.model, bench.optimizer())
    x, y = bench.batch
    for _ in range(bench.steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(x, y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def _only(rows: list[Any]) -> dict[str, Any]:
    """Rows are batches already."""
    x, y = rows[0]
    return {"x": x, "y": y}


def mmengine(bench: Bench, library: Any, spread: str) -> None:
    """A `FlexibleRunner`, fed by its own loader; it clips too. One rank: MMEngine's several ask torch for GPUs."""
    rooms = {room: importlib.import_module(f"{library.__name__}.{room}") for room in ("runner", "model", "registry")}
    if library.__name__ == "mmengine":
        rooms["runner"] = importlib.import_module("mmengine.runner._flexible_runner")  # not exported there

    class Net(rooms["model"].BaseModel):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = bench.model

        def forward(self, x: Any, y: Any, mode: str = "loss") -> dict[str, Any]:
            return {"loss": self.net(x, y)}

    rooms["registry"].FUNCTIONS.register_module(name="the_batch", module=_only)
    rooms["runner"].FlexibleRunner(
        model=Net(),
        work_dir="mmengine",
        strategy={"type": spread},
        train_cfg={"by_epoch": False, "max_iters": bench.steps},
        train_dataloader={
            "batch_size": 1,
            "num_workers": 0,
            "dataset": [bench.batch] * (bench.steps * bench.ranks),
            "sampler": {"type": "DefaultSampler", "shuffle": False},
            "collate_fn": {"type": "the_batch"},
        },
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 1e-4, "fused": True}, "clip_grad": {"max_norm": 1.0}},
        default_hooks={"logger": {"type": "LoggerHook", "interval": 10**9}, "checkpoint": None},
    ).train()


DDP = tuple(Case(model, ranks, "ddp") for model in MODELS for ranks in (1, 2))
ALONE = tuple(Case(model, 1, "SingleDeviceStrategy") for model in MODELS)
FRONTS = {
    "deepspeed": Front(
        "DeepSpeed",
        "deepspeed",
        "plait.frontends.deepspeed",
        deepspeed,
        (
            Case("mlp", 1, "stage 0"),
            *(Case("mlp", 2, f"stage {stage}") for stage in range(4)),
            *(Case("gpt", 2, f"stage {stage}") for stage in range(4)),
        ),
    ),
    "accelerate": Front(
        "Accelerate",
        "accelerate",
        "plait.frontends.accelerate",
        accelerate,
        DDP,
    ),
    "mmengine": Front("MMEngine", "mmengine", "plait.frontends.mmengine", mmengine, ALONE),
}


# ---- measuring


def measure(given: argparse.Namespace) -> Result:
    """In the child: milliseconds of each step, without the first fifth."""
    front = FRONTS[given.child]
    if given.side == "library" and int(os.environ.get("WORLD_SIZE", 1)) == 1:
        common.join_alone()
    bench = Bench(given.model, given.steps)
    library = importlib.import_module(front.package if given.side == "library" else front.module)
    if given.side == "library" and front.package == "deepspeed":
        library.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled at the start
    front.run(bench, library, given.spread)
    if len(bench.watch.wall) != given.steps:
        raise RuntimeError(f"asked for {given.steps} steps, saw {len(bench.watch.wall)}")
    wall, cpu = bench.watch.steps(skip=given.steps // 5)
    return {"wall": 1e3 * median(wall), "cpu": 1e3 * median(cpu)}


def run_side(name: str, case: Case, side: str, given: argparse.Namespace) -> Result:
    """One child; the slowest rank's time."""
    steps = given.steps if case.model == "mlp" else max(given.steps // 20, 5)
    words = ["--child", name, "--side", side, "--model", case.model, "--spread", case.spread, "--steps", str(steps)]
    env = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = common.itself(__file__, *words)
    said = common.run_child(command, limit=given.limit, ranks=case.ranks, env=env)
    if "error" in said:
        return said
    return {key: max(float(rank[key]) for rank in said["ranks"]) for key in ("wall", "cpu")}


def compare(names: list[str], given: argparse.Namespace) -> list[Result]:
    """Every case once a round, on both sides."""
    cases = [(name, case) for name in names for case in FRONTS[name].cases if given.cases in case.label]
    found = [{"front": name, "case": case, "library": [], "plait": []} for name, case in cases]
    for turn in range(given.rounds):
        for row in found:
            for side in ("library", "plait"):
                row[side].append(run_side(row["front"], row["case"], side, given))
                common.show(row=row["front"], case=row["case"].label, side=side, round=turn, **row[side][-1])
    return found


def as_table(found: list[Result]) -> str:
    """Medians over rounds, and how the two compare."""
    lines = []
    for row in found:
        front, case = FRONTS[row["front"]], row["case"]
        broken = [each["error"] for side in ("library", "plait") for each in row[side] if "error" in each]
        if broken:
            lines.append([front.label, case.label, "–", "–", f"did not run: {broken[0]}", "–"])
            continue
        library, plait = (median([each["wall"] for each in row[side]]) for side in ("library", "plait"))
        busy = [median([each["cpu"] for each in row[side]]) for side in ("library", "plait")]
        times = [f"{library:.3f}", f"{plait:.3f}", f"{library / plait:.2f}×", f"{busy[0]:.3f} → {busy[1]:.3f}"]
        lines.append([front.label, case.label, *times])
    heads = ["front end", "case", "library, ms a step", "Plait, ms a step", "faster by", "processor, ms a step"]
    return common.table(heads, lines)


def main() -> None:
    options = common.parser(__doc__, list(FRONTS))
    options.add_argument("--steps", type=int, default=1000, help="of the MLP; the GPT takes a twentieth")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--cases", default="", help="only those with this in their name, such as gpt")
    options.add_argument("--limit", type=float, default=300.0, help="seconds that one child may take")
    options.add_argument("--quick", action="store_true", help="few steps, one round")
    for hidden in ("--side", "--model", "--spread"):
        options.add_argument(hidden, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.child is not None:
        common.reply(lambda: measure(given))
    if given.quick:
        given.steps, given.rounds = 100, 1
    where = common.machine()
    names = common.chosen(given.rows, list(FRONTS))
    found = compare(names, given)
    versions = ", ".join(f"{FRONTS[name].package} {common.version(FRONTS[name].package)}" for name in names)
    title = f"{common.say_machine(where)}; {versions}; median of {given.rounds} rounds of {given.steps} steps"
    plain = [{**row, "case": row["case"].label} for row in found]
    common.finish(given.json, {"machine": where, "results": plain}, f"{title}.\n\n{as_table(found)}")


if __name__ == "__main__":
    main()
