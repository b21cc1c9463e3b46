from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from plait.models.moe import Experts, can_be_grouped, grouped_linear, looped_linear

SIZES = [3, 0, 5, 1]  # of each group; one is empty
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def reference(rows, weight, sizes):
    parts = rows[: sum(sizes)].split(sizes)
    return torch.cat([part @ matrix.t() for part, matrix in zip(parts, weight, strict=True)])


def ends_of(sizes):
    return torch.tensor(sizes).cumsum(0).int()


@pytest.mark.parametrize("tail", [0, 4])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("product", [grouped_linear, looped_linear])
def test_each_row_meets_the_matrix_of_its_group_forward_and_backward(product, dtype, tail):
    rows = torch.randn(sum(SIZES) + tail, 16).to(dtype).requires_grad_()
    weight = torch.randn(len(SIZES), 24, 16).to(dtype).requires_grad_()
    assert can_be_grouped(rows, weight)
    exact = [tensor.detach().double().requires_grad_() for tensor in (rows, weight)]
    found, expected = product(rows, weight, ends_of(SIZES)), reference(*exact, SIZES)
    real = slice(0, sum(SIZES))
    near = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype] * 10}
    torch.testing.assert_close(found[real].double(), expected, **near)
    slopes = torch.randn(expected.shape).to(dtype)
    grads = torch.autograd.grad(found[real], (rows, weight), slopes)
    exact_grads = torch.autograd.grad(expected, exact, slopes.double())
    torch.testing.assert_close(grads[0][real].double(), exact_grads[0][real], **near)
    torch.testing.assert_close(grads[1].double(), exact_grads[1], **near)
    assert not grads[1][SIZES.index(0)].any()


@pytest.mark.parametrize(
    ("dtype", "out", "into"), [(torch.float64, 16, 16), (torch.bfloat16, 12, 16), (torch.float32, 16, 6)]
)
def test_what_torch_has_no_grouped_product_for_goes_group_by_group(dtype, out, into):
    rows, weight = torch.randn(9, into, dtype=dtype), torch.randn(4, out, into, dtype=dtype)
    assert not can_be_grouped(rows, weight)
    torch.testing.assert_close(grouped_linear(rows, weight, ends_of(SIZES)), reference(rows, weight, SIZES))


@pytest.mark.parametrize("width", [16, 10])
def test_without_a_row_every_matrix_still_gets_a_gradient(width):
    rows, weight = torch.randn(0, width, requires_grad=True), torch.randn(4, width, width, requires_grad=True)
    product = grouped_linear(rows, weight, ends_of([0, 0, 0, 0]))
    grads = torch.autograd.grad(product.sum(), (rows, weight))
    assert grads[0].shape == (0, width)
    assert torch.equal(grads[1], torch.zeros_like(weight))


def experts(dim, hidden, *, drops=False):
    module = Experts(5, dim, hidden, layers=2, drops=drops)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def one_by_one(module, hidden, index, weights):
    answers = []
    for token, chosen, shares in zip(hidden, index.tolist(), weights, strict=True):
        answer = torch.zeros_like(token)
        for expert, share in zip(chosen, shares, strict=True):
            if expert < module.num_experts:
                inner = F.silu(module.gate[expert] @ token) * (module.up[expert] @ token)
                answer = answer + share * (module.down[expert] @ inner)
        answers.append(answer)
    return torch.stack(answers)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(("dim", "hidden"), [(16, 24), (10, 6)])
def test_a_token_gets_the_weighted_answers_of_its_experts(dim, hidden, drops):
    module = experts(dim, hidden, drops=drops)
    tokens = torch.randn(11, dim, requires_grad=True)
    index = torch.stack([torch.randperm(5)[:2] for _ in range(11)])
    index[index == 3] = 4  # nobody chooses expert 3
    if drops:
        index[2], index[5, 0] = 5, 5
    weights = torch.rand(11, 2, requires_grad=True)
    found, expected = module(tokens, index, weights), one_by_one(module, tokens, index, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    slopes = torch.randn(found.shape)
    inputs = (tokens, weights, *module.parameters())
    for grad, wanted in zip(
        torch.autograd.grad(found, inputs, slopes), torch.autograd.grad(expected, inputs, slopes), strict=True
    ):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-4)


def test_all_choices_may_be_dropped():
    module = experts(16, 16, drops=True)
    tokens = torch.randn(3, 16, requires_grad=True)
    found = module(tokens, torch.full((3, 2), 5), torch.rand(3, 2))
    assert not found.any()
    found.square().sum().backward()
    assert not any(parameter.grad.any() for parameter in module.parameters())


def test_no_tokens_are_answered_with_none():
    module = experts(16, 16)
    found = module(torch.randn(0, 16), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert found.shape == (0, 16)
    found.sum().backward()
    assert not any(parameter.grad.any() for parameter in module.parameters())


def test_under_autocast_products_are_in_its_dtype():
    module = experts(16, 24)
    tokens, index, weights = torch.randn(7, 16), torch.randint(5, (7, 1)), torch.rand(7, 1)
    half = experts(16, 24).to(torch.bfloat16)
    half.load_state_dict(module.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        found = module(tokens.bfloat16(), index, weights)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, half(tokens.bfloat16(), index, weights))
