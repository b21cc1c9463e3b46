"""Real ColossalAI behind Plait's interface does what the native engine does, and shares its checkpoints.

Runs where ColossalAI can be imported (docs/engines.md has the versions), on the CPU through `colossal_shim`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.config import check, parse_sections
from plait.config.engines import check_library
from plait.data import MicroBatch
from plait.distributed import open_world
from plait.engine import Preparation, prepare_engine
from plait.errors import PlaitError
from tests.multi.nets import DIM, Net
from tests.multi.parity import Trace, assert_same
from tests.multi.ranks import RankPool
from tests.multi.toys import Outcome, assert_close, fit_with

ACCUMULATION = 2


def _reason() -> str | None:
    try:
        check_library("colossalai")
    except PlaitError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(_reason() is not None, reason=_reason() or "")


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Ranks of their own: the library changes the processes it is loaded into."""
    pool = RankPool(2, timeout_s=240.0, lasting=True)
    yield pool
    pool.close()


def ca(plugin: str, **options: Any) -> dict[str, Any]:
    return {"engine": "colossalai", "plugin": plugin, "config": options}


def batches(seed: int) -> list[list[Any]]:
    """For each step, micro-batches of all ranks with very different weights."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            (
                torch.randn(4, DIM, generator=generator),
                torch.randn(4, generator=generator),
                torch.rand(4, generator=generator) * torch.rand((), generator=generator),
            )
            for _ in range(2 * ACCUMULATION)
        ]
        for _ in range(4)
    ]


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def train(
    rank: int, size: int, strategies: list[Any], sections: dict[str, Any], steps: list[Any], accumulation: int
) -> list[Trace]:
    from tests.multi.colossal_shim import pretend_colossalai_has_a_device

    pretend_colossalai_has_a_device()
    found = []
    for strategy in strategies:
        given = {"seed": 3, "optim": {"type": "AdamW", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}, **sections}
        config = parse_sections(strategy=strategy, **given).config
        check(config, has_val=False, require_length=False)
        engine = prepare_engine(Preparation(config, open_world(config), model=net, accumulation=accumulation))
        trace = Trace([], [], [], {})
        for step in steps:
            result = engine.train_step([MicroBatch(batch, 4) for batch in step[rank::size]])
            trace.losses.append(result.loss)
            trace.norms.append(result.grad_norm)
            trace.skipped.append(result.skipped)
        for name, tensor in engine.state_tensors().items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            trace.tensors[name] = whole.detach().clone()
        found.append(trace)
    return found


def test_losses_norms_and_all_state_are_the_native_ones_in_fp32(ranks: RankPool) -> None:
    strategies = ["zero2", ca("torch_ddp"), ca("low_level_zero"), ca("low_level_zero", stage=2), ca("hybrid")]
    strategies.append(ca("torch_fsdp"))
    expected, *others = ranks.run(train, strategies, {"train": {"clip_norm": 0.6}}, batches(1), ACCUMULATION)[0]
    for found in others:
        assert_same(found, expected, tolerance=2e-5)


def test_bf16_agrees_within_its_rounding(ranks: RankPool) -> None:
    strategies = ["zero2", ca("torch_ddp"), ca("low_level_zero"), ca("low_level_zero", stage=2), ca("hybrid")]
    strategies += [ca("hybrid", zero_stage=1), ca("hybrid", zero_stage=2), ca("torch_fsdp")]
    expected, *others = ranks.run(train, strategies, {"precision": "bf16"}, batches(2), ACCUMULATION)[0]
    for found in others:
        assert_same(found, expected, tolerance=0.08, by_norm=True)


def test_gemini_divides_each_step_by_its_own_weights(ranks: RankPool) -> None:
    steps = [step[:2] for step in batches(3)]  # it takes one micro-batch a step
    expected, found = ranks.run(train, ["zero2", ca("gemini")], {"precision": "bf16"}, steps, 1)[0]
    assert_same(found, expected, tolerance=0.08, by_norm=True)


def fit_pretended(rank: int, size: int, sections: dict[str, Any], options: dict[str, Any]) -> Outcome:
    from tests.multi.colossal_shim import pretend_colossalai_has_a_device

    pretend_colossalai_has_a_device()
    return fit_with(rank, size, sections, options)


@pytest.mark.parametrize(
    "strategies",
    [
        [ca("low_level_zero"), "zero3", ca("torch_fsdp")],
        ["ddp", ca("torch_ddp"), ca("hybrid")],
        [ca("torch_fsdp"), ca("low_level_zero", stage=2), "zero2"],
    ],
    ids=["zero1-native3-fsdp", "native0-ddp-hybrid", "fsdp-zero2-native2"],
)
def test_a_checkpoint_goes_from_engine_to_engine_and_back(
    ranks: RankPool, tmp_path: Path, strategies: list[Any]
) -> None:
    sections = {"hooks": [{"type": "ema", "decay": 0.8}], "train": {"max_epochs": 2, "clip_norm": 0.4}}
    whole = ranks.run(
        fit_pretended, {**sections, "strategy": "zero2", "work_dir": str(tmp_path / "w")}, {"validation": 5}
    )[0]
    losses: list[float] = []
    for index, strategy in enumerate(strategies):
        last = index == len(strategies) - 1
        place = {"work_dir": str(tmp_path / "parts"), "checkpoint": {"resume": "auto"} if index else {}}
        stop = {} if last else {"stop_at": 3 * index + 3}
        outcome = ranks.run(fit_pretended, {**sections, "strategy": strategy, **place}, {"validation": 5} | stop)[0]
        losses += outcome.losses
    assert losses == pytest.approx(whole.losses, rel=1e-5)
    assert outcome.metrics[-1] == pytest.approx(whole.metrics[-1], rel=1e-5)
    assert_close(outcome, whole, tolerance=1e-4)
