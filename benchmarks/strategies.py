"""What spreading costs: time and memory of a step on gloo ranks, Plait beside raw torch and DeepSpeed.

    python benchmarks/strategies.py               # a GPT of about 100M parameters, 2 ranks
    python benchmarks/strategies.py --quick       # a small one: does every row work?

Every row trains the same model from the same start on the same global batches, with fused AdamW and gradients
clipped to a norm of 1. A row is compared with its raw equivalent in the same round; rounds go over all rows
before the next one starts, so that what else the machine does hits all alike. With one micro-batch a step the
raw equivalents of ZeRO-1 and ZeRO-2 are the same code: what they differ by is noise.

The clock sits in the model's forward: a step lasts from one first micro-batch to the next. Its wall time is
that of the slowest rank, its CPU time the mean over ranks. `peak` is the most a rank held while training, from
the third step on; `held` is anonymous memory between steps, after five of them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import common
from common import Result, Stopwatch, median

LR, CLIP = 3e-4, 1.0
MARK = 5
"""Steps after which memory is read."""


@dataclass(frozen=True)
class Row:
    """One way to train, and what it is compared with."""

    label: str
    base: str | None
    run: Callable[[Work], None]


class Work:
    """One rank's part of the work. Made in the child, which has torch."""

    def __init__(self, given: argparse.Namespace) -> None:
        import torch
        from nets import Gpt, GptSize, token_walks

        self.torch = torch
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.steps, self.accumulation, self.micro = given.steps, given.accumulation, given.micro
        self.watch = Stopwatch()
        self.losses: list[float] = []
        self.held = float("nan")
        self._calls = 0
        size = GptSize(given.layers, given.dim, given.heads, given.vocab, given.seq)
        per_step = self.micro * self.accumulation * self.ranks
        self._tokens = token_walks(self.steps * per_step, given.seq + 1, given.vocab, seed=1)
        work = self

        class Watched(Gpt):
            def forward(self, ids: Any, labels: Any) -> Any:
                work._enter()
                loss = super().forward(ids, labels)
                work.losses.append(float(loss.detach()))
                return loss

        torch.set_num_threads(given.threads)
        torch.manual_seed(0)
        self.model = Watched(size)
        self.params = sum(p.numel() for p in self.model.parameters())

    def _enter(self) -> None:
        if self._calls % self.accumulation == 0:
            begun = len(self.watch.wall)
            if begun == 2:
                common.forget_peak()
            if begun == MARK:
                self.held = common.memory_mib("RssAnon")
            self.watch.tick()
        self._calls += 1

    def optimizer(self, params: Any, kind: Any = None) -> Any:
        """The same optimizer for every row."""
        if kind is not None:
            return kind(params, optimizer_class=self.torch.optim.AdamW, lr=LR, weight_decay=0.01, fused=True)
        return self.torch.optim.AdamW(params, lr=LR, weight_decay=0.01, fused=True)

    def batches(self) -> Iterator[list[tuple[Any, Any]]]:
        """This rank's micro-batches of each step."""
        for step in self._tokens.split(self.micro * self.accumulation * self.ranks):
            own = step.chunk(self.ranks)[self.rank]
            yield [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in own.split(self.micro)]

    def measured(self) -> Result:
        """What this rank saw."""
        self.watch.tick()  # the last step has an end too
        wall, cpu = self.watch.steps(skip=0)
        each = self.accumulation
        losses = [sum(self.losses[i : i + each]) / each for i in range(0, len(self.losses), each)]
        if len(wall) != self.steps:
            raise RuntimeError(f"asked for {self.steps} steps, saw {len(wall)}")
        peak = common.memory_mib("VmHWM")
        return {"wall": wall, "cpu": cpu, "losses": losses, "peak": peak, "held": self.held, "params": self.params}


# ---- raw torch


def _join() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")


def raw_ddp(work: Work, optimizer: Any = None) -> None:
    from contextlib import nullcontext

    from torch.nn.parallel import DistributedDataParallel

    _join()
    model = DistributedDataParallel(work.model, gradient_as_bucket_view=True)
    optimizer = work.optimizer(model.parameters(), optimizer)
    for micro_batches in work.batches():
        for index, (x, y) in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with nullcontext() if last else model.no_sync():
                (model(x, y) / len(micro_batches)).backward()
        _update(work, model, optimizer)


def raw_redundancy(work: Work) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    raw_ddp(work, ZeroRedundancyOptimizer)


def raw_zero(stage: int) -> Callable[[Work], None]:
    """FSDP2 used as the ZeRO stage wants it."""

    def run(work: Work) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        _join()
        mesh = init_device_mesh("cpu", (work.ranks,))
        for block in work.model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=stage == 3)
        model = fully_shard(work.model, mesh=mesh, reshard_after_forward=stage == 3)
        optimizer = work.optimizer(model.parameters())
        for micro_batches in work.batches():
            for index, (x, y) in enumerate(micro_batches):
                if work.accumulation > 1:
                    last = index == len(micro_batches) - 1
                    model.set_is_last_backward(last)
                    model.set_requires_gradient_sync(last or stage > 1)
                    model.set_reshard_after_backward(last or stage == 3)
                (model(x, y) / len(micro_batches)).backward()
            _update(work, model, optimizer)

    return run


def _update(work: Work, model: Any, optimizer: Any) -> None:
    work.torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()


# ---- frameworks


def plait(stage: int) -> Callable[[Work], None]:
    """Plait, at a ZeRO stage; stage 0 replicates."""

    def run(work: Work) -> None:
        import plait

        engine = plait.prepare(
            work.model,
            optim={"type": "AdamW", "lr": LR, "weight_decay": 0.01, "no_decay": []},
            strategy={"zero": stage},
            clip_norm=CLIP,
            accumulation=work.accumulation,
            device="cpu",
        )
        for micro_batches in work.batches():
            engine.train_step(micro_batches)

    return run


def deepspeed(stage: int) -> Callable[[Work], None]:
    """DeepSpeed, at a ZeRO stage, with its own bucket sizes."""

    def run(work: Work) -> None:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
        config = {
            "train_micro_batch_size_per_gpu": work.micro,
            "gradient_accumulation_steps": work.accumulation,
            "gradient_clipping": CLIP,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage},
        }
        optimizer = work.optimizer(work.model.parameters())
        engine, *_ = deepspeed.initialize(model=work.model, optimizer=optimizer, config=config)
        for micro_batches in work.batches():
            for x, y in micro_batches:
                loss = engine(x, y)
                engine.backward(loss)
                engine.step()

    return run


ROWS = {
    "raw-ddp": Row("raw DDP", None, raw_ddp),
    "plait-ddp": Row("Plait `ddp`", "raw-ddp", plait(0)),
    "ds0": Row("DeepSpeed stage 0", "raw-ddp", deepspeed(0)),
    "raw-redundancy": Row("raw DDP + ZeroRedundancyOptimizer", "raw-ddp", raw_redundancy),
    "raw-zero1": Row("raw FSDP2, kept whole, reduced once a step", None, raw_zero(1)),
    "plait-zero1": Row("Plait `zero1`", "raw-zero1", plait(1)),
    "ds1": Row("DeepSpeed stage 1", "raw-zero1", deepspeed(1)),
    "raw-zero2": Row("raw FSDP2, kept whole", None, raw_zero(2)),
    "plait-zero2": Row("Plait `zero2`", "raw-zero2", plait(2)),
    "ds2": Row("DeepSpeed stage 2", "raw-zero2", deepspeed(2)),
    "raw-zero3": Row("raw FSDP2, resharded", None, raw_zero(3)),
    "plait-zero3": Row("Plait `zero3`", "raw-zero3", plait(3)),
    "ds3": Row("DeepSpeed stage 3", "raw-zero3", deepspeed(3)),
}


# ---- measuring


def measure(name: str, given: argparse.Namespace) -> Result:
    """In a rank: train, and tell."""
    if name == "build":  # DeepSpeed compiles an extension when first used; two ranks would race for it
        from deepspeed.ops.op_builder import ShareMemCommBuilder

        ShareMemCommBuilder().load()
        return {}
    work = Work(given)
    ROWS[name].run(work)
    return work.measured()


def summarize(ranks: list[Result], warmup: int) -> Result:
    """One number of each kind from what the ranks saw."""
    wall = [max(step) for step in zip(*(rank["wall"] for rank in ranks), strict=True)]
    cpu = [sum(step) / len(step) for step in zip(*(rank["cpu"] for rank in ranks), strict=True)]
    losses = [sum(step) / len(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
    return {
        "wall_ms": 1e3 * median(wall[warmup:]),
        "cpu_ms": 1e3 * median(cpu[warmup:]),
        "peak_mib": max(rank["peak"] for rank in ranks),
        "held_mib": max(rank["held"] for rank in ranks),
        "loss": losses[-1],
        "params": ranks[0]["params"],
    }


def compare(names: list[str], given: argparse.Namespace) -> dict[str, list[Result]]:
    """Every row once a round; what each said."""
    env = {"OMP_NUM_THREADS": str(given.threads), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    if given.trim:
        env |= {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}
    keys = ("layers", "dim", "heads", "vocab", "seq", "micro", "accumulation", "steps", "threads")
    sizes = [word for key in keys for word in (f"--{key}", str(getattr(given, key)))]
    if any(name.startswith("ds") for name in names):
        common.run_child(common.itself(__file__, "--child", "build"), limit=given.limit, env=env)
    found: dict[str, list[Result]] = {name: [] for name in names}
    for turn in range(given.rounds):
        for name in names:
            command = common.itself(__file__, "--child", name, *sizes)
            said = common.run_child(command, limit=given.limit, ranks=given.ranks, env=env)
            found[name].append(said if "error" in said else summarize(said["ranks"], given.warmup))
            common.show(row=name, round=turn, **found[name][-1])
    return found


def as_table(found: dict[str, list[Result]]) -> str:
    """Medians over rounds, and ratios to the raw equivalent of the same round."""
    lines = []
    for name, results in found.items():
        good = [one for one in results if "error" not in one]
        if not good:
            lines.append([ROWS[name].label, *"–" * 6, f"did not run: {results[0]['error']}"])
            continue
        numbers = [f"{median([one[key] for one in good]):.0f}" for key in ("wall_ms", "cpu_ms")]
        memory = [f"{median([one[key] for one in good]):.0f}" for key in ("peak_mib", "held_mib")]
        ratios = [_ratio(found, name, key) for key in ("wall_ms", "cpu_ms")]
        lines.append([ROWS[name].label, *numbers, *ratios, *memory, f"{good[-1]['loss']:.5f}"])
    head = ["row", "wall ms", "CPU ms", "wall ÷ raw", "CPU ÷ raw", "peak MiB", "held MiB", "last loss"]
    return common.table(head, lines)


def _ratio(found: dict[str, list[Result]], name: str, key: str) -> str:
    base = ROWS[name].base
    if base is None:
        return "1"
    pairs = zip(found[name], found.get(base, []), strict=False)
    ratios = sorted(one[key] / other[key] for one, other in pairs if "error" not in one and "error" not in other)
    if not ratios:
        return "–"
    return f"{median(ratios):.3f} ({ratios[0]:.2f}–{ratios[-1]:.2f})"


def _options() -> argparse.ArgumentParser:
    options = common.parser(__doc__, list(ROWS))
    options.add_argument("--quick", action="store_true", help="a small model and one short round")
    sizes = {"layers": 12, "dim": 768, "heads": 12, "vocab": 10000, "seq": 64, "micro": 1, "accumulation": 1}
    for key, value in (sizes | {"steps": 14, "warmup": 4, "rounds": 5, "ranks": 2, "threads": 1}).items():
        options.add_argument(f"--{key}", type=int, default=value, help=f"default {value}")
    options.add_argument("--limit", type=float, default=600.0, help="seconds that one row may take in one round")
    options.add_argument("--trim", action="store_true", help="let malloc give memory back at once, for every row")
    return options


def main() -> None:
    given = _options().parse_args()
    if given.child is not None:
        common.reply(lambda: measure(given.child, given))
    if given.quick:
        given.layers, given.dim, given.heads, given.vocab = 4, 128, 4, 512
        given.steps, given.warmup, given.rounds = 8, 3, 1
    if given.steps <= max(MARK, given.warmup):
        raise SystemExit(f"--steps {given.steps}: at least {max(MARK, given.warmup) + 1} are needed")
    where = common.machine()
    found = compare(common.chosen(given.rows, list(ROWS)), given)
    params = next((one["params"] for results in found.values() for one in results if "params" in one), 0)
    title = (
        f"{common.say_machine(where)}, DeepSpeed {common.version('deepspeed')}; GPT of {params / 1e6:.1f}M parameters, "
        f"{given.ranks} gloo ranks, {given.threads} thread each, {given.micro} × {given.seq} tokens × "
        f"{given.accumulation} micro-batches a rank; median of {given.rounds} rounds of {given.steps} steps"
    )
    if given.trim:
        title += ", malloc trimmed"
    losses = [one["loss"] for results in found.values() for one in results if "loss" in one]
    if losses:
        title += f"; last losses differ by at most {max(losses) - min(losses):.1e}"
    common.finish(
        given.json, {"machine": where, "options": vars(given), "results": found}, f"{title}.\n\n{as_table(found)}"
    )


if __name__ == "__main__":
    main()
