"""Folders of `transformers` load in whatever form they are stored, and what is written has that form again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.hf_models import model_types, tiny_config, tiny_model
from tests.refusals import refused
from torch import Tensor, nn

from plait.config import HFConfig
from plait.errors import ModelError
from plait.models import build_model, to_transformers
from plait.models.common.weights import unique_tensors
from plait.models.hf import CausalLM, adapt, load_pretrained, made_from_stored, made_to_store

pytest.importorskip("transformers")

ALWAYS = ("mixtral", "qwen3_moe", "gpt_neox", "deepseek_v3", "granitemoe", "camembert")
"""Experts one by one or stacked, another name of the head, tied heads; `--fresh` takes all."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_type" in metafunc.fixturenames:
        metafunc.parametrize("model_type", model_types("causal-lm") if metafunc.config.option.fresh else ALWAYS)


def tiny(model_type: str) -> nn.Module:
    """Return the model, adapted; skip the test where the common factory cannot build one."""
    try:
        model = tiny_model(model_type, "causal-lm")
    except (ImportError, ValueError) as error:
        pytest.skip(str(error))
    return adapt(model, CausalLM)


def stored_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_folder_loads_and_is_written_as_it_was(
    model_type: str, tmp_path: Path, put: Callable[[nn.Module], Callable[[str, Tensor], None]]
) -> None:
    source: Any = tiny(model_type)
    source.save_pretrained(tmp_path, max_shard_size="100KB")
    stored = stored_in(tmp_path)
    model = copy.deepcopy(source)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    assert load_pretrained(model, tmp_path, put(model)).missing == ()
    assert {n for n, t in source.state_dict().items() if not torch.equal(t, model.state_dict()[n])} == set()

    tensors = unique_tensors(model)
    made = made_to_store(model)
    written = tensors if made is None else {n: make(*(tensors[s] for s in names)) for n, (names, make) in made.items()}
    assert written.keys() == stored.keys()
    assert {name for name in stored if not torch.equal(written[name].detach(), stored[name])} == set()

    back = made_from_stored(model, {name: tensor.shape for name, tensor in stored.items()})
    state = model.state_dict()
    assert {n for n, (names, make) in back.items() if not torch.equal(make(*map(stored.get, names)), state[n])} == set()


def test_a_rank_reads_only_its_experts_and_its_rows(tmp_path: Path) -> None:
    source: Any = tiny("mixtral")
    source.save_pretrained(tmp_path)
    experts = "model.layers.1.mlp.experts.gate_up_proj"
    rows = "model.layers.0.self_attn.q_proj.weight"
    state, got = source.state_dict(), dict[str, Tensor]()
    wanted = {
        experts: (slice(1, 3), slice(0, 10), slice(0, 64)),
        rows: (slice(8, 16), slice(0, 64)),
    }
    reading = load_pretrained(source, tmp_path, got.__setitem__, wanted=wanted.get)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], state[name][region]) for name, region in wanted.items())
    assert reading.bytes == state[experts][1:3].nbytes + state[rows][8:16].nbytes
    assert reading.of == sum(tensor.nbytes for tensor in unique_tensors(source).values())
    assert reading.held == 2 * state[experts][1:3].nbytes


def test_experts_of_another_size_are_named_before_anything_is_read(tmp_path: Path) -> None:
    model: Any = tiny("mixtral")
    model.save_pretrained(tmp_path)
    keys = {**tiny_config("mixtral").to_dict(), "num_local_experts": 6}
    other = build_model(HFConfig(config=keys))
    wrong, right = (tuple(m.model.layers[0].mlp.experts.gate_up_proj.shape) for m in (model, other))
    with refused(ModelError, "experts.0.w1.weight", wrong, right):
        load_pretrained(other, tmp_path, lambda *_: pytest.fail("read"))


def test_experts_in_blocks_of_8_bits_load_as_full_ones(
    tmp_path: Path, put: Callable[[nn.Module], Callable[[str, Tensor], None]]
) -> None:
    source: Any = tiny("qwen3_moe")
    source.save_pretrained(tmp_path)
    tensors = stored_in(tmp_path)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[f"{name}_scale_inv"] = torch.full(
            (-(-tensors[name].shape[0] // 8), -(-tensors[name].shape[1] // 8)), 0.5
        )
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    described = json.loads((tmp_path / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    (tmp_path / "config.json").write_text(json.dumps(described))

    model: Any = build_model(HFConfig(path=str(tmp_path)))
    assert load_pretrained(model, tmp_path, put(model)).missing == ()
    for old, new in zip(source.model.layers, model.model.layers, strict=True):
        expected = old.mlp.experts.down_proj.to(torch.float8_e4m3fn).float() * 0.5
        assert torch.equal(new.mlp.experts.down_proj, expected)
    assert "quantization_config" not in to_transformers(HFConfig(path=str(tmp_path))).description


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "llama", "partial_rotary_factor": 0.5, "rope_theta": 1e4, "torch_dtype": "bfloat16"},
        {"model_type": "glm4", "partial_rotary_factor": 0.5},
        {"model_type": "gemma4_text", "num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8},
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 32}},
    ],
)
def test_keys_of_published_configs_are_accepted(keys: dict[str, Any]) -> None:
    from plait.models.hf import _described

    described = _described(HFConfig(config=keys), trust_code=False)
    assert described.model_type == keys["model_type"]


def test_every_key_that_a_config_is_saved_with_is_accepted(model_type: str) -> None:
    config: Any = tiny(model_type).config
    keys = json.loads(config.to_json_string(use_diff=False))
    with torch.device("meta"):
        build_model(HFConfig(config=keys))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"model_type": "gpt2", "rope_theta": 1e4}, ["model.config.rope_theta", "'gpt2'"]),
        ({"model_type": "gemma3", "text_config": {"hiden_size": 3}}, ["text_config.hiden_size", "'hidden_size'"]),
    ],
)
def test_keys_that_nothing_reads_are_not(keys: dict[str, Any], named: list[str]) -> None:
    with torch.device("meta"), refused(ModelError, *named):
        build_model(HFConfig(config=keys))
