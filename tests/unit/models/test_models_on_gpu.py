from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.models import build_model, preset
from plait.models.common.attention import attend, document_mask, packing_mask
from plait.models.common.losses import linear_cross_entropy, loss_and_grads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [7, 1000, 50257])
def test_the_triton_kernel_equals_its_plain_twin(dtype, columns):
    logits = (torch.randn(33, columns) * 5).to(dtype)
    labels = torch.randint(columns, (33,))
    labels[::4] = -100
    losses, slopes = loss_and_grads(logits.clone(), labels)
    found_losses, found_slopes = loss_and_grads(logits.cuda(), labels.cuda())
    torch.testing.assert_close(found_losses.cpu(), losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_slopes.cpu(), slopes)


def test_the_chunked_loss_equals_the_plain_one():
    hidden = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(1000, (300,), device="cuda")
    plain = linear_cross_entropy(hidden, weight, labels).sum
    chunked = linear_cross_entropy(hidden, weight, labels, chunk_bytes=128 * 2000).sum
    torch.testing.assert_close(chunked, plain, rtol=1e-5, atol=0)
    for expected, found in zip(
        torch.autograd.grad(plain, (hidden, weight)), torch.autograd.grad(chunked, (hidden, weight)), strict=True
    ):
        assert (found - expected).float().norm() < 0.01 * expected.float().norm()


def test_the_block_mask_equals_the_boolean_mask():
    q = torch.randn(2, 4, 300, 32, device="cuda")
    k, v = (torch.randn(2, 2, 300, 32, device="cuda") for _ in range(2))
    ids = torch.randint(0, 2, (2, 300), device="cuda").cumsum(1) // 40
    found = attend(q, k, v, packing_mask(ids, head_dim=32))
    torch.testing.assert_close(found, attend(q, k, v, document_mask(ids)), rtol=1e-3, atol=1e-3)


def test_compiled_blocks_train_on_packed_rows():
    with torch.device("cuda"):
        model = build_model(preset("llama", "tiny"))
    tokens = torch.randint(256, (2, 160), device="cuda")
    ids = torch.arange(160, device="cuda").div(50, rounding_mode="floor").expand(2, -1)
    expected = model(tokens, tokens, document_ids=ids).sum
    for block in model.modules():
        if isinstance(block, model.block_classes):
            nn.Module.compile(block)
    loss = model(tokens, tokens, document_ids=ids).sum
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-2)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
