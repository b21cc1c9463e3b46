"""AdamW on the host against the same update in float64."""

from __future__ import annotations

import threading

import pytest
import torch

from plait.kernels import adam
from plait.kernels.adam import AdamNumbers, ThreadPool, adam_step, adam_step_plain

SIZES = (1, 5, 1000, 4099)
EPS = 1e-3
"""A step is a quotient. Where decay and gradient nearly cancel, rounding is all there is above and below, unless this
is larger than rounding: with 1e-6 one number of ten million came out wrong."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small tensor has several, and a shorter one at the end."""
    monkeypatch.setattr(adam, "PIECE", 512)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.037])
@pytest.mark.parametrize("publish", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("threads", [None, 3])
def test_ten_steps_are_those_of_float64(
    grad_dtype: torch.dtype, decoupled: bool, scale: float, publish: torch.dtype | None, threads: int | None
) -> None:
    pool = None if threads is None else ThreadPool(threads)
    weights = [torch.randn(size) for size in SIZES]
    states = [torch.zeros(size) for size in SIZES], [torch.zeros(size) for size in SIZES]
    exact = [w.double() for w in weights]
    exact_states = [s.double() for s in states[0]], [s.double() for s in states[1]]
    places = None if publish is None else [torch.empty(size, dtype=publish) for size in SIZES]
    for step in range(1, 11):
        grads = [torch.randn(size).to(grad_dtype) for size in SIZES]
        exact_grads = [grad.clone() for grad in grads]
        numbers = AdamNumbers(
            step, lr=1e-2, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1, decoupled=decoupled, scale=scale
        )
        adam_step(numbers, weights, grads, *states, places, pool=pool)
        adam_step_plain(numbers, exact, exact_grads, *exact_states)
    pairs = zip([*weights, *states[0], *states[1]], [*exact, *exact_states[0], *exact_states[1]], strict=True)
    for found, reference in pairs:
        torch.testing.assert_close(found.double(), reference, rtol=2e-5, atol=1e-6)
    if places is not None:
        assert all(torch.equal(place, weight.to(publish)) for place, weight in zip(places, weights, strict=True))


def test_a_crew_leaves_torch_its_threads_and_hands_on_errors() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pool = ThreadPool(3)
        assert torch.get_num_threads() == 2
        seen: list[int] = []
        pool.share(1, lambda _numbers: seen.append(torch.get_num_threads()))
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert seen == [1, 2]
        with pytest.raises(ZeroDivisionError):
            pool.share(4, lambda numbers: [1 // number for number in numbers])  # type: ignore[arg-type,return-value]
        pool.close()
    finally:
        torch.set_num_threads(before)


def test_the_update_is_that_of_torch() -> None:
    weight = torch.nn.Parameter(torch.randn(3000))
    mine, mean, square = weight.detach().clone(), torch.zeros(3000), torch.zeros(3000)
    optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1)
    for step in range(1, 6):
        grad = torch.randn(3000)
        weight.grad = 0.5 * grad
        optimizer.step()
        adam_step(AdamNumbers(step, lr=1e-2, weight_decay=0.1, scale=0.5), [mine], [grad], [mean], [square])
    torch.testing.assert_close(mine, weight.detach(), rtol=1e-6, atol=1e-7)


def test_a_tensor_may_go_without_a_rounded_twin() -> None:
    weights, grads = [torch.zeros(10), torch.zeros(10)], [torch.ones(10), torch.ones(10)]
    states = [torch.zeros(10), torch.zeros(10)], [torch.zeros(10), torch.zeros(10)]
    place = torch.zeros(10, dtype=torch.bfloat16)
    adam_step(AdamNumbers(1, lr=0.5), weights, grads, *states, [None, place])
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(place, weights[1].bfloat16())
