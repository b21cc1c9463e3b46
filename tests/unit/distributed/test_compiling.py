"""`torch.compile`: the same numbers, the same names, and a way out when it fails."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.refusals import missing, refused
from torch import Tensor
from torch._dynamo import register_backend

from plait.config import parse_sections
from plait.distributed import open_world
from plait.distributed.compile import reason_not_to_compile
from plait.engine import Preparation, prepare_native
from plait.errors import ConfigError

MODEL = {"type": "llama", "vocab_size": 31, "dim": 16, "layers": 2, "heads": 2, "seq_len": 8}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batches(count: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 31, (count, 2, 9), generator=generator)
    return [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]} for rows in ids]


def train(strategy: dict[str, Any], **sections: Any) -> tuple[list[float], dict[str, Tensor], list[str]]:
    said: list[str] = []
    config = parse_sections(model=MODEL, strategy=strategy, seed=1, device="cpu", **sections).config
    engine = prepare_native(Preparation(config, open_world(config), log=said.append))
    losses = [engine.train_step([batch]).loss for batch in batches()]
    losses.append(engine.evaluate_micro_batch(batches()[0]).loss_sum)
    return losses, engine.state_tensors(), said


def assert_same_training(strategy: dict[str, Any], **sections: Any) -> list[str]:
    losses, state, _ = train({}, **sections)
    found_losses, found, said = train(strategy, **sections)
    assert found_losses == pytest.approx(losses, rel=1e-4)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
    return said


@pytest.mark.parametrize("scope", ["auto", "model", "block"])
def test_a_compiled_model_trains_the_same_under_the_same_names(scope: str) -> None:
    assert assert_same_training({"compile": {"backend": "aot_eager", "scope": scope}}) == []


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_compiled_blocks_can_recompute(mode: str) -> None:
    strategy = {"compile": {"backend": "aot_eager", "scope": "block"}, "recompute": mode}
    assert assert_same_training(strategy) == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler here")
def test_inductor_trains_the_same() -> None:
    assert assert_same_training({"compile": {"scope": "block"}}) == []


def test_each_block_is_compiled_by_itself_or_the_model_as_a_whole() -> None:
    graphs: list[int] = []

    @register_backend(name="plait_test_counting")
    def counting(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    sizes = {}
    for scope in ("model", "block"):
        torch._dynamo.reset()
        graphs.clear()
        train({"compile": {"backend": "plait_test_counting", "scope": scope}})
        sizes[scope] = max(graphs)
    assert sizes["model"] > 1.5 * sizes["block"]


def test_a_backend_that_fails_is_given_up_with_its_reason_and_training_goes_on() -> None:
    @register_backend(name="plait_test_failing")
    def failing(_graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        raise ValueError("no such instruction")

    said = assert_same_training({"compile": {"backend": "plait_test_failing"}})
    assert len(said) == 1
    assert not missing(said[0], "torch.compile", "ValueError: no such instruction")


def test_a_model_that_cannot_be_one_graph_is_given_up_under_fullgraph() -> None:
    import copy

    from plait.models import build_model

    class Breaking(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build_model(parse_sections(model=MODEL).config.model)  # type: ignore[arg-type]

        def forward(self, **batch: Tensor) -> Any:
            torch._dynamo.graph_break()
            return self.inner(**batch)

    torch.manual_seed(0)
    model = Breaking()
    said: list[str] = []
    losses = []
    for compile_section in ({"backend": "aot_eager", "fullgraph": True}, False):
        config = parse_sections(strategy={"compile": compile_section}, device="cpu").config
        engine = prepare_native(Preparation(config, open_world(config), model=copy.deepcopy(model), log=said.append))
        losses.append([engine.train_step([batch]).loss for batch in batches()])
    assert losses[0] == losses[1]
    assert len(said) == 1
    assert not missing(said[0], "torch.compile", "Unsupported", "graph_break")


def test_an_unknown_backend_is_refused_by_name() -> None:
    with refused(ConfigError, "'inducter'", "inductor", key="strategy.compile.backend"):
        train({"compile": {"backend": "inducter"}})


def test_a_missing_compiler_is_known_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    section = parse_sections(strategy={"compile": True}).config.strategy.compile
    assert "C++" in (reason_not_to_compile(section, torch.device("cpu")) or "")
    losses, _, said = train({"compile": True})
    assert len(said) == 1
    assert not missing(said[0], "strategy.compile", "C++")
    assert losses == train({})[0]


def test_other_backends_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    section = parse_sections(strategy={"compile": {"backend": "aot_eager"}}).config.strategy.compile
    assert reason_not_to_compile(section, torch.device("cpu")) is None
