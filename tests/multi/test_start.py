"""Where a run starts from does not depend on how it is spread."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.config import parse_sections
from plait.distributed import open_world, to_local
from plait.engine import Preparation, prepare_native
from tests.multi import nets
from tests.multi.ranks import RankPool

LLAMA = {"type": "llama", "vocab_size": 53, "dim": 16, "layers": 2, "heads": 2, "seq_len": 8}
STRATEGIES: list[dict[str, Any]] = [{}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "meta_init": False}]


def start(
    rank: int,
    size: int,
    strategies: list[dict[str, Any]],
    sections: dict[str, Any],
    factory: Callable[[], nn.Module] | None = None,
) -> list[dict[str, Tensor]]:
    """The first weights and buffers, whole, for each strategy."""
    found = []
    for strategy in strategies:
        config = parse_sections(strategy=strategy, seed=11, **sections).config
        engine = prepare_native(Preparation(config, open_world(config), model=factory))
        found.append({name: whole(t) for name, t in engine.state_tensors().items()})
        found[-1] |= {f"buffer.{name}": b.clone() for name, b in engine.model.named_buffers()}
    return found


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def assert_one_start(pools: list[RankPool], sections: dict[str, Any]) -> dict[str, Tensor]:
    expected = start(0, 1, [{}], sections)[0]
    for pool in pools:
        for rank in pool.run(start, STRATEGIES, sections):
            for found in rank:
                assert found.keys() == expected.keys()
                for name, tensor in expected.items():
                    assert torch.equal(found[name], tensor), name
    return expected


@pytest.mark.parametrize("tied", [False, True])
def test_every_layout_starts_from_the_same_bits(two_ranks: RankPool, four_ranks: RankPool, tied: bool) -> None:
    expected = assert_one_start([two_ranks, four_ranks], {"model": {**LLAMA, "tie_embeddings": tied}})
    assert ("model.head.weight" in expected) == (not tied)
    assert all(bool(t.isfinite().all()) for t in expected.values())


def test_statistics_of_batch_norms_are_right_on_every_rank(two_ranks: RankPool) -> None:
    expected = assert_one_start([two_ranks], {"model": {"type": "resnet", "depth": 18, "classes": 3, "stem": "cifar"}})
    assert torch.equal(expected["model.bn1.running_var"], torch.ones(64))
    assert torch.equal(expected["model.bn1.running_mean"], torch.zeros(64))
    assert torch.equal(expected["model.bn1.num_batches_tracked"], torch.tensor(0))
    assert torch.equal(expected["model.layer1.0.bn2.weight"], torch.zeros(64))  # a branch starts as nothing


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen", "tiny-gpt2"])
def test_transformers_models_start_alike_with_their_tables(two_ranks: RankPool, name: str) -> None:
    pytest.importorskip("transformers")
    from plait.models.hf import PRESETS

    expected = assert_one_start([two_ranks], {"model": {"type": "hf", **PRESETS[name]}})
    if name != "tiny-gpt2":
        table = expected["buffer.model.rotary_emb.inv_freq"]
        assert torch.allclose(table, 10000.0 ** (-torch.arange(0, 16, 2) / 16))


def test_a_model_that_initialises_itself_starts_alike_everywhere(two_ranks: RankPool) -> None:
    (expected,) = start(0, 1, [{}], {}, nets.OwnStartNet)
    for rank in two_ranks.run(start, [{}, {"zero": 1}, {"zero": 2}, {"zero": 3}], {}, nets.OwnStartNet):
        for found in rank:
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert torch.equal(expected["model.layers.0.norm.weight"], torch.ones(nets.DIM))
    assert torch.equal(expected["model.mask"], torch.tril(torch.ones(nets.DIM, nets.DIM)))
    assert 0 < expected["model.layers.1.down.weight"].std() < 0.01 < expected["model.layers.1.up.weight"].std()
    assert not torch.equal(expected["model.layers.0.up.weight"], expected["model.layers.1.up.weight"])


@pytest.mark.parametrize("zero", [0, 3])
def test_a_model_that_initialises_itself_starts_alike_in_stages(two_ranks: RankPool, zero: int) -> None:
    (expected,) = start(0, 1, [{}], {}, nets.own_start_stack)
    answers = two_ranks.run(start, [{"zero": zero, "layout": {"pp": 2}}], {}, nets.own_start_stack)
    found = answers[0][0] | answers[1][0]
    assert len(answers[0][0]) < len(expected) == len(found)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def tied_start(rank: int, size: int, strategy: dict[str, Any], factory: Callable[[], nn.Module]) -> tuple[bool, Tensor]:
    config = parse_sections(strategy=strategy, seed=2).config
    engine = prepare_native(Preparation(config, open_world(config), model=factory))
    model: Any = engine.model
    engine.train_step([nets.rows(rank, 3)])
    return model.embedding.weight is model.unembedding.weight, whole(engine.state_tensors()["model.embedding.weight"])


@pytest.mark.parametrize("strategy", [{}, {"zero": 1}, {"zero": 3}], ids=str)
def test_tied_weights_are_one_tensor_after_building_and_training(two_ranks: RankPool, strategy: Any) -> None:
    answers = [tied_start(0, 1, {}, nets.TiedNet), *two_ranks.run(tied_start, strategy, nets.TiedNet)]
    assert all(tied for tied, _ in answers)
    assert torch.equal(answers[1][1], answers[2][1])


def own_values(rank: int, size: int, strategy: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rank r brings a model full of r + 1, in parameters and buffers of several kinds."""
    model = nets.Net()
    model.register_buffer("mask", torch.zeros(3, dtype=torch.bool) if rank else torch.tensor([True, False, True]))
    model.register_buffer("count", torch.tensor(rank + 5))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(rank + 1)
    config = parse_sections(strategy=strategy).config
    engine = prepare_native(Preparation(config, open_world(config), model=model))
    return {n: whole(t) for n, t in engine.state_tensors().items()}, dict(model.named_buffers())


@pytest.mark.parametrize("strategy", [{}, {"zero": 1}, {"zero": 3}], ids=str)
def test_models_brought_by_the_ranks_become_that_of_rank_0(two_ranks: RankPool, strategy: Any) -> None:
    for state, buffers in two_ranks.run(own_values, strategy):
        assert all(bool((t == 1).all()) for n, t in state.items() if n not in ("model.mask", "model.count"))
        assert buffers["mask"].tolist() == [True, False, True]
        assert buffers["count"].item() == 5


# ---- memory


def peak_growth(rank: int, size: int, strategy: dict[str, Any], model: Any) -> tuple[int, int, int]:
    """Bytes by which building raised this process's peak; the bytes of the model, and of this rank's part.

    The model is a section, or a function that makes it.
    """
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _kib(status.read_text(), "VmRSS")
    factory, sections = (model, {}) if callable(model) else (None, {"model": model})
    config = parse_sections(strategy=strategy, optim={"type": "SGD", "lr": 0.1}, **sections).config
    engine = prepare_native(Preparation(config, open_world(config), model=factory))
    peak = _kib(status.read_text(), "VmHWM")
    params = list(engine.model.parameters())
    own = sum(to_local(p.detach()).numel() for p in params) * 4
    return (peak - before) * 1024, sum(p.numel() for p in params) * 4, own


def _kib(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found.group(1))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_no_rank_ever_holds_the_whole_model(four_ranks: RankPool) -> None:
    model = {"type": "llama", "vocab_size": 4096, "dim": 512, "layers": 14, "heads": 8, "seq_len": 64}
    for growth, size, own in four_ranks.run(peak_growth, {"zero": 3}, model):
        assert size > 190e6
        assert own < size / 3.9
        assert growth < size / 2  # its part, one module, and what the allocator keeps
    for growth, size, _ in four_ranks.run(peak_growth, {"zero": 3, "meta_init": False}, model):
        assert growth > 0.9 * size  # the measure does see a whole model


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_no_rank_ever_holds_a_whole_model_that_initialises_itself(four_ranks: RankPool) -> None:
    model = partial(nets.own_start_stack, width=1024, layers=48)
    for growth, size, own in four_ranks.run(peak_growth, {"zero": 3}, model):
        assert size > 190e6
        assert own < size / 3.9
        assert growth < size / 2
