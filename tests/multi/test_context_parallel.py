"""Rows that are spread over ranks give what whole rows give in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from plait.config.model import GptConfig, HFConfig, LlamaConfig
from plait.config.strategy import CompileConfig, RecomputeConfig, WrapConfig
from plait.distributed.activation_checkpointing import apply_recompute
from plait.distributed.compile import compile_wrapped_modules
from plait.distributed.context_parallel import SEQUENCE_ATTENTIONS, apply_context_parallel
from plait.distributed.context_parallel_attention import (
    CONTEXT_KINDS,
    ContextGroup,
    ContextKind,
    all_gather_stacked,
    allgather_attention,
    ring_attention,
    split,
    split_batch,
    ulysses_attention,
    unsplit,
    visible,
)
from plait.distributed.wrap import find_wrap_units
from plait.errors import ModelError
from plait.models import build_model
from plait.models.common.attention import attend, document_mask
from tests.communication_volume import context_traffic
from tests.multi.ranks import RankPool
from tests.refusals import missing
from tests.traffic import SentBytes

VOCAB = 37


# Attention alone.


@dataclass(frozen=True)
class Case:
    """Sizes of one attention; `tokens` are those of a whole row."""

    kind: ContextKind
    tokens: int
    heads: int = 4
    kv_heads: int = 4
    documents: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0
    value_dim: int = 6


def make_tensors(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values, a gradient, document ids: of whole rows."""
    draw = torch.Generator().manual_seed(case.seed)

    def tensor(heads: int, dim: int) -> Tensor:
        return torch.randn(2, heads, case.tokens, dim, generator=draw, dtype=torch.float64).to(case.dtype)

    q, k = tensor(case.heads, 6), tensor(case.kv_heads, 6)
    v, gradient = tensor(case.kv_heads, case.value_dim), tensor(case.heads, case.value_dim)
    ids = (torch.rand(2, case.tokens, generator=draw) < 0.15).cumsum(1) if case.documents else None
    return q, k, v, gradient, ids


def attend_whole(case: Case) -> list[Tensor]:
    """Output and gradients of q, k and v, in fp64."""
    q, k, v, gradient, ids = make_tensors(case)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    mask = torch.ones(case.tokens, case.tokens, dtype=torch.bool).tril() if ids is None else document_mask(ids)
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in inputs[1:])
    output = F.scaled_dot_product_attention(inputs[0], k, v, attn_mask=mask)
    output.backward(gradient.double())
    return [output.detach(), *(x.grad for x in inputs if x.grad is not None)]


def attend_on_ranks(rank: int, size: int, cases: list[Case]) -> list[list[Tensor]]:
    """The same of this rank's tokens, for each case."""
    cp = ContextGroup.of(dist.group.WORLD)  # type: ignore[arg-type]
    return [_attend_here(case, cp) for case in cases]


def _attend_here(case: Case, cp: ContextGroup) -> list[Tensor]:
    q, k, v, gradient, ids = make_tensors(case)
    mine = [split(x, cp.rank, cp.size, case.kind, dim=2) for x in (q, k, v, gradient)]
    inputs = [x.clone().requires_grad_() for x in mine[:3]]
    q, k, v = inputs
    documents = None if ids is None else all_gather_stacked(split(ids, cp.rank, cp.size, case.kind), cp)
    if case.kind == "ring":
        output = ring_attention(q, k, v, cp, documents=documents)
    elif case.kind == "allgather":
        output = allgather_attention(q, k, v, cp, mask=None if documents is None else visible(documents, cp))
    else:

        def inner(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = None if documents is None else document_mask(unsplit(list(documents), "ulysses"))
            grouped = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)

        output = ulysses_attention(q, k, v, cp, inner)
    output.backward(mine[3])
    return [output.detach(), *(x.grad for x in inputs if x.grad is not None)]


def compare_attention(pool: RankPool, cases: list[Case]) -> None:
    found = pool.run(attend_on_ranks, cases)
    for index, case in enumerate(cases):
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}[case.dtype]
        for name, expected, *parts in zip("oqkv", attend_whole(case), *(r[index] for r in found), strict=True):
            whole = unsplit(parts, case.kind, dim=2)
            assert whole.dtype == case.dtype
            error = float((whole.double() - expected).abs().max() / expected.abs().max())
            assert error <= tolerance, f"{name} of {case} differs by {error:.1e}"


def random_cases(size: int) -> list[Case]:
    seed = int(torch.randint(2**31, ()))
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    return [
        Case(
            kind,
            tokens=2 * size * pick(1, 2, 3, 5, 9, 17),
            kv_heads=pick(1, 2, 4),
            documents=documents,
            dtype=dtype,
            seed=seed + index,
            value_dim=pick(6, 6, 4),
        )
        for kind in CONTEXT_KINDS
        for documents in (False, True)
        for index, dtype in enumerate((torch.float64, torch.float64, torch.float32, torch.bfloat16))
    ]


def test_attention_and_its_gradients_on_two_ranks(two_ranks: RankPool) -> None:
    compare_attention(two_ranks, random_cases(2))


def test_attention_and_its_gradients_on_four_ranks(four_ranks: RankPool) -> None:
    compare_attention(four_ranks, random_cases(4))


def test_ulysses_shares_key_heads_that_the_ranks_do_not_divide(four_ranks: RankPool) -> None:
    compare_attention(four_ranks, [Case("ulysses", 16, heads=12, kv_heads=heads) for heads in (1, 2, 3, 6)])


# Whole models.

MODELS: dict[str, Any] = {
    "llama": LlamaConfig(vocab_size=VOCAB, dim=16, layers=2, heads=4, kv_heads=2, seq_len=32),
    "one-layer": LlamaConfig(vocab_size=VOCAB, dim=16, layers=1, heads=4, kv_heads=2, seq_len=32),
    "gpt": GptConfig(vocab_size=VOCAB, dim=16, layers=2, heads=4, seq_len=32),
    "hf-llama": HFConfig(
        config={
            "model_type": "llama",
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
        }
    ),
    "hf-gpt2": HFConfig(
        config={
            "model_type": "gpt2",
            "vocab_size": VOCAB,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
    ),
}


@dataclass(frozen=True)
class Run:
    """One forward and backward of a model; on several ranks where it has a kind."""

    model: str
    kind: ContextKind | None = None
    documents: bool = False
    padding: bool = False
    tokens: int = 21  # neither two ranks nor four divide them
    seed: int = 0
    dtype: torch.dtype = torch.float32
    recompute: str = "none"
    compiled: bool = False
    autocast: bool = False


@dataclass
class Outcome:
    loss: float
    count: int
    gradients: dict[str, Tensor]
    names: list[str]


def make_batch(run: Run) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(run.seed)
    ids = torch.randint(0, VOCAB, (2, run.tokens + 1), generator=draw)
    labels = ids[:, 1:].masked_fill(torch.rand(2, run.tokens, generator=draw) < 0.2, -100)
    batch = {"input_ids": ids[:, :-1], "labels": labels}
    if run.documents:
        first = torch.rand(2, run.tokens, generator=draw) < 0.2
        first[:, 0] = True
        place = torch.arange(run.tokens).expand(2, -1)
        batch["document_ids"] = first.cumsum(1)
        batch["positions"] = place - torch.where(first, place, 0).cummax(1).values
    if run.padding:  # on the left, where it is not simply out of sight
        batch["attention_mask"] = (torch.arange(run.tokens) >= torch.tensor([[3], [0]])).long()
        batch["labels"] = labels.masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def build(run: Run) -> nn.Module:
    torch.manual_seed(run.seed)
    return build_model(MODELS[run.model]).to(run.dtype)


def step(model: nn.Module, batch: dict[str, Tensor], *, autocast: bool = False) -> Outcome:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        term = model(**batch)
    term.sum.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(float(term.sum.detach()), int(term.count), gradients, list(model.state_dict()))


def steps_on_ranks(rank: int, size: int, runs: list[Run]) -> list[Outcome]:
    return [_step_here(run, rank, size) for run in runs]


def _step_here(run: Run, rank: int, size: int) -> Outcome:
    assert run.kind is not None
    model = build(run)
    units = find_wrap_units(model, WrapConfig())
    apply_context_parallel(model, dist.group.WORLD, kind=run.kind)  # type: ignore[arg-type]
    apply_recompute(units, RecomputeConfig(mode=run.recompute))  # type: ignore[arg-type]
    if run.compiled:
        torch._dynamo.reset()
        compile_wrapped_modules(
            model, units, CompileConfig(enabled=True, backend="aot_eager", fullgraph=True), sharded=True
        )
    return step(model, split_batch(make_batch(run), rank, size, kind=run.kind), autocast=run.autocast)


def compare_models(pool: RankPool, runs: list[Run]) -> None:
    found = pool.run(steps_on_ranks, runs)
    for index, run in enumerate(runs):
        parts = [outcomes[index] for outcomes in found]
        expected = step(build(run), make_batch(run), autocast=run.autocast)
        tolerance = 1e-5 if run.dtype == torch.float32 and not run.autocast else 3e-2
        assert sum(part.count for part in parts) == expected.count, run
        assert sum(part.loss for part in parts) == pytest.approx(expected.loss, rel=tolerance), run
        largest = max(float(g.abs().max()) for g in expected.gradients.values())
        for name, gradient in expected.gradients.items():
            total = torch.stack([part.gradients[name].double() for part in parts]).sum(0)
            # The gradient of a bias of all keys is zero but for rounding.
            scale = max(float(gradient.abs().max()), 1e-2 * largest)
            error = float((total - gradient).abs().max()) / scale
            assert error <= tolerance, f"{name} differs by {error:.1e} in {run}"
        assert all(part.names == expected.names for part in parts)


def fresh_seed() -> int:
    return int(torch.randint(2**31, ()))


def plain_and_packed(model: str) -> list[Run]:
    seed = fresh_seed()
    return [Run(model, kind, documents, seed=seed) for kind in CONTEXT_KINDS for documents in (False, True)]


@pytest.mark.parametrize("model", ["llama", "gpt", "hf-llama", "hf-gpt2"])
def test_models_on_two_ranks(two_ranks: RankPool, model: str) -> None:
    compare_models(two_ranks, plain_and_packed(model))


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_models_on_four_ranks(four_ranks: RankPool, model: str) -> None:
    compare_models(four_ranks, plain_and_packed(model))


def test_models_in_bf16(two_ranks: RankPool) -> None:
    runs = [Run(model, kind, True, dtype=torch.bfloat16) for model in ("llama", "hf-llama") for kind in CONTEXT_KINDS]
    compare_models(two_ranks, [*runs, *(Run("hf-llama", kind, autocast=True) for kind in CONTEXT_KINDS)])


def test_models_that_recompute(two_ranks: RankPool) -> None:
    runs = [Run("llama", kind, True, recompute=mode) for kind in CONTEXT_KINDS for mode in ("full", "selective")]
    runs += [Run("hf-gpt2", "ring", recompute="full"), Run("llama", "allgather", recompute="selective")]
    compare_models(two_ranks, runs)


def test_models_whose_blocks_are_compiled_without_a_break(two_ranks: RankPool) -> None:
    runs = [Run("one-layer", "ring", True), Run("one-layer", "ulysses"), Run("one-layer", "allgather", True)]
    runs += [Run("one-layer", "allgather"), Run("one-layer", "ring", recompute="full")]
    compare_models(two_ranks, [replace(run, compiled=True) for run in runs])


def test_padding_of_transformers_models_is_not_attended_to(two_ranks: RankPool) -> None:
    compare_models(two_ranks, [Run("hf-llama", kind, padding=True) for kind in CONTEXT_KINDS])


def step_in_a_mesh(rank: int, size: int, runs: list[Run]) -> list[Outcome]:
    """Two lines of two ranks; each has a batch of its own. The model is on the meta device when it is changed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    outcomes = []
    for run in runs:
        assert run.kind is not None
        with torch.device("meta"):
            model = build(run)
        apply_context_parallel(model, mesh["cp"], kind=run.kind)
        model.to_empty(device="cpu")
        model.load_state_dict(build(run).state_dict())
        batch = make_batch(replace(run, seed=run.seed + mesh["dp_shard"].get_local_rank()))
        outcomes.append(step(model, split_batch(batch, mesh["cp"].get_local_rank(), 2, kind=run.kind)))
    return outcomes


def test_a_line_may_be_one_axis_of_a_mesh(four_ranks: RankPool) -> None:
    runs = [Run("llama", kind, documents=True, seed=fresh_seed()) for kind in CONTEXT_KINDS]
    found = four_ranks.run(step_in_a_mesh, runs)
    for index, run in enumerate(runs):
        for cp in range(2):
            batch = make_batch(replace(run, seed=run.seed + cp))
            expected = step(build(run), batch)
            parts = [found[rank][index] for rank in (2 * cp, 2 * cp + 1)]
            assert sum(part.loss for part in parts) == pytest.approx(expected.loss, rel=1e-5)
            for name, gradient in expected.gradients.items():
                total = torch.stack([part.gradients[name] for part in parts]).sum(0)
                torch.testing.assert_close(total, gradient, rtol=1e-4, atol=1e-5)


# What is sent.


def count_on_ranks(rank: int, size: int, runs: list[Run]) -> list[tuple[float, float]]:
    counted = []
    for run in runs:
        assert run.kind is not None
        model = build(run)
        apply_context_parallel(model, dist.group.WORLD, kind=run.kind)  # type: ignore[arg-type]
        apply_recompute(find_wrap_units(model, WrapConfig()), RecomputeConfig(mode=run.recompute))  # type: ignore[arg-type]
        with SentBytes() as forward:
            term = model(**split_batch(make_batch(run), rank, size, kind=run.kind))
        with SentBytes() as backward:
            term.sum.backward()
        counted.append((forward.bytes, backward.bytes))
    return counted


def test_ranks_send_what_theory_says(four_ranks: RankPool) -> None:
    runs = [
        Run("llama", kind, documents, dtype=dtype, recompute=recompute)
        for kind in CONTEXT_KINDS
        for documents, dtype, recompute in ((False, torch.float32, "full"), (True, torch.bfloat16, "none"))
    ]
    found = four_ranks.run(count_on_ranks, runs)
    sizes = {"size": 4, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 4, "layers": 2}
    for index, run in enumerate(runs):
        assert run.kind is not None
        expected = context_traffic(
            run.kind,
            **sizes,
            tokens=run.tokens,
            element_size=run.dtype.itemsize,
            recompute=run.recompute == "full",
            documents=run.documents,
        )
        assert [counts[index] for counts in found] == [expected] * 4, run


# What drops out, and what is refused.


def drop_out_on_ranks(rank: int, size: int, kinds: list[ContextKind]) -> list[Tensor]:
    """What is left of weights that sum to one, for each query."""
    torch.manual_seed(rank)
    cp = ContextGroup.of(dist.group.WORLD)  # type: ignore[arg-type]
    q, k = torch.randn(2, 8, 4, 64, 8)
    return [
        SEQUENCE_ATTENTIONS[kind](cp).attend(q, k, torch.ones_like(k), None, 0.5, scale=None, inner=attend)[..., 0]
        for kind in kinds
    ]


def test_weights_drop_out_differently_on_each_rank(two_ranks: RankPool) -> None:
    found = two_ranks.run(drop_out_on_ranks, ["ulysses", "allgather"])
    for first, second in zip(*found, strict=True):
        assert not torch.equal(first, second)
        assert float(torch.cat([first, second]).mean()) == pytest.approx(1.0, abs=0.05)
        assert float(torch.cat([first, second]).std()) > 0.1


def refuse_on_ranks(rank: int, size: int, cases: list[tuple[Any, ContextKind, bool]]) -> list[str]:
    """The messages; only one rank tries, and would wait for ever if it sent anything first."""
    if rank == 1:
        return []
    messages = []
    for config, kind, positions in cases:
        model = nn.Linear(2, 2) if config is None else build_model(config)
        batch = split_batch(make_batch(Run("llama")), 0, 2, kind=kind)
        if not positions:
            del batch["positions"]
        try:
            apply_context_parallel(model, dist.group.WORLD, kind=kind)  # type: ignore[arg-type]
            messages.append(f"answered {model(**batch)}")
        except ModelError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_work_is_refused_before_anything_is_sent(two_ranks: RankPool) -> None:
    llama, gpt2 = MODELS["hf-llama"].config, MODELS["hf-gpt2"].config
    cases: list[tuple[Any, ContextKind, bool, list[str]]] = [
        (LlamaConfig(vocab_size=VOCAB, dim=12, layers=1, heads=3), "ulysses", True, ["blocks.0.attention", "3 heads"]),
        (HFConfig(config={**llama, "num_attention_heads": 1, "num_key_value_heads": 1}), "ulysses", True, ["1 heads"]),
        (GptConfig(vocab_size=VOCAB, dim=8, layers=1, heads=2, dropout=0.1), "ring", True, ["dropout=0.1"]),
        (HFConfig(config={**gpt2, "attn_pdrop": 0.2}), "ring", True, ["dropout=0.2"]),
        (None, "ring", True, ["Linear", "attention"]),
        (MODELS["llama"], "ring", False, ["Llama ", "positions", "`split_batch`"]),
        (MODELS["hf-llama"], "allgather", False, ["LlamaForCausalLM ", "positions", "`split_batch`"]),
        (
            HFConfig(config={**llama, "model_type": "mixtral", "output_router_logits": True}),
            "ring",
            True,
            ["output_router_logits", "strategy.layout.cp"],
        ),
    ]
    messages = two_ranks.run(refuse_on_ranks, [case[:3] for case in cases])[0]
    for (*_, named), message in zip(cases, messages, strict=True):
        assert not missing(message, *named), message
        assert not message.startswith("answered"), message
