"""The loss of a `transformers` decoder without all of its logits at one time."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plait.config.model import HFConfig
from plait.models import build_model, hf, preset
from plait.models.common import losses as common
from plait.models.hf import PRESETS

TOKENS, VOCAB = (5, 60), 256


class Largest(TorchDispatchMode):
    """How many numbers the largest result has."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(t))])
        return out


def grads_of(model, tokens, labels):
    model.zero_grad()
    loss = model(tokens, labels)
    (loss.sum / loss.count).backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters()}


def small_tiles(monkeypatch):
    monkeypatch.setattr(hf, "PLAIN_BYTES", 0)
    monkeypatch.setattr(common, "PLAIN_BYTES", 0)
    monkeypatch.setattr(common.linear_cross_entropy, "__kwdefaults__", {"chunk_bytes": 40 * VOCAB * 4})


@pytest.mark.parametrize("name", PRESETS)
def test_loss_and_gradients_are_those_of_the_whole_logits(name, monkeypatch):
    model = build_model(preset("hf", name)).eval()
    assert model.tiles_loss
    tokens = torch.randint(VOCAB, TOKENS)
    labels = torch.randint(VOCAB, TOKENS).masked_fill_(torch.rand(TOKENS) < 0.2, -100)
    plain, expected = grads_of(model, tokens, labels)
    small_tiles(monkeypatch)
    tiled, found = grads_of(model, tokens, labels)
    assert tiled.count == plain.count
    torch.testing.assert_close(tiled.sum, plain.sum, rtol=1e-5, atol=0)
    for key, grad in expected.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-4, atol=1e-6)
    assert "forward" not in vars(model.get_output_embeddings())


def test_logits_are_never_whole(monkeypatch):
    model = build_model(preset("hf", "tiny-llama"))
    tokens = torch.randint(VOCAB, (8, 150))
    with Largest() as plain:
        grads_of(model, tokens, tokens)
    small_tiles(monkeypatch)
    with Largest() as tiled:
        grads_of(model, tokens, tokens)
    assert plain.numel >= tokens.numel() * VOCAB
    assert tiled.numel < tokens.numel() * VOCAB


def test_a_model_that_bends_its_logits_keeps_them(monkeypatch):
    config = {"model_type": "gemma2", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    model = build_model(HFConfig(config=config)).eval()
    assert not model.tiles_loss
    tokens = torch.randint(VOCAB, TOKENS)
    before = model(tokens, tokens).sum
    small_tiles(monkeypatch)
    assert torch.equal(model(tokens, tokens).sum, before)


def test_a_head_to_which_something_was_added_keeps_its_logits(monkeypatch):
    model = build_model(preset("hf", "tiny-llama")).eval()
    model.get_output_embeddings().register_forward_hook(lambda _module, _args, logits: 2 * logits)
    tokens = torch.randint(VOCAB, TOKENS)
    before = model(tokens, tokens).sum
    small_tiles(monkeypatch)
    assert torch.equal(model(tokens, tokens).sum, before)


def test_the_tiled_loss_is_near_that_of_float64():
    hidden, weight = torch.randn(500, 32, requires_grad=True), torch.randn(VOCAB, 32, requires_grad=True)
    labels = torch.randint(VOCAB, (500,)).masked_fill_(torch.rand(500) < 0.2, -100)
    tiled = common.linear_cross_entropy(hidden, weight, labels, chunk_bytes=64 * VOCAB * 4).sum
    exact_inputs = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = torch.nn.functional.cross_entropy(
        exact_inputs[0] @ exact_inputs[1].t(), labels, ignore_index=-100, reduction="sum"
    )
    torch.testing.assert_close(tiled.double(), exact, rtol=1e-6, atol=0)
    found = torch.autograd.grad(tiled, (hidden, weight))
    for grad, reference in zip(found, torch.autograd.grad(exact, exact_inputs), strict=True):
        torch.testing.assert_close(grad.double(), reference, rtol=1e-5, atol=1e-5)
