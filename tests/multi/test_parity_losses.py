"""Promise 1 for whatever a model does with its parameters, and whatever it returns."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import Tensor

from plait.config import parse_sections
from plait.data import MicroBatch
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from tests.multi import nets
from tests.multi.parity import Trace, assert_same, run_steps
from tests.multi.ranks import RankPool

STAGES: dict[str, dict[str, Any]] = {"ddp": {}, "zero1": {"zero": 1}, "zero2": {"zero": 2}, "zero3": {"zero": 3}}
TOLERANCE = 1e-5
CLOSE_16 = 3e-2
"""Where fp32 sums differ in their last bit, a 16-bit weight may be rounded to its neighbour."""


def steps_of(micro_batches: int, *, steps: int = 3, seed: int = 0) -> list[list[MicroBatch]]:
    """Micro-batches of 1, 2, 3, 1, … rows."""
    found = []
    for step in range(steps):
        sizes = [1 + (step + index) % 3 for index in range(micro_batches)]
        found.append([MicroBatch(nets.rows(seed + 100 * step + index, size), size) for index, size in enumerate(sizes)])
    return found


def compare(
    pool: RankPool,
    strategy: dict[str, Any],
    steps: list[list[Any]],
    model: Any,
    *,
    loss_fn: Any = None,
    tolerance: float = TOLERANCE,
    **sections: Any,
) -> None:
    expected = run_steps(0, 1, sections, steps, model, loss_fn)
    for found in pool.run(run_steps, {**sections, "strategy": strategy}, steps, model, loss_fn):
        assert_same(found, expected, tolerance=tolerance)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("model", "loss_fn"),
    [
        (nets.Net, None),
        (nets.MeanNet, None),
        (nets.DictNet, None),
        (nets.BareNet, nets.squared_error),
        (nets.BareNet, nets.weighted_error),
    ],
    ids=["loss-term", "mean", "mapping", "loss_fn-mean", "loss_fn-term"],
)
def test_every_kind_of_loss_is_averaged_over_all_samples(
    two_ranks: RankPool, stage: str, model: Any, loss_fn: Any
) -> None:
    compare(two_ranks, STAGES[stage], steps_of(4), model, loss_fn=loss_fn)


def run_without_warnings(rank: int, size: int, *args: Any) -> Trace:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*returned a view")
        return run_steps(rank, size, *args)


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_what_a_unit_returns_may_be_changed_in_place(two_ranks: RankPool, stage: str) -> None:
    expected = run_steps(0, 1, {}, steps_of(4), nets.AddingNet)
    for found in two_ranks.run(run_without_warnings, {"strategy": STAGES[stage]}, steps_of(4), nets.AddingNet):
        assert_same(found, expected, tolerance=TOLERANCE)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_stay_and_the_rest_trains_alike(two_ranks: RankPool, stage: str, precision: str) -> None:
    tolerance = TOLERANCE if precision == "fp32" else CLOSE_16
    compare(two_ranks, STAGES[stage], steps_of(4), nets.LoraNet, precision=precision, tolerance=tolerance)


@pytest.mark.parametrize("offload", [{}, {"optimizer": "cpu"}, {"optimizer": "cpu", "params": "cpu"}], ids=str)
@pytest.mark.parametrize("model", [nets.RepeatNet, nets.ShareNet, nets.LentNet])
def test_what_is_called_twice_gets_both_gradients(two_ranks: RankPool, model: Any, offload: dict[str, Any]) -> None:
    compare(
        two_ranks,
        {"zero": 3, "offload": {**offload, "persistent_params": 0} if "params" in offload else offload},
        steps_of(4),
        model,
    )


def sometimes(steps: list[list[MicroBatch]], places: set[int]) -> list[list[MicroBatch]]:
    """The same steps; the micro-batches at these places take the branch."""
    return [
        [MicroBatch({**b.inputs, "sideways": index in places}, b.samples) for index, b in enumerate(step)]
        for step in steps
    ]


@pytest.mark.parametrize("places", [{1, 3}, {3}, {0}, set()], ids=["rank1", "rank1-last", "rank0-first", "nobody"])
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_only_some_ranks_use(two_ranks: RankPool, stage: str, places: set[int]) -> None:
    """Rank r takes the places r and r + 2: the branches are used on one rank only, or in one micro-batch only."""
    for model in (nets.SometimesNet, nets.SometimesInsideNet):
        compare(two_ranks, STAGES[stage], sometimes(steps_of(4), places), model)


@pytest.mark.parametrize("precision", ["bf16", {"reduce": "bf16"}], ids=["bf16", "summed-in-bf16"])
@pytest.mark.parametrize("places", [{3}, {0}, set()], ids=["rank1-last", "rank0-first", "nobody"])
@pytest.mark.parametrize("stage", STAGES)
def test_they_have_the_format_of_the_others(
    two_ranks: RankPool, stage: str, places: set[int], precision: str | dict[str, str]
) -> None:
    """Summed over micro-batches in one format, while those of the last one are in the other."""
    steps = sometimes(steps_of(4), places)
    compare(two_ranks, STAGES[stage], steps, nets.SometimesInsideNet, precision=precision, tolerance=CLOSE_16)


def as_before_2_13(rank: int, size: int, *arguments: Any) -> Trace:
    """Run on a torch that cannot be told to reduce what was not used."""
    from torch.distributed.fsdp import FSDPModule

    name = "set_reduce_scatter_unused_params"
    setter = FSDPModule.__dict__.get(name)
    if setter is not None:
        delattr(FSDPModule, name)
    try:
        return run_steps(rank, size, *arguments)
    finally:
        if setter is not None:
            setattr(FSDPModule, name, setter)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_parameters_that_only_some_ranks_use_on_an_older_torch(two_ranks: RankPool, stage: str) -> None:
    for model, places in ((nets.SometimesNet, {1, 3}), (nets.SometimesInsideNet, {3}), (nets.SometimesInsideNet, {0})):
        steps = sometimes(steps_of(4), places)
        expected = run_steps(0, 1, {}, steps, model)
        for found in two_ranks.run(as_before_2_13, {"strategy": STAGES[stage]}, steps, model):
            assert_same(found, expected, tolerance=TOLERANCE)


@pytest.mark.parametrize("stage", STAGES)
def test_fillers_count_for_nothing_and_keep_all_ranks_together(two_ranks: RankPool, stage: str) -> None:
    steps = steps_of(4)
    filled = []
    for step in steps:
        # Rank 1 runs out of data after its first micro-batch; in the last step it has none at all.
        filler = MicroBatch({name: 1e3 * value for name, value in step[0].inputs.items()}, 0)
        filled.append([*step[:3], filler])
    filled[-1][1] = filled[-1][3]
    real = [[b for b in step if b.samples] for step in filled]
    for model in (nets.Net, nets.MeanNet):
        expected = run_steps(0, 1, {}, real, model)
        for found in two_ranks.run(run_steps, {"strategy": STAGES[stage]}, filled, model):
            assert_same(found, expected, tolerance=TOLERANCE)


def own_loop(rank: int, size: int, sections: dict[str, Any], steps: list[list[MicroBatch]], accumulation: int) -> Any:
    """The same as `run_steps`, written the way people write their own loop."""
    sections = {"seed": 3, "optim": {"type": "AdamW", "lr": 1e-2, "eps": 0.1}, **sections}
    config = parse_sections(**sections).config
    engine = prepare_native(Preparation(config, open_world(config), model=nets.Net, accumulation=accumulation))
    results = []
    for step in steps:
        for batch in step[rank::size]:
            loss = engine(batch)
            engine.backward(loss)
            result = engine.step()
        assert result is not None
        results.append((result.loss, result.grad_norm))
    weights: dict[str, Tensor] = {
        n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in engine.state_tensors().items()
    }
    return results, {name: tensor.detach().clone() for name, tensor in weights.items()}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_loop_of_ones_own_equals_one_process(two_ranks: RankPool, stage: str, accumulation: int) -> None:
    steps = steps_of(2 * accumulation)
    sections: dict[str, Any] = {"train": {"clip_norm": 0.5}}
    expected = run_steps(0, 1, sections, steps, nets.Net)
    for results, weights in two_ranks.run(own_loop, {**sections, "strategy": STAGES[stage]}, steps, accumulation):
        found = type(expected)([r[0] for r in results], [r[1] for r in results], expected.skipped, weights)
        assert_same(found, expected, tolerance=TOLERANCE)


@pytest.mark.parametrize("stage", STAGES)
def test_clip_value_cuts_the_mean_over_all_ranks(two_ranks: RankPool, stage: str) -> None:
    compare(two_ranks, STAGES[stage], steps_of(4), nets.Net, train={"clip_value": 0.01})


@pytest.mark.parametrize("stage", STAGES)
def test_tied_parameters_get_the_gradients_of_all_their_users(two_ranks: RankPool, stage: str) -> None:
    compare(two_ranks, STAGES[stage], steps_of(4), nets.TiedNet)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_without_a_master_copy_train_alike(two_ranks: RankPool, stage: str) -> None:
    precision = {"compute": "bf16", "master": False}
    compare(two_ranks, STAGES[stage], steps_of(2), nets.Net, tolerance=CLOSE_16, precision=precision)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_summed_in_bf16_stay_close(two_ranks: RankPool, stage: str) -> None:
    sections: dict[str, Any] = {"optim": {"type": "SGD", "lr": 0.05}}
    expected = run_steps(0, 1, sections, steps_of(4), nets.Net)
    sections |= {"strategy": STAGES[stage], "precision": {"compute": "fp32", "reduce": "bf16"}}
    for found in two_ranks.run(run_steps, sections, steps_of(4), nets.Net):
        assert_same(found, expected, tolerance=CLOSE_16)
        assert found.norms != expected.norms  # it is no idle setting


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hybrid_layout_trains_frozen_unused_and_tied_parameters_too(four_ranks: RankPool, replicas: int) -> None:
    strategy = {"sharding": "HYBRID_SHARD", "layout": {"dp_replicate": replicas}}
    for model in (nets.LoraNet, nets.TiedNet):
        compare(four_ranks, strategy, steps_of(4), model)
    compare(four_ranks, strategy, sometimes(steps_of(4), {2}), nets.SometimesInsideNet)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "lion": {"type": "Lion", "lr": 1e-3},
    "sgd": {"type": "SGD", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "adagrad": {"type": "Adagrad", "lr": 0.02},
    "lamb": {"type": "Lamb", "lr": 0.01},
    "adafactor": {"type": "Adafactor", "lr": 0.01},
    "muon": {"type": "Muon", "lr": 0.02, "adam_lr": 0.01},
}


@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_every_optimizer_moves_shards_as_it_moves_wholes(two_ranks: RankPool, optim: str, stage: str) -> None:
    # Lion takes signs and Muon amplifies small directions: both need gradients that agree to the last bits.
    tolerance = {"lion": 1e-3, "muon": 1e-3}.get(optim, 1e-4)
    compare(two_ranks, STAGES[stage], steps_of(4), nets.Net, tolerance=tolerance, optim=OPTIMIZERS[optim])


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_may_go_backwards_while_it_goes_forwards(two_ranks: RankPool, stage: str, recompute: str) -> None:
    strategy = {**STAGES[stage], "recompute": recompute}
    compare(two_ranks, strategy, steps_of(4), nets.PenalizedNet)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_layer_that_nobody_calls(two_ranks: RankPool, stage: str, precision: str) -> None:
    tolerance = TOLERANCE if precision == "fp32" else CLOSE_16
    ahead = {"forward_prefetch": 1, "backward_prefetch": 1} if "zero" in stage else {}
    for strategy in (STAGES[stage], {**STAGES[stage], **ahead}):
        compare(two_ranks, strategy, steps_of(4), nets.SkippingNet, precision=precision, tolerance=tolerance)


def train_beside_evaluations(rank: int, size: int, strategy: dict[str, Any]) -> list[float]:
    """Steps, each after an evaluation with other weights."""
    config = parse_sections(strategy=strategy, seed=3, optim={"type": "SGD", "lr": 0.1}).config
    engine = prepare_native(Preparation(config, open_world(config), model=nets.SkippingNet))
    losses = []
    for step in steps_of(2):
        for factor in (0.5, 2.0):
            for part in engine.weights().values():
                part.mul_(factor)
            engine.weights_changed()
            if factor < 1.0:
                engine.evaluate_micro_batch(step[0])
        losses.append(engine.train_step(step[rank::size]).loss)
    return losses


def test_what_was_gathered_ahead_in_an_evaluation_is_not_trained_with(two_ranks: RankPool) -> None:
    """The layers come in another order than they stand in: at the end of a pass one is gathered that is not called."""
    alone = train_beside_evaluations(0, 1, {})
    for losses in two_ranks.run(train_beside_evaluations, {"zero": 3, "forward_prefetch": 1}):
        assert losses == pytest.approx(alone, rel=1e-5)
