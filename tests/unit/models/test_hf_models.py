from __future__ import annotations

import json

import pytest
import torch
import transformers
from tests.refusals import refused

from plait.config.model import HFConfig
from plait.errors import ModelError
from plait.models import build_model, preset
from plait.models.hf import PRESETS, load_pretrained

BERT = {
    "model_type": "bert",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


@pytest.fixture(params=PRESETS)
def config(request):
    return preset("hf", request.param)


def test_a_decoder_trains_by_the_loss_of_transformers(config):
    model = build_model(config).eval()
    tokens = torch.randint(256, (2, 16))
    shifted = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1)
    loss = model(tokens, shifted)
    assert loss.count == 30
    reference = model(tokens, labels=tokens, return_dict=True).loss
    torch.testing.assert_close(loss.mean(), reference, rtol=1e-5, atol=1e-5)
    loss.sum.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_parameters_keep_their_names(config):
    model = build_model(config)
    original = transformers.AutoModelForCausalLM.from_config(model.config)
    assert list(model.state_dict()) == list(original.state_dict())
    assert type(model).__name__ == type(original).__name__


@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
def test_a_saved_folder_streams_into_a_model_built_on_meta(config, shard_size, saved, put):
    source = build_model(config).eval()
    folder = saved(source, max_shard_size=shard_size)
    assert (folder / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    with torch.device("meta"):
        model = build_model(HFConfig(path=str(folder)))
    model.to_empty(device="cpu").tie_weights()
    for module in model.modules():
        model.init_weights(module)
    assert load_pretrained(model, folder, put(model)).missing == ()
    tokens = torch.randint(256, (2, 16))
    assert torch.equal(model.eval()(tokens), source(tokens))


def test_a_tied_tensor_is_put_once_under_its_first_name(saved):
    model = build_model(preset("hf", "tiny-gpt2"))
    names = []
    load_pretrained(model, saved(model), lambda name, _: names.append(name))
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_trained_model_is_a_transformers_model_again(config, saved):
    model = build_model(config).eval()
    again = transformers.AutoModelForCausalLM.from_pretrained(saved(model))
    tokens = torch.randint(256, (2, 16))
    assert torch.equal(again(tokens).logits, model(tokens))


def test_generate_still_works(config):
    model = build_model(config).eval()
    model.generation_config.eos_token_id = None
    prompt = torch.randint(1, 256, (2, 5))
    out = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(out[:, 1:][:, 4:], model(out[:, :-1])[:, 4:].argmax(-1))


def test_the_dtype_of_a_stored_config_does_not_decide_the_precision_of_a_run():
    config = {**PRESETS["tiny-llama"]["config"], "dtype": "bfloat16"}
    model = build_model(HFConfig(config=config))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


MAMBA2 = {
    "vocab_size": 62,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "state_size": 8,
    "num_heads": 4,
    "head_dim": 16,
    "n_groups": 1,
    "pad_token_id": 0,
}


def test_a_config_may_have_the_infinite_floats_of_a_file() -> None:
    described = json.loads(transformers.Mamba2Config(**MAMBA2).to_json_string())
    assert described["time_step_limit"][1] == {"__float__": "Infinity"}
    model = build_model(HFConfig(config=described))
    assert model.config.time_step_limit[1] == float("inf")


def test_blocks_are_the_layers_and_never_hold_the_embedding():
    model = build_model(HFConfig(config=BERT, task="masked-lm"))
    assert [block.__name__ for block in model.block_classes] == ["BertLayer"]


def test_another_task_answers_in_the_words_of_transformers():
    model = build_model(HFConfig(config={**BERT, "num_labels": 3}, task="sequence-classification"))
    answer = model(input_ids=torch.randint(256, (2, 9)), attention_mask=torch.ones(2, 9), labels=torch.tensor([0, 2]))
    answer["loss"].mean().backward()
    assert answer["logits"].shape == (2, 3)


def test_padding_masks_are_passed_on_to_decoders():
    model = build_model(preset("hf", "tiny-llama")).eval()
    tokens = torch.randint(256, (1, 10))
    mask = torch.ones(1, 10, dtype=torch.long)
    mask[:, :4] = 0
    padded = model(tokens, attention_mask=mask, positions=torch.tensor([[0] * 4 + list(range(6))]))
    torch.testing.assert_close(padded[:, 4:], model(tokens[:, 4:]), rtol=1e-5, atol=1e-5)


def test_a_mixture_of_experts_adds_its_balance_loss_for_each_target():
    experts = {"model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True}
    config = {**PRESETS["tiny-llama"]["config"], **experts}
    model = build_model(HFConfig(config=config)).eval()
    tokens = torch.randint(256, (2, 16))
    shifted = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1)
    reference = model(tokens, labels=tokens, return_dict=True).loss
    torch.testing.assert_close(model(tokens, shifted).mean(), reference, rtol=1e-5, atol=1e-5)
    one = torch.zeros_like(tokens)
    torch.testing.assert_close(model(tokens, shifted, document_ids=one).sum, model(tokens, shifted).sum)


def test_a_classifier_takes_the_body_of_a_language_model_and_says_what_is_new(saved, put):
    folder = saved(build_model(HFConfig(config=BERT, task="masked-lm")))
    model = build_model(HFConfig(path=str(folder), task="sequence-classification"))
    new = load_pretrained(model, folder, put(model)).missing
    assert set(new) == {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (HFConfig(), ["model.path", "model.config"]),
        (HFConfig(path="nowhere"), ["model.path='nowhere'", "config.json"]),
        (HFConfig(config={"hidden_size": 64}), ["model.config.model_type=None"]),
        (HFConfig(config={"model_type": "lamma"}), ["model.config.model_type='lamma'", "llama"]),
        (HFConfig(config={"model_type": "llama", "hiden_size": 64}), ["model.config.hiden_size", "'hidden_size'"]),
        (HFConfig(config={"model_type": "gpt2", "head_dim": 8}), ["model.config.head_dim", "'gpt2'"]),
        (HFConfig(config={"model_type": "gpt2"}, task="masked-lm"), ["model.task='masked-lm'"]),
    ],
)
def test_a_description_that_fits_no_model_says_why(config, named):
    with torch.device("meta"), refused(ModelError, *named):
        build_model(config)


def test_flops_leave_out_the_embedding_that_is_only_looked_up():
    untied, tied = build_model(preset("hf", "tiny-llama")), build_model(preset("hf", "tiny-qwen"))
    assert untied.flops_per_token(16) == 6 * (sum(p.numel() for p in untied.parameters()) - 256 * 64)
    assert tied.flops_per_token(16) == 6 * sum(p.numel() for p in tied.parameters())
