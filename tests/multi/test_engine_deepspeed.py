"""Real DeepSpeed behind Plait's interface does what the native engine does, and shares its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config import check, parse_sections
from plait.data import MicroBatch
from plait.distributed import open_world
from plait.engine import Preparation, prepare_engine
from plait.models import LossTerm
from tests.multi.parity import STEPS, Trace, assert_same
from tests.multi.ranks import RankPool
from tests.multi.toys import Outcome, assert_close, fit_with

pytest.importorskip("deepspeed", reason="the extra plait[deepspeed] is not installed")

VOCABULARY, WIDTH, LENGTH = 11, 6, 5
ACCUMULATION = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Ranks of their own: the library changes the processes it is loaded into."""
    pool = RankPool(2, timeout_s=240.0, lasting=True)
    yield pool
    pool.close()


class Tangle(nn.Module):
    """Head and embedding are one tensor, positions are frozen, a batch norm keeps statistics, and sizes are odd."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH), requires_grad=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1, bias=False)
        self.norm = nn.BatchNorm1d(2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)
        self.gate = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> LossTerm:
        x = self.embedding(tokens) + self.positions
        hidden = self.norm(self.up(x).flatten(0, 1)).tanh().unflatten(0, tokens.shape)
        logits = self.head(x + self.gate * self.down(hidden)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return LossTerm(loss, (labels != -100).sum())


def tangle() -> Tangle:
    torch.manual_seed(5)
    return Tangle()


def batches(seed: int, *, hot: bool = False) -> list[list[dict[str, Tensor]]]:
    """For each step, the micro-batches of all ranks, with very different numbers of targets."""
    generator = torch.Generator().manual_seed(seed)
    steps = []
    for _ in range(STEPS * (2 if hot else 1)):
        step = []
        for _ in range(2 * ACCUMULATION):
            tokens = torch.randint(0, VOCABULARY, (3, LENGTH), generator=generator)
            labels = torch.randint(0, VOCABULARY, (3, LENGTH), generator=generator)
            labels[torch.rand(labels.shape, generator=generator) < torch.rand((), generator=generator) * 0.9] = -100
            step.append({"tokens": tokens, "labels": labels})
        steps.append(step)
    return steps


def train(
    rank: int, size: int, strategies: list[Any], sections: dict[str, Any], steps: list[list[Any]]
) -> list[tuple[Trace, list[Any]]]:
    """The same steps under each strategy; with the scale after every one of them."""
    found = []
    if sections["precision"].get("compute") == "fp16":
        _allow_fp16()
    for strategy in strategies:
        given = {"seed": 3, "optim": {"type": "AdamW", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}, **sections}
        config = parse_sections(strategy=strategy, **given).config
        check(config, has_val=False, require_length=False)
        said: list[str] = []
        engine = prepare_engine(
            Preparation(config, open_world(config), model=tangle, accumulation=ACCUMULATION, log=said.append)
        )
        trace, scales = Trace([], [], [], {}), []
        for step in steps:
            result = engine.train_step([MicroBatch(batch, 3) for batch in step[rank::size]])
            trace.losses.append(result.loss)
            trace.norms.append(result.grad_norm if not result.skipped else -1.0)
            trace.skipped.append(result.skipped)
            scales.append((engine.state()["scaler"] or {}).get("scale"))
        engine.sync_buffers()
        for name, tensor in engine.state_tensors().items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            trace.tensors[name] = whole.detach().clone() if whole.is_floating_point() else whole.double()
        assert said == [], said
        found.append((trace, scales))
    return found


def _allow_fp16() -> None:
    """DeepSpeed refuses fp16 on CPUs without instructions for it; torch only computes more slowly."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True


def ds(stage: int, **zero: Any) -> dict[str, Any]:
    return {"engine": "deepspeed", "config": {"zero_optimization": {"stage": stage, **zero}}}


CPU = {"device": "cpu"}


def test_losses_norms_and_all_state_are_the_native_ones_in_fp32(ranks: RankPool) -> None:
    strategies = [
        *("zero1", "zero2", "zero3"),
        *(ds(3), ds(0), ds(1), ds(2)),  # the first one meets a library that nobody has used yet
        ds(3, stage3_param_persistence_threshold=0),
        ds(2, offload_optimizer=CPU),
        ds(3, offload_optimizer=CPU, offload_param=CPU),
        {**ds(3), "recompute": "full", "wrap": {"names": ["down"]}},
    ]
    sections = {"precision": {}, "train": {"clip_norm": 0.6}}
    (expected, _), *others = ranks.run(train, strategies, sections, batches(1))[0]
    for found, _ in others:
        assert_same(found, expected, tolerance=2e-5)


def test_bf16_rounds_where_the_native_engine_does(ranks: RankPool) -> None:
    strategies = ["zero2", ds(1), ds(2), ds(3), ds(1, offload_optimizer=CPU)]
    sections = {"precision": {"compute": "bf16"}}
    (expected, _), *others = ranks.run(train, strategies, sections, batches(2))[0]
    for found, _ in others:
        assert_same(found, expected, tolerance=0.06, by_norm=True)


def test_bf16_without_zero_adds_up_in_bf16(ranks: RankPool) -> None:
    sections = {"precision": {"compute": "bf16", "reduce": "bf16"}}
    (expected, _), (found, _) = ranks.run(train, ["ddp", ds(0)], sections, batches(3))[0]
    assert_same(found, expected, tolerance=0.06, by_norm=True)


def test_fp16_has_the_same_scale_history(ranks: RankPool) -> None:
    scaler = {"initial_power": 19, "window": 2, "hysteresis": 2}
    sections = {"precision": {"compute": "fp16", "scaler": scaler}}
    (expected, scales), *others = ranks.run(train, ["zero2", ds(1), ds(2), ds(3)], sections, batches(4, hot=True))[0]
    assert any(expected.skipped)
    assert not all(expected.skipped)
    for found, theirs in others:
        assert theirs == scales
        assert_same(found, expected, tolerance=0.02, by_norm=True)


def continued(
    ranks: RankPool, work_dir: Path, strategies: list[Any], sections: dict[str, Any]
) -> tuple[Outcome, list[float]]:
    """One run in parts of three steps, each under another strategy and from the checkpoint of the one before."""
    losses: list[float] = []
    for index, strategy in enumerate(strategies):
        last = index == len(strategies) - 1
        checkpoint = {"resume": "auto"} if index else {}
        given = {**sections, "strategy": strategy, "work_dir": str(work_dir), "checkpoint": checkpoint}
        outcome: Outcome = ranks.run(fit_with, given, {"validation": 5} | ({} if last else {"stop_at": 3 * index + 3}))[
            0
        ]
        losses += outcome.losses
    return outcome, losses


@pytest.mark.parametrize(
    "strategies",
    [
        [ds(2), "zero3", ds(3)],
        ["ddp", ds(3, stage3_param_persistence_threshold=0), ds(1, offload_optimizer=CPU), ds(0)],
    ],
    ids=["2-native3-3", "native0-3-1-0"],
)
def test_a_checkpoint_goes_from_engine_to_engine_and_back(
    ranks: RankPool, tmp_path: Path, strategies: list[Any]
) -> None:
    sections = {"hooks": [{"type": "ema", "decay": 0.8}], "train": {"max_epochs": 2, "clip_norm": 0.4}}
    whole = ranks.run(fit_with, {**sections, "strategy": "zero2", "work_dir": str(tmp_path / "w")}, {"validation": 5})[
        0
    ]
    outcome, losses = continued(ranks, tmp_path / "parts", strategies, sections)
    assert losses == pytest.approx(whole.losses, rel=1e-5)
    assert outcome.metrics[-1] == pytest.approx(whole.metrics[-1], rel=1e-5)
    assert_close(outcome, whole, tolerance=1e-4)


def skip_a_bad_step(rank: int, size: int, stages: list[int]) -> list[tuple[list[bool], bool]]:
    found = []
    for stage in stages:
        config = parse_sections(strategy=ds(stage), seed=1).config
        engine = prepare_engine(
            Preparation(
                config,
                open_world(config),
                model=lambda: nn.Sequential(nn.Linear(3, 1)),
                loss_function=_square,
                log=_mute,
            )
        )
        skipped = []
        for step in range(3):
            x = torch.full((2, 3), float("inf") if step == 1 and rank == 1 else 1.0)
            skipped.append(engine.train_step([(x, x.sum(1))]).skipped)  # a row of layers takes the first part
        weights = engine.weights()
        found.append((skipped, all(bool(w.isfinite().all()) for w in weights.values())))
    return found


def _square(outputs: Tensor, inputs: Any) -> Tensor:
    return outputs.square().mean()


def _mute(text: str) -> None:
    assert "finite" in text


def test_a_step_that_is_not_finite_is_skipped_on_every_rank(ranks: RankPool) -> None:
    for skipped, finite in ranks.run(skip_a_bad_step, [0, 1, 2, 3])[0]:
        assert skipped == [False, True, False]
        assert finite
