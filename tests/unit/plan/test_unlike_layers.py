"""Plans of models whose layers are not all alike."""

from __future__ import annotations

from typing import Any

import pytest

from plait.config import parse_sections
from plait.plan.hardware import find_hardware
from plait.plan.plan import Plan, make_plan
from plait.plan.rankplan import lengths_of

pytest.importorskip("transformers")

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 64,
}
"""Three dense layers, then mixtures of experts."""
LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
}
GEMMA = {
    **LLAMA,
    "model_type": "gemma3_text",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 33,
    "sliding_window": 32,
}
"""Every sixth layer has full attention; the pattern ends amid a group."""


def config_of(model: dict[str, Any], strategy: dict[str, Any]) -> Any:
    return parse_sections(
        model={"type": "hf", "config": model},
        data={"type": "tokens", "path": "tokens", "seq_len": 64, "document_mask": False},
        optim={"type": "AdamW", "lr": 1e-3},
        train={"max_steps": 1},
        batch={"micro": 1, "total": 4},
        strategy=strategy,
    ).config


def planned(model: dict[str, Any], strategy: dict[str, Any], *, exact: bool = False) -> Plan:
    hardware = find_hardware("h100", key="plan.hardware")
    return make_plan(config_of(model, strategy), hardware, ranks=2, detailed=False, exact=exact)


@pytest.mark.parametrize(
    ("model", "head", "period"), [(LLAMA, 0, 1), (DEEPSEEK, 3, 1), (GEMMA, 3, 6)], ids=["llama", "deepseek", "gemma"]
)
def test_the_layers_that_repeat_are_found(model: dict[str, Any], head: int, period: int) -> None:
    lengths = lengths_of(config_of(model, {"zero": 3}), 2, 8, 0)
    assert lengths is not None
    assert (lengths.head, lengths.period) == (head, period)
    assert lengths.head + lengths.groups * lengths.period == model["num_hidden_layers"]


@pytest.mark.parametrize("strategy", [{"zero": 3}, {}], ids=["zero3", "ddp"])
def test_a_short_plan_is_that_of_all_layers(strategy: dict[str, Any]) -> None:
    short, whole = (planned(DEEPSEEK, strategy, exact=exact) for exact in (False, True))
    found, expected = short.fullest.ledger.numbers, whole.fullest.ledger.numbers
    assert found["parameters"] == expected["parameters"]
    assert short.needed_gib == pytest.approx(whole.needed_gib, rel=0.02)
    assert short.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert min(found.values()) >= 0


def test_a_pipeline_of_a_transformers_model_has_a_plan() -> None:
    plan = planned(DEEPSEEK, {"layout": {"pp": 2}})
    assert [rank.name for rank in plan.ranks] == ["first pipeline stage", "last pipeline stage"]
    assert all(value >= 0 for rank in plan.ranks for value in rank.ledger.numbers.values())
