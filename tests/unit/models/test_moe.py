from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from plait.config.model import MoeConfig
from plait.models import build_model, preset
from plait.models.common.attention import Rotary, Shared
from plait.models.common.protocol import LanguageModel
from plait.models.llama import SwiGLU
from plait.models.moe import MixtureOfExperts

PENALIZED = {"balance_loss": 0.3, "z_loss": 0.2}
KINDS = {
    "dropless": {},
    "penalized": PENALIZED,
    "capacity": {"capacity_factor": 1.0},
    "shared": {"shared_experts": 2, **PENALIZED},
    "sparse layers": {"moe_every": 2, **PENALIZED},
    "sigmoid": {"score": "sigmoid", "bias_rate": 0.01, **PENALIZED},
}


def tiny(**changes):
    """A model whose routers have an opinion."""
    model = build_model(preset("moe", "tiny", **changes))
    for router in routers(model):
        nn.init.normal_(router.weight)
    return model


def routers(model):
    return [module.router for module in model.modules() if isinstance(module, MixtureOfExperts)]


def batch(rows=4, tokens=12):
    ids = torch.randint(256, (rows, tokens))
    labels = torch.randint(256, (rows, tokens))
    labels[torch.rand(labels.shape) < torch.rand(rows, 1)] = -100
    return ids, labels


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def assert_near(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5 * value.abs().max().item(), msg=name)


def test_it_keeps_the_protocol_and_builds_on_the_meta_device(fill):
    real = fill(build_model(preset("moe", "tiny", bias_rate=0.1)))
    assert isinstance(real, LanguageModel)
    with torch.device("meta"):
        model = build_model(real.config)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(77)
    fill(model)
    for name, expected in [*real.named_parameters(), *real.named_buffers()]:
        assert torch.equal(
            model.get_parameter(name) if ".bias" not in name and ".load" not in name else model.get_buffer(name),
            expected,
        ), name


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_loss_and_gradients_do_not_depend_on_how_a_batch_is_cut(kind):
    model = tiny(**kind)
    ids, labels = batch()
    whole = model(ids, labels)
    whole.sum.backward()
    expected = gradients(model)
    total = 0.0
    for rows in (slice(0, 1), slice(1, 4)):
        part = model(ids[rows], labels[rows])
        part.sum.backward()
        total += part.sum.item()
    assert total == pytest.approx(whole.sum.item(), rel=1e-5)
    assert_near(gradients(model), expected)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_parameter_is_trained(kind):
    model = tiny(**kind)
    model(*batch(8, 32)).sum.backward()
    assert all(grad.isfinite().all() and grad.any() for grad in gradients(model).values())


def test_in_evaluation_the_loss_is_the_cross_entropy_alone_and_nothing_is_dropped():
    changes = {**PENALIZED, "capacity_factor": 0.5}
    model, plain = tiny(**changes), build_model(preset("moe", "tiny"))
    plain.load_state_dict(model.state_dict())
    ids, labels = batch()
    expected = plain.train()(ids, labels).sum
    assert torch.equal(model.eval()(ids, labels).sum, expected)
    assert torch.equal(plain.eval()(ids, labels).sum, expected)
    assert not torch.equal(model.train()(ids, labels).sum, expected)


def test_a_penalty_counts_as_often_as_its_row_has_targets():
    model = tiny(**PENALIZED)
    ids, labels = batch(1)
    labels[0, :5] = -100
    labels[0, 5:] = 3
    charged = []
    for router in routers(model):
        router.register_forward_hook(lambda _module, _inputs, routing: charged.append(routing.penalty))
    with_penalty = model(ids, labels).sum
    assert len(charged) == 2
    for router in routers(model):
        router.balance_loss = router.z_loss = 0.0
    torch.testing.assert_close(with_penalty, model(ids, labels).sum + 7 * (charged[0] + charged[1]).sum())


def test_every_nth_layer_is_a_mixture():
    model = build_model(preset("moe", "tiny", layers=5, moe_every=2))
    assert [isinstance(block.ffn, MixtureOfExperts) for block in model.blocks] == [False, True, False, True, False]
    assert all(isinstance(block.ffn, (MixtureOfExperts, SwiGLU)) for block in model.blocks)


def test_shared_experts_are_as_wide_as_so_many_experts_and_see_every_token():
    model = build_model(preset("moe", "tiny", shared_experts=3))
    mixture = model.blocks[0].ffn
    assert mixture.shared.up.weight.shape == (3 * 64, 64)
    nn.init.zeros_(mixture.experts.down)
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(mixture(x)[0], mixture.shared(x))


def test_experts_start_like_a_dense_feed_forward():
    experts = build_model(preset("moe", "tiny", dim=128, expert_dim=256)).blocks[0].ffn.experts
    for matrix, std in ((experts.gate, 0.02), (experts.up, 0.02), (experts.down, 0.02 / 2)):  # sqrt(2 × 2 layers)
        assert matrix.std().item() == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_count_the_experts_that_a_token_sees(tied):
    model = build_model(preset("moe", "tiny", tie_embeddings=tied, shared_experts=1))
    block = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64 + 4 * 64 + (2 + 1) * 3 * 64 * 64
    assert model.flops_per_token(50) == 6 * (2 * block + 64 + 256 * 64) + 6 * 2 * 64 * 50


@pytest.mark.parametrize(("name", "billions"), [("8x7b", 46.7), ("8x22b", 140.6)])
def test_presets_have_the_size_of_the_published_ones(name, billions):
    with torch.device("meta"):
        model = build_model(preset("moe", name))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_it_can_be_cut_between_blocks(kind):
    model = tiny(**kind)
    ids, labels = batch()
    whole = model(ids, labels)
    whole.sum.backward()
    expected = gradients(model)
    front, back = copy.copy(model), copy.copy(model)
    front._modules, back._modules = dict(model._modules), dict(model._modules)
    front.blocks, front.norm, front.head = model.blocks[:1], None, None
    back.blocks, back.embedding = model.blocks[1:], None
    handed = front(ids, labels)
    parts = [part.detach().requires_grad_() for part in handed]
    loss = back(ids, labels, hidden=tuple(parts))
    assert torch.equal(loss.sum, whole.sum)
    loss.sum.backward()
    torch.autograd.backward(handed, [part.grad for part in parts])
    assert_near(gradients(model), expected)


# ---- balance without a loss


def test_the_bias_moves_against_the_load_of_a_whole_step():
    model = tiny(bias_rate=0.5)
    loads = torch.zeros(2, 4, dtype=torch.int64)
    for _ in range(3):
        ids, labels = batch()
        labels[:, 0] = 1
        with torch.no_grad():
            x, penalty = model.embedding(ids), torch.zeros(4)
            shared = Shared(rotary=Rotary.at(torch.arange(12)[None], 16, 10000.0))
            for layer, block in enumerate(model.blocks):
                normed = []
                block.ffn_norm.register_forward_hook(lambda _m, _i, out, normed=normed: normed.append(out))
                x, penalty = block(x, shared, penalty)
                loads[layer] += block.ffn.router(normed[0]).choices.flatten().bincount(minlength=4)
        model(ids, labels).sum.backward()
    model.after_step(None)
    for router, load in zip(routers(model), loads, strict=True):
        assert load.sum() == 3 * 4 * 12 * 2
        assert torch.equal(router.bias, 0.5 * (load.float().mean() - load).sign())
        assert not router.load.any()


def test_a_row_counts_once_if_it_counts_in_the_loss_and_else_not_at_all():
    model = tiny(bias_rate=0.5)
    ids, labels = batch()
    labels[0], labels[1:, 0] = -100, 1
    model(ids[1:], labels[1:]).sum.backward()
    expected = [router.load.clone() for router in routers(model)]
    model.after_step(None, updated=False)
    assert not any(router.bias.any() or router.load.any() for router in routers(model))

    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # computed twice
    model(ids, labels).sum.backward()  # a row without targets
    (model(ids, labels).sum * 0.0).backward()  # a filler
    model(ids, labels)  # no backward pass
    with torch.no_grad():
        model(ids, labels)
    assert torch.equal(torch.stack([router.load for router in routers(model)]), torch.stack(expected))


def test_only_a_balanced_router_has_a_bias_and_only_the_bias_is_saved():
    assert not list(build_model(preset("moe", "tiny")).buffers())
    model = build_model(preset("moe", "tiny", bias_rate=0.1))
    assert {name for name in model.state_dict() if "bias" in name or "load" in name} == {
        "blocks.0.ffn.router.bias",
        "blocks.1.ffn.router.bias",
    }
    assert model.after_step(None) is None


# ---- recomputed and compiled


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_block_can_be_recomputed(kind):
    model = tiny(**kind)
    ids, labels = batch()
    model(ids, labels).sum.backward()
    expected = gradients(model)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    model(ids, labels).sum.backward()
    assert_near(gradients(model), expected)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("capacity", torch.float32), ("sigmoid", torch.float32), ("shared", torch.bfloat16)]
)
def test_the_model_is_one_graph(kind, dtype):
    torch._dynamo.reset()
    model = tiny(**KINDS[kind]).to(dtype)
    ids, labels = batch()
    model(ids, labels).sum.backward()
    expected = gradients(model)
    loads = [None if router.load is None else router.load.clone() for router in routers(model)]
    torch.compile(model, backend="aot_eager", fullgraph=True)(ids, labels).sum.backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name], msg=name)
    for router, load in zip(routers(model), loads, strict=True):
        assert load is None or torch.equal(router.load, 2 * load)


def test_a_moe_config_is_a_llama_config_with_its_own_type():
    assert MoeConfig().type == "moe"
    assert MoeConfig(dim=48).dim == 48
