"""Models that initialise themselves in their constructors, built without values."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.init import trunc_normal_
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from plait.config import parse_sections
from plait.distributed.deferred_init import ConstructionRecord, Replay
from plait.distributed.fake import fake_world
from plait.distributed.materialize import Initializer, InitializerChain, find_initializer, give_storage, initialize
from plait.engine import Preparation, prepare_native
from plait.engine.construction import build_module

CPU = torch.device("cpu")
DIM, VOCAB, LAYERS = 64, 300, 2


def on_meta(build: Callable[[], nn.Module]) -> tuple[nn.Module, Initializer | None]:
    with torch.device("meta"), ConstructionRecord() as built:
        model = build()
    return model, find_initializer(model, built)


def replayed(build: Callable[[], nn.Module], seed: int, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Parameters and buffers as a replay makes them; what it leaves out is 77."""
    model, initializer = on_meta(build)
    assert isinstance(initializer, Replay)
    if dtype is not None:
        model.to(dtype)
    give_storage(model, CPU)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(77)
    initialize(model, initializer, seed=seed, device=CPU)
    return tensors_of(model)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same_distribution(found: Tensor, real: Tensor) -> None:
    """Fails for equal distributions with a probability below 1e-9, whatever these are.

    By the inequality of Dvoretzky, Kiefer and Wolfowitz: the shares of n values below any bound are all within e of
    their expectations, except with a probability of 2 exp(-2 n e²).
    """
    assert found.shape == real.shape
    assert found.dtype == real.dtype
    a, b = found.detach().flatten().double().sort().values, real.detach().flatten().double().sort().values
    if a.numel() == 0 or bool((b == b[0]).all()):
        assert torch.equal(a, b)  # a constant
        return
    bounds = torch.cat((a, b))
    shares = [torch.searchsorted(each, bounds, right=True) / each.numel() for each in (a, b)]
    allowed = 2 * math.sqrt(math.log(4 / 1e-10) / (2 * a.numel()))
    assert float((shares[0] - shares[1]).abs().max()) < allowed


# ---- models


class OwnNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = OwnNorm(DIM)
        self.attn = nn.Linear(DIM, 3 * DIM)
        self.c_proj = nn.Linear(DIM, DIM)
        self.register_buffer("bias", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))


class NanoGpt(nn.Module):
    """As nanoGPT is written."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(40, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, param in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(param, std=0.02 / math.sqrt(4 * LAYERS))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)


class PublicGpt(NanoGpt):
    """Calls the same method by a name that Plait knows. It says nothing of the second deviation, nor of norms."""

    def init_weights(self, module: nn.Module) -> None:
        self._init_weights(module)


class Truncated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        trunc_normal_(self.wide.weight, std=0.02)
        trunc_normal_(self.narrow.weight, mean=0.01, std=0.02, a=-0.01, b=0.01)
        nn.init.kaiming_normal_(self.narrow.bias.view(DIM, 1))


class Padded(nn.Module):
    """Rows that are set afterwards, by torch and by the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, DIM, padding_idx=3)
        self.words = nn.Embedding(VOCAB, DIM)
        nn.init.xavier_uniform_(self.words.weight)
        with torch.no_grad():
            self.words.weight[5] = 0.5
            self.words.weight[7:9].zero_()
            self.words.weight[:, 1].mul_(3).add_(1)


class Computed(nn.Module):
    """Values that come out of operations: products of draws, tables, numbers of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(0.02 * torch.randn(1, 40, DIM))
        self.part = nn.Parameter(torch.randn(2 * VOCAB, 4)[:VOCAB])
        self.temperature = nn.Parameter(torch.ones(1) * math.log(1 / 0.07))
        self.gates = nn.Parameter(torch.tensor([0.25, 0.5]))
        self.frozen = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        frequencies = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        angles = torch.outer(torch.arange(16), frequencies)
        self.register_buffer("cos", torch.cat((angles, angles), dim=-1).cos(), persistent=False)
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("count", torch.tensor(4))
        self.register_buffer("grid", torch.as_tensor([[0.5, 1], [2, 3]]).mul_(3))
        self.register_buffer("nothing", None)


class Turned(nn.Module):
    """Parameters that are no contiguous tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Parameter(torch.rand(DIM, 30).t())
        self.written = nn.Parameter(torch.empty(DIM, 30).t())
        nn.init.normal_(self.written[:, 1:])
        nn.init.zeros_(self.written[:, 0])


class Spread(nn.Module):
    """Functions of `nn.init` that do nothing on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(DIM, DIM)
        self.holes = nn.Linear(DIM, DIM)
        self.same = nn.Conv1d(6, 6, 3)
        nn.init.orthogonal_(self.square.weight, gain=2)
        nn.init.sparse_(self.holes.weight, sparsity=0.25)
        nn.init.dirac_(self.same.weight)


def half_precision() -> nn.Module:
    return NanoGpt().to(torch.bfloat16)


def normed() -> nn.Module:
    return weight_norm(nn.Linear(DIM, VOCAB))


OWN: list[Callable[[], nn.Module]] = [
    NanoGpt,
    PublicGpt,
    Truncated,
    Padded,
    Computed,
    Turned,
    Spread,
    half_precision,
    normed,
]


@pytest.mark.parametrize("build", OWN)
def test_values_have_the_distribution_that_the_constructor_gives_them(build: Callable[[], nn.Module]) -> None:
    found, real = replayed(build, seed=random.randrange(2**31)), tensors_of(build())
    assert found.keys() == real.keys()
    for name, tensor in real.items():
        if tensor.is_complex():
            assert torch.equal(found[name], tensor)
        else:
            assert_same_distribution(found[name], tensor)


def test_the_measure_sees_another_deviation() -> None:
    with pytest.raises(AssertionError):
        assert_same_distribution(torch.randn(DIM, DIM), 2 * torch.randn(DIM, DIM))


def test_what_has_no_chance_in_it_is_equal_to_the_bit() -> None:
    found, real = replayed(Computed, seed=1), tensors_of(Computed())
    for name in ("temperature", "gates", "frozen", "cos", "rotation", "count", "grid"):
        assert torch.equal(found[name], real[name]), name
    padded = replayed(Padded, seed=1)
    assert not padded["table.weight"][3].any()
    assert bool(padded["table.weight"][2].all())
    assert padded["words.weight"][5, 1] == 2.5
    assert bool((padded["words.weight"][5, 2:] == 0.5).all())
    assert bool((padded["words.weight"][7:9, 1] == 1).all())


def test_an_orthogonal_matrix_is_one() -> None:
    square = replayed(Spread, seed=3)["square.weight"].detach().double()
    torch.testing.assert_close(square @ square.T, 4 * torch.eye(DIM).double(), atol=1e-4, rtol=0)


def test_two_tensors_of_a_module_that_come_from_one_draw_stay_together() -> None:
    found = replayed(normed, seed=4)
    length, direction = (found[f"parametrizations.weight.original{n}"].detach() for n in (0, 1))
    torch.testing.assert_close(direction.norm(dim=1, keepdim=True), length)


def test_values_depend_on_seed_and_name_alone() -> None:
    first, again, other = replayed(NanoGpt, 5), replayed(NanoGpt, 5), replayed(NanoGpt, 6)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    drawn = [name for name, tensor in first.items() if bool(tensor.detach().std() > 0) and "bias" not in name]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    values = [first[name].detach().flatten()[:50] for name in drawn]
    assert len({tuple(each.tolist()) for each in values}) == len(drawn)


@pytest.mark.parametrize("build", OWN)
def test_a_second_time_gives_the_same_values(build: Callable[[], nn.Module]) -> None:
    model, initializer = on_meta(build)
    assert initializer is not None
    give_storage(model, CPU)
    states = []
    for _ in range(2):
        initialize(model, initializer, seed=3, device=CPU)
        states.append(copy.deepcopy(tensors_of(model)))
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_tied_weights_stay_one_tensor() -> None:
    model, initializer = on_meta(NanoGpt)
    assert initializer is not None
    give_storage(model, CPU)
    initialize(model, initializer, seed=3, device=CPU)
    assert isinstance(model, NanoGpt)
    assert model.wte.weight is model.lm_head.weight


def test_in_a_smaller_format_they_are_the_same_values_rounded() -> None:
    whole, rounded = replayed(NanoGpt, 8), replayed(NanoGpt, 8, torch.bfloat16)
    for name, tensor in rounded.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, whole[name].bfloat16()), name


def test_what_is_written_over_is_not_drawn() -> None:
    """Half of the work, where a model gives torch's layers values of its own."""
    build = lambda: nn.init.normal_(nn.Linear(4, 4, bias=False).weight)  # noqa: E731
    with torch.device("meta"), ConstructionRecord() as built:
        weight = build()
    place = built.region_of(weight)
    assert place is not None
    (step,) = built.ops_to(place) or ()
    assert step.function is torch.ops.aten.normal_.default


# ---- an `init_weights` of the model's own


class Unasked(Truncated):
    """Has an `init_weights` that the constructor does not call, and that fills some of its tensors."""

    def init_weights(self, module: nn.Module) -> None:
        if module is self.wide:
            nn.init.constant_(self.wide.weight, 0.5)


def test_a_partial_init_weights_comes_after_what_the_constructor_did() -> None:
    model, initializer = on_meta(Unasked)
    assert isinstance(initializer, InitializerChain)
    give_storage(model, CPU)
    initialize(model, initializer, seed=2, device=CPU)
    found, real = tensors_of(model), tensors_of(Truncated())
    assert bool((found["wide.weight"] == 0.5).all())
    assert_same_distribution(found["narrow.weight"], real["narrow.weight"])


# ---- what cannot be done again


class FromNumpy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(np.eye(4)))


class OwnGenerator(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        nn.init.normal_(self.weight, generator=torch.Generator().manual_seed(3))


class Twins(nn.Module):
    """Two layers that start equal."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = copy.deepcopy(self.first)


class Asks(nn.Linear):
    """Leaves something undone on the meta device."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        if not self.weight.is_meta:
            nn.init.zeros_(self.weight)


class OneMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = torch.zeros(4)
        self.first, self.second = nn.Parameter(both), nn.Parameter(both)


class OwnKind(nn.Parameter):
    """A parameter that is not torch's."""


class Special(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = OwnKind(torch.zeros(4))


class Listed(nn.Linear):
    """Elements that are chosen by a list of numbers, which is lost."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        with torch.no_grad():
            self.weight[[0, 2]] = 1.0


class Unwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))


def spectral() -> nn.Module:
    return spectral_norm(nn.Linear(4, 4))


LOST = [FromNumpy, OwnGenerator, Twins, Asks, OneMemory, Special, Listed, Unwritten, spectral]


@pytest.mark.parametrize("build", [*LOST, lambda: nn.LazyLinear(4)])
def test_what_cannot_be_done_again_is_built_for_real(build: Callable[[], nn.Module]) -> None:
    assert on_meta(build)[1] is None


def test_a_real_build_has_what_a_replay_would_lose() -> None:
    config = parse_sections(device="cpu").config
    for build in (FromNumpy, OwnGenerator, Twins, Asks):
        model, initializer = build_module(config, build)
        assert initializer is None
        torch.manual_seed(0)
        expected: Any = build()
        if isinstance(model, Twins):
            assert torch.equal(model.first.weight, model.second.weight)
        else:
            assert torch.equal(model.get_parameter("weight"), expected.weight)


# ---- as runs use it


class ByChance(nn.Linear):
    """A constant that Python's generator chooses."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        nn.init.constant_(self.weight, random.random())


def test_numbers_that_python_draws_come_from_the_runs_seed() -> None:
    config = parse_sections(seed=4, device="cpu").config
    found = []
    for state in (1, 2):
        random.seed(state)  # as ranks may differ
        model, initializer = build_module(config, ByChance)
        assert initializer is not None
        give_storage(model, CPU)
        initialize(model, initializer, seed=4, device=CPU)
        found.append(model.get_parameter("weight").detach().clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("build", [NanoGpt, Truncated, Computed, Spread])
@pytest.mark.parametrize("strategy", [{}, {"zero": 3}], ids=str)
def test_a_plan_runs_the_same_code(build: type[nn.Module], strategy: dict[str, Any]) -> None:
    config = parse_sections(strategy=strategy, device="cpu").config
    with fake_world(config, rank=0, size=2, device="cpu") as world:
        assert isinstance(build_module(config, build)[1], Replay)
        engine = prepare_native(Preparation(config, world, model=build))
        assert not any(param.is_meta for param in engine.model.parameters())
