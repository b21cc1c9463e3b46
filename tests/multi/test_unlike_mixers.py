"""`transformers` models that packing, context and tensor parallelism cannot take, or that they once got wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.config import parse_sections
from plait.config.model import HFConfig
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from plait.errors import ModelError
from plait.models import build_model
from tests.hf_models import tiny_config
from tests.multi.parity import GENTLE, assert_same, run_steps, token_batches
from tests.multi.ranks import RankPool
from tests.refusals import refused

pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 62,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**SMALL, **LINEAR, "head_dim": 8, "num_hidden_layers": 4},
    "qwen3_next": {**SMALL, **LINEAR, "head_dim": 8, "num_hidden_layers": 4, "num_experts": 0},
    "lfm2": {**SMALL, "layer_types": ["conv", "full_attention"]},
    "minimax": {**SMALL, **EXPERTS, "head_dim": 8},
    "bamba": {**SMALL, **MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**SMALL, **MAMBA, **EXPERTS, "layer_types": ["mamba", "attention"]},
    "falcon_mamba": {"vocab_size": 62, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0},
    "mamba": {"vocab_size": 62, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0},
}  # fmt: skip
"""Their layers have a state, or a convolution, along the row."""
INDEXED: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {**SMALL, "layer_types": ["indexed_attention"] * 2},
    "deepseek_v4": dict(SMALL),
}
"""Their attention chooses among tokens by an index of its own."""
ATTENTION: dict[str, dict[str, Any]] = {
    "llama": dict(SMALL),
    "qwen3": {**SMALL, "head_dim": 8},
    "mistral": {**SMALL, "sliding_window": None},
    "gemma2": {**SMALL, "head_dim": 8},
    "gpt2": {"vocab_size": 62, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "apertus": dict(SMALL),
    "olmo2": dict(SMALL),
    "mixtral": {**SMALL, "num_local_experts": 4},
}
"""All tokens meet in attention that asks the mask."""


def built(name: str, config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return build_model(HFConfig(config={"model_type": name, **config}))


def packed(first: int) -> dict[str, Tensor]:
    """A row of two documents; `first` seeds the tokens of the first one."""
    generator, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(first)
    ids = torch.randint(3, 60, (1, 16), generator=generator)
    ids[:, :6] = torch.randint(3, 60, (1, 6), generator=other)
    documents = torch.tensor([[0] * 6 + [1] * 10])
    positions = torch.tensor([[*range(6), *range(10)]])
    return {"input_ids": ids, "document_ids": documents, "positions": positions}


@pytest.mark.parametrize("name", ATTENTION)
def test_a_document_does_not_see_the_one_before(name: str) -> None:
    model = built(name, ATTENTION[name]).eval()
    with torch.no_grad():
        one, other = (model(**packed(seed))[:, 6:] for seed in (2, 3))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_rows_of_one_document_are_taken() -> None:
    model = built("qwen3_5_text", RECURRENT["qwen3_5_text"]).eval()
    with torch.no_grad():
        assert model(packed(2)["input_ids"]).shape == (1, 16, 62)


@pytest.mark.parametrize("name", ["bert", "roberta", "electra", "big_bird", "megatron-bert"])
def test_an_encoder_is_no_causal_language_model(name: str) -> None:
    config = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    with torch.device("meta"):
        with refused(ModelError, "is_decoder=False", "causal-lm"):
            built(name, config)
        built(name, {**config, "is_decoder": True})


def even_batches(seed: int) -> list[list[dict[str, Tensor]]]:
    return token_batches(seed, 2)[:2]


LLAMA4 = {
    **SMALL,
    "model_type": "llama4_text",
    "intermediate_size_mlp": 48,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 64,
    "interleave_moe_layer_step": 2,
}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("config", [LLAMA4, {**SMALL, "model_type": "apertus"}], ids=["llama4", "apertus"])
def test_tensor_parallel_does_as_one_process(two_ranks: RankPool, config: dict[str, Any], sequence: bool) -> None:
    sections = {"model": {"type": "hf", "config": config}}
    steps = even_batches(5)
    expected = run_steps(0, 1, sections, steps)
    strategy = {"layout": {"tp": 2}, "tensor": {"sequence_parallel": sequence}}
    for found in two_ranks.run(run_alike, {**sections, "strategy": strategy}, steps):
        assert_same(found, expected, tolerance=1e-4)


def run_alike(rank: int, size: int, sections: dict[str, Any], steps: Any) -> Any:
    """Ranks along `tp` see the same micro-batches."""
    return run_steps(0, 1, sections, steps)


def miss_a_parameter(rank: int, size: int) -> str:
    """A plan without a word for the activation between columns and rows."""
    plan = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    sections = {
        "model": {"type": "hf", "config": {**SMALL, "model_type": "apertus"}},
        "strategy": {"layout": {"tp": 2}, "tensor": {"plan": plan}},
    }
    with pytest.raises(ModelError) as caught:
        run_steps(0, 1, sections, even_batches(5))
    return str(caught.value)


def test_a_parameter_that_the_plan_has_missed_is_refused(two_ranks: RankPool) -> None:
    for message in two_ranks.run(miss_a_parameter):
        assert "mlp.act_fn.alpha" in message
        assert "strategy.tensor.plan" in message


def say_what_stays(rank: int, size: int, name: str, config: dict[str, Any]) -> list[str]:
    sections: Any = {"model": {"type": "hf", "config": {"model_type": name, **config}}, "optim": GENTLE}
    described = parse_sections(**sections, strategy={"layout": {"tp": size}}).config
    said: list[str] = []
    prepare_native(Preparation(described, open_world(described), log=said.append))
    return [text for text in said if "strategy.layout.tp" in text]


def test_that_tensor_parallel_splits_little_is_said(two_ranks: RankPool) -> None:
    for said in two_ranks.run(say_what_stays, "jetmoe", tiny_config("jetmoe").to_diff_dict()):
        (share,) = said
        assert share.startswith("warning")
        assert "experts.output_linear.weight" in share
    for said in two_ranks.run(say_what_stays, "llama", SMALL):
        (share,) = said
        assert "99%" in share
        assert not share.startswith("warning")
