"""What a constructor does to its parameters beside their values, against a loop in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize, weight_norm
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrizations import weight_norm as parametrized_weight_norm

from plait.config import parse_sections
from plait.data import MicroBatch
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from plait.errors import ModelError
from tests.multi.parity import STEPS, Trace, assert_same, full_tensors
from tests.multi.ranks import RankFailedError, RankPool
from tests.refusals import refused

DIM = 6
STRATEGIES: dict[str, dict[str, Any]] = {"ddp": {}, "zero3": {"zero": 3}}
OPTIM = {"type": "SGD", "lr": 0.1}


class Net(nn.Module):
    """Two layers and a loss; the models below put something on them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.last = nn.Linear(DIM, DIM, bias=False)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x)).square().mean()


class Attributes(Net):
    """The forward pass asks for what was set on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight.scale = 3.0  # type: ignore[attr-defined]
        self.first.bias.is_norm = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.last.weight, "scale", 1.0)


class Spared(Net):
    """An initializer that leaves marked parameters alone, as state-space models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first.bias._no_reinit = True  # type: ignore[attr-defined]
        with torch.no_grad():
            self.first.bias.fill_(0.5)

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3)
            if module.bias is not None and not getattr(module.bias, "_no_reinit", False):
                nn.init.zeros_(module.bias)


class Parametrized(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrized_weight_norm(self.first)
        parametrize.register_parametrization(self.last, "weight", Doubled())


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class OldWeightNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.first)


class Spectral(Net):
    """Its vectors are random, and made from the weight."""

    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.first)


class SharedBuffer(Net):
    """Two modules have one buffer: what the first writes, the second reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.first.register_buffer("seen", self.seen, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.add_(1)
        return super().forward(x) * self.first.seen


class Views(Net):
    """Values written through views, and buffers that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.first.weight[:2])
        nn.init.constant_(self.first.weight.T[3], 0.25)
        self.register_buffer("table", torch.arange(DIM).float(), persistent=False)

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x + self.table)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.first.weight


class Closure(Net):
    """A tensor that only a closure has: on the meta device it would stay there."""

    def __init__(self) -> None:
        super().__init__()
        scale = torch.full((DIM,), 2.0)
        self.scaled: Callable[[Tensor], Tensor] = lambda x: x * scale

    def hidden(self, x: Tensor) -> Tensor:
        return self.scaled(super().hidden(x))


class Recurrent(Net):
    """torch's RNNs have a list of their own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(DIM, DIM, batch_first=True)

    def hidden(self, x: Tensor) -> Tensor:
        found: Tensor = self.rnn(super().hidden(x)[:, None])[0][:, 0]
        return found


class Hooked(Net):
    """A hook that only the whole gradient of a step fits: it is not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]
        self.first.bias.register_post_accumulate_grad_hook(_halve)  # type: ignore[no-untyped-call]


def _halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


class InAList(Net):
    """A parameter that the forward pass takes from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.penalized = [self.last.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.penalized[0].square().sum()


class Marked(nn.Parameter):
    """A class of its own."""


class Subclass(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight = Marked(self.last.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if isinstance(self.last.weight, Marked) else 1.0)


class CommonMemory(Net):
    """Two parameters in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight = nn.Parameter(self.first.weight.detach()[:, :])


KEPT: list[type[Net]] = [
    Attributes, Spared, Parametrized, OldWeightNorm, Spectral, SharedBuffer, Views, Tied, Closure, Recurrent,
]  # fmt: skip


def batches() -> list[list[Tensor]]:
    """Two equal micro-batches for each step."""
    generator = torch.Generator().manual_seed(11)
    return [[torch.randn(4, DIM, generator=generator) for _ in range(2)] for _ in range(STEPS)]


def train(rank: int, size: int, build: Callable[[], Net], strategy: dict[str, Any], said: Any = None) -> Any:
    """The tensors before and after some steps, and what was said."""
    config = parse_sections(seed=3, optim=OPTIM, strategy=strategy).config
    messages: list[str] = []
    engine = prepare_native(Preparation(config, open_world(config), model=build, log=messages.append))
    before, trace = full_tensors(engine.state_tensors()), Trace([], [], [], {})
    for step in batches():
        mine = step[rank::size] if size > 1 else [torch.cat(step)]
        result = engine.train_step([MicroBatch(x, len(x)) for x in mine])
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        trace.skipped.append(result.skipped)
    trace.tensors = full_tensors(engine.state_tensors())
    return before, trace, messages


def train_plainly(build: Callable[[], Net], before: dict[str, Tensor]) -> Trace:
    """The same in plain PyTorch, from the same values."""
    model = build()
    values = {name.removeprefix("model."): tensor for name, tensor in before.items() if name.startswith("model.")}
    model.load_state_dict({**model.state_dict(), **values})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = Trace([], [], [], {})
    for step in batches():
        loss = model(torch.cat(step))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        trace.losses.append(float(loss.detach()))
        trace.norms.append(float(norm))
        trace.skipped.append(False)
    held = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    trace.tensors = {name: held[name] for name in before if name in held}
    return trace


def check(before: Any, found: Trace, build: Callable[[], Net]) -> None:
    expected = train_plainly(build, before)
    found.tensors = {name: tensor for name, tensor in found.tensors.items() if name in expected.tensors}
    assert found.tensors
    assert_same(found, expected, tolerance=1e-5)


@pytest.mark.parametrize("build", [*KEPT, Hooked, InAList, Subclass, CommonMemory], ids=lambda each: each.__name__)
def test_one_process_does_as_plain_pytorch(build: type[Net]) -> None:
    before, trace, _ = train(0, 1, build, {})
    check(before, trace, build)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("build", KEPT, ids=lambda each: each.__name__)
def test_several_ranks_do_as_plain_pytorch(two_ranks: RankPool, build: type[Net], name: str) -> None:
    for before, trace, _ in two_ranks.run(train, build, STRATEGIES[name]):
        check(before, trace, build)


@pytest.mark.parametrize("build", [InAList, Subclass], ids=lambda each: each.__name__)
def test_replicated_parameters_stay_what_they_are(two_ranks: RankPool, build: type[Net]) -> None:
    for before, trace, _ in two_ranks.run(train, build, {}):
        check(before, trace, build)


@pytest.mark.parametrize("build", [Hooked, InAList, Subclass, CommonMemory], ids=lambda each: each.__name__)
def test_what_sharding_would_lose_is_refused(two_ranks: RankPool, build: type[Net]) -> None:
    for zero in (1, 2, 3):
        with pytest.raises(Exception, match=r"weight'|first.bias"):
            two_ranks.run(train, build, {"zero": zero})


def test_a_gradient_hook_is_refused_where_it_would_see_a_part(two_ranks: RankPool) -> None:
    with refused(RankFailedError, "first.bias", "hook", "2 ranks"):
        two_ranks.run(train, Hooked, {})
    config = parse_sections(optim=OPTIM).config
    with refused(ModelError, "first.bias", "batch.accumulation"):
        prepare_native(Preparation(config, open_world(config), model=Hooked, accumulation=2))
    recorded = parse_sections(optim=OPTIM, strategy={"graphs": True}).config
    with refused(ModelError, "first.bias", "strategy.graphs"):
        prepare_native(Preparation(recorded, open_world(recorded), model=Hooked))


@pytest.mark.parametrize(
    ("build", "reason"),
    [(Hooked, "first.bias"), (InAList, "penalized"), (Closure, "scaled"), (CommonMemory, "last.weight")],
)
def test_a_model_that_must_be_built_for_real_is_said_to_be(build: type[Net], reason: str) -> None:
    _, _, messages = train(0, 1, build, {})
    (message,) = [text for text in messages if "meta" in text]
    assert reason in message


@pytest.mark.parametrize("strategy", [{}, {"offload": {"optimizer": "cpu"}}, {"offload": {"params": "cpu"}, "zero": 3}])
def test_attributes_are_there_whatever_is_offloaded(strategy: dict[str, Any]) -> None:
    before, trace, _ = train(0, 1, Attributes, strategy)
    check(before, trace, Attributes)
    if dist.is_initialized():  # one process shards, too
        dist.destroy_process_group()


def test_an_initializer_sees_the_marks_on_parameters() -> None:
    before, _, _ = train(0, 1, Spared, {})
    torch.testing.assert_close(before["model.first.bias"], torch.full((DIM,), 0.5))


def test_attributes_stay_on_the_sharded_parameters(two_ranks: RankPool) -> None:
    for zero in (0, 3):
        assert two_ranks.run(_attributes, {"zero": zero}) == [(3.0, True)] * 2


def _attributes(rank: int, size: int, strategy: dict[str, Any]) -> tuple[float, bool]:
    config = parse_sections(seed=3, optim=OPTIM, strategy=strategy).config
    engine = prepare_native(Preparation(config, open_world(config), model=Attributes))
    model: Any = engine.model
    return model.last.weight.scale, model.first.bias.is_norm
