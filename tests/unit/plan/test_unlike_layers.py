"""Plans of models whose layers are not all alike, and the parameters that their pages show."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from plait.config import parse_sections
from plait.models import active_params, build_model
from plait.plan import rankplan
from plait.plan.gate import plan_here
from plait.plan.hardware import find_hardware
from plait.plan.layers import sample_layers
from plait.plan.ledger import Ledger
from plait.plan.plan import Plan, make_plan

pytest.importorskip("transformers")

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 14,
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
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}
GEMMA = {
    **LLAMA,
    "model_type": "gemma3_text",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 62,
    "sliding_window": 32,
}
"""Every sixth layer has full attention; the pattern ends amid a group."""
GRANITE = {
    **LLAMA,
    "model_type": "granitemoehybrid",
    "num_key_value_heads": 2,
    "num_hidden_layers": 48,
    "layer_types": ["attention" if layer in (5, 14, 20, 31, 38, 43) else "mamba" for layer in range(48)],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 32,
}
"""Attention in some layers, at no regular distance; state spaces in the others."""
LLAMA4 = {
    **LLAMA,
    "model_type": "llama4_text",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size_mlp": 192,
    "num_hidden_layers": 48,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 32,
}
"""A mixture in every second layer, attention to everything in every fourth."""
STACKS = {
    "llama": LLAMA,
    "deepseek": {**DEEPSEEK, "num_hidden_layers": 20},
    "gemma": GEMMA,
    "granite": GRANITE,
    "llama4": LLAMA4,
}


def config_of(model: dict[str, Any], strategy: dict[str, Any], *, seq_len: int = 64, **sections: Any) -> Any:
    given = {"batch": {"micro": 1, "total": 4}, **sections}
    return parse_sections(
        model={"type": "hf", "config": model},
        data={"type": "tokens", "path": "tokens", "seq_len": seq_len, "document_mask": False},
        optim={"type": "AdamW", "lr": 1e-3},
        train={"max_steps": 1},
        strategy=strategy,
        **given,
    ).config


def planned(model: dict[str, Any], strategy: dict[str, Any], *, exact: bool = False) -> Plan:
    hardware = find_hardware("h100", key="plan.hardware")
    return make_plan(config_of(model, strategy), hardware, ranks=2, detailed=False, exact=exact)


def on_meta(model: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return build_model(config_of(model, {}).model)


# ---- which layers are simulated


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("name", STACKS)
def test_the_layers_that_are_left_out_are_counted_and_have_likes_at_both_ends(name: str, gathered: bool) -> None:
    model = on_meta(STACKS[name])
    sample = sample_layers(model, gathered=gathered)
    layers = model.model.layers

    def parameters(names: Any) -> list[int]:
        return [sum(p.numel() for p in model.get_submodule(each).parameters()) for each in names]

    assert sample.longer
    assert sample.layers + len(sample.skipped) == len(layers)
    added = [sample.skipped - more.skipped for more in sample.longer]
    assert sum(len(names) * more.times for names, more in zip(added, sample.longer, strict=True)) == len(sample.skipped)
    per_kind = [sum(parameters(names)) * more.times for names, more in zip(added, sample.longer, strict=True)]
    assert sum(per_kind) == sum(parameters(sample.skipped))
    simulated = sample.layers + sum(more.layers for more in sample.longer)
    assert simulated < len(layers)
    indices = sorted(int(each.rpartition(".")[2]) for each in sample.skipped)
    before, after = (
        parameters(f"model.layers.{i}" for i in range(indices[0])),
        parameters(f"model.layers.{i}" for i in range(indices[-1] + 1, len(layers))),
    )
    assert set(parameters(sample.skipped)) <= set(before) & set(after)


def test_a_stage_of_a_pipeline_leaves_out_its_own_layers_only() -> None:
    stage = [f"model.layers.{index}" for index in range(4, 14)]
    sample = sample_layers(on_meta(DEEPSEEK), among=stage)
    assert sample.skipped < set(stage)
    assert sample.layers + len(sample.skipped) == len(stage)


# ---- what is planned from them


def test_a_short_plan_is_that_of_all_layers() -> None:
    short, whole = (planned(DEEPSEEK, {"zero": 3}, exact=exact) for exact in (False, True))
    found, expected = short.fullest.ledger.numbers, whole.fullest.ledger.numbers
    assert found["parameters"] == expected["parameters"]
    assert short.needed_gib == pytest.approx(whole.needed_gib, rel=0.02)
    assert short.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert min(found.values()) >= 0


def test_a_pipeline_of_a_transformers_model_has_a_plan() -> None:
    plan = planned(DEEPSEEK, {"layout": {"pp": 2}})
    assert [rank.name for rank in plan.ranks] == ["first pipeline stage", "last pipeline stage"]
    assert sum(rank.ledger.numbers["parameters"] for rank in plan.ranks) == plan.params
    assert all(value >= 0 for rank in plan.ranks for value in rank.ledger.numbers.values())


def test_experts_that_only_later_layers_have_are_sharded() -> None:
    plan = planned(DEEPSEEK, {"layout": {"ep": 2}})
    assert plan.params is not None
    experts = 11 * 16 * 3 * 128 * 64
    assert plan.fullest.ledger.numbers["parameters"] == pytest.approx(plan.params)
    assert plan.fullest.ledger.numbers["state"] == pytest.approx(12 * (plan.params - experts / 2), rel=0.01)


@pytest.fixture(scope="module")
def whole_llama() -> Plan:
    return planned(LLAMA, {}, exact=True)


def test_where_figures_would_be_below_zero_all_layers_are_simulated(
    whole_llama: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    stretched = Ledger.stretched

    def wrong(ledger: Ledger, others: Any) -> Ledger:
        return Ledger(stretched(ledger, others).numbers | ({"flops": -1.0} if others else {}))

    monkeypatch.setattr(Ledger, "stretched", wrong)
    plan = planned(LLAMA, {})
    assert min(plan.fullest.ledger.numbers.values()) >= 0
    assert plan.needed_gib == pytest.approx(whole_llama.needed_gib, rel=0.001)


def test_a_model_that_needs_every_layer_is_simulated_whole(whole_llama: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_build: Any, _names: Any) -> Any:
        raise AttributeError("a layer looks for another one")

    monkeypatch.setattr(rankplan, "without_layers", unknown)
    assert planned(LLAMA, {}).needed_gib == pytest.approx(whole_llama.needed_gib, rel=0.001)


# ---- published models

DEEPSEEK_V3 = {"model_type": "deepseek_v3"}
"""The defaults of its config class are those of the published model."""
QWEN3_235B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}
GLM_4_5 = {
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "use_qk_norm": True,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
}
SCOUT = {
    "model_type": "llama4_text",
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
}
MAVERICK = {**SCOUT, "num_local_experts": 128, "interleave_moe_layer_step": 2}


@pytest.mark.parametrize(
    ("model", "billions", "active"),
    [
        (DEEPSEEK_V3, 671, 37),
        (QWEN3_235B, 235, 22),
        (GPT_OSS_120B, 117, 5.1),
        (GLM_4_5, 355, 32),
        (SCOUT, 109, 17),
        (MAVERICK, 400, 17),
    ],
    ids=["deepseek-v3", "qwen3-235b-a22b", "gpt-oss-120b", "glm-4.5", "llama-4-scout", "llama-4-maverick"],
)
def test_parameters_are_those_that_were_published(model: dict[str, Any], billions: float, active: float) -> None:
    built = on_meta(model)
    # The published counts of Scout have its vision tower, those of GLM the layer that predicts a second token.
    assert sum(p.numel() for p in built.parameters()) / 1e9 == pytest.approx(billions, rel=0.015)
    assert active_params(built) / 1e9 == pytest.approx(active, abs=1.0)
    assert built.flops_per_token(4096) == 6 * active_params(built)


LAYOUTS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "ep64": ({"ep": 64}, ("dp_shard", "ep")),
    "pp16-ep8": ({"pp": 16, "ep": 8}, ("pp", "dp_shard")),
    "tp8-ep32": ({"tp": 8, "ep": 32}, ("dp_shard", "ep")),
}
"""Layouts of 1,024 ranks, and which axes cross hosts of eight."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Layouts: one in every session, and with `--fresh` all."""
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", list(LAYOUTS)[: None if metafunc.config.option.fresh else 1])


def test_671_billion_parameters_on_1024_gpus_are_planned_in_a_minute(layout: str) -> None:
    axes, across = LAYOUTS[layout]
    strategy = {"zero": 1, "recompute": "full", "layout": axes}
    config = config_of(DEEPSEEK_V3, strategy, seq_len=4096, precision="bf16", batch={"micro": 1, "total": 4096})
    start = time.process_time()
    plan = make_plan(config, find_hardware("h100"), ranks=1024)
    assert time.process_time() - start < 60.0
    assert plan.params == 671_026_404_352
    assert plan.active_params is not None
    assert plan.active_params / 1e9 == pytest.approx(37, abs=0.5)
    assert plan.tokens_per_step == 4096 * 4096
    assert plan.axes_across_hosts == across
    assert plan.mfu is not None
    assert 0.0 < plan.mfu < 0.6
    for rank in plan.ranks:
        assert min(rank.ledger.numbers.values()) >= 0
        parts = rank.ledger.under("part")
        assert sum(parts.values()) == pytest.approx(rank.ledger.peak[1])


# ---- a plan that could not be made


def test_whatever_goes_wrong_in_a_plan_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: Any, **_options: Any) -> Any:
        return [][1]

    monkeypatch.setattr(rankplan, "simulate", fails)
    reason = plan_here(config_of(LLAMA, {"recompute": "auto"}, device="cpu"), 1, 1, None, None, None)
    assert isinstance(reason, str)
    assert reason.startswith("IndexError: ")
    assert "\n" not in reason
    assert "fails" in reason
