"""Scales of earlier steps: what a step keeps, who may look at it, and how a run goes on with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from plait.kernels.fp8 import GRADIENT, INPUT, WEIGHT
from plait.precision import AmaxHistory

LLAMA = {"type": "llama", "vocab_size": 32, "dim": 32, "layers": 1, "heads": 2, "ffn_dim": 48, "seq_len": 8}
Batch = dict[str, Tensor]


def engine_with(history: int, *, scales: str = "earlier", **strategy: Any) -> Any:
    fp8 = {"emulate": True, "scales": scales} | ({"history": history} if scales == "earlier" else {})
    config = parse_sections(
        model=LLAMA, precision={"fp8": fp8}, strategy=strategy, optim={"type": "AdamW", "lr": 0.01}, device="cpu"
    ).config
    return prepare_native(Preparation(config, open_world(config), log=lambda _text: None))


def batches(count: int) -> list[Batch]:
    rows = torch.randint(32, (count, 2, 9))
    return [{"input_ids": each[:, :-1], "labels": each[:, 1:].clone()} for each in rows]


def losses(engine: Any, steps: list[list[Batch]]) -> list[float]:
    return [engine.train_step(step).loss for step in steps]


def peaks(engine: Any) -> Tensor:
    """(layer, kind, step)"""
    return torch.tensor(list(engine.state()["fp8"]["peaks"].values()))


def test_the_first_steps_find_their_scales_at_once_and_the_later_ones_do_not() -> None:
    steps = [[batch] for batch in batches(6)]
    now, earlier = losses(engine_with(0, scales="now"), steps), losses(engine_with(2), steps)
    assert earlier[:2] == now[:2]
    assert earlier[2:] != now[2:]
    assert earlier == pytest.approx(now, rel=0.02)


def test_a_step_keeps_the_largest_numbers_of_its_micro_batches() -> None:
    pair = batches(2)
    found = []
    for step in (pair, pair[::-1], pair[:1], pair[1:]):
        engine = engine_with(3)
        engine.train_step(step)
        found.append(peaks(engine))
    both, turned, *alone = found
    assert both.shape == (7, 3, 1)
    assert torch.equal(both, turned)
    assert (both > 0).all()
    for kind in (INPUT, WEIGHT):
        assert torch.equal(both[:, kind], torch.maximum(*(each[:, kind] for each in alone)))
    assert not torch.equal(both[:, GRADIENT], alone[0][:, GRADIENT])


def test_recomputed_it_is_the_same() -> None:
    steps = [batches(2) for _ in range(4)]
    plain, again = engine_with(2), engine_with(2, recompute="full")
    assert losses(plain, steps) == losses(again, steps)
    assert plain.state() == again.state()


def test_evaluation_finds_its_scales_at_once_and_keeps_nothing() -> None:
    steps, other = [[batch] for batch in batches(2)], batches(1)[0]
    now, earlier = engine_with(0, scales="now"), engine_with(2)
    assert losses(now, steps) == losses(earlier, steps)
    before = earlier.state()
    assert earlier.evaluate_micro_batch(other).loss_sum == now.evaluate_micro_batch(other).loss_sum
    earlier.train_step(steps[0])
    after = peaks(earlier)
    assert torch.equal(after[..., 0], torch.tensor(list(before["fp8"]["peaks"].values()))[..., 1])
    assert (after[0, INPUT, 1] > 0).all()


def test_a_skipped_step_leaves_nothing_behind_that_is_not_finite() -> None:
    engine = engine_with(2)
    losses(engine, [[batch] for batch in batches(2)])
    weight = engine.weights()["blocks.0.ffn.up.weight"]
    kept = weight[3, 5].item()
    weight[3, 5] = torch.inf
    engine.weights_changed()
    assert engine.train_step(batches(1)).skipped
    assert peaks(engine).isfinite().all()
    weight[3, 5] = kept
    engine.weights_changed()
    result = engine.train_step(batches(1))
    assert not result.skipped
    assert 0 < result.grad_norm < float("inf")
    assert peaks(engine).isfinite().all()


def test_a_run_that_goes_on_does_what_it_would_have_done() -> None:
    steps = [batches(3) for _ in range(6)]
    for batch in steps[3]:
        batch["labels"][:, 1:] = -100  # by which other gradients would be divided, were it the first step
    whole, first, second = (engine_with(2) for _ in range(3))
    expected = losses(whole, steps)
    assert losses(first, steps[:3]) == expected[:3]
    state = json.loads(json.dumps(first.state()))
    tensors = first.state_tensors()
    shapes = {name.removeprefix("optim."): (t.shape, t.dtype) for name, t in tensors.items() if name[:5] == "optim"}
    second.allocate_optimizer_state(shapes)
    for name, tensor in second.state_tensors().items():
        tensor.detach().copy_(tensors[name])
    second.state_loaded()
    second.restore(state)
    assert losses(second, steps[3:]) == expected[3:]
    assert second.state() == whole.state()


def test_a_checkpoint_without_such_a_state_starts_as_a_new_run_does() -> None:
    one, other = engine_with(2), engine_with(2)
    losses(one, [batches(1) for _ in range(3)])
    state = one.state()
    one.restore({key: value for key, value in state.items() if key != "fp8"})
    assert one.state()["fp8"]["peaks"] == other.state()["fp8"]["peaks"]
    plain = engine_with(0, scales="now")
    plain.restore(state)  # which has no use for it
    assert plain.steps == 3
    assert "fp8" not in plain.state()


def scales_of(names: list[str], history: int) -> AmaxHistory:
    return AmaxHistory(names, history=history, headroom=2.0, device=torch.device("cpu"))


def noted(scales: AmaxHistory, numbers: Tensor) -> Any:
    """A step in which these are the largest numbers; returns what the next one would be given."""
    found = scales.of(range(numbers.shape[1]), numbers)
    assert found.amax_bits is not None
    found.amax_bits.copy_(numbers.view(torch.int32))
    scales.after_step(None)
    return scales.of(range(numbers.shape[1]), numbers)


def test_scales_are_made_for_the_largest_number_of_the_last_steps_and_some_room() -> None:
    scales, steps = scales_of(["a", "b"], 3), torch.rand(6, 3, 2)
    assert noted(scales, steps[0]).amax is None
    assert noted(scales, steps[1]).amax is None
    for at in range(2, 6):
        found = noted(scales, steps[at])
        assert torch.equal(found.amax, 2 * steps[at - 2 : at + 1].amax(0))
        assert not found.amax_bits.any()
    with torch.no_grad():
        assert scales.of([0, 1], steps).amax_bits is None


def test_a_layer_that_was_never_seen_has_a_scale_of_one() -> None:
    numbers = torch.rand(3, 2) + 1
    numbers[:, 1] = 0
    assert noted(scales_of(["a", "b"], 1), numbers).amax[:, 1].tolist() == [448.0, 448.0, 57344.0]


def test_a_state_fits_other_layers_and_other_lengths() -> None:
    scales, steps = scales_of(["a", "b"], 4), torch.rand(4, 3, 2)
    for numbers in steps:
        noted(scales, numbers)
    state = scales.state()
    shorter, longer, wider = scales_of(["b"], 2), scales_of(["b", "a"], 6), scales_of(["a", "c"], 2)
    for each in (shorter, longer, wider):
        each.restore(state)
    assert torch.equal(shorter.of([0], steps).amax, 2 * steps[2:, :, 1:].amax(0))  # type: ignore[arg-type]
    assert longer.of([0, 1], steps).amax is None
    assert longer.state() == {name: state[name] for name in ("b", "a")}
    assert wider.of([0, 1], steps).amax is None
