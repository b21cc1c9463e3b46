from __future__ import annotations

import pytest
import torch
import transformers

from plait.config.model import LlamaConfig
from plait.models import build_model, preset
from plait.models.common.attention import attend
from plait.models.llama import ffn_dim, load_pretrained


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_those_of_transformers_with_its_weights(kv_heads, tied, saved, put):
    hf = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            tie_word_embeddings=tied,
            initializer_range=0.2,
        )
    )
    config = LlamaConfig(
        vocab_size=97, dim=48, ffn_dim=80, layers=3, heads=4, kv_heads=kv_heads, rope_base=500.0, tie_embeddings=tied
    )
    model = build_model(config)
    assert load_pretrained(model, saved(hf), put(model)) == ()
    tokens = torch.randint(97, (2, 33))
    torch.testing.assert_close(model(tokens), hf(tokens).logits, rtol=1e-5, atol=1e-5)


def test_grouped_queries_equal_repeated_keys_and_values():
    q, k, v = torch.randn(2, 6, 9, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    expected = attend(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), None)
    torch.testing.assert_close(attend(q, k, v, None), expected)
    causal = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    torch.testing.assert_close(attend(q, k, v, causal), expected)


def test_positions_matter_only_relative_to_each_other():
    model = build_model(preset("llama", "tiny"))
    tokens = torch.randint(256, (1, 20))
    shifted = model(tokens, positions=torch.arange(20)[None] + 1000)
    torch.testing.assert_close(shifted, model(tokens), rtol=1e-4, atol=1e-4)


def test_the_feed_forward_is_eight_thirds_wide_in_multiples_of_64():
    assert ffn_dim(LlamaConfig(dim=768)) == 2048
    assert ffn_dim(LlamaConfig(dim=1000)) == 2688
    assert ffn_dim(LlamaConfig(dim=1000, ffn_dim=77)) == 77


@pytest.mark.parametrize("tied", [False, True])
def test_flops_count_products_and_causal_attention_but_no_lookup(tied):
    model = build_model(preset("llama", "tiny", tie_embeddings=tied))
    block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64
    assert model.flops_per_token(50) == 6 * (2 * block + 64 + 256 * 64) + 6 * 2 * 64 * 50


def test_a_tied_head_adds_no_parameter_and_trains_the_embedding_from_both_ends():
    model = build_model(preset("llama", "tiny", tie_embeddings=True))
    assert not [name for name, _ in model.named_parameters() if name.startswith("head")]
    tokens = torch.randint(100, (1, 8))
    model(tokens, tokens).sum.backward()
    assert model.embedding.weight.grad[100:].any()  # never looked up, yet a wrong answer
