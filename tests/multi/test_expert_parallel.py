"""Experts spread over ranks train as in one process."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from plait.config import parse_sections
from plait.config.strategy import RecomputeConfig, WrapConfig
from plait.distributed.activation_checkpointing import apply_recompute
from plait.distributed.expert_parallel import apply_expert_parallel, expert_modules, expert_placement, share_router_sums
from plait.distributed.materialize import give_storage, initialize
from plait.distributed.wrap import find_wrap_units
from plait.errors import ConfigError, ModelError
from plait.models import build_model
from plait.models.moe import Experts, Router
from tests.communication_volume import expert_traffic
from tests.multi.ranks import RankPool
from tests.refusals import missing
from tests.traffic import SentBytes

STEPS, MICRO_BATCHES, ROWS, SEQ, VOCAB = 3, 4, 2, 12, 61
OURS = {"type": "moe", "vocab_size": VOCAB, "dim": 32, "layers": 2, "heads": 4, "experts": 4, "expert_dim": 16}
BALANCED = {**OURS, "balance_loss": 0.3, "z_loss": 0.1, "bias_rate": 0.05, "shared_experts": 1}
SPARSE = {**OURS, "capacity_factor": 1.0, "moe_every": 2, "score": "sigmoid", "ffn_dim": 24}
MIXTRAL = {
    "type": "hf",
    "config": {
        "model_type": "mixtral",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
}
MODELS: dict[str, dict[str, Any]] = {"ours": BALANCED, "capacity": SPARSE, "mixtral": MIXTRAL}


@dataclass(frozen=True)
class Case:
    """How a model is trained."""

    model: str
    ep: int = 1
    bf16: bool = False
    shard: bool = False
    recompute: bool = False
    compile: bool = False
    forced: bool = False
    """All tokens go to experts 0 and 1, which lie on the first rank."""

    @property
    def alone(self) -> Case:
        return Case(self.model, bf16=self.bf16, forced=self.forced)


@dataclass
class Trace:
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def data() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """For each step, micro-batches with very different numbers of targets."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(STEPS):
        step = []
        for micro in range(MICRO_BATCHES):
            ids = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator)
            labels = ids[:, 1:].clone()
            labels[torch.rand(labels.shape, generator=generator) < 0.25 * micro] = -100
            step.append((ids[:, :-1], labels))
        yield step


def build(case: Case, mesh: DeviceMesh | None) -> nn.Module:
    """On the meta device, spread, recomputed, compiled, sharded, and given values, in this order."""
    with torch.device("meta"):
        model = build_model(parse_sections(model=MODELS[case.model]).config.model)
    names = [name for name, _ in model.named_parameters()]
    if mesh is not None and case.ep > 1:
        assert [*apply_expert_parallel(model, mesh["ep"])] == [*expert_modules(model)]
    units = find_wrap_units(model, WrapConfig())
    if case.recompute:
        apply_recompute(units, RecomputeConfig(mode="full"))
    if case.compile:
        for unit in units:
            unit.module.compile(backend="aot_eager")
    if mesh is not None and case.shard:
        shard(model, [unit.module for unit in units], mesh, case)
    give_storage(model, torch.device("cpu"))
    initialize(model, model.init_weights, seed=3, device=torch.device("cpu"))  # type: ignore[arg-type]
    assert [name for name, _ in model.named_parameters()] == names
    if case.forced:
        for router in (module for module in model.modules() if isinstance(module, Router)):
            assert router.bias is not None
            router.bias[:2] = 100.0
    return model


def shard(model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, case: Case) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if case.bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    everybody = mesh._flatten("everybody")
    ranks = mesh["dp_shard"].size()
    for module in expert_modules(model).values():
        fully_shard(module, mesh=mesh["dp_shard"], mp_policy=policy, shard_placement_fn=expert_placement(ranks))
    for block in blocks:
        fully_shard(block, mesh=everybody, mp_policy=policy)
    fully_shard(model, mesh=everybody, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def train(rank: int, size: int, case: Case) -> Trace:
    """Three steps of AdamW; rank r takes micro-batches r, r + size, …"""
    mesh = None
    if size > 1:
        mesh = init_device_mesh("cpu", (size // case.ep, case.ep), mesh_dim_names=("dp_shard", "ep"))
    model = build(case, mesh)
    params = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=0.1, foreach=False)
    trace = Trace()
    for step in data():
        targets = sum(int((labels != -100).sum()) for _, labels in step)
        total = torch.zeros(())
        for ids, labels in step[rank::size]:
            if case.bf16 and not case.shard:  # what `fully_shard` does, by hand
                rounded = {name: param.bfloat16() for name, param in params.items()}
                loss = torch.func.functional_call(model, rounded, (ids, labels))
            else:
                loss = model(ids, labels)
            (loss.sum / targets).backward()
            total += loss.sum.detach() / targets
        if mesh is not None:
            dist.all_reduce(total)
        if mesh is not None and not case.shard:
            sum_gradients(params, mesh)
        trace.losses.append(total.item())
        trace.gradients = trace.gradients or {name: whole(param.grad) for name, param in params.items()}
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(model, "after_step") and not case.forced:
            model.after_step(None if mesh is None else dist.group.WORLD)
    trace.tensors = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    return trace


def sum_gradients(params: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    for param in params.values():
        assert param.grad is not None
        if isinstance(param.grad, DTensor):
            dist.all_reduce(param.grad.to_local(), group=mesh["dp_shard"].get_group())
        else:
            dist.all_reduce(param.grad)


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@cache
def alone(case: Case) -> Trace:
    return train(0, 1, case)


def compare(pool: RankPool, case: Case) -> None:
    expected, tolerance = alone(case.alone), 3e-2 if case.bf16 else 2e-5
    for found in pool.run(train, case):
        assert found.losses == pytest.approx(expected.losses, rel=tolerance)
        for kind in ("gradients", "tensors"):
            mine, theirs = getattr(found, kind), getattr(expected, kind)
            assert mine.keys() == theirs.keys()
            for name, tensor in theirs.items():
                error = (mine[name] - tensor).norm() / tensor.norm().clamp_min(1e-12)
                assert error <= tolerance, f"{kind}: {name} differs by {error:.1e} of its norm"


TWO = [
    Case("ours", ep=2),
    Case("ours", ep=2, bf16=True),
    Case("ours", ep=2, shard=True, recompute=True),
    Case("ours", ep=2, recompute=True, compile=True),
    Case("capacity", ep=2, recompute=True),
    Case("capacity", ep=2, shard=True, compile=True),
    Case("mixtral", ep=2),
    Case("mixtral", ep=2, bf16=True),
    Case("ours", ep=2, forced=True),
]
FOUR = [
    Case("ours", ep=4),
    Case("mixtral", ep=4, recompute=True),
    Case("ours", ep=2),
    Case("ours", ep=2, shard=True, bf16=True),
    Case("mixtral", ep=2, shard=True, recompute=True),
    Case("ours", ep=2, shard=True, recompute=True, forced=True),
]


def words(case: Case) -> str:
    options = [name for name in ("bf16", "shard", "recompute", "compile", "forced") if getattr(case, name)]
    return "-".join([case.model, f"ep{case.ep}", *options])


@pytest.mark.parametrize("case", TWO, ids=words)
def test_two_ranks_train_as_one(two_ranks: RankPool, case: Case) -> None:
    compare(two_ranks, case)


@pytest.mark.parametrize("case", FOUR, ids=words)
def test_four_ranks_train_as_one(four_ranks: RankPool, case: Case) -> None:
    compare(four_ranks, case)


# ---- one module alone


def made_experts(kind: str) -> nn.Module:
    module: nn.Module = Experts(4, 16, 8, layers=1, drops=True)
    if kind != "ours":
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        config = MixtralConfig(hidden_size=16, intermediate_size=8, num_local_experts=4)
        config._experts_implementation = kind
        module = MixtralExperts(config)
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=seeded(name)) * 0.3)
    return module


def seeded(word: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(word.encode()))


def inputs(rank: int, tokens: int, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    generator = seeded(f"rank {rank}")
    hidden = torch.randn(tokens, 16, generator=generator, requires_grad=True)
    choices = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(max(tokens, 1))])[:tokens]
    return hidden, choose(choices), torch.rand(tokens, 2, generator=generator).requires_grad_()


def anywhere(choices: Tensor) -> Tensor:
    return choices


def on_the_last_rank(choices: Tensor) -> Tensor:
    return choices % 1 + 3


def nowhere(choices: Tensor) -> Tensor:
    return choices % 1 + 4


def answers(module: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    result = module(*given)
    (result * torch.arange(1.0, 17.0)).square().sum().backward()
    return {"result": result.detach(), "hidden": whole(given[0].grad), "weights": whole(given[2].grad)}


def spread_answers(rank: int, size: int, kind: str, tokens: list[int], choose: Any, tp: int = 1) -> dict[str, Tensor]:
    """`tp` ranks see the same tokens."""
    axes = {axis: ranks for axis, ranks in (("ep", size // tp), ("tp", tp)) if ranks > 1}
    module = made_experts(kind)
    apply_expert_parallel(module, init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)))
    found = answers(module, inputs(rank // tp, tokens[rank // tp], choose))
    return found | {name: whole(param.grad) for name, param in module.named_parameters()}


def check_answers(pool: RankPool, kind: str, tokens: list[int], choose: Any, tp: int = 1) -> None:
    found = pool.run(spread_answers, kind, tokens, choose, tp)
    module = made_experts(kind)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for place, count in enumerate(tokens):
        expected = answers(module, inputs(place, count, choose)) if count else {"result": torch.empty(0, 16)}
        for mine in found[place * tp : (place + 1) * tp]:
            for name, tensor in expected.items():
                torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    for name, parameter in module.named_parameters():
        for mine in found:
            torch.testing.assert_close(mine[name], parameter.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("choose", [anywhere, on_the_last_rank])
@pytest.mark.parametrize("tokens", [[5, 9], [0, 6], [0, 0]], ids=str)
@pytest.mark.parametrize("kind", ["ours", "eager", "grouped_mm"])
def test_ranks_without_tokens_and_experts_without_choices_take_part(
    two_ranks: RankPool, kind: str, tokens: list[int], choose: Any
) -> None:
    check_answers(two_ranks, kind, tokens, choose)


@pytest.mark.parametrize("choose", [anywhere, on_the_last_rank])
@pytest.mark.parametrize("kind", ["ours", "eager", "grouped_mm"])
def test_ranks_that_see_the_same_tokens_share_experts_and_answer_alike(
    two_ranks: RankPool, four_ranks: RankPool, kind: str, choose: Any
) -> None:
    tokens = random.randrange(1, 12)
    check_answers(two_ranks, kind, [tokens], choose, tp=2)
    check_answers(four_ranks, kind, [0, tokens], choose, tp=2)


@pytest.mark.parametrize("tp", [1, 2])
def test_choices_that_were_dropped_are_not_sent_and_answered_with_zeros(two_ranks: RankPool, tp: int) -> None:
    for found in two_ranks.run(spread_answers, "ours", [3, 2], nowhere, tp):
        assert not any(tensor.any() for tensor in found.values())


def frozen_and_recomputed(rank: int, size: int, axis: str) -> list[bool]:
    """Nothing but the experts is trained, and the first rank's get no row: it keeps the fewest tensors."""
    module = made_experts("ours")
    apply_expert_parallel(module, init_device_mesh("cpu", (size,), mesh_dim_names=(axis,)))
    hidden, choices, weights = (tensor.detach() for tensor in inputs(rank, 4, on_the_last_rank))
    result = checkpoint(module, hidden, choices, weights, use_reentrant=False)
    result.square().sum().backward()
    return [bool(param.grad.to_local().any()) for param in module.parameters()]


@pytest.mark.parametrize("axis", ["ep", "tp"])
def test_recomputation_meets_on_every_rank(two_ranks: RankPool, axis: str) -> None:
    assert two_ranks.run(frozen_and_recomputed, axis) == [[False] * 3, [True] * 3]


# ---- rows that ranks share


def row_penalties(rank: int, size: int) -> tuple[Tensor, Tensor]:
    config = parse_sections(model={**BALANCED, "bias_rate": 0.0}).config.model
    router = Router(config)  # type: ignore[arg-type]
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=seeded("router")))
    x = torch.randn(3, 8, 32, generator=seeded("x"))
    targets = torch.arange(24.0).view(3, 8)
    if size > 1:
        share_router_sums(router, init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)))
        x, targets = x.chunk(size, 1)[rank], targets.chunk(size, 1)[rank]
    penalty = router(x).penalty
    (penalty * targets.sum(1)).sum().backward()
    grad = whole(router.weight.grad)
    if size > 1:
        dist.all_reduce(grad)
    return penalty.detach(), grad


def test_the_penalty_of_a_row_that_ranks_share_is_that_of_the_whole_row(two_ranks: RankPool) -> None:
    expected = row_penalties(0, 1)
    for found in two_ranks.run(row_penalties):
        torch.testing.assert_close(found, expected)


# ---- what is sent


def evenly(choices: Tensor) -> Tensor:
    return torch.arange(choices.numel()).view_as(choices) % 4


def counted(rank: int, size: int, recompute: bool) -> float:
    module = made_experts("ours")
    apply_expert_parallel(module, init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)))
    given = inputs(rank, 8, evenly)
    with SentBytes() as sent:
        call = partial(checkpoint, module, use_reentrant=False) if recompute else module
        result = call(*given)
        result.square().sum().backward()
    return sent.bytes


@pytest.mark.parametrize("recompute", [False, True])
def test_the_bytes_that_are_sent_are_those_of_the_theory(two_ranks: RankPool, recompute: bool) -> None:
    expected = expert_traffic(
        tokens=8, dim=16, itemsize=4, top_k=2, experts=4, ep=2, mixtures=1, recomputed=int(recompute)
    )
    assert two_ranks.run(counted, recompute) == [expected, expected]


@pytest.fixture
def played_world(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """Rank 3 of many, of which the others are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = request.param
    dist.init_process_group("fake", rank=3, world_size=size, store=FakeStore())  # type: ignore[no-untyped-call]
    yield init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


@pytest.mark.parametrize("played_world", [8, 64, 1024], indirect=True)
def test_a_step_can_be_played_without_values_and_is_balanced_there(played_world: DeviceMesh) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    sizes = {**BALANCED, "experts": 1024, "top_k": 8}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(parse_sections(model=sizes).config.model)
        apply_expert_parallel(model, played_world)
        ids = torch.zeros(2, 64, dtype=torch.int64)
        with SentBytes() as sent:
            model(ids, ids).sum.backward()
    assert sent.bytes == expert_traffic(
        tokens=128, dim=32, itemsize=4, top_k=8, experts=1024, ep=played_world.size(), mixtures=2
    )


# ---- what cannot work


def refusals(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    spread = made_experts("ours")
    apply_expert_parallel(spread, mesh)

    class OneArgument(Experts):
        def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
            return hidden

    config = parse_sections(model=SPARSE).config.model
    said = []
    for attempt in (
        lambda: apply_expert_parallel(nn.Linear(2, 2), mesh),
        lambda: apply_expert_parallel(Experts(3, 4, 4, layers=1), mesh),
        lambda: apply_expert_parallel(OneArgument(4, 4, 4, layers=1), mesh),
        lambda: apply_expert_parallel(spread, mesh),
        lambda: share_router_sums(Router(config), mesh),  # type: ignore[arg-type]
    ):
        with pytest.raises((ConfigError, ModelError)) as caught:
            attempt()
        said.append(str(caught.value))
    return said


def test_what_cannot_be_spread_is_refused_with_the_reason(two_ranks: RankPool) -> None:
    for said in two_ranks.run(refusals):
        none, odd, other, twice, capacity = said
        assert not missing(none, "strategy.layout.ep", "2 ranks", "Linear")
        assert not missing(odd, "strategy.layout.ep", "3 experts", "2 ranks", "1, 3")
        assert not missing(other, "OneArgument", "strategy.layout.ep: 1")
        assert not missing(twice, "Experts", "ep", "fully_shard")
        assert not missing(capacity, "model.capacity_factor", "2 ranks", "strategy.layout.cp: 1")


def test_only_stacks_of_experts_are_experts() -> None:
    with torch.device("meta"):
        ours = build_model(parse_sections(model=SPARSE).config.model)
        theirs = build_model(parse_sections(model=MIXTRAL).config.model)
    assert [*expert_modules(ours)] == ["blocks.1.ffn.experts"]
    assert [*expert_modules(theirs)] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def test_a_shard_of_an_expert_is_a_plain_rectangle_where_it_can_be() -> None:
    place = expert_placement(4)
    assert place(nn.Parameter(torch.empty(2, 8, 4))).dim == 1  # type: ignore[union-attr]
    assert place(nn.Parameter(torch.empty(2, 6, 4))).dim == 2  # type: ignore[union-attr]
    assert place(nn.Parameter(torch.empty(2, 6, 3))) is None
