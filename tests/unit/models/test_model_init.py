from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from plait.config.model import HFConfig
from plait.models import build_model, preset

BERT = {
    "model_type": "bert",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
CONFIGS = {
    "gpt": preset("gpt", "tiny"),
    "llama": preset("llama", "tiny"),
    "llama tied": preset("llama", "tiny", tie_embeddings=True),
    "resnet": preset("resnet", "cifar10"),
    "hf llama": preset("hf", "tiny-llama"),
    "hf gpt2": preset("hf", "tiny-gpt2"),
    "hf bert": HFConfig(config=BERT, task="masked-lm"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_model_from_the_meta_device_starts_like_a_real_one(config, fill):
    real = fill(build_model(config))
    with torch.device("meta"):
        model = build_model(config)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(77)
    if config.type == "hf":
        model.tie_weights()  # what `to_empty` does to every tie
    fill(model)
    for (name, expected), (_, tensor) in zip(
        [*real.named_parameters(), *real.named_buffers()],
        [*model.named_parameters(), *model.named_buffers()],
        strict=True,
    ):
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_module_can_be_filled_alone_and_in_any_order(family, fill):
    expected = fill(build_model(preset(family, "tiny"))).state_dict()
    model = build_model(preset(family, "tiny"))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 77)
    backwards = model.named_modules
    model.named_modules = lambda: reversed(list(backwards()))
    for name, tensor in fill(model).state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_residual_projections_start_smaller_with_depth(family):
    model = build_model(preset(family, "tiny", layers=8))
    for block in model.blocks:
        for projection in (block.attention.out, block.ffn.down):
            assert projection.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.1)
        for projection in (block.attention.q, block.ffn.up):
            assert projection.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_gpt2_of_transformers_keeps_its_rule_for_residual_projections(fill):
    model = fill(build_model(preset("hf", "tiny-gpt2")))
    for block in model.transformer.h:
        assert block.attn.c_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.1)
        assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_fresh_language_model_knows_nothing():
    model = build_model(preset("llama", "tiny"))
    tokens = torch.randint(256, (4, 32))
    assert model(tokens, tokens).mean().item() == pytest.approx(math.log(256), abs=0.2)


@pytest.mark.parametrize("depth", [18, 50])
def test_a_residual_block_of_resnet_starts_as_the_identity(depth):
    model = build_model(preset("resnet", f"resnet{depth}"))
    x = torch.rand(2, model.layer1[-1].conv1.in_channels, 8, 8)
    torch.testing.assert_close(model.layer1[-1](x), x)
