"""Training with products in 8 bits: which layers, how close to bf16, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.refusals import refused

from plait.config import check, parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare, prepare_native
from plait.errors import ConfigError, ModelError, PlaitError
from plait.precision.fp8 import Fp8Linear

LLAMA = {"type": "llama", "vocab_size": 64, "dim": 32, "layers": 2, "heads": 4, "ffn_dim": 64, "seq_len": 32}
EARLIER = {"scales": "earlier", "history": 3}


def losses_of(precision: Any, steps: int = 30, **strategy: Any) -> tuple[list[float], Any]:
    """Learning a rule that gives each token by the two before it."""
    config = parse_sections(
        model=LLAMA, precision=precision, strategy=strategy, optim={"type": "AdamW", "lr": 5e-3}, device="cpu", seed=1
    ).config
    engine: Any = prepare_native(Preparation(config, open_world(config), log=lambda _text: None))
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        rows = torch.randint(0, 64, (8, 33), generator=generator)
        for at in range(2, 33):
            rows[:, at] = (rows[:, at - 1] + 3 * rows[:, at - 2] + 1) % 7
        losses.append(engine.train_step([{"input_ids": rows[:, :-1], "labels": rows[:, 1:]}]).loss)
    return losses, engine.model


@pytest.mark.parametrize("fp8", [{"recipe": "tensorwise"}, {"recipe": "rowwise"}, EARLIER, {"head": True}], ids=str)
def test_it_learns_as_bf16_does(fp8: dict[str, Any]) -> None:
    plain, _ = losses_of("bf16")
    small, model = losses_of({"fp8": {**fp8, "emulate": True}})
    assert plain[-1] < 0.7 * plain[0]
    assert small != plain
    assert small == pytest.approx(plain, rel=0.05)
    assert sum(isinstance(module, Fp8Linear) for module in model.modules()) == 2 * 7
    assert type(model.head) is not Fp8Linear


def test_compiled_and_recomputed_it_is_the_same() -> None:
    fp8 = {"fp8": {"emulate": True, "head": True}}
    plain, _ = losses_of(fp8, 3)
    assert losses_of(fp8, 3, recompute="full")[0] == plain
    # The compiler keeps more digits between operations.
    losses, model = losses_of(fp8, 3, compile={"backend": "aot_eager"})
    assert losses == pytest.approx(plain, rel=1e-3)
    # Equal blocks are compiled once; the whole model would take minutes.
    assert [m for m in model.modules() if m._compiled_call_impl is not None] == list(model.blocks)


def test_layers_are_chosen_by_name_and_size() -> None:
    _, model = losses_of({"fp8": {"emulate": True, "modules": ["blocks.*.ffn.*"], "skip": ["*.down"]}}, 1)
    found = {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    assert found == {f"blocks.{layer}.ffn.{part}" for layer in (0, 1) for part in ("gate", "up")}


def test_a_head_in_8_bits_changes_gradients_only() -> None:
    runs = [losses_of({"fp8": {"emulate": True, "head": head}}, 3) for head in (False, True)]
    (plain, wide), (small, model) = runs
    assert small[0] == pytest.approx(plain[0], rel=1e-6)
    assert small[1:] != plain[1:]
    assert small == pytest.approx(plain, rel=0.01)
    assert model.state_dict().keys() == wide.state_dict().keys()


def test_without_a_fitting_layer_or_device_it_is_refused() -> None:
    with refused(ModelError, "precision.fp8", "14", "16", "`modules`"):
        losses_of({"fp8": {"emulate": True, "modules": ["nothing"]}}, 1)
    with refused(ConfigError, "cpu", "`precision.fp8.emulate: true`", key="precision.fp8"):
        losses_of("fp8", 1)


def test_a_phase_that_wants_logits_has_no_use_for_a_head_in_8_bits() -> None:
    for phase in ("sft", "dpo"):
        rows = {"data": [{"type": "task"}]}
        config = parse_sections(model=LLAMA, precision={"fp8": {"head": True}}, phase=phase, posttrain=rows).config
        with refused(ConfigError, "dpo", key="precision.fp8.head") if phase == "dpo" else nullcontext():
            check(config, has_val=False, require_length=False)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"precision": {"compute": "fp16", "fp8": "rowwise"}}, ["precision.fp8:", "fp16", "`precision.compute: bf16`"]),
        (
            {"precision": {"fp8": {"recipe": "none", "emulate": True}}},
            ["precision.fp8.emulate: true", "`precision.fp8.recipe`", "none"],
        ),
        (
            {"precision": {"fp8": {"recipe": "none", "head": True}}},
            ["precision.fp8.head: true", "`precision.fp8.recipe`", "none"],
        ),
        ({"precision": {"fp8": {"head": True, "emulate": True}}}, ["precision.fp8.head", "Linear"]),
        (
            {"precision": {"fp8": {"history": 4}}},
            ["precision.fp8.history: 4", "now", "`precision.fp8.scales: earlier`"],
        ),
        (
            {"precision": {"fp8": {"recipe": "rowwise", "scales": "earlier"}}},
            ["precision.fp8.scales", "rowwise", "`precision.fp8.recipe: tensorwise`"],
        ),
        (
            {"precision": {"fp8": EARLIER}, "strategy": {"compile": True}},
            ["precision.fp8.scales", "`strategy.compile`", "`now`"],
        ),
        ({"precision": "fp8", "strategy": {"layout": {"tp": 2}}}, ["precision.fp8:", "`strategy.layout.tp: 1`"]),
        (
            {"precision": "fp8", "strategy": {"engine": "deepspeed"}},
            ["precision.fp8.recipe: 'tensorwise'", "deepspeed", "`engine: native`"],
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_refused(sections: dict[str, Any], named: list[str]) -> None:
    with refused(PlaitError, *named):
        prepare(torch.nn.Linear(16, 16), device="cpu", **sections)
