"""How well the plan knows a CPU rank's memory: predicted and measured peak resident memory, strategy by strategy.

    python benchmarks/host_memory.py                   # a Llama of 57M parameters, 2 gloo ranks, about 10 minutes
    python benchmarks/host_memory.py --rows zero3,tp2

Predicted is `plait.plan.ledger.host_bytes` of a simulated step: the tensors at the highest moment, and one number for
the process that is the same for all rows. Measured is the kernel's own account (VmHWM) of the rank that has most, after
four steps. `tight` has malloc give back at once what is free (`plait.plan.ledger.TIGHT_MALLOC`), which is what the
prediction is for; `usual` has glibc as it comes, which keeps holes. CPU seconds of a step, the mean of the last two,
say what tight costs.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import common
from common import Result

STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "fsdp": "fsdp",
    "tp2": {"layout": {"tp": 2}},
    "pp2": {"layout": {"pp": 2}},
    "cp2": {"layout": {"cp": 2}},
    "zero3, recompute": {"zero": 3, "recompute": "full"},
}
RANKS, STEPS, MIB = 2, 4, 2**20


def config_of(row: str) -> Any:
    """The run description of a row."""
    from plait.config import parse_sections

    sizes = {"dim": 640, "layers": 8, "heads": 10, "kv_heads": 5, "ffn_dim": 1728, "vocab_size": 16000, "seq_len": 128}
    return parse_sections(
        model={"type": "llama", **sizes},
        batch={"micro": 2, "accumulation": 2},
        strategy=STRATEGIES[row],
        optim={"type": "AdamW", "lr": 1e-4},
        train={"clip_norm": 1.0},
        device="cpu",
    ).config


def measure(row: str) -> Result:
    """One rank's peak; in a process of its own."""
    import torch

    from plait.config import resolve_batch
    from plait.distributed import open_world
    from plait.engine import Preparation, prepare_native

    torch.set_num_threads(1)
    config, seconds = config_of(row), []
    with open_world(config) as world:
        batch = resolve_batch(config.batch, world.layout.data_parallel)
        engine = prepare_native(Preparation(config, world, accumulation=batch.accumulation))
        for _ in range(STEPS):
            shape = (batch.accumulation, batch.micro, config.model.seq_len)
            ids = torch.randint(0, config.model.vocab_size, shape)
            start = time.process_time()
            engine.train_step([{"input_ids": each, "labels": each} for each in ids])
            seconds.append(time.process_time() - start)
        return {"peak": common.memory_mib("VmHWM"), "cpu_s": sum(seconds[-2:]) / 2}


def predict(row: str) -> Result:
    """What the plan says of the rank that needs most."""
    from plait.plan.hardware import find_hardware
    from plait.plan.ledger import host_bytes
    from plait.plan.simulate import simulate

    config, received, found = config_of(row), None, []
    for rank in range(RANKS):
        seen = simulate(config, find_hardware("cpu"), ranks=RANKS, rank=rank, received=received)
        received = seen.sent_spec
        found.append(host_bytes(seen.ledger) / MIB)
    return {"peak": max(found)}


def compare(row: str) -> Result:
    """Predicted, and measured with both kinds of malloc."""
    from plait.plan.ledger import TIGHT_MALLOC

    found: Result = {"row": row, "predicted": predict(row)["peak"]}
    for word, env in (("tight", TIGHT_MALLOC), ("usual", {})):
        seen = common.run_child(common.itself(__file__, "--child", row), limit=600, ranks=RANKS, env=env)
        if "error" in seen:
            return {**found, "error": f"{word}: {seen['error']}"}
        found[word] = max(rank["peak"] for rank in seen["ranks"])
        found[f"{word}_cpu_s"] = sum(rank["cpu_s"] for rank in seen["ranks"]) / RANKS
    return found


def text_of(rows: list[Result]) -> str:
    """The table."""
    head = ("strategy", "predicted MiB", "tight MiB", "error", "usual MiB", "tight CPU s", "usual CPU s")
    cells = []
    for found in rows:
        if "error" in found:
            cells.append([found["row"], f"{found['predicted']:.0f}", found["error"], *[""] * 4])
            continue
        error = found["predicted"] / found["tight"] - 1
        amounts = [f"{found['predicted']:.0f}", f"{found['tight']:.0f}", f"{error:+.1%}", f"{found['usual']:.0f}"]
        cells.append([found["row"], *amounts, f"{found['tight_cpu_s']:.2f}", f"{found['usual_cpu_s']:.2f}"])
    return common.table(head, cells)


def main() -> None:
    """Measure all rows."""
    parser: argparse.ArgumentParser = common.parser(__doc__, list(STRATEGIES))
    given = parser.parse_args()
    if given.child is not None:
        common.reply(lambda: measure(given.child))
    where, rows = common.machine(), []
    for row in common.chosen(given.rows, list(STRATEGIES)):
        rows.append(compare(row))
        common.show(**rows[-1])
    common.finish(given.json, {"machine": where, "rows": rows}, f"{common.say_machine(where)}\n\n{text_of(rows)}")


if __name__ == "__main__":
    main()
