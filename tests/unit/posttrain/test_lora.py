"""Adapters: what they add, where they go, and that `peft` means the same by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.hf_models import tiny_model
from tests.refusals import refused
from torch import nn

from plait.config import parse_sections
from plait.errors import CheckpointError, ConfigError, ModelError
from plait.models import build_model
from plait.posttrain.lora import (
    AdapterSpec,
    Quantized,
    adapters_off,
    attach,
    find_targets,
    freeze_others,
    lora_layers,
    merge,
    pack,
    quantize,
    read_adapter,
    save_adapter,
    unmerge,
    unpack,
)

GPT = {"type": "gpt", "vocab_size": 31, "dim": 16, "layers": 2, "heads": 2, "seq_len": 12}
GPT2 = {
    "type": "hf",
    "config": {
        "model_type": "gpt2",
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 12,
        "vocab_size": 31,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}


def make(section: dict[str, Any]) -> nn.Module:
    described = parse_sections(model=section).config.model
    assert described is not None
    return build_model(described)


def with_adapters(section: dict[str, Any], spec: AdapterSpec, targets: tuple[str, ...] = ("linear",)) -> nn.Module:
    model = make(section)
    attach(model, spec, targets)
    freeze_others(model, ())
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, 31, (2, 9))


def adapter_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in model.named_parameters() if ".lora_" in name}


@pytest.mark.parametrize("section", [GPT, GPT2], ids=["linear", "conv1d"])
def test_a_merged_model_says_the_same_and_can_be_taken_apart_again(section: dict[str, Any]) -> None:
    model, ids = with_adapters(section, AdapterSpec(4, 8.0)).eval(), tokens()
    before = {name: param.clone() for name, param in model.named_parameters()}
    with torch.no_grad():
        adapted = model(ids)
        with adapters_off(model):
            plain = model(ids)
        assert merge(model) == len(lora_layers(model))
        assert merge(model) == 0  # once is enough
        assert torch.allclose(model(ids), adapted, atol=1e-4)
        with adapters_off(model):
            assert torch.allclose(model(ids), adapted, atol=1e-4)
        unmerge(model)
        with adapters_off(model):
            assert torch.allclose(model(ids), plain, atol=1e-4)
    assert not torch.allclose(adapted, plain, atol=1e-2)
    for name, param in model.named_parameters():
        assert torch.allclose(param, before[name], atol=1e-5)


def test_a_fresh_adapter_changes_nothing_and_only_it_learns() -> None:
    model, ids = make(GPT).eval(), tokens()
    plain = model(ids)
    layers = attach(model, AdapterSpec(4, 8.0), ("linear",))
    freeze_others(model, ("norm.*",))
    assert torch.equal(model(ids), plain)
    learned = {name for name, param in model.named_parameters() if param.requires_grad}
    expected = {f"{layer}.lora_{which}.weight" for layer in layers for which in "AB"}
    assert learned == expected | {"norm.weight", "norm.bias"}


def test_targets_are_names_patterns_or_all_layers_of_the_blocks() -> None:
    spec = AdapterSpec(2, 2.0)
    assert attach(make(GPT), spec, ("q",)) == ["blocks.0.attention.q", "blocks.1.attention.q"]
    assert attach(make(GPT), spec, ("blocks.1.ffn.*",)) == ["blocks.1.ffn.up", "blocks.1.ffn.down"]
    assert len(attach(make(GPT), spec, ("linear",))) == 2 * 6
    with refused(ConfigError, "'q_proj'", "down", key="lora.targets"):
        attach(make(GPT), spec, ("q_proj",))
    with refused(ConfigError, "'lm_head'", "lora.also", key="lora.targets"):
        attach(make(GPT2), spec, ("lm_head",))


def test_a_router_that_returns_more_than_its_product_has_no_adapter() -> None:
    pytest.importorskip("transformers")
    model = tiny_model("llama4_text", "causal-lm")
    layers = find_targets(model, ["linear"])
    assert any("q_proj" in name for name in layers)
    assert not [name for name in layers if "router" in name]
    falcon = find_targets(tiny_model("falcon", "causal-lm"), ["linear"])  # its linear layers are a subclass, too
    assert any("query_key_value" in name for name in falcon)


def test_dropout_is_for_training_only() -> None:
    model, ids = with_adapters(GPT, AdapterSpec(4, 8.0, dropout=0.5)), tokens()
    assert not torch.equal(model.train()(ids), model(ids))
    assert torch.equal(model.eval()(ids), model(ids))


@pytest.mark.parametrize("section", [GPT, GPT2], ids=["gpt", "conv1d"])
def test_peft_and_plait_train_alike_and_exchange_adapters(section: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    spec, ids = AdapterSpec(4, 8.0, scaled_by_root=True), tokens()
    ours = with_adapters(section, spec)
    state = {name: param.detach().clone() for name, param in ours.named_parameters()}
    folder = save_adapter(tmp_path / "ours", adapter_of(ours), spec, transposed=section is GPT2)

    base = make(section)
    base.load_state_dict({name: value for name, value in state.items() if ".lora_" not in name}, strict=False)
    theirs = peft.PeftModel.from_pretrained(base, str(folder), is_trainable=True)
    losses: list[list[float]] = []
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses.append([])
        for _ in range(4):
            loss = model(input_ids=ids[:, :-1], labels=ids[:, 1:]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)

    theirs.save_pretrained(str(tmp_path / "theirs"))
    back = read_adapter(tmp_path / "theirs", make(section))
    assert back.spec == spec
    for name, param in adapter_of(ours).items():
        assert torch.allclose(back.tensors[name], param, atol=1e-4)
    merge(ours)
    for name, layer in theirs.base_model.model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            merged = layer.base_layer.weight + layer.get_delta_weight("default")
            assert torch.allclose(ours.get_parameter(f"{name}.weight"), merged, atol=1e-4)


def test_an_adapter_whose_writing_fails_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, model = AdapterSpec(4, 8.0), with_adapters(GPT, AdapterSpec(4, 8.0))
    head = {"head.weight": torch.ones(1, 16)}
    folder = save_adapter(tmp_path / "adapter", adapter_of(model), spec, head=head)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(tensors: dict[str, torch.Tensor], path: Path, **kwargs: object) -> None:
        if "head.weight" in tensors:
            raise KeyboardInterrupt
        save_file(tensors, path, **kwargs)

    monkeypatch.setattr("plait.posttrain.lora.save_file", fail)
    changed = {name: tensor + 1 for name, tensor in adapter_of(model).items()}
    with pytest.raises(KeyboardInterrupt):
        save_adapter(folder, changed, spec, head={"head.weight": torch.zeros(1, 16)})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_adapter_that_is_empty_damaged_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    spec, model = AdapterSpec(4, 8.0), with_adapters(GPT, AdapterSpec(4, 8.0))
    with refused(CheckpointError, tmp_path / "hollow", "empty"):
        save_adapter(tmp_path / "hollow", {}, spec)
    with refused(CheckpointError, str(tmp_path / "empty"), "adapter_config.json"):
        read_adapter(tmp_path / "empty")
    folder = save_adapter(tmp_path / "good", adapter_of(model), spec)
    assert set(read_adapter(folder).layers) == set(lora_layers(model))
    with refused(ModelError, str(folder), "blocks.0."):
        read_adapter(folder, make(GPT2))
    other = with_adapters(GPT, AdapterSpec(2, 8.0), ("q", "v"))
    with refused(ModelError, str(folder), "attention.k"):
        read_adapter(folder).check(other)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    with refused(CheckpointError, str(weights), "incomplete metadata"):
        read_adapter(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with refused(CheckpointError, str(folder), "use_dora True"):
        read_adapter(folder)


@pytest.mark.parametrize(("kind", "worst", "bits"), [("int8", 0.01, 8.5), ("nf4", 0.16, 4.5)])
def test_packed_matrices_are_small_and_near_the_whole_ones(kind: Any, worst: float, bits: float) -> None:
    weight = torch.randn(48, 100)
    codes, scales = pack(weight, kind)
    assert (codes.nbytes + scales.nbytes) * 8 / weight.numel() == pytest.approx(bits, abs=0.05)
    again = unpack(codes, scales, kind, weight.shape, torch.float32)
    assert float((again - weight).abs().max()) <= worst * float(weight.abs().max())
    assert torch.equal(unpack(*pack(again, kind), kind, weight.shape, torch.float32), again)
    assert torch.equal(unpack(*pack(weight * 0, kind), kind, weight.shape, torch.float32), weight * 0)


@pytest.mark.parametrize("section", [GPT, GPT2], ids=["linear", "conv1d"])
def test_a_packed_model_computes_and_differentiates_as_its_unpacked_matrices(section: dict[str, Any]) -> None:
    packed, ids = with_adapters(section, AdapterSpec(4, 8.0)), tokens()
    plain = make(section)
    layers = lora_layers(packed)
    attach(plain, AdapterSpec(4, 8.0), ("linear",))
    plain.load_state_dict(packed.state_dict())
    quantize(packed, layers, "nf4")
    with torch.no_grad():
        for name in layers:
            layer, module = packed.get_submodule(name), plain.get_submodule(name)
            assert isinstance(layer, Quantized)
            whole = layer.unpacked(torch.float32)
            module.get_parameter("weight").copy_(whole.t() if section is GPT2 else whole)
    losses = [model(input_ids=ids[:, :-1], labels=ids[:, 1:]).mean() for model in (packed, plain)]
    assert torch.allclose(*losses, atol=1e-5)
    for loss in losses:
        loss.backward()
    for name in layers:
        found, expected = (model.get_parameter(f"{name}.lora_A.weight").grad for model in (packed, plain))
        assert found is not None
        assert expected is not None
        assert torch.allclose(found, expected, atol=1e-4)
    with refused(ModelError, "8 bits"):
        merge(packed)
