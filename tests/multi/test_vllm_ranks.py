"""vLLM writes for a policy in training: its answers are the policy's, and whole runs learn from them."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_manual
from plait.errors import RolloutMismatchError
from plait.generate import Completion, HybridEngine, Sampling
from plait.posttrain.models import make_model
from plait.posttrain.rl.trainer import OnlineRunner, merged_weights
from plait.posttrain.run import phase_runner
from tests.multi.ranks import RankPool
from tests.refusals import refused

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="the package 'vllm' is not installed"),
    pytest.mark.timeout(1200),
]

# Heads of 32 features are the smallest that vLLM has on a CPU.
LLAMA = {"type": "llama", "vocab_size": 96, "dim": 64, "layers": 2, "heads": 2, "kv_heads": 1, "seq_len": 64}
SAMPLING = Sampling(max_new_tokens=20, temperature=0.9, top_k=30, stop=(0, 7), seed=11)
GREEDY = Sampling(max_new_tokens=20, temperature=0.0, stop=(5, "!"))


@pytest.fixture(scope="module")
def patient_ranks() -> Iterator[RankPool]:
    pool = RankPool(2, timeout_s=900.0, lasting=True)  # vLLM takes long to start, and has many threads
    yield pool
    pool.close()


def decode(tokens: Any) -> str:
    return "".join(chr(33 + token) for token in tokens)


def write(rank: int, size: int, sections: dict[str, Any], asked: list[list[int]]) -> dict[str, Any]:
    """Answers of vLLM while a policy learns, beside those of the gathered one."""
    config = parse_sections(**sections, device="cpu", optim={"type": "SGD", "lr": 2.0}).config
    build = partial(make_model, config)
    engine = prepare_manual(Preparation(config, open_world(config), model=build, log=lambda _: None))
    options: dict[str, Any] = {"build": build, "max_rows": 2, "decode": decode, "log": lambda _: None}
    vllm = HybridEngine(engine, config, mode="vllm", merge=merged_weights, **options)
    gathered = HybridEngine(engine, config, mode="gathered", **options)
    ids = torch.randint(0, 96, (4, 17), generator=torch.Generator().manual_seed(3))
    found: dict[str, Any] = {"drawn": [], "greedy": [], "agrees": [], "numbers": []}
    for _ in range(3):
        before = torch.get_rng_state()
        drawn = vllm.generate(asked, SAMPLING)
        found["numbers"].append(torch.equal(before, torch.get_rng_state()))
        found["drawn"].append(drawn)
        found["agrees"].append(vllm.verify(asked, drawn))
        found["greedy"].append((vllm.generate(asked, GREEDY), gathered.generate(asked, GREEDY)))
        loss = engine.forward(input_ids=ids[:, :-1], labels=ids[:, 1:])
        engine.backward(loss.sum / loss.count)
        engine.step()
    return found


def test_vllm_writes_what_the_policy_would_however_it_is_spread(patient_ranks: RankPool) -> None:
    asked = [[random.randrange(1, 96) for _ in range(random.randint(1, 12))] for _ in range(5)]
    found: dict[str, list[list[Completion]]] = {}
    for name, sections in {
        "zero 3": {"model": LLAMA, "strategy": "zero3"},
        "tp 2, tied": {"model": {**LLAMA, "kv_heads": 2, "tie_embeddings": True}, "strategy": {"layout": {"tp": 2}}},
        "adapters": {"model": LLAMA, "phase": "sft", "lora": {"rank": 2}, "posttrain": {}, "strategy": "zero1"},
    }.items():
        first, second = patient_ranks.run(write, sections, asked)
        assert first["drawn"] == second["drawn"], name
        assert all(first["numbers"]), f"{name}: writing moved the trainer's random numbers"
        for comparison in first["agrees"]:
            assert comparison.agrees, f"{name}: {comparison}"
        for theirs, ours in first["greedy"]:
            assert [(each.tokens, each.finish_reason) for each in theirs] == [
                (each.tokens, each.finish_reason) for each in ours
            ], name
        found[name] = first["drawn"]
    assert all(answers[0] != answers[-1] for answers in found.values()), "what was learned did not arrive"


def write_wrong(rank: int, size: int, asked: list[list[int]]) -> Any:
    """Something other than the policy's weights is handed over."""
    config = parse_sections(model=LLAMA, strategy="zero3", device="cpu").config
    engine = prepare_manual(Preparation(config, open_world(config), model=None, log=lambda _: None))
    said: list[str] = []

    def spoilt(model: Any, weights: Any) -> Any:
        return ((name, tensor * 3.0) for name, tensor in weights)

    hybrid = HybridEngine(engine, config, mode="vllm", merge=spoilt, on_mismatch="fallback", log=said.append)
    wrong = hybrid.verify(asked, hybrid.generate(asked, SAMPLING))
    right = hybrid.verify(asked, hybrid.generate(asked, SAMPLING))
    hybrid = HybridEngine(engine, config, mode="vllm", merge=spoilt, log=lambda _: None)
    with refused(RolloutMismatchError, "mode: trainer", "on_mismatch: fallback"):
        hybrid.verify(asked, hybrid.generate(asked, SAMPLING))
    return wrong.agrees, right.agrees, [line for line in said if "WARNING" in line]


def test_weights_that_are_not_the_policys_are_noticed(patient_ranks: RankPool) -> None:
    asked = [[random.randrange(1, 96) for _ in range(6)] for _ in range(4)]
    for rank, (wrong, right, warnings) in enumerate(patient_ranks.run(write_wrong, asked)):
        assert not wrong
        assert right, "the trainer did not take over"
        assert len(warnings) == (rank == 0)


def learn(rank: int, size: int, folder: str) -> list[float]:
    description = {
        "work_dir": folder,
        "model": {"type": "llama", "vocab_size": 12, "dim": 64, "layers": 1, "heads": 2, "seq_len": 16},
        "posttrain": {"data": [{"type": "task", "samples": 80, "size": 1}], "val_fraction": 0.1},
        "rollout": {"prompts": 16, "max_new_tokens": 4, "mode": "vllm", "verify_every": 1},
        "grpo": {"group": 4, "beta": 0.0},
        "optim": {"lr": 3e-3},
        "batch": {"total": 64},
        "train": {"max_steps": 30},
        "strategy": "zero3",
        "device": "cpu",
        "log": {"console": "none"},
        "plan": "off",
    }
    with phase_runner("grpo", description) as runner:
        assert isinstance(runner, OnlineRunner)
        before = runner.validate()["reward"]
        runner.train()
        return [before, runner.validate()["reward"]]


def test_a_run_learns_from_what_vllm_wrote(patient_ranks: RankPool, tmp_path: Path) -> None:
    first, second = patient_ranks.run(learn, str(tmp_path))
    assert first == second
    assert first[-1] > first[0]
