"""Pipelines and tensor parallelism: how idle each schedule is, what it keeps, and what Plait's steps cost.

    python benchmarks/pipeline.py                       # everything, some minutes on two cores
    python benchmarks/pipeline.py --rows wait2,tp2      # some of it
    python benchmarks/pipeline.py --quick               # does every row work?

`wait2`, `wait4`: every schedule over layers that sleep, 2 and 4 ranks. Sleeping leaves the core to others, so what
is measured is the schedule, and not how ranks share cores. `compute2`: a GPT that computes, 2 ranks. Idle time is
what `Pipeline.bubble` measures, beside what the schedule's table promises. `kept` is the most that autograd keeps
for backward passes on a rank; of layers that sleep, in micro-batches.

`tp2`, `pp2`: whole training steps (AdamW, clipped) of Plait beside `torch.distributed.tensor.parallel` and
`torch.distributed.pipelining`. Both sides live in the same processes and take turns, step by step, so that whatever
else the machine does hits both alike; who goes first changes every round. Wall time is that of the slower rank, CPU
time the mean over ranks.
"""

from __future__ import annotations

import argparse
from typing import Any

import common
from common import Result, median

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv", "dualpipev")
RANKS = {"wait2": 2, "wait4": 4, "compute2": 2, "tp2": 2, "pp2": 2}
SIDES = {"raw": "raw torch", "plait": "Plait"}


# ---- schedules, in a rank


def measure_schedules(row: str, given: argparse.Namespace) -> Result:
    """Every schedule, round after round; for each, what this rank saw."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found: Result = {schedule: {"idle": []} for schedule in SCHEDULES}
    for turn in range(given.rounds):
        for schedule, seen in found.items():
            idle, seen["theory"], kept = _run_schedule(row, schedule, given, count=turn == 0)
            seen["idle"].append(idle)
            if turn == 0:
                seen["kept"], seen["kept_theory"] = kept, in_flight(schedule, dist.get_world_size(), given.micros)
    return found


def _run_schedule(row: str, schedule: str, given: argparse.Namespace, *, count: bool) -> tuple[float, float, float]:
    """Idle share, the schedule's own, and the most that was kept: micro-batches, or MiB where there is work."""
    import torch
    import torch.distributed as dist
    from pipeline_nets import Ledger
    from torch import nn

    from plait.distributed.pipeline_parallel import Pipeline
    from plait.distributed.pipeline_split import make_stages, plan_stages

    group = dist.group.WORLD
    assert group is not None
    model, batches, loss_of, unit = _waiting(given) if row.startswith("wait") else _computing(given)
    stages = make_stages(plan_stages(model, ranks=group.size(), schedule=schedule), group.rank())
    pipeline = Pipeline(stages, schedule=schedule, group=group, device=torch.device("cpu"))
    held = nn.ModuleList(stage.module for stage in stages)
    for _ in range(given.steps + 1):
        pipeline.step(batches, loss_of)
        held.zero_grad()
        dist.barrier()  # as the update of the weights is for ranks that train
    bubble = pipeline.bubble()
    assert bubble is not None
    ledger = Ledger(held)
    if count:
        with ledger.watch():
            pipeline.step(batches, loss_of)
    return bubble.measured, bubble.theoretical, ledger.peak / unit


def _waiting(given: argparse.Namespace) -> tuple[Any, list[Any], Any, float]:
    """Two layers a rank; what a rank keeps of one micro-batch is the unit of memory."""
    import torch
    import torch.distributed as dist
    from pipeline_nets import Wait
    from torch import nn

    each = 2
    model = nn.Sequential(*(Wait(given.wait_ms / 1e3) for _ in range(each * dist.get_world_size())))
    # The first layer's inputs get gradients too, so that all layers wait equally long.
    batches = [torch.randn(64, 64, requires_grad=True) for _ in range(given.micros)]
    return model, batches, lambda answer, _inputs, _index: answer.sum(), each * batches[0].nbytes


def _computing(given: argparse.Namespace) -> tuple[Any, list[Any], Any, float]:
    from pipeline_nets import cross_entropy, gpt_row

    def loss_of(answer: Any, inputs: Any, _index: int) -> Any:
        return cross_entropy(answer, inputs[1]) / given.micros

    ids, labels = _tokens(given, 1)[0]
    batches = list(zip(ids.chunk(given.micros), labels.chunk(given.micros), strict=True))
    return gpt_row(_size(given)), batches, loss_of, 2.0**20


def in_flight(schedule: str, ranks: int, micros: int) -> float:
    """The most micro-batches that a rank keeps, by the schedule: from a forward pass to the end of the backward pass.

    A rank with several stages keeps a part of a micro-batch in each.
    """
    from plait.distributed.pipeline_schedule import make_table, placement_of

    each = len(placement_of(schedule, ranks)) / ranks
    most = 0.0
    for work in make_table(schedule, ranks, micros):
        kept = 0
        for action in work:
            kept += {"F": 1, "B": -1, "W": -1, "I": 0}[str(action.kind.value)]
            most = max(most, kept / each)
    return most


# ---- whole steps, in a rank


def measure_steps(row: str, given: argparse.Namespace) -> Result:
    """Steps of both sides in turn: wall and CPU seconds of each, and their losses."""
    import time

    import torch.distributed as dist
    from pipeline_raw import RAW

    dist.init_process_group("gloo")
    size = _size(given)
    sides = {"raw": RAW[row](size, given.micros), "plait": _plait(row, given)}
    found: Result = {name: {"wall": [], "cpu": [], "loss": []} for name in sides}
    for turn, (ids, labels) in enumerate(_tokens(given, given.turns)):
        for name in sorted(sides, reverse=turn % 2 == 0):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            loss = sides[name](ids, labels)
            found[name]["wall"].append(time.perf_counter() - wall)
            found[name]["cpu"].append(time.process_time() - cpu)
            found[name]["loss"].append(loss)
    return found


def _plait(row: str, given: argparse.Namespace) -> Any:
    from pipeline_nets import cross_entropy, gpt_row
    from pipeline_raw import CLIP, LR

    import plait

    words = {"attention": "region", "attention.q": "heads", "attention.k": "kv_heads", "attention.v": "kv_heads"}
    words |= {"attention.out": "rowwise", "ffn": "region", "ffn.up": "colwise", "ffn.down": "rowwise"}
    plan = {f"{layer + 1}.{name}": word for layer in range(given.layers) for name, word in words.items()}
    strategies: dict[str, Any] = {
        "tp2": {"layout": {"tp": 2}, "tensor": {"plan": plan}},
        "pp2": {"layout": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    }
    count = given.micros if row == "pp2" else 1
    engine = plait.prepare(
        gpt_row(_size(given)),
        optim={"type": "AdamW", "lr": LR, "weight_decay": 0.01, "no_decay": []},
        strategy=strategies[row],
        clip_norm=CLIP,
        accumulation=count,
        loss_fn=lambda answer, inputs: cross_entropy(answer, inputs[1]),
        device="cpu",
    )

    def step(ids: Any, labels: Any) -> float:
        return engine.train_step(list(zip(ids.chunk(count), labels.chunk(count), strict=True))).loss

    return step


def _size(given: argparse.Namespace) -> Any:
    from nets import GptSize

    return GptSize(given.layers, given.dim, given.heads, given.vocab, given.seq)


def _tokens(given: argparse.Namespace, steps: int) -> list[tuple[Any, Any]]:
    """The same on every rank."""
    from nets import token_walks

    walks = token_walks(steps * given.micros * given.micro, given.seq + 1, given.vocab, seed=1)
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in walks.chunk(steps)]


# ---- in the parent


def measure(row: str, given: argparse.Namespace) -> Result:
    """In a rank."""
    import torch

    torch.set_num_threads(1)
    return measure_steps(row, given) if row in ("tp2", "pp2") else measure_schedules(row, given)


def schedules_table(row: str, ranks: list[Result], given: argparse.Namespace) -> str:
    """One line a schedule."""
    waits = row.startswith("wait")
    lines = []
    for schedule in SCHEDULES:
        seen = ranks[0][schedule]
        idle = sorted(seen["idle"])
        kept = max(rank[schedule]["kept"] for rank in ranks)
        spread = f"{median(idle):.1%} ({idle[0]:.1%}–{idle[-1]:.1%})"
        flight = f"{seen['kept_theory']:g}"
        memory = [f"{kept:g}", flight] if waits else [f"{kept:.1f}", flight]
        lines.append([f"`{schedule}`", spread, f"{seen['theory']:.1%}", *memory])
    kept_head = "kept, micro-batches" if waits else "kept, MiB"
    work = f"layers that sleep {given.wait_ms:g} ms" if waits else "a GPT that computes"
    title = f"{row}: {len(ranks)} ranks, {given.micros} micro-batches, {work}"
    head = ["schedule", "idle", "idle, theory", kept_head, "kept, theory (micro-batches)"]
    return f"{title}.\n\n{common.table(head, lines)}"


def steps_table(found: dict[str, list[Result]], given: argparse.Namespace) -> str:
    """One line a side, with its ratio to the raw one: the median over turns, and the middle half of them."""
    lines = []
    for row, ranks in found.items():
        times: dict[str, dict[str, list[float]]] = {}
        for side in SIDES:
            wall = zip(*(rank[side]["wall"] for rank in ranks), strict=True)
            cpu = zip(*(rank[side]["cpu"] for rank in ranks), strict=True)
            times[side] = {"wall": [max(step) for step in wall], "cpu": [sum(step) / len(step) for step in cpu]}
        for side, label in SIDES.items():
            cells = [f"{1e3 * median(times[side][key][given.warmup :]):.1f}" for key in ("wall", "cpu")]
            ratios = [_ratio(times[side][key], times["raw"][key], given.warmup) for key in ("wall", "cpu")]
            loss = next(rank[side]["loss"][-1] for rank in ranks if rank[side]["loss"][-1] is not None)
            lines.append([f"{row}, {label}", *cells, *(["1", "1"] if side == "raw" else ratios), f"{loss:.6f}"])
    head = ["row", "wall ms", "CPU ms", "wall ÷ raw", "CPU ÷ raw", "last loss"]
    return common.table(head, lines)


def _ratio(own: list[float], raw: list[float], warmup: int) -> str:
    ratios = sorted(mine / theirs for mine, theirs in zip(own[warmup:], raw[warmup:], strict=True))
    quarter = len(ratios) // 4
    return f"{median(ratios):.3f} ({ratios[quarter]:.2f}–{ratios[-1 - quarter]:.2f})"


def _options() -> argparse.ArgumentParser:
    options = common.parser(__doc__, list(RANKS))
    options.add_argument("--quick", action="store_true", help="one short round")
    sizes = {"layers": 8, "dim": 256, "heads": 8, "vocab": 512, "seq": 128, "micro": 1, "micros": 8}
    for key, value in (sizes | {"steps": 3, "rounds": 3, "turns": 60, "warmup": 6}).items():
        options.add_argument(f"--{key}", type=int, default=value, help=f"default {value}")
    options.add_argument("--wait-ms", type=float, default=10.0, help="how long a layer sleeps in a forward pass")
    options.add_argument("--limit", type=float, default=600.0, help="seconds that one row may take")
    return options


def main() -> None:
    given = _options().parse_args()
    if given.child is not None:
        common.reply(lambda: measure(given.child, given))
    if given.quick:
        given.layers, given.dim, given.steps, given.rounds, given.turns, given.warmup = 4, 64, 1, 1, 4, 1
    where = common.machine()
    keys = ("layers", "dim", "heads", "vocab", "seq", "micro", "micros", "steps", "rounds", "turns", "warmup")
    sizes = [word for key in (*keys, "wait_ms") for word in (f"--{key.replace('_', '-')}", str(getattr(given, key)))]
    found: dict[str, Result] = {}
    for row in common.chosen(given.rows, list(RANKS)):
        command = common.itself(__file__, "--child", row, *sizes)
        found[row] = common.run_child(command, limit=given.limit, ranks=RANKS[row], env={"OMP_NUM_THREADS": "1"})
        common.show(row=row, **({"error": found[row]["error"]} if "error" in found[row] else {"done": True}))
    good = {row: said["ranks"] for row, said in found.items() if "ranks" in said}
    title = (
        f"{common.say_machine(where)}; gloo, one thread a rank; GPT of {given.layers} layers, width {given.dim}, "
        f"{given.micros} × {given.micro} × {given.seq} tokens a step; schedules: median of {given.rounds} rounds of "
        f"{given.steps} steps (lowest–highest); whole steps: {given.turns} turns, the first {given.warmup} left out "
        f"(middle half)"
    )
    parts = [schedules_table(row, ranks, given) for row, ranks in good.items() if row not in ("tp2", "pp2")]
    steps = {row: ranks for row, ranks in good.items() if row in ("tp2", "pp2")}
    if steps:
        parts.append(steps_table(steps, given))
    text = "\n\n".join((f"{title}.", *parts))
    common.finish(given.json, {"machine": where, "options": vars(given), "results": found}, text)


if __name__ == "__main__":
    main()
