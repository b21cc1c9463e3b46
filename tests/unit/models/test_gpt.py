from __future__ import annotations

import pytest
import torch
import transformers

from plait.config.model import GptConfig
from plait.errors import ModelError
from plait.models import build_model, preset
from plait.models.gpt import load_pretrained


@pytest.mark.parametrize("body_only", [False, True])
def test_logits_equal_those_of_transformers_with_its_weights(body_only, saved, put):
    hf = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=97,
            n_embd=48,
            n_layer=3,
            n_head=4,
            n_positions=40,
            bos_token_id=0,
            eos_token_id=0,
            initializer_range=0.2,
        )
    ).eval()
    model = build_model(GptConfig(vocab_size=97, dim=48, layers=3, heads=4, seq_len=40))
    folder = saved(hf.transformer if body_only else hf)
    assert load_pretrained(model, folder, put(model)) == ()
    tokens = torch.randint(97, (2, 33))
    torch.testing.assert_close(model(tokens), hf(tokens).logits, rtol=1e-5, atol=1e-5)


def test_dropout_acts_in_training_only():
    model = build_model(preset("gpt", "tiny", dropout=0.5))
    tokens = torch.randint(256, (2, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_without_bias_no_module_has_one():
    model = build_model(preset("gpt", "tiny", bias=False))
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


def test_a_row_longer_than_the_learned_positions_is_refused():
    model = build_model(preset("gpt", "tiny", seq_len=8))
    with pytest.raises(ModelError, match=r"model\.seq_len=8"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_flops_count_the_tied_head_but_not_the_positions():
    model = build_model(preset("gpt", "tiny"))
    parameters = sum(p.numel() for p in model.parameters()) - 64 * 64
    assert model.flops_per_token(32) == 6 * parameters + 6 * 2 * 64 * 32
