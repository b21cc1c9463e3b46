"""What recomputing takes on a GPU, seen in a plan: `auto` uses what memory there is, and no more."""

from __future__ import annotations

from dataclasses import replace

from plait.config import parse_sections
from plait.config.run import RunConfig
from plait.plan.hardware import find_hardware
from plait.plan.ledger import Ledger
from plait.plan.simulate import simulate

H200 = find_hardware("h200")
LLAMA = {"type": "llama", "vocab_size": 512, "dim": 256, "layers": 3, "heads": 4, "kv_heads": 2, "seq_len": 512}


def config_of(mode: str, *, compiled: bool) -> RunConfig:
    strategy = {"recompute": mode, "compile": compiled}
    return parse_sections(model=LLAMA, strategy=strategy, precision="bf16", batch={"micro": 16}).config


def planned(mode: str, *, compiled: bool, memory_gib: float = H200.memory_gib) -> Ledger:
    hardware = replace(H200, memory_gib=memory_gib)
    return simulate(config_of(mode, compiled=compiled), hardware, ranks=1, layers=3).ledger


def test_compiled_blocks_keep_what_their_policy_says() -> None:
    none, cheap, full = (planned(mode, compiled=True) for mode in ("none", "selective", "full"))
    assert none.peak[1] > cheap.peak[1] > full.peak[1]
    assert cheap.numbers["flops"] < full.numbers["flops"]


def test_auto_computes_as_much_again_as_the_memory_asks_for() -> None:
    none, cheap, full = (planned(mode, compiled=False) for mode in ("none", "selective", "full"))
    flops = none.numbers["flops"]
    for account, room in ((none, 1.15), (cheap, 1.12), (full, 1.15)):
        memory = room * account.peak[1]
        auto = planned("auto", compiled=False, memory_gib=memory / 2**30)
        assert auto.peak[1] <= memory
        assert flops <= auto.numbers["flops"] <= account.numbers["flops"]
        flops = auto.numbers["flops"]
    assert flops > none.numbers["flops"]
