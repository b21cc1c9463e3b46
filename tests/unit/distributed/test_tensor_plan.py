from __future__ import annotations

import pytest
import torch
from tests.refusals import missing, refused
from torch import Tensor, nn

from plait.config.model import GptConfig, HFConfig, LlamaConfig
from plait.distributed.tensor_parallel import STYLES, resolve_plan, styles_of
from plait.distributed.tensor_parallel_plans import last_of_feed_forward, transformers_styles
from plait.errors import ConfigError, ModelError
from plait.models import build_model
from plait.models.common.protocol import TensorPlanned

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def on_meta(config: object) -> nn.Module:
    with torch.device("meta"):
        return build_model(config)  # type: ignore[arg-type]


def hf(model_type: str, **settings: object) -> nn.Module:
    return on_meta(HFConfig(config={"model_type": model_type, **SIZES, **settings}))


def test_a_wildcard_stands_for_one_part_of_a_name() -> None:
    model = on_meta(LlamaConfig(vocab_size=31, dim=16, layers=2, heads=4, seq_len=8))
    assert resolve_plan(model, {"blocks.*.ffn": "region"}) == {"blocks.0.ffn": "region", "blocks.1.ffn": "region"}
    assert resolve_plan(model, {"blocks.1.ffn.[gu]*": "colwise"}) == {
        "blocks.1.ffn.gate": "colwise",
        "blocks.1.ffn.up": "colwise",
    }


def test_every_mistake_in_a_plan_is_told_at_once() -> None:
    model = on_meta(GptConfig(vocab_size=31, dim=16, layers=1, heads=4, seq_len=8))
    plan = {"blocks.*.fnn": "region", "blocks.*.ffn.up": "columnwise", "head": "colwise", "h*d": "vocab_head"}
    with pytest.raises(ConfigError) as caught:
        resolve_plan(model, plan)
    first, second, third = map(str, caught.value.problems)
    assert not missing(first, "'blocks.*.fnn'", "blocks.*.ffn.down")
    assert not missing(second, "blocks.*.ffn.up", "'columnwise'", "`colwise`")
    assert not missing(third, "'head'", "colwise", "'h*d'", "vocab_head")


def test_a_stage_of_a_pipeline_need_not_have_everything_a_plan_names() -> None:
    model = on_meta(GptConfig(vocab_size=31, dim=16, layers=1, heads=4, seq_len=8))
    del model.embedding
    assert "embedding" not in styles_of(model)
    assert styles_of(model, {"embedding": "vocab_embedding", "head": "vocab_head"}, stage=True) == {
        "head": "vocab_head"
    }


@pytest.mark.parametrize("config", [GptConfig(dim=16, heads=2), LlamaConfig(dim=16, heads=2)])
def test_the_plan_of_a_model_names_every_layer_of_its_blocks(config: object) -> None:
    model = on_meta(config)
    assert isinstance(model, TensorPlanned)
    assert set(model.tensor_plan().values()) <= STYLES.keys()
    words = styles_of(model)
    layers = {name for name, module in model.named_modules() if module._parameters and name.startswith("blocks.")}
    assert layers <= words.keys()


def test_the_plan_of_transformers_is_completed_by_what_follows_from_the_model() -> None:
    layer = {
        name.removeprefix("model.layers.1."): word
        for name, word in styles_of(hf("llama")).items()
        if name.startswith("model.layers.1.")
    }
    assert layer == {
        "self_attn": "region",
        "self_attn.q_proj": "heads",
        "self_attn.k_proj": "kv_heads",
        "self_attn.v_proj": "kv_heads",
        "self_attn.o_proj": "rowwise",
        "mlp": "region",
        "mlp.gate_proj": "colwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj": "rowwise",
        "input_layernorm": "sequence",
        "post_attention_layernorm": "sequence",
    }
    words = styles_of(hf("llama"))
    assert words["model.embed_tokens"] == "vocab_embedding"
    assert words["lm_head"] == "vocab_head"
    assert words["model.layers.0"] == "block"
    assert "model.norm" not in words


def test_norms_of_heads_lie_inside_a_region_and_experts_stay_whole() -> None:
    qwen = styles_of(hf("qwen3", head_dim=4))
    assert qwen["model.layers.0.self_attn.k_norm"] == "inner"
    assert qwen["model.layers.0.self_attn"] == "region"
    mixtral = styles_of(hf("mixtral", num_local_experts=2))
    assert mixtral["model.layers.0.mlp"] == "whole_sequence"
    assert not any("experts" in name for name in mixtral)


def test_gpt2_has_a_plan_though_transformers_has_none() -> None:
    model = on_meta(HFConfig(config={"model_type": "gpt2", "vocab_size": 31, "n_embd": 16, "n_layer": 1, "n_head": 4}))
    words = styles_of(model)
    assert words["transformer.h.0.attn.c_attn"] == "qkv_heads"
    assert words["transformer.h.0.attn"] == "region"
    assert words["transformer.wte"] == "vocab_embedding"
    assert words["lm_head"] == "vocab_head"


def test_a_fused_projection_that_transformers_gathers_is_gathered_here_too() -> None:
    words = styles_of(hf("phi3", pad_token_id=0))
    assert words["model.layers.0.self_attn.qkv_proj"] == "colwise_gather"
    assert words["model.layers.0.self_attn.o_proj"] == "rowwise_split"


def test_layers_that_no_plan_names_are_sharded_each_on_its_own_and_feed_forwards_by_their_features() -> None:
    sizes = {"hidden_size": 16, "ffn_dim": 16, "word_embed_proj_dim": 16, "num_attention_heads": 2}
    opt = styles_of(on_meta(HFConfig(config={"model_type": "opt", "vocab_size": 31, "num_hidden_layers": 1, **sizes})))
    assert opt["model.decoder.layers.0.self_attn.q_proj"] == "gathered"
    assert opt["model.decoder.layers.0.fc1"] == "gathered"
    assert "block" not in opt.values()  # nothing says where the sequence may be split
    stablelm = styles_of(hf("stablelm"))
    assert stablelm["model.layers.0.mlp"] == "region"
    assert stablelm["model.layers.0.mlp.up_proj"] == "colwise"
    assert stablelm["model.layers.0.mlp.down_proj"] == "rowwise"


def test_layers_that_do_not_divide_by_the_ranks_and_routers_stay_whole() -> None:
    stablelm = transformers_styles(hf("stablelm"), 5)
    assert not any(name.startswith("model.layers.") for name in stablelm)
    mixtral = styles_of(hf("mixtral", num_local_experts=2, hidden_size=64, head_dim=4))
    assert "model.layers.0.mlp.gate" not in mixtral


class Summed(nn.Module):
    """Two layers of matching sizes between which all hidden features are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).softmax(-1))
        return out


class Gated(Summed):
    """The same layers, with each hidden feature on its own."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        return out


def test_a_feed_forward_is_one_if_its_features_are_computed_each_on_its_own() -> None:
    state = torch.get_rng_state()
    with torch.device("meta"):
        assert last_of_feed_forward(Summed()) is None
        assert last_of_feed_forward(Gated()) == "down"
        assert last_of_feed_forward(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))) == "2"
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_nobody_has_a_plan_for_is_refused_with_the_remedy() -> None:
    with refused(ModelError, "Sequential", "tensor_plan"):
        styles_of(nn.Sequential(nn.Linear(2, 2)))
