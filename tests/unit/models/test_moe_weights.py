from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.refusals import refused

from plait.config.model import MoeConfig
from plait.errors import ModelError
from plait.models import build_model, moe, preset
from plait.models.registry import from_transformers, to_transformers


def mixtral(**changes):
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=3,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            initializer_range=0.2,
            **changes,
        )
    ).eval()


def config(**changes):
    return MoeConfig(
        vocab_size=97, dim=48, ffn_dim=40, layers=2, heads=4, kv_heads=2, rope_base=500.0, experts=3, **changes
    )


def assert_same_logits(model, hf):
    tokens = torch.randint(97, (2, 33))
    torch.testing.assert_close(model.eval()(tokens), hf(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_those_of_transformers_with_its_weights(tied, options, saved, put):
    hf = mixtral(tie_word_embeddings=tied)
    model = build_model(config(tie_embeddings=tied))
    assert moe.load_pretrained(model, saved(hf, **options), put(model)) == ()
    assert_same_logits(model, hf)


def test_stacks_are_read_as_transformers_holds_them_too(tmp_path, put):
    hf = mixtral()
    save_file({name: tensor.contiguous() for name, tensor in hf.state_dict().items()}, tmp_path / "model.safetensors")
    model = build_model(config())
    assert moe.load_pretrained(model, tmp_path, put(model)) == ()
    assert_same_logits(model, hf)


def test_a_routers_bias_may_be_missing_and_is_named(saved, put):
    model = build_model(config(bias_rate=0.1))
    missing = moe.load_pretrained(model, saved(mixtral()), put(model))
    assert missing == ("blocks.0.ffn.router.bias", "blocks.1.ffn.router.bias")


def test_another_number_of_experts_is_told_by_name(saved, put):
    model = build_model(config().model_copy(update={"experts": 4}))
    with refused(ModelError, "blocks.0.ffn.experts.gate.3", "block_sparse_moe.gate.weight", "(3, 48)", "(4, 48)"):
        moe.load_pretrained(model, saved(mixtral()), put(model))


def test_written_in_the_names_of_transformers_it_is_the_same_model(tmp_path):
    model = build_model(config())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    state, portable = model.state_dict(), to_transformers(model.config)
    tensors = {name: made.make(*(state[part] for part in made.sources)) for name, made in portable.made.items()}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    transformers.AutoConfig.for_model(**portable.description).save_pretrained(tmp_path)
    hf, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(hf) is transformers.MixtralForCausalLM
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_same_logits(model, hf)

    adopted = from_transformers("moe", hf.config.to_dict(), {name: t.shape for name, t in tensors.items()})
    assert adopted.config == model.config.model_copy(update={"expert_dim": adopted.config.expert_dim})
    for name, made in adopted.made.items():
        assert torch.equal(made.make(*(tensors[part] for part in made.sources)), state[name]), name
    assert adopted.made.keys() == state.keys()


def test_the_description_of_a_preset_leads_back_to_it():
    made = preset("moe", "8x7b")
    assert moe.from_description(moe.describe(made)) == made


@pytest.mark.parametrize(
    "changes",
    [{"moe_every": 2}, {"shared_experts": 1}, {"score": "sigmoid"}, {"normalize": False}, {"bias_rate": 0.1}],
)
def test_what_a_mixtral_does_not_compute_is_refused_by_name(changes):
    ((key, value),) = changes.items()
    with refused(ModelError, f"model.{key}={value}", "Mixtral"):
        to_transformers(config(**changes))


def test_a_sliding_window_is_refused():
    with refused(ModelError, "config.json", "sliding_window", "4096", "`model.type: hf`"):
        moe.from_description({**moe.describe(config()), "sliding_window": 4096})
