"""Feed-forward layers in tiles of tokens: the numbers of the whole layer, without its inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.config import check, parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from plait.errors import ConfigError, ModelError
from tests.multi.parity import MODEL, Trace, assert_same, run_steps, token_batches
from tests.multi.ranks import RankPool
from tests.refusals import refused

STEPS = token_batches(41, 4)[:2]  # 12 tokens a sequence
TILES = {"tiles": {"names": ["blocks.*.ffn"], "tokens": 5}}


def run_strategies(rank: int, size: int, strategies: list[Any]) -> list[Trace]:
    return [run_steps(rank, size, {"strategy": strategy}, STEPS) for strategy in strategies]


@pytest.mark.parametrize(
    "extra",
    [{}, {"recompute": "full"}, {"recompute": {"mode": "selective"}}, {"offload": {"activations": "all"}}],
    ids=str,
)
@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_the_step_is_that_of_whole_layers(model: str, extra: dict[str, Any]) -> None:
    described = MODEL if model == "llama" else {**{k: v for k, v in MODEL.items() if k != "kv_heads"}, "type": "gpt"}
    whole = run_steps(0, 1, {"model": described}, STEPS)
    tiled = run_steps(0, 1, {"model": described, "strategy": {**TILES, **extra}}, STEPS)
    assert_same(tiled, whole, tolerance=1e-5, noise="k.bias" if model == "gpt" else "")


def test_every_stage_and_layout_agrees(two_ranks: RankPool) -> None:
    expected = run_steps(0, 1, {}, STEPS)
    for traces in two_ranks.run(run_strategies, [{**TILES, "zero": 0}, {**TILES, "zero": 3}]):
        for found in traces:
            assert_same(found, expected, tolerance=1e-5)


def widest_saved(strategy: dict[str, Any]) -> int:
    """Bytes that autograd keeps of one forward pass, weights aside."""
    config = parse_sections(model={**MODEL, "ffn_dim": 512}, strategy=strategy, seed=3).config
    engine = prepare_native(Preparation(config, open_world(config)))
    own = {tensor.untyped_storage().data_ptr() for tensor in engine.model.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine(STEPS[0][0])
    return sum(held.values())


def test_the_inside_of_a_layer_is_not_kept() -> None:
    assert widest_saved(TILES) < 0.4 * widest_saved({})


@pytest.mark.parametrize(
    ("names", "error", "named"),
    [
        (["blocks.*.mlp"], ConfigError, ["strategy.tiles.names", "blocks.0.ffn"]),
        (["blocks.0.attention"], ModelError, ["tensor", "tokens"]),
        (["embedding"], ModelError, ["row", "token"]),
    ],
)
def test_a_layer_that_cannot_be_cut_is_refused(names: list[str], error: type[Exception], named: list[str]) -> None:
    config = parse_sections(model=MODEL, strategy={"tiles": {"names": names, "tokens": 1}}).config
    with refused(error, "strategy.tiles", f"'{names[0]}'", *named):
        prepare_native(Preparation(config, open_world(config))).train_step([STEPS[0][0]])


class Mixer(torch.nn.Module):
    """Looks at all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x.mean(-2, keepdim=True)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = Mixer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixer(x).square().mean()


def test_a_layer_that_mixes_tokens_is_found_out_at_the_first_call() -> None:
    config = parse_sections(strategy={"tiles": {"names": ["mixer"], "tokens": 2}}).config
    engine = prepare_native(Preparation(config, open_world(config), model=Net))
    with refused(ModelError, "strategy.tiles", "'mixer'", "other tokens"):
        engine.train_step([{"x": torch.randn(2, 6, 8)}])


class Flattening(torch.nn.Linear):
    """Joins rows and tokens, as the mixtures of `transformers` do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(-1, x.shape[-1])).view(x.shape).tanh()


def test_a_layer_that_joins_rows_and_tokens_is_given_tiles_it_can_join() -> None:
    losses = {}
    batches = torch.randn(2, 3, 7, 8)
    for name, strategy in {"whole": {}, "tiles": {"tiles": {"names": ["0"], "tokens": 3}}}.items():
        config = parse_sections(strategy=strategy, optim={"type": "SGD", "lr": 1.0}).config

        def loss(outputs: Any, _: Any) -> torch.Tensor:
            value: torch.Tensor = outputs.square().mean()
            return value

        torch.manual_seed(1)
        model = torch.nn.Sequential(Flattening(8, 8))
        engine = prepare_native(Preparation(config, open_world(config), model=model, loss_function=loss))
        losses[name] = [engine.train_step([(x,)]).loss for x in batches]
    assert losses["tiles"] == pytest.approx(losses["whole"], rel=1e-5)


def test_a_size_without_layers_is_refused() -> None:
    config = parse_sections(model=MODEL, strategy={"tiles": {"tokens": 5}}).config
    with refused(ConfigError, "5", key="strategy.tiles.tokens"):
        check(config, has_val=False, require_length=False)
