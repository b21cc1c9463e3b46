"""Plait's own optimizers, whole tensors, against torch or against the formula written as a plain loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.optim.adafactor import Adafactor
from plait.optim.lamb import Lamb
from plait.optim.lion import Lion
from plait.optim.muon import Muon, orthogonalize

Factory = Callable[[list[Tensor]], Optimizer]
SHAPES = [(5, 3), (3, 7), (4,), (2, 3, 4), ()]
STEPS = 5


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def twin(params: list[Tensor]) -> list[Tensor]:
    return [p.detach().clone().requires_grad_() for p in params]


def gradients(*copies: list[Tensor]) -> Iterator[None]:
    for _ in range(STEPS):
        for same in zip(*copies, strict=True):
            gradient = torch.randn_like(same[0])
            for p in same:
                p.grad = gradient.clone()
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [0.01, 2.0])
def test_adafactor_is_that_of_torch(lr: float, weight_decay: float, dtype: torch.dtype) -> None:
    ours = parameters(SHAPES, dtype)
    theirs = twin(ours)
    optimizer = Adafactor(ours, lr=lr, weight_decay=weight_decay)
    reference = torch.optim.Adafactor(theirs, lr=lr, weight_decay=weight_decay)
    for _ in gradients(ours, theirs):
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        state, expected = optimizer.state[mine], reference.state[other]
        assert state.keys() == expected.keys()
        torch.testing.assert_close(dict(state), dict(expected))


def test_lion_moves_by_the_sign_of_the_interpolated_momentum() -> None:
    lr, beta1, beta2, decay = 0.01, 0.8, 0.95, 0.1
    ours = parameters(SHAPES)
    expected = [p.detach().clone() for p in ours]
    moments = [torch.zeros_like(p) for p in expected]
    optimizer = Lion(ours, lr=lr, betas=(beta1, beta2), weight_decay=decay)
    for _ in gradients(ours):
        optimizer.step()
        for p, m, mine in zip(expected, moments, ours, strict=True):
            assert mine.grad is not None
            p -= lr * (torch.sign(beta1 * m + (1 - beta1) * mine.grad) + decay * p)
            m.copy_(beta2 * m + (1 - beta2) * mine.grad)
    torch.testing.assert_close([p.detach() for p in ours], expected)


@pytest.mark.parametrize(("low", "high"), [(0.0, 10.0), (0.9, 1.1)])
def test_lamb_scales_adams_direction_by_the_trust_ratio(low: float, high: float) -> None:
    lr, beta1, beta2, eps, decay = 0.05, 0.9, 0.99, 1e-6, 0.1
    ours = parameters(SHAPES)
    expected = [p.detach().clone() for p in ours]
    means, squares = ([torch.zeros_like(p) for p in expected] for _ in range(2))
    optimizer = Lamb(ours, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, min_trust=low, max_trust=high)
    for step, _ in enumerate(gradients(ours), start=1):
        optimizer.step()
        for p, m, v, mine in zip(expected, means, squares, ours, strict=True):
            assert mine.grad is not None
            m.copy_(beta1 * m + (1 - beta1) * mine.grad)
            v.copy_(beta2 * v + (1 - beta2) * mine.grad**2)
            update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps) + decay * p
            p -= lr * min(high, max(low, (p.norm() / update.norm()).item())) * update
    torch.testing.assert_close([p.detach() for p in ours], expected, rtol=1e-5, atol=1e-6)


def test_lamb_takes_a_plain_step_where_a_norm_is_zero() -> None:
    p = torch.zeros(3, requires_grad=True)
    p.grad = torch.ones(3)
    Lamb([p], lr=0.1).step()
    torch.testing.assert_close(p.detach(), torch.full((3,), -0.1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6)])
def test_orthogonalizing_brings_singular_values_near_one_and_keeps_directions(shape: tuple[int, int]) -> None:
    left, _, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    values = torch.linspace(1.0, 3.0, min(shape))
    result = orthogonalize(left * values @ right, steps=5)
    core = left.T @ result @ right.T
    assert torch.all((core.diagonal() > 0.6) & (core.diagonal() < 1.3))
    torch.testing.assert_close(core, torch.diag(core.diagonal()), rtol=0, atol=1e-4)


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_that_of_torch_up_to_its_bf16(nesterov: bool) -> None:
    ours = parameters([(5, 3), (3, 7)])
    theirs = twin(ours)
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    optimizer, reference = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for _ in gradients(ours, theirs):
        optimizer.step()
        reference.step()
    # Each step is at most 0.02·√(5/3) long in any direction; bf16 has 2 to 3 digits of it.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=STEPS * 0.02 * 0.05)
    buffers = [optimizer.state[p]["momentum_buffer"] for p in ours]
    torch.testing.assert_close(buffers, [reference.state[p]["momentum_buffer"] for p in theirs])


def test_muon_follows_its_formula_and_sees_a_convolution_as_a_matrix() -> None:
    lr, momentum, decay = 0.02, 0.95, 0.1
    p = torch.randn(6, 2, 3, 3, requires_grad=True)
    expected, buffer = p.detach().clone(), torch.zeros_like(p)
    optimizer = Muon([p], lr=lr, momentum=momentum, weight_decay=decay)
    for _ in gradients([p]):
        optimizer.step()
        assert p.grad is not None
        buffer = momentum * buffer + (1 - momentum) * p.grad
        update = (momentum * buffer + (1 - momentum) * p.grad).view(6, 18)
        direction = orthogonalize(update, 5).view(6, 2, 3, 3) * math.sqrt(max(1, 6 / 18))
        expected = expected * (1 - lr * decay) - lr * direction
    torch.testing.assert_close(p.detach(), expected, rtol=1e-4, atol=1e-5)


def test_muon_updates_its_adamw_groups_as_adamw() -> None:
    ours = parameters([(4,), (5, 3)])
    theirs = twin(ours)
    optimizer = Muon(
        [{"params": ours, "algorithm": "adamw", "lr": 0.003, "weight_decay": 0.1}],
        adam_betas=(0.8, 0.9),
        adam_eps=1e-7,
    )
    reference = torch.optim.AdamW(theirs, lr=0.003, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-7)
    for _ in gradients(ours, theirs):
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs)


OWN: dict[str, tuple[Factory, list[tuple[int, ...]]]] = {
    "Lion": (lambda ps: Lion(ps), SHAPES),
    "Lamb": (lambda ps: Lamb(ps), SHAPES),
    "Adafactor": (lambda ps: Adafactor(ps), SHAPES),
    "Muon": (
        lambda ps: Muon([{"params": ps[:2]}, {"params": ps[2:], "algorithm": "adamw", "lr": 1e-3}]),
        [(5, 3), (4, 2, 3, 3), (4,), ()],
    ),
}


@pytest.fixture(params=list(OWN))
def own(request: pytest.FixtureRequest) -> tuple[Factory, list[tuple[int, ...]]]:
    return OWN[request.param]


def test_training_goes_on_the_same_after_a_saved_state_is_loaded(
    own: tuple[Factory, list[tuple[int, ...]]],
) -> None:
    factory, shapes = own
    first = parameters(shapes)
    optimizer = factory(first)
    for _ in gradients(first):
        optimizer.step()
    second = twin(first)
    resumed = factory(second)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in gradients(first, second):
        optimizer.step()
        resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_parameters_without_a_gradient_stay_and_get_no_state(
    own: tuple[Factory, list[tuple[int, ...]]],
) -> None:
    factory, shapes = own
    params = parameters(shapes)
    before = twin(params)
    optimizer = factory(params)
    optimizer.step()
    params[0].grad = torch.randn_like(params[0])
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    assert all(torch.equal(a, b) for a, b in zip(params[1:], before[1:], strict=True))
    assert set(optimizer.state) == {params[0]}


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned(
    own: tuple[Factory, list[tuple[int, ...]]],
) -> None:
    factory, shapes = own
    params = parameters(shapes)
    optimizer = factory(params)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([p.square().sum() for p in params]).sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first
