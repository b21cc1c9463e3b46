from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from plait.models import build_model, preset
from plait.models.common.attention import Rotary, Shared
from plait.models.common.losses import linear_cross_entropy


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def test_a_llama_block_is_one_graph():
    model = build_model(preset("llama", "tiny"))
    block, x = model.blocks[0], torch.randn(2, 16, 64)
    shared = Shared(rotary=Rotary.at(torch.arange(16)[None], 16, 10000.0))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, shared), block(x, shared))


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_whole_model_is_one_graph_with_documents_and_loss(family):
    model = build_model(preset(family, "tiny"))
    tokens = torch.randint(256, (2, 16))
    documents = torch.arange(16).div(6, rounding_mode="floor").expand(2, -1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(tokens, tokens, document_ids=documents), model(tokens, tokens, document_ids=documents)
    )


def test_the_chunked_loss_is_part_of_one_graph():
    hidden, weight = torch.randn(40, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    labels = torch.randint(20, (40,))
    chunked = partial(linear_cross_entropy, chunk_bytes=16 * 20 * 4)
    compiled = torch.compile(chunked, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(chunked(hidden, weight, labels).sum, (hidden, weight))
    found = torch.autograd.grad(compiled(hidden, weight, labels).sum, (hidden, weight))
    torch.testing.assert_close(found, expected)


def test_a_block_can_be_recomputed():
    model = build_model(preset("llama", "tiny"))
    tokens = torch.randint(256, (2, 16))
    model(tokens, tokens).sum.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    model(tokens, tokens).sum.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_in_bf16_equals_whole_in_bf16(tied, one_rank, monkeypatch):
    monkeypatch.setattr("plait.models.common.losses.PLAIN_BYTES", 0)  # so the chunked loss is used
    model = build_model(preset("llama", "tiny", tie_embeddings=tied))
    whole = build_model(model.config).to(torch.bfloat16)
    whole.load_state_dict(model.state_dict())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (1,))  # on a machine with a GPU, too
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, mesh=mesh)
    fully_shard(model, mp_policy=policy, mesh=mesh)
    tokens = torch.randint(256, (2, 16))
    losses = [m(tokens, tokens) for m in (model, whole)]
    assert torch.equal(losses[0].sum, losses[1].sum)
    for loss in losses:
        loss.sum.backward()
    for sharded, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(sharded.grad.full_tensor(), expected.grad.float())
