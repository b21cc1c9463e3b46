"""How much memory activations take, counted without taking any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.config import parse_sections
from plait.distributed.activation_checkpointing import Activations, count_activations
from plait.distributed.wrap import find_wrap_units
from plait.models import build_model

LLAMA = {
    "type": "llama",
    "vocab_size": 97,
    "dim": 32,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 128,
    "seq_len": 32,
}


def example(rows: int = 2, tokens: int = 32) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 97, (rows, tokens)), "labels": torch.randint(0, 97, (rows, tokens))}


def built(config: Any, device: str = "meta") -> nn.Module:
    with torch.device(device):
        return build_model(config.model)


def counted(config: Any, model: nn.Module, batch: Any) -> Activations:
    return count_activations(model, find_wrap_units(model, config.strategy.wrap), batch, config)


def total(found: Activations) -> int:
    return sum(unit.saved for unit in found.units) + found.outside


def measured(model: nn.Module, batch: Any) -> int:
    """What a real forward pass keeps for its backward pass, without the weights."""
    weights = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(**batch)
    assert loss is not None
    return sum(kept.values())


@pytest.mark.parametrize(("rows", "tokens"), [(1, 32), (3, 16)])
def test_what_is_counted_without_memory_is_what_a_real_pass_keeps(rows: int, tokens: int) -> None:
    config = parse_sections(model=LLAMA).config
    batch = example(rows, tokens)
    model = built(config)
    found = counted(config, model, batch)
    truth = measured(built(config, "cpu"), batch)
    kept = [unit.saved for unit in found.units]
    assert len(kept) == 4
    assert len(set(kept[1:])) == 1  # the blocks are alike; the first meets what they share
    assert kept[0] < 1.05 * kept[1]
    assert abs(total(found) - truth) <= 0.1 * truth
    assert all(p.is_meta for p in model.parameters())


def test_a_transformers_model_is_counted_too() -> None:
    pytest.importorskip("transformers")
    from plait.models import preset

    config = parse_sections(model=preset("hf", "tiny-llama")).config
    batch = example(2, 16)
    truth = measured(built(config, "cpu"), batch)
    assert abs(total(counted(config, built(config), batch)) - truth) <= 0.15 * truth


def test_a_mixture_of_transformers_is_counted_in_fp32_too() -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    mixture = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 97}
    model = {"type": "hf", "config": {"model_type": "mixtral", **sizes, **mixture}}
    config = parse_sections(model=model).config
    batch = example(2, 16)
    truth = measured(built(config, "cpu"), batch)
    assert abs(total(counted(config, built(config), batch)) - truth) <= 0.15 * truth


def test_in_a_smaller_format_activations_are_smaller() -> None:
    totals = {}
    for precision in ("fp32", "bf16"):
        config = parse_sections(model=LLAMA, precision=precision).config
        totals[precision] = sum(unit.saved for unit in counted(config, built(config), example()).units)
    assert 0.4 < totals["bf16"] / totals["fp32"] < 0.8


def test_products_and_attention_are_counted_by_what_they_give_and_what_they_take() -> None:
    config = parse_sections(model=LLAMA).config
    rows, tokens, dim, wide = 3, 16, 32, 128
    found = counted(config, built(config), example(rows, tokens)).units[1]
    places = rows * tokens
    results = (
        dim + 2 * dim // 2 + dim + 2 * wide + dim
    )  # queries; keys and values; attention's output; the three of ffn
    assert found.inputs == 4 * places * dim
    assert found.products == 4 * places * results
    weights = dim * dim + 2 * dim * dim // 2 + dim * dim + 3 * dim * wide
    assert found.product_flops == 2 * places * weights
    assert found.trained_params == weights + 2 * dim
    assert found.attention >= 4 * places * dim
    assert found.attention_flops == 4 * places * dim * tokens
    assert found.inputs + found.products + found.attention < found.saved


def test_counting_leaves_no_trace_on_the_model() -> None:
    config = parse_sections(model=LLAMA).config
    model = built(config, "cpu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    counted(config, model, example())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_module_with_two_names_has_its_weights_back() -> None:
    config = parse_sections(device="cpu").config
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Linear(4, 4), layer)
    before = dict(model.named_parameters(remove_duplicate=False))
    count_activations(model, [], torch.randn(2, 4), config)
    for name, param in model.named_parameters(remove_duplicate=False):
        assert param is before[name], name
