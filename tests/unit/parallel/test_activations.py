"""How much memory activations take, and how many blocks must recompute for it to fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.config import parse_sections
from plait.errors import ConfigError
from plait.models import build_model
from plait.parallel.activations import activation_bytes, units_to_recompute
from plait.parallel.units import find_units
from plait.world import open_world

LLAMA = {"type": "llama", "vocab_size": 97, "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "seq_len": 32}
MIB = 2**20


def example(rows: int = 2, tokens: int = 32) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 97, (rows, tokens)), "labels": torch.randint(0, 97, (rows, tokens))}


def built(config: Any, device: str = "meta") -> nn.Module:
    with torch.device(device):
        return build_model(config.model)


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
    inside, outside = activation_bytes(model, find_units(model, config.strategy.wrap), batch, config)
    truth = measured(built(config, "cpu"), batch)
    assert len(inside) == 4
    assert len(set(inside[1:])) == 1  # the blocks are alike; the first meets what they share
    assert inside[0] < 1.05 * inside[1]
    assert abs(sum(inside) + outside - truth) <= 0.1 * truth
    assert all(p.is_meta for p in model.parameters())


def test_a_transformers_model_is_counted_too() -> None:
    pytest.importorskip("transformers")
    from plait.models import preset

    config = parse_sections(model=preset("hf", "tiny-llama")).config
    batch = example(2, 16)
    model = built(config)
    inside, outside = activation_bytes(model, find_units(model, config.strategy.wrap), batch, config)
    truth = measured(built(config, "cpu"), batch)
    assert abs(sum(inside) + outside - truth) <= 0.15 * truth


def test_in_a_smaller_format_activations_are_smaller() -> None:
    totals = {}
    for precision in ("fp32", "bf16"):
        config = parse_sections(model=LLAMA, precision=precision).config
        model = built(config)
        inside, _ = activation_bytes(model, find_units(model, config.strategy.wrap), example(), config)
        totals[precision] = sum(inside)
    assert 0.4 < totals["bf16"] / totals["fp32"] < 0.8


def test_counting_leaves_no_trace_on_the_model() -> None:
    config = parse_sections(model=LLAMA).config
    model = built(config, "cpu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    activation_bytes(model, find_units(model, config.strategy.wrap), example(), config)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def chosen(budget_gib: float, rows: int = 4) -> int:
    recompute = {"mode": "auto", "budget_gib": budget_gib}
    config = parse_sections(model=LLAMA, strategy={"recompute": recompute}, device="cpu").config
    model = built(config)
    units = find_units(model, config.strategy.wrap)
    return units_to_recompute(model, units, example(rows), config=config, world=open_world(config))


def test_a_huge_budget_recomputes_nothing_and_a_tiny_one_everything() -> None:
    assert chosen(64.0) == 0
    assert chosen(1e-6) == 4


def test_the_smaller_the_budget_the_more_blocks_recompute() -> None:
    counts = [chosen(mib / 1024) for mib in (64, 8, 4, 3, 2, 1)]
    assert sorted(counts) == counts
    assert len(set(counts)) >= 3


def test_larger_batches_recompute_more_under_the_same_budget() -> None:
    counts = [chosen(3 / 1024, rows) for rows in (1, 4, 16)]
    assert sorted(counts) == counts
    assert counts[0] < counts[-1]


def test_without_an_example_auto_asks_for_one() -> None:
    config = parse_sections(model=LLAMA, strategy={"recompute": "auto"}, device="cpu").config
    model = built(config)
    units = find_units(model, config.strategy.wrap)
    with pytest.raises(ConfigError, match=r"strategy\.recompute\.mode: 'auto' needs one micro-batch") as caught:
        units_to_recompute(model, units, None, config=config, world=open_world(config))
    assert "example=" in str(caught.value)


def test_without_a_budget_it_is_what_the_machine_has_free() -> None:
    config = parse_sections(model=LLAMA, strategy={"recompute": "auto"}, device="cpu").config
    model = built(config)
    units = find_units(model, config.strategy.wrap)
    assert units_to_recompute(model, units, example(), config=config, world=open_world(config)) == 0
