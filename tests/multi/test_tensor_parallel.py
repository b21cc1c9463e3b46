"""Tensor and sequence parallelism agree with one process: loss, gradients, norm, and parameters after steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from plait.config.model import GptConfig, HFConfig, LlamaConfig
from plait.config.strategy import RecomputeConfig, WrapConfig
from plait.distributed import materialize
from plait.distributed.activation_checkpointing import apply_recompute
from plait.distributed.tensor_parallel import apply_tensor_parallel
from plait.distributed.tensor_parallel_styles import sharding_dim
from plait.distributed.wrap import find_wrap_units
from plait.errors import PlaitError
from plait.models import build_model
from plait.models.common import attention
from plait.models.common.losses import linear_cross_entropy, linear_logits
from tests.communication_volume import TensorTraffic, tensor_traffic
from tests.multi.ranks import RankPool
from tests.refusals import missing
from tests.traffic import SentBytes

VOCAB, SEQ, STEPS = 61, 8, 3
HF_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
MODELS: dict[str, Any] = {
    # Two heads of keys and values for four of queries: at four ranks, each head belongs to two of them.
    "llama": LlamaConfig(vocab_size=VOCAB, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, seq_len=SEQ),
    "gpt": GptConfig(vocab_size=VOCAB, dim=32, layers=2, heads=4, seq_len=SEQ, bias=True, tie_embeddings=True),
    "hf-llama": HFConfig(config={"model_type": "llama", **HF_SIZES}),
    "hf-qwen": HFConfig(config={"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True, **HF_SIZES}),
    # Its projections are fused and put together again behind the product.
    "hf-phi": HFConfig(config={"model_type": "phi3", "pad_token_id": 0, "tie_word_embeddings": True, **HF_SIZES}),
    "hf-mixtral": HFConfig(
        config={
            "model_type": "mixtral",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
            **HF_SIZES,
        }
    ),
    "hf-gpt2": HFConfig(
        config={
            "model_type": "gpt2",
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 16,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
    ),
}


@dataclass
class Options:
    sequence: bool = False
    zero: bool = False
    meta: bool = False
    bf16: bool = False
    recompute: bool = False
    compile: bool = False


@dataclass
class Trace:
    losses: list[float] = field(default_factory=list)
    norm: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def make(name: str) -> nn.Module:
    """Values that show everything: biases that are not zero, norms that are not one."""
    torch.manual_seed(5)
    model = build_model(MODELS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (2, SEQ), generator=generator)
    labels = torch.randint(0, VOCAB, (2, SEQ), generator=generator)
    labels[0, 2:4] = -100
    return {"input_ids": ids, "labels": labels}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(model: nn.Module, batches: list[list[dict[str, Tensor]]]) -> Trace:
    """Steps of AdamW over sums of losses, divided by a constant."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=0.1, foreach=False)
    trace = Trace()
    for step, micro_batches in enumerate(batches):
        loss = sum(model(**inputs).sum for inputs in micro_batches) / 10
        loss.backward()
        trace.losses.append(loss.item())
        if step == 0:
            trace.gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            trace.norm = float(torch.stack([g.float().norm() for g in trace.gradients.values()]).norm())
        optimizer.step()
        optimizer.zero_grad()
    trace.parameters = {name: whole(p) for name, p in model.named_parameters()}
    return trace


def alone(name: str, options: Options) -> Trace:
    model = make(name)
    if options.meta:
        materialize.initialize(model, model.init_weights, seed=3, device=torch.device("cpu"))
    if options.bf16 and not options.zero:
        model.bfloat16()
    shares = 2 if options.zero else 1
    return train(model, [[batch(10 * step + share) for share in range(shares)] for step in range(STEPS)])


def together(rank: int, size: int, name: str, options: Options) -> Trace:
    tensor_size = size // 2 if options.zero else size
    mesh = init_device_mesh("cpu", (size // tensor_size, tensor_size), mesh_dim_names=("dp_shard", "tp"))
    if options.meta:
        with torch.device("meta"):
            model = build_model(MODELS[name])
    else:
        model = make(name)
    if options.bf16 and not options.zero:
        model.bfloat16()
    apply_tensor_parallel(model, mesh["tp"], sequence=options.sequence)
    units = find_wrap_units(model, WrapConfig())
    if options.recompute:
        apply_recompute(units, RecomputeConfig(mode="full"))
    if options.compile:
        for unit in units:
            unit.module.compile(backend="aot_eager", fullgraph=True)
    if options.zero:
        shard(model, [unit.module for unit in units], mesh["dp_shard"], options)
    if options.meta:
        materialize.give_storage(model, torch.device("cpu"))
        materialize.initialize(model, model.init_weights, seed=3, device=torch.device("cpu"))
    shares = [mesh.get_local_rank("dp_shard")]
    trace = train(model, [[batch(10 * step + share) for share in shares] for step in range(STEPS)])
    if options.zero:
        total = torch.tensor(trace.losses)
        torch.distributed.all_reduce(total, group=mesh.get_group("dp_shard"))
        trace.losses = total.tolist()
    return trace


def shard(model: nn.Module, units: list[nn.Module], mesh: Any, options: Options) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if options.bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )

    def placement(param: nn.Parameter) -> Shard:
        return Shard(sharding_dim(param, mesh.size()))

    for module in (*units, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def assert_same(found: Trace, expected: Trace, tolerance: float) -> None:
    assert found.parameters.keys() == expected.parameters.keys()
    assert found.gradients.keys() == expected.gradients.keys()
    errors = {
        "loss": error(torch.tensor(found.losses), torch.tensor(expected.losses)),
        "norm": abs(found.norm - expected.norm) / expected.norm,
    }
    for kind in ("gradients", "parameters"):
        for name, tensor in getattr(expected, kind).items():
            errors[f"{kind} {name}"] = error(getattr(found, kind)[name], tensor)
    wrong = {name: value for name, value in errors.items() if value > tolerance}
    assert not wrong


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    scale = float(expected.abs().max())
    difference = float((found - expected).abs().max())
    return difference / scale if scale > 1e-6 else difference


def check(pool: RankPool, name: str, tolerance: float = 2e-5, **options: bool) -> None:
    expected = alone(name, Options(**options))
    for found in pool.run(together, name, Options(**options)):
        assert_same(found, expected, tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_train_as_one(two_ranks: RankPool, name: str) -> None:
    check(two_ranks, name)
    check(two_ranks, name, sequence=True)


@pytest.mark.parametrize("name", ["llama", "gpt", "hf-qwen"])
def test_four_ranks_train_as_one_also_with_fewer_heads_of_keys(four_ranks: RankPool, name: str) -> None:
    check(four_ranks, name)
    check(four_ranks, name, sequence=True)


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_a_model_that_was_built_on_meta_is_split_then_sharded_then_filled(four_ranks: RankPool, name: str) -> None:
    check(four_ranks, name, zero=True, meta=True, sequence=name == "llama")


@pytest.mark.parametrize("name", ["gpt", "hf-gpt2", "hf-mixtral"])
def test_sharding_goes_on_top_of_split_sequences(four_ranks: RankPool, name: str) -> None:
    check(four_ranks, name, zero=True, sequence=True)


def test_bf16_agrees_up_to_rounding(two_ranks: RankPool, four_ranks: RankPool) -> None:
    check(two_ranks, "llama", 3e-2, bf16=True, sequence=True)
    check(four_ranks, "gpt", 5e-2, bf16=True, zero=True, sequence=True, recompute=True)


def test_blocks_may_be_recomputed(two_ranks: RankPool) -> None:
    check(two_ranks, "gpt", recompute=True)
    check(two_ranks, "hf-llama", recompute=True, sequence=True)


def test_blocks_compile_without_a_break(two_ranks: RankPool) -> None:
    check(two_ranks, "llama", compile=True, sequence=True)


# ---- parts of a model


class Mlp(nn.Module):
    """Somebody's own model, without a plan."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6))
        self.fused = nn.Linear(6, 4)
        self.out = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.fused(self.inner(x)).flip(-1))
        return out


def run_mlp(rank: int, size: int, plan: dict[str, str] | None) -> list[Tensor]:
    model = Mlp()
    if plan is not None:
        apply_tensor_parallel(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)), plan=plan)
    x = torch.linspace(-1, 1, 30).view(5, 6).requires_grad_()
    out = model(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(whole(p.grad) for p in model.parameters() if p.grad is not None)]


def test_a_plan_of_ones_own_works_on_any_model(two_ranks: RankPool) -> None:
    plan = {"inner.0": "colwise", "inner.2": "rowwise", "fused": "colwise_gather", "out": "rowwise_split"}
    expected = run_mlp(0, 1, None)
    for found in two_ranks.run(run_mlp, plan):
        torch.testing.assert_close(found, expected)


def run_loss(rank: int, size: int, dtype: torch.dtype, chunk_bytes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 41, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (3, 41), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    given: Tensor = weight
    if size > 1:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        given = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    loss = linear_cross_entropy(hidden, given, labels, chunk_bytes=chunk_bytes)
    (loss.sum * 0.37).backward()
    assert hidden.grad is not None
    assert given.grad is not None
    if size > 1:
        torch.distributed.all_reduce(hidden.grad)
    with torch.no_grad():
        logits = linear_logits(hidden.detach(), given)
        again = linear_cross_entropy(hidden, given, labels, chunk_bytes=chunk_bytes).sum
    assert torch.equal(again, loss.sum.detach())
    return [loss.sum.detach(), torch.as_tensor(loss.count), hidden.grad, whole(given.grad), logits]


@pytest.mark.parametrize("chunk_bytes", [2**20, 2**10])
def test_the_loss_over_parts_of_the_vocabulary_is_the_whole_loss(four_ranks: RankPool, chunk_bytes: int) -> None:
    expected = run_loss(0, 1, torch.float32, 2**20)
    for found in four_ranks.run(run_loss, torch.float32, chunk_bytes):
        torch.testing.assert_close(found, expected)
    expected = run_loss(0, 1, torch.bfloat16, chunk_bytes)
    for found in four_ranks.run(run_loss, torch.bfloat16, chunk_bytes):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=0)
        for one, other in zip(found[2:4], expected[2:4], strict=True):
            assert (one.float() - other.float()).norm() < 0.02 * other.float().norm()


def run_logits(rank: int, size: int, name: str) -> Tensor:
    model = make(name).eval()
    if size > 1:
        apply_tensor_parallel(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)), sequence=True)
    with torch.no_grad():
        logits: Tensor = model(batch(1)["input_ids"])
    return logits


@pytest.mark.parametrize("name", ["gpt", "hf-llama"])
def test_without_labels_the_answer_is_whole_logits(two_ranks: RankPool, name: str) -> None:
    expected = run_logits(0, 1, name)
    for found in two_ranks.run(run_logits, name):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# ---- dropout


@dataclass
class Dropped:
    loss: float
    attention: list[Tensor]
    residual: list[Tensor]
    gradients: dict[str, Tensor]


def run_dropout(rank: int, size: int, sequence: bool, recompute: bool) -> Dropped:
    torch.manual_seed(2)
    model = build_model(MODELS["gpt"].model_copy(update={"dropout": 0.4}))
    found = Dropped(0.0, [], [], {})

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float) -> Tensor:
        found.attention.append(torch.dropout(torch.ones_like(q), dropout, True))
        return attention.attend(q, k, v, mask, dropout)

    def drop(x: Tensor) -> Tensor:
        dropped = torch.dropout(torch.ones_like(x), 0.4, True)
        found.residual.append(dropped)
        return x * dropped

    for block in model.blocks:  # type: ignore[union-attr]
        block.attention.attend = attend
        block._drop = drop
    apply_tensor_parallel(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)), sequence=sequence)
    if recompute:
        apply_recompute(find_wrap_units(model, WrapConfig()), RecomputeConfig(mode="full"))
    torch.manual_seed(7)  # the same on every rank of the group
    loss = model(**batch(0)).sum
    found.loss = loss.item()
    loss.backward()
    found.gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return found


def differ(tensors: list[Tensor]) -> bool:
    return all(not torch.equal(a, b) for a, b in combinations(tensors, 2))


def test_ranks_drop_the_same_where_they_do_the_same_work_and_else_not(two_ranks: RankPool) -> None:
    one, other = two_ranks.run(run_dropout, False, False)
    assert one.loss == other.loss
    assert all(map(torch.equal, one.residual, other.residual))
    assert differ([*one.attention, *other.attention])
    one, other = two_ranks.run(run_dropout, True, False)
    assert one.loss == other.loss
    assert differ([*one.attention, *other.attention])
    assert differ([*one.residual, *other.residual])


@pytest.mark.parametrize("sequence", [False, True])
def test_recomputed_blocks_drop_what_they_dropped_before(two_ranks: RankPool, sequence: bool) -> None:
    kept = two_ranks.run(run_dropout, sequence, False)
    for found, expected in zip(two_ranks.run(run_dropout, sequence, True), kept, strict=True):
        torch.testing.assert_close(found.gradients, expected.gradients)


def run_hf_dropout(rank: int, size: int, sequence: bool) -> tuple[float, dict[str, Tensor]]:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.4)
    torch.manual_seed(2)
    model = build_model(HFConfig(config={**MODELS["hf-gpt2"].config, **rates})).train()
    apply_tensor_parallel(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)), sequence=sequence)
    torch.manual_seed(7)
    loss = model(**batch(0)).sum
    loss.backward()
    return loss.item(), {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_behind_a_row_parallel_layer_is_the_same_on_all_ranks(two_ranks: RankPool, sequence: bool) -> None:
    one, other = two_ranks.run(run_hf_dropout, sequence)
    assert one[0] == other[0]
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=0)


# ---- what is sent


def run_counted(rank: int, size: int, name: str, options: Options) -> TensorTraffic:
    model = make(name)
    apply_tensor_parallel(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)), sequence=options.sequence)
    if options.recompute:
        apply_recompute(find_wrap_units(model, WrapConfig()), RecomputeConfig(mode="full"))
    with SentBytes() as sent:
        model(**batch(0)).sum.backward()
    return TensorTraffic(**sent.through())


def expect(**sizes: Any) -> TensorTraffic:
    return tensor_traffic(tokens=2 * SEQ, dim=32, layers=2, itemsize=4, **sizes)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_sent_is_what_theory_says(two_ranks: RankPool, sequence: bool, recompute: bool) -> None:
    options = Options(sequence=sequence, recompute=recompute)
    norms = 2 * 2 * 32 if sequence else 0
    for found in two_ranks.run(run_counted, "llama", options):
        assert found == expect(sequence=sequence, recompute=recompute, shared=norms)
    fused = 2 * 3 * 32  # biases
    norms_and_biases = 2 * (4 + 2) * 32 if sequence else 0
    for found in two_ranks.run(run_counted, "hf-gpt2", options):
        assert found == expect(
            sequence=sequence, recompute=recompute, shared=fused + norms_and_biases, exchanged=2 * 3 * 32 * 32 // 2
        )


# ---- what cannot work


def refuse(rank: int, size: int, cases: list[tuple[Any, dict[str, Any]]]) -> list[str]:
    """The messages of models that cannot be split; of configs, or of functions that make one."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    messages = []
    for source, options in cases:
        model = source() if callable(source) else build_model(source)
        before = dict(model.named_parameters())
        with pytest.raises(PlaitError) as caught:
            apply_tensor_parallel(model, mesh, **options)
        assert dict(model.named_parameters()) == before
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_split_is_refused_before_anything_is_changed(two_ranks: RankPool) -> None:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "seq_len": SEQ, "layers": 1}
    cases: list[tuple[Any, dict[str, Any], list[str]]] = [
        (GptConfig(dim=24, heads=3, **sizes), {}, ["strategy.layout.tp", "3 attention heads", "2 ranks", "1, 3"]),
        (LlamaConfig(dim=16, heads=2, ffn_dim=33, **sizes), {}, ["33 output features", "33 input features"]),
        (
            GptConfig(dim=8, heads=2, vocab_size=1, seq_len=SEQ, layers=1),
            {},
            ["strategy.layout.tp", "1 rows", "2 ranks"],
        ),
        (Mlp, {}, ["tensor_plan", "strategy.tensor.plan"]),
        (Mlp, {"plan": {"inner.3": "colwise"}}, ["strategy.tensor.plan", "`colwise`", "LayerNorm"]),
        (
            Mlp,
            {"plan": {"inner": "region", "inner.0": "colwise"}},
            ["strategy.tensor.plan", "'inner.2', 'inner.3'", "'inner'"],
        ),
        (Mlp, {"plan": {"fused": "heads"}}, ["head_dim"]),
        (Mlp, {"plan": {"inner.0": "colwise"}, "sequence": True}, ["strategy.tensor.sequence_parallel", "`block`"]),
        (Mlp, {"plan": {"inner.0": "colwise"}, "async_tp": True}, ["symmetric memory", "cpu"]),
    ]
    for messages in two_ranks.run(refuse, [case[:2] for case in cases]):
        for message, (*_, parts) in zip(messages, cases, strict=True):
            assert all(part in message for part in parts), message


def run_odd_sequence(rank: int, size: int) -> str:
    model = make("llama")
    apply_tensor_parallel(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)), sequence=True)
    with pytest.raises(PlaitError) as caught:
        model(torch.zeros(1, 7, dtype=torch.long))
    return str(caught.value)


def test_a_sequence_that_cannot_be_shared_evenly_is_refused_with_the_lengths_that_can(two_ranks: RankPool) -> None:
    for message in two_ranks.run(run_odd_sequence):
        assert not missing(message, "2 ranks", "7", "8", "6", "strategy.tensor.sequence_parallel: false")
