"""Promise 2, all of it: what any layout saves, any layout loads, to the bit, with the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from plait.checkpoint import entries, load_into, open_checkpoint
from tests.multi.ranks import RankPool
from tests.multi.saving import make_engine, train_and_save

LAYOUTS: dict[str, tuple[int, Any]] = {
    "one": (1, {}),
    **{f"{name} on 2": (2, name) for name in ("ddp", "zero1", "zero2", "zero3")},
    **{f"{name} on 4": (4, name) for name in ("ddp", "zero1", "zero2", "zero3")},
    "hybrid on 4": (4, {"zero": 3, "layout": {"dp_replicate": 2, "dp_shard": 2}}),
    "zero3 on 3": (3, "zero3"),
    "tp2": (2, {"layout": {"tp": 2}}),
    "pp2": (2, {"layout": {"pp": 2}}),
    "zero3 × tp2": (4, {"zero": 3, "layout": {"tp": 2}}),
    "zero1 × pp2": (4, {"zero": 1, "layout": {"pp": 2}}),
    "tp2 × pp2": (4, {"layout": {"tp": 2, "pp": 2}}),
}
"""Name → number of ranks, strategy."""

Saved = tuple[str, str]
"""A checkpoint, and a file of the values in it."""


def load_all(rank: int, size: int, strategy: Any, targets: dict[str, Saved]) -> dict[str, tuple[set[str], list[str]]]:
    """Load one checkpoint after another into an engine with other weights: what was loaded, and what is wrong of it."""
    engine = make_engine(strategy, seed=99)
    found = {}
    places: dict[str, Tensor] = {}
    for name, (target, values) in targets.items():
        checkpoint = open_checkpoint(Path(target))
        engine.allocate_optimizer_state(entries(checkpoint.index, "optim."))
        tensors = engine.state_tensors()
        for tensor in tensors.values():
            tensor.zero_()
        load_into(checkpoint, tensors, world=engine.world)
        expected = load_file(values)
        places = places or {key: places_of(tensor, rank) for key, tensor in tensors.items()}
        wrong = [key for key in tensors if key in expected and not is_part(tensors[key], expected[key], places[key])]
        found[name] = set(tensors), wrong
    return found


def places_of(tensor: Tensor, rank: int) -> Tensor:
    """Which elements of the whole this rank holds, in the order in which it does."""
    if not isinstance(tensor, DTensor):
        return torch.arange(tensor.numel())
    numbered = torch.zeros_like(tensor, dtype=torch.int64)
    local = numbered.to_local()
    first = (rank + 1) * tensor.numel()  # no other rank has these numbers
    local.copy_(torch.arange(first, first + local.numel()).view_as(local))
    whole = numbered.full_tensor().flatten()
    mine = ((whole >= first) & (whole < first + local.numel())).nonzero().flatten()
    return mine[whole[mine].argsort()]


def is_part(tensor: Tensor, whole: Tensor, places: Tensor) -> bool:
    """Whether this rank holds its part of the whole, to the bit."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.shape == whole.shape and torch.equal(local.flatten(), whole.flatten()[places])


@pytest.fixture(scope="module")
def pools(two_ranks: RankPool, four_ranks: RankPool) -> Iterator[dict[int, RankPool]]:
    three_ranks = RankPool(3)
    yield {2: two_ranks, 3: three_ranks, 4: four_ranks}
    three_ranks.close()


def run(pools: dict[int, RankPool], size: int, function: Any, *args: Any) -> list[Any]:
    return pools[size].run(function, *args) if size > 1 else [function(0, 1, *args)]


@pytest.fixture(scope="module")
def saved(pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """For every layout, a checkpoint of values that no other has, and those values."""
    folder = tmp_path_factory.mktemp("pairs")
    made = {}
    for seed, (name, (size, strategy)) in enumerate(LAYOUTS.items()):
        target, values = folder / f"step-{seed:08d}", folder / f"values-{seed}.safetensors"
        # Each rank of a pipeline has its own layers.
        parts = run(pools, size, train_and_save, strategy, str(target), seed)
        save_file({key: tensor.contiguous() for part in parts for key, tensor in part.items()}, values)
        made[name] = str(target), str(values)
    return made


@pytest.mark.parametrize("after", LAYOUTS)
def test_what_any_layout_saved_is_loaded_to_the_bit(
    pools: dict[int, RankPool], saved: dict[str, Saved], after: str
) -> None:
    size, strategy = LAYOUTS[after]
    ranks = run(pools, size, load_all, strategy, saved)
    for before, (_, values) in saved.items():
        expected = load_file(values).keys()
        assert any(name.startswith("optim.") for name in expected)
        assert {name for found in ranks for name in found[before][0]} == expected
        for rank, found in enumerate(ranks):
            assert not found[before][1], f"{before} → {after}, rank {rank}: {found[before][1]}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_writes_its_share_and_nothing_is_written_twice(saved: dict[str, Saved], name: str) -> None:
    target, tensors = saved[name][0], load_file(saved[name][1])
    checkpoint = open_checkpoint(Path(target))
    files = [record.bytes for file, record in checkpoint.manifest.files.items() if file.startswith("rank-")]
    values = sum(tensor.nbytes for tensor in tensors.values())
    heads = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in Path(target).glob("rank-*"))
    assert len(files) == LAYOUTS[name][0]
    assert sum(files) - heads == values
    assert max(files) < 2.5 * min(files)  # the stages of a pipeline are not alike
