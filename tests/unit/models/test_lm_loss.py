from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from plait.models.common.losses import cross_entropy, linear_cross_entropy


def _inputs(dtype=torch.float32, tokens=(3, 67), dim=24, vocab=101):
    hidden = torch.randn(*tokens, dim).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim).to(dtype).requires_grad_()
    labels = torch.randint(vocab, tokens).masked_fill_(torch.rand(tokens) < 0.2, -100)
    return hidden, weight, labels


def _loss_and_gradients(hidden, weight, labels, chunk_bytes=2**30):
    loss = linear_cross_entropy(hidden, weight, labels, chunk_bytes=chunk_bytes)
    return loss.count, loss.sum, *torch.autograd.grad(loss.sum / 13, (hidden, weight))


@pytest.mark.parametrize("rows", [1, 7, 64, 128, 200])
def test_the_chunked_loss_equals_the_plain_one(rows):
    inputs = _inputs()
    plain = _loss_and_gradients(*inputs)
    chunked = _loss_and_gradients(*inputs, chunk_bytes=rows * 101 * 4)
    for expected, found in zip(plain, chunked, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_chunked_loss_in_bf16_equals_the_plain_one_up_to_rounding():
    inputs = _inputs(torch.bfloat16)
    plain = _loss_and_gradients(*inputs)
    chunked = _loss_and_gradients(*inputs, chunk_bytes=50 * 101 * 2)
    torch.testing.assert_close(chunked[1], plain[1], rtol=1e-5, atol=0)
    for expected, found in zip(plain[2:], chunked[2:], strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.float() - expected.float()).norm() < 0.01 * expected.float().norm()


def test_the_chunked_loss_follows_autocast():
    inputs = _inputs()
    with torch.autocast("cpu", torch.bfloat16):
        plain = _loss_and_gradients(*inputs)
        chunked = _loss_and_gradients(*inputs, chunk_bytes=50 * 101 * 2)
    torch.testing.assert_close(chunked[1], plain[1], rtol=1e-5, atol=0)
    for expected, found in zip(plain[2:], chunked[2:], strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).norm() < 0.01 * expected.norm()


def test_the_incoming_gradient_is_not_rounded_to_the_dtype_of_the_weight():
    hidden, weight, labels = _inputs(torch.bfloat16)
    scale = 1.0 + 2.0**-6 + 2.0**-10  # between two bf16 numbers
    loss = linear_cross_entropy(hidden, weight, labels, chunk_bytes=4096).sum
    (unscaled,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss * scale, hidden)
    assert torch.equal(scaled, (unscaled.float() * scale).to(torch.bfloat16))


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient_and_does_not_disturb_the_other(frozen):
    hidden, weight, labels = _inputs()
    inputs = [hidden, weight]
    expected = _loss_and_gradients(hidden, weight, labels)[2 + (1 - frozen)]
    inputs[frozen] = inputs[frozen].detach()
    loss = linear_cross_entropy(*inputs, labels, chunk_bytes=4096).sum
    (found,) = torch.autograd.grad(loss / 13, inputs[1 - frozen])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_chunked_loss_works_without_gradients():
    hidden, weight, labels = _inputs()
    found = linear_cross_entropy(hidden, weight, labels, chunk_bytes=4096)
    assert not found.sum.requires_grad
    torch.testing.assert_close(found, linear_cross_entropy(hidden, weight, labels))


def test_labels_that_count_for_nothing_give_zero_and_no_gradient():
    hidden, weight, labels = _inputs()
    labels.fill_(-100)
    for chunk_bytes in (2**30, 4096):
        count, total, *gradients = _loss_and_gradients(hidden, weight, labels, chunk_bytes)
        assert count == 0
        assert total == 0
        assert all(not gradient.any() for gradient in gradients)


def test_loss_is_summed_in_fp32_over_the_targets_that_count():
    logits = torch.randn(4, 9, 31, dtype=torch.bfloat16)
    labels = torch.randint(31, (4, 9))
    labels[1] = -100
    loss = cross_entropy(logits, labels)
    keep = [0, 2, 3]
    expected = F.cross_entropy(logits[keep].float().flatten(0, 1), labels[keep].flatten(), reduction="sum")
    assert loss.sum.dtype == torch.float32
    assert loss.count == 27
    torch.testing.assert_close(loss.sum, expected)


def test_the_chunked_loss_is_a_well_behaved_operator():
    hidden, weight, labels = _inputs(tokens=(40,))
    operator = torch.ops.plait.chunked_linear_cross_entropy.default
    torch.library.opcheck(operator, (hidden, weight, labels, 16, torch.float32, True, True))
